"""A command on a terminal of its own, as a person would run it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence


class Terminal:
    """A running command and everything it has written to its screen."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self.screen = ""

    def read_until(self, text: str, *, within_sec: float = 60.0) -> None:
        """Read until the text has been written; fails when it is not in time."""
        deadline = time.monotonic() + within_sec
        while text not in self.screen:
            assert time.monotonic() < deadline, f"no {text!r} within {within_sec:g} s in: {self.screen[-2000:]}"
            assert self._read(), f"no {text!r} until the end of: {self.screen[-2000:]}"

    def end(self, number: int | None = None, *, within_sec: float = 30.0) -> int:
        """Send a signal, if any, read to the end and return the exit code."""
        if number is not None:
            self.process.send_signal(number)
        deadline = time.monotonic() + within_sec
        while self._read():
            assert time.monotonic() < deadline, f"not ended within {within_sec:g} s: {self.screen[-2000:]}"
        return self.process.wait(within_sec)

    def _read(self) -> bool:
        if not select.select([self._descriptor], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # the other side was closed
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)


@contextlib.contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str], *, columns: int = 100) -> Iterator[Terminal]:
    """Run a command on a terminal that has colours; killed if the test leaves it running."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    usual = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", "COLUMNS", "LINES")}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**usual, "TERM": "xterm-256color", **environment},
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(ours)
