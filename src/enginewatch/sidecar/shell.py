"""The sidecar's loop: asks the engine, hands what it hears to the judgement, does what the judgement says.

It decides nothing. Events are handed over one at a time, in the order in which they happen, on one event loop; what
takes time (canaries, rechecks, questions) runs beside the poll loop (`errands`) and comes back as an event.

What keeps it going:
    - Each part of a poll survives its own exceptions (`internal_errors_total{task}`), and so does the loop.
    - A poll counts as judged only when its page reached the judgement and the judgement did not break. When that has
      not happened for long, /healthz fails open (`board.is_stale`).
"""

from __future__ import annotations

import asyncio
import contextlib

from enginewatch.client.target import ScrapeFailure
from enginewatch.core.events import (
    AbandonCanary,
    CaptureEvidence,
    DescribeEngine,
    Event,
    Instruction,
    Log,
    LogChannelChanged,
    LogHits,
    Publish,
    ReadFlags,
    Rescrape,
    Scraped,
    ScrapeFailed,
    SettingsChanged,
    StartCanary,
    Tick,
    Verdict,
)
from enginewatch.core.states import EVERYDAY
from enginewatch.sidecar.board import Board, Judge
from enginewatch.sidecar.errands import GRACE_SEC, Client, Errands, KvServer, forever
from enginewatch.sidecar.faults import Faults
from enginewatch.sidecar.history import History
from enginewatch.sidecar.journal import Journal
from enginewatch.sidecar.keeper import SettingsKeeper
from enginewatch.sidecar.logtail import LogTail
from enginewatch.sidecar.metrics import Metrics
from enginewatch.sidecar.signatures import Signatures

CONFIG_CHECK_SEC = 5.0
"""A mistyped poll interval of a day must not mean that its correction is read a day later."""


