"""`why`: a verdict in words, for somebody who is tired."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginewatch.why import NoAnswerError, explain_verdict, run_why, verdict_url

HUNG: dict[str, Any] = {
    "state": "stall-hang",
    "hung": True,
    "acting": True,
    "reason": "core 0: no progress for 34 s (limit 30 s), 2 canaries in a row failed (timeout)",
    "since": "2026-10-14T02:07:21.29Z",
    "cores": [
        {
            "core": "0",
            "stalled_for_sec": 34.126,
            "running": 3.0,
            "waiting": None,
            "legs": {
                "prompt_tokens": {"value": 3503.0, "moved_ago_sec": 34.1},
                "kv_cache_usage": {"value": 0.00049, "moved_ago_sec": None},
            },
        }
    ],
    "witnesses": [{"name": "canary", "says": "failed", "age_sec": 3.1, "detail": "2 in a row (timeout)"}],
    "would_flip": ["a leg of core 0 that moves"],
    "settings": {"stall_sec": 30.0, "mode": "enforce", "active_probe_enabled": True},
}

Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(status: int, body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_first_line_is_what_healthz_answers() -> None:
    assert explain_verdict(HUNG).splitlines()[0] == f"hung: {HUNG['reason']}"


def test_every_core_leg_witness_and_way_out_is_named() -> None:
    text = explain_verdict(HUNG)
    for wanted in (
        "state stall-hang, hung since 2026-10-14T02:07:21.29Z",
        "core 0: no proof of life for 34.126 s, 3 running, unknown waiting",
        "prompt_tokens   3503     moved 34.1 s ago",
        "kv_cache_usage  0.00049  not seen to move",
        "canary  failed  3.1 s ago  2 in a row (timeout)",
        "- a leg of core 0 that moves",
        "settings: mode enforce, stall_sec 30, active_probe_enabled true",
    ):
        assert wanted in text


def test_a_hang_in_warm_up_is_said_not_to_be_acted_on() -> None:
    text = explain_verdict({**HUNG, "state": "warmup-stall-hang", "acting": False})
    assert text.startswith("ok: ")
    assert "a hang that is shown and not acted on" in text


def test_a_verdict_with_next_to_nothing_in_it_can_be_explained() -> None:
    assert explain_verdict({"state": "startup", "acting": False, "reason": "loading"}) == "ok: loading\nstate startup\n"
    odd = {"state": "s", "acting": False, "reason": "r", "cores": 3, "witnesses": [7], "would_flip": {}, "settings": []}
    assert explain_verdict(odd).startswith("ok: r\n")
    explain_verdict({"state": "s", "reason": "r", "cores": [{"legs": {"a": {}}}], "witnesses": [{}]})


def test_control_sequences_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in explain_verdict({**HUNG, "reason": "\x1b[2Jgone", "would_flip": ["\x1b[31m"]})


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("10.0.0.7:9090", "http://10.0.0.7:9090/verdict"),
        ("http://h:9090", "http://h:9090/verdict"),
        ("http://h:9090/", "http://h:9090/verdict"),
        ("http://h:9090/healthz", "http://h:9090/verdict"),
        ("http://h:9090/verdict", "http://h:9090/verdict"),
        ("https://h/sidecar/", "https://h/sidecar/verdict"),
        ("[::1]:9090", "http://[::1]:9090/verdict"),
    ],
)
def test_what_people_type_is_understood(given: str, address: str) -> None:
    assert verdict_url(given) == address


@pytest.mark.parametrize("given", ["", "http://", "ftp://h", "http://h:x", "http://[::1", "a b", "http://h:0", ":9090"])
def test_what_cannot_be_an_address_is_a_usage_error(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoAnswerError):
        verdict_url(given)
    assert run_why(given) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_verdict_is_fetched_and_told(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(200, json.dumps(HUNG).encode())
    assert run_why(url) == 0
    assert capsys.readouterr().out == explain_verdict(HUNG)
    assert run_why(url, "json") == 0
    assert json.loads(capsys.readouterr().out) == HUNG


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"Not Found"),
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"state": 1}'),
        (200, b"\xff"),
        (200, b"[" * 100_000),
        (500, b""),
    ],
)
def test_what_is_not_a_sidecar_is_told_in_one_sentence(
    status: int, body: bytes, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_why(serve(status, body)) == 1
    said = capsys.readouterr().err
    assert "is not an enginewatch sidecar" in said
    assert said.count("\n") == 1


def test_a_port_where_nobody_listens_is_told_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert run_why(f"127.0.0.1:{port}") == 1
    said = capsys.readouterr().err
    assert "nobody answers" in said
    assert "connection refused" in said
    assert said.count("\n") == 1


def test_a_port_that_answers_with_something_else_than_http(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert run_why(f"127.0.0.1:{server.getsockname()[1]}") == 1
        thread.join()
    assert capsys.readouterr().err.count("\n") == 1
