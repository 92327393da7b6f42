"""How one core is judged. Everything here reads; the one thing written is that a core was declared hung.

The rules, in the order in which they are tried:
    - Movement is life: `growing` (a counter) outranks everything but a fresh baseline; `kv-growing` (a gauge) outranks
      everything but the log rule.
    - `stall-hang-log`: counters frozen for log_stall_sec, a signature in the log that is newer than the last counter
      progress, complete canary and replacement, and a canary begun after those three that failed (canaries off: busy
      all that time).
    - `stall-hang`, active rule: frozen for the threshold, AND enough canaries in a row failed, the first of them begun
      at least threshold - poll ago, AND a page read after the last failure shows no progress.
    - `stall-hang`, passive rule, where no canary is usable (off, saturated, misconfigured, not aimable): frozen for the
      threshold and for as long as the engine's gauges may be stale, and all that time busy or with a frozen heartbeat.
      (Busy now is not enough: an engine that was idle for an hour has its first request.) Not while a leg is missing
      from the page that had not stood still under load before: on an engine at work the rest may well stand still.
    - Whatever the rule, a hang is declared on a page begun after its time was up (and after the last failed canary): a
      verdict must not rest on a picture older than the question.
    - A declared hang holds until the core proves life (`Core.prove`), or until the operator asks for more patience than
      it has had; newer failures and unread pages change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from enginewatch.core.events import Outcome
from enginewatch.core.progress import Core, Proof
from enginewatch.core.settings import Settings
from enginewatch.core.states import Finding


@dataclass(slots=True)
class Conditions:
    """What a core's judgement depends on besides the core; times on the judgement's clock."""

    settings: Settings
    t: float = 0.0
    poll: int = 0
    page: int = 0
    page_begun: float = float("-inf")
    """When the last page was asked for, whatever was on it."""
    disaggregated: bool = False
    """The role is prefill or decode: requests deferred for a partner are not this engine's, and `peer-stall` exists."""
    canaries_on: bool = True
    """They are sent, and one that fails counts: the role that they are for is the engine's."""
    aimable: bool = True
    """The engine has one core, or its version is known to honour a canary's aim."""
    gauge_stale_sec: float = 0.0
    log_hit_at: float = float("-inf")


def judge_core(core: Core, now: Conditions) -> Finding:
    """The first state of this core that holds; a few harmless ones give way to `peer-stall`."""
    poll, name, run = now.poll, core.name, core.run
    if core.baseline_poll == poll:
        return Finding("baseline", f"core {name}: first page of this process", name)
    if core.fell_poll == poll:
        return Finding("regress", f"core {name}: a counter fell in the same process, baseline taken anew", name)
    grew_after_failure = core.grew_after_failure_poll == poll
    if grew_after_failure and core.grew_after_failure_with_counter:
        return _grew_after_failure(core)
    if core.counter_poll == poll:
        return _unless_peer_stall(core, now, "growing", f"core {name}: {core.moved_leg} moves")
    if core.hang == "stall-hang-log" or _seen_frozen(core, _hung_by_log_from(core, now), core.failed_ended):
        core.hang = "stall-hang-log"
        return _say_hung_by_log(core, now)
    if grew_after_failure:
        return _grew_after_failure(core)
    if core.gauge_poll == poll:
        return _unless_peer_stall(
            core, now, "kv-growing", f"core {name}: only {core.moved_leg} rises, a prefill is allocating blocks"
        )
    frozen = now.t - core.proof_at
    threshold = core.stall_after_sec(now.settings.stall_sec)
    if (
        core.hang == "stall-hang"
        or _seen_frozen(
            core, _hung_by_canaries_from(core, now), core.run.enough_since(now.settings.active_probe_min_failures)
        )
        or _seen_frozen(core, _hung_passively_from(core, now))
    ):
        core.hang = "stall-hang"
        return _say_hung(core, now, frozen, threshold)
    if run.last_failed:
        return Finding(
            "probe-fail-grace",
            f"core {name}: {_canaries_failed(run.failures, run.last_failure)}, frozen for {frozen:.0f} s of "
            f"{threshold:g} s",
            name,
        )
    if run.last_outcome is not None:
        state = "saturated" if run.last_outcome is Outcome.SATURATED else "misconfigured"
        return Finding(state, f"core {name}: {_NEITHER[state]}, frozen for {frozen:.0f} s", name)
    if core.proof_by == Proof.CANARY:
        return _unless_peer_stall(
            core, now, "stall-active-ok", f"core {name}: {_standing(core, now)}, the last canary went through"
        )
    if not (now.canaries_on and now.aimable) and frozen >= threshold and not is_busy(core, now):
        return _unless_peer_stall(
            core, now, "idle", f"core {name}: {_standing(core, now)}, {_heartbeat_says(core, now, threshold)}"
        )
    return _unless_peer_stall(
        core, now, "freeze-grace", f"core {name}: nothing moved for {frozen:.0f} s of {threshold:g} s"
    )


