"""What a measurement hands back: tables for people, and the figures that stand against a bound.

Every script that measures has a `measure(quick)` and these options: `--quick` for a look (seconds; the figures mean
little), `--json FILE` for run.py.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """Rows of text. The first column is what was measured, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def text(self) -> str:
        """As plain text."""
        widths = [max(len(row[at]) for row in (self.columns, *self.rows)) for at in range(len(self.columns))]

        def line(cells: Sequence[str]) -> str:
            others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
            return "  ".join((cells[0].ljust(widths[0]), *others)).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join((self.title, "", line(self.columns), rule, *(line(row) for row in self.rows)))

    def markdown(self) -> str:
        """As a Markdown table, without its title."""
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(frozen=True)
class Figure:
    """One figure against its bound. Both in `unit`; at most `bound` is as it should be."""

    what: str
    value: float
    bound: float
    unit: str

    @property
    def held(self) -> bool:
        """Whether the bound is kept."""
        return self.value <= self.bound

    @property
    def measured(self) -> str:
        """The value as people read it."""
        if math.isinf(self.value):
            return "never"
        return f"{self.value:.3g} {self.unit}" if self.value < 100 else f"{self.value:.0f} {self.unit}"


def verdict(value: float, bound: float) -> str:
    """The cell that says whether a bound is kept."""
    return "yes" if value <= bound else "NO"


@dataclass
class Report:
    """Everything one script has to say."""

    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """As plain text."""
        figures = Table(
            "Against the bounds",
            ("what", "measured", "bound", "kept"),
            [(f.what, f.measured, f"{f.bound:g} {f.unit}", "yes" if f.held else "NO") for f in self.figures],
        )
        parts = [table.text() for table in self.tables]
        if self.figures:
            parts.append(figures.text())
        return "\n\n".join((*parts, *self.notes))

    def to_json(self) -> str:
        """For run.py."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """What `to_json` wrote."""
        plain = json.loads(text)
        return cls(
            [
                Table(table["title"], tuple(table["columns"]), [tuple(row) for row in table["rows"]])
                for table in plain["tables"]
            ],
            [Figure(**figure) for figure in plain["figures"]],
            plain["notes"],
        )


def main(measure: Callable[[bool], Report], doc: str | None) -> None:
    """Runs one script: measures, prints."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds; the figures mean little")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    report = measure(options.quick)
    if options.json is not None:
        options.json.write_text(report.to_json())
    print(report.text())
    sys.stdout.flush()
