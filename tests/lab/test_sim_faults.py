"""Every fault that a simulated engine can be told, seen from outside."""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lab.conftest import SimFactory
from tests.lab.sim_asking import ask, canary, eventually, generation_path, hangs, page, page_path, value

from enginewatch.lab.sim.enginelog import EngineLog
from enginewatch.lab.sim.faults import ANSWERS, METRICS, Faults
from enginewatch.lab.sim.process import SimError, SimProcess


@pytest.fixture(params=["vllm", "sglang", "trtllm"])
def engine(request: pytest.FixtureRequest, warm: SimFactory) -> SimProcess:
    if request.param == "trtllm":
        return warm("trtllm", step_ms=5, return_perf_metrics=True)
    return warm(request.param, step_ms=5)


@pytest.fixture
def vllm(warm: SimFactory) -> SimProcess:
    return warm("vllm", step_ms=5)


# --- what generation requests get -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [answer for answer in ANSWERS if answer.isdigit()])
def test_a_status_can_be_forced_on_generation_requests_only(vllm: SimProcess, status: str) -> None:
    vllm.fault(answer=status)
    assert canary(vllm).status == int(status)
    assert ask(vllm, "/health").status == 200


def test_a_full_queue_says_so(engine: SimProcess) -> None:
    engine.fault(answer="queue-full")
    answer = canary(engine)
    assert answer.status == 503
    assert "queue is full" in answer.text


def test_a_counted_fault_ends_by_itself(engine: SimProcess) -> None:
    engine.fault(answer="500", answer_count=2)
    assert [canary(engine).status for _ in range(3)] == [500, 500, 200]


def test_lost_requests_are_accepted_and_never_answered(engine: SimProcess) -> None:
    engine.fault(answer="hang", answer_count=1)
    assert hangs(lambda: canary(engine, timeout=0.3))
    assert canary(engine).status == 200


def test_a_connection_can_be_reset(engine: SimProcess) -> None:
    engine.fault(answer="reset")
    with pytest.raises(ConnectionResetError):
        canary(engine)


@pytest.mark.parametrize("stream", [False, True])
def test_a_frozen_answer_begins_and_does_not_end(engine: SimProcess, stream: bool) -> None:
    engine.fault(answer="freeze")
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=0.3)
    connection.request("POST", generation_path(engine), json.dumps({"prompt": "a", "text": "a", "stream": stream}))
    response = connection.getresponse()
    assert response.status == 200
    assert response.read(1)
    with pytest.raises(TimeoutError):
        response.read()
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_object_can_come_with_a_200(engine: SimProcess, stream: bool) -> None:
    engine.fault(answer="error-object")
    answer = canary(engine, stream=stream)
    assert answer.status == 200
    assert '"error"' in answer.text
    assert answer.text.startswith("data: ") is stream


def test_a_finish_reason_can_be_an_error(engine: SimProcess) -> None:
    engine.fault(answer="error-finish")
    answer = canary(engine)
    reason: Any = answer.json["meta_info"] if engine.engine == "sglang" else answer.json["choices"][0]["finish_reason"]
    assert "error" in json.dumps(reason)


def test_an_answer_can_be_empty(engine: SimProcess) -> None:
    engine.fault(answer="empty")
    assert canary(engine, stream=True).text == "data: [DONE]\n\n"


def test_something_else_can_answer(engine: SimProcess) -> None:
    engine.fault(answer="html")
    assert canary(engine).text.startswith("<!DOCTYPE html>")


# --- what scrapes get -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [kind for kind in METRICS if kind.isdigit()])
def test_a_status_can_be_forced_on_scrapes_only(vllm: SimProcess, status: str) -> None:
    vllm.fault(metrics=status)
    assert ask(vllm, "/metrics").status == int(status)
    assert canary(vllm).status == 200


