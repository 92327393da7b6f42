"""The sidecar as an operator runs it: a process of its own, configured by environment, looked at from outside."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

MIB = 1024 * 1024
OURS = (sys.executable, "-m", "enginewatch", "watch")
_START_SEC = 30.0


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Watcher:
    """A watcher of one engine. Leaving the context ends it.

    Args:
        engine_url: what it watches.
        settings: what it takes from its environment, in lower case.
        command: the program; it takes ENGINE_URL, LISTEN and CONFIG_FILE from its environment.
        cgroup: directory of the memory cgroup it is to run in.
    """

    def __init__(
        self,
        engine_url: str,
        settings: Mapping[str, object] | None = None,
        *,
        command: Sequence[str] = OURS,
        cgroup: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = list(command)
        if cgroup is not None:
            join = f'echo $$ > {cgroup}/cgroup.procs && exec "$0" "$@"'
            self._command = ["/bin/sh", "-c", join, *self._command]
        # Nothing of the caller's own environment may configure what is measured.
        self._environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
        self._environment |= {
            "ENGINE_URL": engine_url,
            "LISTEN": f"127.0.0.1:{self.port}",
            "CONFIG_FILE": "/nonexistent/enginewatch.json",
        }
        self._environment |= {name.upper(): str(value) for name, value in (settings or {}).items()}

    def __enter__(self) -> Self:
        self.began = time.perf_counter()
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self.started_sec = self._wait_for_an_answer() - self.began
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def health(self) -> tuple[int, str]:
        """Status and body of /healthz."""
        return self.get("/healthz")

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of one answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def state(self) -> str:
        """The state of its verdict; ours only."""
        return str(json.loads(self.get("/verdict")[1])["state"])

    def metric(self, name: str) -> float:
        """The sum over the series of that name on its own /metrics."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + " ", name + "{")))

    def polls(self) -> int:
        """How many pages it asked for; ours only."""
        return int(self.metric("enginewatch_scrapes_total"))

    def wait(self, wanted: Callable[[], bool], timeout: float, what: str) -> float:
        """Seconds until something is so, looked at a hundred times a second.

        Raises:
            TimeoutError: it was not within `timeout` seconds.
        """
        began = time.monotonic()
        while not wanted():
            if time.monotonic() - began > timeout:
                raise TimeoutError(f"not {what} within {timeout:g} s: {self.health()}")
            time.sleep(0.01)
        return time.monotonic() - began

    def memory_mib(self) -> tuple[float, float]:
        """Resident set in MiB: now, and at its highest."""
        found: dict[str, float] = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0]) / 1024
        return found["VmRSS"], found["VmHWM"]

    def cpu_sec(self) -> float:
        """CPU time used so far, user and system, of all its threads.

        /proc/PID/stat counts in ticks of 10 ms, which is as much as an hour's share of a percent is in ten seconds;
        schedstat has the same time in nanoseconds, where the kernel keeps it.
        """
        with contextlib.suppress(OSError):
            threads = Path(f"/proc/{self.pid}/task").iterdir()
            used = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
            if used:
                return used / 1e9
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_running(self) -> bool:
        """Whether it is still there."""
        return self._process.poll() is None

    def _wait_for_an_answer(self) -> float:
        """When the first answer to /healthz was there."""
        request = b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        while time.perf_counter() - self.began < _START_SEC:
            if self._process.poll() is not None:
                raise RuntimeError(f"{' '.join(self._command)} ended with exit code {self._process.returncode}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=_START_SEC) as connection:
                    connection.sendall(request)
                    if connection.recv(1):
                        return time.perf_counter()
            except OSError:
                pass
            time.sleep(0.001)
        raise TimeoutError(f"no answer from {self.url}/healthz within {_START_SEC:g} s")

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
