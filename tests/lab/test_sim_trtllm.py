"""The simulated TensorRT-LLM: statistics that are taken away, a page that moves with completions, and its deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.lab.conftest import SimFactory
from tests.lab.sim_asking import Answer, ask, canary, eventually, hangs, page, shapes, value

from enginewatch.lab.sim.process import SimError, SimProcess

WAIT = 0.5


@pytest.fixture
def engine(warm: SimFactory) -> SimProcess:
    """With records of iterations and nobody else who reads them."""
    engine = warm("trtllm", step_ms=5, iter_stats=True)
    canary(engine)
    ask(engine, "/metrics")
    return engine


@pytest.fixture
def collecting(warm: SimFactory) -> SimProcess:
    """With the Prometheus page, whose collector reads the records."""
    return warm("trtllm", step_ms=5, iter_stats=True, return_perf_metrics=True)


def records(sim: SimProcess, **options: Any) -> list[dict[str, Any]]:
    answer = ask(sim, "/metrics", **options)
    assert answer.status == 200
    found: list[dict[str, Any]] = answer.json
    return found


def complete(sim: SimProcess, **body: Any) -> Answer:
    return ask(sim, "/v1/completions", {"prompt": "Test", "max_tokens": 1, **body})


# --- what it says of itself -----------------------------------------------------------------------------------------


def test_it_is_recognised_by_the_owner_of_its_models(engine: SimProcess) -> None:
    (model,) = ask(engine, "/v1/models").json["data"]
    assert (model["id"], model["owned_by"]) == ("simulated-model", "tensorrt_llm")
    assert ask(engine, "/version").json == {"version": "1.4.0rc4"}
    assert ask(engine, "/server_info").status == 200


def test_an_answer_tells_its_tokens_and_why_it_ended(engine: SimProcess) -> None:
    answer = complete(engine, prompt=[1, 2, 3], max_tokens=4).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 4)


def test_streams_end_with_usage_and_done(engine: SimProcess) -> None:
    for path, prompt, text in (
        ("/v1/completions", {"prompt": "Test"}, "text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Test"}]}, "delta"),
    ):
        body = prompt | {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done, _ = ask(engine, path, body).text.split("\n\n")
        parts = [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]
        assert [part["finish_reason"] for part in parts] == [None, "length"]
        assert all(text in part for part in parts)
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 2
        assert done == "data: [DONE]"


@pytest.mark.parametrize("wrong", [{"prompt": ""}, {"max_tokens": 0}, {"max_tokens": 10**9}, {"bootstrap_room": 0}])
def test_whatever_is_wrong_with_a_request_is_a_400(engine: SimProcess, wrong: dict[str, object]) -> None:
    assert complete(engine, **wrong).status == 400


def test_health_generate_makes_a_token_and_old_releases_have_none(engine: SimProcess, sim: SimFactory) -> None:
    last = ask(engine, "/health_generate")
    assert (last.status, last.text) == (200, "Generation health check OK")
    assert len(records(engine)) == 1
    assert ask(sim("trtllm", no_health_generate=True), "/health_generate").status == 404


# --- records of iterations ------------------------------------------------------------------------------------------


def test_a_record_is_there_for_the_first_who_asks(engine: SimProcess) -> None:
    complete(engine, max_tokens=7)
    first = records(engine)
    assert [record["iter"] - first[0]["iter"] for record in first] == [0, 1, 2, 3, 4, 5, 6]
    assert {record["numActiveRequests"] for record in first} == {1}
    assert first[-1]["kvCacheStats"]["usedNumBlocks"] == 0
    assert records(engine) == []


def test_without_records_the_answer_waits_two_seconds(engine: SimProcess) -> None:
    waited = ask(engine, "/metrics")
    assert waited.json == []
    assert 2.0 <= waited.seconds < 3.0
    canary(engine)
    assert ask(engine, "/metrics").seconds < 1.0


def test_there_are_no_records_unless_asked_for(warm: SimFactory) -> None:
    engine = warm("trtllm", step_ms=5)
    canary(engine)
    answer = ask(engine, "/metrics")
    assert (answer.status, answer.json) == (200, [])


def test_a_client_that_gives_up_loses_no_record(engine: SimProcess) -> None:
    assert hangs(lambda: ask(engine, "/metrics", timeout=0.2))
    complete(engine, max_tokens=3)
    assert 1 <= len(records(engine)) <= 3


def test_two_who_ask_at_once_share_what_there_is(engine: SimProcess) -> None:
    found: list[list[dict[str, Any]]] = []
    askers = [threading.Thread(target=lambda: found.append(records(engine))) for _ in range(2)]
    for asker in askers:
        asker.start()
    complete(engine, max_tokens=1)
    for asker in askers:
        asker.join()
    assert sorted(len(each) for each in found) == [0, 1]


def test_records_go_on_during_one_long_request(engine: SimProcess) -> None:
    engine.load(1, max_tokens=100_000)
    seen = [records(engine)[-1]["iter"] for _ in range(3)]
    assert seen[0] < seen[1] < seen[2]


def test_records_go_on_during_a_chunked_prefill(engine: SimProcess) -> None:
    engine.prefill(0.5, chunks=10)
    used: list[int] = []
    while not used or used[-1]:
        used += [record["kvCacheStats"]["usedNumBlocks"] for record in records(engine)]
    assert len(used) == 10
    assert used[:-1] == sorted(used[:-1])


# --- hangs ----------------------------------------------------------------------------------------------------------


def test_health_is_200_while_the_executor_hangs(engine: SimProcess) -> None:
    engine.stop()
    answer = ask(engine, "/health")
    assert (answer.status, answer.seconds < 0.3) == (200, True)
    assert hangs(lambda: ask(engine, "/health_generate", timeout=WAIT))


def test_a_stopped_worker_answers_for_no_statistics_and_the_rest_of_the_server_goes_on(engine: SimProcess) -> None:
    engine.load(1, max_tokens=100_000)
    engine.stop()
    assert hangs(lambda: ask(engine, "/metrics", timeout=2.5))
    assert ask(engine, "/version").status == 200
    engine.cont()
    eventually(lambda: bool(records(engine)))


def test_older_releases_let_the_whole_server_wait_for_statistics(sim: SimFactory) -> None:
    engine = sim("trtllm", step_ms=5, iter_stats=True, blocking_stats=True)
    assert ask(engine, "/version").seconds < 0.3
    engine.stop()
    assert hangs(lambda: ask(engine, "/metrics", timeout=WAIT))
    assert hangs(lambda: ask(engine, "/health", timeout=WAIT))
    engine.cont()
    assert ask(engine, "/health").status == 200


def test_a_deadlocked_loop_answers_for_statistics_with_nothing(engine: SimProcess) -> None:
    engine.load(1, max_tokens=100_000)
    engine.fault(deadlock=True)
    while records(engine):
        pass
    assert hangs(lambda: canary(engine, timeout=WAIT))
    assert ask(engine, "/health").status == 200
    engine.fault(deadlock=False)
    assert records(engine)
    assert canary(engine).status == 200


def test_only_this_engine_can_deadlock_beside_a_live_process(warm: SimFactory) -> None:
    with pytest.raises(SimError, match="kill -STOP"):
        warm("vllm", step_ms=5).fault(deadlock=True)


# --- the page -------------------------------------------------------------------------------------------------------


def test_there_is_no_page_unless_asked_for(engine: SimProcess) -> None:
    assert ask(engine, "/prometheus/metrics").status == 404


def test_the_page_counts_requests_when_they_complete(collecting: SimProcess) -> None:
    def counted() -> tuple[float, float, float]:
        text = page(collecting)
        names = ("request_success_total", "prompt_tokens_total", "generation_tokens_total")
        first, second, third = (value(text, f"trtllm_{name}") or 0.0 for name in names)
        return first, second, third

    before = counted()
    complete(collecting, prompt=[1, 2, 3], max_tokens=5)
    assert [new - old for new, old in zip(counted(), before, strict=True)] == [1, 3, 5]


def test_its_gauges_are_written_when_a_request_completes_and_stay(collecting: SimProcess) -> None:
    collecting.load(3, max_tokens=50)
    eventually(lambda: (value(page(collecting), "trtllm_num_requests_running") or 0) >= 2)
    collecting.load(0)
    complete(collecting)
    eventually(lambda: value(page(collecting), "trtllm_num_requests_running") == 1)
    before = page(collecting)
    assert hangs(lambda: ask(collecting, "/v1/completions", {"prompt": "x", "max_tokens": 10**5}, timeout=WAIT))
    assert page(collecting) == before  # one long request moves nothing at all


def test_a_hang_leaves_the_page_as_it_was(collecting: SimProcess) -> None:
    complete(collecting)
    eventually(lambda: value(page(collecting), "trtllm_num_requests_running") == 1)
    collecting.stop()
    before = page(collecting)
    assert hangs(lambda: canary(collecting, timeout=WAIT))
    assert page(collecting) == before


def test_beside_the_page_records_come_with_completions_and_without_waiting(collecting: SimProcess) -> None:
    long = {"prompt": "Test", "max_tokens": 10**5}
    complete(collecting, max_tokens=5)
    eventually(lambda: bool(records(collecting)))
    # The collector may still be waiting for what the completion had woken it for.
    assert hangs(lambda: ask(collecting, "/v1/completions", long, timeout=1.0))
    records(collecting)
    assert hangs(lambda: ask(collecting, "/v1/completions", long, timeout=WAIT))
    quick = ask(collecting, "/metrics")
    assert (quick.json, quick.seconds < 0.3) == ([], True)
    collecting.stop()
    assert records(collecting, timeout=1.0) == []


def test_the_page_comes_from_a_multiprocess_registry(collecting: SimProcess) -> None:
    complete(collecting, max_tokens=2)
    eventually(lambda: value(page(collecting), "trtllm_num_requests_running") is not None)
    text = page(collecting)
    found = dict(shapes(text))
    assert found["trtllm_generation_tokens_total"] == ("engine_type", "model_name")
    assert found["trtllm_request_success_total"] == ("engine_type", "finished_reason", "model_name")
    assert found["trtllm_num_requests_running"] == ("engine_type", "model_name", "pid")
    assert all(name.startswith("trtllm_") and not name.endswith("_created") for name in found)
    assert value(text, "trtllm_num_requests_running", pid=str(collecting.pid)) is not None


def test_the_page_is_negotiated(collecting: SimProcess) -> None:
    plain = ask(collecting, "/prometheus/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain")
    asked = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "gzip"}
    packed = ask(collecting, "/prometheus/metrics", headers=asked)
    assert packed.headers["Content-Type"].startswith("application/openmetrics-text")
    assert packed.headers["Content-Encoding"] == "gzip"


# --- faults of the JSON statistics ----------------------------------------------------------------------------------


def test_json_statistics_can_be_spoiled(engine: SimProcess) -> None:
    canary(engine)
    engine.fault(drop_series=["iter"])
    (record,) = records(engine)
    assert "iter" not in record
    canary(engine)
    engine.fault(drop_series=None, metrics="huge-own", metrics_bytes=200_000)
    huge = ask(engine, "/metrics")
    assert (len(huge.body), len(huge.json) > 1000) == (200_000, True)
    engine.fault(metrics="503")
    assert ask(engine, "/metrics").status == 503


# --- roles ----------------------------------------------------------------------------------------------------------

LOCAL = {"disaggregated_params": {"request_type": "context_and_generation"}}


@pytest.mark.parametrize("role", ["agg", "prefill", "decode"])
def test_a_request_that_needs_no_partner_is_served_in_every_role(warm: SimFactory, role: str) -> None:
    engine = warm("trtllm", step_ms=5, role=role)
    engine.fault(peer_gone=True)
    answer = complete(engine, max_tokens=3, **LOCAL).json
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)


def test_a_decode_worker_refuses_a_plain_request(warm: SimFactory) -> None:
    engine = warm("trtllm", step_ms=5, role="decode")
    refused = complete(engine)
    assert refused.status == 400
    assert refused.json["message"] == "Disaggregated params are required for decode mode"
    assert ask(engine, "/health_generate").status == 500


def test_a_decode_worker_waits_for_the_kv_of_its_partner(warm: SimFactory) -> None:
    engine = warm("trtllm", step_ms=5, role="decode")
    handed_on = {"disaggregated_params": {"request_type": "generation_only", "ctx_request_id": 1}}
    assert complete(engine, **handed_on).status == 200
    engine.fault(peer_gone=True)
    body = {"prompt": "Test", "max_tokens": 1, **handed_on}
    assert hangs(lambda: ask(engine, "/v1/completions", body, timeout=WAIT))
    assert complete(engine, **LOCAL).status == 200


def test_a_prefill_worker_hands_a_request_on_after_its_first_token(warm: SimFactory) -> None:
    engine = warm("trtllm", step_ms=5, role="prefill")
    (choice,) = complete(engine, max_tokens=100).json["choices"]
    assert choice["finish_reason"] == "not_finished"
    assert choice["disaggregated_params"]["request_type"] == "context_only"


def test_an_unknown_kind_of_request_is_refused(engine: SimProcess) -> None:
    assert complete(engine, disaggregated_params={"request_type": "none"}).status == 400


# --- deaths ---------------------------------------------------------------------------------------------------------


def test_a_dead_executor_is_a_503_for_ever_and_a_400_for_every_request(sim: SimFactory) -> None:
    engine = sim("trtllm", step_ms=5, iter_stats=True)
    os.kill(engine.rank().pid, signal.SIGKILL)
    eventually(lambda: ask(engine, "/health").status == 503)
    assert canary(engine).status == 400
    streamed = canary(engine, stream=True)
    assert (streamed.status, '"error"' in streamed.text) == (200, True) or streamed.status == 400
    assert ask(engine, "/health_generate").status == 500
    assert hangs(lambda: ask(engine, "/metrics", timeout=WAIT))
    assert engine.exit_code() is None


def test_a_dead_executor_can_end_the_server_at_the_next_question_for_its_health(sim: SimFactory) -> None:
    engine = sim("trtllm", step_ms=5, exit_when_dead=True)
    os.kill(engine.rank().pid, signal.SIGKILL)

    def asked() -> bool:
        with contextlib.suppress(OSError):
            ask(engine, "/health")
        return engine.exit_code() == 1

    eventually(asked)


def test_the_hang_detector_kills_a_deadlocked_rank_and_says_so(sim: SimFactory, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    engine = sim("trtllm", step_ms=5, hang_detection_sec=0.5, log_file=log)
    engine.load(1, max_tokens=100_000)
    engine.fault(deadlock=True)
    eventually(lambda: ask(engine, "/health").status == 503)
    assert log.read_text().endswith("[TRT-LLM] [E] Hang detected after 0.5 seconds.\n")


def test_the_hang_detector_lets_an_idle_and_a_busy_executor_live(sim: SimFactory) -> None:
    engine = sim("trtllm", step_ms=5, hang_detection_sec=0.4, iter_stats=True)
    assert ask(engine, "/metrics").seconds > 2 * 0.4
    body = {"prompt": "Test", "max_tokens": 10**5}
    assert hangs(lambda: ask(engine, "/v1/completions", body, timeout=2 * 0.4))
    assert ask(engine, "/health").status == 200
    assert canary(engine).status == 200


def test_the_hang_detector_sleeps_with_a_stopped_process(sim: SimFactory, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    engine = sim("trtllm", step_ms=5, hang_detection_sec=0.3, log_file=log)
    engine.load(1, max_tokens=100_000)
    engine.stop()
    assert hangs(lambda: canary(engine, timeout=0.9))
    assert ask(engine, "/health").status == 200
    assert not log.exists()


def test_a_restart_begins_with_iteration_one(sim: SimFactory) -> None:
    engine = sim("trtllm", step_ms=5, iter_stats=True)
    complete(engine, max_tokens=9)
    assert records(engine)[-1]["iter"] == 9
    engine.stop()
    engine.restart()
    engine.wait_serving(2)
    complete(engine, max_tokens=2)
    assert records(engine)[-1]["iter"] == 2
