"""What one program showed in one round of one scenario."""

from __future__ import annotations

from dataclasses import dataclass, field

FREEZE_LOAD = "frozen under load"
FREEZE_IDLE = "frozen while idle"
FREEZE_ONE_CORE = "one core of two frozen"
LOSES_A_SERIES = "frozen page that loses a series"
UNAUTHORIZED = "401 on the canary"
COST = "cost"
LATENCY = "/healthz latency"
LARGE_PAGE = "page of 8 MiB"

SCENARIOS = (FREEZE_LOAD, FREEZE_IDLE, COST, LATENCY, FREEZE_ONE_CORE, LOSES_A_SERIES, UNAUTHORIZED, LARGE_PAGE)
SERVED = (LOSES_A_SERIES, UNAUTHORIZED, LARGE_PAGE)
"""Played on served pages, without an engine."""
SHORT = {
    FREEZE_LOAD: "load",
    FREEZE_IDLE: "idle",
    COST: "cost",
    LATENCY: "latency",
    FREEZE_ONE_CORE: "dp",
    LOSES_A_SERIES: "series",
    UNAUTHORIZED: "401",
    LARGE_PAGE: "page",
}
"""How they are named on the command line."""

DETECTED = "503, s"
RECOVERED = "200 again, s"
WAITED = "waited for a CPU meanwhile, s"
"""Of a program that was late, what was the machine's doing."""


@dataclass(frozen=True)
class Sample:
    """Figures by name; None where something never happened.

    Attributes:
        early: it said 503 before anything was done, so that its own 503 later proves nothing.
        story: what its /healthz said, one line per change.
        history: what ours noted down, where it was late or wrong.
    """

    scenario: str
    program: str
    round: int
    figures: dict[str, float | None]
    early: bool = False
    story: list[str] = field(default_factory=list)
    history: list[str] = field(default_factory=list)
