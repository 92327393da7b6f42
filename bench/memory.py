"""How much memory the sidecar takes: after an hour's polls on a simulated vLLM, and at most under hostile input.

    python bench/memory.py [--quick]

An hour at poll 5 s is 720 polls; here they come every 0.1 s, with the questions that a kubelet and a Prometheus ask in
an hour, half of them while the engine works and half while it idles and every poll sends a canary. Each hostile input
meets a new sidecar that has read good pages before. Bounds: 50 MiB resident after the hour; 60 MiB at the highest,
whatever comes. Where this machine lets us, the sidecar runs in a memory cgroup of 64 MiB, and the table says how often
that limit was hit; the code of the interpreter and its libraries, 14 MiB, may be charged to others there.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hostile_clients as clients
from engine_server import EngineServer
from enginewatch.lab.sim.process import SimProcess
from memory_cgroup import memory_cgroup
from pages import hostile_pages
from report import Figure, Report, Table, main, verdict
from watcher import MIB, Watcher

AFTER_AN_HOUR_MIB = 50
AT_MOST_MIB = 60
LIMIT_MIB = 64
POLLS = 720
POLL_SEC = 0.1
LINE = b"INFO 10-14 02:07:21 [loggers.py:123] Engine 000: Avg generation throughput: 42.0 tokens/s, Running: 1 reqs\n"

Beside = Callable[[Watcher, Path], Callable[[threading.Event], None]]


@dataclass(frozen=True)
class Input:
    """One hostile input: what the engine serves, and what goes on beside it."""

    name: str
    page: str = "real"
    canary: str = "ok"
    beside: Beside | None = None
    logs: bool = False
    in_quick: bool = False


def inputs() -> list[Input]:
    found = [Input(f"page: {name}", page=name) for name in hostile_pages()]
    found += [
        Input("page: gzip bomb", page="gzip bomb", in_quick=True),
        Input("page: slow drip, 10 kB/s", page="slow drip"),
        Input("page: new series each time, as many as may be kept", page="as many new series as may be kept"),
        Input("page: new series of 4 kB each", page="new series of 4 kB each"),
        Input(
            "page: new series of 4 kB each, and no answer to canaries: a hang",
            page="new series of 4 kB each",
            canary="never",
        ),
        Input("page: new cores each time, as many as may be kept", page="as many new cores as may be kept"),
        Input("canary: an answer without end", page="idle", canary="endless"),
        Input("canary: no answer", page="idle", canary="never"),
        Input(
            "log: 1 MB of lines per poll",
            logs=True,
            beside=lambda _, log: clients.log_writer(log, 1_000_000, LINE),
        ),
        Input(
            "log: 1 MB per poll of one line", logs=True, beside=lambda _, log: clients.log_writer(log, 1_000_000, b"x")
        ),
        Input(
            "log: 4 MB of short lines per poll",
            logs=True,
            beside=lambda _, log: clients.log_writer(log, 4_000_000, b"\n"),
        ),
        Input(
            "clients: 64 cores, 200 that ask for /verdict and read nothing",
            page="cores-64",
            beside=lambda watcher, _: clients.GreedyReaders(watcher.port, 200, "/verdict"),
            in_quick=True,
        ),
        Input(
            "clients: as many cores as may be kept, 200 that ask for /verdict and read nothing",
            page="as many cores as may be kept",
            beside=lambda watcher, _: clients.GreedyReaders(watcher.port, 200, "/verdict"),
        ),
        Input(
            "clients: as many cores as may be kept, 200 that ask for /metrics and read nothing",
            page="as many cores as may be kept",
            beside=lambda watcher, _: clients.GreedyReaders(watcher.port, 200, "/metrics"),
        ),
        Input(
            "clients: 64 cores, 200 that ask for /metrics and read nothing",
            page="cores-64",
            beside=lambda watcher, _: clients.GreedyReaders(watcher.port, 200, "/metrics"),
        ),
        Input(
            "clients: 64 cores, 200 that ask for /history and read nothing",
            page="cores-64",
            beside=lambda watcher, _: clients.GreedyReaders(watcher.port, 200, "/history"),
        ),
        Input(
            "clients: 64 cores, /verdict again and again",
            page="cores-64",
            beside=lambda watcher, _: clients.readers(watcher.url, "/verdict"),
        ),
        Input(
            "clients: 200 slow ones on /healthz",
            beside=lambda watcher, _: clients.SlowClients(watcher.port, 200),
        ),
        Input(
            "clients: 200 that send bodies without end",
            beside=lambda watcher, _: clients.LargeSenders(watcher.port, 200),
        ),
        Input(
            "clients: 200 that send headers without end",
            beside=lambda watcher, _: clients.LongHeaders(watcher.port, 200),
        ),
        Input(
            "clients: 200 that send what is no HTTP",
            beside=lambda watcher, _: clients.Babblers(watcher.port, 200),
        ),
    ]
    return found


def after_an_hour(quick: bool) -> tuple[float, float, int]:
    """Resident set now and at its highest, in MiB, and polls made."""
    sec = POLL_SEC * POLLS / (40 if quick else 1)
    with (
        SimProcess("vllm", step_ms=50) as engine,
        Watcher(engine.url, {"poll_interval_sec": POLL_SEC, "warmup_sec": 0}) as watcher,
        clients.beside(clients.everyday_readers(watcher.url, per_sec=5)),
    ):
        engine.load(2)
        time.sleep(sec / 2)
        engine.load(0)
        time.sleep(sec / 2)
        polls = watcher.polls()
        now, highest = watcher.memory_mib()
    return now, highest, polls


def under(hostile: Input, engine: EngineServer, sec: float) -> tuple[float, float, int | None]:
    """Resident set now and at its highest, in MiB, and how often the cgroup's limit was hit (None: no cgroup)."""
    settings: dict[str, object] = {
        "poll_interval_sec": POLL_SEC,
        "metrics_timeout_sec": 2,
        "stall_sec": 3,
        "active_probe_timeout_sec": 1,
        "warmup_sec": 0,
    }
    with (
        memory_cgroup(LIMIT_MIB * MIB) as group,
        tempfile.TemporaryDirectory() as directory,
        contextlib.ExitStack() as stack,
    ):
        log = Path(directory) / "engine.log"
        log.touch()
        if hostile.logs:
            settings |= {"log_file": log, "log_hang_pattern": r"watchdog.*timeout|No available shared memory"}
        engine.serve("real")
        engine.canary("ok")
        watcher = stack.enter_context(Watcher(engine.url, settings, cgroup=group.path if group else None))
        watcher.wait(lambda: watcher.polls() >= 3, 10, "three pages read")
        engine.serve(hostile.page)
        engine.canary(hostile.canary)
        if hostile.beside is not None:
            stack.enter_context(clients.beside(hostile.beside(watcher, log)))
        time.sleep(sec)
        if not watcher.is_running():
            raise RuntimeError(f"the sidecar did not survive {hostile.name}")
        return *watcher.memory_mib(), group.hits() if group else None


