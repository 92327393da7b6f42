"""A diagnosis for a terminal: the same content as `diagnosis_text`, as tables in colour."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from enginewatch.client.diagnosis import Diagnosis, FoundCanary, FoundCore
from enginewatch.client.diagnosis_text import identity_in_short

_STYLES = {"ok": "green", "warning": "yellow", "unknown": "magenta", "critical": "bold red"}
_MARKS = {"ok": "✔", "warning": "▲", "unknown": "?", "critical": "✘"}
_ROLE_FROM = {"given": "as given", "engine": "as the engine says", "default": "assumed"}


def render_tables(diagnosis: Diagnosis) -> RenderableType:
    """What was found, core by core, then what it means and what to change."""
    parts: list[RenderableType] = [_facts(diagnosis)]
    if diagnosis.cores:
        parts.append(_cores(diagnosis.cores))
    parts.append(_findings(diagnosis))
    style = _STYLES[diagnosis.level]
    parts.append(Text(f"{diagnosis.level.upper()} (exit code {diagnosis.exit_code})", style=style))
    return Group(*parts)


def _facts(diagnosis: Diagnosis) -> Table:
    table = Table(box=box.ROUNDED, show_header=False, border_style="bright_black", title_justify="left")
    table.title = Text(f"enginewatch doctor {diagnosis.url}", style="bold")
    table.add_column(style="bold")
    table.add_column()
    title = diagnosis.engine_title if diagnosis.engine_from != "nothing" else "not recognised"
    table.add_row("engine", Text(f"{title}, version {diagnosis.version or 'not told'}"))
    if diagnosis.model:
        table.add_row("model", Text(diagnosis.model))
    table.add_row("role", Text(f"{diagnosis.role} ({_ROLE_FROM[diagnosis.role_from]})"))
    page = diagnosis.page
    if page.failure is None:
        table.add_row("page", Text(f"{page.path}, {page.size_bytes} bytes in {page.duration_sec * 1000:.0f} ms"))
    else:
        table.add_row("page", Text(f"{page.path}, {page.failure}: {page.detail}", style="red"))
    if diagnosis.identity is not None:
        table.add_row("identity", Text(identity_in_short(diagnosis.identity)))
    if diagnosis.pause is not None:
        table.add_row("pause", Text(diagnosis.pause))
    if diagnosis.canary is not None:
        table.add_row("canary", _canary(diagnosis.canary))
    return table


def _cores(cores: tuple[FoundCore, ...]) -> Table:
    table = Table(box=box.ROUNDED, border_style="bright_black", header_style="bold")
    table.add_column("core", justify="right")
    table.add_column("leg")
    table.add_column("value", justify="right")
    table.add_column("moves with")
    table.add_column("during the canary")
    for core in cores:
        loads = (("running", core.running), ("waiting", core.waiting), *core.queues.items())
        load = ", ".join(f"{value:g} {what}" for what, value in loads if value is not None)
        heartbeat = ", heartbeat" if core.heartbeat else ""
        answer = _canary(core.canary) if core.canary is not None else Text("")
        table.add_row(core.name, Text(f"{load or 'says nothing of its load'}{heartbeat}"), "", "", answer)
        for leg in core.legs:
            moved = Text("moved", style="green") if leg.moved else Text("stood still", style="dim")
            table.add_row("", Text(leg.name), f"{leg.value:.12g}", f"every {leg.grain} ({leg.kind})", moved)
        if core.missing_legs:
            table.add_row("", Text(f"not told: {', '.join(core.missing_legs)}", style="dim"), "", "", "")
        table.add_section()
    return table


def _findings(diagnosis: Diagnosis) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column()
    for finding in diagnosis.findings:
        style = _STYLES[finding.level]
        table.add_row(Text(_MARKS[finding.level], style=style), Text(finding.what))
        if finding.fix:
            table.add_row("", Text(f"→ {finding.fix}", style="italic"))
    return table


def _canary(canary: FoundCanary) -> Text:
    style = "green" if canary.outcome == "ok" else "red"
    return Text(f"{canary.outcome} in {canary.duration_sec * 1000:.0f} ms: {canary.detail}", style=style)
