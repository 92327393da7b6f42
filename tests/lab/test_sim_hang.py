"""SIGSTOP on a rank leaves what it leaves on the real engines: HTTP answers, the page is stale, requests hang."""

from __future__ import annotations

import asyncio
import http.client
import json

import pytest
from tests.lab.conftest import SimFactory
from tests.lab.sim_asking import ask, canary, eventually, generation_path, hangs, page, value

from enginewatch.client.target import EngineClient, Target
from enginewatch.core.events import Flags
from enginewatch.engines import PROFILES
from enginewatch.lab.sim.process import SimProcess

WAIT = 0.5
"""How long a request is watched before it counts as hanging; a healthy one takes 5 ms here."""


@pytest.fixture
def vllm(warm: SimFactory) -> SimProcess:
    return warm("vllm", step_ms=5, dev_mode=True, load_tracking=True)


@pytest.fixture
def sglang(warm: SimFactory) -> SimProcess:
    engine = warm("sglang", step_ms=5, health_timeout_sec=1.5)
    if ask(engine, "/ping").status != 200:
        ask(engine, "/health")  # a test before left it with a failed one
    return engine


@pytest.fixture
def trtllm(warm: SimFactory) -> SimProcess:
    return warm("trtllm", step_ms=5, iter_stats=True)


@pytest.fixture(params=["vllm", "sglang", "trtllm"])
def either(request: pytest.FixtureRequest) -> SimProcess:
    engine: SimProcess = request.getfixturevalue(request.param)
    return engine


def flags(sim: SimProcess) -> Flags:
    """What a sidecar learns of a pause."""

    async def told() -> Flags:
        client = EngineClient(Target.parse(f"http://127.0.0.1:{sim.port}"))
        try:
            return await client.read_flags(PROFILES[sim.engine].flag_endpoints)
        finally:
            await client.close()

    return asyncio.run(told())


def running(text: str, **labels: str) -> float | None:
    return value(text, "vllm:num_requests_running", **labels)


def test_a_vllm_core_stopped_under_load_keeps_its_gauges_and_freezes_its_counters(vllm: SimProcess) -> None:
    vllm.load(2, max_tokens=10_000)
    eventually(lambda: running(page(vllm)) == 2)
    vllm.stop()
    before = page(vllm)
    assert hangs(lambda: canary(vllm, timeout=WAIT))
    after = page(vllm)
    for name in ("generation_tokens_total", "iteration_tokens_total_count", "num_requests_running"):
        assert value(after, f"vllm:{name}") == value(before, f"vllm:{name}")
    assert (running(after), value(after, "vllm:num_requests_waiting")) == (2, 0)


def test_a_vllm_core_stopped_while_idle_looks_idle_after_requests_were_sent(vllm: SimProcess) -> None:
    canary(vllm)
    vllm.stop()
    before = page(vllm)
    for _ in range(2):
        assert hangs(lambda: canary(vllm, timeout=WAIT))
    after = page(vllm)
    moved = {
        line
        for line in set(after.splitlines()) ^ set(before.splitlines())
        if line.startswith("vllm:") and "abort" not in line and "histogram" not in line
    }
    assert not {line for line in moved if "_tokens_total{" in line or "num_requests" in line or "kv_cache" in line}
    assert (running(after), value(after, "vllm:num_requests_waiting")) == (0, 0)


def test_vllm_routes_that_do_not_touch_the_core_answer_while_it_hangs(vllm: SimProcess) -> None:
    vllm.load(2)
    vllm.stop()
    for path in ("/health", "/ping", "/v1/models", "/version", "/load", "/metrics"):
        answer = ask(vllm, path)
        assert answer.status == 200
        assert answer.seconds < 0.3


def test_vllm_routes_that_ask_the_core_hang_with_it(vllm: SimProcess) -> None:
    assert ask(vllm, "/is_sleeping").json == {"is_sleeping": False}
    vllm.stop()
    for path in ("/is_sleeping", "/is_paused"):
        assert hangs(lambda path=path: ask(vllm, path, timeout=WAIT))  # type: ignore[misc]
    vllm.cont()
    assert ask(vllm, "/is_paused").json == {"is_paused": False}


