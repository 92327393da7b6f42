"""The real vLLM as a test fixture: start it, load it, freeze one of its processes, let it go, end it.

Nothing here knows enginewatch. Everything is bounded: a start that takes too long ends with the tail of the engine's
log, a frozen process is always continued, and closing ends the whole process group whatever state it is in.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

READY_SEC = 600
"""Measured: 46 to 80 s idle, nearly all of it imports; several times that when others use the cores."""

ASK_SEC = 20.0
"""How long the processes may take to end by themselves before they are killed."""

STEP_TOKENS = 16
"""Tokens per engine step, so few that the tiny model's prefill of a long prompt takes many times the stall threshold
(measured: 12,000 tokens in 10 s) while its counters stand still."""

PROMPT_TOKENS_MAX = 32768

ONE_CORE = (
    *("--max-model-len", str(PROMPT_TOKENS_MAX)),
    # A batch may not be smaller than the number of requests in it.
    *("--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", "8"),
    # A step allocates blocks, as it does in production, where steps are long: by default 8 of these fit into one block,
    # and on busy cores a prefill then moves nothing for longer than the stall threshold.
    *("--block-size", "32"),
    # The same prompt twice must cost the same twice.
    "--no-enable-prefix-caching",
)
"""Arguments that suit these tests, on two CPU cores."""

ROLES = {"core": "VLLM::EngineCore", "worker": "VLLM::Worker", "api-server": "VLLM::APIServer"}
"""Process titles as `ps` shows them. With one API server, that one is the process we started itself."""


class EngineNotReadyError(AssertionError):
    """The engine did not come up; the message holds the tail of its log."""


def free_port() -> int:
    """A port that nobody listens on; vLLM cannot be told to choose one and say which."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get(url: str, timeout: float = 5.0) -> tuple[int, bytes]:
    """Status and body, also for statuses that urllib takes for errors.

    Raises:
        OSError: No answer within `timeout` seconds.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.read()


def post(url: str, timeout: float = 30.0) -> int:
    """Status of an empty POST.

    Raises:
        OSError: No answer within `timeout` seconds.
    """
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=b"", method="POST"), timeout=timeout) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code


def descendants(root: int) -> dict[int, str]:
    """Pid and process title of `root` and everything below it, from /proc."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name in brackets may hold blanks; the parent is the second field after it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
            titles[int(entry.name)] = title
    found = {root} & parents.keys()
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return {pid: titles[pid] for pid in sorted(found)}
        found |= more


