"""The engines' own HTTP interfaces, as far as somebody who watches or uses them can tell."""

from __future__ import annotations

import json

import pytest
from tests.lab.conftest import SimFactory
from tests.lab.sim_asking import ask, canary, hangs, page, value

from enginewatch.lab.sim.process import SimProcess


@pytest.fixture
def vllm(warm: SimFactory) -> SimProcess:
    return warm("vllm", step_ms=5)


@pytest.fixture
def sglang(warm: SimFactory) -> SimProcess:
    return warm("sglang", step_ms=5)


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_a_vllm_completion_tells_its_tokens_and_why_it_ended(vllm: SimProcess) -> None:
    answer = ask(vllm, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}).json
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 4


def test_a_vllm_stream_ends_with_usage_and_done(vllm: SimProcess) -> None:
    body = {"prompt": "Test", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(ask(vllm, "/v1/completions", body).text)
    assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert json.loads(usage)["usage"]["completion_tokens"] == 3
    assert done == "[DONE]"


def test_chat_has_messages_and_deltas(vllm: SimProcess, sglang: SimProcess) -> None:
    for engine in (vllm, sglang):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        answer = ask(engine, "/v1/chat/completions", body).json
        assert answer["choices"][0]["message"]["content"] == " token token"
        first, *_ = events(ask(engine, "/v1/chat/completions", body | {"stream": True}).text)
        assert json.loads(first)["choices"][0]["delta"]["content"] == " token"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "x", "model": "another"}, 404),
        ({"model": "simulated-model"}, 400),
        ({"prompt": "x", "max_tokens": -1}, 400),
        ({"prompt": "x", "max_tokens": 10**9}, 400),
        (["x"], 400),
    ],
)
def test_a_bad_request_gets_its_status(vllm: SimProcess, body: object, status: int) -> None:
    assert ask(vllm, "/v1/completions", body).status == status


def test_a_request_can_be_aimed_at_a_core(warm: SimFactory) -> None:
    for engine, label in (("vllm", "engine"), ("sglang", "dp_rank")):
        name = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:realtime_tokens_total"}[engine]
        pair = warm(engine, dp=2, step_ms=5)
        before = page(pair)
        assert canary(pair, core=1).status == 200
        after = page(pair)
        moved = [core for core in "01" if value(after, name, **{label: core}) != value(before, name, **{label: core})]
        assert moved == ["1"]
        assert canary(pair, core=2).status == 400


def test_requests_are_spread_over_idle_cores(warm: SimFactory) -> None:
    pair = warm("vllm", dp=2, step_ms=5)
    before = [value(page(pair), "vllm:generation_tokens_total", engine=core) or 0 for core in "01"]
    for _ in range(4):
        canary(pair)
    after = [value(page(pair), "vllm:generation_tokens_total", engine=core) or 0 for core in "01"]
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 2]


def test_the_vllm_key_guards_the_openai_routes_only(warm: SimFactory) -> None:
    engine = warm("vllm", api_key="secret")
    assert canary(engine).status == 401
    assert ask(engine, "/v1/models").status == 401
    allowed = ask(engine, "/v1/models", headers={"Authorization": "Bearer secret"})
    assert allowed.json["data"][0]["id"] == "simulated-model"
    assert ask(engine, "/health").status == ask(engine, "/metrics").status == 200


def test_the_sglang_key_guards_all_but_health_and_metrics(warm: SimFactory) -> None:
    engine = warm("sglang", api_key="secret")
    for path in ("/v1/models", "/server_info", "/v1/loads"):
        assert ask(engine, path).status == 401
    assert canary(engine).status == 401
    assert ask(engine, "/metrics").status == ask(engine, "/health").status == 200


def test_dev_mode_routes_are_absent_without_it(vllm: SimProcess) -> None:
    assert ask(vllm, "/is_sleeping").status == ask(vllm, "/is_paused").status == 404
    assert ask(vllm, "/pause", {}).status == 404


def test_versions_are_told(warm: SimFactory) -> None:
    assert ask(warm("vllm", version="0.21.0"), "/version").json == {"version": "0.21.0"}
    assert ask(warm("sglang", step_ms=5), "/server_info").json["version"] == "0.5.23"


