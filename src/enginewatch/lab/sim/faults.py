"""What a simulated engine is told to do wrong, as data. `/_sim/faults` shows and changes it.

A fault is a state and stays until it is changed; actions (restart, crash, a long prefill, log lines) are in control.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

ANSWERS = (
    "hang",  # accepted, never answered
    "reset",  # the connection is reset
    "freeze",  # begins and stops before its end
    "error-object",  # 200 with an error object
    "error-finish",  # 200 with finish_reason error
    "empty",  # 200 without any output
    "html",  # 200 from something that is not the engine
    "queue-full",  # 503 that says the queue is full
    *("307", "400", "401", "403", "404", "405", "422", "429", "500", "502", "503"),
)
METRICS = (
    "hang",
    "reset",
    "html",
    "json",
    "empty",
    "no-engine-series",  # --disable-log-stats: the process answers, the engine says nothing
    "truncated",  # cut inside a line, shorter than its Content-Length
    "huge",  # padded to metrics_bytes with foreign series
    "huge-own",  # padded to metrics_bytes with series of the engine's own names
    "drip",  # metrics_rate bytes a second
    *("307", "401", "403", "404", "500", "503"),
)


@dataclass
class Faults:
    """All faults of one engine; the default of each is "none".

    Attributes:
        answer: what generation requests get instead of an answer, one of ANSWERS.
        answer_count: to how many requests; 0 = until changed.
        metrics: what /metrics does instead of answering, one of METRICS.
        metrics_count: to how many scrapes; 0 = until changed.
        metrics_delay_sec: seconds before /metrics answers.
        metrics_bytes: size of a huge page.
        metrics_rate: bytes per second of a dripping page.
        drop_series: names whose series are left out of the page.
        drop_every_other: leave them out of every other page only.
        step_delay_sec: seconds added to every step.
        step_delay_core: only on this core; empty = all.
        paused: the engine is paused, as by its own endpoint; running requests are kept.
        sleeping: sleep level (1, 2), 0 = awake. vLLM only.
        peer_gone: the prefill/decode partner never comes.
        deadlock: the executor's loop stands still while its process lives and answers for statistics. TensorRT-LLM
            only; SIGSTOP is the hang of all of a process.
        health: what /health answers regardless, a status as text.
    """

    answer: str = ""
    answer_count: int = 0
    metrics: str = ""
    metrics_count: int = 0
    metrics_delay_sec: float = 0.0
    metrics_bytes: int = 8 * 2**20
    metrics_rate: float = 1024.0
    drop_series: list[str] = field(default_factory=list)
    drop_every_other: bool = False
    step_delay_sec: float = 0.0
    step_delay_core: str = ""
    paused: bool = False
    sleeping: int = 0
    peer_gone: bool = False
    deadlock: bool = False
    health: str = ""

    def update(self, changes: dict[str, Any]) -> None:
        """Change some; null puts one back to its default.

        Raises:
            ValueError: a name or value that is not a fault; nothing was changed.
        """
        defaults = asdict(Faults())
        new = asdict(self)
        for name, value in changes.items():
            if name not in defaults:
                raise ValueError(f"{name!r} is not a fault; there are {', '.join(defaults)}")
            default = defaults[name]
            value = default if value is None else value
            if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if name in ("answer", "metrics", "health", "step_delay_core") and isinstance(value, int):
                value = str(value)
            if type(value) is not type(default):
                raise ValueError(f"{name} is {value!r}, expected {type(default).__name__}")
            new[name] = value
        if new["health"] and not new["health"].isdigit():
            raise ValueError(f"health is {new['health']!r}, expected a status like '503'")
        for name, value in new.items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name} is {value!r}, expected 0 or more")
        if not new["metrics_rate"]:
            raise ValueError("metrics_rate is 0, expected bytes per second; metrics 'hang' never answers")
        for name, allowed in (("answer", ANSWERS), ("metrics", METRICS)):
            if new[name] and new[name] not in allowed:
                raise ValueError(f"{name} is {new[name]!r}, expected one of {', '.join(allowed)}")
        for each in fields(self):
            setattr(self, each.name, new[each.name])

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    def take_answer(self) -> str:
        """What the generation request at hand gets, "" for a real answer; counts it."""
        taken = self.answer
        if taken and self.answer_count:
            self.answer_count -= 1
            if not self.answer_count:
                self.answer = ""
        return taken

    def take_metrics(self) -> str:
        """What the scrape at hand gets, "" for the page; counts it."""
        taken = self.metrics
        if taken and self.metrics_count:
            self.metrics_count -= 1
            if not self.metrics_count:
                self.metrics = ""
        return taken
