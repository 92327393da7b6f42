"""Exceptions that should not have happened: counted each time, logged once per kind, survived always."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType

from enginewatch.sidecar.journal import Journal

_MAX_KINDS = 100


class Faults:
    """Takes note of survived exceptions.

    The log line names the exception's type and the place, never its message: that may hold what an engine sent.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: set[tuple[str, str, str]] = set()
        self.count: Callable[[str], None] | None = None
        """Told the task's name each time."""

    def note(self, task: str, error: BaseException) -> None:
        """Takes note of one exception. Never raises."""
        try:
            if self.count is not None:
                self.count(task)
            places = _places(error.__traceback__)
            kind = (task, type(error).__name__, places[-1] if places else "")
            if kind in self._known or len(self._known) >= _MAX_KINDS:
                return
            self._known.add(kind)
            self._journal.write(
                "error",
                "an internal error was survived; the same one will be counted but not logged again",
                task=task,
                error=type(error).__name__,
                at=" < ".join(reversed(places[-6:])),
            )
        except Exception:
            pass  # nothing is left to tell it to


def _places(trace: TracebackType | None) -> list[str]:
    places = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}")
        trace = trace.tb_next
    return places
