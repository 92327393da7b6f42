"""The judgement: is this engine hung? Everything that changes the verdict happens in `Watch.handle`.

How an engine is judged, in the order in which it is tried (`states.py` has the names and one line on each):

1. Engine-wide. No page yet is `startup`, a refused connection after that is `restarting`: a process that is not there
   is loaded, not killed, until `startup_budget_sec`. Other failed scrapes are `unreach-grace`, and `unreach-hang` when
   they last and canaries fail too; an earlier hang stands meanwhile. Then `observer-gap`, `replaced`, `paused`. A page
   without progress legs leaves the judgement to canaries: `no-legs`, `canary-hang`.
2. Per core; the engine's state is its worst core's. Movement is life. A frozen core is asked by canary on every
   stalled poll. It is hung (`stall-hang`) when it has been frozen for its threshold AND enough canaries in a row
   failed, the first of them early enough, AND a page read after the last failure shows no progress. A signature in the
   log shortens the wait (`stall-hang-log`). Without a usable canary only a busy core, or one whose heartbeat froze,
   can be hung, and later.
3. A core declared hung stays so until it proves life: a leg that moves (for `stall-hang-log` a counter), a complete
   canary, a replacement, a registry reset, the end of a pause, or a refused connection. A newer failed canary or a
   page that cannot be read proves nothing.
4. A hang inside warm-up, or in shadow mode, is shown as `warmup-X` / `shadow-X` and not acted on.

Nothing here reads a clock, draws a random number or touches the outside: the same events give the same verdicts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from enginewatch.core import explain as explain_module
from enginewatch.core.canaries import CanaryDesk, InFlight, Purpose, next_core
from enginewatch.core.clock import GapClock
from enginewatch.core.events import (
    FAILURES,
    AbandonCanary,
    CanaryDone,
    CaptureEvidence,
    DescribeEngine,
    EngineDescribed,
    Event,
    Flags,
    FlagsRead,
    Instruction,
    Log,
    LogChannelChanged,
    LogHits,
    Outcome,
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
from enginewatch.core.identity import Change, Identity, IdentityTracker
from enginewatch.core.progress import Core, Ledger, PageNews, Proof
from enginewatch.core.request import canary_request
from enginewatch.core.settings import Settings
from enginewatch.core.states import EVERYDAY, HUNG, RANK
from enginewatch.engines import ALL_NAMES, PROFILES, UNKNOWN, recognise
from enginewatch.engines.profile import CanaryRequest, Profile, Role

LEGLESS_PAGES: Final = 3
"""Good scrapes without any leg before everything remembered is forgotten."""
PAUSE_POLLS: Final = 3
"""Polls for which a yes of the pause endpoints counts."""
UNREACH_5XX_SEC: Final = 300.0
"""An engine that answers 5xx still answers; vLLM's own watchdog and an elastic rescale end within this."""
DESCRIBE_POLLS: Final = 10
"""Polls between two attempts to learn the version of an engine that did not say."""
_STORY_EVENTS: Final = 400
_STORY_SAMPLES: Final = 20_000
_NEVER: Final = float("-inf")

Phase = Literal["startup", "restarting", "running"]


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One event and the state after it, on the caller's clock."""

    now: float
    event: Event
    state: str


@dataclass(frozen=True, slots=True)
class _Finding:
    """A state and its sentence, before suppression."""

    state: str
    reason: str
    core: str | None = None


