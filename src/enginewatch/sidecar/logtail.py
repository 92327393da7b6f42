"""Follows the engine's log and counts lines that match a signature. Keeps no log text.

Rules (docs/configuration.md, "The log"):
    - A file that exists at the start is read from the end it had then, one that appears later from its beginning.
    - A glob means its newest match by modification time. What was left unread in the one before is read first.
    - Rotation: the old file is held open, read to its end, then the new one begins. A file is known by device and
      inode, so a renamed one is not read twice.
    - Truncation: a file shorter than what was read begins anew. So does one that was truncated and has grown past that
      point again: the bytes before the point are no longer those that were read (a checksum of the last 64 tells).
    - More than 4 MiB or 50,000 lines of news at once skip to the end: an engine that logs that much is not dead, and
      its log must not cost the watcher its time.
    - The disk is touched, and lines are searched, in a thread of their own: a file system that hangs, a directory of
      200,000 files or a pattern that takes a second per line must delay neither /healthz nor the next poll. Until the
      thread is done the log counts as broken.
    - While nobody knows what to look for (the engine is not recognised yet, or has no signatures), news are skipped.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import fnmatch
import glob
import os
import stat
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from enginewatch.sidecar.lines import LineReader
from enginewatch.sidecar.signatures import Signatures

MAX_NEWS_BYTES = 4 * 1024 * 1024
MAX_NEWS_LINES = 50_000
MAX_MATCHES = 2000
"""So many files of a glob are looked at."""
MAX_NAMES = 20_000
"""So many names are compared with a glob."""
PATIENCE_SEC = 1.0
"""How long a poll waits for the log at most; once, not at each poll while the same reading goes on."""
THREAD_NAME = "enginewatch_log"
_PIECE_BYTES = 32 * 1024
_PRINT_BYTES = 64
_KNOWN_FILES = 2 * MAX_MATCHES

_FileId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LogNews:
    """What one look at the log brought.

    Attributes:
        hits: lines that match, by any pattern.
        patterns: indices of the patterns that matched, ascending.
        problem: why the log cannot be followed, None when it can.
        skipped_bytes: news that were too much to read.
    """

    hits: int = 0
    patterns: tuple[int, ...] = ()
    problem: str | None = None
    skipped_bytes: int = 0


@dataclass(slots=True)
class _Place:
    """How far a file was read. `checksum` is of the last `checked` bytes before `offset`."""

    offset: int
    checksum: int = 0
    checked: int = 0


@dataclass(slots=True)
class _Tally:
    hits: int = 0
    patterns: set[int] = field(default_factory=set)
    skipped_bytes: int = 0


class _BrokenLogError(Exception):
    """The log cannot be followed right now; the message says why, without text from it."""


class LogTail:
    """One log, given as a path or a glob. `read` once per poll; never raises for anything found on disk."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._signatures = Signatures(())
        self._places: OrderedDict[_FileId, _Place] = OrderedDict()
        self._open: _OpenFile | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1, THREAD_NAME)
        self._reading: asyncio.Future[LogNews] | None = None
        concurrent.futures.wait([self._worker.submit(self._note_existing)], PATIENCE_SEC)

    def look_for(self, signatures: Signatures) -> None:
        """Replaces what is looked for, from the next line on."""
        self._signatures = signatures

    @property
    def patterns(self) -> tuple[str, ...]:
        """What is looked for."""
        return self._signatures.patterns

    def close(self) -> None:
        """Lets go of the file, unless it is still being read."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        if self._reading is None:
            self._let_go()

    async def read(self) -> LogNews:
        """What was written since the last time, or that it takes too long to find out."""
        patience_sec = 0.0
        if self._reading is None:
            self._reading = asyncio.get_running_loop().run_in_executor(self._worker, self._read_now)
            patience_sec = PATIENCE_SEC
        done, _ = await asyncio.wait([self._reading], timeout=patience_sec)
        if not done:
            return LogNews(problem="reading it takes too long")
        reading, self._reading = self._reading, None
        return reading.result()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Closes the file, remembering how far it was read."""
        if self._open is not None:
            file, self._open = self._open, None
            # A deleted file's inode may be the next file's.
            is_deleted = file.is_deleted()
            place = file.let_go()
            if not is_deleted:
                self._remember(file.file_id, place)

    def _read_now(self) -> LogNews:
        tally = _Tally()
        problem: str | None = None
        try:
            self._read_all(tally)
        except _BrokenLogError as broken:
            problem = str(broken)
        except (OSError, ValueError) as error:
            self._open, broken_file = None, self._open
            if broken_file is not None:
                broken_file.close()
            problem = _phrase(error)
        if problem is not None:
            # A path may hold any bytes, and the problem is served as JSON.
            problem = problem.encode("utf-8", "backslashreplace").decode()
        return LogNews(tally.hits, tuple(sorted(tally.patterns)), problem, tally.skipped_bytes)

    def _read_all(self, tally: _Tally) -> None:
        newest, problem = self._newest()
        current = self._open
        if current is not None and (newest is None or newest[1] != current.file_id):
            # Rotated, deleted or overtaken by a newer match: the rest of it first.
            self._read_news(current, tally)
            self._let_go()
            current = None
        if newest is None:
            raise _BrokenLogError(problem)
        if current is None:
            current = _OpenFile.open(newest[0])
            self._open = current
            current.resume(self._places.pop(current.file_id, _Place(0)))
        self._read_news(current, tally)

    def _read_news(self, file: _OpenFile, tally: _Tally) -> None:
        size = file.size()
        if file.place.offset > size or not file.is_where_it_was():
            file.resume(_Place(0))
        left = size - file.place.offset
        if left > MAX_NEWS_BYTES or (left > 0 and not self._signatures.patterns):
            if self._signatures.patterns:
                tally.skipped_bytes += left
            file.skip_to(size)
            return
        lines = 0
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            for line in file.lines.feed(piece):
                lines += 1
                matched = self._signatures.found_in(line)
                tally.hits += bool(matched)
                tally.patterns.update(matched)
            if lines > MAX_NEWS_LINES:
                tally.skipped_bytes += left
                file.skip_to(size)
                return

    def _newest(self) -> tuple[tuple[str, _FileId] | None, str]:
        """The file to follow (path and identity), or None and why there is none."""
        best: tuple[int, str, _FileId] | None = None
        problem = f"no file matches {self._path}"
        for path in self._matches():
            try:
                found = os.stat(path)
            except OSError as error:
                problem = _phrase(error)
                continue
            if not stat.S_ISREG(found.st_mode):
                problem = f"{path} is not a regular file"
                continue
            candidate = (found.st_mtime_ns, path, (found.st_dev, found.st_ino))
            if best is None or candidate > best:
                best = candidate
        return (best[1:] if best is not None else None), problem

    def _matches(self) -> Iterator[str]:
        # A name may hold brackets and be meant as it is.
        if not glob.has_magic(self._path) or os.path.lexists(self._path):
            return iter((self._path,) if os.path.lexists(self._path) else ())
        return islice(_expanded(self._path, iter(range(MAX_NAMES))), MAX_MATCHES)

    def _note_existing(self) -> None:
        try:
            for path in self._matches():
                try:
                    found = os.stat(path)
                except OSError:
                    continue
                self._remember((found.st_dev, found.st_ino), _Place(found.st_size))
        except (OSError, ValueError, _BrokenLogError):
            pass  # the first read says what is wrong

    def _remember(self, file_id: _FileId, place: _Place) -> None:
        self._places[file_id] = place
        while len(self._places) > _KNOWN_FILES:
            self._places.popitem(last=False)


