"""The sidecar's HTTP answers. Each comes from memory; none waits for the engine.

Whoever can reach the port must not be able to keep the kubelet from its answer, nor to take the sidecar's memory: small
limits on what a request may be; few connections, and when there are too many the longest idle one goes, those that had
an answer first, so that a newcomer is always served; pages that take work are put together ten times a second at most;
and while many answers lie unread, only the short ones are given.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from enginewatch.sidecar.board import Board
from enginewatch.sidecar.history import History
from enginewatch.sidecar.metrics import CONTENT_TYPE as METRICS_CONTENT_TYPE
from enginewatch.sidecar.metrics import Metrics

MAX_CONNECTIONS = 96
_DESCRIPTORS_OF_ITS_OWN = 40
"""What the process may need besides: a scrape, a canary and a description at once have a dozen."""
KEEPALIVE_SEC = 75.0
"""Longer than the usual scrape interval of 60 s, so that Prometheus keeps its connection."""
FIRST_REQUEST_SEC = 10.0
"""How long a connection may take over its first request."""
DRAIN_SEC = 10.0
"""How long a client may leave an answer unread."""
MAX_UNREAD_BYTES = 2 * 1024 * 1024
"""So much may wait for slow readers before long answers are refused."""
MAX_RENDERS_PER_SEC = 10
"""How often one page is put together anew; beyond that the last one is given again."""
_QUEUE = 1024
"""Where it is full, the kernel drops a kubelet's connect and the kubelet tries again after a second."""
_ACCEPTS = 8
"""Connections taken in one turn of the loop; few, so that each is read long before it is the oldest of too many."""
_SWEEP_SEC = 2.0
_TAKE_BYTES = 4096

_LONG_PATHS = ("/verdict", "/history", "/metrics")
_TEXT = "text/plain"
_JSON = "application/json"

INDEX = """\
enginewatch

/healthz   200 "ok: REASON" or 503 "hung: REASON"; ?verbose for the whole verdict
/engine    which engine process this is
/verdict   the verdict with its witnesses, cores and settings
/history   recent events, verdicts and evidence, JSON Lines
/metrics   for Prometheus
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, body and content type of one answer."""

    status: int
    body: bytes
    content_type: str = _TEXT


class _Sparing:
    """Puts a page together so many times a second, then gives the last one again until the second is over.

    Or until `subject` says something else: an old verdict must not stand in a 503, nor explain it.
    """

    def __init__(
        self, page: Callable[[], Answer], clock: Callable[[], float], subject: Callable[[], object] = lambda: None
    ) -> None:
        self._page = page
        self._clock = clock
        self._subject = subject
        self._told: object = None
        self._since = float("-inf")
        self._count = 0
        self._last: Answer | None = None

    def __call__(self) -> Answer:
        now = self._clock()
        if now - self._since >= 1:
            self._since, self._count, self._last = now, 0, None
        subject = self._subject()
        if self._last is not None and subject == self._told:
            return self._last
        self._told = subject
        self._count += 1
        answer = self._page()
        if self._count >= MAX_RENDERS_PER_SEC:
            self._last = answer
        return answer


class Pages:
    """Path -> answer.

    Args:
        board: the sidecar's standing.
        history: the recent past.
        metrics: the sidecar's own metrics.
        on_error: told about an exception that was survived.
    """

    def __init__(
        self, board: Board, history: History, metrics: Metrics, on_error: Callable[[str, Exception], None]
    ) -> None:
        self._board = board
        self._history = history
        self._metrics = metrics
        self._on_error = on_error
        verdict = self._verdict_page = _Sparing(
            lambda: Answer(200, _encode(board.verdict_body()), _JSON),
            board.clock,
            subject=lambda: (board.verdict.state, board.is_acting),
        )
        self._pages: dict[str, Callable[[], Answer]] = {
            "/": lambda: Answer(200, INDEX.encode()),
            "/healthz": self._healthz,
            "/engine": self._engine,
            "/verdict": verdict,
            "/history": _Sparing(lambda: Answer(200, history.lines(), "application/jsonl"), board.clock),
            "/metrics": _Sparing(lambda: Answer(200, metrics.render(), METRICS_CONTENT_TYPE), board.clock),
        }

    def answer(self, method: str, path: str, *, verbose: bool) -> Answer:
        """The answer to one request. Never raises: a fault in `/healthz` fails open, elsewhere it is a 500."""
        page = self._pages.get(path)
        if page is None:
            return Answer(404, b"There is no such path here; GET / lists the ones there are.\n")
        if method not in ("GET", "HEAD"):
            return Answer(405, b"Only GET and HEAD are answered here.\n")
        try:
            if verbose and path == "/healthz":
                return replace(self._verdict_page(), status=self._board.health()[0])
            return page()
        except Exception as error:
            self._on_error("http", error)
            if path == "/healthz":
                status, text = self._board.health()
                return Answer(status, text.encode("utf-8", "replace"))
            return Answer(500, b"This answer could not be put together; the sidecar's log says why.\n")

    def _healthz(self) -> Answer:
        status, text = self._board.health()
        return Answer(status, text.encode("utf-8", "replace"))

    def _engine(self) -> Answer:
        body = self._board.engine()
        if body is None:
            why = self._board.why_unidentified()
            return Answer(503, _encode({"error": f"the engine has not been identified: {why}"}), _JSON)
        return Answer(200, _encode(body), _JSON)


