"""From the bytes of a log file to the lines an engine wrote, with a container runtime's wrapping taken off.

The CRI format puts `2026-10-14T02:07:21.291234567Z stdout F ` before each line; `P` instead of `F` marks a part of a
line that goes on in the next entry of the same stream. A line, or what its parts add up to, is cut at 64 KiB: an
endless one must not be held.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_LINE_BYTES = 64 * 1024

_CRI = re.compile(
    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.?\d{0,9}(?:Z|[+-]\d\d:\d\d) (stdout|stderr) ([FP])(?::[^ ]*)?(?: |$)"
)


class LineReader:
    """Feed it bytes in pieces, get whole lines back.

    Args:
        in_line: the bytes begin in the middle of a line, which is left out.
    """

    def __init__(self, *, in_line: bool = False) -> None:
        self._rest = b""
        self._leave_out = in_line
        self._parts: dict[bytes, bytes] = {}

    @property
    def unfinished_bytes(self) -> int:
        """Length of the line that has begun and not ended; 0 where it was cut or is left out."""
        return 0 if self._leave_out or len(self._rest) >= MAX_LINE_BYTES else len(self._rest)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The lines that end in this piece, without their line ends."""
        first, *others = piece.split(b"\n")
        if not others:
            self._hold(first)
            return
        self._hold(first)
        line, self._rest = self._rest, b""
        if self._leave_out:
            self._leave_out = False
        else:
            yield from self._unwrap(line)
        for line in others[:-1]:
            yield from self._unwrap(line)
        self._hold(others[-1])

    def _hold(self, piece: bytes) -> None:
        if not self._leave_out and len(self._rest) < MAX_LINE_BYTES:
            self._rest += piece[: MAX_LINE_BYTES - len(self._rest)]

    def _unwrap(self, line: bytes) -> Iterator[bytes]:
        line = line.rstrip(b"\r").lstrip(b"\0")  # a hole that copytruncate left reads as zeros
        wrapped = _CRI.match(line)
        if wrapped is None:
            yield line[:MAX_LINE_BYTES]
            return
        stream, tag = wrapped.groups()
        text = self._parts.pop(stream, b"")
        if len(text) < MAX_LINE_BYTES:
            text = (text + line[wrapped.end() :])[:MAX_LINE_BYTES]
        if tag == b"P":
            self._parts[stream] = text
        else:
            yield text
