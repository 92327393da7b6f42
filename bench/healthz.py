"""How long /healthz takes at 200 requests a second, in peace and while hostile pages are read.

    python bench/healthz.py [--quick]

One kept connection from a process of its own. Pages of 8 MiB are scraped without a pause, one after the other. Pages
that stay below what may be kept and are new each time cost the judgement one step of up to 20 ms, which nothing
interrupts; they come at the usual poll of 5 s. The control is a server that does nothing but answer a constant, asked
in the same run: what the machine and the load generator cost. Bound: p99 5 ms.
"""

from __future__ import annotations

import contextlib

import hostile_clients as clients
import probe_load
from engine_server import EngineServer
from report import Figure, Report, Table, main, verdict
from watcher import Watcher

BOUND_MS = 5
PER_SEC = 200
BACK_TO_BACK_SEC = 0.01
USUAL_SEC = 5.0
LONG_PER_SEC = 10
IN_PEACE = (("in peace, poll 5 s", "moving", USUAL_SEC), ("in peace, poll 1 s, 64 cores idle", "cores-64", 1.0))
HOSTILE = (
    "2 million lines",
    "4 million lines",
    "lines that nearly match",
    "wanted lines, torn",
    "wanted lines, NaN",
    "one wanted line over and over",
    "new series for ever",
    "one giant line, wanted name",
    "gzip bomb",
)
JUST_KEPT = (
    "as many new series as may be kept",
    "as many new cores as may be kept",
    "as many cores as may be kept",
)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that so large a share is at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(quick: bool) -> Report:
    seconds = 1 if quick else 15
    rows: list[tuple[str, ...]] = []
    peace = hostile = 0.0
    worst = ""

    def add(name: str, took: list[float], scrapes: int | None) -> float:
        p99 = percentile(took, 0.99)
        bounded = scrapes is not None
        rows.append(
            (
                name,
                f"{percentile(took, 0.5):.2f}",
                f"{p99:.2f}",
                f"{max(took):.1f}",
                str(BOUND_MS) if bounded else "",
                verdict(p99, BOUND_MS) if bounded else "",
                str(scrapes) if scrapes is not None else "",
            )
        )
        return p99

    with EngineServer() as engine:
        add("control: a constant", probe_load.result(probe_load.start(engine.port, "/healthz", PER_SEC, seconds)), None)
        for name, kind, poll_sec in IN_PEACE:
            took, scrapes = asked_while(engine, kind, poll_sec, seconds)
            peace = max(peace, add(name, took, scrapes))
        pages = [(kind, BACK_TO_BACK_SEC) for kind in HOSTILE] + [(kind, USUAL_SEC) for kind in JUST_KEPT]
        for kind, poll_sec in pages[:2] if quick else pages:
            took, scrapes = asked_while(engine, kind, poll_sec, seconds)
            p99 = add(f"page: {kind}", took, scrapes)
            if p99 > hostile:
                hostile, worst = p99, kind
        took, scrapes = asked_while(engine, "cores-64", 1.0, seconds, readers=True)
        crowd = add(f"64 cores, /verdict and /metrics read {LONG_PER_SEC} times a second", took, scrapes)
    return Report(
        [
            Table(
                f"/healthz at {PER_SEC} requests a second, {seconds} s each, ms",
                ("while", "p50", "p99", "longest", "bound", "kept", "scrapes"),
                rows,
            )
        ],
        [
            Figure("/healthz p99, in peace", peace, BOUND_MS, "ms"),
            Figure(f"/healthz p99, worst hostile page ({worst})", hostile, BOUND_MS, "ms"),
            Figure("/healthz p99, while long answers are read", crowd, BOUND_MS, "ms"),
        ],
    )


def asked_while(
    engine: EngineServer, kind: str, poll_sec: float, seconds: float, *, readers: bool = False
) -> tuple[list[float], int]:
    """Milliseconds of each answer while that page is read at that pace, and how many scrapes there were."""
    engine.serve("real")
    with contextlib.ExitStack() as stack:
        watcher = stack.enter_context(Watcher(engine.url, {"poll_interval_sec": poll_sec, "warmup_sec": 0}))
        watcher.wait(lambda: watcher.polls() >= 1, 10, "a page read")
        engine.serve(kind)
        if readers:
            for path in ("/verdict", "/metrics"):
                stack.enter_context(clients.beside(clients.readers(watcher.url, path, LONG_PER_SEC)))
        before = watcher.polls()
        took = probe_load.result(probe_load.start(watcher.port, "/healthz", PER_SEC, seconds))
        return took, watcher.polls() - before


if __name__ == "__main__":
    main(measure, __doc__)
