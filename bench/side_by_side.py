"""Any other watcher program and ours, on the same engine in the same run.

    python bench/side_by_side.py [--other 'NAME=COMMAND ARGUMENTS']... [--rounds N] [--only NAME,...]

The other program takes ENGINE_URL, LISTEN and CONFIG_FILE from its environment and answers GET /healthz with 200 or
503. All get the same configuration, and watch the same engine at the same time: the real vLLM that tests/real installs,
or a simulated one with --engine sim. Compare what stands in one table; figures of two runs are of two machines.

Two programs of bench/rivals run along as controls: one that asks the engine's own /health, which cannot see these
hangs, and one that adds up what all cores say. Where a control sees what it cannot see, or misses what it cannot miss,
the run proves nothing; it says so and ends with 1, as it does when a scenario broke. It ends with 2 when a program or
the engine cannot be had. A bound that is not kept is no error: the machine may have been busy.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import machine
import run
from beside import sample as names
from beside import scenarios, told
from beside.engines import NoEngineError, RealEngines, SimulatedEngines
from beside.program import OUR_PROGRAM, START_SEC, Program, ProgramError, Running, other
from beside.sample import Sample
from beside.setting import FULL, QUICK, Setting
from engine_server import EngineServer
from report import Figure, Report, Table

BEGIN = "<!-- side by side: written by bench/side_by_side.py -->"
END = "<!-- end of side by side -->"
RIVALS = Path(__file__).resolve().parent / "rivals"


def controls(setting: Setting) -> list[Program]:
    """Our own two rivals. The kubelet's period is 10 s, two polls of the usual setting."""
    return [
        Program(
            told.HEALTH_ENDPOINT,
            (sys.executable, str(RIVALS / "health_endpoint.py"), "--period", f"{2 * setting.poll_sec:g}"),
        ),
        Program(told.SUMMING, (sys.executable, str(RIVALS / "summing_watcher.py"))),
    ]


def try_out(programs: Sequence[Program], setting: Setting, start_sec: float) -> None:
    """Starts each once on a served page, before anything that takes minutes.

    Raises:
        ProgramError: one of them cannot be used.
    """
    twice = {program.name for program in programs if sum(other.name == program.name for other in programs) > 1}
    if twice:
        raise ProgramError(f"two programs are called {min(twice)}; name them apart: --other NAME=COMMAND")
    with EngineServer() as engine:
        for program in programs:
            with Running(program, engine.url, setting.config("measured"), start_sec=start_sec):
                pass


@dataclass
class Played:
    """Samples by scenario, and a sentence for each that broke."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def all(self) -> list[Sample]:
        """In the usual order."""
        return [sample for name in names.SCENARIOS for sample in self.samples.get(name, [])]


def play(stage: scenarios.Stage, wanted: Sequence[str], *, at_once: bool, so_far: Callable[[Played], object]) -> Played:
    """Plays them in their order; `at_once` where each has an engine of its own and figures matter less than time."""
    found = Played()

    def one(name: str) -> None:
        try:
            found.samples[name] = scenarios.RUN[name](stage)
        except Exception as error:
            # Half an hour of other scenarios is not to be lost with it.
            found.broken.append(f"{name} broke: {type(error).__name__}: {error}")
            stage.say(found.broken[-1])

    # Two of them only wait, on engines of their own: together they take half the time.
    waiting = [name for name in wanted if name in (names.LOSES_A_SERIES, names.UNAUTHORIZED)]
    groups = [list(wanted)] if at_once else [[name] for name in wanted if name not in waiting] + [waiting]
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        for group in groups:
            if not at_once and set(group) <= set(names.SERVED):
                stage.engines.close()  # an idle engine takes CPU time as well
            list(pool.map(one, group))
            so_far(found)
    return found


@dataclass(frozen=True)
class Comparison:
    """Everything that was found, and what it was found with."""

    command: str
    setting: Setting
    engine: str
    programs: Sequence[Program]
    about: list[tuple[str, str]]
    samples: list[Sample]
    unplayed: list[str]

    def report(self) -> Report:
        """For people."""
        notes = [f"THE CONTROL FAILED, these figures prove nothing: {text}" for text in self.broken]
        notes += self.unplayed
        notes += told.timelines(self.samples) + told.unanswered(self.samples)
        early = [sample for sample in self.samples if sample.early]
        notes += [
            f"{sample.scenario}, round {sample.round + 1}: {sample.program} said 503 before anything was done"
            for sample in early
        ]
        return Report(told.tables(self.samples, self.engine), told.figures(self.samples, self.setting), notes)

    @property
    def broken(self) -> list[str]:
        """What the controls did wrong."""
        return told.broken_controls(self.samples)

    def limits(self) -> str:
        """What `never` means."""
        setting = self.setting
        return (
            f"`never` is: not within {setting.freeze_limit_sec:g} s of the freeze of the only core, not within "
            f"{setting.blind_limit_sec:g} s where one core of two or a page stands still, and no 503 within "
            f"{setting.blind_limit_sec:g} s of 401s."
        )

    def markdown(self) -> str:
        """What stands between the markers of the document."""
        report = self.report()
        parts = [
            "### With what\n",
            "\n".join(
                f"- {name}: {value}"
                for name, value in (
                    ("Command", f"`{self.command}`"),
                    ("Setting of all programs", self.setting.name),
                    ("Engine", self.engine),
                    *self.about,
                )
            ),
            "",
            Table("", ("program", "command"), [(each.name, f"`{_short(each)}`") for each in self.programs]).markdown(),
            f"\n{self.limits()}",
        ]
        for table in report.tables:
            parts.append(f"\n{table.title}:\n\n{table.markdown()}")
        parts += ["\n### Ours against its bounds\n", _bounds(report.figures).markdown()]
        parts += [f"\n{note}" for note in report.notes]
        return "\n".join(parts)

    def to_json(self) -> str:
        """Everything."""
        report = self.report()
        return json.dumps(
            {
                "command": self.command,
                "setting": asdict(self.setting),
                "engine": self.engine,
                "programs": [asdict(program) for program in self.programs],
                "machine": dict(self.about),
                "samples": [asdict(sample) for sample in self.samples],
                "broken_controls": self.broken,
                **asdict(report),
            },
            indent=1,
            # What never happened has no number: `Figure` has an infinite one.
            default=str,
        ).replace("Infinity", "null")


def _short(program: Program) -> str:
    """The command without this machine's directories."""
    words = [word.replace(f"{run.ROOT}/", "") for word in program.command]
    return shlex.join(["python", *words[1:]] if program.command[0] == sys.executable else words)


