"""Which canary goes out next, and what is known of the one under way.

Rules:
    - One at a time. Why it was sent decides what its answer counts for: `core` for the stall of a core, `outage` for
      `unreach-hang` only, `blind` for `canary-hang` only.
    - With several cores a canary must be aimed, and only where the engine's version is known to honour it. Where it
      cannot be aimed, several cores have no usable canary.
    - A deadline that is noticed late means that the watcher was starved: the answer may have come in time and lain
      unread. Such a canary counts for nothing and is sent again.
    - Order: a core with a failed canary in this freeze (stay with it), busy cores, the longest without proof; cores
      already declared hung come last, so that they do not starve their siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from enginewatch.core.progress import Core

Purpose = Literal["core", "outage", "blind"]

LATE_SEC: Final = 1.0
"""A deadline noticed later than this after its time was not kept by the watcher."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The canary under way; times are on the judgement's clock.

    `core` is None for one that was not for a core. `lost_at` is when it must have been reported: a shell that lost it
    must not silence canaries for ever.
    """

    token: int
    purpose: Purpose
    core: str | None
    begun: float
    deadline_at: float
    lost_at: float


class CanaryDesk:
    """Keeps the one canary under way, and the wish for the arming canary."""

    def __init__(self) -> None:
        self._next_token = 1
        self.in_flight: InFlight | None = None
        self.arming_due = False
        """The first canary of a process: once it has answered, error answers count as failures."""
        self.armed = False
        self.outage_due = False
        self.blind_due = False
        self._put_off = False
        self.starved = False
        """The last deadline was noticed late; said once until one is noticed in time."""

    def new_process(self) -> None:
        """Another process answers: nothing it was asked before counts, and it has to be armed."""
        self.armed = False
        self.arming_due = True

    def start(self, purpose: Purpose, core: str | None, t: float, deadline_at: float, lost_at: float) -> InFlight:
        """Book a canary as under way."""
        self.in_flight = InFlight(self._next_token, purpose, core, t, deadline_at, lost_at)
        self._next_token += 1
        return self.in_flight

    def ask_again(self, done: InFlight, core: Core | None) -> None:
        """What this canary was for is still to be asked."""
        self.outage_due = self.outage_due or done.purpose == "outage"
        self.blind_due = self.blind_due or done.purpose == "blind"
        if core is not None and done.purpose == "core":
            core.canary_due = True

    def put_off(self) -> None:
        """The canary could not be sent. Not again at once, it would fail as fast: the next stalled poll sends one."""
        self._put_off = True

    def begin_poll(self) -> None:
        """A poll begins: an arming canary that could not be sent is due again."""
        self.arming_due = self.arming_due or (self._put_off and not self.armed)
        self._put_off = False

    def finish(self, token: int) -> InFlight | None:
        """The canary with this token ended. None when it is not the one under way: it was abandoned."""
        done = self.in_flight
        if done is None or done.token != token:
            return None
        self.in_flight = None
        return done


def next_core(
    cores: Iterable[Core], *, busy: Callable[[Core], bool], arming: bool, may: Callable[[Core], bool]
) -> Core | None:
    """The core that the next canary is for, None for none.

    `may` says whether a core that is due may be asked now (`active_probe_idle_sec`); the arming canary goes to any.
    """
    everyone = list(cores)
    suspects = [core for core in everyone if core.run.failures and core.run.last_failed and core.hang is None]
    candidates = suspects or everyone
    due = [core for core in candidates if core.canary_due and may(core)]
    if not due and arming:
        due = everyone
    if not due:
        return None
    if len(due) == 1:
        return due[0]
    return min(due, key=lambda core: (core.hang is not None, not busy(core), core.proof_at))
