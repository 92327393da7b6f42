"""Processes of the demo that it did not write: a real sidecar, a router's container. None outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

START_SEC = 90.0
"""A second or two on a machine that has them."""
_END_SEC = 5.0
_INHERITED = ("PATH", "HOME", "TMPDIR", "LANG", "VIRTUAL_ENV")
_INHERITED_PREFIXES = ("PYTHON", "LD_", "LC_")
# A demo that is killed leaves nothing behind: the parent-death signal outlives exec.
_TETHERED = (
    "import os, sys; from enginewatch.lab.sim.lineage import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


class StageError(Exception):
    """The demo cannot be set up here; the message is one sentence."""


class Tethered:
    """One process that is started, ended and started again.

    Args:
        name: what it is called in a sentence.
        log: file that gets what it writes on stderr.
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `python -m enginewatch ARGUMENTS`. On the main thread: the tether is to the thread that starts it.

        Raises:
            StageError: it cannot be started.
        """
        command = [sys.executable, "-c", _TETHERED, str(os.getpid()), sys.executable, "-m", "enginewatch", *arguments]
        with self.log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={**inherited_environment(), **environment},
                    start_new_session=True,  # Ctrl-C is for the demo, which ends things in order
                )
            except OSError as error:
                raise StageError(f"{self.name} cannot be started: {error.strerror}") from None

    def check_alive(self) -> None:
        """Raises StageError, with what it said last, when it has ended."""
        if self._process is not None and self._process.poll() is not None:
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise StageError(f"{self.name} ended at once: {said[-1] if said else 'it said nothing'}")

    def end(self) -> int | None:
        """End it, with SIGTERM first; its exit code, None if it was not running. May be called more than once."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            return process.wait(_END_SEC)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class Sidecar(Tethered):
    """`enginewatch watch` beside one engine, on a port that the system gives."""

    url = ""

    async def watch(self, engine_url: str, config_file: Path, environment: Mapping[str, str]) -> None:
        """Start it and wait until it says where it answers.

        Raises:
            StageError: it did not.
        """
        flags = ("--engine-url", engine_url, "--listen", "127.0.0.1:0", "--config-file", str(config_file))
        self.start(("watch", *flags), environment)
        deadline = time.monotonic() + START_SEC
        while not (url := _logged(self.log, "url")):
            self.check_alive()
            if time.monotonic() > deadline:
                raise StageError(f"{self.name} did not say within {START_SEC:g} s where it answers")
            await asyncio.sleep(0.05)
        self.url = url


def inherited_environment() -> dict[str, str]:
    """Without what is meant for another sidecar or guard: STALL_SEC, GUARD_PREFILL... must not change the story."""
    return {
        name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


def _logged(path: Path, key: str) -> str:
    """The first value of a key in a log of JSON lines, empty when there is none yet."""
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            body = json.loads(line)
            if isinstance(body, dict) and key in body:
                return str(body[key])
    return ""
