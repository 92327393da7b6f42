"""How the demo is shown: a live picture on a terminal, a line per step everywhere else, a table at the end."""

from __future__ import annotations

import asyncio
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from enginewatch.lab.demo_scene import Result, Step
from enginewatch.lab.demo_stage import Stage

_FRAME_SEC = 0.15
_ROWS = 3
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LABEL_CELLS = 20
_MIN_RATE = 40.0
"""Top of the scale at least: an idle engine's canaries must not look like a mountain."""

_COLOURS = {
    "200": "green",
    "503": "bold red",
    "no answer": "yellow",
    "refused": "bright_black",
    "": "bright_black",
}
_SLOW_SEC = 2.0
_GLYPHS = {"200": "■", "503": "█", "no answer": "?", "refused": "▁", "": " "}
"""Shapes besides colours: not everybody can tell red from green."""
_WORST_FIRST = ("503", "no answer", "refused", "200", "")


@dataclass
class Progress:
    """How far the story is.

    Attributes:
        steps: all of them.
        results: of those that are over.
        began_at: monotonic seconds at which the current step began.
        cell_sec: seconds that one cell of the time axis stands for.
    """

    engine_title: str
    steps: Sequence[Step]
    cell_sec: float = 0.5
    first_at: float = field(default_factory=time.monotonic)
    results: list[Result] = field(default_factory=list)
    began_at: float = field(default_factory=time.monotonic)

    @property
    def current(self) -> int | None:
        """Index of the step that is being played."""
        return len(self.results) if len(self.results) < len(self.steps) else None