def _expanded(pattern: str, names: Iterator[int]) -> Iterator[str]:
    """What matches, like `glob.iglob`, which would hold a directory's names all at once.

    Raises:
        _BrokenLogError: `names`, one for each name that is compared, has come to its end.
    """
    above, own = os.path.split(pattern)
    for parent in _expanded(above, names) if glob.has_magic(above) else (above,):
        if not glob.has_magic(own):
            if os.path.lexists(os.path.join(parent, own)):
                yield os.path.join(parent, own)
            continue
        try:
            entries = os.scandir(parent or ".")
        except OSError:
            continue  # no directory, or none that may be read
        with entries:
            for entry in entries:
                if next(names, None) is None:
                    raise _BrokenLogError(f"more than {MAX_NAMES} names to compare with {pattern}")
                hidden = entry.name.startswith(".") and not own.startswith(".")
                if not hidden and fnmatch.fnmatchcase(entry.name, own):
                    yield os.path.join(parent, entry.name)


class _OpenFile:
    """A file held open, and how far it was read."""

    def __init__(self, descriptor: int, file_id: _FileId) -> None:
        self._descriptor = descriptor
        self.file_id = file_id
        self.place = _Place(0)
        self.lines = LineReader()

    @classmethod
    def open(cls, path: str) -> _OpenFile:
        # Not blocking: it may have become a FIFO since it was looked at.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise _BrokenLogError(f"{path} is not a regular file")
        return cls(descriptor, (found.st_dev, found.st_ino))

    def close(self) -> None:
        os.close(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def is_deleted(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    def read(self, most: int) -> bytes:
        """The next bytes; empty at the end."""
        piece = os.pread(self._descriptor, most, self.place.offset)
        if piece:
            self._move_to(self.place.offset + len(piece))
        return piece

    def is_where_it_was(self) -> bool:
        """Whether the bytes before the place are still those that were read."""
        place = self.place
        if place.checked == 0:
            return True
        before = os.pread(self._descriptor, place.checked, place.offset - place.checked)
        return zlib.crc32(before) == place.checksum

    def resume(self, place: _Place) -> None:
        """Goes on from a place; inside a line, the rest of that line is left out."""
        self.place = place
        self.lines = LineReader(in_line=self._is_in_line(place.offset))

    def skip_to(self, offset: int) -> None:
        """Leaves out everything before."""
        self._move_to(offset)
        self.lines = LineReader(in_line=self._is_in_line(offset))

    def let_go(self) -> _Place:
        """Closes the file; returns where to go on, at the beginning of the line that is not finished."""
        try:
            if self.lines.unfinished_bytes:
                self._move_to(self.place.offset - self.lines.unfinished_bytes)
        except OSError:
            pass  # the place stays in the middle of a line: that line is left out
        self.close()
        return self.place

    def _is_in_line(self, offset: int) -> bool:
        return offset > 0 and os.pread(self._descriptor, 1, offset - 1) not in (b"\n", b"")

    def _move_to(self, offset: int) -> None:
        checked = min(_PRINT_BYTES, offset)
        before = os.pread(self._descriptor, checked, offset - checked)
        self.place = _Place(offset, zlib.crc32(before), len(before))


def _phrase(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        where = f"{error.filename} " if isinstance(error.filename, str) else "the log "
        if error.errno == errno.ENOENT:
            return f"{where}does not exist"
        return f"{where}cannot be read: {os.strerror(error.errno).lower()}"
    return "the log's path cannot be used"
