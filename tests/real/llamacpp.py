"""The real llama-server as a test fixture: start it, load it, freeze it, let it go, end it.

Nothing here knows enginewatch. One process with one model; closing ends it whatever state it is in.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tests.real.engine import free_port, get

READY_SEC = 60
"""Measured: half a second."""


class LlamaServer:
    """One running `llama-server` with the tiny model.

    Args:
        program: From install_llamacpp.ensure().
        model: From tiny_gguf.py.
        log: Where its output goes.
        arguments: More of its own.
        key: The API key it asks for.
    """

    def __init__(self, program: Path, model: Path, log: Path, arguments: Sequence[str] = (), key: str = "") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = key
        self._log = log
        command = [
            *(str(program), "--model", str(model), "--alias", "tiny", "--host", "127.0.0.1", "--port", str(self.port)),
            # One thread to compute: the sidecar and the test need the rest.
            *("--threads", "1", "--threads-batch", "1", "--ctx-size", "32768", "--kv-unified", "--no-warmup"),
            *(("--api-key", key) if key else ()),
            *arguments,
        ]
        with log.open("wb") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Freezes the process for the length of the block, and continues it whatever happens in there."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def page(self) -> str:
        status, body = get(f"{self.url}/metrics", timeout=30)
        assert status == 200, f"/metrics answered {status}: {body[:300]!r}"
        return body.decode()

    def metric(self, name: str) -> float:
        """One series of its own page, without the prefix.

        Raises:
            LookupError: The page has none of that name.
        """
        for line in self.page().splitlines():
            if line.startswith(f"llamacpp:{name} "):
                return float(line.rpartition(" ")[2])
        raise LookupError(f"no series llamacpp:{name} on {self.url}/metrics")

    def json(self, path: str) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(get(f"{self.url}{path}", timeout=30)[1])
        return parsed

    def complete(self, prompt: str | list[int], max_tokens: int = 1, timeout: float = 30.0) -> dict[str, Any]:
        """One completion, to its last byte; `prompt` may be token ids.

        Raises:
            OSError: No answer within `timeout` seconds.
            AssertionError: Another status than 200.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            self._ask(connection, prompt, max_tokens)
            answer = connection.getresponse()
            body = answer.read()
        assert answer.status == 200, f"completion answered {answer.status}: {body[:500]!r}"
        parsed: dict[str, Any] = json.loads(body)
        return parsed

    @contextlib.contextmanager
    def loaded(self, clients: int, max_tokens: int = 4000) -> Iterator[None]:
        """Keeps `clients` requests going for the length of the block."""
        over = threading.Event()
        connections: dict[int, http.client.HTTPConnection] = {}

        def work(number: int) -> None:
            while not over.is_set():
                connection = connections[number] = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
                # AttributeError: http.client's reaction to a socket that is shut down under it, below.
                with (
                    contextlib.closing(connection),
                    contextlib.suppress(OSError, http.client.HTTPException, AttributeError),
                ):
                    self._ask(connection, f"client {number}", max_tokens)
                    connection.getresponse().read()

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for connection in list(connections.values()):
                with contextlib.suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(timeout=10)

    def wait(self, name: str, least: float, timeout: float = 60.0) -> None:
        """Returns when a series of its page is at least that.

        Raises:
            AssertionError: Not within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (value := self.metric(name)) < least:
            assert time.monotonic() < deadline, f"{name} is {value} after {timeout} s"
            time.sleep(0.05)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=20)

    def _ask(self, connection: http.client.HTTPConnection, prompt: str | list[int], max_tokens: int) -> None:
        # Random weights may end a text at once, and then nothing would be under load.
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SEC
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if get(f"{self.url}/health", timeout=2)[0] == 200:
                    return
            ended = self._process.poll()
            told = "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])
            assert ended is None, f"llama-server ended with code {ended}:\n{told}"
            assert time.monotonic() < deadline, f"llama-server is not ready after {READY_SEC} s:\n{told}"
            time.sleep(0.05)