def measure(quick: bool) -> Report:
    now, highest, polls = after_an_hour(quick)
    report = Report(
        [
            Table(
                "Resident set of the sidecar on a simulated vLLM",
                ("", "polls", "now, MiB", "bound", "highest, MiB", "bound", "kept"),
                [
                    (
                        f"an hour's polls at {POLL_SEC:g} s",
                        str(polls),
                        f"{now:.1f}",
                        str(AFTER_AN_HOUR_MIB),
                        f"{highest:.1f}",
                        str(AT_MOST_MIB),
                        verdict(max(now / AFTER_AN_HOUR_MIB, highest / AT_MOST_MIB), 1),
                    )
                ],
            )
        ],
        [Figure("sidecar memory after an hour's polls, resident", now, AFTER_AN_HOUR_MIB, "MiB")],
    )
    rows: list[tuple[str, ...]] = []
    worst, worst_name, all_hits = 0.0, "", 0
    measured_limit = True
    with EngineServer() as engine:
        for hostile in inputs():
            if quick and not hostile.in_quick:
                continue
            now, highest, hits = under(hostile, engine, 0.5 if quick else 10)
            if highest > worst:
                worst, worst_name = highest, hostile.name
            measured_limit = measured_limit and hits is not None
            all_hits += hits or 0
            rows.append(
                (
                    hostile.name,
                    f"{now:.1f}",
                    f"{highest:.1f}",
                    str(AT_MOST_MIB),
                    verdict(highest, AT_MOST_MIB),
                    "-" if hits is None else str(hits),
                )
            )
    report.tables.append(
        Table(
            f"Resident set under hostile input, {0.5 if quick else 10:g} s each",
            ("input", "at the end, MiB", "highest, MiB", "bound", "kept", f"hits of a {LIMIT_MIB} MiB limit"),
            rows,
        )
    )
    report.figures.append(Figure(f"sidecar memory at its highest ({worst_name})", worst, AT_MOST_MIB, "MiB"))
    if measured_limit:
        report.figures.append(Figure(f"hits of a {LIMIT_MIB} MiB cgroup limit, all inputs", all_hits, 0, "hits"))
    else:
        report.notes.append("No memory cgroup could be made here: the limit of 64 MiB was not set.")
    return report


if __name__ == "__main__":
    main(measure, __doc__)