def test_a_sglang_scheduler_stopped_under_load_freezes_all_of_its_series(sglang: SimProcess) -> None:
    sglang.load(2, max_tokens=10_000)
    eventually(lambda: value(page(sglang), "sglang:num_running_reqs") == 2)
    sglang.stop()
    before = page(sglang)
    assert hangs(lambda: canary(sglang, timeout=WAIT))
    after = page(sglang)
    for name in (
        "realtime_tokens_total",
        "cuda_graph_passes_total",
        "num_running_reqs",
        "scheduler_idle_seconds_total",
    ):
        assert value(after, f"sglang:{name}") == value(before, f"sglang:{name}")


def test_only_the_heartbeat_tells_a_stopped_idle_scheduler_from_a_healthy_one(sglang: SimProcess) -> None:
    def heartbeat() -> float:
        return value(page(sglang), "sglang:scheduler_idle_seconds_total") or 0.0

    first = heartbeat()
    eventually(lambda: heartbeat() > first)
    sglang.stop()
    stopped = heartbeat()
    assert hangs(lambda: canary(sglang, timeout=1.2))
    assert heartbeat() == stopped
    assert value(page(sglang), "sglang:num_running_reqs") == 0


def test_sglang_health_goes_through_the_scheduler_and_ready_does_not(sglang: SimProcess) -> None:
    healthy = ask(sglang, "/health")
    assert healthy.status == 200
    assert 1.0 <= healthy.seconds < 1.5
    sglang.stop()
    assert ask(sglang, "/ready").status == 200
    assert hangs(lambda: ask(sglang, "/server_info", timeout=WAIT))
    assert ask(sglang, "/v1/loads").status == 200
    sick = ask(sglang, "/health_generate")
    assert sick.status == 503
    assert sick.seconds >= 1.5
    assert ask(sglang, "/ready").status == 503


def test_a_stream_from_a_hung_engine_begins_with_a_200_and_brings_nothing(either: SimProcess) -> None:
    either.stop()
    connection = http.client.HTTPConnection("127.0.0.1", either.port, timeout=WAIT)
    connection.request("POST", generation_path(either), json.dumps({"prompt": "a", "text": "a", "stream": True}))
    response = connection.getresponse()
    assert response.status == 200
    with pytest.raises(TimeoutError):
        response.read(1)
    connection.close()


def test_everything_resumes_after_sigcont(either: SimProcess) -> None:
    either.load(2)
    either.stop()
    assert hangs(lambda: canary(either, timeout=WAIT))
    either.cont()
    assert canary(either).status == 200


def test_control_without_a_stop_the_same_requests_are_answered(either: SimProcess) -> None:
    either.load(2)
    assert not hangs(lambda: canary(either, timeout=WAIT))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_one_stopped_core_of_several_is_invisible_in_the_sum(sim: SimFactory, engine: str) -> None:
    label = {"vllm": "engine", "sglang": "dp_rank"}[engine]
    name = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:realtime_tokens_total"}[engine]
    cluster = sim(engine, dp=3, step_ms=5)
    cluster.load(6)
    eventually(lambda: all((value(page(cluster), name, **{label: core}) or 0) > 9 for core in "012"))
    cluster.stop(1)
    before = page(cluster)
    assert hangs(lambda: canary(cluster, core=1, timeout=WAIT))
    after = page(cluster)
    assert value(after, name, **{label: "1"}) == value(before, name, **{label: "1"})
    assert (value(after, name) or 0) > (value(before, name) or 0)
    assert canary(cluster, core=0).status == canary(cluster, core=2).status == 200
    assert ask(cluster, "/health").status == 200


def test_a_stopped_front_end_accepts_connections_and_answers_nothing(vllm: SimProcess) -> None:
    vllm.pause_pid(vllm.pid)
    assert hangs(lambda: ask(vllm, "/health", timeout=WAIT))
    vllm.resume_pid(vllm.pid)
    assert ask(vllm, "/health").status == 200


