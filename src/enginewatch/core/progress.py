"""What each core of the engine has done: the ledger of progress legs, per core and per series.

Rules:
    - Series are compared one by one with their own last value and never summed: what rises here must not be cancelled
      by what falls there, and one hung rank must not hide behind its siblings.
    - A series that is absent keeps its value; coming back unchanged is nothing. A series born after its core's first
      page counts from zero.
    - A counter that falls is reset to the new value and reported; a gauge that falls is nothing. A counter that goes to
      and fro between two values (two frozen registries behind one address) moves no more after the first fall. Neither
      does a gauge that goes round among a few values: it counts as rising to the same one `MOST_RETURNS` times, until a
      counter moves or a canary is complete. (More than once, since a prefill may take the steps of the one before it.)
    - A page that lacks one of a core's legs may show progress, but not that there was none; unless the leg has been
      away for `RETIRE_AFTER` polls. Where no canary speaks it is missed for longer, see `Core.lost_witness`.
    - Once any series of interest carried the core label, series without it belong to no core.
    - A core absent from `RETIRE_AFTER` polls while others remain is retired.
    - What a page may make this hold is bounded: so many series, so many bytes of their names, so many cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from enginewatch.core.events import Outcome
from enginewatch.core.exposition import parse_series
from enginewatch.core.fingerprint import DurationSeries
from enginewatch.engines.profile import Grain, Leg, LegKind, Metric, PageFlag, Profile, Queue

RETIRE_AFTER: Final = 3
REQUEST_GRAINED_STALL_SEC: Final = 120.0
ONLY_CORE: Final = "0"
MOST_RETURNS: Final = 3
GAUGE_VALUES: Final = 4
"""So many values that a gauge rose to last are remembered. With more, an engine at work on a long prompt that clients
give up on and ask for again and again would look frozen."""
_MOST_SERIES: Final = 8192  # twice what one page may keep; an engine that invents series forever starts over
_MOST_SERIES_BYTES: Final = 1024 * 1024
_MOST_CORES: Final = 512
"""More than any engine has behind one page; each costs some kilobytes, here and in /verdict."""
_MOST_CORE_CHARS: Final = 64
"""Longest name of a core. It stands in each sentence about the core, in /verdict five times, and on terminals."""


class Proof:
    """What the last proof of life of a core was; the words appear in /verdict."""

    LEG = "leg"
    CANARY = "canary"
    BASELINE = "baseline"
    RESET = "counter reset"
    PAUSE_ENDED = "end of pause"


class LegState:
    """One leg of one core."""

    __slots__ = ("is_counter", "leg", "moved_at", "series")

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self.is_counter = leg.kind is LegKind.COUNTER
        self.moved_at: float | None = None
        self.series: list[_Slot] = []

    @property
    def value(self) -> float:
        """For display only: the sum over the leg's series. Judgement never uses it."""
        return sum(slot.value for slot in self.series)


class QueueState:
    """One series of a P/D queue of one core: since when it has been above zero without ever falling."""

    __slots__ = ("name", "stuck_since", "value")

    def __init__(self, name: str) -> None:
        self.name = name
        self.value = 0.0
        self.stuck_since: float | None = None


_ENDS_KEPT: Final = 16
"""Of so many failures in a row it is remembered when each ended. Nobody demands more."""