class Shell:
    """Runs the watch of one engine until cancelled.

    Args:
        judge: the judgement.
        client: asks the engine; closed at the end.
        board: what the HTTP answers read.
        metrics: the sidecar's own metrics.
        history: the recent past.
        journal: the log.
        faults: takes note of survived exceptions.
        keeper: the hot settings.
        tail: the engine's log, if it is followed.
        fixed_signatures: whether the tail's signatures are the operator's, not the engine's.
        kv_server: the engine's Mooncake bootstrap server, if it is asked.
    """

    def __init__(
        self,
        *,
        judge: Judge,
        client: Client,
        board: Board,
        metrics: Metrics,
        history: History,
        journal: Journal,
        faults: Faults,
        keeper: SettingsKeeper,
        tail: LogTail | None = None,
        fixed_signatures: bool = False,
        kv_server: KvServer | None = None,
    ) -> None:
        self._judge = judge
        self._client = client
        self._board = board
        self._metrics = metrics
        self._history = history
        self._journal = journal
        self._faults = faults
        self._keeper = keeper
        self._tail = tail
        self._fixed_signatures = fixed_signatures
        self._log_problem: str | None = None
        self._log_skips = False
        self._turn = asyncio.Lock()
        self._errands = Errands(
            judge=judge,
            client=client,
            board=board,
            metrics=metrics,
            faults=faults,
            report=self._feed,
            scrape=lambda: self._scrape(recheck=True),
            kv_server=kv_server,
        )

    async def run(self) -> None:
        """Polls until cancelled; leaves no task behind."""
        try:
            self._errands.start()
            await forever("poll", self._poll_on_time, self._faults)
        finally:
            self._errands.stop()
            if self._tail is not None:
                self._tail.close()
            await self._client.close()

    # --- the poll loop ----------------------------------------------------------------------------------------------

    async def _poll_on_time(self) -> None:
        """Polls for ever, start to start; when one takes longer than the interval, the next begins at once."""
        clock = self._board.clock
        while True:
            begun = clock()
            try:
                await self._poll()
            except Exception as error:
                self._faults.note("poll", error)
            await asyncio.sleep(0)
            while (left := begun + self._board.settings.poll_interval_sec - clock()) > CONFIG_CHECK_SEC:
                await asyncio.sleep(CONFIG_CHECK_SEC)
                self._reload()
            if left > 0:
                await asyncio.sleep(left)

    async def _poll(self) -> None:
        self._feed(Tick())
        self._reload()
        self._errands.read_kv_bootstrap()
        await self._follow_log()
        if await self._scrape(recheck=False):
            self._board.judged_at = self._board.clock()

    def _reload(self) -> None:
        settings = self._keeper.check()
        if settings is not None:
            self._feed(SettingsChanged(settings))

    async def _follow_log(self) -> None:
        if self._tail is None:
            return
        try:
            profile = self._judge.profile
            if not self._fixed_signatures and profile is not None and profile.log_signatures != self._tail.patterns:
                self._tail.look_for(Signatures(profile.log_signatures))
            news = await self._tail.read()
        except Exception as error:
            self._faults.note("log", error)
            return
        if news.problem != self._log_problem:
            self._log_problem = news.problem
            self._feed(LogChannelChanged(news.problem))
        if bool(news.skipped_bytes) != self._log_skips:
            self._log_skips = bool(news.skipped_bytes)
            if self._log_skips:
                self._journal.write(
                    "warning", "too much log at once: skipped to its end", skipped_bytes=news.skipped_bytes
                )
        if news.hits:
            self._metrics.log_hits(news.hits)
            self._feed(LogHits(news.hits, news.patterns))

    async def _scrape(self, *, recheck: bool) -> bool:
        """Scrapes once and hands the result over; whether it reached the judgement."""
        clock, timeout_sec = self._board.clock, self._board.settings.metrics_timeout_sec
        profile = self._judge.profile
        # Answers of which each is read only once come one after the other; one that is waited for has not begun.
        in_turn = self._turn if profile is not None and profile.reads_json_statistics else contextlib.nullcontext()
        async with in_turn:
            return await self._scrape_now(clock(), timeout_sec, recheck=recheck)

    async def _scrape_now(self, begun: float, timeout_sec: float, *, recheck: bool) -> bool:
        clock = self._board.clock
        try:
            async with asyncio.timeout(timeout_sec + GRACE_SEC):
                result = await self._client.scrape(
                    self._judge.names, timeout_sec=timeout_sec, profile=self._judge.profile
                )
        except Exception as error:
            self._faults.note("recheck" if recheck else "scrape", error)
            return False
        if isinstance(result, ScrapeFailure):
            self._metrics.scraped(result.failure, clock() - begun)
            return self._feed(ScrapeFailed(begun, result.failure, result.detail, recheck))
        self._metrics.scraped("ok", clock() - begun)
        return self._feed(Scraped(begun, result, recheck))

    # --- the judgement ----------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> bool:
        """Hands one event over and carries out what comes back; False when the judgement broke."""
        now = self._board.clock()
        try:
            instructions = self._judge.handle(event, now)
        except Exception as error:
            self._faults.note("judge", error)
            return False
        try:
            self._history.note_event(event, now)
        except Exception as error:
            self._faults.note("history", error)
        for instruction in instructions:
            try:
                self._carry_out(instruction, now)
            except Exception as error:
                self._faults.note("loop", error)
        return True

    def _carry_out(self, instruction: Instruction, now: float) -> None:
        match instruction:
            case Publish(verdict):
                self._publish(verdict, now)
            case StartCanary():
                self._errands.send_canary(instruction)
            case AbandonCanary(token):
                self._errands.abandon_canary(token)
            case Rescrape(after_sec):
                self._errands.recheck(now + after_sec)
            case ReadFlags():
                self._errands.read_flags()
            case DescribeEngine():
                self._errands.describe()
            case CaptureEvidence(reason):
                self._history.keep_evidence(
                    reason, self._judge.verdict, self._board.explain(), self._judge.story(), now
                )
            case Log(level, event, fields):
                self._journal.write(level, event, **fields)

    def _publish(self, verdict: Verdict, now: float) -> None:
        before, self._board.verdict = self._board.verdict, verdict
        if verdict.state != before.state:
            if not (verdict.state in EVERYDAY and before.state in EVERYDAY):
                self._metrics.state_changed(before.state, verdict.state)
            if (why := _suppressed_by(verdict)) is not None and why != _suppressed_by(before):
                self._metrics.hang_suppressed(why)
        self._history.note_verdict(verdict, now)


def _suppressed_by(verdict: Verdict) -> str | None:
    """`warmup` or `shadow` when a hang is shown and not acted on."""
    return verdict.state.partition("-")[0] if verdict.hung and not verdict.acting else None
