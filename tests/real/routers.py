"""Real routers in front of simulated engines, each engine with a real sidecar, and the guard as one file.

The guard runs as in a pod: `python3 -I -S enginewatch-guard.pyz`, with the routers' own interpreter. What is restarted
in place keeps its address and its ports, as a container does in its pod.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tests.real.engine import free_port, get

from enginewatch.lab.sim.process import SimProcess

SOON_SEC = 60.0
"""Patience for what takes a second or two on an idle machine."""
HANG_SEC = 3.0
"""A request without an answer after so long hangs: one that is served takes a tenth of a second."""
ENVIRONMENT = {"POLL_INTERVAL_SEC": "0.5"}
PACK = Path(__file__).resolve().parents[2] / "src" / "enginewatch" / "guard" / "pack.py"


def eventually(what: str, question: Callable[[], bool], within: float = SOON_SEC) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: It is not, `within` seconds later.
    """
    deadline = time.monotonic() + within
    while not question():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
        time.sleep(0.1)


def clean_environment() -> dict[str, str]:
    """Nothing of the caller's that could lead a program elsewhere: no proxy, no GUARD_*, no Python settings."""
    return {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}


def build_guard(directory: Path) -> Path:
    """The guard's one file, as `make guard` makes it."""
    target = directory / "enginewatch-guard.pyz"
    subprocess.run([sys.executable, "-I", PACK, target], check=True, timeout=60)
    return target


class Child:
    """A process, and what it prints on stderr or on both."""

    def __init__(self, command: Sequence[str | Path], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=10)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=SOON_SEC)

    def tail(self) -> str:
        return "\n".join(self.lines[-15:])

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))


class Sidecar:
    """`enginewatch watch` beside one engine; a restart keeps its port, as its container's does.

    With `asks_bootstrap` it has IDENTITY_KV_BOOTSTRAP_URL.
    """

    def __init__(self, engine: SimProcess, port: int = 0, *, asks_bootstrap: bool = False) -> None:
        self._engine = engine
        self._env = dict(ENVIRONMENT)
        if asks_bootstrap and engine.bootstrap_port >= 0:
            self._env["IDENTITY_KV_BOOTSTRAP_URL"] = f"http://127.0.0.1:{engine.bootstrap_port}"
        self._host = str(urlsplit(engine.url).hostname)
        self.port = port
        self._child = self._start()

    def close(self) -> None:
        self._child.__exit__()

    def restart(self) -> None:
        """Kill it and start another; returns when that one knows its engine."""
        self.close()
        self._child = self._start()
        eventually("the restarted sidecar knows its engine", lambda: self.identity() is not None)

    def identity(self) -> dict[str, Any] | None:
        """What `/engine` says; None while it says that it does not know yet, or nothing at all."""
        try:
            status, body = get(f"http://{self._host}:{self.port}/engine")
        except OSError:
            return None
        told: dict[str, Any] = json.loads(body)
        return told if status == 200 else None

    def known(self) -> dict[str, Any]:
        """The same, which must be known."""
        told = self.identity()
        assert told is not None, self._child.tail()
        return told

    def _start(self) -> Child:
        child = Child(
            [
                *(sys.executable, "-m", "enginewatch", "watch", "--engine-url", self._engine.url),
                *("--listen", f"{self._host}:{self.port}"),
            ],
            clean_environment() | self._env,
        )
        try:
            eventually("the sidecar says where it listens", lambda: self._url_in(child) is not None)
        except AssertionError:
            child.__exit__()
            raise
        self.port = int(urlsplit(str(self._url_in(child))).port or 0)
        return child

    @staticmethod
    def _url_in(child: Child) -> str | None:
        for line in list(child.lines):
            with contextlib.suppress(ValueError, AttributeError):
                url = json.loads(line).get("url")
                if isinstance(url, str):
                    return url
        return None


@dataclass
class Worker:
    """An engine and its sidecar: a pod."""

    engine: SimProcess
    sidecar: Sidecar

    @property
    def address(self) -> str:
        """HOST:PORT of the engine."""
        return str(urlsplit(self.engine.url).netloc)

    def kill(self) -> None:
        """SIGKILL the engine's server, as the kernel's OOM killer does; it is started again in place.

        Returns when the new process serves and the sidecar says another engine_id.
        """
        before = self.sidecar.known()["engine_id"]
        starts = self.engine.state()["restarts"] + 1
        os.kill(self.engine.pid, signal.SIGKILL)
        self.engine.wait_serving(starts + 1, SOON_SEC)
        eventually(
            "the sidecar names the new process", lambda: (self.sidecar.identity() or {}).get("engine_id") != before
        )


