"""The part that both rivals share: a /healthz that says what stands on a board. Standard library only."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What /healthz says."""

    hung: bool
    reason: str


class Board:
    """The last answer; written by one loop, read by the server's threads."""

    def __init__(self) -> None:
        self.answer = Answer(False, "nothing is known yet")


@contextlib.contextmanager
def serve(listen: str) -> Iterator[Board]:
    """Answers /healthz on `HOST:PORT` or `:PORT` for the length of the block."""
    board = Board()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one write: with two, the second waits for the reader's delayed ACK.
        wbufsize = -1

        def do_GET(self) -> None:
            answer = board.answer
            found = self.path.partition("?")[0] == "/healthz"
            body = f"{'hung' if answer.hung else 'ok'}: {answer.reason}\n".encode() if found else b"only /healthz\n"
            self.send_response(404 if not found else 503 if answer.hung else 200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing: it is asked hundreds of times a second."""

    host, _, port = listen.rpartition(":")
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield board
    finally:
        server.shutdown()
        server.server_close()
