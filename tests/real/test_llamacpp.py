"""The sidecar and doctor against a real llama-server that computes on the CPU.

Its one process is stopped with SIGSTOP, so that nothing of it answers; no other part can be stopped from outside.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real import install_llamacpp, tiny_gguf
from tests.real.engine import get
from tests.real.llamacpp import LlamaServer
from tests.real.sidecar import CANARY_SEC, POLL_SEC, STALL_SEC, Sample, SidecarProcess

pytestmark = [pytest.mark.real, pytest.mark.timeout(300, func_only=True)]

SCRAPE_SEC = 2.0
UNREACH_SEC = 2 * STALL_SEC
SETTINGS = {"metrics_timeout_sec": SCRAPE_SEC, "unreach_sec": UNREACH_SEC}
DETECT_SEC = POLL_SEC + UNREACH_SEC + SCRAPE_SEC + CANARY_SEC + 1
RECOVER_SEC = 2 * POLL_SEC + SCRAPE_SEC
SLOTS = 2
LONG_PROMPT_TOKENS = 8000
"""Measured: 13 s of one core's time, in 16 tokens per step. Not so long that a busy machine takes 120 s over it: one
batch of that length would be a hang."""
USUAL = ("--metrics", "--parallel", str(SLOTS))

Start = Callable[..., LlamaServer]


@pytest.fixture(scope="session")
def program() -> Path:
    """The real server; `make test-real` says where it is, or that it cannot be had."""
    said = os.environ.get("ENGINEWATCH_REAL_LLAMACPP")
    if said == "unobtainable":
        pytest.skip("the real llama.cpp cannot be had here; the installer's report above says why")
    if said:
        return Path(said)
    if not install_llamacpp.usable(install_llamacpp.target_dir()):
        pytest.fail("no real llama.cpp: run `make test-real`, or first `python -m tests.real.install_llamacpp`")
    return install_llamacpp.server_in(install_llamacpp.target_dir())


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture
def start(program: Path, model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a server with these arguments, and ends it with the test."""
    running: list[LlamaServer] = []

    def start(*arguments: str, key: str = "") -> LlamaServer:
        running.append(LlamaServer(program, model, tmp_path / f"server-{len(running)}.log", arguments, key))
        return running[-1]

    yield start
    for server in running:
        server.close()


def watch(server: LlamaServer, directory: Path, **settings: Any) -> SidecarProcess:
    return SidecarProcess(server.url, directory, SETTINGS | settings)


def statuses(seen: list[Sample]) -> set[int]:
    return {sample.status for sample in seen}


