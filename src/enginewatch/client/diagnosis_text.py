"""A diagnosis as plain text: what was found, then what it means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from enginewatch.client.diagnosis import Diagnosis, Finding, FoundCanary, FoundCore, FoundIdentity

_MARKS = {"ok": "ok", "warning": "WARNING", "unknown": "UNKNOWN", "critical": "CRITICAL"}
_MARK_WIDTH = 10
_NAME_WIDTH = 10


def render_text(diagnosis: Diagnosis, *, width: int = 100) -> str:
    """Plain text, no colours, lines of at most `width` characters where words allow it."""
    lines = [f"enginewatch doctor {diagnosis.url}", ""]
    for name, text in _facts(diagnosis):
        indent = " " * (_NAME_WIDTH + (3 if text.startswith(" ") else 1))
        lines += textwrap.wrap(f"{name:<{_NAME_WIDTH}} {text}", width, subsequent_indent=indent, break_long_words=False)
    lines.append("")
    for finding in diagnosis.findings:
        lines += _finding(finding, width)
    lines += ["", f"{_MARKS[diagnosis.level]} (exit code {diagnosis.exit_code})"]
    return "\n".join(lines) + "\n"


def _facts(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    model = f", model {diagnosis.model}" if diagnosis.model else ""
    title = diagnosis.engine_title if diagnosis.engine_from != "nothing" else "not recognised"
    yield "engine", f"{title}, version {diagnosis.version or 'not told'}{model}"
    yield "role", f"{diagnosis.role} ({_ROLE_FROM[diagnosis.role_from]})"
    page = diagnosis.page
    if page.failure is None:
        yield "page", f"{page.path}, {page.size_bytes} bytes, {page.duration_sec * 1000:.0f} ms"
    else:
        yield "page", f"{page.path}, {page.failure}: {page.detail}"
    if diagnosis.identity is not None:
        yield "identity", identity_in_short(diagnosis.identity)
    if diagnosis.pause is not None:
        yield "pause", diagnosis.pause
    if diagnosis.canary is not None:
        yield "canary", _canary(diagnosis.canary)
    for core in diagnosis.cores:
        yield from _core(core)


def identity_in_short(identity: FoundIdentity) -> str:
    """The source, what it tells, and what it is instead of."""
    started = f", started at {identity.started_at}" if identity.started_at else ""
    named = f", {identity.engine_id}" if identity.engine_id else ""
    missing = f", {identity.missing} is not on the page" if identity.missing else ""
    return f"{identity.source}{named}{started}{missing}"


_ROLE_FROM = {"given": "as given", "engine": "as the engine says", "default": "assumed"}


def _core(core: FoundCore) -> Iterator[tuple[str, str]]:
    load = ", ".join(
        f"{name} {value:g}"
        for name, value in (("running", core.running), ("waiting", core.waiting), *core.queues.items())
        if value is not None
    )
    heartbeat = ", heartbeat" if core.heartbeat else ""
    yield f"core {core.name}", f"{load or 'says nothing of its load'}{heartbeat}"
    for leg in core.legs:
        yield "", f"  leg {leg.name} {leg.value:.12g} ({leg.kind}, {leg.grain}){', moved' if leg.moved else ''}"
    if core.missing_legs:
        yield "", f"  not told for this core: {', '.join(core.missing_legs)}"
    if core.canary is not None:
        yield "", f"  canary {_canary(core.canary)}"


def _canary(canary: FoundCanary) -> str:
    return f"{canary.outcome} in {canary.duration_sec * 1000:.0f} ms: {canary.detail}"


def _finding(finding: Finding, width: int) -> Iterator[str]:
    indent = " " * _MARK_WIDTH
    mark = f"{_MARKS[finding.level]:<{_MARK_WIDTH}}"
    yield from textwrap.wrap(mark + finding.what, width, subsequent_indent=indent, break_long_words=False)
    if finding.fix:
        yield from textwrap.wrap(
            f"{indent}-> {finding.fix}", width, subsequent_indent=indent + "   ", break_long_words=False
        )
