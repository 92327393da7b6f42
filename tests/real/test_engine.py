"""The fixture that starts, freezes and ends the engine, held against small stand-ins. Needs no engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.real.engine import EngineNotReadyError, VllmProcess, descendants, free_port, get, started_at

SERVING = """#!/usr/bin/env python3
import http.server, subprocess, sys
# Children that change their titles, as the engine's do, and that do not end when asked.
for title in ("VLLM::EngineCore", "VLLM::Worker"):
    subprocess.Popen(["bash", "-c", f"trap '' TERM; exec -a {title} sleep 300"])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
        self.wfile.write(b"{}")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def stand_in(directory: Path, script: str) -> Path:
    """An environment whose "python" is a script of ours."""
    python = directory / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(script)
    python.chmod(0o755)
    return directory / "venv"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmProcess:
    monkeypatch.setattr("tests.real.engine.ASK_SEC", 0.3)
    venv = stand_in(tmp_path, SERVING)
    return VllmProcess.start(venv, tmp_path, tmp_path / "log", ready_sec=20)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


def test_an_engine_that_ends_while_loading_is_reported_with_its_log(tmp_path: Path) -> None:
    venv = stand_in(tmp_path, "#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(EngineNotReadyError, match=r"code 3(.|\n)*no such model"):
        VllmProcess.start(venv, tmp_path, tmp_path / "log", ready_sec=20)


def test_an_engine_that_never_gets_ready_is_ended_and_reported(tmp_path: Path) -> None:
    venv = stand_in(tmp_path, "#!/bin/sh\necho loading $$\nexec sleep 300\n")
    with pytest.raises(EngineNotReadyError, match=r"not ready within 1"):
        VllmProcess.start(venv, tmp_path, tmp_path / "log", ready_sec=1)
    pid = int((tmp_path / "log").read_text().split()[1])
    assert state(pid) in ("gone", "Z")


def test_processes_are_found_by_their_role(engine: VllmProcess) -> None:
    with engine:
        assert engine.pids("api-server") == [engine.pid]
        [core], [worker] = engine.pids("core"), engine.pids("worker")
        assert {engine.pid, core, worker} == set(descendants(engine.pid))
        assert abs(started_at(core) - time.time()) < 30
        engine.kill("worker")
        deadline = time.monotonic() + 5
        while state(worker) not in ("Z", "gone") and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(LookupError, match="no worker process among"):
            engine.pids("worker")


def test_a_stopped_process_is_continued_when_the_test_fails(engine: VllmProcess) -> None:
    with engine:
        [core] = engine.pids("core")

        def failing_test() -> None:
            with engine.stopped("core"):
                assert state(core) == "S", "this one fails: it is stopped"

        with pytest.raises(AssertionError, match="it is stopped"):
            failing_test()
        assert state(core) in ("R", "S")


def test_closing_ends_all_processes_whatever_state_they_are_in(engine: VllmProcess) -> None:
    family = descendants(engine.pid)
    assert len(family) == 3
    os.kill(engine.pids("worker")[0], signal.SIGSTOP)  # behind the fixture's back
    engine.stop(engine.pids("core")[0])
    engine.close()
    deadline = time.monotonic() + 5
    while any(state(pid) not in ("gone", "Z") for pid in family) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert {pid: state(pid) for pid in family if state(pid) not in ("gone", "Z")} == {}


def test_a_restart_puts_another_process_in_the_same_place(engine: VllmProcess) -> None:
    """Also when the first process is gone already and has left its children behind."""
    with engine:
        family, port = descendants(engine.pid), engine.port
        engine.kill("api-server")
        engine.wait_ended(5)
        assert any(state(pid) == "S" for pid in family), "the children were expected to outlive it"
        engine.restart()
        assert [pid for pid in family if state(pid) not in ("gone", "Z")] == []
        engine.wait_ready(20)
        assert engine.pid not in family
        assert engine.port == port
        assert get(f"{engine.url}/health")[0] == 200
        assert len(descendants(engine.pid)) == 3


def test_a_free_port_is_free() -> None:
    assert free_port() != free_port()
