"""The verdict explained: every core, every witness with its age, and what would flip it. Reads, never decides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from enginewatch.core.events import Flags, Verdict
from enginewatch.core.kv_engines import KvEngines
from enginewatch.core.progress import Core
from enginewatch.core.settings import Settings
from enginewatch.core.states import HUNG
from enginewatch.engines.profile import CanaryRequest, Profile, Role


@dataclass(frozen=True, slots=True)
class LegView:
    """One leg: its value (the sum over its series, for display) and how long ago it moved, None = not yet seen to."""

    value: float
    moved_ago_sec: float | None


@dataclass(frozen=True, slots=True)
class CoreView:
    """One core as /verdict shows it."""

    core: str
    state: str
    stalled_for_sec: float
    running: float | None
    waiting: float | None
    legs: dict[str, LegView]


@dataclass(frozen=True, slots=True)
class Witness:
    """One witness: what it says, and how old that is (None = it has not spoken)."""

    name: str
    says: str
    age_sec: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything the verdict rests on, at one moment."""

    cores: tuple[CoreView, ...]
    witnesses: tuple[Witness, ...]
    would_flip: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What `Watch` lays open for the explanation; times on the judgement's clock."""

    t: float
    verdict: Verdict
    finding_state: str
    settings: Settings
    role: Role
    profile: Profile | None
    cores: tuple[Core, ...]
    page: int
    canary: CanaryRequest | None
    can_aim: bool
    can_ask_flags: bool
    resting: str | None
    flags_said: Flags | None
    doubt_until: float | None
    call_until: float | None
    failing_since: float | None
    failing_how: str
    unreach_limit_sec: float
    loading_since: float | None
    outage_failures: int
    only_answers: bool
    blind_since: float | None
    blind_failures: int
    unasked_since: float | None
    unasked_why: str
    log_channel: bool
    log_problem: str | None
    log_hit_at: float | None
    process_since: float | None
    last_page_at: float | None
    kv_engines: KvEngines | None


def explain(facts: Facts) -> Explanation:
    """Lay the facts out for people and programs."""
    # The cores of a process that is gone would read as if they ran, idle or frozen.
    cores = () if facts.loading_since is not None else tuple(sorted(facts.cores, key=_by_number))
    facts = replace(facts, cores=cores)
    return Explanation(
        cores=tuple(_core_view(core, facts) for core in facts.cores),
        witnesses=tuple(_witnesses(facts)),
        would_flip=tuple(_would_flip(facts)),
    )


def _by_number(core: Core) -> tuple[int, str]:
    # A page of several processes has its cores in any order; people look for "2" between "1" and "3".
    return (len(core.name) if core.name.isdecimal() else 0, core.name)


def _ago(facts: Facts, at: float | None) -> float | None:
    return None if at is None or at == float("-inf") else round(max(0.0, facts.t - at), 3)


def _core_view(core: Core, facts: Facts) -> CoreView:
    return CoreView(
        core=core.name,
        state=core.state,
        stalled_for_sec=round(max(0.0, facts.t - core.proof_at), 3),
        running=core.running(facts.page),
        waiting=core.waiting(facts.page, without_deferred=False),
        legs={name: LegView(leg.value, _ago(facts, leg.moved_at)) for name, leg in core.legs.items()},
    )


def _witnesses(facts: Facts) -> Iterator[Witness]:
    yield _reachability(facts)
    for core in facts.cores:
        where = f"core {core.name}: " if len(facts.cores) > 1 else ""
        yield _legs(core, facts, where)
        yield _canary(core, facts, where)
        if core.heartbeat_at is not None:
            turning = "turning" if _is_recent(core.heartbeat_at, facts) else "frozen"
            age = _ago(facts, core.heartbeat_at)
            yield Witness("heartbeat", turning, age, f"{where}the scheduler loop's own counters")
    if facts.blind_since is not None:
        yield Witness(
            "canary",
            "failed" if facts.blind_failures else "nothing failed",
            _ago(facts, facts.blind_since),
            f"{facts.blind_failures} failed in a row since the page has no legs",
        )
    if facts.kv_engines is not None:
        yield _kv_bootstrap(facts.kv_engines, facts)
    yield _log(facts)
    if facts.loading_since is None:
        yield _pause(facts)