@dataclass
class Guard:
    """The one file, an interpreter for it, and its settings."""

    python: Path
    file: Path
    settings: dict[str, str]
    env: dict[str, str] = field(default_factory=clean_environment)

    @property
    def command(self) -> list[str | Path]:
        return [self.python, "-I", "-S", self.file]

    def run(self, sub: str) -> tuple[int, str]:
        """One probe: its exit code and its line."""
        done = subprocess.run(
            [*self.command, sub],
            env=self.env | self.settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SOON_SEC,
        )
        assert done.stderr == ""
        assert done.stdout.count("\n") == 1, done.stdout
        return done.returncode, done.stdout.rstrip("\n")

    @classmethod
    def of(
        cls, kind: str, file: Path, run_dir: Path, router: Router, prefills: Sequence[Worker], decoder: Worker
    ) -> Self:
        """The settings that suit a router and its engines.

        Args:
            kind: GUARD_ROUTER.
            file: From build_guard().
            run_dir: GUARD_RUN_DIR.
            router: Whose port and interpreter it is.
            prefills: All with the same port of their sidecars.
            decoder: The only one.
        """
        settings = {
            "GUARD_ROUTER": kind,
            "GUARD_PREFILL": ",".join(worker.address for worker in prefills),
            "GUARD_DECODE": decoder.address,
            "GUARD_PREFILL_WATCHER_PORT": str(prefills[0].sidecar.port),
            "GUARD_DECODE_WATCHER_PORT": str(decoder.sidecar.port),
            "GUARD_ROUTER_PORT": str(router.port),
            "GUARD_RUN_DIR": str(run_dir),
        }
        if router.bootstrap_port >= 0:
            settings["GUARD_BOOTSTRAP_PORT"] = str(router.bootstrap_port)
        return cls(router.python, file, settings)

    def live(self) -> tuple[int, str]:
        return self.run("live")

    def ready(self) -> tuple[int, str]:
        return self.run("ready")

    def boot(self, command: Sequence[str | Path]) -> Child:
        """The router's container: the guard, which becomes the command."""
        return Child([*self.command, "boot", "--", *command], self.env | self.settings)


def post(url: str, body: Any, timeout: float) -> tuple[int, Any]:
    """Status and JSON of an answer.

    Raises:
        TimeoutError: None came in time.
    """
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.read().decode(errors="replace")
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise error.reason from None
        raise


class Router:
    """Where a router listens, how it is started, and what comes through it."""

    COMMON = (
        *("--host", "127.0.0.1", "--prometheus-host", "127.0.0.1", "--policy", "round_robin"),
        *("--health-check-interval-secs", "1", "--worker-startup-check-interval", "1", "--disable-retries"),
    )

    def __init__(self, venv: Path, launcher: str, *arguments: str, model: str, bootstrap_port: int = -1) -> None:
        self.model = model
        self.python = venv / "bin" / "python"
        self.bootstrap_port = bootstrap_port
        """What follows each --prefill URL; negative = nothing."""
        self.port = free_port()
        self.command: list[str | Path] = [
            *(self.python, "-m", launcher, "--port", str(self.port), "--prometheus-port", str(free_port())),
            *(*self.COMMON, *arguments),
        ]

    def ask(self, *, path: str = "/v1/completions", timeout: float = SOON_SEC, **fields: Any) -> tuple[int, Any]:
        """One small request.

        Raises:
            TimeoutError: No answer in time.
        """
        body = {"model": self.model, "prompt": "Test", "max_tokens": 2} | fields
        return post(f"http://127.0.0.1:{self.port}{path}", body, timeout)

    def hangs(self) -> bool:
        """Whether a request through it gets no answer."""
        try:
            self.ask(timeout=HANG_SEC)
        except TimeoutError:
            return True
        return False

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def held_by(self, pid: int) -> bool:
        """Whether that process itself has the listening socket."""
        inodes = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] == f"0100007F:{self.port:04X}" and fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
        opened = set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                opened.add(os.readlink(entry))
        return bool(inodes & opened)

    def serving(self, process: Child) -> None:
        """Wait until it takes requests and its engines are healthy to it.

        Raises:
            AssertionError: It ended, or did not in time.
        """

        def serves() -> bool:
            assert process.process.poll() is None, process.tail()
            with contextlib.suppress(OSError):
                return self.ask()[0] == 200
            return False

        eventually("the router serves", serves)


@contextlib.contextmanager
def workers(
    started: Sequence[Callable[[], SimProcess]], sidecar_port: int = 0, *, asks_bootstrap: bool = False
) -> Iterator[list[Worker]]:
    """Engines and their sidecars, each of these on that port of its engine's address; all end with the block."""
    with contextlib.ExitStack() as stack:
        pods = []
        for start in started:
            engine = stack.enter_context(start())
            sidecar = Sidecar(engine, sidecar_port, asks_bootstrap=asks_bootstrap)
            stack.callback(sidecar.close)
            pods.append(Worker(engine, sidecar))
        for pod in pods:
            eventually("the sidecar knows its engine", lambda pod=pod: pod.sidecar.identity() is not None)  # type: ignore[misc]
        yield pods
