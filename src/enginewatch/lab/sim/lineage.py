"""Children that never outlive their parent, not even when they are stopped.

A rank that is stopped with SIGSTOP cannot notice that its pipe was closed. The kernel's parent-death signal, SIGKILL,
reaches it all the same; the drills that stop ranks would otherwise leave frozen orphans behind.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent`, which started it, dies; exits at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Let grandchildren whose parent died become children of this process, so that it can reap them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
