"""Requests that an engine is kept busy with, or is asked in vain while it is frozen."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

_LONG_SEC = 600.0


class Clients:
    """Threads that each keep one completion going and survive a frozen engine.

    Not streamed: a streaming front end falls seconds behind its core, and what it still has to send would count as
    progress of a core that is already frozen.

    Args:
        url: the engine.
        model: its served name.
        count: how many.
        max_tokens: of each completion.
        core: the data-parallel core they are aimed at; None lets the engine choose.
        forever: whether a client begins again when it has its answer.
    """

    def __init__(
        self, url: str, model: str, count: int, *, max_tokens: int, core: int | None = None, forever: bool = True
    ) -> None:
        self._address = urllib.parse.urlsplit(url).netloc
        self._model, self._max_tokens, self._core, self._forever = model, max_tokens, core, forever
        self._closing = threading.Event()
        self._connections: dict[int, http.client.HTTPConnection] = {}
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Hangs up, whatever they wait for."""
        self._closing.set()
        for connection in list(self._connections.values()):
            # Closing alone would not wake a thread that waits in recv().
            with contextlib.suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _run(self, number: int) -> None:
        # ignore_eos: random weights may end after a token or two, and then nothing would be under load.
        asked = {"model": self._model, "prompt": f"client {number}", "max_tokens": self._max_tokens, "temperature": 0}
        body = json.dumps(asked | {"ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        if self._core is not None:
            headers["X-data-parallel-rank"] = str(self._core)
        while not self._closing.is_set():
            connection = http.client.HTTPConnection(self._address, timeout=_LONG_SEC)
            self._connections[number] = connection
            # AttributeError: http.client's reaction to a socket that close() shut down under it.
            gone = contextlib.suppress(OSError, http.client.HTTPException, AttributeError)
            with contextlib.closing(connection), gone:
                connection.request("POST", "/v1/completions", body, headers)
                connection.getresponse().read()
            if not self._forever:
                return
            self._closing.wait(0.05)


@contextlib.contextmanager
def asking(
    url: str, model: str, count: int, *, max_tokens: int, core: int | None = None, forever: bool = True
) -> Iterator[None]:
    """Clients for the length of the block."""
    clients = Clients(url, model, count, max_tokens=max_tokens, core=core, forever=forever)
    try:
        yield
    finally:
        clients.close()


class Page:
    """An engine's page, asked for what it says of its cores. Names are vLLM's."""

    def __init__(self, url: str) -> None:
        self._address = urllib.parse.urlsplit(url).netloc

    def per_core(self, name: str) -> dict[int, float]:
        """One metric's value per core.

        Raises:
            OSError: there is no page.
        """
        connection = http.client.HTTPConnection(self._address, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        found: dict[int, float] = {}
        for line in page.splitlines():
            if line.startswith(name + "{"):
                core = int(line.partition('engine="')[2].partition('"')[0] or 0)
                found[core] = found.get(core, 0.0) + float(line.rpartition(" ")[2])
        return found

    def tokens(self) -> dict[int, float]:
        """Tokens generated so far, per core."""
        return self.per_core("vllm:generation_tokens_total")

    def wait_busy(self, cores: int, timeout_sec: float = 120.0) -> None:
        """Returns when tokens come from so many cores.

        Raises:
            TimeoutError: they do not in time.
        """
        before = self.tokens()
        self._wait(
            lambda: sum(now > before.get(core, 0.0) for core, now in self.tokens().items()) >= cores,
            timeout_sec,
            f"tokens from {cores} cores",
        )

    def wait_idle(self, timeout_sec: float = 120.0) -> None:
        """Returns when nothing runs or waits.

        Raises:
            TimeoutError: something still does.
        """
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        self._wait(lambda: not any(sum(self.per_core(name).values()) for name in names), timeout_sec, "an idle engine")

    @staticmethod
    def _wait(wanted: Callable[[], bool], timeout_sec: float, what: str) -> None:
        until = time.monotonic() + timeout_sec
        while not wanted():
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not come within {timeout_sec:g} s")
            time.sleep(0.1)