def recheck_at(core: Core, now: Conditions) -> float | None:
    """When a fresh page would complete a rule for this core, if only time is missing and not a whole poll.

    Also at once: the time may have run out while the last page was being read, and that one was begun too early to
    prove anything. One that was begun late enough and proves nothing (it lacks a leg, or the core) is followed by none,
    or pages would follow one another without a pause.

    Not with canaries off: without them no core is to notice what happens to another, and the poll does as well.
    """
    if core.hang is not None or core.counter_poll == now.poll or not now.canaries_on:
        return None
    soon = now.settings.poll_interval_sec
    ready = [max(at, now.t) for at in _hung_from(core, now) if now.page_begun < at < now.t + soon]
    return min(ready) + _A_LITTLE_LATER_SEC if ready else None


def still_holds(core: Core, now: Conditions) -> bool:
    """Whether a declared hang would be one by settings that changed since."""
    return any(at <= now.t for at in _hung_from(core, now))


def is_busy(core: Core, now: Conditions) -> bool:
    """Whether the last page says that the core has work. Raises suspicion, never clears it."""
    return not core.doubts_load and bool(
        (core.running(now.page) or 0) > 0 or (core.waiting(now.page, without_deferred=now.disaggregated) or 0) > 0
    )


def log_speaks(core: Core, now: Conditions) -> bool:
    """Whether a log signature newer than the core's last counter progress is in the window."""
    return now.log_hit_at > core.counter_proof_at and now.t - now.log_hit_at <= now.settings.log_window_sec


# A rule says when its time is up; None when more than time is missing. A page begun after that is the proof: between
# two polls the time may run out on an engine that has long gone on. It must carry all of the core's legs, since the one
# that moves may be the one that is missing; the page begun after enough canaries had failed may be another, with fewer.


def _hung_from(core: Core, now: Conditions) -> list[float]:
    rules = (_hung_by_canaries_from(core, now), _hung_passively_from(core, now), _hung_by_log_from(core, now))
    return [at for at in rules if at is not None]


def _seen_frozen(core: Core, since: float | None, failed_at: float = float("-inf")) -> bool:
    return since is not None and core.whole_page_begun >= since and core.page_begun >= failed_at


def _hung_by_canaries_from(core: Core, now: Conditions) -> float | None:
    run, threshold = core.run, core.stall_after_sec(now.settings.stall_sec)
    if run.failures < now.settings.active_probe_min_failures or run.unconfirmed_since is not None:
        return None
    # Two lost canaries and then refused ones, on an engine with nothing to do: a proxy that was restarted and asks for
    # a key now. The next failure makes the run count again.
    if run.last_outcome is Outcome.MISCONFIGURED or (run.last_outcome is Outcome.SATURATED and not is_busy(core, now)):
        return None
    early = run.first_begun - now.settings.poll_interval_sec
    return max(core.proof_at + threshold, early + threshold)


def _hung_passively_from(core: Core, now: Conditions) -> float | None:
    if not _canary_unusable(core, now):
        return None
    suspect_since = []
    if core.busy_since is not None and is_busy(core, now):
        suspect_since.append(core.busy_since)
    if core.heartbeat_at is not None and core.heartbeat_page == now.page:
        suspect_since.append(core.heartbeat_at)
    threshold = core.stall_after_sec(now.settings.stall_sec)
    if not suspect_since or core.lost_witness(threshold) is not None:
        return None
    return max(core.proof_at, min(suspect_since)) + threshold + now.gauge_stale_sec


def _canary_unusable(core: Core, now: Conditions) -> bool:
    if not now.canaries_on or not now.aimable:
        return True
    return core.run.last_outcome is not None and not core.run.last_failed  # saturated or misconfigured


