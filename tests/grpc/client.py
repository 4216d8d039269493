"""Calls the service of server.py, by way of the address that is the argument, and says what came of it. The second
argument, if there is one, is a file with the authority that vouches for grpc.example over TLS."""
import queue
import sys

import grpc

PATIENCE = 60
if len(sys.argv) > 2:
    with open(sys.argv[2], "rb") as authority:
        credentials = grpc.ssl_channel_credentials(authority.read())
    named = [("grpc.ssl_target_name_override", "grpc.example")]
    channel = grpc.secure_channel(sys.argv[1], credentials, named)
else:
    channel = grpc.insecure_channel(sys.argv[1])


def status(method):
    try:
        channel.unary_unary(method)(b"", timeout=PATIENCE)
    except grpc.RpcError as error:
        return f"{error.code().name} {error.details()}"
    return "OK"


unary = channel.unary_unary("/test.Service/Unary")
answer, call = unary.with_call(b"you", timeout=PATIENCE)
trailers = [f"{name}={value}" for name, value in call.trailing_metadata()]
print(f"unary: {answer.decode()}, trailers {trailers}, {call.code().name}")
print("failing:", status("/test.Service/Failing"))

messages = list(channel.unary_stream("/test.Service/Down")(b"1000", timeout=PATIENCE))
print(f"down: {len(messages)} messages, {sum(len(message) for message in messages)} bytes")

parts = (b"y" * 10000 for _ in range(300))
print("up:", channel.stream_unary("/test.Service/Up")(parts, timeout=PATIENCE).decode())

questions = queue.Queue()
answers = channel.stream_stream("/test.Service/Both")(iter(questions.get, None), timeout=PATIENCE)
heard = []
for number in range(5):
    questions.put(str(number).encode())
    heard.append(next(answers).decode())
questions.put(None)
print("both:", ", ".join(heard + ["end" if not list(answers) else "more"]))

try:
    channel.unary_unary("/test.Service/Silent")(b"", timeout=0.5)
except grpc.RpcError as error:
    print("deadline:", error.code().name)

calls = [unary.future(str(number).encode(), timeout=PATIENCE) for number in range(300)]
right = sum(call.result() == b"hello " + str(number).encode() for number, call in enumerate(calls))
print(f"at once: {right} of {len(calls)}")
print("denied:", status("/denied/Method"))
print("absent:", status("/absent/Method"))
