"""A gRPC service for the tests: says its port, and serves until it is ended."""
import threading
from concurrent import futures

import grpc


def unary(request, context):
    context.set_trailing_metadata((("x-trail", "1"),))
    return b"hello " + request


def failing(request, context):
    context.abort(grpc.StatusCode.NOT_FOUND, "no such thing")


def down(request, context):
    for _ in range(int(request)):
        yield b"x" * 1000


def up(requests, context):
    return str(sum(len(request) for request in requests)).encode()


def both(requests, context):
    for request in requests:
        yield b"re " + request


def silent(request, context):
    """Ends with its call, at the latest after a while."""
    ended = threading.Event()
    context.add_callback(ended.set)
    ended.wait(60)
    return b""


METHODS = {
    "/test.Service/Unary": grpc.unary_unary_rpc_method_handler(unary),
    "/test.Service/Failing": grpc.unary_unary_rpc_method_handler(failing),
    "/test.Service/Down": grpc.unary_stream_rpc_method_handler(down),
    "/test.Service/Up": grpc.stream_unary_rpc_method_handler(up),
    "/test.Service/Both": grpc.stream_stream_rpc_method_handler(both),
    "/test.Service/Silent": grpc.unary_unary_rpc_method_handler(silent),
}


class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        return METHODS.get(details.method)


server = grpc.server(futures.ThreadPoolExecutor(max_workers=16))
server.add_generic_rpc_handlers((Handler(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
server.wait_for_termination()
