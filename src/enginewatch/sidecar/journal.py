"""Structured log lines on stderr: one JSON object each, key=value on a terminal. State changes only, never per poll.

A line is written only when stderr can take it at once. A log collector that stops reading would otherwise stop the
event loop, and with it /healthz: the kubelet would kill a healthy engine because of a full pipe. Lines that are lost
this way are counted, and the count goes with the next line that gets through.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

MAX_LINE_BYTES = 4096
"""Longest line; also what a pipe that reports itself writable is certain to take (PIPE_BUF)."""

Level = Literal["info", "warning", "error"]


class Journal:
    """The sidecar's log. Never raises and never waits."""

    def __init__(self, *, descriptor: int = 2, terminal: bool | None = None) -> None:
        structlog = _structlog_without_rich()
        self._out = _Out(descriptor)
        is_terminal = os.isatty(descriptor) if terminal is None else terminal
        renderer: Any = (
            structlog.processors.LogfmtRenderer() if is_terminal else structlog.processors.JSONRenderer(default=str)
        )
        self._log = structlog.wrap_logger(
            self._out,
            processors=[
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                _in_reading_order,
                renderer,
            ],
            wrapper_class=structlog.BoundLogger,
        )

    def write(self, level: Level, event: str, **fields: Any) -> None:
        """Writes one line: a sentence and its fields."""
        if self._out.lost:
            fields["lost_lines"] = self._out.lost
        try:
            getattr(self._log, level)(event, **fields)
        except Exception:
            # A field that cannot be rendered must not cost the caller; the sentence alone can.
            getattr(self._log, level)(event)


class _Out:
    """The logger that structlog writes to: a file descriptor that is only written to when it will not block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.lost = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def msg(self, line: str) -> None:
        raw = line.encode("utf-8", "backslashreplace")
        if len(raw) >= MAX_LINE_BYTES:
            raw = raw[: MAX_LINE_BYTES - 4] + b"..."
        try:
            ready = any(event & select.POLLOUT for _, event in self._poll.poll(0))
            if ready:
                os.write(self._descriptor, raw + b"\n")
                self.lost = 0
                return
        except OSError:
            pass  # closed, or its reader is gone: there is nobody to tell
        self.lost += 1

    info = warning = error = msg


def _in_reading_order(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    first = {key: fields.pop(key) for key in ("timestamp", "level", "event") if key in fields}
    return {**first, **fields}


def _structlog_without_rich() -> Any:
    """Imports structlog as if rich were not installed: it would load it, 5 MiB, for tracebacks nobody prints here."""
    if "structlog" in sys.modules:
        return sys.modules["structlog"]
    hidden = [name for name in ("rich", "colorama", "better_exceptions") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        import structlog
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
    return structlog