class HttpServer:
    """Serves `Pages` on a socket that is already bound."""

    def __init__(self, pages: Pages, sock: socket.socket) -> None:
        self._pages = pages
        self._socket = sock
        self._gates: dict[int, _Gate] = {}
        self._most = _most_connections()
        self._web: web.Server | None = None
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to answer."""
        # aiohttp would log what clients send, and tracebacks, through the logging module's last resort.
        logging.getLogger("aiohttp").setLevel(logging.CRITICAL + 1)
        self._web = web.Server(
            self._handle,
            access_log=None,
            keepalive_timeout=KEEPALIVE_SEC,
            lingering_time=0,
            max_line_size=2048,
            max_field_size=4096,
            max_headers=32,
            read_bufsize=4096,
            auto_decompress=False,
        )
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._gate, sock=self._socket, backlog=_ACCEPTS)
        self._socket.listen(_QUEUE)
        self._sweeper = loop.create_task(self._sweep_forever())

    async def stop(self) -> None:
        """Stops at once; whoever is in the middle of a request loses it."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._server is not None:
            self._server.close()
        if self._web is not None:
            self._web.pre_shutdown()
        await asyncio.sleep(0)
        for gate in list(self._gates.values()):
            gate.abort()
        await asyncio.sleep(0)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._gates)

    def _gate(self) -> _Gate:
        assert self._web is not None
        return _Gate(self._gates, self._most, self._web())

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        gate = self._gates.get(id(request.transport))
        if gate is not None:
            gate.requested()
        # Requests that come in one packet would otherwise all be answered before anybody else's.
        await asyncio.sleep(0)
        verbose = "verbose" in request.rel_url.raw_query_string.split("&")
        try:
            verbose = verbose or "verbose" in request.query
        except ValueError:
            pass
        if self._unread_bytes() <= MAX_UNREAD_BYTES:
            answer = self._pages.answer(request.method, request.path, verbose=verbose)
        elif request.path in _LONG_PATHS:
            answer = Answer(503, b"Too many answers lie unread; ask again later.\n")
        else:
            answer = self._pages.answer(request.method, request.path, verbose=False)
        headers = {"Content-Type": _with_charset(answer.content_type), "Cache-Control": "no-store"}
        if answer.status == 405:
            headers["Allow"] = "GET, HEAD"
        response = web.Response(status=answer.status, body=answer.body, headers=headers)
        if request.can_read_body:
            response.force_close()  # nobody reads it, and what follows would be taken for a request
        if gate is not None:
            gate.answered()  # it is written before anybody else has a turn
        return response

    def _unread_bytes(self) -> int:
        return sum(gate.unread_bytes() for gate in self._gates.values())

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SEC)
            for gate in list(self._gates.values()):
                if gate.is_overdue():
                    gate.abort()


class _Gate(asyncio.BufferedProtocol):
    """Stands between a connection and aiohttp, and shuts out who takes too long or is one too many.

    It hands on at most `_TAKE_BYTES` at a time: asyncio would read 256 KiB, and what of that is not a request yet is
    held, once per connection.
    """

    def __init__(self, gates: dict[int, _Gate], most: int, inner: Any) -> None:
        self._gates = gates
        self._most = most
        self._inner = inner
        self._clock = asyncio.get_running_loop().time
        self._transport: asyncio.Transport | None = None
        self._active_at = self._clock()
        self._has_requested = False
        self._has_answer = False
        self._taken = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._gates) >= self._most:
            # Who sends request after request is never idle, so between two of its turns a kubelet would be the one.
            # In insertion order, so of equally idle ones the oldest.
            min(self._gates.values(), key=lambda gate: (not gate._has_answer, gate._active_at)).abort()
        self._gates[id(transport)] = self
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._gates.pop(id(self._transport), None)
            self._transport = None
        self._inner.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        self._taken = bytearray(_TAKE_BYTES)
        return self._taken

    def buffer_updated(self, nbytes: int) -> None:
        taken, self._taken = self._taken, bytearray()
        self._inner.data_received(bytes(memoryview(taken)[:nbytes]))

    def eof_received(self) -> bool | None:
        answer: bool | None = self._inner.eof_received()
        return answer

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def requested(self) -> None:
        """A whole request came in."""
        self._has_requested = True
        self._active_at = self._clock()

    def answered(self) -> None:
        """It gets an answer now."""
        self._has_answer = True

    def unread_bytes(self) -> int:
        """How much of the answers the client has not taken yet."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def is_overdue(self) -> bool:
        """Whether the client has had its time."""
        idle = self._clock() - self._active_at
        if not self._has_requested:
            return idle > FIRST_REQUEST_SEC
        return idle > KEEPALIVE_SEC or (idle > DRAIN_SEC and self.unread_bytes() > 0)

    def abort(self) -> None:
        """Breaks the connection; it counts no longer from now on."""
        if self._transport is not None:
            self._gates.pop(id(self._transport), None)
            self._transport.abort()


def _most_connections() -> int:
    """So many connections leave the process the descriptors that it needs itself."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else min(MAX_CONNECTIONS, max(4, soft - _DESCRIPTORS_OF_ITS_OWN))


def _encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)


def _with_charset(content_type: str) -> str:
    return content_type if ";" in content_type or content_type == _JSON else f"{content_type}; charset=utf-8"
