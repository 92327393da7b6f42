"""A sidecar as a process, and small servers in threads for it to ask."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parent.parent / "data" / "vllm-0.32.0-single-idle-fresh.prom").read_bytes()
FAST = {"POLL_INTERVAL_SEC": "0.2", "STALL_SEC": "2", "ACTIVE_PROBE_TIMEOUT_SEC": "0.3", "WARMUP_SEC": "0"}


class Watch:
    """A sidecar process on a free port."""

    def __init__(self, *flags: str, environ: Mapping[str, str] | None = None, stderr: int = subprocess.PIPE) -> None:
        inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "enginewatch", "watch", "--listen", "127.0.0.1:0", *flags],
            env={"CONFIG_FILE": "/nonexistent/config.json", **inherited, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def url(self) -> str:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = json.loads(raw)
            self.lines.append(line)
            if "url" in line:
                url: str = line["url"]
                return url
        pytest.fail(f"it ended with {self.process.wait()} without having listened: {self.lines}")

    def get(self, url: str) -> tuple[int, bytes]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read()

    def wait_for(self, url: str, wanted: bytes, timeout_sec: float = 20) -> tuple[int, bytes]:
        """Asks until the answer holds something."""
        deadline = time.monotonic() + timeout_sec
        while wanted not in (seen := self.get(url))[1]:
            assert time.monotonic() < deadline, f"{wanted!r} not seen, but {seen}"
            time.sleep(0.05)
        return seen

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Exit code and how long it took."""
        began = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(10)
        return code, time.monotonic() - began


class _Server(http.server.ThreadingHTTPServer):
    """Serves in a thread, and does not mind who leaves before the answer's end."""

    daemon_threads = True

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def handle_error(self, *_: object) -> None:
        pass

    def end(self) -> None:
        """May be called again."""
        if not self._thread.is_alive():
            return
        self.shutdown()
        self._thread.join()
        self.server_close()


class Engine:
    """A stand-in that serves a page; canaries are answered, or left hanging."""

    def __init__(self) -> None:
        self.hangs = False
        self.page = PAGE
        self.version = "0.32.0"
        self.owner = "vllm"
        self.asked: list[str] = []
        self.release = threading.Event()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.asked.append(self.path)
                bodies = {
                    "/metrics": engine.page,
                    "/v1/models": json.dumps({"data": [{"id": "tiny", "owned_by": engine.owner}]}).encode(),
                    "/version": json.dumps({"version": engine.version}).encode(),
                }
                self.give(bodies.get(self.path))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if engine.hangs:
                    engine.release.wait(30)
                    return
                self.give(b'{"choices": [{"text": "a", "finish_reason": "length"}]}')

            def give(self, body: bytes | None) -> None:
                self.send_response(200 if body else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = _Server(Handler)
        self.url = self.server.url

    def close(self) -> None:
        self.release.set()
        self.server.end()


def scripted(script: str, *flags: str) -> Watch:
    """`watch` in a process that a few lines have tampered with."""
    watch = Watch.__new__(Watch)
    watch.lines = []
    watch.process = subprocess.Popen(
        [sys.executable, "-c", script, "--listen", "127.0.0.1:0", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return watch


Answering = Callable[["Bootstrap", http.server.BaseHTTPRequestHandler], None]


class Bootstrap:
    """A Mooncake bootstrap server. `answers` are given in turn, each by writing to a connection whose request was
    read; the last one is given for ever."""

    def __init__(self, *answers: Answering) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.release = threading.Event()
        bootstrap = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number = len(bootstrap.asked)
                bootstrap.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                bootstrap.answers[min(number, len(bootstrap.answers) - 1)](bootstrap, self)

            def log_message(self, *_: object) -> None:
                pass

        self.server = _Server(Handler)
        self.url = self.server.url

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, **ids: str) -> None:
        """From the next question on, only these: rank0="a"."""
        self.answers = [kv_ids(**ids)]

    def wait_until_asked(self, times: int, timeout_sec: float = 20) -> None:
        """Returns when it has been asked so often since now."""
        wanted, deadline = len(self.asked) + times, time.monotonic() + timeout_sec
        while len(self.asked) < wanted:
            assert time.monotonic() < deadline, f"asked {len(self.asked)} times only, not {wanted}"
            time.sleep(0.02)

    def close(self) -> None:
        """From now on nobody listens."""
        self.release.set()
        self.server.end()


def kv_ids(**ids: str) -> Answering:
    """An ordinary answer: rank0="a"."""
    entries = {rank.removeprefix("rank"): {"engine_id": id, "worker_addr": {}} for rank, id in ids.items()}
    return body(json.dumps(entries).encode())


def body(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Answering:
    """A whole answer."""

    def answer(_: Bootstrap, handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer
