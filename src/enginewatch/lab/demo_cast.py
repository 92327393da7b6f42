"""What differs between the engines in the demo: how each is started, how it is hung, and what it says meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from enginewatch.engines import PROFILES
from enginewatch.engines.profile import Grain, LegKind
from enginewatch.lab.sim.process import SimProcess

_LATEST_PAGE_SEC = 2.0
"""How long TensorRT-LLM waits before it answers that there are no new statistics."""


def _stop(sim: SimProcess) -> None:
    sim.stop()


def _resume(sim: SimProcess) -> None:
    sim.cont()


def _deadlock(sim: SimProcess) -> None:
    sim.fault(deadlock=True)


def _release(sim: SimProcess) -> None:
    sim.fault(deadlock=None)


@dataclass(frozen=True, slots=True)
class Part:
    """One engine's part in the story.

    Attributes:
        engine: its kind.
        options: how the simulated engine is started, beyond the demo's own.
        environment: what its sidecar is told.
        asks_engine: whether its /health may be asked all the time. Not where asking makes it work (SGLang): the
            questions would keep an idle engine busy and change what is to be shown.
        health_of_a_hang: what its own /health says while it hangs.
        prefill_state: what a long prefill looks like; `prefill_says` is the sentence, `{stall:g}` in it.
        still_legs: legs that stand still during a long prefill, and `still`, what they are called together. None:
            everything that the sidecar sees goes on.
        hang, resume: how it is hung and freed; `hang_says`, `resume_says` are the titles, `by_hand` how to do it with
            {rank}, a process id, and {engine}, a URL.
        hurry: settings of the fast story that are shorter than the others', to stay within a minute.
        slower_sec: how much later than usual its pages tell something new, at most.
    """

    engine: str
    health_of_a_hang: str
    prefill_state: str
    prefill_says: str
    still_legs: frozenset[str] = frozenset()
    still: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    asks_engine: bool = True
    hang: Callable[[SimProcess], None] = _stop
    resume: Callable[[SimProcess], None] = _resume
    hang_says: str = ""
    resume_says: str = "kill -CONT"
    by_hand: str = "kill -STOP {rank}  # the hang; kill -CONT {rank} ends it"
    hurry: Mapping[str, float] = field(default_factory=dict)
    slower_sec: float = 0.0

    @property
    def title(self) -> str:
        """The engine's name for people."""
        return PROFILES[self.engine].title


def _counters(engine: str, grain: Grain | None = None) -> frozenset[str]:
    legs = PROFILES[engine].legs
    return frozenset(leg.name for leg in legs if leg.kind is LegKind.COUNTER and grain in (None, leg.grain))


def _kill_stop(engine: str) -> str:
    return f"kill -STOP {PROFILES[engine].rank_titles[0]}"


PARTS: dict[str, Part] = {
    part.engine: part
    for part in (
        Part(
            engine="vllm",
            health_of_a_hang="its own /health says 200 all along",
            prefill_state="kv-growing",
            prefill_says="no counter moves for over {stall:g} s: kv-growing, never 503",
            still_legs=_counters("vllm"),  # all wait for the first token, only the KV gauge rises
            still="every counter",
            hang_says=_kill_stop("vllm"),
        ),
        Part(
            engine="sglang",
            health_of_a_hang=f"its own /health ({PROFILES['sglang'].title}: after 20 s) says nothing yet",
            prefill_state="growing",
            prefill_says="no request ends for over {stall:g} s, every chunk counts: growing, never 503",
            still_legs=_counters("sglang", Grain.REQUEST),
            still="what counts finished requests",
            asks_engine=False,
            hang_says=_kill_stop("sglang"),
        ),
        # By its page, which moves when requests end, this story would take minutes; by its statistics it does not. They
        # are answered by the rank's process, so the hang is one of its executor's loop alone: what a stuck collective
        # is. A stopped process would not answer for them at all, which takes twice stall_sec to be called a hang.
        Part(
            engine="trtllm",
            health_of_a_hang="its own /health says 200 all along",
            prefill_state="growing",
            prefill_says="one request of over {stall:g} s, every chunk is an iteration: growing, never 503",
            options={"iter_stats": True},
            environment={"ENGINE_KIND": "trtllm", "TRTLLM_JSON_STATS": "1"},
            hang=_deadlock,
            resume=_release,
            hang_says="its executor's loop deadlocks",
            resume_says="The loop goes on",
            by_hand="curl -X POST {engine}/_sim/faults -d '{{\"deadlock\": true}}'  # the hang; false ends it",
            hurry={"stall_sec": 3.5},
            slower_sec=2 * _LATEST_PAGE_SEC,
        ),
    )
}
"""Kind -> its part."""
