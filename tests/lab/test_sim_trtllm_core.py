"""The TensorRT-LLM executor model, iteration by iteration, without processes and without time passing."""

from __future__ import annotations

from typing import Any

import pytest

from enginewatch.lab.sim.trtllm_core import TrtllmCore

Step = dict[str, Any]


class Bench:
    """Drives an executor on a virtual clock, as the worker's loop does."""

    def __init__(self, **config: Any) -> None:
        defaults = {
            "step_sec": 0.01,
            "max_batched_tokens": 16,
            "max_running": 8,
            "block_size": 16,
            "kv_blocks": 1024,
            "transfer_sec": 0.5,
            "iter_stats": True,
            "iter_stats_interval": 1,
            "iter_stats_max": 1000,
        }
        self.core = TrtllmCore(defaults | config)
        self.now = 0.0

    def add(self, id_: str, prompt: int = 4, max_tokens: int = 1, **fields: Any) -> None:
        self.core.handle({"op": "add", "id": id_, "prompt": prompt, "max": max_tokens, **fields}, self.now)

    def call(self, name: str) -> list[Step]:
        return self.core.handle({"op": "call", "call": 1, "name": name}, self.now)

    def run(self, seconds: float) -> list[Step]:
        """What the loop tells in so much time."""
        told: list[Step] = []
        end = self.now + seconds
        while self.now < end:
            forward = self.core.begin(self.now)
            if forward is None:
                rest = self.core.rest_sec()
                self.now = end if rest is None else self.now + rest
            else:
                self.now += forward
                told.append(self.core.complete(self.now))
        return told

    def records(self, name: str) -> list[Any]:
        return [record[name] for record in self.core.records]


def finished(told: list[Step]) -> list[str]:
    return [output["id"] for step in told for output in step["outputs"] if "finish" in output]


def test_every_iteration_leaves_a_record() -> None:
    bench = Bench()
    bench.add("one", max_tokens=5)
    bench.run(1.0)
    assert bench.records("iter") == [1, 2, 3, 4, 5]
    assert bench.records("iterLatencyMS") == [pytest.approx(10)] * 5
    assert bench.records("numCompletedRequests") == [0, 0, 0, 0, 1]


def test_an_idle_executor_makes_no_iteration() -> None:
    bench = Bench()
    assert bench.run(3600.0) == []
    assert not bench.core.records


def test_the_last_record_still_shows_the_requests_that_it_ended() -> None:
    bench = Bench()
    bench.add("one", max_tokens=2)
    bench.add("two", max_tokens=2)
    bench.run(1.0)
    assert bench.records("numActiveRequests")[-1] == 2
    assert bench.records("numCompletedRequests")[-1] == 2


def test_records_can_be_off_or_thinned() -> None:
    off, thin = Bench(iter_stats=False), Bench(iter_stats_interval=10)
    for bench in (off, thin):
        bench.add("one", max_tokens=35)
        bench.run(1.0)
    assert not off.core.records
    assert thin.records("iter") == [10, 20, 30]


def test_of_too_many_records_the_oldest_are_dropped() -> None:
    bench = Bench(iter_stats_max=3)
    bench.add("one", max_tokens=10)
    bench.run(1.0)
    assert bench.records("iter") == [8, 9, 10]


def test_a_long_prompt_leaves_a_record_per_chunk_and_fills_blocks() -> None:
    bench = Bench()
    bench.add("long", prompt=64, max_tokens=2)
    bench.run(1.0)
    batches = bench.records("inflightBatchingStats")
    assert [batch["numCtxTokens"] for batch in batches] == [16, 16, 16, 16, 0]
    assert [batch["numGenRequests"] for batch in batches] == [0, 0, 0, 0, 1]
    assert [cache["usedNumBlocks"] for cache in bench.records("kvCacheStats")] == [1, 2, 3, 4, 0]


def test_a_prefill_in_one_pass_leaves_no_record_until_its_end() -> None:
    bench = Bench()
    bench.add("long", prompt=2000, chunks=1, chunk_sec=14.7)
    assert bench.core.begin(0.0) == pytest.approx(14.7)
    assert not bench.core.records
    bench.core.complete(14.7)
    assert bench.records("iterLatencyMS") == [pytest.approx(14_700)]


def test_a_canary_runs_beside_a_long_generation() -> None:
    bench = Bench()
    bench.add("long", max_tokens=1000)
    bench.run(0.5)
    bench.add("canary")
    assert finished(bench.run(0.02)) == ["canary"]


def test_requests_beyond_the_batch_are_queued() -> None:
    bench = Bench(max_running=2)
    for id_ in "abc":
        bench.add(id_, max_tokens=3)
    told = bench.run(1.0)
    assert bench.records("numQueuedRequests")[:3] == [1, 1, 1]
    assert finished(told) == ["a", "b", "c"]


def test_a_generation_only_request_waits_for_its_kv_without_iterations() -> None:
    bench = Bench()
    bench.add("handed on", peer="peer")
    assert bench.run(0.4) == []
    assert finished(bench.run(0.3)) == ["handed on"]
    assert bench.records("inflightBatchingStats")[0]["numCtxTokens"] == 1


def test_one_whose_context_server_is_gone_waits_for_ever_and_others_do_not() -> None:
    bench = Bench()
    bench.core.handle({"op": "tune", "peer_gone": True}, 0.0)
    bench.add("orphan", peer="peer")
    assert bench.run(600.0) == []
    bench.add("canary")
    assert finished(bench.run(0.2)) == ["canary"]


def test_an_abort_frees_its_place() -> None:
    bench = Bench(max_running=1)
    bench.add("first", max_tokens=1000)
    bench.add("second")
    bench.run(0.1)
    bench.core.handle({"op": "abort", "id": "first"}, bench.now)
    assert finished(bench.run(0.1)) == ["second"]


def test_a_paused_executor_keeps_its_requests() -> None:
    bench = Bench()
    bench.add("kept", max_tokens=20)
    bench.run(0.05)
    bench.call("pause")
    assert bench.run(60.0) == []
    bench.call("resume")
    assert finished(bench.run(1.0)) == ["kept"]
