"""The engine's log file, for sidecars that read one."""

from __future__ import annotations

import datetime
import os

from enginewatch.lab.sim.options import LogFormat

DETOKENIZER_LINE = (
    "Health check failed. Server couldn't get a response from detokenizer for last {seconds:g} seconds. "
    "tic start time: {now}. last_heartbeat time: {heard}"
)
"""What SGLang logs when its health probe got no answer; the one line that means a dead scheduler."""


class EngineLog:
    """Appends lines, plain or with the prefix of a container runtime (CRI: time, stream, tag)."""

    def __init__(self, path: str, line_format: LogFormat) -> None:
        self._path = path
        self._format = line_format

    def write(self, line: str) -> None:
        """Append one line; nothing happens without a log file."""
        if not self._path:
            return
        if self._format == "cri":
            stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
            line = f"{stamp} stderr F {line}"
        # One write of one line: what a reader sees is never half a line, as with a real container log.
        with open(self._path, "ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def write_partial(self, text: str) -> None:
        """Append bytes without an end of line, for tests of a reader that meets half a line."""
        if self._path:
            with open(self._path, "ab", buffering=0) as file:
                file.write(text.encode())
                os.fsync(file.fileno())
