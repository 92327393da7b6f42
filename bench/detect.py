"""Time from a frozen engine rank (SIGSTOP) to 503, and from its thaw (SIGCONT) to 200, on a simulated vLLM.

    python bench/detect.py [--quick]

At the fast setting (poll 1, stall 5, canary timeout 2; bound 9 s) and at the one that operators have (poll 5, stall 30,
canary timeout 5; bound 36 s), under load and idle. The freeze comes at several moments between two polls, because where
in that time it falls decides how long it takes; each of them has an engine and a sidecar of its own, all at the same
time. Idle, the clock began with the last canary, up to a poll before the freeze. Recovery has two polls. /healthz is
asked a hundred times a second.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from enginewatch.lab.sim.process import SimProcess
from report import Figure, Report, Table, main, verdict
from watcher import Watcher


@dataclass(frozen=True)
class Setting:
    """Thresholds, and the bounds that follow from them."""

    name: str
    poll_sec: float
    stall_sec: float
    canary_sec: float
    bound_sec: float
    phases: int

    @property
    def recovery_bound_sec(self) -> float:
        """Two polls."""
        return 2 * self.poll_sec


FAST = Setting("poll 1, stall 5, canary 2", 1, 5, 2, 9, 6)
USUAL = Setting("poll 5, stall 30, canary 5", 5, 30, 5, 36, 6)
QUICK = Setting("poll 0.5, stall 2, canary 1", 0.5, 2, 1, 4.5, 1)


@dataclass
class Freeze:
    """What one freeze showed, in seconds."""

    detect_sec: float = 0.0
    recover_sec: float = 0.0
    error: Exception | None = None


def one_freeze(setting: Setting, *, load: bool, phase: float) -> Freeze:
    """Freezes one engine at a moment between two polls, thaws it when that was seen."""
    with (
        SimProcess("vllm", step_ms=100) as engine,
        Watcher(
            engine.url,
            {
                "poll_interval_sec": setting.poll_sec,
                "stall_sec": setting.stall_sec,
                "active_probe_timeout_sec": setting.canary_sec,
                "warmup_sec": 0,
            },
        ) as watcher,
    ):
        if load:
            engine.load(2)
        steady = "growing" if load else "stall-active-ok"
        watcher.wait(lambda: watcher.state() == steady, 6 * setting.poll_sec + 10, steady)
        seen = watcher.metric("enginewatch_scrapes_total")
        watcher.wait(
            lambda: watcher.metric("enginewatch_scrapes_total") > seen, 2 * setting.poll_sec + 5, "another poll"
        )
        time.sleep(phase * setting.poll_sec)
        engine.stop()
        detect_sec = watcher.wait(lambda: watcher.health()[0] == 503, setting.bound_sec * 2, "503")
        engine.cont()
        recover_sec = watcher.wait(lambda: watcher.health()[0] == 200, setting.recovery_bound_sec * 5, "200")
    return Freeze(detect_sec, recover_sec)


def freezes(setting: Setting, *, load: bool, phases: int) -> list[Freeze]:
    """One freeze per phase, all at once."""
    found = [Freeze() for _ in range(phases)]

    def work(number: int) -> None:
        try:
            found[number] = one_freeze(setting, load=load, phase=number / phases)
        except Exception as error:
            found[number].error = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(phases)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for freeze in found:
        if freeze.error is not None:
            raise freeze.error
    return found


def measure(quick: bool) -> Report:
    rows: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    for setting in (QUICK,) if quick else (FAST, USUAL):
        for load in (True,) if quick else (True, False):
            found = freezes(setting, load=load, phases=setting.phases)
            detect = [freeze.detect_sec for freeze in found]
            recover = [freeze.recover_sec for freeze in found]
            where = f"{setting.name}, {'under load' if load else 'idle'}"
            rows.append(
                (
                    where,
                    str(len(found)),
                    f"{min(detect):.1f}",
                    f"{sum(detect) / len(detect):.1f}",
                    f"{max(detect):.1f}",
                    f"{setting.bound_sec:g}",
                    verdict(max(detect), setting.bound_sec),
                    f"{max(recover):.2f}",
                    f"{setting.recovery_bound_sec:g}",
                    verdict(max(recover), setting.recovery_bound_sec),
                )
            )
            figures.append(Figure(f"SIGSTOP to 503, {where}, latest", max(detect), setting.bound_sec, "s"))
            figures.append(Figure(f"SIGCONT to 200, {where}, latest", max(recover), setting.recovery_bound_sec, "s"))
    columns = ("setting", "freezes", "503, first", "mean", "latest", "bound", "kept", "200, latest", "bound", "kept")
    return Report([Table("A frozen engine rank, seconds", columns, rows)], figures)


if __name__ == "__main__":
    main(measure, __doc__)
