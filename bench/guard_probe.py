"""What one tick of `guard live` costs, from the start of the interpreter to its exit, and a bash + curl loop beside it.

    python bench/guard_probe.py [--quick]

The one-file guard runs as in a router's container, `python3 -I -S enginewatch-guard.pyz live`, with 8 and with 256
engines (32 with --quick) on loopback addresses, none of them replaced. The loops ask the same engines the same question
and compare the answers with the same snapshot, one after the other or all side by side; in turn with the guard, so that
all meet the same machine. Before that each is shown a snapshot of other processes, and must see it. Bound: 150 ms for 8
engines, the median.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginewatch.guard import pack
from enginewatch.guard.version import version
from guard_sidecars import ADDRESSES, ENGINE_ID, Sidecars
from report import Figure, Report, Table, main, verdict

BOUND_MS = 150
FEW, MANY, MANY_QUICK = 8, 256, 32
PYTHON = (sys.executable, "-I", "-S")
SAME_QUESTION = r"""
ask() {
  now=$(curl -s --max-time 4 "http://$1:$PORT/engine" | sed -n 's/.*"engine_id": *"\([^"]*\)".*/\1/p')
  if [ -n "$now" ] && [ "$now" != "$2" ]; then echo "drift: $1 is $now, was $2"; return 1; fi
}
"""
IN_TURN = """
while IFS='|' read -r ip _ _ id; do ask "$ip" "$id" || exit 1; done < <(cat "$GUARD_RUN_DIR"/*-ips)
"""
SIDE_BY_SIDE = """
while IFS='|' read -r ip _ _ id; do ask "$ip" "$id" & jobs+=($!); done < <(cat "$GUARD_RUN_DIR"/*-ips)
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""


@dataclass
class Contender:
    """A command that is timed, and what it took."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def run(self) -> int:
        """Runs it once; its exit code. The CPU time is that of the command and of all it waited for."""
        began = time.perf_counter()
        process = subprocess.Popen(self.command, env=self.environment, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        self.wall_ms.append((time.perf_counter() - began) * 1000)
        self.cpu_ms.append((used.ru_utime + used.ru_stime) * 1000)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode

    def row(self, ours: Contender, bound: bool) -> tuple[str, ...]:
        """Its line of the table."""
        wall, cpu = statistics.median(self.wall_ms), statistics.median(self.cpu_ms)
        return (
            self.name,
            f"{min(self.wall_ms):.0f}",
            f"{wall:.0f}",
            f"{max(self.wall_ms):.0f}",
            f"{cpu:.0f}",
            f"{wall / statistics.median(ours.wall_ms):.2f}",
            f"{cpu / statistics.median(ours.cpu_ms):.2f}",
            str(BOUND_MS) if bound else "",
            verdict(wall, BOUND_MS) if bound else "",
        )


def snapshots(run_dir: Path, engines: int, engine_id: str) -> None:
    """What `guard boot` writes."""
    for role, addresses in ADDRESSES.items():
        lines = sorted(f"{ip}|0|2026-10-14T01:52:10.48Z|{engine_id}\n" for ip in addresses[: engines // 2])
        (run_dir / f"{role}-ips").write_text("".join(lines))


def contenders(guard: Path, run_dir: Path, engines: int, port: int) -> list[Contender]:
    """The guard first."""
    environment = {"PATH": os.environ["PATH"], "GUARD_RUN_DIR": str(run_dir), "PORT": str(port)}
    for role, addresses in ADDRESSES.items():
        name = f"GUARD_{role.upper()}"
        environment[name] = ",".join(f"{address}:{port}" for address in addresses[: engines // 2])
        environment[f"{name}_WATCHER_PORT"] = str(port)
    found = [Contender("guard live", (*PYTHON, str(guard), "live"), environment)]
    if shutil.which("bash") and shutil.which("curl"):
        for name, loop in (("bash + curl, in turn", IN_TURN), ("bash + curl, side by side", SIDE_BY_SIDE)):
            found.append(Contender(name, ("bash", "-c", SAME_QUESTION + loop), environment))
    return found


def measure(quick: bool) -> Report:
    tables = []
    figures = []
    notes = [] if shutil.which("bash") and shutil.which("curl") else ["There is no bash or no curl here: no loop."]
    with tempfile.TemporaryDirectory() as directory, Sidecars() as sidecars:
        guard = Path(directory, pack.FILE_NAME)
        guard.write_bytes(pack.build(version()))
        for engines in (FEW, MANY_QUICK if quick else MANY):
            run_dir = Path(directory, str(engines))
            run_dir.mkdir()
            timed = contenders(guard, run_dir, engines, sidecars.port)
            for engine_id, expected in (("pst-1.00", 1), (ENGINE_ID, 0)):
                snapshots(run_dir, engines, engine_id)
                for contender in timed:
                    code = contender.run()
                    if code != expected:
                        raise RuntimeError(f"{contender.name} with {engines} engines: {code}, expected {expected}")
            bare = Contender("bare interpreter", (*PYTHON, "-c", "pass"), {})
            for contender in timed:
                contender.wall_ms.clear()
                contender.cpu_ms.clear()
            repeats = 2 if quick else 25 if engines == FEW else 5
            for _ in range(repeats):
                for contender in (*timed, bare):
                    contender.run()
            ours = timed[0]
            tables.append(
                Table(
                    f"One tick, {engines} engines, {repeats} runs, ms",
                    ("", "fastest", "median", "slowest", "CPU", "x wall", "x CPU", "bound", "kept"),
                    [one.row(ours, one is ours and engines == FEW) for one in (*timed, bare)],
                )
            )
            if engines == FEW:
                wall = statistics.median(ours.wall_ms)
                figures.append(Figure(f"guard live, {FEW} engines, whole process, median", wall, BOUND_MS, "ms"))
    notes.append("x: times what the guard took in the same run. CPU: of the whole process tree, the median.")
    return Report(tables, figures, notes)


if __name__ == "__main__":
    main(measure, __doc__)
