"""How TensorRT-LLM's front end gets the records of iterations: by a call to the rank, which takes them away.

- Without `return_perf_metrics` GET /metrics is that call: it waits up to 2 s for a first record, and for ever on a
  rank that is stopped or dead (a message queue lies between them, which notices neither). One call is under way at a
  time, and a client that leaves does not end it: the next one gets what it brings (`executor/result.py`, 2026).
- With it, a task is the only caller: a request that completes wakes it, it takes what there is, writes the gauges and
  keeps the records for GET /metrics, which answers at once (NVIDIA bug 6102381). So nothing moves while a request runs,
  however many iterations it takes.
- Older releases (the RPC of 1.2 and 1.3) waited for the call in the event loop itself: the whole server stood still for
  up to 2 s per scrape of an idle engine, and for ever with a stopped rank. `blocking_stats` does the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.wire import encode

Record = dict[str, Any]
SCRAPE_WAIT_SEC = 2.0
COLLECTOR_WAIT_SEC = 0.5
_LINE_LIMIT = 64 * 2**20
_FOR_EVER_SEC = 10**6


class IterationStats:
    """The front end's end of one rank's channel for calls."""

    def __init__(self, options: SimOptions, log: Callable[[Record], None]) -> None:
        self._enabled = options.iter_stats
        self._blocking = options.blocking_stats
        self._log = log
        self._sock: socket.socket | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._call: asyncio.Future[list[Record]] | None = None
        self._wake = asyncio.Event()
        self._kept: deque[Record] | None = None
        if options.iter_stats and options.return_perf_metrics:
            self._kept = deque(maxlen=options.iter_stats_max)
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, sock: socket.socket) -> None:
        """Take over the channel to a rank that is about to start, and begin to collect."""
        self._sock = sock
        if not self._blocking:
            self._reader, self._writer = await asyncio.open_connection(sock=sock, limit=_LINE_LIMIT)
        if self._kept is not None:
            self._begin(self._collect())

    def close(self) -> None:
        """Stop collecting and leave the channel."""
        for task in self._tasks:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
        elif self._sock is not None:
            self._sock.close()

    def completed(self) -> None:
        """A request completed: the collector has something to do."""
        self._wake.set()

    def hold(self, on: bool) -> None:
        """Switch the rank's deadlock. Never waits."""
        message = encode({"op": "hold", "on": on})
        if self._writer is not None:
            self._writer.write(message)
        elif self._sock is not None:
            self._sock.sendall(message)

    async def scraped(self) -> list[Record]:
        """What GET /metrics answers."""
        if self._kept is not None:
            records = list(self._kept)
            self._kept.clear()
            return records
        return await self._fetch(SCRAPE_WAIT_SEC)

    async def _collect(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            records = await self._fetch(COLLECTOR_WAIT_SEC)
            assert self._kept is not None
            for record in records:
                self._log(record)
                self._kept.append(record)

    async def _fetch(self, timeout: float) -> list[Record]:
        if self._blocking:
            return self._fetch_blocking(timeout)
        if self._call is None or self._call.cancelled():
            self._call = asyncio.get_running_loop().create_future()
            self._begin(self._ask(timeout, self._call))
        call = self._call
        records = await asyncio.shield(call)
        if self._call is call:  # whoever is first takes them all
            self._call = None
            return records
        return []

    async def _ask(self, timeout: float, call: asyncio.Future[list[Record]]) -> None:
        assert self._reader is not None
        assert self._writer is not None
        self._writer.write(encode({"op": "stats", "timeout": timeout}))
        with contextlib.suppress(ConnectionError):
            if line := await self._reader.readline():
                call.set_result(json.loads(line)["records"])

    def _fetch_blocking(self, timeout: float) -> list[Record]:
        """The event loop stands still meanwhile, and every other request with it."""
        assert self._sock is not None
        with contextlib.suppress(ConnectionError):
            self._sock.sendall(encode({"op": "stats", "timeout": timeout}))
        answer = bytearray()
        while not answer.endswith(b"\n"):
            data = self._sock.recv(65536)
            if not data:
                time.sleep(_FOR_EVER_SEC)
            answer += data
        records: list[Record] = json.loads(answer)["records"]
        return records

    def _begin(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
