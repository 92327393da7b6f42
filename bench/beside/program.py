"""One watcher program, ours or anybody's: started as operators start it, asked as the kubelet asks it."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from watcher import OURS

START_SEC = 30.0
_END_SEC = 5.0
LOOK_SEC = 0.1
"""Between two looks at /healthz."""


class ProgramError(Exception):
    """A program is of no use; the message is one sentence for whoever named it."""


@dataclass(frozen=True)
class Program:
    """A name for the tables, and a command."""

    name: str
    command: tuple[str, ...]


OUR_NAME = "enginewatch"
OUR_PROGRAM = Program(OUR_NAME, OURS)
_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)", re.DOTALL)


def other(text: str) -> Program:
    """What stands behind --other: `CMD ARGS` or `NAME=CMD ARGS`.

    Raises:
        ProgramError: there is no command in it.
    """
    named = _NAMED.fullmatch(text)
    name, rest = (named[1], named[2]) if named else ("", text)
    try:
        command = tuple(shlex.split(rest))
    except ValueError as error:
        raise ProgramError(f"--other {text!r} cannot be split into words: {error}") from None
    if not command:
        raise ProgramError(f"--other {text!r} names no command; write --other 'NAME=COMMAND ARGUMENTS'")
    return Program(name or Path(command[0]).name, command)


@dataclass(frozen=True)
class Look:
    """One look at /healthz: unix seconds, status (0: no answer), first line."""

    at: float
    status: int
    line: str


_PORTS = range(20_000, 32_000)
"""Below those that the system gives to clients: nobody's connection takes one between our choice and the program's."""
_given: set[int] = set()
_giving = threading.Lock()


def own_port() -> int:
    """A port that nobody listens on and that this process gave to no other program: what answers there is this one."""
    with _giving:
        while True:
            port = random.choice(_PORTS)
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
                if port not in _given:
                    _given.add(port)
                    return port


class Running:
    """A program that watches an engine, and what one sees of it. Leaving the context ends it and its children.

    Args:
        program: what to run.
        engine_url: what it is to watch.
        config: the text of its configuration file.
        start_sec: how long it may take to answer for the first time.
    """

    def __init__(self, program: Program, engine_url: str, config: str, *, start_sec: float = START_SEC) -> None:
        self.name = program.name
        self.port = own_port()
        self.answered_at = 0.0
        """Unix seconds of its first answer."""
        self.looks: list[Look] = []
        self._program = program
        self._engine_url = engine_url
        self._config = config
        self._start_sec = start_sec
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="beside-")))
        config = directory / "config.json"
        config.write_text(self._config)
        # Nothing of the caller's own environment may configure what is compared.
        environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
        environment |= {
            "ENGINE_URL": self._engine_url,
            "LISTEN": f"127.0.0.1:{self.port}",
            "CONFIG_FILE": str(config),
        }
        self._output = self._stack.enter_context((directory / "output").open("w+b"))
        try:
            self._process = subprocess.Popen(
                self._program.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                process_group=0,  # what it starts itself ends with it; not a session, see tests/real/engine.py
            )
        except OSError as error:
            self._stack.close()
            raise ProgramError(f"{self._called} cannot be started: {error.strerror}") from None
        try:
            self._wait_for_an_answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._looking.is_alive():
            self._looking.join()
        self._end()

    # --- asked ------------------------------------------------------------------------------------------------------

    def get(self, path: str, timeout_sec: float = 5.0) -> tuple[int, str]:
        """Status and body.

        Raises:
            OSError: no answer, or none that is HTTP.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_sec)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode(errors="replace")
            except http.client.HTTPException as error:
                raise OSError(f"no HTTP: {error!r}") from None

    def look(self) -> None:
        """Begins to look at /healthz, ten times a second, until the end."""
        self._looking.start()

    def since(self, moment: float) -> list[Look]:
        """The looks from a moment on, in unix seconds."""
        return [look for look in self.looks if look.at >= moment]

    def first(self, status: int, moment: float) -> float | None:
        """Seconds from a moment to the first look that had this status; None while there is none."""
        return next((look.at - moment for look in self.looks if look.at >= moment and look.status == status), None)

    def story(self, moment: float) -> list[str]:
        """What it said from a moment on, once per change, in seconds since then."""
        told: list[str] = []
        last: tuple[int, str] | None = None
        for look in self.since(moment):
            # Seconds and token counts in the line change with every look, the state's name does not.
            shape = (look.status, re.sub(r"[\d.,]+", "#", look.line))
            if shape != last:
                told.append(f"{look.at - moment:+.1f} s: {look.status} {look.line}")
                last = shape
        return told

    # --- what it costs ----------------------------------------------------------------------------------------------

    def memory_mib(self) -> tuple[float, float]:
        """Resident set in MiB of it and its children: now, and the sum of what each was at its highest."""
        now = highest = 0.0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name == "VmRSS":
                        now += int(value.split()[0]) / 1024
                    elif name == "VmHWM":
                        highest += int(value.split()[0]) / 1024
        return now, highest

    def cpu_sec(self) -> float:
        """CPU time of it and its children so far, user and system, from the scheduler's own nanoseconds."""
        return self._scheduled(0)

    def waited_sec(self) -> float:
        """How long its threads were ready to run so far and had no CPU: what of its lateness is the machine's."""
        return self._scheduled(1)

    def _scheduled(self, field: int) -> float:
        nanoseconds = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with contextlib.suppress(OSError):
                        nanoseconds += int((thread / "schedstat").read_text().split()[field])
        return nanoseconds / 1e9

    def _pids(self) -> list[int]:
        """Everything in the group that it began."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[2]) == self._process.pid:
                    found.append(int(stat.parent.name))
        return found

    # --- details ----------------------------------------------------------------------------------------------------

    @property
    def _called(self) -> str:
        return f"{self.name} ({shlex.join(self._program.command)})"

    def _wait_for_an_answer(self) -> None:
        until = time.monotonic() + self._start_sec
        said = "nothing listened there"
        while time.monotonic() < until:
            if (code := self._process.poll()) is not None:
                raise ProgramError(f"{self._called} ended with exit code {code} before it answered{self._last_words()}")
            try:
                status, _ = self.get("/healthz", 2)
            except OSError as error:
                said = str(error)
            else:
                if status in (200, 503):
                    self.answered_at = time.time()
                    return
                said = f"it answered {status}"
            time.sleep(0.02)
        raise ProgramError(
            f"{self._called} did not answer GET /healthz with 200 or 503 on the address in LISTEN within "
            f"{self._start_sec:g} s: {said}{self._last_words()}"
        )

    def _last_words(self) -> str:
        self._output.flush()
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"; its last line: {lines[-1][:300]}" if lines else ""

    def _look(self) -> None:
        while not self._over.wait(LOOK_SEC):
            try:
                status, body = self.get("/healthz", 2)
            except OSError as error:
                status, body = 0, str(error)
            if (code := self._process.poll()) is not None:
                status, body = 0, f"it ended with exit code {code}"
            self.looks.append(Look(time.time(), status, body.partition("\n")[0][:300]))

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            until = time.monotonic() + _END_SEC
            while (self._process.poll() is None or self._pids()) and time.monotonic() < until:
                time.sleep(0.01)
        self._stack.close()


@contextlib.contextmanager
def all_running(
    programs: Sequence[Program], engine_url: str, config: str, *, look: bool = True
) -> Iterator[list[Running]]:
    """Every program, watching the same engine."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(Running(program, engine_url, config)) for program in programs]
        if look:
            for program in running:
                program.look()
        yield running