def doctor(server: LlamaServer, *arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "enginewatch", "doctor", server.url, "-o", "json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def said(found: dict[str, Any], level: str) -> str:
    return "\n".join(f"{item['what']} {item['fix']}" for item in found["findings"] if item["level"] == level)


# --- the sidecar ----------------------------------------------------------------------------------------------------


def test_it_is_recognised_and_healthy_while_idle(start: Start, tmp_path: Path) -> None:
    server = start(*USUAL)
    with watch(server, tmp_path) as sidecar:
        sidecar.wait(lambda sample: sample.state in ("stall-active-ok", "growing"), 30, "proven alive")
        begun = time.time()
        time.sleep(STALL_SEC + 3 * POLL_SEC)
        assert statuses(sidecar.since(begun)) == {200}, sidecar.told()
        [labels] = sidecar.series("enginewatch_engine_info")
        assert 'kind="llamacpp"' in labels
        described = [event for event in sidecar.history() if event["kind"] == "described"]
    assert (described[-1]["engine"], described[-1]["version"]) == ("llamacpp", server.json("/props")["build_info"])


def test_more_requests_than_slots_are_work_and_no_hang(start: Start, tmp_path: Path) -> None:
    server = start(*USUAL)
    with watch(server, tmp_path) as sidecar, server.loaded(clients=SLOTS + 2):
        server.wait("requests_deferred", 1)
        with pytest.raises(TimeoutError):  # what a canary would get
            server.complete("Is anybody there?", timeout=CANARY_SEC)
        sidecar.wait(lambda sample: sample.state == "growing", 30, "seen at work")
        begun = time.time()
        time.sleep(STALL_SEC + 3 * POLL_SEC)
        assert statuses(sidecar.since(begun)) == {200}, sidecar.told()
        assert "growing" in {sample.state for sample in sidecar.since(begun)}


@pytest.mark.parametrize("clients", [0, 1])
def test_a_stopped_server_is_reported_and_forgiven(start: Start, tmp_path: Path, clients: int) -> None:
    server = start(*USUAL)
    with watch(server, tmp_path) as sidecar, server.loaded(clients):
        sidecar.wait(lambda sample: sample.state in ("stall-active-ok", "growing"), 30, "proven alive")
        with server.stopped():
            stopped_at = time.time()
            reported = sidecar.wait(lambda sample: sample.status == 503, DETECT_SEC + 15, "reported hung")
            states = [sample.state for sample in sidecar.since(stopped_at)]
            time.sleep(2 * POLL_SEC)
            assert statuses(sidecar.since(reported.at)) == {503}, sidecar.told()
            continued_at = time.time()
        recovered = sidecar.wait(lambda sample: sample.status == 200, RECOVER_SEC + 20, "healthy again")
        assert reported.state == "unreach-hang"
        assert "unreach-grace" in states
        assert UNREACH_SEC <= reported.at - stopped_at <= DETECT_SEC, sidecar.told()
        assert recovered.at - continued_at <= RECOVER_SEC + 1, sidecar.told()


def test_by_default_an_unanswered_page_is_given_as_long_as_a_batch_may_take(start: Start, tmp_path: Path) -> None:
    """Until August 2026 the page was answered between batches only, and a batch takes a CPU a minute and more."""
    server = start(*USUAL)
    with watch(server, tmp_path, unreach_sec=0) as sidecar:
        sidecar.wait(lambda sample: sample.state in ("stall-active-ok", "growing"), 30, "proven alive")
        with server.stopped():
            grace = sidecar.wait(lambda sample: "of 120 s" in sample.body, 30, "out of reach, and given time")
            assert grace.state == "unreach-grace"
            time.sleep(UNREACH_SEC + 2 * POLL_SEC)
            assert statuses(sidecar.since(grace.at)) == {200}, sidecar.told()


def test_a_long_prompt_in_small_batches_moves_only_the_number_of_decodes(start: Start, tmp_path: Path) -> None:
    server = start(*USUAL, "--batch-size", "16", "--ubatch-size", "16")
    flat_sec = 0.0
    with watch(server, tmp_path) as sidecar, concurrent.futures.ThreadPoolExecutor(1) as pool:
        sidecar.wait(lambda sample: sample.state in ("stall-active-ok", "growing"), 30, "proven alive")
        begun = time.time()
        prefill = pool.submit(server.complete, [7] * LONG_PROMPT_TOKENS, timeout=250.0)
        server.wait("requests_processing", 1)
        tokens, since, first = server.metric("prompt_tokens_total"), time.time(), server.metric("n_decode_total")
        while not prefill.done():
            if (now := server.metric("prompt_tokens_total")) != tokens:
                tokens, since = now, time.time()
            flat_sec = max(flat_sec, time.time() - since)
            time.sleep(0.2)
        assert prefill.result()["usage"]["prompt_tokens"] == LONG_PROMPT_TOKENS
        seen = sidecar.since(begun)
    assert server.metric("n_decode_total") - first > 100
    assert flat_sec > STALL_SEC, "too short to prove anything: take a longer prompt"
    assert statuses(seen) == {200}, sidecar.told()
    assert "growing" in {sample.state for sample in seen}


def test_a_batch_that_takes_longer_than_stall_sec_is_no_hang(start: Start, tmp_path: Path) -> None:
    server = start(*USUAL, "--batch-size", "32768", "--ubatch-size", "16")
    flat_sec = 0.0
    with watch(server, tmp_path) as sidecar, concurrent.futures.ThreadPoolExecutor(1) as pool:
        sidecar.wait(lambda sample: sample.state in ("stall-active-ok", "growing"), 30, "proven alive")
        begun = time.time()
        prefill = pool.submit(server.complete, [7] * LONG_PROMPT_TOKENS, timeout=250.0)
        decodes, since = -1.0, time.time()
        while not prefill.done():
            if (now := server.metric("n_decode_total")) != decodes:
                decodes, since = now, time.time()
            flat_sec = max(flat_sec, time.time() - since)
            time.sleep(0.2)
        prefill.result()
        seen = sidecar.since(begun)
    assert flat_sec > STALL_SEC + POLL_SEC, "too short to prove anything: take a longer prompt"
    assert statuses(seen) == {200}, sidecar.told()
    assert "probe-fail-grace" in {sample.state for sample in seen}, sidecar.told()


def test_a_sleeping_server_is_left_asleep(start: Start, tmp_path: Path) -> None:
    server = start(*USUAL, "--sleep-idle-seconds", "3")
    with watch(server, tmp_path, active_probe_idle_sec=3600) as sidecar:
        sidecar.wait(lambda sample: sample.state == "paused", 40, "seen asleep")
        begun = time.time()
        time.sleep(STALL_SEC + 3 * POLL_SEC)
        assert server.json("/props")["is_sleeping"], "somebody woke it"
        assert {(sample.status, sample.state) for sample in sidecar.since(begun)} == {(200, "paused")}
        server.complete("Good morning")
        sidecar.wait(lambda sample: sample.state != "paused", 10, "seen awake")
        assert statuses(sidecar.since(begun)) == {200}, sidecar.told()


def test_without_its_page_canaries_decide(start: Start, tmp_path: Path) -> None:
    server = start("--parallel", str(SLOTS))
    with watch(server, tmp_path) as sidecar:
        sidecar.wait(lambda sample: sample.state == "no-legs" and "501" in sample.body, 30, "without a page")
        begun = time.time()
        time.sleep(STALL_SEC + 3 * POLL_SEC)
        assert statuses(sidecar.since(begun)) == {200}, sidecar.told()
        described = [event for event in sidecar.history() if event["kind"] == "described"]
        assert described[-1]["engine"] == "llamacpp", "known by its answers"


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_has_nothing_to_fix(start: Start) -> None:
    code, found = doctor(start(*USUAL))
    assert (code, found["engine"], found["engine_from"], found["pause"]) == (0, "llamacpp", "page", "clear"), found
    [core] = found["cores"]
    assert {leg["name"] for leg in core["legs"] if leg["moved"]} == {"decodes", "prompt_tokens", "predicted_tokens"}
    assert core["missing_legs"] == []
    assert found["version"]


def test_doctor_names_the_flag_of_the_page(start: Start) -> None:
    code, found = doctor(start("--parallel", str(SLOTS)))
    assert (code, found["engine"], found["engine_from"]) == (1, "llamacpp", "answers"), found
    assert "501" in said(found, "warning")
    assert "--metrics" in said(found, "warning")
    assert found["canary"]["outcome"] == "ok"


def test_doctor_asks_for_the_key_and_then_needs_no_more(start: Start, tmp_path: Path) -> None:
    server = start(*USUAL, key="sesame")
    assert get(f"{server.url}/metrics")[0] == 401
    code, found = doctor(server)
    assert code == 4, "everything but /health asks for it, so that nothing tells which engine this is"
    assert "ENGINE_API_KEY_FILE" in said(found, "warning")
    key = tmp_path / "key"
    key.write_text("sesame\n")
    code, found = doctor(server, "--api-key-file", str(key))
    assert (code, found["engine"]) == (0, "llamacpp"), found


def test_doctor_tells_a_stopped_server(start: Start) -> None:
    server = start(*USUAL)
    with server.stopped():
        code, found = doctor(server)
    assert code == 3
    assert "gave no answer" in said(found, "critical") or "timeout" in said(found, "critical").lower(), found