class CanaryRun:
    """Consecutive failed canaries since the last proof of life."""

    __slots__ = (
        "_confirmed_at",
        "_doubted",
        "_ended",
        "failures",
        "first_begun",
        "last_ended",
        "last_failed",
        "last_failure",
        "last_outcome",
        "unconfirmed_since",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A proof of life: nothing that failed before it counts."""
        self.failures = 0
        self.first_begun = self.last_ended = self._confirmed_at = float("-inf")
        self._ended: list[float] = []
        self.last_outcome: Outcome | None = None
        """What the last canary of this freeze was; None when none was answered."""
        self.last_failed = False
        self.last_failure: Outcome | None = None
        """How the last of the failures ended."""
        self.unconfirmed_since: float | None = None
        """Set where these failures may be those of another process: until a canary fails that was begun since."""
        self._doubted = False

    def failed(self, begun: float, ended: float, outcome: Outcome) -> None:
        """One more canary failed."""
        if not self.failures:
            self.first_begun = begun
        if self.unconfirmed_since is not None and begun >= self.unconfirmed_since:
            self.unconfirmed_since = None
            self._confirmed_at = ended
        self.failures += 1
        if len(self._ended) < _ENDS_KEPT:
            self._ended.append(ended)
        self.last_ended = ended
        self.last_outcome = self.last_failure = outcome
        self.last_failed = True

    def enough_since(self, failures: int) -> float:
        """When there were that many failures, and confirmed ones where it was in doubt whose they are.

        A page begun after that may show that they were right. Were the page to follow the last of all failures, one
        that takes as long as a canary would always be too early.
        """
        counted = self._ended[failures - 1] if 0 < failures <= len(self._ended) else self.last_ended
        return max(counted, self._confirmed_at)

    def doubt(self, since: float) -> None:
        """Perhaps another process answers since then. Once in a run: refusals now and then are no clean slate."""
        if self.failures and not self._doubted:
            self._doubted = True
            self.unconfirmed_since = since

    def neither(self, outcome: Outcome) -> None:
        """Saturated or misconfigured: no failure, and no end of a run of failures."""
        self.last_outcome = outcome
        self.last_failed = False


class Core:
    """Everything known of one core. Times are on the judgement's clock."""

    __slots__ = (
        "_carry_counter",
        "_carry_gauge",
        "_deferred",
        "_first_load",
        "_leg_series",
        "_legs_seen",
        "_longest_step_sec",
        "_polls_partial",
        "_running",
        "_step_grained",
        "_waiting",
        "baseline_poll",
        "busy_since",
        "canary_due",
        "canary_ok_at",
        "canary_ok_begun",
        "counter_at",
        "counter_page",
        "counter_poll",
        "counter_proof_at",
        "doubts_load",
        "failed_begun",
        "failed_ended",
        "fell_poll",
        "first_page",
        "gauge_page",
        "gauge_poll",
        "grew_after_failure_poll",
        "grew_after_failure_with_counter",
        "hang",
        "heartbeat_at",
        "heartbeat_page",
        "last_page",
        "legs",
        "moved_leg",
        "name",
        "page_begun",
        "polls_absent",
        "proof_at",
        "proof_by",
        "queues",
        "run",
        "state",
        "transfers_at",
        "whole_page_begun",
    )

    def __init__(self, name: str, t: float, poll: int, page: int, longest_step_sec: float = 0.0) -> None:
        self.name = name
        self._longest_step_sec = longest_step_sec
        self.first_page = page
        self.legs: dict[str, LegState] = {}
        self.queues: list[QueueState] = []
        self.run = CanaryRun()
        self.hang: str | None = None
        """The hang state declared for this core, until it proves life."""
        self.proof_at = self.counter_proof_at = t
        self.proof_by = Proof.BASELINE
        self.baseline_poll = poll
        self.counter_poll = self.gauge_poll = self.fell_poll = self.grew_after_failure_poll = -1
        self.counter_page = self.gauge_page = -1
        self.grew_after_failure_with_counter = False
        self.counter_at = self.canary_ok_at = self.canary_ok_begun = float("-inf")
        self.failed_begun = self.failed_ended = float("-inf")
        """Of the last failed canary that no counter, complete canary or replacement has answered since: for the log."""
        self.transfers_at = float("-inf")
        self.heartbeat_at: float | None = None
        self.heartbeat_page = -1
        self.moved_leg = ""
        self.state = "baseline"
        """This core's own state at the last judgement by cores, for people; never judged by."""
        self.last_page = -1
        """Number of the last page that carried one of this core's legs."""
        self.page_begun = self.whole_page_begun = float("-inf")
        """When the scrapes began of the last page that carried one of them, and of the last that carried all."""
        self.polls_absent = 0
        self.busy_since: float | None = None
        """Since when every page that told said that the core has work; None when the last one that told said no."""
        self.doubts_load = False
        """What the page says of the load may be a dead process's last word, until it says something else."""
        self._first_load: tuple[float | None, float | None] | None = None
        self.canary_due = False
        self._carry_counter = self._carry_gauge = False
        self._leg_series = self._legs_seen = self._polls_partial = 0
        self._running: list[_Slot] = []
        self._waiting: list[_Slot] = []
        self._deferred: list[_Slot] = []
        self._step_grained = False

    def stall_after_sec(self, stall_sec: float) -> float:
        """How long this core may be frozen: longer where legs move only at request ends, or a step may take that."""
        return max(stall_sec, self._longest_step_sec, 0.0 if self._step_grained else REQUEST_GRAINED_STALL_SEC)

    @property
    def request_grained(self) -> bool:
        """Whether every leg seen so far moves only when a request ends."""
        return not self._step_grained

    def running(self, page: int) -> float | None:
        """Requests running by the last page (`page` is its number); None where it does not say."""
        return _largest(self._running, page)

    def waiting(self, page: int, *, without_deferred: bool) -> float | None:
        """Requests waiting by the last page; without those deferred for a remote partner when asked so."""
        waiting = _largest(self._waiting, page)
        if waiting is None or not without_deferred:
            return waiting
        return max(0.0, waiting - (_largest(self._deferred, page) or 0.0))

    def note_busy(self, page: int, t: float, *, without_deferred: bool) -> None:
        """Take in what a page says of the load. A gauge that is absent is not busy, but ends nothing either."""
        running, waiting = self.running(page), self.waiting(page, without_deferred=without_deferred)
        if self.doubts_load:
            if self._first_load is None:
                self._first_load = (running, waiting)
            self.doubts_load = self._first_load == (running, waiting) and not self.moved_leg
            if self.doubts_load:
                return
        if (running or 0) > 0 or (waiting or 0) > 0:
            if self.busy_since is None:
                self.busy_since = t
        elif running is not None and waiting is not None:
            self.busy_since = None

    def lost_witness(self, within_sec: float) -> str | None:
        """A leg of which the last page lacks a series, so that what is left does not tell that nothing moved.

        Not if the series was last seen to have stood still for that long under load, nor if another series of the leg
        has moved since: labels change.
        """
        for name, leg in self.legs.items():
            for slot in leg.series:
                if slot.page == self.last_page or (leg.moved_at is not None and leg.moved_at > slot.seen_at):
                    continue
                if self.busy_since is None or slot.seen_at - max(slot.moved_at, self.busy_since) < within_sec:
                    return name
        return None

    def stuck_queue(self, t: float, peer_stall_sec: float) -> QueueState | None:
        """The P/D queue that stood still for peer_stall_sec while no transfer succeeded, if any."""
        for queue in self.queues:
            if queue.stuck_since is not None and t - max(queue.stuck_since, self.transfers_at) >= peer_stall_sec:
                return queue
        return None

    def nobody_listened(self, since: float, until: float) -> None:
        """The same process answers after a refused connection: the time in between counts for nothing."""
        if self.proof_at <= since:
            self.proof_at += until - since
        if self.run.failures and self.run.first_begun <= since:
            self.run.first_begun += until - since

    def doubt_identity(self, since: float) -> None:
        """Perhaps another process answers: what was held against it has to be confirmed by a canary begun since."""
        self.hang = None
        self.busy_since = None
        self.failed_begun = self.failed_ended = float("-inf")
        self.run.doubt(since)

    def forget_canaries(self) -> None:
        """The canaries so far were of a kind that the engine may not be able to answer: none that failed counts."""
        self.run.clear()
        self.failed_begun = self.failed_ended = float("-inf")

    def prove(self, t: float, by: str, *, counters: bool = True) -> None:
        """A proof of life: the freeze clock starts again and failed canaries are forgotten.

        `counters` is False for a rising gauge, which does not answer a log signature: `stall-hang-log` outranks it.
        """
        self.proof_at = t
        self.proof_by = by
        self.run.clear()
        if counters:
            self.counter_proof_at = t
            self.hang = None
        elif self.hang != "stall-hang-log":
            self.hang = None


class _Slot:
    """One series: its last value and what a change of it means."""

    __slots__ = ("_returns", "_returns_since", "core", "effects", "fell_from", "moved_at", "page", "seen_at", "value")

    def __init__(self, core: Core | None, value: float, effects: tuple[_Effect, ...]) -> None:
        self.core = core
        self.value = value
        self.fell_from: float | None = None
        """What it was before it fell, or was back at: going to and fro between two values is no life."""
        self.effects = effects
        self.page = -1
        self.seen_at = self.moved_at = float("-inf")
        """Of a leg."""
        self._returns: dict[float, int] | None = None
        self._returns_since = float("-inf")

    def only_returns(self, value: float, proof_at: float) -> bool:
        """Whether a gauge that rises to this value went round to it too often since its core's proof of life."""
        if self._returns is None or proof_at != self._returns_since:
            self._returns_since = proof_at
            self._returns = {}
        times = self._returns.pop(value, 0)
        self._returns[value] = times + 1  # the latest last
        if len(self._returns) > GAUGE_VALUES:
            del self._returns[next(iter(self._returns))]
        return times >= MOST_RETURNS


def _largest(slots: list[_Slot], page: int) -> float | None:
    # The largest, not the sum: priority scheduling exports the total beside its parts, per-process gauges one each.
    if len(slots) == 1:  # almost always, and asked for several times per event
        return slots[0].value if slots[0].page == page else None
    present = [slot.value for slot in slots if slot.page == page]
    return max(present) if present else None


# What a series is to its core: a leg, or one of these words.
_RUNNING, _WAITING, _DEFERRED, _HEARTBEAT, _TRANSFERS = "running", "waiting", "deferred", "heartbeat", "transfers"
_Effect = LegState | QueueState | str
_Meaning = Leg | Queue | str


@dataclass(frozen=True, slots=True)
class PageNews:
    """What one page changed, for the engine as a whole."""

    cores_with_legs: int
    fell: bool
    """A counter fell."""
    rose: bool
    """A counter rose."""
    moved: bool
    """A leg moved: a counter, or a gauge that counts."""
    start_time: float | None
    resting: str | None
    """`paused` or `sleeping` by the page's own gauges."""
    call_awaited: bool | None
    """Among these gauges is one of calls that hold the engine and have not come back; None: no such gauge there."""


class Ledger:
    """The cores of one engine process and what their series did."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.cores: dict[str, Core] = {}
        self.page = 0
        """Number of the last page taken in."""
        self.adopted_bytes = 0
        """Bytes of all series that were ever new: what pages made others hold who keep them."""
        self._held_bytes = 0
        self._meanings = _meanings(profile)
        start_time = profile.start_time
        self._start_time_names = start_time.full_names(profile.prefixes) if start_time is not None else ()
        self.durations = DurationSeries(profile)
        """Not of one process: they are compared over a replacement, and so they outlive `forget`."""
        self._slots: dict[str, _Slot | None] = {}
        self._labelled = False
        self._resting: list[tuple[PageFlag, _Slot]] = []
        self._start_times: list[_Slot] = []

    def forget(self) -> None:
        """Forget everything: another process, or a page that lost its legs for good."""
        self.cores.clear()
        self._slots.clear()
        self._held_bytes = 0
        self._labelled = False
        self._resting.clear()
        self._start_times.clear()

    def take(self, samples: Mapping[str, float], t: float, begun: float, poll: int, *, recheck: bool) -> PageNews:
        """Take in one page that was read by `t` and whose scrape began at `begun` (both on the judgement's clock)."""
        self.page = page = self.page + 1
        if self._holds_too_much():
            self._slots = {series: slot for series, slot in self._slots.items() if slot is not None}
            self._held_bytes = sum(map(_size_bytes, self._slots))
            if self._holds_too_much():
                self.forget()
        if not recheck:
            self.turn_poll(poll)
        slots = self._slots
        rose = fell = False
        for series, value in samples.items():
            slot = slots.get(series)
            if slot is None:
                if series in slots:
                    continue
                slot = self._adopt(series, value, t, poll)
                if slot is None:
                    continue
            slot.page = page
            old = slot.value
            core = slot.core
            if core is None:
                slot.value = value
                continue
            for effect in slot.effects:
                if type(effect) is LegState:
                    core.last_page = page
                    core._legs_seen += 1
                    slot.seen_at = t
                    if value == old:
                        continue
                    if value == slot.fell_from:
                        slot.fell_from = old
                    elif value > old:
                        if not effect.is_counter and slot.only_returns(value, core.counter_proof_at):
                            continue
                        slot.fell_from = None
                        effect.moved_at = slot.moved_at = t
                        core.moved_leg = effect.leg.name
                        if effect.is_counter:
                            rose = True
                            core.counter_at = t
                            core.counter_page = page
                        else:
                            core.gauge_page = page
                    elif effect.is_counter:
                        fell = True
                        slot.fell_from = old
                        core.fell_poll = poll
                elif type(effect) is QueueState:
                    _queue_read(effect, value, t)
                elif effect is _HEARTBEAT:
                    core.heartbeat_page = page
                    if value != old or core.heartbeat_at is None:
                        core.heartbeat_at = t
                elif effect is _TRANSFERS and value > old:
                    core.transfers_at = t
            slot.value = value
        with_legs = 0
        moved = False
        absent = []
        for core in self.cores.values():
            if core.last_page == page:
                with_legs += 1
                _note_whole(core, begun, recheck=recheck)
                core.polls_absent = 0
                if page in (core.counter_page, core.gauge_page):
                    moved = True
                    _moved(core, page, t, begun, poll, recheck)
            else:
                absent.append(core)
        if with_legs and absent and not recheck:
            self._retire(absent)
        told = [(flag, flag.holds(slot.value)) for flag, slot in self._resting if slot.page == page]
        resting = [flag for flag, holds in told if holds]
        calls = [holds for flag, holds in told if flag.counts_calls]
        return PageNews(
            with_legs,
            fell,
            rose,
            moved,
            start_time=_largest(self._start_times, page),
            resting=resting[0].state if resting else None,
            call_awaited=any(calls) if calls else None,
        )

    def start_time_of(self, samples: Mapping[str, float]) -> float | None:
        """What a page says of the process's start, before it is taken in."""
        for name in self._start_time_names:
            if name in samples:
                return samples[name]
        return None

    def _holds_too_much(self) -> bool:
        return len(self._slots) > _MOST_SERIES or self._held_bytes > _MOST_SERIES_BYTES

    def turn_poll(self, poll: int) -> None:
        """A poll begins: what rechecks saw since the previous one counts as its movement."""
        for core in self.cores.values():
            if core._carry_counter:
                core.counter_poll = poll
            if core._carry_gauge:
                core.gauge_poll = poll
            core._carry_counter = core._carry_gauge = False

    def _retire(self, absent: list[Core]) -> None:
        """Count the cores that this poll's page does not show while it shows others, and drop those gone for good."""
        for core in absent:
            core.polls_absent += 1
        gone = {core for core in absent if core.polls_absent >= RETIRE_AFTER}
        if gone:
            for core in gone:
                del self.cores[core.name]
            # Series of no core are looked at anew: there may be room for theirs now.
            self._slots = {s: slot for s, slot in self._slots.items() if slot is not None and slot.core not in gone}
            self._held_bytes = sum(map(_size_bytes, self._slots))

    def _adopt(self, series: str, value: float, t: float, poll: int) -> _Slot | None:
        """First sight of a series: find out what it is."""
        name, labels = parse_series(series)
        if name in self.durations.names:
            for given_up in self.durations.adopt(series, name, labels):
                if given_up in self._slots:
                    del self._slots[given_up]
                    self._held_bytes -= _size_bytes(given_up)
        meanings = [meaning for metric, meaning in self._meanings.get(name, ()) if metric.accepts(labels)]
        slot = self._adopt_engine_wide(meanings, value) if meanings else None
        core_meanings = [m for m in meanings if not isinstance(m, PageFlag) and m != "start_time"]
        if slot is None and core_meanings:
            slot = self._adopt_for_core(labels.get(self.profile.core_label), core_meanings, value, t, poll)
        self._slots[series] = slot
        size_bytes = _size_bytes(series)
        self._held_bytes += size_bytes
        self.adopted_bytes += size_bytes
        return slot

    def _adopt_engine_wide(self, meanings: Iterable[_Meaning | PageFlag], value: float) -> _Slot | None:
        slot: _Slot | None = None
        for meaning in meanings:
            if isinstance(meaning, PageFlag):
                slot = slot or _Slot(None, value, ())
                self._resting.append((meaning, slot))
            elif meaning == "start_time":
                slot = slot or _Slot(None, value, ())
                self._start_times.append(slot)
        return slot

    def _adopt_for_core(
        self, label: str | None, meanings: list[_Meaning], value: float, t: float, poll: int
    ) -> _Slot | None:
        if label is not None and not self._labelled:
            self._labelled = True
            self._drop_unlabelled()
        if label is None and self._labelled:
            return None
        name = ONLY_CORE if label is None else label
        core = self.cores.get(name)
        if core is None:
            if len(self.cores) >= _MOST_CORES or len(name) > _MOST_CORE_CHARS or not name.isprintable():
                return None
            core = self.cores[name] = Core(name, t, poll, self.page, self.profile.longest_step_sec)
        # A core's first page is its baseline; a series that appears later was zero before.
        born_later = core.first_page != self.page
        effects: list[_Effect] = []
        slot = _Slot(core, 0.0 if born_later else value, ())
        for meaning in meanings:
            if isinstance(meaning, Leg):
                state = core.legs.setdefault(meaning.name, LegState(meaning))
                state.series.append(slot)
                core._leg_series += 1
                core._step_grained = core._step_grained or meaning.grain is Grain.STEP
                effects.append(state)
            elif isinstance(meaning, Queue):
                queue = QueueState(meaning.name)
                core.queues.append(queue)
                effects.append(queue)
            else:
                effects.append(meaning)
                {_RUNNING: core._running, _WAITING: core._waiting, _DEFERRED: core._deferred}.get(meaning, []).append(
                    slot
                )
        slot.effects = tuple(effects)
        return slot

    def _drop_unlabelled(self) -> None:
        """The page turned out to carry the core label: what was booked without it belongs to no core."""
        self.cores.pop(ONLY_CORE, None)
        self._slots = {
            series: None if slot is not None and slot.core is not None else slot for series, slot in self._slots.items()
        }


def _size_bytes(series: str) -> int:
    """What its text takes in memory: one character beyond Latin-1 makes Python keep all of them in up to four bytes."""
    return len(series) if series.isascii() else 4 * len(series)


def _note_whole(core: Core, begun: float, *, recheck: bool) -> None:
    """Whether this page can show that the core made no progress: one that lacks a leg cannot, unless it stays away."""
    core.page_begun = begun
    if core._legs_seen >= core._leg_series:
        core._polls_partial = 0
    elif not recheck:
        core._polls_partial += 1
    if core._legs_seen >= core._leg_series or core._polls_partial >= RETIRE_AFTER:
        core.whole_page_begun = begun
    core._legs_seen = 0


def _moved(core: Core, page: int, t: float, begun: float, poll: int, recheck: bool) -> None:
    """Legs of this core moved on this page: a proof of life."""
    by_counter = core.counter_page == page
    if by_counter:
        core.counter_poll, core._carry_counter = poll, recheck
    if core.gauge_page == page:
        core.gauge_poll, core._carry_gauge = poll, recheck
    if core.run.last_failed and begun >= core.run.last_ended:
        core.grew_after_failure_poll = poll
        core.grew_after_failure_with_counter = by_counter
    core.prove(t, Proof.LEG, counters=by_counter)


def _queue_read(queue: QueueState, value: float, t: float) -> None:
    if value <= 0:
        queue.stuck_since = None
    elif queue.stuck_since is None or value < queue.value:
        queue.stuck_since = t
    queue.value = value


def _meanings(profile: Profile) -> dict[str, tuple[tuple[Metric, _Meaning | PageFlag], ...]]:
    """Full sample name -> what its series may be."""
    table: dict[str, list[tuple[Metric, _Meaning | PageFlag]]] = {}
    words: tuple[tuple[Metric | None, _Meaning | PageFlag], ...] = (
        (profile.running, _RUNNING),
        (profile.waiting, _WAITING),
        (profile.deferred, _DEFERRED),
        (profile.heartbeat, _HEARTBEAT),
        (profile.transfers, _TRANSFERS),
        (profile.start_time, "start_time"),
        *((leg.metric, leg) for leg in profile.legs),
        *((queue.metric, queue) for queue in profile.queues),
        *((flag.metric, flag) for flag in profile.page_flags),
    )
    for metric, meaning in words:
        if metric is not None:
            for name in metric.full_names(profile.prefixes):
                table.setdefault(name, []).append((metric, meaning))
    return {name: tuple(found) for name, found in table.items()}
