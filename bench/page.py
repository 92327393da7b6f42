"""How long a metrics page takes to read, next to a full parse by prometheus_client in the same run.

    python bench/page.py [--quick]

Bounds: 1 ms for one core's page, 10 ms for 64 cores in one page, time that grows with the size. Times are the best of
several rounds, in CPU time of the thread, so that what else runs on the machine stays out of them. `longest feed` is
how long the event loop waits for one piece, of the size in which the client hands them on. `first` is the page that
nothing is known of yet, `then` all later ones; the bound is for those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time

from prometheus_client.parser import text_string_to_metric_families

from enginewatch.core.exposition import NotMetrics, PageReader, SeriesCache
from enginewatch.engines import sglang, vllm
from pages import hostile_pages, page_of
from report import Figure, Report, Table, main, verdict

NAMES = vllm.PROFILE.names() | sglang.PROFILE.names()  # what is asked before the engine is known: the worst case
PIECE_BYTES = 16 * 1024


@dataclass(frozen=True)
class Reading:
    seconds: float
    longest_feed: float
    samples: int | None


def read(page: bytes, cache: SeriesCache) -> Reading:
    reader = PageReader(NAMES, cache=cache)
    longest = 0.0
    samples: int | None = None
    began = thread_time()
    try:
        for start in range(0, len(page), PIECE_BYTES):
            before = thread_time()
            try:
                reader.feed(page[start : start + PIECE_BYTES])
            finally:
                longest = max(longest, thread_time() - before)
        samples = len(reader.finish())
    except NotMetrics:
        pass
    return Reading(thread_time() - began, longest, samples)


def best_of(rounds: int, measure: Callable[[], Reading]) -> Reading:
    readings = [measure() for _ in range(rounds)]
    return Reading(
        min(reading.seconds for reading in readings),
        min(reading.longest_feed for reading in readings),
        readings[0].samples,
    )


def full_parse(page: bytes, rounds: int) -> float:
    best = float("inf")
    text = page.decode()
    for _ in range(rounds):
        before = thread_time()
        for family in text_string_to_metric_families(text):
            for _sample in family.samples:
                pass
        best = min(best, thread_time() - before)
    return best


def measure(quick: bool) -> Report:
    live: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    per_byte: dict[int, float] = {}
    for cores, bound_ms in ((1, 1.0), (8, None), (64, 10.0)):
        page = page_of(cores)
        first = best_of(1 if quick else 5, lambda page=page: read(page, SeriesCache()))  # type: ignore[misc]
        cache = SeriesCache()
        read(page, cache)
        then = best_of(3 if quick else 20, lambda page=page, cache=cache: read(page, cache))  # type: ignore[misc]
        parse = full_parse(page, 1 if quick or cores == 64 else 5)
        per_byte[cores] = then.seconds / len(page)
        live.append(
            (
                f"{cores} core{'s' if cores > 1 else ''}",
                f"{len(page) / 1000:.0f}",
                str(then.samples),
                f"{first.seconds * 1e3:.2f}",
                f"{then.seconds * 1e3:.2f}",
                f"{bound_ms:g}" if bound_ms else "",
                verdict(then.seconds * 1e3, bound_ms) if bound_ms else "",
                f"{then.longest_feed * 1e3:.2f}",
                f"{parse * 1e3:.0f}",
                f"{parse / then.seconds:.0f}",
            )
        )
        if bound_ms:
            what = f"reading a page of {len(page) / 1000:.0f} kB, {cores} core{'s' if cores > 1 else ''}"
            figures.append(Figure(what, then.seconds * 1e3, bound_ms, "ms"))
    figures.append(
        Figure("reading a page, time per byte of 64 cores against 1", per_byte[64] / per_byte[1], 2, "times")
    )

    hostile: list[tuple[str, ...]] = []
    for name, page in hostile_pages().items():
        reading = best_of(1 if quick else 3, lambda page=page: read(page, SeriesCache()))  # type: ignore[misc]
        hostile.append(
            (
                name,
                f"{len(page) / 1000:.0f}",
                "not metrics" if reading.samples is None else str(reading.samples),
                f"{reading.seconds * 1e3:.1f}",
                f"{reading.longest_feed * 1e3:.2f}",
                f"{reading.seconds / len(page) * 1e9:.1f}",
            )
        )
    return Report(
        [
            Table(
                f"Pages of a live vLLM 0.32.0, {len(NAMES)} names wanted",
                (
                    "page",
                    "kB",
                    "samples",
                    "first, ms",
                    "then, ms",
                    "bound",
                    "kept",
                    "longest feed, ms",
                    "full parse, ms",
                    "times slower",
                ),
                live,
            ),
            Table(
                "Hostile pages of up to 8 MiB",
                ("page", "kB", "samples", "whole, ms", "longest feed, ms", "ns per byte"),
                hostile,
            ),
        ],
        figures,
    )


if __name__ == "__main__":
    main(measure, __doc__)
