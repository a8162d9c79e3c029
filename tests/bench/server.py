"""A server that speaks raw HTTP as a test scripts it, request by request."""

import json
import socketserver
import ssl
import threading
from collections.abc import Callable

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def token(text: str = "a", finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


def usage(completion: int, prompt: int = 4, cached: int = 0, **more: object) -> bytes:
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event(choices=[], usage=counts | more)


def answer(tokens: int, **more: object) -> bytes:
    """A whole stream, as one body."""
    pieces = [token() for _ in range(tokens - 1)] + [token(finish_reason="length"), usage(tokens, **more), DONE]
    return b"".join(pieces)


def good(body: dict) -> bytes:
    return HEAD + chunked(answer(body["max_tokens"])) + END


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Server:
    """Answers /v1/models, and each completion with what `respond` gives for its body; None closes the connection.

    What ends without END is followed by the connection's end.
    """

    def __init__(self, respond: Callable[[dict], bytes | None] = good, tls: ssl.SSLContext | None = None) -> None:
        self.respond = respond
        self.asked: list[dict] = []
        self.heads: list[str] = []
        self.connections = 0
        outer = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                outer.connections += 1
                while head := b"".join(iter(self.rfile.readline, b"\r\n")) if self.rfile.peek(1) else b"":
                    outer.heads.append(head.decode())
                    sizes = [int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"]
                    response = outer.reply(self.rfile.read(sum(sizes)))
                    self.wfile.write(response or b"")
                    if not response or not (response.endswith(END) or b"content-length" in response):
                        return

        class Threads(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 64

            def handle_error(self, request: object, address: object) -> None:
                """Clients that leave are no news."""

        self._server = Threads(("127.0.0.1", 0), Handler)
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def reply(self, body: bytes) -> bytes | None:
        if not body:
            listed = json.dumps({"data": [{"id": "tiny"}]}).encode()
            return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(listed), listed)
        self.asked.append(json.loads(body))
        return self.respond(self.asked[-1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
