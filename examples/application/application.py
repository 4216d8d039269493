#!/usr/bin/env python3
"""A small application: a page, a health check, and a WebSocket that says everything again.

    application.py PORT      (0 for a free one, which is printed)

Its standard output is closed when it listens, so that a script can wait for that.
"""

import base64
import hashlib
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Application(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.headers.get("Upgrade", "").lower() == "websocket":
            return self.say_again()
        body = b"well" if self.path == "/health" else f"hello from {self.server.server_port}\n".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def say_again(self):
        key = self.headers["Sec-WebSocket-Key"].encode()
        accept = base64.b64encode(hashlib.sha1(key + MAGIC).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        self.close_connection = True
        # Short frames alone: what a demonstration needs.
        while len(head := self.rfile.read(2)) == 2 and head[0] & 15 == 1:
            mask, text = self.rfile.read(4), self.rfile.read(head[1] & 127)
            text = bytes(byte ^ mask[place % 4] for place, byte in enumerate(text))
            self.wfile.write(bytes([0x81, len(text)]) + text)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Application)
print(f"listening on {server.server_port}", file=sys.stderr, flush=True)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
server.serve_forever()