def test_a_long_chunked_prefill_moves_only_the_kv_gauge(vllm: SimProcess) -> None:
    before = page(vllm)
    vllm.prefill(1.5, chunks=15)
    eventually(lambda: running(page(vllm)) == 1)
    pages = [page(vllm)]
    while (value(pages[-1], "vllm:kv_cache_usage_perc") or 0.0) < 0.2:
        pages.append(page(vllm))
    usage = [value(text, "vllm:kv_cache_usage_perc") or 0.0 for text in pages]
    assert usage == sorted(usage)
    assert len(set(usage)) >= 3
    for name in ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_count"):
        assert {value(text, f"vllm:{name}") for text in pages} == {value(before, f"vllm:{name}")}
    prompts = value(before, "vllm:prompt_tokens_total") or 0
    eventually(lambda: (value(page(vllm), "vllm:prompt_tokens_total") or 0) > prompts + 100_000)


def test_a_paused_vllm_with_a_pending_request_looks_like_a_hung_idle_one(vllm: SimProcess) -> None:
    assert ask(vllm, "/pause", {}).status == 200
    assert hangs(lambda: canary(vllm, timeout=WAIT))
    text = page(vllm)
    assert (running(text), value(text, "vllm:num_requests_waiting")) == (0, 0)
    assert value(text, "vllm:engine_sleep_state", sleep_state="awake") == 1
    assert ask(vllm, "/is_paused").json == {"is_paused": True}
    ask(vllm, "/resume", {})
    assert canary(vllm).status == 200


def test_a_sleeping_vllm_says_so_on_its_page(vllm: SimProcess) -> None:
    assert ask(vllm, "/sleep?level=1", {}).status == 200
    assert value(page(vllm), "vllm:engine_sleep_state", sleep_state="awake") == 0
    assert value(page(vllm), "vllm:engine_sleep_state", sleep_state="weights_offloaded") == 1
    assert ask(vllm, "/is_sleeping").json == {"is_sleeping": True}
    ask(vllm, "/wake_up", {})
    assert value(page(vllm), "vllm:engine_sleep_state", sleep_state="awake") == 1


def test_a_paused_sglang_is_not_ready_and_its_health_fails(sglang: SimProcess) -> None:
    assert ask(sglang, "/pause_generation", {"mode": "in_place"}).status == 200
    assert (ask(sglang, "/ready").status, ask(sglang, "/ping").status) == (503, 200)
    assert ask(sglang, "/health").status == 503
    assert ask(sglang, "/ping").status == 503
    assert ask(sglang, "/continue_generation", {}).status == 200
    assert ask(sglang, "/health").status == 200
    assert ask(sglang, "/ping").status == 200


def test_a_sidecar_can_tell_the_pause_of_a_sglang_and_not_its_hang(sglang: SimProcess) -> None:
    assert flags(sglang) is Flags.CLEAR
    sglang.stop()
    assert flags(sglang) is Flags.CLEAR
    sglang.cont()
    assert ask(sglang, "/pause_generation", {"mode": "in_place"}).status == 200
    assert flags(sglang) is Flags.PAUSED
    assert ask(sglang, "/continue_generation", {}).status == 200
    assert flags(sglang) is Flags.CLEAR


def test_an_older_sglang_tells_nothing_of_a_pause_by_ping(warm: SimFactory) -> None:
    engine = warm("sglang", step_ms=5, health_timeout_sec=0.1, version="0.5.19")
    assert ask(engine, "/ready").status == 404
    assert ask(engine, "/pause_generation", {"mode": "in_place"}).status == 200
    assert ask(engine, "/health").status == 503
    assert ask(engine, "/ping").status == 200


def test_a_client_that_leaves_a_hung_core_is_an_abort_and_no_success(vllm: SimProcess) -> None:
    def finished(reason: str) -> float:
        return value(page(vllm), "vllm:request_success_total", finished_reason=reason) or 0.0

    length, aborted = finished("length"), finished("abort")
    vllm.stop()
    assert hangs(lambda: canary(vllm, timeout=0.2))
    eventually(lambda: finished("abort") == aborted + 1)
    assert finished("length") == length
    assert vllm.state()["ranks"][0]["open_requests"] == 0
