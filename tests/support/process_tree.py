"""Who descends from a process, and whether all of them have ended."""

from __future__ import annotations

import time
from pathlib import Path


def descendants(pid: int) -> dict[int, str]:
    """Process ids below a process, with their names."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue
        each = int(stat.parent.name)
        names[each] = head.partition("(")[2]
        children.setdefault(int(tail.split()[1]), []).append(each)
    found: dict[int, str] = {}
    waiting = list(children.get(pid, ()))
    while waiting:
        each = waiting.pop()
        found[each] = names[each]
        waiting += children.get(each, [])
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def assert_all_gone(pids: dict[int, str]) -> None:
    deadline = time.monotonic() + 10
    while left := {pid: name for pid, name in pids.items() if alive(pid)}:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)
