"""A scripted judgement and a scripted engine, for tests of what stands between them."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginewatch.client.target import CanaryReport, Description, ScrapeFailure
from enginewatch.core.events import Event, Flags, Instruction, Outcome, Verdict
from enginewatch.core.settings import Settings
from enginewatch.engines import PROFILES
from enginewatch.engines.profile import Aim, CanaryRequest, FlagEndpoint, Profile, Role
from enginewatch.sidecar.board import Board
from enginewatch.sidecar.errands import Client, KvServer
from enginewatch.sidecar.faults import Faults
from enginewatch.sidecar.history import History
from enginewatch.sidecar.journal import Journal
from enginewatch.sidecar.keeper import SettingsKeeper
from enginewatch.sidecar.logtail import LogTail
from enginewatch.sidecar.metrics import Metrics
from enginewatch.sidecar.reload import SettingsSource
from enginewatch.sidecar.shell import Shell

OK = CanaryReport(Outcome.OK, "complete", 0.1, True)
WALL = 1_791_943_641.29


def verdict(state: str = "growing", reason: str = "core 0: tokens move", *, hung: bool = False) -> Verdict:
    return Verdict(state, hung, hung, reason, "0", 0.0)


@dataclass
class FakeIdentity:
    engine_id: str = "pst-1791943641.29"
    source: str = "process_start_time"
    started_at_unix: float | None = WALL
    first_seen: float = 0.0
    restarts: int = 0


@dataclass
class FakeExplanation:
    cores: tuple[Any, ...] = ()
    witnesses: tuple[Any, ...] = ()
    would_flip: tuple[str, ...] = ()


@dataclass
class FakeStoryEntry:
    now: float
    event: Event
    state: str


Script = Callable[[Event, float], Sequence[Instruction]]


@dataclass
class FakeJudge:
    """Remembers what it was told, and answers by `script`."""

    script: Script = lambda event, now: ()
    verdict: Verdict = field(default_factory=verdict)
    profile: Profile | None = field(default_factory=lambda: PROFILES["vllm"])
    version: str | None = "0.32.0"
    role: Role = "agg"
    canary: CanaryRequest | None = field(default_factory=lambda: PROFILES["vllm"].canaries["agg"])
    canary_role: Role = "agg"
    identity: FakeIdentity | None = None
    why_unidentified: str = "nobody listens at the engine's address yet; it is loading"
    restarts: int = 0
    names: frozenset[str] = frozenset({"a_total"})
    core_names: tuple[str, ...] = ("0",)
    flag_endpoints: tuple[FlagEndpoint, ...] = PROFILES["vllm"].flag_endpoints
    explanation: Any = field(default_factory=FakeExplanation)
    told: list[tuple[float, Event]] = field(default_factory=list)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        self.told.append((now, event))
        return list(self.script(event, now))

    def explain(self, now: float) -> Any:
        if isinstance(self.explanation, Exception):
            raise self.explanation
        return self.explanation

    def story(self) -> list[FakeStoryEntry]:
        return [FakeStoryEntry(now, event, "growing") for now, event in self.told]

    def heard(self, kind: type[Event]) -> list[Any]:
        """The events of that kind, oldest first."""
        return [event for _, event in self.told if type(event) is kind]

    def times_of(self, kind: type[Event]) -> list[float]:
        return [round(now, 3) for now, event in self.told if type(event) is kind]


async def _page() -> dict[str, float] | ScrapeFailure:
    return {"a_total": 1.0}


async def _ok() -> CanaryReport:
    return OK


async def _clear() -> Flags:
    return Flags.CLEAR


async def _described() -> Description:
    return Description("vllm", "0.32.0")


@dataclass
class FakeClient:
    """An engine: each question is answered by a coroutine that a test may replace."""

    on_scrape: Callable[[], Awaitable[dict[str, float] | ScrapeFailure]] = _page
    on_canary: Callable[[], Awaitable[CanaryReport]] = _ok
    on_flags: Callable[[], Awaitable[Flags]] = _clear
    on_describe: Callable[[], Awaitable[Description]] = _described
    asked: list[tuple[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    is_closed: bool = False

    async def scrape(
        self, names: frozenset[str], *, timeout_sec: float, profile: Profile | None
    ) -> dict[str, float] | ScrapeFailure:
        self.asked.append(("scrape", (names, timeout_sec, profile)))
        return await self.on_scrape()

    async def canary(
        self,
        request: CanaryRequest,
        *,
        model: str | None = None,
        core: str | None = None,
        cores: Collection[str] = (),
        aim: Aim | None = None,
        deadline_sec: float,
        role: Role = "agg",
    ) -> CanaryReport:
        self.asked.append(("canary", (request, core, aim, deadline_sec, role)))
        try:
            return await self.on_canary()
        except asyncio.CancelledError:
            self.cancelled.append("canary")
            raise

    async def read_flags(self, endpoints: tuple[FlagEndpoint, ...], *, timeout_sec: float = 1.0) -> Flags:
        self.asked.append(("flags", endpoints))
        return await self.on_flags()

    async def describe(self, *profiles: Profile, timeout_sec: float = 2.0) -> Description:
        self.asked.append(("describe", profiles))
        return await self.on_describe()

    def forget_model(self) -> None:
        self.asked.append(("forget", None))

    async def close(self) -> None:
        self.is_closed = True

    def times(self, what: str) -> int:
        return sum(name == what for name, _ in self.asked)


class House:
    """A whole sidecar but for its sockets, on the running loop's clock.

    Use it as `async with House(...) as house`, which runs the shell meanwhile.
    """

    def __init__(
        self,
        judge: FakeJudge | None = None,
        client: FakeClient | None = None,
        *,
        settings: str = '{"poll_interval_sec": 5}',
        directory: Path | None = None,
        tail: LogTail | None = None,
        fixed_signatures: bool = False,
        kv_server: KvServer | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.judge = judge or FakeJudge()
        self.client = client or FakeClient()
        self._log, writer = os.pipe()
        self._writer = writer
        self.journal = Journal(descriptor=writer, terminal=False)
        self.faults = Faults(self.journal)
        self.config = (directory / "config.json") if directory is not None else None
        if self.config is not None:
            self.config.write_text(settings)
        source = SettingsSource(str(self.config or "/nonexistent/config.json"), {})
        first_look = source.poll()
        self.board = Board(
            judge=self.judge,
            verdict=self.judge.verdict,
            settings=source.settings,
            started_at=loop.time(),
            clock=loop.time,
            unix_offset=WALL - loop.time(),
        )
        self.metrics = Metrics(self.board, self.faults.note)
        self.faults.count = self.metrics.internal_error
        self.history = History(self.board.unix)
        self.keeper = SettingsKeeper(
            source, board=self.board, metrics=self.metrics, journal=self.journal, faults=self.faults
        )
        self.keeper.begin(first_look)
        engine: Client = self.client
        self.shell = Shell(
            judge=self.judge,
            client=engine,
            board=self.board,
            metrics=self.metrics,
            history=self.history,
            journal=self.journal,
            faults=self.faults,
            keeper=self.keeper,
            tail=tail,
            fixed_signatures=fixed_signatures,
            kv_server=kv_server,
        )
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> House:
        self._running = asyncio.create_task(self.shell.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        os.close(self._writer)
        os.close(self._log)

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
            self._running = None

    def log_lines(self) -> list[dict[str, Any]]:
        """What was logged since the last time."""
        os.set_blocking(self._log, False)
        text = io.BytesIO()
        try:
            while chunk := os.read(self._log, 65536):
                text.write(chunk)
        except BlockingIOError:
            pass
        return [json.loads(line) for line in text.getvalue().splitlines()]

    def metric(self, name: str) -> float | None:
        """The value of one series on the sidecar's page."""
        for line in self.metrics.render().decode().splitlines():
            series, _, value = line.rpartition(" ")
            if series == name:
                return float(value)
        return None


def settings(**changes: Any) -> Settings:
    return Settings(**changes)
