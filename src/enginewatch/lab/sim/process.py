"""Starting and steering a simulated engine from tests, drills, the demo and measurements.

Synchronous, standard library only. A `SimProcess` is a context manager; leaving it ends every process of the engine,
stopped ones too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import IO, Any

_CLOSE_SEC = 10.0


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One engine rank: the core it serves and its process id."""

    core: str
    pid: int


class SimError(Exception):
    """A simulated engine did not start, or refused an order."""


class SimProcess:
    """One simulated engine with all its processes.

    Options are those of the command line, as keywords: `SimProcess("vllm", dp=4, step_ms=5)`; see
    `enginewatch.lab.sim.options.SimOptions`.
    """

    def __init__(self, engine: str = "vllm", **options: Any) -> None:
        self.engine = engine
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._serving: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._stopped: set[int] = set()

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, timeout: float = 30.0, *, wait: bool = True) -> SimProcess:
        """Start it and wait until it serves, or, with wait false, return at once (a long `load_sec`, a fixed port).

        Raises:
            SimError: it did not serve in time; nothing is left running.
        """
        arguments = [sys.executable, "-m", "enginewatch.lab.sim", self.engine, "--quiet", "--until-stdin-closes"]
        for name, value in self._options.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                arguments.append(flag)
            elif value is not False:
                arguments += [flag, str(value)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        if wait:
            try:
                self.wait_serving(1, timeout)
            except SimError:
                self.close()
                raise
        return self

    def close(self) -> None:
        """End all its processes and wait for them."""
        process = self._process
        if process is None:
            return
        for pid in list(self._stopped):
            self._signal(pid, signal.SIGCONT)
        self._stopped.clear()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_CLOSE_SEC)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._reader is not None:
            self._reader.join(_CLOSE_SEC)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = None

    def __enter__(self) -> SimProcess:
        return self if self._process is not None else self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- what it says of itself -------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL, without a slash at its end; the same over restarts."""
        return str(self._latest()["url"])

    @property
    def port(self) -> int:
        """TCP port; the same over restarts."""
        return int(self._latest()["port"])

    @property
    def bootstrap_port(self) -> int:
        """TCP port of its Mooncake bootstrap server, the same over restarts; negative when it has none."""
        return int(self._latest()["bootstrap_port"])

    @property
    def pid(self) -> int:
        """The front end of the latest start."""
        return int(self._latest()["pid"])

    @property
    def supervisor_pid(self) -> int:
        """The process that outlives restarts."""
        return int(self._latest()["supervisor_pid"])

    @property
    def ranks(self) -> list[RankProcess]:
        """The engine ranks of the latest start."""
        return [RankProcess(core=str(rank["core"]), pid=int(rank["pid"])) for rank in self._latest()["ranks"]]

    def rank(self, core: str | int = 0) -> RankProcess:
        """The rank of one core."""
        return next(rank for rank in self.ranks if rank.core == str(core))

    def exit_code(self) -> int | None:
        """The exit code of the whole engine, None while it runs."""
        return self._process.poll() if self._process is not None else None

    def wait_serving(self, starts: int, timeout: float = 30.0) -> None:
        """Wait until it has begun to serve so many times; 2 means: serves again after one restart.

        Raises:
            SimError: it ended, or it did not serve in time.
        """
        deadline = time.monotonic() + timeout
        with self._news:
            while len(self._serving) < starts:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SimError(f"the simulated {self.engine} engine did not serve within {timeout:g} s")
                if self._process is None or self._process.poll() is not None:
                    raise SimError(f"the simulated {self.engine} engine ended with exit code {self.exit_code()}")
                self._news.wait(min(left, 0.2))

    @property
    def starts(self) -> int:
        """How many times it has begun to serve."""
        with self._news:
            return len(self._serving)

    def state(self) -> dict[str, Any]:
        """Processes, open requests, load: `GET /_sim/state`."""
        return self._ask("/_sim/state", None)

    def requests(self) -> list[dict[str, Any]]:
        """The last generation requests of this process, oldest first: `GET /_sim/requests`."""
        found: list[dict[str, Any]] = self._ask("/_sim/requests", None)["requests"]
        return found

    # --- steering ---------------------------------------------------------------------------------------------------

    def fault(self, **faults: Any) -> dict[str, Any]:
        """Set faults (see faults.py), None puts one back; returns those in force."""
        return self._ask("/_sim/faults", faults)

    def load(
        self,
        concurrency: int = 4,
        *,
        prompt_tokens: int = 64,
        max_tokens: int = 128,
        forever: bool = True,
        core: str | int = "",
    ) -> None:
        """Replace the synthetic load; concurrency 0 stops it."""
        self._ask(
            "/_sim/load",
            {
                "concurrency": concurrency,
                "prompt_tokens": prompt_tokens,
                "max_tokens": max_tokens,
                "forever": forever,
                "core": str(core),
            },
        )

    def prefill(self, seconds: float, **options: Any) -> None:
        """Send one prompt whose prefill takes that long; chunks=1 makes it a single forward pass."""
        self._ask("/_sim/prefill", {"seconds": seconds, **options})

    def restart(self, load_sec: float = 0.0) -> None:
        """Have the front end and its ranks killed and started again on the same port; returns at once."""
        self._ask("/_sim/restart", {"load_sec": load_sec})

    def crash(self, down_sec: float, load_sec: float = 0.0) -> None:
        """Have it die, stay away for `down_sec`, then start and load for `load_sec`; returns at once."""
        self._ask("/_sim/crash", {"down_sec": down_sec, "load_sec": load_sec})

    def reset_counters(self) -> None:
        """All counters from zero in the same process."""
        self._ask("/_sim/reset_counters", {})

    def log(self, *lines: str, detokenizer: bool = False, partial: str | None = None) -> None:
        """Write lines into its log file; `detokenizer` adds SGLang's line that means a dead scheduler."""
        order: dict[str, Any] = {"lines": list(lines), "detokenizer": detokenizer}
        if partial is not None:
            order["partial"] = partial
        self._ask("/_sim/log", order)

    def calm(self) -> None:
        """Undo what was done to it: processes resumed, faults and pauses gone, no load. Counters stay."""
        for pid in list(self._stopped):
            self.resume_pid(pid)
        self._ask("/_sim/calm", {})

    def stop(self, core: str | int = 0) -> None:
        """SIGSTOP the rank of a core: the hang."""
        self.pause_pid(self.rank(core).pid)

    def cont(self, core: str | int = 0) -> None:
        """SIGCONT the rank of a core."""
        self.resume_pid(self.rank(core).pid)

    def pause_pid(self, pid: int) -> None:
        """SIGSTOP any process of the engine; `close` resumes it."""
        self._stopped.add(pid)
        self._signal(pid, signal.SIGSTOP)

    def resume_pid(self, pid: int) -> None:
        """SIGCONT it."""
        self._stopped.discard(pid)
        self._signal(pid, signal.SIGCONT)

    # --- details ----------------------------------------------------------------------------------------------------

    def _latest(self) -> dict[str, Any]:
        with self._news:
            if not self._serving:
                raise SimError(f"the simulated {self.engine} engine has not begun to serve")
            return self._serving[-1]

    def _read(self, lines: IO[bytes]) -> None:
        for line in lines:
            with self._news:
                self._serving.append(json.loads(line))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except urllib.error.HTTPError as error:
            with error:
                raise SimError(f"{path}: {error.read().decode(errors='replace')}") from None

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