def _hung_by_log_from(core: Core, now: Conditions) -> float | None:
    frozen_since, stall = core.counter_proof_at, now.settings.log_stall_sec
    if not log_speaks(core, now):
        return None
    if now.canaries_on:
        return frozen_since + stall if core.failed_begun >= frozen_since else None
    if core.busy_since is None or not is_busy(core, now):
        return None
    return max(frozen_since, core.busy_since) + stall


def _heartbeat_frozen(core: Core, now: Conditions, limit: float) -> bool:
    return core.heartbeat_at is not None and core.heartbeat_page == now.page and now.t - core.heartbeat_at >= limit


def _heartbeat_says(core: Core, now: Conditions, threshold: float) -> str:
    if core.heartbeat_at is None or core.heartbeat_page != now.page:
        return f"cannot tell more: {'no canary can be aimed' if now.canaries_on else _no_canaries(now)}"
    if _heartbeat_frozen(core, now, threshold):
        return "but its scheduler loop does not turn"
    return "its scheduler loop turns"


def _unless_peer_stall(core: Core, now: Conditions, state: str, reason: str) -> Finding:
    if now.disaggregated:
        queue = core.stuck_queue(now.t, now.settings.peer_stall_sec)
        if queue is not None and queue.stuck_since is not None:
            return Finding(
                "peer-stall",
                f"core {core.name}: {queue.value:g} requests in {queue.name} for {now.t - queue.stuck_since:.0f} s and "
                "no transfer succeeded: the partner, or a stale identity of it, is at fault",
                core.name,
            )
    return Finding(state, reason, core.name)


def _grew_after_failure(core: Core) -> Finding:
    return Finding(
        "probe-fail-but-growing",
        f"core {core.name}: the last canary failed, but {core.moved_leg} moved since: one long step",
        core.name,
    )


def _say_hung(core: Core, now: Conditions, frozen: float, threshold: float) -> Finding:
    run = core.run
    if run.failures >= now.settings.active_probe_min_failures:
        witness = _canaries_failed(run.failures, run.last_failure)
    else:
        said = f" (the last one: {run.last_outcome})" if run.last_outcome is not None else ""
        if is_busy(core, now):
            witness = f"busy, and no usable canary{said}"
        elif _heartbeat_frozen(core, now, threshold):
            witness = f"its scheduler loop does not turn, and no usable canary{said}"
        else:
            witness = "no proof of life since it was declared hung"
    grain = ""
    if core.request_grained:
        grain = ", its legs move only at request ends"
    elif threshold > now.settings.stall_sec:
        grain = ", one step of this engine may take as long"
    return Finding(
        "stall-hang",
        f"core {core.name}: no progress for {frozen:.0f} s (limit {threshold:g} s{grain}), {witness}, "
        f"{_load(core, now)}",
        core.name,
    )


def _say_hung_by_log(core: Core, now: Conditions) -> Finding:
    witness = "a canary failed" if now.canaries_on else f"busy, {_no_canaries(now)}"
    return Finding(
        "stall-hang-log",
        f"core {core.name}: counters frozen for {now.t - core.counter_proof_at:.0f} s, the log says that the scheduler "
        f"is dead ({now.t - now.log_hit_at:.0f} s ago), {witness}, {_load(core, now)}",
        core.name,
    )


def _no_canaries(now: Conditions) -> str:
    return "no canary of the worker's role" if now.settings.active_probe_enabled else "canaries are off"


def _standing(core: Core, now: Conditions) -> str:
    """What a core does in which nothing moves; one that does not tell its load is not called idle."""
    told = core.running(now.page) is not None or core.waiting(now.page, without_deferred=False) is not None
    return "idle" if told and not is_busy(core, now) else "nothing moves"


def _load(core: Core, now: Conditions) -> str:
    running, waiting = core.running(now.page), core.waiting(now.page, without_deferred=False)
    if running is None and waiting is None:
        return "load unknown"
    return f"{running or 0:g} running, {waiting or 0:g} waiting"


_A_LITTLE_LATER_SEC: Final = 0.001
"""So that a page asked for at a moment is not begun a rounding error before it."""
_NEITHER: Final = {
    "saturated": "the last canary was turned away because the engine is full",
    "misconfigured": "the last canary was refused for a reason that is no hang (wrong path, key or body)",
}


def _canaries_failed(failures: int, outcome: Outcome | None) -> str:
    return f"{failures} canar{'y' if failures == 1 else 'ies in a row'} failed ({outcome})"