def started_at(pid: int) -> float:
    """When the kernel started the process, as Unix time; good to 10 ms plus the slew of the wall clock."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


class VllmProcess:
    """One running `vllm serve` with the tiny model, in a process group of its own."""

    model = "tiny"

    def __init__(self, command: Sequence[str], env: Mapping[str, str], port: int, log: Path, scratch: str) -> None:
        self._command = list(command)
        self._env = dict(env)
        self._api_key = self._env.get("VLLM_API_KEY")
        self._scratch = scratch
        self._stopped: set[int] = set()
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.log = log
        log.write_bytes(b"")
        self._process = self._launch()

    @classmethod
    def start(
        cls,
        venv: Path,
        model_dir: Path,
        log: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ready_sec: float = READY_SEC,
        untouched: bool = False,
    ) -> Self:
        """Starts an engine and waits until it answers a completion.

        Args:
            venv: From install_vllm.ensure().
            model_dir: From tiny_model.py.
            log: Where the engine's output goes.
            args: More arguments of `vllm serve`.
            env: More environment.
            ready_sec: How long loading may take.
            untouched: As of wait_ready().

        Raises:
            EngineNotReadyError: It ended, or was not ready in time.
        """
        port = free_port()
        # vLLM leaves its sockets behind. Not below `log`: the path of a socket may have 107 characters.
        scratch = tempfile.mkdtemp(prefix="vllm-")
        command = [
            *(str(venv / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
            *("--served-model-name", cls.model, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", *args),
        ]
        # Anything of the caller's that would point Python at another environment must not reach this one.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        }
        quiet = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": scratch,
            "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        engine = cls(command, inherited | quiet | dict(env or {}), port, log, scratch)
        try:
            engine.wait_ready(ready_sec, untouched=untouched)
        except BaseException:
            engine.close()
            raise
        return engine

    def restart(self, env: Mapping[str, str] | None = None) -> None:
        """Starts another process in the place of this one: same command, same port, as a container restarts in place.

        Whatever is left of the old one is killed first, as the rest of a container is with its first process. Returns
        at once: what the sidecar says while the engine loads is of interest. `env` is more environment, from now on.
        """
        self._end_group(ask_sec=0)
        self._env |= env or {}
        self._process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as output:
            return subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group, and not a session: each session is a scheduling group of its own where the kernel groups by
                # them (sched_autogroup_enabled), and next to one with frozen processes the others, the sidecar's among
                # them, were seen to wait for seconds for a CPU (Linux 6.18), so that /healthz was silent.
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process we started: the API server when there is one, else their parent."""
        return self._process.pid

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def pids(self, role: str) -> list[int]:
        """Pids of a role ("core", "worker", "api-server"): those with a number in its order, else the oldest first.

        Raises:
            LookupError: The engine has no such process; the message lists those it has.
        """
        family = descendants(self.pid)
        found = sorted(
            (pid for pid, title in family.items() if title.startswith(ROLES[role])), key=lambda pid: (family[pid], pid)
        )
        if not found and role == "api-server" and self.pid in family:
            found = [self.pid]
        if not found:
            raise LookupError(f"no {role} process among {family}")
        return found

    @contextlib.contextmanager
    def stopped(self, role: str, index: int = 0) -> Iterator[int]:
        """Freezes one process of a role for the length of the block, and continues it whatever happens in there."""
        pid = self.pids(role)[index]
        self.stop(pid)
        try:
            yield pid
        finally:
            self.cont(pid)

    def stop(self, pid: int) -> None:
        """SIGSTOP, and returns when the kernel has stopped it. close() continues it if nobody else does."""
        self._stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
            assert time.monotonic() < deadline, f"process {pid} was sent SIGSTOP and did not stop within 5 s"
            time.sleep(0.01)

    def cont(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self._stopped.discard(pid)

    def kill(self, role: str, index: int = 0) -> int:
        """SIGKILL to one process of a role; its pid."""
        pid = self.pids(role)[index]
        os.kill(pid, signal.SIGKILL)
        return pid

    def ask_to_end(self) -> None:
        """SIGTERM to the process that we started, which is all that a kubelet sends at first."""
        self._process.terminate()

    def wait_ended(self, timeout: float = 60.0) -> int:
        """Returns when the process that we started has ended, with its exit code.

        Raises:
            AssertionError: Not within `timeout` seconds.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"vLLM had not ended after {timeout} s; its log:\n{self.log_tail()}") from None

    def complete(
        self, prompt: str | list[int], max_tokens: int = 1, timeout: float = 30.0, core: str | None = None
    ) -> dict[str, Any]:
        """One completion, to its last byte; `prompt` may be token ids, `core` a data-parallel rank.

        Raises:
            OSError: No answer within `timeout` seconds.
            AssertionError: Another status than 200.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", *self._completion(prompt, max_tokens, core))
            answer = connection.getresponse()
            body = answer.read()
        assert answer.status == 200, f"completion answered {answer.status}: {body[:500]!r}"
        parsed: dict[str, Any] = json.loads(body)
        return parsed

    def version(self) -> str:
        """The release, as /version says it."""
        version: str = json.loads(get(f"{self.url}/version")[1])["version"]
        return version

    def metric(self, name: str, core: str | None = None) -> float:
        """Sum over the series of one metric on the engine's own page, or over those of one core.

        Raises:
            LookupError: The page has no such series.
        """
        page = get(f"{self.url}/metrics")[1].decode()
        series = (line.rpartition(" ") for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        of_core = "" if core is None else f'engine="{core}"'
        values = [float(value) for labels, _, value in series if of_core in labels]
        if not values:
            raise LookupError(f"no series {name}{of_core and f' of {of_core}'} on {self.url}/metrics")
        return sum(values)

    @contextlib.contextmanager
    def loaded(self, clients: int = 2, max_tokens: int = 8000, core: str | None = None) -> Iterator[None]:
        """Keeps `clients` requests decoding for the length of the block, on one core where one is named."""
        load = Load(self, clients, max_tokens, core)
        try:
            self.wait_decoding(clients, core=core)
            yield
        finally:
            load.close()

    def wait_decoding(self, clients: int = 1, timeout: float = 60.0, core: str | None = None) -> None:
        """Returns when `clients` requests run and tokens have come since the call.

        Raises:
            AssertionError: Not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout

        def seen(name: str) -> float:
            # With several API servers a core's series appear on the page some time after the first answer.
            try:
                return self.metric(name, core)
            except LookupError:
                return 0.0

        before = seen("vllm:generation_tokens_total")
        while True:
            running = seen("vllm:num_requests_running")
            tokens = seen("vllm:generation_tokens_total")
            if running >= clients and tokens > before:
                return
            assert time.monotonic() < deadline, f"after {timeout} s {running} run, tokens {before} -> {tokens}"
            time.sleep(0.05)

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Returns when nothing runs or waits.

        Raises:
            AssertionError: Not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") > 0:
            assert time.monotonic() < deadline, f"requests still run after {timeout} s"
            time.sleep(0.1)

    def close(self) -> None:
        """Ends every process of the group: continued first, asked next, killed last."""
        self._end_group(ASK_SEC)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _end_group(self, ask_sec: float) -> None:
        if ask_sec:
            for pid in list(self._stopped):
                self.cont(pid)
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + ask_sec
            while self._members() and time.monotonic() < deadline:
                self._process.poll()  # reaps it, or it would stay a member for ever
                time.sleep(0.1)
        self._signal(signal.SIGKILL)  # ends stopped ones, too
        self._stopped.clear()
        self._process.wait(timeout=20)
        deadline = time.monotonic() + 20
        while self._members():
            assert time.monotonic() < deadline, f"processes {self._members()} survive SIGKILL"
            time.sleep(0.02)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _members(self) -> list[int]:
        """Live processes of the group: children of a dead API server no longer descend from it."""
        members = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[2]) == self.pid:
                    members.append(int(stat.parent.name))
        return members

    def _completion(
        self, prompt: str | list[int], max_tokens: int, core: str | None = None
    ) -> tuple[bytes, dict[str, str]]:
        # ignore_eos: random weights may end after a token or two, and then nothing would be under load.
        asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        if core is not None:
            headers["X-data-parallel-rank"] = core
        return json.dumps(asked).encode(), headers

    def wait_ready(self, ready_sec: float = READY_SEC, *, untouched: bool = False) -> None:
        """Returns when the engine has answered a completion; `untouched`: when it could, but nothing was asked of it.

        Raises:
            EngineNotReadyError: It ended, or was not ready in time.
        """
        deadline = time.monotonic() + ready_sec
        while True:
            if self._process.poll() is not None:
                raise EngineNotReadyError(
                    f"vLLM ended with code {self._process.returncode}; its log:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise EngineNotReadyError(f"vLLM was not ready within {ready_sec} s; its log:\n{self.log_tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if get(f"{self.url}/health", timeout=2)[0] == 200:
                    break
            time.sleep(0.25)
        if untouched:
            return
        # The first request compiles and allocates; a test that measures must not be the one to pay for it.
        self.complete("The kubelet asks", max_tokens=4, timeout=max(deadline - time.monotonic(), 10))


class Load:
    """Threads that each keep one long completion going, and survive a frozen engine.

    Not streamed: a streaming API server falls seconds behind its engine core, and what it still has to send would count
    as progress of a core that is already frozen.
    """

    def __init__(self, engine: VllmProcess, clients: int, max_tokens: int, core: str | None = None) -> None:
        self._engine = engine
        self._core = core
        self._max_tokens = max_tokens
        self._closing = threading.Event()
        self._connections: dict[int, http.client.HTTPConnection] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}", daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        for connection in list(self._connections.values()):
            # Closing alone would not wake a thread that waits in recv().
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)

    def _run(self, number: int) -> None:
        while not self._closing.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self._engine.port, timeout=300)
            self._connections[number] = connection
            with contextlib.closing(connection):
                # AttributeError: http.client's reaction to a socket that close() shut down under it.
                with contextlib.suppress(OSError, http.client.HTTPException, AttributeError):
                    asked = self._engine._completion(f"client {number}", self._max_tokens, self._core)
                    connection.request("POST", "/v1/completions", *asked)
                    connection.getresponse().read()
                self._closing.wait(0.05)