def test_load_counts_open_requests_only_when_asked_to(warm: SimFactory) -> None:
    tracking = warm("vllm", step_ms=5, load_tracking=True)
    tracking.stop()
    assert hangs(lambda: canary(tracking, timeout=0.2))
    assert ask(tracking, "/load").json == {"server_load": 0}
    assert ask(warm("vllm", step_ms=5), "/load").json == {"server_load": 0}


def test_http_requests_are_counted_when_the_response_ends(vllm: SimProcess) -> None:
    def counted() -> float:
        return value(page(vllm), "http_requests_total", handler="/v1/completions", status="2xx") or 0.0

    before = counted()
    canary(vllm)
    assert counted() == before + 1
    vllm.stop()
    assert hangs(lambda: canary(vllm, timeout=0.2))
    assert counted() == before + 1


def test_health_and_metrics_are_not_counted(vllm: SimProcess) -> None:
    ask(vllm, "/health")
    text = page(vllm)
    assert value(text, "http_requests_total", handler="/health") is None
    assert value(text, "http_requests_total", handler="/metrics") is None


def test_sglang_streams_text_that_grows(sglang: SimProcess) -> None:
    body = {"text": "Test", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    *chunks, done = events(ask(sglang, "/generate", body).text)
    assert [json.loads(chunk)["text"] for chunk in chunks] == [" token", " token token", " token token token"]
    assert json.loads(chunks[-1])["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert done == "[DONE]"


def test_sglang_counts_requests_at_their_end_and_leaves_health_probes_out(sglang: SimProcess) -> None:
    def tokens() -> tuple[float, float]:
        text = page(sglang)
        found = [value(text, f"sglang:{name}_total") or 0.0 for name in ("generation_tokens", "realtime_tokens")]
        return found[0], found[1]

    generated, realtime = tokens()
    assert ask(sglang, "/health").status == 200
    assert tokens() == (generated, realtime + 1)
    sglang.load(1, max_tokens=100_000)
    generated, realtime = tokens()
    assert hangs(
        lambda: ask(sglang, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 9000}}, timeout=0.3)
    )
    later = tokens()
    assert later[0] == generated
    assert later[1] > realtime


def test_sglang_series_of_work_are_absent_until_the_first_request(sim: SimFactory) -> None:
    engine = sim("sglang", step_ms=5)
    fresh = page(engine)
    for name in ("realtime_tokens_total", "cuda_graph_passes_total", "generation_tokens_total", "prompt_tokens_total"):
        assert value(fresh, f"sglang:{name}") is None
    assert "process_start_time" not in fresh
    assert value(fresh, "sglang:num_running_reqs") == 0


def test_loads_age_with_a_hung_scheduler(sglang: SimProcess) -> None:
    def age() -> float:
        told = ask(sglang, "/v1/loads").json
        return float(told["timestamp"] - told["loads"][0]["timestamp"])

    canary(sglang)
    assert age() < 1.5
    sglang.stop()
    assert hangs(lambda: canary(sglang, timeout=1.6))
    assert age() > 1.5


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_sglang_pair_serves_the_fake_host_and_lets_plain_requests_wait(warm: SimFactory, role: str) -> None:
    engine = warm("sglang", role=role, step_ms=5)
    body = {"text": "Test", "sampling_params": {"max_new_tokens": 1}}
    fake = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 0}
    assert ask(engine, "/generate", body | fake).status == 200
    assert hangs(lambda: ask(engine, "/generate", body, timeout=0.3))
    assert ask(engine, "/health").status == 200


def test_a_vllm_decode_engine_runs_a_plain_request_by_itself(warm: SimFactory) -> None:
    engine = warm("vllm", role="decode", step_ms=5)
    engine.fault(peer_gone=True)
    assert canary(engine).status == 200
    remote = {"prompt": "Test", "max_tokens": 1, "kv_transfer_params": {"do_remote_prefill": True}}
    assert hangs(lambda: ask(engine, "/v1/completions", remote, timeout=0.3))
    engine.load(2, max_tokens=4)
    before = value(page(engine), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert before == 0
    engine.fault(peer_gone=False)
    assert ask(engine, "/v1/completions", remote).status == 200
    after = value(page(engine), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert (after or 0) > 0