def _reachability(facts: Facts) -> Witness:
    if facts.unasked_since is not None:
        return Witness("reachability", "cannot ask", _ago(facts, facts.unasked_since), facts.unasked_why)
    if facts.loading_since is not None:
        how = f", last: {facts.failing_how}" if facts.failing_how else ""
        return Witness("reachability", "loading", _ago(facts, facts.loading_since), f"no page since then{how}")
    if facts.failing_since is not None:
        return Witness(
            "reachability",
            "failing",
            _ago(facts, facts.failing_since),
            f"/metrics: {facts.failing_how}; canaries that failed meanwhile: {facts.outage_failures}",
        )
    return Witness("reachability", "answers", _ago(facts, facts.last_page_at), "/metrics")


def _legs(core: Core, facts: Facts, where: str) -> Witness:
    moved = [leg.moved_at for leg in core.legs.values() if leg.moved_at is not None]
    if not moved:
        return Witness("legs", "not moved yet", None, f"{where}{len(core.legs)} legs on the page")
    last = max(moved)
    return Witness(
        "legs",
        "moving" if _is_recent(last, facts) else "frozen",
        _ago(facts, last),
        f"{where}{core.moved_leg} moved last",
    )


def _is_recent(moved_at: float, facts: Facts) -> bool:
    # Where a page takes longer than a poll, what moved on the last one moved long ago.
    pages_come = facts.loading_since is None and facts.failing_since is None
    on_last_page = facts.last_page_at is not None and moved_at >= facts.last_page_at
    return (pages_come and on_last_page) or facts.t - moved_at <= 2 * facts.settings.poll_interval_sec


def _canary(core: Core, facts: Facts, where: str) -> Witness:
    run = core.run
    if facts.canary is None:
        off = (
            "the engine is in no single role"
            if facts.settings.active_probe_enabled
            else "active_probe_enabled is false"
        )
        return Witness("canary", "off", None, f"{where}{off}")
    if len(facts.cores) > 1 and not facts.can_aim:
        return Witness("canary", "cannot be aimed", None, f"{where}this engine version is not known to honour a rank")
    if run.failures:
        return Witness("canary", "failed", _ago(facts, run.last_ended), f"{where}{run.failures} in a row")
    if run.last_outcome is not None:
        return Witness("canary", run.last_outcome.value, None, f"{where}counts neither way")
    age = _ago(facts, core.canary_ok_at)
    return Witness("canary", "ok" if age is not None else "none yet", age, f"{where}{facts.canary.path}")


def _kv_bootstrap(kv: KvEngines, facts: Facts) -> Witness:
    age = _ago(facts, kv.heard_at)
    if kv.failure is not None:
        return Witness("kv_bootstrap", "silent", age, f"{kv.failure}; that proves nothing")
    if kv.changed_at is not None:
        return Witness("kv_bootstrap", "changed", age, "other KV engine ids: replaced, with the next page")
    return Witness("kv_bootstrap", "same", age, f"KV engine ids of {kv.ranks} rank{'' if kv.ranks == 1 else 's'}")


def _log(facts: Facts) -> Witness:
    if not facts.log_channel:
        return Witness("log", "off", None, "LOG_FILE is not set")
    if facts.log_problem is not None:
        return Witness("log", "broken", None, facts.log_problem)
    age = _ago(facts, facts.log_hit_at)
    return Witness("log", "quiet" if age is None else "signature", age, "hang signatures in the engine's log")


def _pause(facts: Facts) -> Witness:
    if facts.resting is not None:
        said = "the engine says so itself" if facts.doubt_until is None else "it said so, and is unhealthy since"
        return Witness("pause", facts.resting, None, said)
    if facts.can_ask_flags and facts.flags_said is not Flags.ABSENT:
        says, detail = _ENDPOINTS_SAY.get(facts.flags_said, _IN_VAIN)
        return Witness("pause", says, None, detail)
    if facts.profile is not None and facts.profile.page_flags:
        return Witness("pause", "not asleep", None, "by its page, which does not tell of a pause")
    return Witness("pause", "cannot tell", None, "this engine does not say whether it is paused")


_ENDPOINTS_SAY: Final[dict[Flags | None, tuple[str, str]]] = {
    None: ("not asked yet", "the pause endpoints are asked once nothing moves"),
    Flags.CLEAR: ("awake", "by the pause endpoints, when they were asked last"),
    Flags.DOUBTFUL: ("cannot tell", "the pause endpoints say only that the server is unhealthy"),
}
_IN_VAIN: Final = ("no answer", "the pause endpoints were asked in vain")


