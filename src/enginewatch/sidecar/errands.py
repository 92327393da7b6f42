"""What runs beside the poll loop: canaries, rechecks, and questions to the engine.

The judgement waits for each of them, so each reports, also when it broke: a canary that never came back would mean that
no other is ever sent. An error of the watcher's own is reported as an outcome that counts for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from enginewatch.client.target import CanaryReport, Description, ScrapeFailure
from enginewatch.core.events import (
    CanaryDone,
    EngineDescribed,
    Event,
    Flags,
    FlagsRead,
    KvBootstrapRead,
    Outcome,
    StartCanary,
)
from enginewatch.engines.profile import Aim, CanaryRequest, FlagEndpoint, Profile, Role
from enginewatch.sidecar.board import Board, Judge
from enginewatch.sidecar.faults import Faults
from enginewatch.sidecar.metrics import Metrics

if TYPE_CHECKING:
    from enginewatch.client.kv_bootstrap import KvAnswer

FLAGS_TIMEOUT_SEC = 1.0
KV_BOOTSTRAP_TIMEOUT_SEC = 2.0
GRACE_SEC = 10.0
"""How much later than its own deadline a question is given up by force. Long, because after a stretch in which the
whole machine stood still both would be over at once, and only the question's own deadline says how it ended."""
DESCRIBE_SEC = 30.0
"""Several questions, each with a deadline of seconds."""
DESCRIBE_AGAIN_SEC = (5.0, 15.0, 60.0, 300.0)
"""Waits between questions for a version that the engine has not told; the last one repeats."""
RESTART_SEC = 1.0
"""Wait before a task that broke starts again."""


class Client(Protocol):
    """What the sidecar needs of `client.target.EngineClient`."""

    async def scrape(
        self, names: frozenset[str], *, timeout_sec: float, profile: Profile | None
    ) -> dict[str, float] | ScrapeFailure:
        """Read the metrics page."""

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
        """Send one canary."""

    async def read_flags(self, endpoints: tuple[FlagEndpoint, ...], *, timeout_sec: float = 1.0) -> Flags:
        """Ask the pause endpoints."""

    async def describe(self, *profiles: Profile, timeout_sec: float = 2.0) -> Description:
        """Ask the engine who it is."""

    def forget_model(self) -> None:
        """Another process answers."""

    async def close(self) -> None:
        """Break what is under way."""


class KvServer(Protocol):
    """What the sidecar needs of `client.kv_bootstrap.KvBootstrap`."""

    async def read(self, *, timeout_sec: float) -> KvAnswer:
        """Ask which KV engines it knows."""

    def close(self) -> None:
        """Break what is under way."""