class Watch:
    """Judges one engine. Feed it every event through `handle`, in order; nothing else changes its state.

    Args:
        settings: the effective hot settings.
        profile: the engine's profile; None recognises it from its page (ENGINE_KIND=auto).
        role: the worker's role, which decides the canary and whether `peer-stall` exists.
        log_channel: whether a log file is followed.
        watcher_started_ms: unix time in milliseconds, part of `observed` identities.
        now: the caller's monotonic seconds at creation.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        profile: Profile | None = None,
        role: Role = "agg",
        log_channel: bool = False,
        watcher_started_ms: int = 0,
        now: float,
    ) -> None:
        self.settings = settings
        self.role: Role = role
        self.log_channel = log_channel
        self.log_problem: str | None = None
        self.version: str | None = None
        self._auto = profile is None
        self._profile = profile
        self._clock = GapClock(now)
        self._ledger = Ledger(profile or UNKNOWN)
        self._identity = IdentityTracker(watcher_started_ms)
        self._desk = CanaryDesk()
        self._request: CanaryRequest | None = None
        self._take_request()

        self._polls = 0
        self._phase: Phase = "startup"
        self._phase_since = now
        self._process_since = _NEVER
        self._last_begun = _NEVER
        self._gap_poll = self._replaced_poll = self._paused_until_poll = -1
        self._page_rest: str | None = None
        self._flag_rest: str | None = None
        self._flags_absent = False
        self._flags_poll = self._describe_poll = -PAUSE_POLLS
        self._was_paused = False

        self._failing_since: float | None = None
        self._failing_5xx = False
        self._failing_how = ""
        self._outage_failures = 0
        self._outage_last: Outcome | None = None
        self._held: _Finding | None = None

        self._legless = 0
        self._blind_since: float | None = None
        self._blind_why = ""
        self._blind_failures = 0
        self._blind_last: Outcome | None = None

        self._log_hit_at = _NEVER
        self._recheck_at: float | None = None
        self._out: list[Instruction] = []
        self._story: deque[StoryEntry] = deque(maxlen=_STORY_EVENTS)
        self._story_samples = 0
        self._finding = _Finding("startup", "no page from the engine yet: it is loading")
        self._verdict = Verdict("startup", False, False, self._finding.reason, None, now)

    # --- what the shell reads ---------------------------------------------------------------------------------------

    @property
    def verdict(self) -> Verdict:
        """The last published verdict."""
        return self._verdict

    @property
    def profile(self) -> Profile | None:
        """The engine as configured or recognised; None while it is not known."""
        return self._profile

    @property
    def identity(self) -> Identity | None:
        """The engine process; None until it has been identified."""
        return self._identity.identity

    @property
    def restarts(self) -> int:
        """Replacements seen so far."""
        return self._identity.identity.restarts if self._identity.identity is not None else 0

    @property
    def names(self) -> frozenset[str]:
        """The sample names to ask the page for."""
        if self._auto and (self._profile is None or self._blind_since is not None):
            return ALL_NAMES
        return (self._profile or UNKNOWN).names()

    @property
    def canary(self) -> CanaryRequest | None:
        """The canary request as it stands: the profile's with the operator's overrides. None = canaries are off."""
        return self._request

    def explain(self, now: float) -> explain_module.Explanation:
        """Every witness with its age, every core, and what would flip the verdict. Pure; changes nothing."""
        return explain_module.explain(self._facts(now))

    def story(self) -> list[StoryEntry]:
        """The most recent events with the state after each; feeding them to a new Watch gives the same states."""
        return list(self._story)

    # --- the one way in ---------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in one event that happened at `now` (monotonic seconds, never falling) and say what to do."""
        self._out = []
        settings = self.settings
        poll = settings.poll_interval_sec
        if self._clock.advance(now, longest=2 * poll + settings.metrics_timeout_sec, keep=poll):
            self._gap_poll = self._polls + 1
            self._abandon()
        t = self._clock.at(now)
        match event:
            case Scraped():
                self._on_page(event, t, now)
            case ScrapeFailed():
                self._on_failed_scrape(event, t, now)
            case CanaryDone():
                self._on_canary(event, t)
            case FlagsRead():
                self._on_flags(event.flags, t)
            case EngineDescribed():
                self._on_described(event)
            case LogHits():
                if event.count > 0:
                    self._log_hit_at = t
            case LogChannelChanged():
                self._on_log_channel(event.problem)
            case SettingsChanged():
                self.settings = event.settings
                self._take_request()
            case Tick():
                pass
        self._judge(t, now)
        self._send_canary(t)
        self._remember(event, now)
        return self._out

    # --- scrapes ----------------------------------------------------------------------------------------------------

    def _on_page(self, event: Scraped, t: float, now: float) -> None:
        begun = self._clock.at(event.started_at)
        if not event.recheck:
            self._polls += 1
            self._end_of_poll_marks(t)
        if begun < self._last_begun:
            # Overtaken by a recheck that began later: what that one saw is this poll's picture.
            if not event.recheck:
                self._ledger.turn_poll(self._polls)
                self._ask_stalled(t)
            return
        self._last_begun = begun
        self._recheck_at = None
        if self._auto and (self._profile is None or self._blind_since is not None):
            self._recognise(event.samples)
        news = self._ledger.take(event.samples, t, begun, self._polls, recheck=event.recheck)
        self._answered(news, event.samples, t, begun, now, recheck=event.recheck)
        self._page_rest = news.resting
        if news.cores_with_legs:
            self._legless = 0
            self._end_blindness()
        elif not event.recheck:
            self._page_without_legs(t, "the page has none of this engine's progress series")
        self._follow_pause(t)
        if not event.recheck:
            self._ask_stalled(t)

    def _answered(
        self,
        news: PageNews | None,
        samples: Mapping[str, float],
        t: float,
        begun: float,
        now: float,
        *,
        recheck: bool,
    ) -> None:
        """The engine answered: whatever failed before is over, and it is the same process or another one."""
        was_loading, gone = self._phase != "running", self._phase == "restarting"
        self._phase = "running"
        in_flight = self._desk.in_flight
        if (self._failing_since is not None or was_loading) and in_flight is not None and in_flight.purpose == "outage":
            self._abandon()
        self._failing_since = None
        self._failing_5xx = False
        self._outage_failures, self._outage_last = 0, None
        self._desk.outage_due = False
        self._held = None
        known = self._identity.identity
        if news is None and known is not None and known.source != "observed":
            # Not a page: it cannot say which process it is, so the published identity stands.
            if gone:
                self._replaced(samples, t, begun, counted=False, recheck=recheck)
            return
        change = self._identity.page(
            news.start_time if news is not None else None,
            fell=news is not None and news.fell,
            rose=news is not None and news.rose,
            now=now,
        )
        if change is Change.REPLACED or (gone and change is Change.SAME and news is None):
            self._replaced(samples, t, begun, counted=change is Change.REPLACED, recheck=recheck)
        elif change is Change.FIRST:
            self._new_process(t)
        elif news is not None and news.fell:
            for core in self._ledger.cores.values():
                if core.fell_poll == self._polls:
                    core.prove(t, Proof.RESET)
            self._log("warning", "a counter fell although the engine's identity did not change: a registry reset")

    def _replaced(self, samples: Mapping[str, float], t: float, begun: float, *, counted: bool, recheck: bool) -> None:
        """Another process answers: learn everything anew."""
        self._abandon()
        self._ledger.forget()
        if samples:
            self._ledger.take(samples, t, begun, self._polls, recheck=recheck)
        self._blind_since = None
        self._legless = 0
        self._flags_absent = False
        self._flags_poll = -PAUSE_POLLS
        self._page_rest = self._flag_rest = None
        self._was_paused = False
        self._paused_until_poll = -1
        self._log_hit_at = _NEVER
        if counted:
            self._replaced_poll = self._polls
            identity = self._identity.identity
            assert identity is not None
            self._log(
                "warning",
                "the engine was replaced by another process",
                engine_id=identity.engine_id,
                restarts=identity.restarts,
            )
        self._new_process(t)

    def _new_process(self, t: float) -> None:
        """The first page of a process: warm-up begins, the arming canary goes out, and it is asked who it is."""
        self._process_since = t
        self._desk.new_process()
        self.version = None
        self._describe()

    def _describe(self) -> None:
        self._describe_poll = self._polls + DESCRIBE_POLLS
        self._out.append(DescribeEngine())

    def _on_failed_scrape(self, event: ScrapeFailed, t: float, now: float) -> None:
        if event.recheck:
            return  # the next poll decides
        self._polls += 1
        self._end_of_poll_marks(t)
        begun = self._clock.at(event.started_at)
        if _is_an_answer(event.failure):
            self._answered(None, {}, t, begun, now, recheck=False)
            self._page_rest = None
            self._page_without_legs(t, _no_page(event.failure, event.detail), at_once=True)
            self._follow_pause(t)
            self._ask_stalled(t)
            return
        self._failing_how = event.failure
        self._desk.outage_due = event.failure != "refused"  # nobody listens: a canary could tell nothing more
        if event.failure == "refused":
            self._identity.refused()
            if self._phase == "running":
                self._phase, self._phase_since = "restarting", t
                self._failing_since = None
                self._held = None
                self._abandon()
                for core in self._ledger.cores.values():
                    core.hang = None
                    core.run.clear()
            return
        if self._phase != "running":
            return
        if self._failing_since is None:
            self._failing_since = begun
            self._failing_5xx = False
            self._outage_failures, self._outage_last = 0, None
            self._held = self._finding if self._finding.state in HUNG else None
        self._failing_5xx = self._failing_5xx or event.failure.startswith("http_5")

    def _page_without_legs(self, t: float, why: str, *, at_once: bool = False) -> None:
        self._legless += 1
        self._blind_why = why
        if self._legless >= LEGLESS_PAGES:
            self._ledger.forget()
        if self._blind_since is None and (at_once or not self._ledger.cores or self._legless >= LEGLESS_PAGES):
            self._blind_since = t
            self._blind_failures, self._blind_last = 0, None
            if self._request is None:
                self._log("error", f"nothing to judge by: {why}, and canaries are off; the engine is not watched")
            else:
                self._log("warning", f"{why}: canaries alone decide")
        if self._blind_since is not None:
            self._desk.blind_due = True

    def _end_blindness(self) -> None:
        """Legs are back: the patient canary of the time without them makes room for the cores' own."""
        if self._blind_since is not None:
            self._blind_since = None
            if self._desk.in_flight is not None and self._desk.in_flight.purpose == "blind":
                self._abandon()

    def _end_of_poll_marks(self, t: float) -> None:
        in_flight = self._desk.in_flight
        if in_flight is not None and t > in_flight.lost_at:
            self._log("error", "a canary was never reported; going on without it")
            self._abandon()
        if self.version is None and self._phase == "running" and self._polls >= self._describe_poll:
            self._describe()
        if self._paused_until_poll >= 0 and self._polls > self._paused_until_poll:
            self._paused_until_poll = -1
            self._flag_rest = None
            self._follow_pause(t)

    # --- canaries, flags, log, description --------------------------------------------------------------------------

    def _on_canary(self, event: CanaryDone, t: float) -> None:
        done = self._desk.finish(event.token)
        if done is None:
            return
        outcome = event.outcome
        if outcome is Outcome.OK:
            self._canary_ok(done, t)
            return
        failed = outcome in FAILURES or (outcome is Outcome.ERROR_ANSWER and self._desk.armed)
        if outcome is Outcome.ERROR_ANSWER and not self._desk.armed:
            # A request that this engine never accepted must not kill it.
            outcome = Outcome.MISCONFIGURED
        if done.purpose == "outage":
            self._outage_last = outcome
            self._outage_failures += failed
            return
        if done.purpose == "blind":
            self._blind_last = outcome
            self._blind_failures += failed
        core = self._core_of(done)
        if core is None or done.begun < core.proof_at:
            return
        if failed:
            core.run.failed(done.begun, t, outcome)
            core.failed_begun = done.begun
            if done.purpose == "core":
                self._recheck(t, t)
        else:
            core.run.neither(outcome)

    def _canary_ok(self, done: InFlight, t: float) -> None:
        self._desk.armed = True
        self._blind_failures, self._blind_last = 0, Outcome.OK
        self._outage_failures, self._outage_last = 0, Outcome.OK
        self._held = None
        if self._failing_since is not None:
            self._failing_since = t
            self._failing_5xx = False
        if self._phase != "running":
            self._phase_since = t
        core = self._core_of(done)
        if core is not None:
            core.canary_ok_at, core.canary_ok_begun = t, done.begun
            core.prove(t, Proof.CANARY)

    def _core_of(self, done: InFlight) -> Core | None:
        """The core that an answer speaks for: the one aimed at, or the only one there is."""
        cores = self._ledger.cores
        if done.core is not None:
            return cores.get(done.core)
        return next(iter(cores.values())) if len(cores) == 1 else None

    def _ask_stalled(self, t: float) -> None:
        """Mark the cores that have a stalled poll, and see whether the engine says that it rests."""
        stalled = not self._ledger.cores
        for core in self._ledger.cores.values():
            core.canary_due = self._is_stalled(core, t)
            stalled = stalled or core.canary_due
        profile = self._profile
        if (
            (stalled or self._resting is not None)
            and profile is not None
            and profile.flag_endpoints
            and not self._flags_absent
            and self._polls >= self._flags_poll + PAUSE_POLLS
        ):
            self._flags_poll = self._polls
            self._out.append(ReadFlags())

    def _is_stalled(self, core: Core, t: float) -> bool:
        if core.baseline_poll == self._polls or core.fell_poll == self._polls:
            return False
        if core.counter_poll == self._polls:
            return False
        return core.gauge_poll != self._polls or self._log_speaks(core, t)

    def _send_canary(self, t: float) -> None:
        desk = self._desk
        if desk.in_flight is not None or self._request is None or self._resting is not None:
            return
        timeout = self.settings.active_probe_timeout_sec
        if self._phase != "running" or self._failing_since is not None:
            if desk.outage_due:
                desk.outage_due = False
                self._start("outage", None, t, timeout)
            return
        if self._blind_since is not None:
            if desk.blind_due or desk.arming_due:
                desk.blind_due = desk.arming_due = False
                self._start("blind", None, t, max(timeout, self.settings.stall_sec))
            return
        cores = self._ledger.cores
        several = len(cores) > 1
        if not cores or (several and not self._can_aim):
            return
        core = next_core(cores.values(), busy=self._busy, arming=desk.arming_due, may=lambda c: self._may_ask(c, t))
        if core is not None:
            core.canary_due = desk.arming_due = False
            self._start("core", core.name, t, timeout, aim=several)

    def _start(self, purpose: Purpose, core: str | None, t: float, deadline_sec: float, *, aim: bool = False) -> None:
        lost_at = t + deadline_sec + 2 * self.settings.poll_interval_sec + self.settings.metrics_timeout_sec
        token = self._desk.start(purpose, core, t, lost_at).token
        self._out.append(StartCanary(token, core if aim else None, deadline_sec))

    def _may_ask(self, core: Core, t: float) -> bool:
        """`active_probe_idle_sec` spaces canaries on a core that is not busy and whose last one was ok."""
        idle_sec = self.settings.active_probe_idle_sec
        if idle_sec <= 0 or core.run.last_outcome is not None or self._busy(core):
            return True
        return t - core.canary_ok_begun >= idle_sec

    def _abandon(self) -> None:
        in_flight = self._desk.in_flight
        if in_flight is not None:
            self._out.append(AbandonCanary(in_flight.token))
            self._desk.in_flight = None

    def _recheck(self, at: float, t: float) -> None:
        self._recheck_at = at
        self._out.append(Rescrape(max(0.0, at - t)))

    def _on_flags(self, flags: Flags, t: float) -> None:
        self._flags_poll = -PAUSE_POLLS  # answered: the next poll may ask again
        if flags is Flags.ABSENT:
            self._flags_absent = True
        elif flags is Flags.CLEAR:
            self._flag_rest = None
            self._paused_until_poll = -1
        elif flags is not Flags.SILENT:
            self._flag_rest = flags.value
            self._paused_until_poll = self._polls + PAUSE_POLLS - 1
        self._follow_pause(t)

    @property
    def _resting(self) -> str | None:
        """`paused` or `sleeping` when the engine says so."""
        return self._page_rest or self._flag_rest

    def _follow_pause(self, t: float) -> None:
        """A pause that begins takes the canary back; one that ends is a proof of life for every core."""
        paused = self._resting is not None
        if paused and not self._was_paused:
            self._abandon()
        if paused or self._was_paused:
            for core in self._ledger.cores.values():
                core.prove(t, Proof.PAUSE_ENDED)
            self._blind_failures, self._blind_last = 0, None
        self._was_paused = paused

    def _on_described(self, event: EngineDescribed) -> None:
        self.version = event.version
        if self._auto and event.kind in PROFILES and (self._profile is None or self._blind_since is not None):
            self._adopt(PROFILES[event.kind])

    def _recognise(self, samples: Mapping[str, float]) -> None:
        profile = recognise(series.partition("{")[0] for series in samples)
        if profile is not None:
            self._adopt(profile)

    def _adopt(self, profile: Profile) -> None:
        if profile is self._profile:
            return
        self._profile = profile
        self._ledger = Ledger(profile)
        self._take_request()
        self._log("info", f"the engine is {profile.title}", kind=profile.kind)

    def _take_request(self) -> None:
        self._request = canary_request(self.settings, self._profile or UNKNOWN, self.role)

    @property
    def _can_aim(self) -> bool:
        return self._request is not None and self._request.aim_for(self.version) is not None

    def _on_log_channel(self, problem: str | None) -> None:
        self.log_problem = problem
        if problem is None:
            self._log("info", "the engine's log is being followed")
        else:
            self._log("warning", f"the engine's log cannot be followed, judging without it: {problem}")

    def _log_speaks(self, core: Core, t: float) -> bool:
        """Whether a log signature newer than the core's last counter progress is in the window."""
        return self._log_hit_at > core.counter_proof_at and t - self._log_hit_at <= self.settings.log_window_sec

    # --- the verdict ------------------------------------------------------------------------------------------------

    def _judge(self, t: float, now: float) -> None:
        finding = self._engine_wide(t) or self._worst_core(t)
        before, self._finding = self._finding, finding
        hung = finding.state in HUNG
        state, acting = finding.state, hung
        reason = finding.reason
        if hung and self.settings.mode == "shadow":
            state, acting = f"shadow-{state}", False
        elif hung and state != "startup-hang" and t - self._process_since < self.settings.warmup_sec:
            left = self.settings.warmup_sec - (t - self._process_since)
            state, acting = f"warmup-{state}", False
            reason = f"{reason}; not acted on for another {left:.0f} s of warm-up"
        old = self._verdict
        if (state, reason, finding.core, acting) == (old.state, old.reason, old.core, old.acting):
            return
        since = now if hung != old.hung else old.hung_changed_at
        self._verdict = verdict = Verdict(state, hung, acting, reason, finding.core, since)
        self._out.append(Publish(verdict))
        if state == old.state:
            return
        if not (state in EVERYDAY and old.state in EVERYDAY):
            level: Literal["info", "warning", "error"] = "error" if acting else "warning" if hung else "info"
            fields = {"from": old.state, "to": state, "core": finding.core}
            self._out.append(Log(level, reason, {k: v for k, v in fields.items() if v is not None}))
        if hung and before.state not in HUNG:
            self._out.append(CaptureEvidence(reason))

    def _engine_wide(self, t: float) -> _Finding | None:
        """The first engine-wide state that holds, None to judge by cores."""
        settings = self.settings
        if self._phase != "running":
            return self._loading(t)
        if self._failing_since is not None:
            return self._unreachable(t, self._failing_since)
        if self._gap_poll >= self._polls:
            return _Finding("observer-gap", "the watcher itself did not run for a while: that time does not count")
        if self._replaced_poll == self._polls:
            return _Finding("replaced", "another engine process answers now: everything is learned anew")
        if self._resting is not None:
            return _Finding("paused", f"the engine says it is {self._resting}: no canary, no hang")
        if self._blind_since is None:
            return None
        minimum = settings.active_probe_min_failures
        if self._blind_failures >= minimum:
            return _Finding(
                "canary-hang",
                f"{self._blind_failures} canaries in a row failed ({self._blind_last}) and there is nothing else "
                f"to judge by: {self._blind_why}",
            )
        if self._request is None:
            return _Finding("no-legs", f"not watched: {self._blind_why}, and canaries are off")
        return _Finding("no-legs", f"{self._blind_why}: canaries alone decide{_said(self._blind_last)}")

    def _loading(self, t: float) -> _Finding:
        loading = t - self._phase_since
        what = "no page from the engine yet" if self._phase == "startup" else "nobody listens any more"
        budget = self.settings.startup_budget_sec
        if loading > budget:
            return _Finding("startup-hang", f"{what} for {loading:.0f} s, longer than the budget of {budget:g} s")
        if self._phase == "startup":
            how = f" ({self._failing_how})" if self._failing_how else ""
            return _Finding("startup", f"{what}{how}: it is loading")
        return _Finding("restarting", f"{what}: the engine's process is gone and is being restarted")

    def _unreachable(self, t: float, since: float) -> _Finding:
        settings = self.settings
        limit = settings.unreach_after_sec
        if self._failing_5xx:
            limit = max(limit, UNREACH_5XX_SEC)
        failing = t - since
        no_canary = self._request is None or self._outage_last is Outcome.MISCONFIGURED
        if failing >= limit and (no_canary or self._outage_failures >= settings.active_probe_min_failures):
            canaries = "no usable canary" if no_canary else f"{self._outage_failures} canaries failed meanwhile"
            return _Finding(
                "unreach-hang",
                f"/metrics has failed for {failing:.0f} s (limit {limit:g} s, last: {self._failing_how}), {canaries}",
            )
        if self._held is not None:
            return self._held
        return _Finding("unreach-grace", f"/metrics fails ({self._failing_how}) for {failing:.0f} s of {limit:g} s")

    def _worst_core(self, t: float) -> _Finding:
        worst: _Finding | None = None
        hung = 0
        for core in self._ledger.cores.values():
            finding = self._judge_core(core, t)
            core.state = finding.state
            hung += finding.state in HUNG
            if worst is None or RANK[finding.state] < RANK[worst.state]:
                worst = finding
        if worst is None:
            # Only between a page that lost its last core and the poll that calls it no-legs.
            return _Finding("no-legs", "the page has no progress series")
        if hung > 1:
            return _Finding(worst.state, f"{worst.reason} (and {hung - 1} more)", worst.core)
        return worst

    def _judge_core(self, core: Core, t: float) -> _Finding:
        """The first state of this core that holds; a few harmless ones give way to `peer-stall`."""
        polls, name, run = self._polls, core.name, core.run
        if core.baseline_poll == polls:
            return _Finding("baseline", f"core {name}: first page of this process", name)
        if core.fell_poll == polls:
            return _Finding("regress", f"core {name}: a counter fell in the same process, baseline taken anew", name)
        grew_after_failure = core.grew_after_failure_poll == polls
        if grew_after_failure and core.grew_after_failure_with_counter:
            return self._grew_after_failure(core)
        if core.counter_poll == polls:
            return self._unless_peer_stall(core, t, "growing", f"core {name}: {core.moved_leg} moves")
        if core.hang == "stall-hang-log" or self._hung_by_log(core, t):
            core.hang = "stall-hang-log"
            return self._say_hung_by_log(core, t)
        if grew_after_failure:
            return self._grew_after_failure(core)
        if core.gauge_poll == polls:
            return self._unless_peer_stall(
                core, t, "kv-growing", f"core {name}: only {core.moved_leg} rises, a prefill is allocating blocks"
            )
        frozen = t - core.proof_at
        threshold = core.stall_after_sec(self.settings.stall_sec)
        if core.hang == "stall-hang" or self._hung_by_canaries(core, t, frozen, threshold):
            core.hang = "stall-hang"
            return self._say_hung(core, t, frozen, threshold)
        if self._hung_passively(core, t, frozen, threshold):
            core.hang = "stall-hang"
            return self._say_hung(core, t, frozen, threshold)
        if run.last_failed:
            return _Finding(
                "probe-fail-grace",
                f"core {name}: {_canaries_failed(run.failures, run.last_outcome)}, frozen for {frozen:.0f} s of "
                f"{threshold:g} s",
                name,
            )
        if run.last_outcome is not None:
            state = "saturated" if run.last_outcome is Outcome.SATURATED else "misconfigured"
            return _Finding(state, f"core {name}: {_NEITHER[state]}, frozen for {frozen:.0f} s", name)
        if core.proof_by == Proof.CANARY:
            return self._unless_peer_stall(
                core, t, "stall-active-ok", f"core {name}: idle, the last canary went through"
            )
        if self._request is None and frozen >= threshold and not self._busy(core):
            turns = self._heartbeat_says(core, t, threshold)
            return self._unless_peer_stall(core, t, "idle", f"core {name}: idle, {turns}")
        return self._unless_peer_stall(
            core, t, "freeze-grace", f"core {name}: nothing moved for {frozen:.0f} s of {threshold:g} s"
        )

    def _grew_after_failure(self, core: Core) -> _Finding:
        return _Finding(
            "probe-fail-but-growing",
            f"core {core.name}: the last canary failed, but {core.moved_leg} moved since: one long step",
            core.name,
        )

    def _hung_by_canaries(self, core: Core, t: float, frozen: float, threshold: float) -> bool:
        """The active rule. Asks for a page at the moment at which only time is missing."""
        run, poll = core.run, self.settings.poll_interval_sec
        if run.failures < self.settings.active_probe_min_failures:
            return False
        ready_at = max(core.proof_at + threshold, run.first_begun + threshold - poll)
        if t < ready_at:
            if ready_at - t < poll and self._recheck_at is None:
                self._recheck(ready_at, t)
            return False
        return core.page_begun >= run.last_ended

    def _hung_passively(self, core: Core, t: float, frozen: float, threshold: float) -> bool:
        """The rule without a usable canary: frozen for longer, and busy or with a frozen heartbeat."""
        if not self._canary_unusable(core):
            return False
        limit = threshold + self._ledger.profile.gauge_stale_sec
        return frozen >= limit and (self._busy(core) or self._heartbeat_frozen(core, t, limit))

    def _canary_unusable(self, core: Core) -> bool:
        if self._request is None:
            return True
        if core.run.last_outcome is not None and not core.run.last_failed:
            return True  # saturated or misconfigured
        return len(self._ledger.cores) > 1 and not self._can_aim

    def _hung_by_log(self, core: Core, t: float) -> bool:
        """The log rule: outranks a rising gauge, never a counter."""
        if not self._log_speaks(core, t) or t - core.counter_proof_at < self.settings.log_stall_sec:
            return False
        if self._request is None:
            return self._busy(core)
        return core.failed_begun > core.counter_proof_at

    def _unless_peer_stall(self, core: Core, t: float, state: str, reason: str) -> _Finding:
        if self.role != "agg":
            queue = core.stuck_queue(t, self.settings.peer_stall_sec)
            if queue is not None and queue.stuck_since is not None:
                return _Finding(
                    "peer-stall",
                    f"core {core.name}: {queue.value:g} requests in {queue.name} for {t - queue.stuck_since:.0f} s and "
                    "no transfer succeeded: the partner, or a stale identity of it, is at fault",
                    core.name,
                )
        return _Finding(state, reason, core.name)

    def _busy(self, core: Core) -> bool:
        page, disaggregated = self._ledger.page, self.role != "agg"
        return bool((core.running(page) or 0) > 0 or (core.waiting(page, without_deferred=disaggregated) or 0) > 0)

    def _heartbeat_frozen(self, core: Core, t: float, limit: float) -> bool:
        return (
            core.heartbeat_at is not None
            and core.heartbeat_page == self._ledger.page
            and t - core.heartbeat_at >= limit
        )

    def _heartbeat_says(self, core: Core, t: float, threshold: float) -> str:
        if core.heartbeat_at is None or core.heartbeat_page != self._ledger.page:
            return "cannot tell more: canaries are off"
        if t - core.heartbeat_at >= threshold:
            return "but its scheduler loop does not turn"
        return "its scheduler loop turns"

    def _say_hung(self, core: Core, t: float, frozen: float, threshold: float) -> _Finding:
        run = core.run
        if run.failures >= self.settings.active_probe_min_failures:
            witness = _canaries_failed(run.failures, run.last_outcome)
        elif self._busy(core):
            witness = f"busy, and no usable canary{_said(run.last_outcome)}"
        elif self._heartbeat_frozen(core, t, threshold):
            witness = f"its scheduler loop does not turn, and no usable canary{_said(run.last_outcome)}"
        else:
            witness = "no proof of life since it was declared hung"
        grain = ", its legs move only at request ends" if core.request_grained else ""
        return _Finding(
            "stall-hang",
            f"core {core.name}: no progress for {frozen:.0f} s (limit {threshold:g} s{grain}), {witness}, "
            f"{self._load(core)}",
            core.name,
        )

    def _say_hung_by_log(self, core: Core, t: float) -> _Finding:
        witness = "busy, canaries are off" if self._request is None else "a canary failed"
        return _Finding(
            "stall-hang-log",
            f"core {core.name}: counters frozen for {t - core.counter_proof_at:.0f} s, the log says that the scheduler "
            f"is dead ({t - self._log_hit_at:.0f} s ago), {witness}, {self._load(core)}",
            core.name,
        )

    def _load(self, core: Core) -> str:
        page = self._ledger.page
        running, waiting = core.running(page), core.waiting(page, without_deferred=False)
        if running is None and waiting is None:
            return "load unknown"
        return f"{running or 0:g} running, {waiting or 0:g} waiting"

    # --- memory -----------------------------------------------------------------------------------------------------

    def _log(self, level: Literal["info", "warning", "error"], event: str, **fields: object) -> None:
        self._out.append(Log(level, event, fields))

    def _remember(self, event: Event, now: float) -> None:
        story = self._story
        if len(story) == _STORY_EVENTS:
            self._forget_oldest()
        story.append(StoryEntry(now, event, self._verdict.state))
        if type(event) is Scraped:
            self._story_samples += len(event.samples)
            while self._story_samples > _STORY_SAMPLES and len(story) > 1:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        entry = self._story.popleft()
        if type(entry.event) is Scraped:
            self._story_samples -= len(entry.event.samples)

    def _facts(self, now: float) -> explain_module.Facts:
        t = self._clock.at(now)
        return explain_module.Facts(
            t=t,
            verdict=self._verdict,
            finding_state=self._finding.state,
            settings=self.settings,
            role=self.role,
            profile=self._profile,
            cores=tuple(self._ledger.cores.values()),
            page=self._ledger.page,
            canary=self._request,
            can_aim=self._can_aim,
            can_ask_flags=bool(self._profile and self._profile.flag_endpoints and not self._flags_absent),
            resting=self._resting,
            failing_since=self._failing_since,
            failing_how=self._failing_how,
            loading_since=self._phase_since if self._phase != "running" else None,
            outage_failures=self._outage_failures,
            blind_since=self._blind_since,
            blind_failures=self._blind_failures,
            log_channel=self.log_channel,
            log_problem=self.log_problem,
            log_hit_at=self._log_hit_at if self._log_hit_at != _NEVER else None,
            process_since=self._process_since if self._process_since != _NEVER else None,
            last_page_at=self._last_begun if self._last_begun != _NEVER else None,
        )


_NEITHER: Final = {
    "saturated": "the last canary was turned away because the engine is full",
    "misconfigured": "the last canary was refused for a reason that is no hang (wrong path, key or body)",
}


def _is_an_answer(failure: str) -> bool:
    """Whether a failed scrape means `no-legs`: the engine answered, but not with a page."""
    return failure == "malformed" or (failure.startswith("http_") and not failure.startswith("http_5"))


def _no_page(failure: str, detail: str) -> str:
    if failure == "malformed":
        return f"/metrics answers with something that is not metrics{f' ({detail})' if detail else ''}"
    return f"/metrics answers {failure.removeprefix('http_')}"


def _canaries_failed(failures: int, outcome: Outcome | None) -> str:
    return f"{failures} canar{'y' if failures == 1 else 'ies in a row'} failed ({outcome})"


def _said(outcome: Outcome | None) -> str:
    return f" (the last one: {outcome})" if outcome is not None else ""
