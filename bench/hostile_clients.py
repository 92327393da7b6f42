"""Clients of the sidecar, and writers of the engine's log, that behave as badly as they can."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

_LOG_PERIOD_SEC = 0.1


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs `work(stop)` in a thread until the context is left."""
    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


class _Crowd:
    """So many connections, each made anew when it breaks. `step` is called about a hundred times a second."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._count = count
        self._sockets: list[socket.socket] = []

    def __call__(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self._connect()
                self._sockets = [each for each in self._sockets if self._is_alive(each)]
                stop.wait(0.01)
        finally:
            for each in self._sockets:
                each.close()

    def _connect(self) -> None:
        while len(self._sockets) < self._count:
            try:
                each = socket.create_connection(("127.0.0.1", self._port), timeout=5)
            except OSError:
                return
            each.setblocking(False)
            if self.greet(each):
                self._sockets.append(each)
            else:
                each.close()

    def _is_alive(self, each: socket.socket) -> bool:
        if self.step(each):
            return True
        each.close()
        return False

    def greet(self, each: socket.socket) -> bool:
        """A new connection; False gives it up."""
        return True

    def step(self, each: socket.socket) -> bool:
        """An old connection; False gives it up."""
        return True


class SlowClients(_Crowd):
    """They ask for /healthz, one byte ten times a second."""

    _REQUEST = b"GET /healthz HTTP/1.1\r\nHost: " + b"x" * 900

    def __init__(self, port: int, count: int) -> None:
        super().__init__(port, count)
        self._sent: dict[socket.socket, tuple[int, float]] = {}

    def step(self, each: socket.socket) -> bool:
        sent, at = self._sent.get(each, (0, 0.0))
        if time.monotonic() - at < 0.1:
            return True
        try:
            each.send(self._REQUEST[sent : sent + 1])
        except OSError:
            self._sent.pop(each, None)
            return False
        self._sent[each] = (sent + 1, time.monotonic())
        return sent < 800


class GreedyReaders(_Crowd):
    """They ask for a large answer many times over and read none of it."""

    def __init__(self, port: int, count: int, path: str) -> None:
        super().__init__(port, count)
        self._request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()

    def greet(self, each: socket.socket) -> bool:
        try:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.send(self._request * 50)
        except OSError:
            return False
        return True

    def step(self, each: socket.socket) -> bool:
        try:
            each.send(self._request)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


class LargeSenders(_Crowd):
    """They send a body without end to /healthz."""

    _PIECE = b"x" * 65536

    def greet(self, each: socket.socket) -> bool:
        try:
            each.send(b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        except OSError:
            return False
        return True

    def step(self, each: socket.socket) -> bool:
        try:
            each.send(self._PIECE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


class LongHeaders(_Crowd):
    """They send a header without end."""

    def greet(self, each: socket.socket) -> bool:
        try:
            each.send(b"GET /healthz HTTP/1.1\r\nX: ")
        except OSError:
            return False
        return True

    def step(self, each: socket.socket) -> bool:
        try:
            each.send(b"x" * 4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


class Babblers(_Crowd):
    """They send what is no HTTP."""

    def greet(self, each: socket.socket) -> bool:
        return self.step(each)

    def step(self, each: socket.socket) -> bool:
        try:
            each.send(b"\x16\x03\x01 is no request\r\n\r\n" * 20)
        except OSError:
            return False
        return True


def readers(url: str, path: str, per_sec: float = math.inf) -> Callable[[threading.Event], None]:
    """Reads an answer so many times a second, each to its end."""

    def work(stop: threading.Event) -> None:
        while not stop.wait(1 / per_sec):
            with contextlib.suppress(OSError), urllib.request.urlopen(url + path, timeout=10) as answer:
                answer.read()

    return work


def log_writer(path: Path, bytes_per_poll: int, line: bytes) -> Callable[[threading.Event], None]:
    """Adds so many bytes of one line over and over to a log, every tenth of a second."""
    piece = line * max(1, bytes_per_poll // len(line))

    def work(stop: threading.Event) -> None:
        while not stop.wait(_LOG_PERIOD_SEC):
            if path.stat().st_size > 256 * 1024 * 1024:
                path.write_bytes(b"")
            with path.open("ab") as log:
                log.write(piece)

    return work


def everyday_readers(url: str, per_sec: float) -> Callable[[threading.Event], None]:
    """What asks a sidecar in a cluster: the kubelet `per_sec` times a second, Prometheus a third of that."""

    def work(stop: threading.Event) -> None:
        count = 0
        while not stop.wait(1 / per_sec):
            count += 1
            for path in ("/healthz", *(("/metrics", "/engine") if count % 3 == 0 else ())):
                with contextlib.suppress(OSError), urllib.request.urlopen(url + path, timeout=10) as answer:
                    answer.read()

    return work
