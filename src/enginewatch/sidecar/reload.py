"""The configuration file, read again whenever it changes; the last good settings stay when it cannot be used.

A ConfigMap update does not touch the file: it swaps a symlink in the directory above. So what the path *resolves to* is
watched (device, inode, times, size). A file written within the last two seconds is read once more on the next poll,
because a rewrite of the same length within one tick of the file system's clock shows in none of these.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from enginewatch.core.settings import Settings
from enginewatch.sidecar.config import (
    EMPTY,
    Layer,
    Problem,
    read_document,
    read_environment,
    settings_from,
)

MAX_FILE_BYTES = 256 * 1024
"""Largest file that is read: the longest body of a canary several times over. JSON in memory may be 25 times as large
as its text, and reading it delays /healthz."""
_SETTLED_NS = 2_000_000_000

_Signature = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Reload:
    """What a look at the file brought, where it brought anything new.

    Attributes:
        settings: the effective settings from now on.
        outcome: `loaded`, `absent` (there is no file: environment and defaults), or `kept` (it cannot be used, or is
            gone: the last good settings stay).
        rejected: why it cannot be used, and what cannot be used in the environment.
        notes: unknown and repeated keys.
        unknown_keys: how many keys of the file in force nobody reads.
    """

    settings: Settings
    outcome: Literal["loaded", "absent", "kept"]
    rejected: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    unknown_keys: int


class SettingsSource:
    """The hot settings' sources: the environment, read once, and a file, read when it changes."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self.path = path
        self._environment = read_environment(environ)
        self._file: Layer = EMPTY
        self._good_once = False
        self._seen: _Signature | str | None = None
        self._content: int | None = None
        self.settings: Settings = settings_from(self._environment, EMPTY)

    def poll(self) -> Reload | None:
        """Looks at the file; None where nothing has changed. Never raises for anything that is found there."""
        try:
            signature = _signature(os.stat(self.path))
            if signature == self._seen:
                return None
            raw, signature, settled = _read(self.path)
        except (OSError, ValueError, _NotReadableError) as error:
            return self._without_file(_phrase(error), absent=_is_absent(error))
        self._seen = signature if settled else None
        content = hash(raw)
        if content == self._content:
            return None
        self._content = content
        return self._judge(read_document(raw, self.path))

    def _judge(self, layer: Layer) -> Reload:
        if layer.rejected:
            return self._answer("kept", layer.rejected, layer)
        self._file = layer
        self._good_once = True
        return self._answer("loaded", (), layer)

    def _without_file(self, reason: str, *, absent: bool) -> Reload | None:
        if self._seen == reason:
            return None
        self._seen, self._content = reason, None
        if absent and not self._good_once:
            return self._answer("absent", (), EMPTY)
        if absent:
            reason = "the file is gone"
        return self._answer("kept", (Problem("", self.path, reason),), self._file)

    def _answer(
        self, outcome: Literal["loaded", "absent", "kept"], rejected: tuple[Problem, ...], layer: Layer
    ) -> Reload:
        self.settings = settings_from(self._environment, self._file)
        return Reload(
            settings=self.settings,
            outcome=outcome,
            rejected=(*self._environment.rejected, *rejected),
            notes=(*layer.unknown, *layer.repeated),
            unknown_keys=len(layer.unknown),
        )


class _NotReadableError(Exception):
    """Found something that is not a readable configuration file; the message says what."""


def _signature(found: os.stat_result) -> _Signature:
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


def _read(path: str) -> tuple[bytes, _Signature, bool]:
    # Not blocking: opening a FIFO that nobody writes to would stop the watcher for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise _NotReadableError("expected a file, found a directory")
        if not stat.S_ISREG(found.st_mode):
            raise _NotReadableError("expected a regular file, found something else")
        raw = b""
        while len(raw) <= MAX_FILE_BYTES and (chunk := os.read(handle, MAX_FILE_BYTES + 1 - len(raw))):
            raw += chunk
    finally:
        os.close(handle)
    if len(raw) > MAX_FILE_BYTES:
        raise _NotReadableError(f"larger than {MAX_FILE_BYTES} bytes")
    settled = abs(time.time_ns() - found.st_mtime_ns) > _SETTLED_NS
    return raw, _signature(found), settled


def _is_absent(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)


def _phrase(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {os.strerror(error.errno).lower() if error.errno else 'unknown error'}"
    return str(error) or "cannot be read"
