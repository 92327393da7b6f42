"""The public names of the states, whether they are hung, and how they rank. docs/states.md is tested against this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class State:
    """One public state."""

    name: str
    hung: bool
    when: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A state that holds and the sentence that says why, before suppression. `core` is the core that decided."""

    state: str
    reason: str
    core: str | None = None


ENGINE_STATES: Final = (
    State("startup-hang", True, "the engine has been loading for longer than startup_budget_sec"),
    State("startup", False, "no scrape has succeeded yet: the engine is loading"),
    State("restarting", False, "nobody listens any more: the process is gone and is being restarted"),
    State("unreach-hang", True, "/metrics has failed for too long, and canaries failed meanwhile"),
    State("unreach-grace", False, "the last scrape failed, not yet for that long"),
    State("observer-gap", False, "the watcher did not run for a while (this poll only), or cannot ask the engine"),
    State("replaced", False, "another process answers now; everything is learned anew; this poll only"),
    State("paused", False, "the engine says it is paused or asleep: no canary, no hang"),
    State("canary-hang", True, "no progress legs, and for stall_sec canaries failed in a row"),
    State("no-legs", False, "the page has no progress legs: canaries alone decide"),
)
"""Engine-wide states; the first that holds wins over the later ones and over every core's."""

CORE_STATES: Final = (
    State("baseline", False, "the first page of this core; this poll only"),
    State("regress", False, "a counter fell in the same process: a registry reset; this poll only"),
    State("probe-fail-but-growing", False, "the last canary failed, but a leg moved after it: one long step"),
    State("growing", False, "a counter moved"),
    State("stall-hang-log", True, "counters frozen, the log holds a hang signature, and a canary failed"),
    State("kv-growing", False, "only a rising gauge moved: a prefill is allocating blocks"),
    State("stall-hang", True, "frozen for the stall threshold, and canaries failed in a row"),
    State("probe-fail-grace", False, "the last canary failed, not yet enough for a verdict"),
    State("saturated", False, "the last canary was turned away because the engine is full"),
    State("misconfigured", False, "the last canary was refused for a reason that is no hang (401, 404...)"),
    State("stall-active-ok", False, "nothing moved since the last complete canary: alive and idle"),
    State("idle", False, "frozen, not busy, and canaries are off or cannot be aimed"),
    State("freeze-grace", False, "frozen, not yet for long"),
    State("peer-stall", False, "a prefill/decode queue stands still: the partner is at fault"),
)
"""States of one core, in the order in which they are tried (peer-stall replaces the harmless ones)."""

WORST_FIRST: Final = (
    "stall-hang-log",
    "stall-hang",
    "probe-fail-grace",
    "probe-fail-but-growing",
    "saturated",
    "misconfigured",
    "peer-stall",
    "freeze-grace",
    "regress",
    "stall-active-ok",
    "idle",
    "kv-growing",
    "growing",
    "baseline",
)
"""Which core's state is the engine's."""

HUNG: Final = frozenset(state.name for state in (*ENGINE_STATES, *CORE_STATES) if state.hung)

EVERYDAY: Final = frozenset({"baseline", "growing", "kv-growing", "freeze-grace", "idle", "stall-active-ok"})
"""Changes among these are neither logged nor counted as transitions."""

WARNED_OF: Final = frozenset({"observer-gap", "no-legs", "misconfigured"})
"""Not hung, and yet an operator has something to correct: logged as warnings."""

SUPPRESSIONS: Final = ("warmup", "shadow")
"""Prefixes of a hang state that is shown and not acted on."""

RANK: Final = {name: rank for rank, name in enumerate(WORST_FIRST)}


def all_names() -> tuple[str, ...]:
    """Every state name that can be published, suppressed ones included."""
    plain = tuple(state.name for state in (*ENGINE_STATES, *CORE_STATES))
    warmup = tuple(f"warmup-{name}" for name in plain if name in HUNG and name != "startup-hang")
    shadow = tuple(f"shadow-{name}" for name in plain if name in HUNG)
    return plain + warmup + shadow
