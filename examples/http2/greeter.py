#!/usr/bin/env python3
"""A small gRPC service that says hello, and whether it is well; and its client. Needs grpcio (python3-grpcio).

    greeter.py PORT                                  serves (0 for a free port, which is printed)
    greeter.py --call ADDRESS CERTIFICATE NAME       calls it over TLS

Messages are plain text, so that nothing has to be generated: a real service has a description of its messages. The
standard output is closed when it listens, so that a script can wait for that.
"""

import os
import sys
from concurrent import futures

try:
    import grpc
except ImportError:
    sys.exit("greeter.py needs grpcio: apt install python3-grpcio, or pip install grpcio")

HELLO = "/example.Greeter/Hello"
CHECK = "/grpc.health.v1.Health/Check"

# HealthCheckResponse { status: SERVING }
SERVING = b"\x08\x01"


class Service(grpc.GenericRpcHandler):
    def service(self, call):
        return {
            HELLO: grpc.unary_unary_rpc_method_handler(lambda name, _: b"hello " + name),
            CHECK: grpc.unary_unary_rpc_method_handler(lambda *_: SERVING),
        }.get(call.method)


def serve(port):
    server = grpc.server(futures.ThreadPoolExecutor())
    server.add_generic_rpc_handlers((Service(),))
    print(f"listening on {server.add_insecure_port(f'127.0.0.1:{port}')}", file=sys.stderr, flush=True)
    server.start()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    server.wait_for_termination()


def call(address, certificate, name):
    with open(certificate, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    with grpc.secure_channel(address, credentials) as channel:
        print(channel.unary_unary(HELLO)(name.encode(), timeout=10).decode())


if sys.argv[1] == "--call":
    call(*sys.argv[2:])
else:
    serve(int(sys.argv[1]))