def _would_flip(facts: Facts) -> Iterator[str]:
    settings, verdict = facts.settings, facts.verdict
    if facts.unasked_since is not None:
        yield "nothing is judged until the watcher can ask the engine again"
        if verdict.hung:
            left = settings.stale_after_sec - (facts.t - facts.unasked_since)
            yield f"the hang is reported for another {max(0.0, left):.0f} s: a watcher that cannot see must not kill"
        return
    if facts.finding_state in HUNG:
        if facts.loading_since is not None:
            yield "a page from /metrics ends it"
            return
        if verdict.core is None:
            blind = facts.finding_state == "canary-hang"
            yield "a progress leg that moves ends it" if blind else "a page with progress legs ends it"
            if facts.canary is not None:
                yield "one complete canary ends it"
        else:
            where = f"core {verdict.core}"
            legs = "a counter" if facts.finding_state == "stall-hang-log" else "a progress leg"
            yield f"{legs} of {where} that moves ends it"
            if facts.canary is not None:
                yield f"one complete canary of {where} ends it"
            yield "a pause or a replaced process ends it"
        if not verdict.acting:
            yield from _suppressed(facts)
        return
    if facts.loading_since is not None:
        left = settings.startup_budget_sec - (facts.t - facts.loading_since)
        yield f"startup-hang in {max(0.0, left):.0f} s without a page"
        return
    if facts.failing_since is not None:
        left = facts.unreach_limit_sec - (facts.t - facts.failing_since)
        if facts.only_answers:
            yield f"nothing while canaries are answered, else unreach-hang in {max(0.0, left):.0f} s"
        else:
            yield f"unreach-hang in {max(0.0, left):.0f} s if scrapes and canaries go on failing"
        return
    if facts.doubt_until is not None:
        left = max(0.0, facts.doubt_until - facts.t)
        yield f"a counter that moves or a plain no of the pause endpoints ends the pause, else {left:.0f} s do"
        return
    if facts.call_until is not None:
        left = max(0.0, facts.call_until - facts.t)
        yield f"the call that holds the engine starts every clock afresh when it comes back, else {left:.0f} s do"
        return
    if facts.resting is not None:
        yield "the end of the pause starts every clock afresh"
        return
    minimum = settings.active_probe_min_failures
    if facts.blind_since is not None:
        if facts.canary is None:
            yield "nothing: without legs and canaries no hang can be seen"
        else:
            need = max(0, minimum - facts.blind_failures)
            since = f"{settings.stall_sec:g} s after the last complete one at the earliest"
            yield f"canary-hang after {need} more failed canar{'y' if need == 1 else 'ies'}, {since}"
        return
    for core in facts.cores:
        if core.state == "peer-stall":
            yield f"core {core.name}: no peer-stall once the queue shrinks or a transfer succeeds"
        limit = core.stall_after_sec(settings.stall_sec)
        if _canary_is_usable(core, facts):
            need = max(0, minimum - core.run.failures)
            first_failed = core.run.first_begun if core.run.failures else facts.t
            ready = limit + max(core.proof_at, first_failed - settings.poll_interval_sec)
            canaries = f" and {need} more canar{'y fails' if need == 1 else 'ies fail'}" if need else ""
            yield f"core {core.name}: hung if nothing moves{_for_another(ready - facts.t)}{canaries}"
            continue
        lost = core.lost_witness(limit)
        if lost is not None:
            yield f"core {core.name}: nothing, until {lost} is on the page again or a canary is usable"
            continue
        limit += facts.profile.gauge_stale_sec if facts.profile is not None else 0.0
        if core.busy_since is not None:
            left = max(core.proof_at, core.busy_since) + limit - facts.t
            yield f"core {core.name}: hung if it stays busy and nothing moves{_for_another(left)}"
        else:
            still = " or its scheduler loop stood still" if core.heartbeat_at is not None else ""
            yield f"core {core.name}: hung once nothing moved for {limit:g} s in which it was busy{still}"


def _for_another(left_sec: float) -> str:
    return f" for another {left_sec:.0f} s" if left_sec >= 0.5 else ""


def _canary_is_usable(core: Core, facts: Facts) -> bool:
    if facts.canary is None or (len(facts.cores) > 1 and not facts.can_aim):
        return False
    return core.run.last_outcome is None or core.run.last_failed


def _suppressed(facts: Facts) -> Iterator[str]:
    if facts.settings.mode == "shadow":
        yield "mode: enforce would act on it"
    elif facts.process_since is not None:
        left = facts.settings.warmup_sec - (facts.t - facts.process_since)
        yield f"it is acted on when warm-up ends in {max(0.0, left):.0f} s"
