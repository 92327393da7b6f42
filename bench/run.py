"""Runs all measurements and writes their figures into docs/benchmarks.md.

    python bench/run.py [--quick] [NAME...]

With --quick, or with the names of some scripts only, nothing is written. The exit code is 1 when a script broke. A
bound that is not kept is said at the end and in the document, and is no error: the machine may have been busy.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import machine
from report import Report, Table

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- figures: written by bench/run.py -->"
END = "<!-- end of figures -->"
NAMES = ("page", "step", "startup", "cpu", "memory", "healthz", "detect", "guard_probe")


@dataclass(frozen=True)
class Result:
    """One script's report, None when it broke."""

    name: str
    report: Report | None

    @property
    def command(self) -> str:
        """What anybody types to get the same figures."""
        return f"python bench/{self.name}.py"


def run(name: str, *, quick: bool) -> Result:
    """Runs one script in an interpreter of its own."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command = [sys.executable, str(ROOT / "bench" / f"{name}.py"), "--json", str(file)]
        done = subprocess.run([*command, *(["--quick"] if quick else [])], cwd=ROOT, check=False)
        return Result(name, Report.from_json(file.read_text()) if done.returncode == 0 else None)


def figures(results: list[Result]) -> Table:
    """Every figure that has a bound."""
    rows = [
        (
            figure.what,
            figure.measured,
            f"{figure.bound:g} {figure.unit}",
            "yes" if figure.held else "**no**",
            f"`{result.command}`",
        )
        for result in results
        if result.report is not None
        for figure in result.report.figures
    ]
    return Table("", ("what", "measured", "at most", "kept", "command"), rows)


def block(about: list[tuple[str, str]], results: list[Result]) -> str:
    """What stands between the markers."""
    parts = [
        "## The machine\n",
        "\n".join(f"- {name}: {value}" for name, value in about),
        "\n## Against the bounds\n",
        figures(results).markdown(),
    ]
    for result in results:
        if result.report is None:
            continue
        parts.append(f"\n## {result.name}\n\n`{result.command}`")
        for table in result.report.tables:
            parts.append(f"\n{table.title}:\n\n{table.markdown()}")
        parts += [f"\n{note}" for note in result.report.notes]
    return "\n".join(parts)


def written(document: str, new: str, mark: str = BEGIN, end_mark: str = END) -> str:
    """The document with another block of figures between two marks.

    Raises:
        ValueError: it has no markers.
    """
    before, begin, rest = document.partition(mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        raise ValueError(f"there is no {mark!r} ... {end_mark!r} to write the figures between")
    return f"{before}{begin}\n\n{new}\n\n{end}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds each; the figures mean little")
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"some of {', '.join(NAMES)}; all of them if none")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(NAMES)}")
    about = machine.description()
    for name, value in about:
        print(f"{name}: {value}")
    results: list[Result] = []
    for name in options.names or NAMES:
        print(f"\n== python bench/{name}.py{' --quick' if options.quick else ''}\n", flush=True)
        results.append(run(name, quick=options.quick))
    broken = [result.name for result in results if result.report is None]
    reports = [result.report for result in results if result.report is not None]
    missed = [figure for report in reports for figure in report.figures if not figure.held]
    print("\n== summary\n")
    for figure in missed:
        print(f"not kept: {figure.what}: {figure.measured}, at most {figure.bound:g} {figure.unit}")
    if not missed and not broken:
        print("every bound is kept")
    if broken:
        print(f"broken: {', '.join(broken)}")
        return 1
    if not options.quick and not options.names:
        DOCUMENT.write_text(written(DOCUMENT.read_text(), block(about, results)))
        print(f"written: {DOCUMENT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