def test_a_scrape_can_hang_once(engine: SimProcess) -> None:
    engine.fault(metrics="hang", metrics_count=1)
    assert hangs(lambda: page(engine, timeout=0.3))
    assert page(engine)


def test_a_scrape_can_be_reset(engine: SimProcess) -> None:
    engine.fault(metrics="reset")
    with pytest.raises(ConnectionResetError):
        page(engine)


def test_a_slow_scrape_answers_in_full(engine: SimProcess) -> None:
    whole = len(page(engine))
    engine.fault(metrics_delay_sec=0.4)
    answer = ask(engine, page_path(engine))
    assert answer.seconds >= 0.4
    assert len(answer.body) == pytest.approx(whole, rel=0.05)


def test_a_truncated_page_is_shorter_than_promised_and_cut_inside_a_line(engine: SimProcess) -> None:
    engine.fault(metrics="truncated")
    with pytest.raises(http.client.IncompleteRead) as cut:
        page(engine)
    assert len(cut.value.partial) > 1000
    assert not cut.value.partial.endswith(b"\n")


@pytest.mark.parametrize("kind", ["huge", "huge-own"])
def test_a_huge_page_has_the_size_asked_for_and_the_real_series_at_its_end(engine: SimProcess, kind: str) -> None:
    engine.fault(metrics=kind, metrics_bytes=3_000_000)
    text = page(engine)
    assert len(text) == 3_000_000
    tail = text[-200_000:]
    name = {
        "vllm": "vllm:num_requests_running{",
        "sglang": "sglang:num_running_reqs{",
        "trtllm": "trtllm_prompt_cached_tokens_total{",
    }[engine.engine]
    assert name in tail
    own = "generation_tokens_total{" in text[:100]
    assert own is (kind == "huge-own")


def test_a_dripping_page_comes_at_the_given_rate(engine: SimProcess) -> None:
    engine.fault(metrics="drip", metrics_rate=2000)
    with pytest.raises(TimeoutError):
        page(engine, timeout=0.05)
    size = len(page_for(engine, 0.6))
    assert 600 <= size <= 2500


