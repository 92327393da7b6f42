"""What one scrape costs the judgement: `Watch.handle(Scraped)` with the samples of a real page, for 1 and for 64 cores.

    python bench/step.py [--quick]

The samples were read by core.exposition from the page of a live vLLM. Three lives: counters move; nothing moves and the
canary that each stalled poll asks for is answered well (an idle engine); nothing moves and canaries fail, through the
verdict and after it. CPU time of the thread, per event: the best and the median of several rounds. `poll` is everything
that a poll feeds the judgement (Tick, Scraped, CanaryDone). Bound: 30 us for a scrape event of one core.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import thread_time_ns

from enginewatch.core.events import (
    AbandonCanary,
    CanaryDone,
    EngineDescribed,
    Event,
    Outcome,
    Scraped,
    StartCanary,
    Tick,
)
from enginewatch.core.exposition import PageReader
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import vllm
from pages import page_of
from report import Figure, Report, Table, main, verdict

BOUND_US = 30
POLL_SEC = 5.0
LEG = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Cost:
    """Nanoseconds per scrape event, per poll and per explanation; the states seen."""

    scraped: list[int]
    poll: list[int]
    explain: int
    states: set[str]


def samples_of(cores: int) -> dict[str, float]:
    """What the page reader keeps of a page."""
    reader = PageReader(vllm.PROFILE.names())
    reader.feed(page_of(cores))
    return reader.finish()


def moving(samples: dict[str, float]) -> Iterator[dict[str, float]]:
    """Pages on which every core makes tokens."""
    legs = [series for series in samples if series.startswith(LEG)]
    while True:
        samples = samples | {leg: samples[leg] + 7 for leg in legs}
        yield samples


def still(samples: dict[str, float]) -> Iterator[dict[str, float]]:
    """Pages on which nothing moves."""
    while True:
        yield dict(samples)


class Life:
    """A judgement, and time that passes for it."""

    def __init__(self, pages: Iterator[dict[str, float]], canary: Outcome | None) -> None:
        self._now = 0.0
        self._pages = pages
        self._canary = canary
        self._watch = Watch(Settings(warmup_sec=0), profile=vllm.PROFILE, now=0.0)
        self._in_flight: int | None = None
        self.states: set[str] = set()

    def polls(self, count: int) -> Iterator[tuple[int, int]]:
        """Nanoseconds of the scrape event and of the whole poll, poll by poll."""
        for _ in range(count):
            samples = next(self._pages)
            self._now += POLL_SEC
            first = self._handle(Tick())
            scraped = self._handle(Scraped(self._now, samples))
            canaries = 0
            while self._in_flight is not None and self._canary is not None:
                canaries += self._handle(CanaryDone(self._in_flight, self._canary))
            self.states.add(self._watch.verdict.state)
            yield scraped, first + scraped + canaries

    def begin(self) -> None:
        """The first polls and what the engine says of itself."""
        for _ in self.polls(5):
            pass
        self._handle(EngineDescribed("vllm", "0.32.0"))
        for _ in self.polls(10):
            pass

    def explain(self) -> int:
        """Nanoseconds of one explanation."""
        began = thread_time_ns()
        self._watch.explain(self._now)
        return thread_time_ns() - began

    def _handle(self, event: Event) -> int:
        if isinstance(event, CanaryDone):
            self._in_flight = None
        began = thread_time_ns()
        instructions = self._watch.handle(event, self._now)
        took = thread_time_ns() - began
        for instruction in instructions:
            match instruction:
                case StartCanary(token):
                    self._in_flight = token
                case AbandonCanary():
                    self._in_flight = None
        return took


def cost(make: Callable[[], Life], rounds: int, polls: int) -> Cost:
    """The mean of each round."""
    scraped: list[int] = []
    poll: list[int] = []
    explain: list[int] = []
    states: set[str] = set()
    for _ in range(rounds):
        life = make()
        life.begin()
        life.states.clear()
        pairs = list(life.polls(polls))
        scraped.append(sum(pair[0] for pair in pairs) // polls)
        poll.append(sum(pair[1] for pair in pairs) // polls)
        explain.append(min(life.explain() for _ in range(5)))
        states |= life.states
    return Cost(scraped, poll, min(explain), states)


def measure(quick: bool) -> Report:
    rounds, polls = (3, 50) if quick else (15, 500)
    rows: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    for cores in (1, 64):
        samples = samples_of(cores)
        lives: tuple[tuple[str, Callable[[], Life]], ...] = (
            ("counters move", lambda samples=samples: Life(moving(samples), Outcome.OK)),  # type: ignore[misc]
            ("nothing moves, canaries answered", lambda samples=samples: Life(still(samples), Outcome.OK)),  # type: ignore[misc]
            ("nothing moves, canaries fail", lambda samples=samples: Life(still(samples), Outcome.TIMEOUT)),  # type: ignore[misc]
        )
        for name, make in lives:
            found = cost(make, rounds, polls if cores == 1 else max(10, polls // 10))
            best = min(found.scraped) / 1000
            bounded = cores == 1
            rows.append(
                (
                    f"{cores} core{'s' if cores > 1 else ''}, {name}",
                    str(len(samples)),
                    f"{best:.1f}",
                    f"{statistics.median(found.scraped) / 1000:.1f}",
                    str(BOUND_US) if bounded else "",
                    verdict(best, BOUND_US) if bounded else "",
                    f"{min(found.poll) / 1000:.1f}",
                    f"{found.explain / 1000:.0f}",
                    ", ".join(sorted(found.states)),
                )
            )
            if bounded:
                figures.append(Figure(f"core step per scrape event, one core, {name}", best, BOUND_US, "us"))
    columns = ("life", "samples", "event, us", "median", "bound", "kept", "poll, us", "explain, us", "states seen")
    return Report([Table("The judgement's CPU time", columns, rows)], figures)


if __name__ == "__main__":
    main(measure, __doc__)
