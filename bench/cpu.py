"""The sidecar's share of one core at poll 5 s, on a real page of a live vLLM.

    python bench/cpu.py [--quick]

The page comes from a small server in another process. Twice: with one token more on every page (an engine at work: no
canary is sent), and with nothing that moves (an idle engine: every poll sends one, which costs a second exchange). Both
sidecars run at the same time, unasked but for a kubelet's /healthz every 10 s. Bound: 0.1 % of one core.
"""

from __future__ import annotations

import contextlib
import time

from engine_server import EngineServer
from pages import real_page
from report import Figure, Report, Table, main, verdict
from watcher import Watcher

BOUND_PERCENT = 0.1
POLL_SEC = 5
KUBELET_SEC = 10
KINDS = (("moving", "at work: counters move, no canary"), ("real", "idle: nothing moves, a canary with every poll"))


def measure(quick: bool) -> Report:
    window = 5 if quick else 120
    rows: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    with contextlib.ExitStack() as stack:
        watchers: list[Watcher] = []
        for kind, _ in KINDS:
            engine = stack.enter_context(EngineServer())
            engine.serve(kind)
            watchers.append(stack.enter_context(Watcher(engine.url, {"warmup_sec": 0})))
        # The start is not part of it: warm-up of the process, first page, first canary.
        time.sleep(1 if quick else 2 * POLL_SEC + 1)
        before = [(watcher.cpu_sec(), time.perf_counter()) for watcher in watchers]
        left = window
        while left > 0:
            time.sleep(min(left, KUBELET_SEC))
            left -= KUBELET_SEC
            if left > 0:
                for watcher in watchers:
                    watcher.health()
        after = [(watcher.cpu_sec(), time.perf_counter()) for watcher in watchers]
        for (_, name), watcher, (cpu, at), (cpu_then, at_then) in zip(KINDS, watchers, before, after, strict=True):
            used, passed = cpu_then - cpu, at_then - at
            percent = 100 * used / passed
            canaries = watcher.metric("enginewatch_canaries_total")
            rows.append(
                (
                    name,
                    f"{passed:.0f}",
                    f"{used * 1000:.0f}",
                    f"{used * 1000 * POLL_SEC / passed:.1f}",
                    f"{percent:.3f}",
                    str(BOUND_PERCENT),
                    verdict(percent, BOUND_PERCENT),
                    f"{canaries:.0f}",
                )
            )
            figures.append(Figure(f"sidecar CPU, engine {name.partition(':')[0]}", percent, BOUND_PERCENT, "%"))
    return Report(
        [
            Table(
                f"CPU time of the sidecar at poll {POLL_SEC} s, page of {len(real_page()) / 1000:.0f} kB",
                ("engine", "seconds", "CPU ms", "CPU ms per poll", "% of a core", "bound", "kept", "canaries sent"),
                rows,
            )
        ],
        figures,
    )


if __name__ == "__main__":
    main(measure, __doc__)
