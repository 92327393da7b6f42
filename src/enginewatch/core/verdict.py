"""The judgement: is this engine hung? Everything that changes the verdict goes through `Watch.handle`.

How an engine is judged, in the order in which it is tried (`states.py` has the names and a line on each):

1. Engine-wide. `reach.py`: does it answer at all (startup, restarting, outages). Then `observer-gap`, `replaced`, and
   `rest.py`: does it rest on purpose (`paused`). `blind.py`: a page without progress legs leaves it to canaries.
2. Per core, by `core_rules.py` over the ledger of `progress.py`; the engine's state is its worst core's.
3. A hang inside warm-up is shown as `warmup-X`, in shadow mode as `shadow-X`, and not acted on. Warm-up begins with the
   first answer of a process and again with each replacement, never with a flap.

Beside the verdict, `canaries.py` says which canary goes out next, `role.py` in which role and whether a failure counts,
`canary_answers.py` what an answer counts for, and `process_witnesses.py` which process this is. Nothing here reads a
clock, draws a random number or touches the outside: the same events give the same verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

from enginewatch.core import explain as explain_module
from enginewatch.core.blind import Blindness, how_long_canaries_take_sec
from enginewatch.core.canaries import CanaryDesk, InFlight, Purpose, next_core
from enginewatch.core.canary_answers import count_answer
from enginewatch.core.clock import GapClock
from enginewatch.core.core_rules import Conditions, is_busy, judge_core, log_speaks, recheck_at, still_holds
from enginewatch.core.events import (
    AbandonCanary,
    CanaryDone,
    CaptureEvidence,
    DescribeEngine,
    EngineDescribed,
    Event,
    Flags,
    FlagsRead,
    Instruction,
    KvBootstrapRead,
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
from enginewatch.core.fingerprint import NO_DURATIONS, Durations
from enginewatch.core.identity import Change, Identity, IdentityTracker
from enginewatch.core.process_witnesses import ProcessWitnesses
from enginewatch.core.progress import Core, Ledger, PageNews, Proof
from enginewatch.core.reach import Reach, is_an_answer, is_unasked
from enginewatch.core.rest import DOUBT_SEC, Rest
from enginewatch.core.role import WorkerRole
from enginewatch.core.settings import Settings
from enginewatch.core.states import EVERYDAY, HUNG, RANK, WARNED_OF, Finding
from enginewatch.core.statistics import NOT_READ
from enginewatch.core.story import Story, StoryEntry
from enginewatch.core.unidentified import why_unidentified
from enginewatch.engines import ALL_NAMES, PROFILES, UNKNOWN, recognise
from enginewatch.engines.profile import DYNAMIC, AnswerFormat, CanaryRequest, FlagEndpoint, Profile, Role, ToldRole

DESCRIBE_POLLS: Final = 10
"""Polls between two attempts to learn the version of an engine that did not say."""
_NEVER: Final = float("-inf")


class Watch:
    """Judges one engine. Feed it every event through `handle`, in order; nothing else changes its state.

    Args:
        settings: the effective hot settings.
        profile: the engine's profile; None recognises it from its page (ENGINE_KIND=auto).
        role: the worker's role, which decides the canary and whether `peer-stall` exists; None = what the engine says,
            else `agg`.
        json_statistics: whether the engine's JSON statistics are read in place of its page, where it has any.
        log_channel: whether a log file is followed.
        watcher_started_ms: unix time in milliseconds, part of `observed` identities.
        identity: what a judgement before this one knew of the process; None = nothing.
        now: the caller's monotonic seconds at creation.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        profile: Profile | None = None,
        role: Role | None = None,
        json_statistics: bool = False,
        log_channel: bool = False,
        watcher_started_ms: int = 0,
        identity: IdentityTracker | None = None,
        now: float,
    ) -> None:
        self.settings = settings
        self._worker = WorkerRole(role)
        self.log_channel = log_channel
        self.log_problem: str | None = None
        self.version: str | None = None
        self._auto = profile is None
        self._json_statistics = json_statistics
        self._batches_statistics = False
        self._profile = None if profile is None else self._as_read(profile)
        self._clock = GapClock(now)
        self._ledger = Ledger(self._profile or UNKNOWN)
        self._identity = identity if identity is not None else IdentityTracker(watcher_started_ms)
        self._process = ProcessWitnesses(self._identity, self._log)
        self._reach = Reach(now)
        self._reach.longest_step_sec = self._ledger.profile.longest_step_sec
        self._blind = Blindness()
        self._rest = Rest()
        self._rested = False
        self._desk = CanaryDesk()
        self._request: CanaryRequest | None = None
        self._take_request()

        self._polls = 0
        self._gap_poll = self._replaced_poll = -1
        self._describe_poll = 0
        self._process_since = _NEVER
        self._last_begun = _NEVER
        self._log_hit_at = _NEVER
        self._said_stray = False
        self._said_unwatched = False
        self._said_role_untold = False
        self._said_roles: set[ToldRole] = set()
        self._recheck_at: float | None = None
        self._out: list[Instruction] = []
        self._story = Story()
        self._adopted_bytes = 0
        self._finding = Finding("startup", "no page from the engine yet: it is loading")
        self._standing = self._finding
        """What holds by what was last seen, also while the watcher cannot ask."""
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
    def why_unidentified(self) -> str:
        """One sentence that says why `identity` is None."""
        waits_for = None
        if self._identity.has_met_process:
            waits_for = "which engine it is" if self._profile is None else "how long its weights took to load"
        return why_unidentified(self._reach, self._blind, waits_for=waits_for)

    @property
    def restarts(self) -> int:
        """Replacements seen so far."""
        return self._identity.restarts

    @property
    def names(self) -> frozenset[str]:
        """The sample names to ask the page for."""
        if self._may_be_another_kind:
            return ALL_NAMES
        return self._ledger.profile.names()

    @property
    def canary(self) -> CanaryRequest | None:
        """The canary request as it stands: the profile's with the operator's overrides.

        None = canaries are off, or the engine is in no single role.
        """
        return self._request

    @property
    def canary_role(self) -> Role:
        """The role that `canary` is for: the engine's own word before the operator's."""
        return self._worker.canary_role or self._worker.role

    @property
    def role(self) -> Role:
        """The worker's role: the operator's word, else the engine's, else `agg`."""
        return self._worker.role

    @property
    def core_names(self) -> tuple[str, ...]:
        """The cores on the page, which a canary's aim may be relative to."""
        return tuple(self._ledger.cores)

    @property
    def flag_endpoints(self) -> tuple[FlagEndpoint, ...]:
        """The pause endpoints whose answers can be trusted on this engine's version: what `ReadFlags` asks."""
        return self._profile.flags_for(self.version) if self._profile is not None else ()

    def explain(self, now: float) -> explain_module.Explanation:
        """Every witness with its age, every core, and what would flip the verdict. Pure; changes nothing."""
        return explain_module.explain(self._facts(now))

    def story(self) -> list[StoryEntry]:
        """The most recent events with the state after each; feeding them to a new Watch gives the same states."""
        return self._story.entries()

    # --- the one way in ---------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in one event that happened at `now` (monotonic seconds, never falling) and say what to do."""
        self._out = []
        settings = self.settings
        poll = settings.poll_interval_sec
        longest = 2 * poll + settings.metrics_timeout_sec + self._page_waits_sec
        if self._clock.advance(now, longest=longest, keep=poll):
            self._gap_poll = self._polls + 1
            self._identity.interrupted()
            if isinstance(event, CanaryDone):
                self._desk.finish(event.token)  # over, so there is nothing to abandon; and it counts for nothing
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
                self._on_flags(event, t)
            case EngineDescribed():
                self._on_described(event, t)
            case KvBootstrapRead():
                if self._process.kv_read(event, t) and not self._reach.down:
                    self._recheck(t, t)
            case LogHits():
                if event.count > 0:
                    self._log_hit_at = t
            case LogChannelChanged():
                self._on_log_channel(event.problem)
            case SettingsChanged():
                self._on_settings(event.settings, t)
            case Tick():
                pass
        conditions = self._conditions(t)
        self._judge(conditions, now)
        self._send_canary(conditions)
        self._remember(event, now)
        return self._out

    # --- scrapes ----------------------------------------------------------------------------------------------------

    def _on_page(self, event: Scraped, t: float, now: float) -> None:
        begun = min(self._clock.at(event.started_at), t)
        if not event.recheck:
            self._begin_poll(t)
        self._reach.asked(begun)
        if begun < self._last_begun:
            # Overtaken by a recheck that began later: what that one saw is this poll's picture.
            if not event.recheck:
                self._ledger.turn_poll(self._polls)
                self._ask_stalled(t)
            return
        page_before, self._last_begun = self._last_begun, begun
        self._recheck_at = None
        durations = self._ledger.durations
        series, said = len(durations), durations.on(event.samples)
        if self._identity.is_stray(self._ledger.start_time_of(event.samples), said):
            self._on_stray(t, recheck=event.recheck)
            return
        if self._may_be_another_kind:
            self._recognise(event.samples, t)
        news = self._ledger.take(event.samples, t, begun, self._polls, recheck=event.recheck)
        if len(self._ledger.durations) != series or self._ledger.durations is not durations:
            said = self._ledger.durations.on(event.samples)  # a series that joins, or everything of a new kind
        self._answered(news, event, t, begun, now, said)
        self._hear_role(t, on_page=self._worker.on_page(event.samples, self._ledger.profile))
        for core in self._ledger.cores.values():
            core.note_busy(self._ledger.page, t, without_deferred=self.role != "agg")
        disbelief = self._rest.read(
            news.resting,
            t,
            call_awaited=news.call_awaited,
            rose=news.rose,
            worked_until=min((core.counter_at for core in self._ledger.cores.values()), default=_NEVER),
        )
        if disbelief is not None:
            self._log("warning", disbelief)
        if news.rose:
            self._rest.counters_moved(page_before)
        if news.moved or news.fell:
            self._blind.legs_moved()
        if news.cores_with_legs:
            self._end_blindness()
        elif not event.recheck or not self._ledger.cores:
            self._page_without_legs(t, self._ledger.profile.why_no_legs)
        self._follow_rest(t)
        if not event.recheck:
            self._ask_stalled(t)

    def _on_stray(self, t: float, *, recheck: bool) -> None:
        """A page of a process that was replaced before: not this engine's, so it neither proves nor disproves life."""
        if not self._said_stray:
            self._said_stray = True
            self._log("error", "two engine processes answer in turn behind this address: ENGINE_URL must name one")
        if not recheck:
            self._ledger.turn_poll(self._polls)
            self._ask_stalled(t)

    def _on_failed_scrape(self, event: ScrapeFailed, t: float, now: float) -> None:
        if event.recheck:
            return  # the next poll decides
        self._begin_poll(t)
        begun = self._clock.at(event.started_at)
        if is_unasked(event.failure):
            if self._reach.unasked_since is None and self._reach.phase != "running":
                self._log("warning", f"the watcher cannot ask the engine: {event.detail}")  # the state does not change
            self._reach.unasked(begun, event.detail)
            self._desk.outage_due = False
            return
        self._reach.asked(begun)
        self._process.interrupted()
        if is_an_answer(event.failure):
            self._answered(None, None, t, begun, now)
            self._rest.by_page = None
            self._page_without_legs(t, self._why_no_page(event.failure, event.detail), at_once=True)
            self._follow_rest(t)
            self._ask_stalled(t)
            return
        loads = event.failure == f"http_{self._ledger.profile.loading_status}"
        gone = loads or event.failure == "refused"
        self._desk.outage_due = not gone  # a canary could tell nothing more
        if gone:
            self._identity.refused()
        # A refusal forgets nothing: that is for the process that answers next, which may be the same.
        resting = self._rest.state is not None
        self._reach.failed(event.failure, begun, t, self._standing, resting=resting, loads=loads)

    def _begin_poll(self, t: float) -> None:
        self._polls += 1
        self._rest.poll(self._polls)
        self._desk.begin_poll()
        self._follow_rest(t)
        in_flight = self._desk.in_flight
        if in_flight is not None and t > in_flight.lost_at:
            self._log("error", "a canary was never reported; going on without it")
            self._abandon()
        if self.version is None and self._reach.phase == "running" and self._polls >= self._describe_poll:
            self._describe()

    def _answered(
        self,
        news: PageNews | None,
        page: Scraped | None,
        t: float,
        begun: float,
        now: float,
        durations: Durations = NO_DURATIONS,
    ) -> None:
        """The engine answered, with a page or (None) with something else: is it the same process or another one?"""
        gone, refused_at = self._reach.phase == "restarting", self._reach.phase_since
        in_flight = self._desk.in_flight
        if self._reach.down and in_flight is not None and in_flight.purpose == "outage":
            # The first good page after a network outage must not meet a canary that was lost in it.
            self._abandon()
        self._reach.answered()
        self._said_unwatched = False
        self._desk.outage_due = False
        known = self._identity.identity
        if news is None and (known is None or known.is_durable):
            # Not a page: it cannot say which process it is, so the published identity stands, and none is made up.
            if gone or self._process_since == _NEVER:
                self._replaced(page, t, begun, counted=False, may_be_left=True)
            return
        change = self._process.answered(news, durations, begun=begun, now=now, profile=self._profile)
        unknown = news is None or self._identity.suspects_replacement
        if change is Change.REPLACED or (gone and change is Change.SAME and unknown):
            # Of files that outlive a process the sums outlive it as well: where one fell, nothing was left behind.
            may_be_left = news is None or not news.fell
            self._replaced(page, t, begun, counted=change is Change.REPLACED, may_be_left=may_be_left)
            return
        if gone:
            durable = known is not None and known.is_durable
            named = durable and news is not None and self._identity.names_process
            self._same_after_refusal(refused_at, begun, named=named)
        if change is Change.FIRST or self._process_since == _NEVER:
            self._new_process(t)
        elif news is not None and news.fell:
            for core in self._ledger.cores.values():
                if core.fell_poll == self._polls:
                    core.prove(t, Proof.RESET)
            self._log("warning", "a counter fell although the engine's identity did not change: a registry reset")

    def _same_after_refusal(self, refused_at: float, begun: float, *, named: bool) -> None:
        """Nobody listened for a while, and nothing says that another process answers now (`named`: it says so)."""
        for core in self._ledger.cores.values():
            core.nobody_listened(refused_at, max(refused_at, begun))
            if not named:
                core.doubt_identity(refused_at)

    def _replaced(self, page: Scraped | None, t: float, begun: float, *, counted: bool, may_be_left: bool) -> None:
        """Another process answers: learn everything anew. `may_be_left`: the page may show what the one before left."""
        self._abandon()
        self._ledger.forget()
        if page is not None:
            self._ledger.take(page.samples, t, begun, self._polls, recheck=page.recheck)
        if may_be_left:
            self._doubt_load()
        self._blind = Blindness()
        self._rest = Rest()
        self._rested = False
        self._log_hit_at = _NEVER
        if counted:
            self._replaced_poll = self._polls
            identity = self._identity.identity
            named = {"engine_id": identity.engine_id} if identity is not None else {}
            self._log(
                "warning", "the engine was replaced by another process", **named, restarts=self._identity.restarts
            )
        self._new_process(t)

    def _doubt_load(self) -> None:
        """Several processes write files for one page, and where these outlive them it shows a dead one's gauges.

        They stand until the new process has work of its own: on an idle one, for ever. A registry of one process, which
        tells its start time, lives and dies with it.
        """
        identity = self._identity.identity
        if identity is None or identity.source != "process_start_time":
            for core in self._ledger.cores.values():
                core.doubts_load = True

    def _new_process(self, t: float) -> None:
        """The first answer of a process: warm-up begins, the arming canary goes out, and it is asked who it is."""
        self._process_since = t
        self._desk.new_process()
        self._worker.new_process()
        self.version = None
        self._describe()

    def _describe(self) -> None:
        self._describe_poll = self._polls + DESCRIBE_POLLS
        self._out.append(DescribeEngine())

    def _page_without_legs(self, t: float, why: str, *, at_once: bool = False) -> None:
        at_once = at_once or not self._ledger.cores
        patience_sec = how_long_canaries_take_sec(self.settings, self._patient_deadline_sec)
        begins, forget = self._blind.page_without_legs(t, why, at_once=at_once, patience_sec=patience_sec)
        if forget:
            self._ledger.forget()
        if begins and self._request is None:
            self._log("error", f"nothing to judge by: {why}, and canaries are off; the engine is not watched")
        self._desk.blind_due = self._blind.since is not None

    @property
    def _patient_deadline_sec(self) -> float:
        """A canary's deadline where there is no other witness: a prefill, or a queue, may hold it back for long."""
        settings = self.settings
        # A path of the operator's own may go past the queue.
        own_path = self._request is not None and self._request.answer is AnswerFormat.ANY_2XX
        wait_sec = 0.0 if own_path else self._ledger.profile.longest_wait_sec
        return max(settings.active_probe_timeout_sec, settings.stall_sec, wait_sec)

    def _end_blindness(self) -> None:
        """Legs are back: the patient canary of the time without them makes room for the cores' own."""
        in_flight = self._desk.in_flight
        if self._blind.legs_are_back() and in_flight is not None and in_flight.purpose == "blind":
            self._abandon()

    # --- canaries ---------------------------------------------------------------------------------------------------

    def _ask_stalled(self, t: float) -> None:
        """Mark the cores that have a stalled poll, and see whether the engine says that it rests."""
        conditions = self._conditions(t)
        stalled = not self._ledger.cores
        for core in self._ledger.cores.values():
            core.canary_due = self._is_stalled(core, conditions)
            stalled = stalled or core.canary_due
        if (stalled or self._rest.state is not None) and self.flag_endpoints and self._rest.ask(self._polls):
            self._out.append(ReadFlags())

    def _is_stalled(self, core: Core, now: Conditions) -> bool:
        """No leg moved since the previous poll, or the log holds a signature newer than the last counter progress."""
        if self._polls in (core.baseline_poll, core.fell_poll, core.counter_poll):
            return False
        return core.gauge_poll != self._polls or log_speaks(core, now)

    def _send_canary(self, now: Conditions) -> None:
        desk, settings = self._desk, self.settings
        if desk.in_flight is not None or self._request is None or self._rest.state is not None:
            return
        timeout = settings.active_probe_timeout_sec
        if self._reach.down:
            if desk.outage_due:
                desk.outage_due = False
                self._start("outage", None, now.t, timeout)
            return
        if self._blind.since is not None:
            if desk.blind_due or desk.arming_due:
                desk.blind_due = desk.arming_due = False
                self._start("blind", None, now.t, self._patient_deadline_sec)
            return
        cores = self._ledger.cores
        if not cores or not now.aimable:
            return
        core = next_core(
            cores.values(),
            busy=lambda core: is_busy(core, now),
            arming=desk.arming_due,
            may=lambda core: self._may_ask(core, now),
        )
        if core is not None:
            core.canary_due = desk.arming_due = False
            self._start("core", core.name, now.t, timeout, aim=len(cores) > 1)

    def _start(self, purpose: Purpose, core: str | None, t: float, deadline_sec: float, *, aim: bool = False) -> None:
        deadline_at = t + deadline_sec
        lost_at = deadline_at + 2 * self.settings.poll_interval_sec + self.settings.metrics_timeout_sec
        token = self._desk.start(purpose, core, t, deadline_at, lost_at).token
        self._out.append(StartCanary(token, core if aim else None, deadline_sec))

    def _may_ask(self, core: Core, now: Conditions) -> bool:
        """`active_probe_idle_sec` spaces canaries on a core that is not busy and whose last one was ok."""
        idle_sec = self.settings.active_probe_idle_sec
        if idle_sec <= 0 or core.run.last_outcome is not None or is_busy(core, now):
            return True
        return now.t - core.canary_ok_begun >= idle_sec

    def _abandon(self) -> None:
        in_flight = self._desk.in_flight
        if in_flight is not None:
            self._out.append(AbandonCanary(in_flight.token))
            self._desk.in_flight = None

    def _on_canary(self, event: CanaryDone, t: float) -> None:
        done = self._desk.finish(event.token)
        if done is None:
            return
        news = count_answer(
            event,
            done,
            t,
            core=self._core_of(done),
            desk=self._desk,
            blind=self._blind,
            reach=self._reach,
            failures_count=self._failures_count,
        )
        if news.late_sec is not None:
            self._log("warning", f"a canary's deadline was noticed {news.late_sec:.1f} s late: the watcher lacks CPU")
        if news.uncounted is not None and not self._said_role_untold:
            self._said_role_untold = True
            self._log(
                "warning",
                f"a canary of role {self.canary_role} failed ({news.uncounted}) and counts for nothing: the engine has "
                "not told its role; set ENGINE_ROLE",
            )
        if news.in_outage and not self._said_unwatched:
            reach = self._reach
            if reach.only_answers and reach.lasts_too_long(t, self.settings):
                self._said_unwatched = True
                self._log("error", "/metrics fails and canaries are refused: the engine is not watched")
        if news.look_again:
            self._recheck(t, t)

    def _core_of(self, done: InFlight) -> Core | None:
        """The core that an answer speaks for: the one aimed at, or the only one there is."""
        cores = self._ledger.cores
        if done.core is not None:
            return cores.get(done.core)
        return next(iter(cores.values())) if len(cores) == 1 else None

    def _recheck(self, at: float, t: float) -> None:
        self._recheck_at = at
        self._out.append(Rescrape(max(0.0, at - t)))

    # --- pauses, log, description -----------------------------------------------------------------------------------

    def _follow_rest(self, t: float) -> None:
        """A rest that begins takes the canary back; one that ends is a proof of life for every core."""
        resting = self._rest.state is not None
        if resting and not self._rested:
            self._abandon()
        if resting or self._rested:
            for core in self._ledger.cores.values():
                core.prove(t, Proof.PAUSE_ENDED)
            self._blind.proof(t)
        self._rested = resting

    def _on_flags(self, event: FlagsRead, t: float) -> None:
        rest = self._rest
        was, doubted = rest.state, rest.doubt_until is not None
        if rest.told(event.flags, self._polls, t, version_known=self.version is not None):
            self._log(
                "warning",
                f"the engine said that it is {rest.state}, and now calls itself unhealthy, which hides it: taken to be "
                f"{rest.state} for {DOUBT_SEC:g} s at most",
            )
        elif doubted and rest.state is None and event.flags is Flags.DOUBTFUL:
            self._log("warning", f"the engine was {was}, then unhealthy for {DOUBT_SEC:g} s: judged again")
        self._follow_rest(t)

    def _on_described(self, event: EngineDescribed, t: float) -> None:
        self.version = event.version
        self._batches_statistics = event.batches_statistics
        if event.kind in PROFILES and self._may_be_another_kind:
            self._adopt(self._as_read(PROFILES[event.kind]), t)
        elif self._profile is not None and self._profile.reads_json_statistics:
            self._adopt(self._as_read(self._profile), t)
        self._hear_role(t, described=event.role)

    def _hear_role(self, t: float, *, on_page: ToldRole | None = None, described: ToldRole | None = None) -> None:
        """The engine may have told its role: what was seen in another one counts for nothing."""
        worker = self._worker
        if not worker.hear(on_page=on_page, described=described) or worker.told is None:
            return
        self._say_role(worker.told)
        request = self._request
        self._take_request()
        if self._request != request:
            self._forget_canaries(t)

    def _say_role(self, told: ToldRole) -> None:
        worker = self._worker
        if told in self._said_roles or told == (worker.role if worker.is_given else None):
            return
        self._said_roles.add(told)
        if told == DYNAMIC:
            self._log(
                "warning",
                "the engine is in no single role, so that no canary of a role is sent: give ACTIVE_PROBE_BODY, or "
                "ACTIVE_PROBE_PATH, one that it answers in each",
            )
        elif worker.is_given:
            self._log(
                "warning",
                f"ENGINE_ROLE is {worker.role}, but the engine says that it is {told}: it is judged as {worker.role}, "
                f"and sent the canary of role {told}, the only one that it can answer; set ENGINE_ROLE={told}",
            )
        else:
            self._log("info", f"the engine says that its role is {told}: judged as that", role=told)

    def _forget_canaries(self, t: float) -> None:
        """Another canary from now on: whatever became of the ones before counts for nothing, and it has to be armed."""
        self._abandon()
        self._desk.armed, self._desk.arming_due = False, True
        self._blind.forget_failures()
        self._reach.forget_failures()
        for core in self._ledger.cores.values():
            core.forget_canaries()
        self._drop_hangs(t)

    @property
    def _failures_count(self) -> bool:
        return self._request is not None and self._worker.may_count(was_answered=self._desk.armed)

    @property
    def _may_be_another_kind(self) -> bool:
        return self._auto and (self._profile is None or self._blind.since is not None)

    def _recognise(self, samples: Mapping[str, float], t: float) -> None:
        profile = recognise(series.partition("{")[0] for series in samples)
        if profile is not None:
            # The page is where it was found, and not where this engine has it by itself: somebody passes it on.
            path = (self._profile or UNKNOWN).metrics_path
            self._adopt(profile if profile.metrics_path == path else replace(profile, metrics_path=path), t)

    def _as_read(self, profile: Profile) -> Profile:
        """An engine as the operator wants it to be read."""
        return profile.on_json_statistics(batched=self._batches_statistics) if self._json_statistics else profile

    @property
    def _page_waits_sec(self) -> float:
        """How long the engine keeps the reader of its page waiting on purpose."""
        profile = self._profile
        if profile is None or not profile.reads_json_statistics or profile.json_statistics is None:
            return 0.0
        return profile.json_statistics.waits_sec

    def _why_no_page(self, failure: str, detail: str) -> str:
        profile = self._profile or UNKNOWN
        where = "/metrics" if profile.metrics_path == UNKNOWN.metrics_path else "its metrics page"
        if detail == NOT_READ and self._json_statistics and self._may_be_another_kind:
            # It is asked who it is at the next poll, and read from then on.
            return f"{where} has JSON statistics, which are not read before it is known which engine this is"
        if failure == "malformed":
            return f"{where} answers with something that is not metrics{f' ({detail})' if detail else ''}"
        hint = profile.how_to_get_metrics_in_short
        return f"{where} answers {failure.removeprefix('http_')}{f' ({hint})' if hint else ''}"

    def _adopt(self, profile: Profile, t: float) -> None:
        known = self._profile
        if profile == known:
            return
        self._profile = profile
        self._ledger = Ledger(profile)
        self._reach.longest_step_sec = profile.longest_step_sec
        self._adopted_bytes = 0
        request = self._request
        self._take_request()
        if known is None or known.kind != profile.kind:
            if profile.role_words is not None and self._request != request:
                self._forget_canaries(t)
            self._log("info", f"the engine is {profile.title}", kind=profile.kind)

    def _on_settings(self, settings: Settings, t: float) -> None:
        """New settings; whoever asks for more patience means the hang that stands as well."""
        before, self.settings = self.settings, settings
        self._take_request()
        if _patience(before) == _patience(settings):
            return
        self._drop_hangs(t)

    def _drop_hangs(self, t: float) -> None:
        """End the declared hangs that would be none by what counts now."""
        conditions = self._conditions(t)
        for core in self._ledger.cores.values():
            if core.hang is not None and not still_holds(core, conditions):
                core.hang = None

    def _take_request(self) -> None:
        self._request = self._worker.request(self.settings, self._profile or UNKNOWN)

    @property
    def _can_aim(self) -> bool:
        return self._request is not None and self._request.aim_for(self.version) is not None

    def _on_log_channel(self, problem: str | None) -> None:
        self.log_problem = problem
        if problem is None:
            self._log("info", "the engine's log is being followed")
        else:
            self._log("warning", f"the engine's log cannot be followed, judging without it: {problem}")

    # --- the verdict ------------------------------------------------------------------------------------------------

    def _conditions(self, t: float) -> Conditions:
        return Conditions(
            self.settings,
            t,
            self._polls,
            self._ledger.page,
            self._last_begun,
            disaggregated=self.role != "agg",
            canaries_on=self._failures_count,
            aimable=len(self._ledger.cores) <= 1 or self._can_aim,
            gauge_stale_sec=self._ledger.profile.gauge_stale_sec,
            log_hit_at=self._log_hit_at,
        )

    def _judge(self, conditions: Conditions, now: float) -> None:
        t, settings = conditions.t, self.settings
        before = self._finding
        self._standing = self._engine_wide(t) or self._by_cores(conditions)
        self._finding = finding = self._unless_unasked(self._standing, before, t)
        hung = finding.state in HUNG
        state, acting, reason = finding.state, hung, finding.reason
        warmup_left = settings.warmup_sec - (t - self._process_since)
        if hung and settings.mode == "shadow":
            state, acting = f"shadow-{state}", False
            reason = f"{reason}; not acted on in shadow mode"
        elif hung and state != "startup-hang" and warmup_left > 0:
            state, acting = f"warmup-{state}", False
            reason = f"{reason}; not acted on for another {warmup_left:.0f} s of warm-up"
        old = self._verdict
        if (state, reason, finding.core, acting) == (old.state, old.reason, old.core, old.acting):
            return
        since = now if hung != old.hung else old.hung_changed_at
        self._verdict = verdict = Verdict(state, hung, acting, reason, finding.core, since)
        self._out.append(Publish(verdict))
        if state == old.state:
            return
        if not (state in EVERYDAY and old.state in EVERYDAY):
            worth_a_look = hung or state in WARNED_OF
            level: Literal["info", "warning", "error"] = "error" if acting else "warning" if worth_a_look else "info"
            fields = {"from": old.state, "to": state, "core": finding.core}
            self._log(level, reason, **{name: value for name, value in fields.items() if value is not None})
        if hung and before.state not in HUNG:
            self._out.append(CaptureEvidence(reason))

    def _engine_wide(self, t: float) -> Finding | None:
        """The first engine-wide state that holds, None to judge by cores."""
        canaries_on = self._request is not None
        # A resting engine is sent no canary, so there none could fail: the time alone decides.
        asked = self._failures_count and self._rest.state is None
        found = self._reach.finding(t, self.settings, canaries_on=asked)
        if found is not None:
            return found
        # What was not seen, or cannot be read, proves nothing: a declared hang stands until its core is forgotten.
        if self._gap_poll >= self._polls and not self._hang_stands():
            return Finding("observer-gap", "the watcher itself did not run for a while: that time does not count")
        if self._replaced_poll == self._polls:
            return Finding("replaced", "another engine process answers now: everything is learned anew")
        if self._rest.state is not None:
            return Finding("paused", self._rest.says(t))
        found = self._blind.finding(t, self.settings, canaries_on=canaries_on)
        return None if found is not None and found.state not in HUNG and self._hang_stands() else found

    def _hang_stands(self) -> bool:
        return any(core.hang for core in self._ledger.cores.values())

    def _unless_unasked(self, standing: Finding, before: Finding, t: float) -> Finding:
        """While the watcher cannot ask: a declared hang as long as a blind watcher may report one, nothing else."""
        since = self._reach.unasked_since
        if since is None:
            return standing
        if before.state in HUNG and standing.state in HUNG and t - since < self.settings.stale_after_sec:
            return standing
        cannot = f"the watcher cannot ask the engine: {self._reach.unasked_why}"
        if self._reach.phase != "running":
            return Finding(self._reach.phase, cannot)
        remembered = "; a hang was seen before that" if standing.state in HUNG else ""
        return Finding("observer-gap", f"{cannot}{remembered}")

    def _by_cores(self, now: Conditions) -> Finding:
        """The worst core's; until one is hung, a hang that was declared for want of legs stands before it."""
        worst = self._worst_core(now)
        held = self._blind.held(now.t, self.settings)
        return held if held is not None and worst.state not in HUNG else worst

    def _worst_core(self, now: Conditions) -> Finding:
        worst: Finding | None = None
        hung = 0
        for core in self._ledger.cores.values():
            finding = judge_core(core, now)
            core.state = finding.state
            hung += finding.state in HUNG
            if worst is None or RANK[finding.state] < RANK[worst.state]:
                worst = finding
            ready = recheck_at(core, now)
            if ready is not None and (self._recheck_at is None or ready < self._recheck_at):
                self._recheck(ready, now.t)
        if worst is None:
            # Only between a page that lost its last core and the poll that calls it no-legs.
            return Finding("no-legs", "the page has no progress series")
        if hung > 1:
            return Finding(worst.state, f"{worst.reason} (and {hung - 1} more)", worst.core)
        return worst

    # --- memory -----------------------------------------------------------------------------------------------------

    def _log(self, level: Literal["info", "warning", "error"], event: str, **fields: object) -> None:
        self._out.append(Log(level, event, fields))

    def _remember(self, event: Event, now: float) -> None:
        adopted = self._ledger.adopted_bytes
        self._story.remember(StoryEntry(now, event, self._verdict.state), adopted - self._adopted_bytes)
        self._adopted_bytes = adopted

    def _facts(self, now: float) -> explain_module.Facts:
        reach, blind = self._reach, self._blind
        return explain_module.Facts(
            t=self._clock.at(now),
            verdict=self._verdict,
            finding_state=self._finding.state,
            settings=self.settings,
            role=self.role,
            profile=self._profile,
            cores=tuple(self._ledger.cores.values()),
            page=self._ledger.page,
            canary=self._request,
            can_aim=self._can_aim,
            can_ask_flags=bool(self.flag_endpoints) and not self._rest.absent,
            resting=self._rest.state,
            flags_said=self._rest.said,
            doubt_until=self._rest.doubt_until,
            call_until=self._rest.call_until,
            failing_since=reach.failing_since,
            failing_how=reach.failing_how,
            unreach_limit_sec=self._reach.limit_sec(self.settings),
            loading_since=reach.phase_since if reach.phase != "running" else None,
            outage_failures=reach.failures,
            only_answers=reach.only_answers,
            blind_since=blind.since,
            blind_failures=blind.failures,
            unasked_since=reach.unasked_since,
            unasked_why=reach.unasked_why,
            log_channel=self.log_channel,
            log_problem=self.log_problem,
            log_hit_at=self._log_hit_at if self._log_hit_at != _NEVER else None,
            process_since=self._process_since if self._process_since != _NEVER else None,
            last_page_at=self._last_begun if self._last_begun != _NEVER else None,
            kv_engines=self._process.kv if self._process.kv.is_asked else None,
        )


def _patience(settings: Settings) -> tuple[float, float, int]:
    return settings.stall_sec, settings.log_stall_sec, settings.active_probe_min_failures
