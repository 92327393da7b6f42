"""What the answer to a canary counts for, and for whom.

Rules:
    - A complete answer proves life: of the core it was for, of the engine's reach, and where there are no legs.
    - A deadline noticed late was not kept by the watcher, which lacks CPU: the answer may have come in time and lain
      unread. It counts for nothing and is asked for again.
    - An error answer by an engine that never accepted such a request (was not armed) is `misconfigured`, not a failure.
    - A failure in a role that the engine has not told counts for nothing (`role.py`).
    - One that was begun before the core's last proof of life says nothing of the freeze that followed it. A gauge that
      rose since makes it no failure of this freeze, but does not answer a signature in the log.
    - What is known of the core is older than a failure that was just noticed: a page is looked at before judging by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginewatch.core.blind import Blindness
from enginewatch.core.canaries import LATE_SEC, CanaryDesk, InFlight
from enginewatch.core.events import FAILURES, CanaryDone, Outcome
from enginewatch.core.progress import Core, Proof
from enginewatch.core.reach import Reach


@dataclass(frozen=True, slots=True)
class News:
    """What the judgement has to say or do after an answer.

    Attributes:
        late_sec: how late a deadline was noticed, the first time in a row; None otherwise.
        uncounted: the failure that counted for nothing, since the engine has not told its role.
        in_outage: it was sent into an outage and not complete.
        look_again: a fresh page is to be read at once.
    """

    late_sec: float | None = None
    uncounted: Outcome | None = None
    in_outage: bool = False
    look_again: bool = False


def count_answer(
    event: CanaryDone,
    done: InFlight,
    t: float,
    *,
    core: Core | None,
    desk: CanaryDesk,
    blind: Blindness,
    reach: Reach,
    failures_count: bool,
) -> News:
    """Take in how a canary ended.

    Args:
        event: how it ended.
        done: what it was sent for.
        t: now, on the judgement's clock.
        core: the core that it speaks for; None where it speaks for none.
        desk: what is known of canaries.
        blind: the judgement without legs.
        reach: the judgement of outages.
        failures_count: whether a failure may be held against this engine.
    """
    outcome = event.outcome
    if outcome is Outcome.UNASKED:
        desk.put_off()
        return News()
    if outcome is Outcome.OK:
        desk.armed = True
        blind.proof(t, Outcome.OK)
        reach.canary_ok(t)
        if core is not None:
            core.canary_ok_at, core.canary_ok_begun = t, done.begun
            core.prove(t, Proof.CANARY)
        return News()
    late_sec = t - done.deadline_at
    if outcome in (Outcome.TIMEOUT, Outcome.FROZEN) and late_sec > LATE_SEC:
        is_first, desk.starved = not desk.starved, True
        desk.ask_again(done, core)
        return News(late_sec=late_sec if is_first else None)
    desk.starved = False
    if outcome is Outcome.ERROR_ANSWER and not desk.armed:
        # A request that this engine never accepted must not kill it.
        outcome = Outcome.MISCONFIGURED
    failed = outcome in FAILURES or outcome is Outcome.ERROR_ANSWER
    if failed and not failures_count:
        return News(uncounted=outcome)
    if done.purpose == "outage":
        # Of an engine that was never armed an error answer is misconfigured, too; but its server may be in trouble.
        reach.canary_answered(outcome, t, failed=failed, answered=event.answered)
        return News(in_outage=True)
    if done.purpose == "blind":
        blind.canary_answered(outcome, failed=failed)
    if core is None:
        return News()
    return News(look_again=_count_for(core, done, t, outcome, failed=failed) and reach.phase == "running")


def _count_for(core: Core, done: InFlight, t: float, outcome: Outcome, *, failed: bool) -> bool:
    """Take in for one core an answer that was not complete; whether a page must be read before judging by it."""
    if done.begun < core.counter_proof_at:
        return False
    if failed:
        core.failed_begun, core.failed_ended = done.begun, t
    if done.begun < core.proof_at:
        return False
    if not failed:
        core.run.neither(outcome)
        return False
    core.run.failed(done.begun, t, outcome)
    # After a patient canary as well: legs may be back on the page that was begun a moment before.
    return core.hang is None