def page_for(engine: SimProcess, seconds: float) -> bytes:
    """What arrives of a page in so many seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=0.3)
    connection.request("GET", page_path(engine))
    response = connection.getresponse()
    end = time.monotonic() + seconds
    got = b""
    while time.monotonic() < end:
        got += response.read1(100)
    connection.close()
    return got


def test_an_engine_without_statistics_keeps_its_process_series(vllm: SimProcess) -> None:
    vllm.fault(metrics="no-engine-series")
    text = page(vllm)
    assert "vllm:" not in text
    assert "process_start_time_seconds" in text


@pytest.mark.parametrize(("kind", "body"), [("json", "[]"), ("empty", ""), ("html", "<!DOCTYPE")])
def test_a_page_can_be_something_else(engine: SimProcess, kind: str, body: str) -> None:
    engine.fault(metrics=kind)
    assert page(engine).startswith(body)


def test_a_named_series_can_vanish_from_every_other_page(vllm: SimProcess) -> None:
    vllm.fault(drop_series=["vllm:generation_tokens_total"], drop_every_other=True)
    seen = {value(page(vllm), "vllm:generation_tokens_total") is None for _ in range(2)}
    assert seen == {True, False}
    vllm.fault(drop_every_other=False)
    pages = [page(vllm) for _ in range(3)]
    assert all(value(text, "vllm:generation_tokens_total") is None for text in pages)
    assert all(value(text, "vllm:request_generation_tokens_count") is not None for text in pages)


# --- what the engine itself does ------------------------------------------------------------------------------------


def test_slow_steps_slow_one_core(warm: SimFactory) -> None:
    pair = warm("vllm", dp=2, step_ms=5)
    pair.fault(step_delay_sec=0.4, step_delay_core="1")
    assert canary(pair, core=0).seconds < 0.3
    assert canary(pair, core=1).seconds >= 0.4


def test_a_pause_can_be_set_without_the_engines_own_endpoint(engine: SimProcess) -> None:
    engine.fault(paused=True)
    eventually(lambda: bool(engine.state()["paused"]))
    assert hangs(lambda: canary(engine, timeout=0.3))
    engine.fault(paused=False)
    eventually(lambda: not engine.state()["paused"])
    assert canary(engine).status == 200


def test_a_pause_does_not_wait_for_a_hung_core(engine: SimProcess) -> None:
    engine.stop()
    assert engine.fault(paused=True)["paused"] is True
    assert engine.state()["paused"] is False
    engine.cont()
    eventually(lambda: bool(engine.state()["paused"]))


def test_sleep_can_be_set_without_dev_mode(vllm: SimProcess) -> None:
    vllm.fault(sleeping=2)
    eventually(lambda: value(page(vllm), "vllm:engine_sleep_state", sleep_state="discard_all") == 1)


def test_health_can_be_forced(engine: SimProcess) -> None:
    engine.fault(health="503")
    assert ask(engine, "/health").status == 503


def test_counters_can_restart_in_the_same_process(sim: SimFactory) -> None:
    engine = sim("vllm", step_ms=5)
    canary(engine)
    before = page(engine)
    engine.reset_counters()
    after = page(engine)
    assert (value(before, "vllm:generation_tokens_total"), value(after, "vllm:generation_tokens_total")) == (1, 0)
    assert value(before, "process_start_time_seconds") == value(after, "process_start_time_seconds")
    born = "vllm:generation_tokens_created"
    assert (value(after, born) or 0) > (value(before, born) or 0)


def test_log_lines_go_to_the_log_file(sim: SimFactory, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    engine = sim("sglang", log_file=log)
    engine.log("all is well", detokenizer=True)
    engine.log(partial="half a li")
    first, second, rest = log.read_text().split("\n")
    assert first == "all is well"
    assert second.startswith("Health check failed. Server couldn't get a response from detokenizer")
    assert rest == "half a li"


def test_log_lines_can_have_the_prefix_of_a_container_runtime(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    EngineLog(str(log), "cri").write("all is well")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z stderr F all is well\n", log.read_text())


def test_load_can_be_started_aimed_and_stopped(warm: SimFactory) -> None:
    pair = warm("vllm", dp=2, step_ms=5)
    pair.load(3, core=1, max_tokens=5000)
    eventually(lambda: value(page(pair), "vllm:num_requests_running", engine="1") == 3)
    assert (value(page(pair), "vllm:num_requests_running", engine="0") or 0) == 0
    pair.load(0)
    eventually(lambda: value(page(pair), "vllm:num_requests_running", engine="1") == 0)


def test_an_unknown_or_wrong_fault_is_refused_in_one_sentence_and_changes_nothing(vllm: SimProcess) -> None:
    for wrong in (
        {"hnag": 1},
        {"answer": "maybe"},
        {"metrics_delay_sec": "long"},
        {"paused": 1},
        {"health": "ill"},
        {"answer_count": -1},
    ):
        with pytest.raises(SimError):
            vllm.fault(**wrong)
    assert vllm.fault() == Faults().to_dict()


def test_the_switches_can_be_looked_up_where_they_are(vllm: SimProcess) -> None:
    told = ask(vllm, "/_sim").text
    assert all(f"{name}:" in told for name in Faults().to_dict())
    assert all(name in told for name in (*ANSWERS, *METRICS))
    assert all(path in told for path in ("/_sim/load", "/_sim/prefill", "/_sim/restart", "/_sim/crash", "/_sim/log"))
    assert "concurrency" in told


def test_null_puts_a_fault_back(vllm: SimProcess) -> None:
    vllm.fault(answer="500", metrics_delay_sec=2)
    assert vllm.fault(answer=None, metrics_delay_sec=None) == Faults().to_dict()
