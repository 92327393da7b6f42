"""SIGTERM and SIGINT while the boot waits.

The first process of a container ignores a signal that it has no handler for, so the handlers come before everything
that takes time.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Final, NoReturn

ENDING: Final = (signal.SIGTERM, signal.SIGINT)
IGNORED_BY_PYTHON: Final = ("SIGPIPE", "SIGXFZ", "SIGXFSZ")

_inherited: dict[signal.Signals, Any] = {}


def end_at_once() -> None:
    """End the process on SIGTERM with 143 and on SIGINT with 130, whatever it does at that moment."""
    for number in ENDING:
        _inherited[number] = signal.signal(number, _end)


def as_inherited() -> None:
    """Before an exec: what a program expects that is started by any other than Python.

    Handlers end with the exec by themselves; what was ignored stays ignored, and what Python ignores for itself is not.
    """
    for number, handler in _inherited.items():
        if handler == signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)
    for name in IGNORED_BY_PYTHON:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> NoReturn:
    # Not by an exception: neither a thread that hangs in a lookup nor a `finally` may hold the process.
    try:
        os.write(2, f"guard: {signal.Signals(number).name}: stops waiting\n".encode())
    except OSError:
        pass
    os._exit(128 + number)
