"""Engines with their sidecars as a router's guard meets them: many addresses, one port of each kind per role.

Everything listens on the loopback, on ports the system gives. Each door (an address and a port) answers by path, can be
switched while a test runs, and counts who came.
"""

from __future__ import annotations

import contextlib
import errno
import json
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

SEEN = "2026-10-14T01:52:10.48Z"
"""When the sidecars started."""

Behaviour = Callable[[socket.socket], None]
Answer = bytes | Behaviour
"""What is sent back before the connection is closed, or what is done with the connection."""


class OpenSocket(Protocol):
    """`Island.socket`, or `this_machine` for the loopback of this machine."""

    def __call__(self, family: int, kind: int = ..., address: tuple[str, int] | None = ...) -> socket.socket: ...


def this_machine(family: int, kind: int = socket.SOCK_STREAM, address: tuple[str, int] | None = None) -> socket.socket:
    opened = socket.socket(family, kind)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address:
            opened.bind(address)
    except OSError:
        opened.close()
        raise
    return opened


def http(body: bytes | str, *, status: str = "200 OK", headers: str = "") -> bytes:
    """A whole answer; `headers` are lines, each with its line end."""
    raw = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(raw)}\r\n{headers}\r\n".encode() + raw


def identity(
    engine_id: object = "pst-1791943641.29",
    *,
    restarts: object = 0,
    watcher_started_at: object = SEEN,
    source: object = "process_start_time",
) -> bytes:
    """What a sidecar's /engine says of an identified engine. Other types than its own are for a sidecar gone mad."""
    return http(
        json.dumps(
            {
                "engine_id": engine_id,
                "started_at": "2026-10-14T02:07:21.29Z",
                "source": source,
                "restarts": restarts,
                "watcher_started_at": watcher_started_at,
            }
        ),
        headers="Content-Type: application/json\r\n",
    )


HEALTHY = http("")
LOADING = http("", status="503 Service Unavailable")
NOT_YET = http('{"error": "the engine has not been identified yet"}', status="503 Service Unavailable")
NOT_FOUND = http("404: Not Found", status="404 Not Found")


def silent(connection: socket.socket) -> None:
    """Never answers; ends when the asker does."""
    while connection.recv(4096):
        pass


def dripping(answer: bytes, every_sec: float = 0.5) -> Behaviour:
    """One byte at a time: each read succeeds, the whole never comes in time."""

    def drip(connection: socket.socket) -> None:
        connection.settimeout(every_sec)
        for at in range(len(answer)):
            connection.sendall(answer[at : at + 1])
            with contextlib.suppress(TimeoutError):
                if not connection.recv(1):
                    return

    return drip


def endless(head: bytes, again: bytes, *, every_sec: float = 0.0) -> Behaviour:
    """`head`, then `again`, as fast as it is taken or each `every_sec`, until the asker leaves."""

    def flood(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(again)
            time.sleep(every_sec)

    return flood


class Door:
    """One address and port. `answers` by path, 404 for others; `asked` counts by path, `connections` all who came."""

    def __init__(self, fleet: Fleet, address: str, listener: socket.socket, answers: dict[str, Answer]) -> None:
        self.address, self.answers = address, answers
        self.asked: Counter[str] = Counter()
        self.connections = 0
        self.port: int = listener.getsockname()[1]
        self._fleet, self._fillers = fleet, list[socket.socket]()
        self._listener: socket.socket | None = None
        self._listen(listener)

    def refuse(self) -> None:
        """Nobody listens any more."""
        self._leave()

    def black_hole(self) -> None:
        """Nobody answers a connection attempt: the queue of those that wait is full, so Linux drops what more comes."""
        self._leave()
        full = self._fleet.open_socket(family_of(self.address), address=(self.address, self.port))
        full.listen(0)
        self._fillers.append(full)
        for _ in range(3):
            caller = self._fleet.open_socket(family_of(self.address))
            caller.setblocking(False)
            self._fillers.append(caller)
            caller.connect_ex((self.address, self.port))

    def open(self) -> None:
        """Listens again, after `refuse` or `black_hole`."""
        self._leave()
        self._listen(self._fleet.open_socket(family_of(self.address), address=(self.address, self.port)))

    def close(self) -> None:
        self._leave()

    def _listen(self, listener: socket.socket) -> None:
        listener.listen(256)
        listener.setblocking(False)  # whoever came may be gone again
        self._listener = listener
        self._fleet.watch(listener, self)

    def _leave(self) -> None:
        if self._listener is not None:
            self._fleet.forget(self._listener)
            self._listener = None
        for filler in self._fillers:
            filler.close()
        self._fillers.clear()

    def serve(self, connection: socket.socket) -> None:
        """One request, one answer. An asker that leaves early is not the door's trouble."""
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                if not (more := connection.recv(65536)):
                    return
                head += more
            path = head.split(b" ", 2)[1].decode()
            self.asked[path] += 1
            answer = self.answers.get(path, NOT_FOUND)
            if isinstance(answer, bytes):
                connection.sendall(answer)
            else:
                answer(connection)


class Engine:
    """An engine and its sidecar at one address, at first healthy and identified."""

    def __init__(self, engine_id: str, engine: Door, sidecar: Door) -> None:
        self.address, self.engine_id, self.engine, self.sidecar = engine.address, engine_id, engine, sidecar
        self.health(HEALTHY)
        self.says(identity(engine_id))

    @property
    def line(self) -> str:
        """What a boot records of the engine as it was at first."""
        return f"{self.address}|0|{SEEN}|{self.engine_id}"

    def health(self, answer: Answer) -> None:
        self.engine.answers["/health"] = answer

    def says(self, answer: Answer) -> None:
        """What the sidecar's /engine answers from now on."""
        self.sidecar.answers["/engine"] = answer


class Role:
    """The engines of one role by address; `port` and `watcher_port` are the same at each."""

    def __init__(self, engines: dict[str, Engine], port: int, watcher_port: int) -> None:
        self.engines, self.port, self.watcher_port = engines, port, watcher_port

    def __getitem__(self, address: str) -> Engine:
        return self.engines[address]

    def lines(self) -> list[str]:
        """What a boot records of all of them."""
        return sorted(engine.line for engine in self.engines.values())

    def upstreams(self) -> str:
        """HOST:PORT of each, as in GUARD_PREFILL."""
        return ",".join(
            f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}" for address in self.engines
        )


