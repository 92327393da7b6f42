"""A memory cgroup below this process's own, where this machine lets us make one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """One cgroup with a limit. `hits` counts how often the limit stopped an allocation."""

    def __init__(self, path: Path, limit_bytes: int, *, unified: bool) -> None:
        self.path = path
        self._unified = unified
        (path / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(limit_bytes))

    def hits(self) -> int:
        """How often the limit was hit, whether memory could be freed then or a process was killed."""
        if not self._unified:
            return int((self.path / "memory.failcnt").read_text())
        events = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        return int(events["max"]) + int(events["oom"])


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup | None]:
    """A cgroup for as long as the context lasts; None where it cannot be had."""
    made: Path | None = None
    group: MemoryCgroup | None = None
    try:
        with contextlib.suppress(OSError, StopIteration):
            parent, unified = _own()
            path = parent / f"enginewatch-bench-{os.getpid()}"
            path.mkdir()
            made = path
            group = MemoryCgroup(path, limit_bytes, unified=unified)
        yield group
    finally:
        if made is not None:
            made.rmdir()


def _own() -> tuple[Path, bool]:
    """The directory of this process's memory cgroup; whether it is one of the unified hierarchy."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return _ROOT / "memory" / path.lstrip("/"), False
    return _ROOT / next(path for _, controllers, path in lines if not controllers).lstrip("/"), True
