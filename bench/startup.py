"""Time from starting `python -m enginewatch watch` to the first answer of its /healthz.

    python bench/startup.py [--quick]

Ten runs; the engine does not exist, which is how a pod begins. In turn with each run a bare interpreter is started:
what of the time is Python's own. Bound: 0.8 s, the median.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from report import Figure, Report, Table, main, verdict
from watcher import Watcher, free_port

BOUND_SEC = 0.8


def bare_interpreter() -> float:
    """Seconds until an interpreter that does nothing has ended."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - began


def sidecar() -> float:
    """Seconds until the sidecar's first answer."""
    with Watcher(f"http://127.0.0.1:{free_port()}") as watcher:
        return watcher.started_sec


def measure(quick: bool) -> Report:
    sidecar()  # compiles what has changed since the last time
    pairs = [(bare_interpreter(), sidecar()) for _ in range(3 if quick else 10)]
    bare = [pair[0] for pair in pairs]
    ours = [pair[1] for pair in pairs]
    median = statistics.median(ours)

    def row(name: str, seconds: list[float], bound: str, kept: str) -> tuple[str, ...]:
        return (name, *(f"{f(seconds) * 1000:.0f}" for f in (min, statistics.median, max)), bound, kept)

    return Report(
        [
            Table(
                f"Start to first answer, {len(pairs)} runs, ms",
                ("", "fastest", "median", "slowest", "bound", "kept"),
                [
                    row("sidecar, first /healthz answer", ours, f"{BOUND_SEC * 1000:.0f}", verdict(median, BOUND_SEC)),
                    row("bare interpreter, start to end", bare, "", ""),
                    ("ratio of the medians", "", f"{median / statistics.median(bare):.1f}", "", "", ""),
                ],
            )
        ],
        [Figure("start to first /healthz answer, median", median, BOUND_SEC, "s")],
    )


if __name__ == "__main__":
    main(measure, __doc__)