def _bounds(figures: Sequence[Figure]) -> Table:
    rows = [
        (figure.what, figure.measured, f"{figure.bound:g} {figure.unit}", "yes" if figure.held else "**no**")
        for figure in figures
    ]
    return Table("", ("what", "measured", "at most", "kept"), rows)


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    shorts = {short: name for name, short in names.SHORT.items()}
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--other",
        metavar="[NAME=]CMD",
        action="append",
        default=[],
        help="a program to compare with; may be given more than once",
    )
    parser.add_argument("--no-controls", action="store_true", help="without the two programs of bench/rivals")
    parser.add_argument(
        "--engine", choices=("vllm", "sim"), default="vllm", help="the real one (the default) or simulated"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each scenario (3)")
    parser.add_argument("--quick", action="store_true", help="short thresholds and windows; the figures mean little")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(shorts)}")
    parser.add_argument("--start-sec", type=float, default=START_SEC, help="for a program's first answer (%(default)g)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything there")
    parser.add_argument("--write", action="store_true", help="write the section of docs/benchmarks.md")
    found = parser.parse_args(arguments)
    chosen = found.only.split(",") if found.only else list(shorts)
    if unknown := [name for name in chosen if name not in shorts]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(shorts)}")
    if found.rounds < 1:
        parser.error(f"--rounds is {found.rounds}, expected at least 1")
    if found.write and (found.quick or found.only or found.no_controls or found.engine != "vllm"):
        parser.error("--write wants the whole comparison, on vllm: no --quick, --only, --no-controls, --engine sim")
    found.scenarios = [name for name in names.SCENARIOS if names.SHORT[name] in chosen]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    setting = QUICK if chosen.quick else FULL
    about = machine.description()
    try:
        others = [other(text) for text in chosen.other]
        programs = [OUR_PROGRAM, *others, *([] if chosen.no_controls else controls(setting))]
        try_out(programs, setting, chosen.start_sec)
        engines = RealEngines() if chosen.engine == "vllm" else SimulatedEngines()
    except (ProgramError, NoEngineError) as error:
        print(error, file=sys.stderr)
        return 2
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    words = [shlex.quote(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    command = " ".join(["python bench/side_by_side.py", *words])

    def compared(played: Played) -> Comparison:
        found = Comparison(command, setting, engines.name, programs, about, played.all(), played.broken)
        if chosen.json is not None:
            chosen.json.write_text(found.to_json())
        return found

    stage = scenarios.Stage(setting, programs, engines, chosen.rounds, say)
    at_once = chosen.quick and not engines.shared
    try:
        # Written again after each scenario: somebody may have waited for half an hour when it is interrupted.
        found = compared(play(stage, chosen.scenarios, at_once=at_once, so_far=compared))
    finally:
        engines.close()
    print(f"All at {setting.name}; {engines.name}. {found.limits()}\n\n{found.report().text()}", flush=True)
    if found.broken or found.unplayed:
        return 1
    if chosen.write:
        run.DOCUMENT.write_text(run.written(run.DOCUMENT.read_text(), found.markdown(), BEGIN, END))
        print(f"written: {run.DOCUMENT.relative_to(run.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