class Fleet:
    """Doors on many addresses, served from one thread that accepts and one per connection; `close` when done."""

    def __init__(self, open_socket: OpenSocket = this_machine) -> None:
        self.open_socket = open_socket
        self._doors: list[Door] = []
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._ours, self._wake = socket.socketpair()
        self._selector.register(self._ours, selectors.EVENT_READ)
        self._acceptor = threading.Thread(target=self._accept, name="fleet")
        self._acceptor.start()
        self._threads: list[threading.Thread] = []

    def role(self, *addresses: str) -> Role:
        """Healthy, identified engines; the n-th has the id `pst-n.00`."""
        engines = self._doors_on(addresses)
        sidecars = self._doors_on(addresses)
        doors = enumerate(zip(engines, sidecars, strict=True), start=1)
        made = [Engine(f"pst-{number}.00", engine, sidecar) for number, (engine, sidecar) in doors]
        return Role({one.address: one for one in made}, engines[0].port, sidecars[0].port)

    def _doors_on(self, addresses: Iterable[str]) -> list[Door]:
        """A door on each address, all with one port that was free on every one of them."""
        addresses = list(addresses)
        for _ in range(50):
            with contextlib.ExitStack() as bound:
                port, listeners = 0, []
                try:
                    for address in addresses:
                        listener = self.open_socket(family_of(address), address=(address, port))
                        bound.callback(listener.close)
                        listeners.append(listener)
                        port = listener.getsockname()[1]
                except OSError as error:
                    if not port or error.errno not in (errno.EADDRINUSE, None):
                        raise
                    continue
                bound.pop_all()
                doors = [Door(self, address, one, {}) for address, one in zip(addresses, listeners, strict=True)]
                self._doors += doors
                return doors
        raise OSError(f"no port is free on all of {', '.join(addresses)}")

    def close(self) -> None:
        for door in self._doors:
            door.close()
        self._wake.close()
        self._acceptor.join()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._ours.close()
        self._selector.close()

    def watch(self, listener: socket.socket, door: Door) -> None:
        self._selector.register(listener, selectors.EVENT_READ, door)

    def forget(self, listener: socket.socket) -> None:
        with self._lock:
            self._selector.unregister(listener)
            listener.close()

    def _accept(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ours:
                    return
                with self._lock:
                    listener = key.fileobj
                    assert isinstance(listener, socket.socket)
                    if listener.fileno() < 0:
                        continue  # forgotten since
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        continue
                    self._connections.add(connection)
                    key.data.connections += 1
                thread = threading.Thread(target=self._serve, args=(key.data, connection), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, door: Door, connection: socket.socket) -> None:
        try:
            door.serve(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
                connection.close()


def family_of(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
