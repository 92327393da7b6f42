"""How long a metrics page takes to read, next to a full parse by prometheus_client in the same run.

    python bench/page.py

Bounds: 1 ms for one core's page, 10 ms for 64 cores in one page, time that grows with the size. Times are the best of
several rounds, in CPU time of the thread, so that what else runs on the machine stays out of them. `longest feed` is
how long the event loop waits for one piece of 64 KiB.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from enginewatch.core.exposition import NotMetrics, PageReader, SeriesCache
from enginewatch.engines import sglang, vllm

DATA = Path(__file__).parents[1] / "tests" / "data"
NAMES = vllm.PROFILE.names() | sglang.PROFILE.names()  # what is asked before the engine is known: the worst case
PIECE_BYTES = 64 * 1024
HOSTILE_BYTES = 8 * 1024 * 1024


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


def page_of(cores: int) -> bytes:
    """A live vLLM page on which each series of the one core stands `cores` times."""
    page = (DATA / "vllm-0.32.0-single-hung-while-decoding.prom").read_bytes()

    def lines() -> Iterator[bytes]:
        for line in page.splitlines(keepends=True):
            if b'engine="0"' in line:
                for core in range(cores):
                    yield line.replace(b'engine="0"', b'engine="%d"' % core)
            else:
                yield line

    return b"".join(lines())


def hostile_pages() -> dict[str, bytes]:
    def filled(line: bytes) -> bytes:
        head = b"# HELP x x\n"
        return head + line * ((HOSTILE_BYTES - len(head)) // len(line))

    wanted = b"vllm:num_requests_running"
    return {
        "one giant line, wanted name": b"# HELP x x\n" + wanted + b'{a="' + b"x" * (HOSTILE_BYTES - 64),
        "one giant line": b"#" + b"x" * (HOSTILE_BYTES - 64),
        "newlines only": filled(b"\n"),
        "2 million lines": filled(b"a 1\n"),
        "4 million lines": filled(b"#\n"),
        "lines that nearly match": filled(b"vllm:num_requests_runnin 1\n"),
        "wanted lines, torn": filled(wanted + b'{a="b 1\n'),
        "wanted lines, NaN": filled(wanted + b'{a="b"} NaN\n'),
        "one wanted line over and over": filled(wanted + b'{a="b"} 1\n'),
        "new series for ever": b"# HELP x x\n"
        + b"".join(wanted + b'{b="%d",a="x"} 1\n' % number for number in range(HOSTILE_BYTES // 45)),
        "lines of a thousand labels": b"# HELP x x\n"
        + b"".join(
            wanted + b'{n="%d",' % number + b",".join(b'l%x=""' % label for label in range(1500)) + b"} 1\n"
            for number in range(32)
        ),
    }


def main() -> None:
    console = Console(width=118)
    console.print(f"Python {platform.python_version()}, {platform.machine()}, {len(NAMES)} names wanted")
    table = Table(title="Pages of a live vLLM 0.32.0")
    for column in (
        "page",
        "kB",
        "samples",
        "first, ms",
        "then, ms",
        "longest feed, ms",
        "full parse, ms",
        "ratio",
        "bound, ms",
    ):
        table.add_column(column, justify="left" if column == "page" else "right")
    for cores, bound in ((1, 1), (8, None), (64, 10)):
        page = page_of(cores)
        first = best_of(5, lambda page=page: read(page, SeriesCache()))  # type: ignore[misc]
        cache = SeriesCache()
        read(page, cache)
        then = best_of(20, lambda page=page, cache=cache: read(page, cache))  # type: ignore[misc]
        parse = full_parse(page, 5 if cores < 64 else 1)
        table.add_row(
            f"{cores} core{'s' if cores > 1 else ''}",
            f"{len(page) / 1000:.0f}",
            str(then.samples),
            f"{first.seconds * 1e3:.2f}",
            f"{then.seconds * 1e3:.2f}",
            f"{then.longest_feed * 1e3:.2f}",
            f"{parse * 1e3:.0f}",
            f"{parse / then.seconds:.0f}",
            str(bound or ""),
        )
    console.print(table)

    table = Table(title="Hostile pages of up to 8 MiB")
    for column in ("page", "kB", "samples", "whole, ms", "longest feed, ms", "ns per byte"):
        table.add_column(column, justify="left" if column == "page" else "right")
    for name, page in hostile_pages().items():
        reading = best_of(3, lambda page=page: read(page, SeriesCache()))  # type: ignore[misc]
        table.add_row(
            name,
            f"{len(page) / 1000:.0f}",
            "not metrics" if reading.samples is None else str(reading.samples),
            f"{reading.seconds * 1e3:.1f}",
            f"{reading.longest_feed * 1e3:.2f}",
            f"{reading.seconds / len(page) * 1e9:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