class View(Protocol):
    """Where a story is shown."""

    def ended(self, number: int, result: Result) -> None:
        """A step is over; numbers start at 1."""

    def say(self, text: str) -> None:
        """Lines for people, below everything else."""

    def finish(self) -> None:
        """The story is over: show the whole of it."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def wants_picture() -> bool:
    """Whether somebody watches who likes colours: not in a pipe, not in CI, not with NO_COLOR."""
    environ = os.environ
    return sys.stdout.isatty() and not (
        environ.get("NO_COLOR") or environ.get("CI") or environ.get("TERM", "") in ("", "dumb", "unknown")
    )


class PlainView:
    """A line per step and a table, without control codes."""

    def __init__(self, stage: Stage, progress: Progress) -> None:
        self._progress = progress
        self._console = Console(
            force_terminal=False, no_color=True, highlight=False, width=_plain_width(), emoji=False, markup=False
        )
        self._print(
            f"enginewatch demo: simulated {progress.engine_title} at {stage.sim.url}, sidecar at {stage.sidecar_url}"
        )

    def ended(self, number: int, result: Result) -> None:
        """One line."""
        total = len(self._progress.steps)
        verdict = "ok" if result.passed else "FAILED"
        line = f"[{number}/{total}] {verdict}: {result.step.title} ({result.took_sec:.1f} s)"
        if not result.passed:
            line += f": expected {result.step.expected}; seen {result.seen}"
        self._print(line)

    def say(self, text: str) -> None:
        """As it is."""
        self._print(text)

    def finish(self) -> None:
        """The table."""
        self._console.print(results_table(self._progress, box.ASCII2, styled=False))
        self._print(conclusion(self._progress))

    def close(self) -> None:
        """Nothing to restore."""

    def _print(self, text: str) -> None:
        print(text, flush=True)


class LiveView:
    """The picture, drawn anew several times a second."""

    def __init__(self, console: Console, stage: Stage, progress: Progress) -> None:
        self._console = console
        self._stage = stage
        self._progress = progress
        self._spinner = Spinner("dots", style="cyan")
        self._said = ""
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()
        self._drawing = asyncio.create_task(self._draw_forever())

    def ended(self, number: int, result: Result) -> None:
        """Drawn with the next frame."""

    def say(self, text: str) -> None:
        """Below the picture from now on."""
        self._said = text

    def finish(self) -> None:
        """Leave the whole story in the scrollback."""
        self._console.print(whole_story(self._stage, self._progress, self._console.width))

    def close(self) -> None:
        """Take the picture away."""
        self._drawing.cancel()
        self._live.stop()

    async def _draw_forever(self) -> None:
        while True:
            self._live.update(self._picture(), refresh=True)
            await asyncio.sleep(_FRAME_SEC)

    def _picture(self) -> RenderableType:
        width = self._console.width
        parts: list[RenderableType] = [timeline(self._stage, self._progress, width, whole=False)]
        parts.append(now_panel(self._stage))
        if self._progress.current is not None:
            parts.append(self._steps(width))
        if self._said:
            parts.append(Text(self._said))
        return Group(*parts)

    def _steps(self, width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 1), expand=False)
        grid.add_column(width=1)
        grid.add_column(justify="right", style="dim")
        grid.add_column(no_wrap=True, overflow="ellipsis", max_width=max(20, width // 2 - 8))
        grid.add_column(no_wrap=True, overflow="ellipsis", style="dim", max_width=max(20, width // 2 - 4))
        current = self._progress.current
        for index, step in enumerate(self._progress.steps):
            if index < len(self._progress.results):
                result = self._progress.results[index]
                mark: RenderableType = _mark(result)
                note = result.seen
                title = Text(step.title, style="" if result.passed else "red")
            elif index == current:
                mark, note, title = self._spinner, step.expected, Text(step.title, style="bold cyan")
            else:
                mark, note, title = Text("·", style="dim"), "", Text(step.title, style="dim")
            grid.add_row(mark, str(index + 1), title, Text(note))
        return grid


# --- parts of the picture -------------------------------------------------------------------------------------------


def timeline(stage: Stage, progress: Progress, width: int, *, whole: bool) -> RenderableType:
    """Tokens per second, the engine's /health and the sidecar's /healthz on one time axis.

    Args:
        stage: what to draw.
        progress: where the steps began.
        width: cells of the terminal.
        whole: the whole story; otherwise as much of its end as fits.
    """
    cells = max(20, width - _LABEL_CELLS - 16)
    now = time.monotonic()
    span = max(now - progress.first_at, 1.0)
    cell_sec = span / cells if whole else progress.cell_sec
    begin = progress.first_at if whole or span < cells * cell_sec else now - cells * cell_sec
    edges = [begin + index * cell_sec for index in range(cells + 1)]
    used = min(cells, int((now - begin) / cell_sec))

    rates = [stage.clients.tokens(edges[i], edges[i + 1]) / cell_sec for i in range(used)]
    top = max([_MIN_RATE, *rates])
    engine, sidecar = _engine_says(stage, edges, used, now), _sidecar_says(stage, edges, used)
    latest_rate = stage.clients.tokens(now - 1, now)

    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL_CELLS, no_wrap=True)
    grid.add_column(width=cells, no_wrap=True)
    grid.add_column(width=9, no_wrap=True)
    for row in reversed(range(_ROWS)):
        label = Text("tokens per second", style="bold") if row == _ROWS - 1 else Text("")
        right = Text(f"{latest_rate}", style="cyan") if row == 0 else Text("")
        if row == _ROWS - 1:
            right = Text(f"{top:.0f}", style="dim")
        grid.add_row(label, Text("".join(_block(rate / top * _ROWS - row) for rate in rates), style="cyan"), right)
    grid.add_row(Text("engine /health", style="bold"), _strip(engine), _lamp(engine))
    grid.add_row(Text("sidecar /healthz", style="bold"), _strip(sidecar), _lamp(sidecar))
    grid.add_row(Text("step", style="dim"), _step_marks(progress, edges, used), Text(f"{span:.0f} s", style="dim"))
    title = f"[bold]enginewatch demo[/]  simulated {progress.engine_title}  {escape(stage.sim.url)}"
    return Panel(grid, title=title, title_align="left", border_style="bright_black", box=box.ROUNDED)


def now_panel(stage: Stage) -> RenderableType:
    """State and reason as published at this moment."""
    looks = stage.eyes.looks
    if not looks:
        return Panel(Text("waiting for the sidecar"), border_style="bright_black", box=box.ROUNDED, height=4)
    look = looks[-1]
    acting = look.status == 503
    colour = "red" if acting else ("green" if look.status == 200 else "yellow")
    head = Text.assemble(
        ("● ", colour),
        (f"{look.state or 'no answer'}", f"bold {colour}"),
        ("   GET /healthz → ", "dim"),
        (f"{look.status or '-'}", f"bold {colour}"),
    )
    reason = str(look.verdict.get("reason", "the sidecar does not answer"))
    body = Group(head, Text(reason, no_wrap=True, overflow="ellipsis"))
    title = f"[bold]sidecar[/]  {escape(stage.sidecar_url)}"
    return Panel(body, title=title, title_align="left", border_style=colour if acting else "bright_black", height=4)


def results_table(progress: Progress, frame: box.Box, *, styled: bool) -> Table:
    """Expected and seen, step by step."""
    table = Table(box=frame, show_lines=False, header_style="bold" if styled else "", expand=False)
    table.add_column("", justify="right", style="dim" if styled else "")
    table.add_column("step", ratio=3)
    table.add_column("expected", ratio=4)
    table.add_column("seen", ratio=5)
    table.add_column("", no_wrap=True)
    for number, result in enumerate(progress.results, 1):
        mark = _mark(result) if styled else Text("ok" if result.passed else "FAILED")
        table.add_row(str(number), Text(result.step.title), Text(result.step.expected), Text(result.seen), mark)
    return table


def conclusion(progress: Progress) -> str:
    """The last line."""
    passed = sum(result.passed for result in progress.results)
    total = len(progress.steps)
    took = sum(result.took_sec for result in progress.results)
    if passed == total:
        return f"All {total} steps as expected, in {took:.0f} s."
    failed = ", ".join(str(number) for number, result in enumerate(progress.results, 1) if not result.passed)
    return f"{passed} of {total} steps as expected, not {failed}."


def whole_story(stage: Stage, progress: Progress, width: int) -> RenderableType:
    """The picture that stays: the time axis from beginning to end, and the table."""
    passed = all(result.passed for result in progress.results)
    return Group(
        timeline(stage, progress, width, whole=True),
        results_table(progress, box.ROUNDED, styled=True),
        Text(conclusion(progress), style="bold green" if passed else "bold red"),
    )


def write_svg(path: str, stage: Stage, progress: Progress) -> None:
    """Write the picture that stays as an SVG without references to anything outside.

    Raises:
        OSError: the file cannot be written.
    """
    width = 118
    console = Console(
        record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(whole_story(stage, progress, width))
    drawn = console.export_svg(title="enginewatch demo")
    # Without the fonts that rich would have fetched from elsewhere: any monospaced one will do.
    drawn = re.sub(r"@font-face\s*{.*?}\s*", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    Path(path).write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", encoding="utf-8")


# --- cells ----------------------------------------------------------------------------------------------------------


def _block(height: float) -> str:
    """One cell of a bar whose top is `height` cells above its lower edge."""
    return _BLOCKS[max(0, min(8, round(height * 8)))]


def _strip(cells: Sequence[str]) -> Text:
    text = Text()
    for says in cells:
        text.append(_GLYPHS.get(says, "!"), style=_COLOURS.get(says, "magenta"))
    return text


def _lamp(cells: Sequence[str]) -> Text:
    says = cells[-1] if cells else ""
    return Text(says or "-", style=_COLOURS.get(says, "magenta"))


def _worst(answers: Sequence[str]) -> str:
    return min(answers, key=lambda says: _WORST_FIRST.index(says) if says in _WORST_FIRST else 0, default="")


def _in_cells(moments: Sequence[tuple[float, str]], edges: Sequence[float], used: int) -> list[list[str]]:
    cells: list[list[str]] = [[] for _ in range(used)]
    step = edges[1] - edges[0]
    for moment, says in moments:
        index = int((moment - edges[0]) / step)
        if 0 <= index < used:
            cells[index].append(says)
    return cells


def _sidecar_says(stage: Stage, edges: Sequence[float], used: int) -> list[str]:
    moments = [(look.at, "no answer" if look.status is None else str(look.status)) for look in stage.eyes.looks]
    return _carry(_in_cells(moments, edges, used))


def _engine_says(stage: Stage, edges: Sequence[float], used: int, now: float) -> list[str]:
    if stage.eyes.asks_engine:
        return _carry(_in_cells([(one.at, one.says_at(now)) for one in stage.eyes.asked], edges, used))
    # Asked a few times only, and answered after a second at best: no answer lasts until there is one.
    found = [""] * used
    step = edges[1] - edges[0]
    for one in stage.eyes.asked:
        end = one.answered_at if one.answered_at is not None else now
        last = int((end - edges[0]) / step)
        if end - one.at > _SLOW_SEC:
            for index in range(max(0, int((one.at - edges[0]) / step)), min(used, last)):
                found[index] = "no answer"
        if one.answered_at is not None and 0 <= last < used:
            found[last] = one.says
    return found


def _carry(cells: Sequence[Sequence[str]]) -> list[str]:
    """The worst of each cell; a cell without an answer of its own repeats the one before."""
    found: list[str] = []
    for cell in cells:
        found.append(_worst(cell) if cell else (found[-1] if found else ""))
    return found


def _step_marks(progress: Progress, edges: Sequence[float], used: int) -> Text:
    row = [" "] * used
    begins = [result.began_at for result in progress.results]
    if progress.current is not None:
        begins.append(progress.began_at)
    step = edges[1] - edges[0]
    for number, began in enumerate(begins, 1):
        index = int((began - edges[0]) / step)
        for place, digit in enumerate(str(number), index):
            if 0 <= place < used:
                row[place] = digit
    return Text("".join(row), style="dim")


def _mark(result: Result) -> Text:
    return Text("✔", style="bold green") if result.passed else Text("✘", style="bold red")


def _plain_width() -> int:
    try:
        return max(80, int(os.environ.get("COLUMNS", "120")))
    except ValueError:
        return 120
