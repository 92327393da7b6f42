"""What a drain asks of servers on this machine, and what it makes of answers that are not what they should be."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from enginewatch.guard import drain as drain_module
from enginewatch.guard.drain import Questions, Round
from enginewatch.guard.gauges import Load
from enginewatch.guard.plain_http import Address, Asker, NoAnswer

PAGE = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}).encode()
TRTLLM_MODELS = MODELS.replace(b"vllm", b"tensorrt_llm")
SOON = 5.0


class Server:
    """Answers GET by path; the rest is 404. `paths` is what was asked for."""

    def __init__(
        self, answers: dict[str, bytes | tuple[int, bytes]], certificate: tuple[Path, Path] | None = None
    ) -> None:
        self.paths: list[str] = []
        paths = self.paths

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                paths.append(self.path)
                found = answers.get(self.path, (404, b""))
                status, body = found if isinstance(found, tuple) else (200, found)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(ssl.SSLError):
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.address = Address(False, "127.0.0.1", self._server.server_address[1], "")
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[Server] = []

    def start(answers: dict[str, bytes | tuple[int, bytes]], certificate: tuple[Path, Path] | None = None) -> Server:
        servers.append(Server(answers, certificate))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Raw:
    """A server that sends bytes of its own, or nothing, to everybody and then holds the connection open."""

    def __init__(self, sends: Iterator[bytes] | list[bytes], *, every_sec: float = 0.0, closes: bool = False) -> None:
        self._sends, self._every_sec, self._closes = list(sends), every_sec, closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(False, "127.0.0.1", self._listener.getsockname()[1], "")
        self.connections: list[socket.socket] = []
        self._ended = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.close()
        for connection in self.connections:
            connection.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.recv(65536)
            for part in self._sends:
                connection.sendall(part)
                self._ended.wait(self._every_sec)
            if self._closes:
                connection.close()
        except OSError:
            pass


def asked(sidecar: Address | None, engine: Address, wait_sec: float = SOON) -> Round:
    return Questions(sidecar, engine).ask(time.monotonic() + wait_sec)


def verdict(**fields: Any) -> bytes:
    return json.dumps({"state": "busy", "hung": False, "reason": "core 0 moves", **fields}).encode()


def test_a_page_is_counted(serve: Serve) -> None:
    engine = serve({"/v1/models": MODELS, "/metrics": PAGE})
    assert asked(None, engine.address) == Round(None, Load(2, 1))
    assert engine.paths == ["/v1/models", "/metrics"]


@pytest.mark.parametrize("models", [(401, b""), (404, b""), (500, b"x"), b"[]", b"{", b'{"data": [1]}'])
def test_a_list_of_models_that_says_nothing_leads_to_the_usual_page(
    serve: Serve, models: bytes | tuple[int, bytes]
) -> None:
    engine = serve({"/v1/models": models, "/metrics": PAGE})
    assert asked(None, engine.address).load == Load(2, 1)


def test_who_it_is_is_asked_once(serve: Serve) -> None:
    engine = serve({"/v1/models": MODELS, "/metrics": PAGE})
    questions = Questions(None, engine.address)
    for _ in range(3):
        assert questions.ask(time.monotonic() + SOON).load
    assert engine.paths == ["/v1/models", "/metrics", "/metrics", "/metrics"]


def test_a_path_is_that_of_the_page_and_nothing_else_is_asked(serve: Serve) -> None:
    engine = serve({"/own/metrics": PAGE})
    assert asked(None, engine.address._replace(path="/own/metrics")).load == Load(2, 1)
    assert engine.paths == ["/own/metrics"]


def test_tensorrt_llms_statistics_are_never_read(serve: Serve) -> None:
    engine = serve({"/v1/models": TRTLLM_MODELS, "/metrics": b"[]", "/prometheus/metrics": PAGE})
    questions = Questions(None, engine.address)
    for _ in range(3):
        told = questions.ask(time.monotonic() + SOON)
        assert told.load is None
        assert "TensorRT-LLM" in told.trouble
    assert engine.paths == ["/v1/models"]


def test_what_the_sidecar_counts_of_tensorrt_llm_is_waited_for(serve: Serve) -> None:
    engine = serve({"/v1/models": TRTLLM_MODELS})
    cores = [{"core": "0", "running": 3.0, "waiting": 4.0}, {"core": "1", "running": None, "waiting": None}]
    busy = serve({"/verdict": verdict(cores=cores)})
    assert asked(busy.address, engine.address).load == Load(3, 4)


@pytest.mark.parametrize("running", [0, None, "5", -1, True, 1e300, [], {}])
def test_what_the_sidecar_cannot_count_of_tensorrt_llm_is_not_taken_for_empty(serve: Serve, running: object) -> None:
    engine = serve({"/v1/models": TRTLLM_MODELS})
    sidecar = serve({"/verdict": verdict(cores=[{"running": running, "waiting": 0}, None])})
    assert asked(sidecar.address, engine.address).load is None


def test_a_hung_engine_is_not_asked(serve: Serve) -> None:
    engine = serve({"/v1/models": MODELS, "/metrics": PAGE})
    sidecar = serve({"/verdict": verdict(hung=True, reason="core 0 \x1b[31mfrozen\n" + "x" * 1000)})
    told = asked(sidecar.address, engine.address)
    assert told.hung is not None
    assert told.hung.startswith("core 0  [31mfrozen ")
    assert len(told.hung) == drain_module.MAX_REASON_CHARS
    assert engine.paths == []


def test_a_hang_without_a_reason_is_one(serve: Serve) -> None:
    sidecar = serve({"/verdict": b'{"hung": true}'})
    assert asked(sidecar.address, sidecar.address).hung == "it gives no reason"


@pytest.mark.parametrize(
    "answer",
    [
        verdict(),
        verdict(hung="true"),
        verdict(hung=1),
        verdict(hung=None),
        b'["hung"]',
        b"{",
        b"",
        b"[" * 200_000,
        b"9" * 2_000_000,
        (500, b'{"hung": true}'),
        (503, verdict(hung=True)),
    ],
    ids=range(11),
)
def test_anything_else_of_the_sidecar_is_no_hang(serve: Serve, answer: bytes | tuple[int, bytes]) -> None:
    engine = serve({"/v1/models": MODELS, "/metrics": PAGE})
    sidecar = serve({"/verdict": answer})
    assert asked(sidecar.address, engine.address) == Round(None, Load(2, 1))


def test_a_sidecar_that_never_answers_or_is_not_there_is_fine(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "ANSWER_SEC", 0.2)
    engine = serve({"/v1/models": MODELS, "/metrics": PAGE})
    with Raw([]) as sidecar:
        assert asked(sidecar.address, engine.address).hung is None
    monkeypatch.setattr(drain_module, "ANSWER_SEC", SOON)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Address(False, "127.0.0.1", closed.getsockname()[1], "")
    assert asked(nobody, engine.address) == Round(None, Load(2, 1))


def trouble(asker: Asker, path: str = "/metrics", *, timeout: float = SOON, max_bytes: int = 1000) -> str:
    with pytest.raises(NoAnswer) as found:
        asker.get(path, timeout=timeout, max_bytes=max_bytes)
    return str(found.value)


def test_a_refused_connection_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = Address(False, "127.0.0.1", closed.getsockname()[1], "")
    assert trouble(Asker(nobody)) == "connection refused"


def test_an_unknown_name_is_named() -> None:
    assert trouble(Asker(Address(False, "nobody.invalid", 80, "")))


@pytest.mark.parametrize(
    "sends",
    [
        [],
        [b"HTTP/1.1 200 OK\r\n"] + [b"A: b\r\n"] * 1000,
        [b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n"] + [b"x"] * 800,
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 1000,
    ],
    ids=["silence", "headers", "body", "continue"],
)
def test_a_server_that_drips_is_given_up_in_time_and_gets_one_connection(sends: list[bytes]) -> None:
    with Raw(sends, every_sec=0.05) as server:
        asker = Asker(server.address)
        began = time.monotonic()
        for _ in range(3):
            # Too many headers, and an answer that has not even begun, may be told earlier.
            assert trouble(asker, timeout=0.2) in ("no answer in time", "an answer that is not HTTP, or that broke off")
        assert time.monotonic() - began < 10
        assert len(server.connections) <= 3


def test_an_answer_that_never_ends_does_not_gather_connections() -> None:
    with Raw([b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n"] + [b"x"] * 800, every_sec=0.05) as server:
        asker = Asker(server.address)
        for _ in range(5):
            assert trouble(asker, timeout=0.2) == "no answer in time"
        assert len(server.connections) == 1


@pytest.mark.parametrize(
    "sends",
    [
        [b"SSH-2.0-OpenSSH_9.2\r\n"],
        [b"HTTP/1.1 banana\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\nx"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n" + b"x" * 1001],
        [b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001],
        [b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n"],
        [b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000],
    ],
    ids=range(9),
)
def test_a_broken_or_boundless_answer_is_none(sends: list[bytes]) -> None:
    with Raw(sends, closes=True) as server:
        assert trouble(Asker(server.address)).startswith("an answer ")


@pytest.mark.parametrize("framing", [b"Content-Length: 1000\r\n\r\n", b"\r\n"])
def test_an_answer_as_long_as_the_limit_is_whole(framing: bytes) -> None:
    with Raw([b"HTTP/1.1 200 OK\r\n" + framing + b"x" * 1000], closes=True) as server:
        assert Asker(server.address).get("/", timeout=SOON, max_bytes=1000).body == b"x" * 1000


def test_a_redirect_is_not_followed(serve: Serve) -> None:
    engine = serve({"/v1/models": MODELS, "/metrics": (302, b"")})
    assert asked(None, engine.address).trouble == "/metrics: HTTP 302"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", Address(False, "127.0.0.1", 8000, "")),
        ("http://[::1]:8000/", Address(False, "::1", 8000, "")),
        ("https://engine", Address(True, "engine", 443, "")),
        ("http://engine:8081/metrics", Address(False, "engine", 8081, "/metrics")),
    ],
)
def test_an_address_is_read(text: str, address: Address) -> None:
    assert Address.parse(text) == address


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with the openssl command")
def test_an_engine_with_a_certificate_for_another_name_is_asked_all_the_same(serve: Serve, tmp_path: Path) -> None:
    how = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=other -keyout k -out c"
    subprocess.run(["openssl", *how.split()], cwd=tmp_path, check=True, capture_output=True)
    engine = serve({"/v1/models": MODELS, "/metrics": PAGE}, (tmp_path / "c", tmp_path / "k"))
    assert asked(None, engine.address._replace(tls=True)).load == Load(2, 1)
    assert asked(None, engine.address).load is None  # it does speak TLS


def test_a_server_without_tls_at_an_https_address_is_said_not_raised() -> None:
    with Raw([b"HTTP/1.1 400 Bad Request\r\n\r\n"], closes=True) as server:
        assert trouble(Asker(server.address._replace(tls=True)))
