"""The front end's side of the pipes: it starts the ranks, feeds them requests and hears what they report."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.wire import encode

_LINE_LIMIT = 16 * 2**20


class CoreDied(Exception):  # noqa: N818  what happened, as the engines' own logs put it
    """An engine core's process has gone; nothing it held will ever be answered."""


class Stream:
    """One request between the front end and a rank.

    Attributes:
        produced: output tokens that arrived.
        arrived_at, moved_at: monotonic seconds of its arrival and of its last token.
        first_at: of its first token, where the page wants to know.
    """

    def __init__(self, id_: str, core: str, prompt: int, max_tokens: int, *, probe: bool, streaming: bool) -> None:
        self.id = id_
        self.core = core
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.probe = probe
        self.streaming = streaming
        self.produced = 0
        self.arrived_at = self.moved_at = time.monotonic()
        self.first_at: float | None = None
        self.finished = False
        self.outputs: asyncio.Queue[dict[str, Any] | CoreDied] = asyncio.Queue()

    async def next(self) -> dict[str, Any]:
        """The next output; the last one has a `finish`.

        Raises:
            CoreDied: the engine core died under it.
        """
        output = await self.outputs.get()
        if isinstance(output, CoreDied):
            raise output
        return output


class Page(Protocol):
    """What counts: an engine's metrics page."""

    def on_ready(self, core: str, pid: int) -> None:
        """A rank's process started."""

    def on_step(self, core: str, message: dict[str, Any]) -> None:
        """A rank reported a step."""

    def on_output(self, core: str, output: dict[str, Any], stream: Stream) -> None:
        """One request's share of that step."""

    def on_abort(self, stream: Stream) -> None:
        """The client left before the end."""


class Rank:
    """One rank process and the open requests on it."""

    def __init__(self, core: str, title: str) -> None:
        self.core = core
        self.title = title
        self.pid = 0
        self.alive = False
        self.streams: dict[str, Stream] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self.writer: asyncio.StreamWriter | None = None

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. Never waits: a stopped rank must not stop the front end."""
        if self.writer is not None and self.alive:
            self.writer.write(encode(message))


class Ranks:
    """All ranks of one engine."""

    def __init__(self, options: SimOptions, page: Page) -> None:
        self._options = options
        self._page = page
        self._ids = itertools.count()
        self._turn = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.dead = False
        self.on_death: Callable[[str], None] = lambda core: None
        self.output_at = 0.0
        """Monotonic time at which any rank last produced output for any request."""
        self.loop_at: dict[str, float] = {}
        """Wall time of each core's last message: when its loop last said anything."""
        self.connect_calls: Callable[[socket.socket], Awaitable[None]] | None = None
        """Takes the front end's end of a second channel, for calls that do not go through the rank's loop."""
        self.all = [Rank(str(core), rank_title(options, core)) for core in range(options.dp)]

    # --- processes --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all rank processes and wait until each has said that it is ready."""
        ready = [await self._spawn(rank) for rank in self.all]
        await asyncio.gather(*ready)

    async def _spawn(self, rank: Rank) -> asyncio.Future[None]:
        calls: tuple[socket.socket, socket.socket] | None = None
        if self.connect_calls is not None:
            calls = socket.socketpair()
        ours = self._launch(rank, calls[1] if calls is not None else None)
        if self.connect_calls is not None and calls is not None:
            await self.connect_calls(calls[0])
        reader, rank.writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._listen(rank, reader, ready)))
        return ready

    def _launch(self, rank: Rank, calls: socket.socket | None) -> socket.socket:
        ours, theirs = socket.socketpair()
        options = self._options
        config = {
            "engine": options.engine,
            "role": options.role,
            "title": rank.title,
            "parent": os.getpid(),
            "fd": theirs.fileno(),
            "step_sec": options.step_ms / 1000,
            "max_batched_tokens": options.token_budget,
            "max_running": options.max_running,
            "block_size": options.block_size,
            "kv_blocks": max(1, options.kv_tokens // options.block_size),
            "transfer_sec": options.transfer_sec,
            "gauge_stale_sec": options.stale_sec,
            "iter_stats": options.iter_stats,
            "iter_stats_interval": options.iter_stats_interval,
            "iter_stats_max": options.iter_stats_max,
            "hang_detection_sec": options.hang_detection_sec,
            "log_file": options.log_file,
            "log_format": options.log_format,
        }
        passed = [theirs.fileno()]
        if calls is not None:
            config["calls_fd"] = calls.fileno()
            passed.append(calls.fileno())
        # Standard output belongs to the supervisor's announcements.
        rank.process = subprocess.Popen(
            [sys.executable, "-m", "enginewatch.lab.sim.rank", json.dumps(config)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        if calls is not None:
            calls.close()
        rank.pid = rank.process.pid
        return ours

    async def _listen(self, rank: Rank, reader: asyncio.StreamReader, ready: asyncio.Future[None]) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if message["op"] == "ready":
                    rank.alive = True
                    self._page.on_ready(rank.core, rank.pid)
                    ready.set_result(None)
                    continue
                self._hear(rank, message)
        except ConnectionError:
            pass
        self._lost(rank)
        if not ready.done():
            ready.set_exception(CoreDied(f"{rank.title} died while starting"))

    def _lost(self, rank: Rank) -> None:
        rank.alive = False
        self.dead = True
        if rank.process is not None:
            rank.process.poll()
        # One dead core ends the whole engine: nobody answers the other cores' requests either.
        for other in self.all:
            for stream in other.streams.values():
                stream.outputs.put_nowait(CoreDied(rank.title))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(CoreDied(rank.title))
        self.on_death(rank.core)

    def kill(self) -> None:
        """End all ranks, stopped ones too, and reap them."""
        for task in self._tasks:
            task.cancel()
        for rank in self.all:
            if rank.writer is not None:
                rank.writer.close()
            if rank.process is not None:
                rank.process.kill()
        for rank in self.all:
            if rank.process is not None:
                rank.process.wait()

    # --- requests ---------------------------------------------------------------------------------------------------

    def pick(self) -> str:
        """The core with the fewest open requests, in turn among equals."""
        self._turn += 1
        order = [self.all[(self._turn + offset) % len(self.all)] for offset in range(len(self.all))]
        return min(order, key=lambda rank: len(rank.streams)).core

    @contextmanager
    def open(
        self,
        prompt: int,
        max_tokens: int,
        *,
        core: str | None = None,
        probe: bool = False,
        streaming: bool = False,
        fields: dict[str, Any] | None = None,
    ) -> Iterator[Stream]:
        """Send one request to a rank and listen to it. Leaving before its end aborts it there.

        Raises:
            CoreDied: an engine core had already died.
        """
        if self.dead:
            raise CoreDied("engine core")
        rank = self.all[int(core if core is not None else self.pick())]
        stream = Stream(f"{next(self._ids):x}", rank.core, prompt, max_tokens, probe=probe, streaming=streaming)
        rank.streams[stream.id] = stream
        rank.send({"op": "add", "id": stream.id, "prompt": prompt, "max": max_tokens, "probe": probe, **(fields or {})})
        try:
            yield stream
        finally:
            rank.streams.pop(stream.id, None)
            if not stream.finished:
                rank.send({"op": "abort", "id": stream.id})
                self._page.on_abort(stream)

    def kv_arrived(self, stream: Stream) -> None:
        """The KV of a request that was waiting for another engine is there."""
        self.all[int(stream.core)].send({"op": "kv", "id": stream.id})

    async def call(self, name: str, args: dict[str, Any] | None = None) -> list[Any]:
        """A round trip through the loop of every rank. A hung rank gives no answer, and there is no time limit."""
        if self.dead:
            raise CoreDied("engine core")
        futures = []
        for rank in self.all:
            number = next(self._ids)
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._calls[number] = future
            futures.append(future)
            rank.send({"op": "call", "call": number, "name": name, "args": args or {}})
        return await asyncio.gather(*futures)

    def tune(self, core: str | None = None, **values: Any) -> None:
        """Tell one rank, or all, how fast it is and what it depends on."""
        for rank in self.all:
            if core is None or rank.core == core:
                rank.send({"op": "tune", **values})

    # --- what the ranks say -----------------------------------------------------------------------------------------

    def _hear(self, rank: Rank, message: dict[str, Any]) -> None:
        self.loop_at[rank.core] = time.time()
        if message["op"] == "reply":
            future = self._calls.pop(message["call"], None)
            if future is not None and not future.done():
                future.set_result(message["value"])
            return
        self._page.on_step(rank.core, message)
        if message["outputs"]:
            self.output_at = time.monotonic()
        for output in message["outputs"]:
            stream = rank.streams.get(output["id"])
            if stream is None:
                continue
            stream.produced += output["new"]
            self._page.on_output(rank.core, output, stream)
            stream.moved_at = time.monotonic()
            stream.finished = "finish" in output
            stream.outputs.put_nowait(output)


def rank_title(options: SimOptions, core: int) -> str:
    """The process title that the real engine's rank has."""
    name = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler", "trtllm": "mpi4py.futures.server"}
    return name[options.engine] + (f"_DP{core}" if options.dp > 1 else "")
