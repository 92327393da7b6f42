"""The simulated pages against the real ones: same names, same labels, same comments, about the same size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.lab.conftest import SimFactory
from tests.lab.sim_asking import ask, canary, comments, eventually, page, shapes

from enginewatch.lab.sim.process import SimProcess

DATA = Path(__file__).resolve().parents[1] / "data"

MORE_THAN_THE_COLLECTOR_WROTE = {
    # The sample was written by the scheduler's and tokenizer's collector classes alone; these are made elsewhere in
    # the engine, or only by events that the sample does not have.
    ("sglang:process_cpu_seconds_total", ("component",)),
    ("sglang:max_total_num_tokens", ("engine_type", "model_name", "moe_ep_rank", "pp_rank", "tp_rank")),
}


def real(name: str) -> str:
    return (DATA / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimProcess]:
    with SimProcess("vllm", step_ms=2, model="tiny", dev_mode=True) as engine:
        ask(engine, "/is_sleeping")
        ask(engine, "/is_paused")
        ask(engine, "/v1/models")
        ask(engine, "/v1/completions", {"prompt": "word " * 400, "max_tokens": 8})
        yield engine


def test_a_single_process_vllm_page_has_the_series_of_the_real_one(vllm: SimProcess) -> None:
    assert shapes(page(vllm)) == shapes(real("vllm-0.32.0-single-decoding.prom"))


def test_its_families_are_described_and_typed_like_the_real_ones(vllm: SimProcess) -> None:
    assert comments(page(vllm)) == comments(real("vllm-0.32.0-single-decoding.prom"))


def test_it_is_about_as_large_as_the_real_one(vllm: SimProcess) -> None:
    assert len(page(vllm)) == pytest.approx(len(real("vllm-0.32.0-single-decoding.prom")), rel=0.1)


def test_its_content_type_is_the_real_one_whatever_is_asked_for(vllm: SimProcess) -> None:
    answer = ask(vllm, "/metrics", headers={"Accept": "application/openmetrics-text", "Accept-Encoding": "gzip"})
    assert answer.headers["Content-Type"] == "text/plain; version=1.0.0; charset=utf-8"
    assert "Content-Encoding" not in answer.headers


def test_a_fresh_vllm_page_has_the_series_of_a_fresh_real_one() -> None:
    with SimProcess("vllm", model="tiny", dev_mode=True) as engine:
        ask(engine, "/is_sleeping")
        ask(engine, "/is_paused")
        assert shapes(page(engine)) == shapes(real("vllm-0.32.0-single-idle-fresh.prom"))


def test_two_vllm_cores_have_the_page_of_a_multiprocess_registry() -> None:
    with SimProcess("vllm", step_ms=2, model="tiny", dp=2) as engine:
        fresh = page(engine)
        assert shapes(fresh) == shapes(real("vllm-0.32.0-dp2-api2-idle.prom"))
        assert comments(fresh) == comments(real("vllm-0.32.0-dp2-api2-idle.prom"))
        assert len(fresh) == pytest.approx(len(real("vllm-0.32.0-dp2-api2-idle.prom")), rel=0.1)


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.5.19", "0.5.23"])
def test_a_sglang_page_has_the_series_of_its_release(version: str) -> None:
    with SimProcess("sglang", step_ms=2, version=version) as engine:
        canary(engine)
        ask(engine, "/generate", {"text": "word", "sampling_params": {"max_new_tokens": 3}})
        page(engine)
        expected = real(f"sglang-{version}-collector-generated.prom")
        found = page(engine)
        assert shapes(found) - MORE_THAN_THE_COLLECTOR_WROTE == shapes(expected) - MORE_THAN_THE_COLLECTOR_WROTE
        extra = {name for name, _ in MORE_THAN_THE_COLLECTOR_WROTE}
        assert {it for it in comments(found) if it[1] not in extra} == {
            it for it in comments(expected) if it[1] not in extra
        }
        assert len(found) == pytest.approx(len(expected), rel=0.15)


def test_sglang_negotiates_openmetrics_and_gzip(warm: SimFactory) -> None:
    engine = warm("sglang", step_ms=5)
    plain = ask(engine, "/metrics")
    assert plain.headers["Content-Type"].startswith("text/plain")
    open_ = ask(engine, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert open_.headers["Content-Type"].startswith("application/openmetrics-text")
    assert open_.text.endswith("# EOF\n")
    packed = ask(engine, "/metrics", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["Content-Encoding"] == "gzip"
    assert packed.body[:2] == b"\x1f\x8b"


def test_sglang_start_up_durations_differ_between_processes_and_arrive_one_after_another() -> None:
    def phases(text: str) -> dict[str, str]:
        lines = [line for line in text.splitlines() if line.startswith("sglang:startup_time_seconds{")]
        return {line.split('phase="')[1].split('"')[0]: line.rpartition(" ")[2] for line in lines}

    with SimProcess("sglang") as engine:
        first = phases(page(engine))
        assert set(first) == {"load_weight", "kv_cache_allocation"}
        eventually(lambda: len(phases(page(engine))) == 3)
        engine.restart()
        engine.wait_serving(2)
        assert phases(page(engine))["load_weight"] != first["load_weight"]