class Errands:
    """Runs them, one of each kind at a time.

    Args:
        judge: the judgement, read for the canary and for the engine's profile and version.
        client: asks the engine.
        board: the settings in force and the clock.
        metrics: the sidecar's own metrics.
        faults: takes note of survived exceptions.
        report: hands an event to the judgement.
        scrape: scrapes for a recheck and hands the result over.
        kv_server: the engine's Mooncake bootstrap server, if there is one to ask.
    """

    def __init__(
        self,
        *,
        judge: Judge,
        client: Client,
        board: Board,
        metrics: Metrics,
        faults: Faults,
        report: Callable[[Event], object],
        scrape: Callable[[], Awaitable[object]],
        kv_server: KvServer | None = None,
    ) -> None:
        self._judge = judge
        self._client = client
        self._board = board
        self._metrics = metrics
        self._faults = faults
        self._report = report
        self._scrape = scrape
        self._kv_server = kv_server
        self._tasks: set[asyncio.Task[None]] = set()
        self._canary: tuple[int, asyncio.Task[None]] | None = None
        self._describing: asyncio.Task[None] | None = None
        self._reading_kv: asyncio.Task[None] | None = None
        self._recheck_at: float | None = None
        self._recheck_wanted = asyncio.Event()

    def start(self) -> None:
        """Begins to wait for orders."""
        self._spawn("recheck", forever("recheck", self._recheck_when_asked, self._faults))

    def stop(self) -> None:
        """Cancels everything; nothing is reported any more."""
        self._canary = None
        for task in self._tasks:
            task.cancel()
        if self._kv_server is not None:
            self._kv_server.close()

    def send_canary(self, order: StartCanary) -> None:
        """Sends a canary, in place of one under way."""
        self._drop_canary()
        self._canary = (order.token, self._spawn("canary", self._run_canary(order)))

    def abandon_canary(self, token: int) -> None:
        """Drops the canary, if it is the one under way."""
        if self._canary is not None and self._canary[0] == token:
            self._drop_canary()

    def recheck(self, at: float) -> None:
        """Scrapes at that moment of the clock, in place of a recheck that has not begun."""
        self._recheck_at = at
        self._recheck_wanted.set()

    def read_flags(self) -> None:
        """Asks the pause endpoints."""
        self._spawn("flags", self._run_flags())

    def describe(self) -> None:
        """Asks a new process who it is."""
        if self._describing is not None:
            self._describing.cancel()
        self._client.forget_model()
        self._describing = self._spawn("describe", self._run_describe())

    def read_kv_bootstrap(self) -> None:
        """Asks the bootstrap server, unless there is none or the question before this one is still open."""
        if self._kv_server is not None and (self._reading_kv is None or self._reading_kv.done()):
            self._reading_kv = self._spawn("kv_bootstrap", self._run_kv_bootstrap(self._kv_server))

    async def _run_canary(self, order: StartCanary) -> None:
        begun = self._board.clock()
        outcome, detail, answered = await self._ask_canary(order)
        self._metrics.canary_ended(outcome, self._board.clock() - begun)
        if self._canary is not None and self._canary[0] == order.token:
            self._canary = None
            self._report(CanaryDone(order.token, outcome, detail, answered))

    async def _ask_canary(self, order: StartCanary) -> tuple[Outcome, str, bool]:
        try:
            request = self._judge.canary
            if request is None:
                return Outcome.MISCONFIGURED, "canaries were switched off", False
            aim = request.aim_for(self._judge.version) if order.core is not None else None
            async with asyncio.timeout(order.deadline_sec + GRACE_SEC):
                report = await self._client.canary(
                    request,
                    core=order.core,
                    cores=self._judge.core_names,
                    aim=aim,
                    deadline_sec=order.deadline_sec,
                    role=self._judge.canary_role,
                )
        except TimeoutError:
            return Outcome.TIMEOUT, "its deadline was noticed too late", False  # the judgement sees by how much
        except Exception as error:
            self._faults.note("canary", error)
            return Outcome.MISCONFIGURED, "internal error of the watcher", False
        if order.core is not None and not report.aimed:
            return Outcome.MISCONFIGURED, f"could not be aimed at core {order.core}", report.answered
        return report.outcome, report.detail, report.answered

    def _drop_canary(self) -> None:
        if self._canary is not None:
            self._canary[1].cancel()
            self._canary = None

    async def _recheck_when_asked(self) -> None:
        clock = self._board.clock
        while True:
            await self._recheck_wanted.wait()
            self._recheck_wanted.clear()
            while self._recheck_at is not None and (left := self._recheck_at - clock()) > 0:
                # A newer order may move the moment, in either direction.
                try:
                    async with asyncio.timeout(left):
                        await self._recheck_wanted.wait()
                    self._recheck_wanted.clear()
                except TimeoutError:
                    pass
            self._recheck_at = None
            await self._scrape()

    async def _run_flags(self) -> None:
        flags = Flags.SILENT
        try:
            async with asyncio.timeout(FLAGS_TIMEOUT_SEC + GRACE_SEC):
                flags = await self._client.read_flags(self._judge.flag_endpoints, timeout_sec=FLAGS_TIMEOUT_SEC)
        except Exception as error:
            self._faults.note("flags", error)
        self._report(FlagsRead(flags))

    async def _run_kv_bootstrap(self, server: KvServer) -> None:
        begun = self._board.clock()
        async with asyncio.timeout(KV_BOOTSTRAP_TIMEOUT_SEC + GRACE_SEC):
            answer = await server.read(timeout_sec=KV_BOOTSTRAP_TIMEOUT_SEC)
        self._report(KvBootstrapRead(begun, answer.ids, answer.failure))

    async def _run_describe(self) -> None:
        """Asks again while the version is not known: only that tells how a canary is aimed."""
        waits = iter(DESCRIBE_AGAIN_SEC)
        wait, has_reported = 0.0, False
        while True:
            said = Description()
            try:
                profile = self._judge.profile
                async with asyncio.timeout(DESCRIBE_SEC):
                    said = await self._client.describe(*((profile,) if profile is not None else ()))
            except Exception as error:
                self._faults.note("describe", error)
            if not has_reported or said.version is not None:
                has_reported = True
                self._report(EngineDescribed(said.kind, said.version, said.batches_statistics, said.role))
            if said.version is not None:
                return
            wait = next(waits, wait)
            await asyncio.sleep(wait)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faults.note(task.get_name(), error)


async def forever(name: str, work: Callable[[], Awaitable[None]], faults: Faults) -> None:
    """Runs a task that should never end, and runs it again when it breaks."""
    while True:
        try:
            await work()
        except Exception as error:
            faults.note(name, error)
        await asyncio.sleep(RESTART_SEC)
