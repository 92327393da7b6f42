"""The SGLang scheduler model, batch by batch, without processes and without time passing."""

from __future__ import annotations

from typing import Any

import pytest

from enginewatch.lab.sim.sglang_core import SglangCore

Step = dict[str, Any]


class Bench:
    """Drives a scheduler on a virtual clock, as the rank's loop does."""

    def __init__(self, **config: Any) -> None:
        defaults = {
            "role": "agg",
            "step_sec": 0.01,
            "max_batched_tokens": 16,
            "max_running": 8,
            "block_size": 16,
            "kv_blocks": 1024,
            "transfer_sec": 0.5,
            "gauge_stale_sec": 0.0,
        }
        self.core = SglangCore(defaults | config)
        self.now = 0.0

    def add(self, id_: str, prompt: int = 4, max_tokens: int = 1, **fields: Any) -> None:
        self.core.handle({"op": "add", "id": id_, "prompt": prompt, "max": max_tokens, **fields}, self.now)

    def call(self, name: str, **args: Any) -> list[Step]:
        return self.core.handle({"op": "call", "call": 1, "name": name, "args": args}, self.now)

    def run(self, seconds: float) -> list[Step]:
        """What the loop tells in so much time."""
        told: list[Step] = []
        end = self.now + seconds
        while self.now < end:
            forward = self.core.begin(self.now)
            if forward is None:
                step = self.core.rest(self.now)
                rest = self.core.rest_sec()
                self.now += end - self.now if rest is None else rest
            else:
                self.now += forward
                step = self.core.complete(self.now)
            if step is not None:
                told.append(step)
        return told


def outputs(told: list[Step]) -> list[Step]:
    return [output for step in told for output in step["outputs"]]


def test_a_prefill_batch_goes_before_decoding() -> None:
    bench = Bench()
    bench.add("first", max_tokens=3)
    bench.run(0.015)
    bench.add("second", max_tokens=2)
    batches = [step["batch"] for step in bench.run(0.045) if "batch" in step]
    assert batches == ["prefill", "decode"]


def test_a_long_prompt_is_told_chunk_by_chunk() -> None:
    bench = Bench()
    bench.add("long", prompt=64, max_tokens=1)
    told = [step for step in bench.run(0.05) if "batch" in step]
    assert [(step["batch"], step["batch_tokens"]) for step in told] == [("prefill", 16)] * 4
    assert [step["gauges"]["token_usage"] > 0 for step in told[:3]] == [True] * 3


def test_an_unchunked_prefill_tells_nothing_until_its_end() -> None:
    bench = Bench()
    bench.add("long", prompt=2000, chunks=1, chunk_sec=14.7)
    told = bench.run(0.02)
    assert bench.now == pytest.approx(14.7)
    assert [step["batch_tokens"] for step in told] == [2000]


def test_gauges_are_told_at_prefill_and_every_forty_decode_steps() -> None:
    bench = Bench()
    bench.add("long", max_tokens=200)
    told = bench.run(1.3)
    with_gauges = [number for number, step in enumerate(told) if "gauges" in step]
    assert with_gauges == [0, 40, 80, 120]


def test_an_idle_scheduler_tells_its_gauges_at_once() -> None:
    bench = Bench()
    bench.run(0.5)
    bench.add("one", max_tokens=5)
    last = [step for step in bench.run(0.2) if "gauges" in step][-1]
    assert last["gauges"]["num_running_reqs"] == 0


def test_before_0_5_18_gauges_keep_their_value_when_the_engine_becomes_idle() -> None:
    bench = Bench(gauge_stale_sec=30.0)
    bench.run(0.5)
    for name in "abc":
        bench.add(name, max_tokens=60)
    running = [step["gauges"]["num_running_reqs"] for step in bench.run(20) if "gauges" in step]
    assert running[-1] == 3
    later = [step["gauges"]["num_running_reqs"] for step in bench.run(15) if "gauges" in step]
    assert later == [0]


def test_the_idle_loop_accounts_for_its_time_every_second() -> None:
    bench = Bench()
    told = bench.run(10.0)
    assert sum(step.get("idle", 0.0) for step in told) == pytest.approx(9.0, abs=1.1)
    assert len(told) <= 11


def test_time_at_work_is_not_idle_time() -> None:
    bench = Bench()
    bench.add("long", max_tokens=1000)
    assert sum(step.get("idle", 0.0) for step in bench.run(9.0)) == 0.0


def test_a_paused_scheduler_is_silent_and_keeps_its_requests() -> None:
    bench = Bench()
    bench.add("kept", max_tokens=20)
    bench.run(0.05)
    bench.call("pause", mode="in_place")
    bench.add("unseen")
    assert bench.run(60.0) == []
    bench.call("resume")
    finished = [output["id"] for output in outputs(bench.run(1.0)) if "finish" in output]
    assert sorted(finished) == ["kept", "unseen"]


def test_pausing_by_default_aborts_everything() -> None:
    bench = Bench()
    bench.add("gone", max_tokens=20)
    bench.run(0.05)
    told, _ = bench.call("pause")
    assert told["outputs"] == [{"id": "gone", "new": 0, "finish": "abort"}]


def test_an_idle_scheduler_runs_a_health_probe() -> None:
    bench = Bench()
    bench.add("HEALTH_CHECK", probe=True)
    told = bench.run(0.05)
    assert [step["batch"] for step in told if "batch" in step] == ["prefill"]
    assert outputs(told)[0]["finish"] == "length"


def test_a_busy_scheduler_acknowledges_a_health_probe_after_its_batch() -> None:
    bench = Bench()
    bench.add("work", max_tokens=100)
    bench.run(0.05)
    bench.add("HEALTH_CHECK", probe=True)
    told = bench.run(0.01)
    assert {"id": "HEALTH_CHECK", "new": 0, "finish": "ack"} in outputs(told)
    assert [step["batch"] for step in told] == ["decode"]


@pytest.mark.parametrize(("role", "queue"), [("prefill", "bootstrap"), ("decode", "prealloc")])
def test_a_plain_request_in_a_pair_waits_for_a_partner(role: str, queue: str) -> None:
    bench = Bench(role=role)
    bench.run(0.1)
    bench.add("plain", peer="missing")
    told = bench.run(30.0)
    assert outputs(told) == []
    assert [step["gauges"][queue] for step in told if "gauges" in step][-1] == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_with_the_fake_host_needs_no_partner(role: str) -> None:
    bench = Bench(role=role)
    bench.core.handle({"op": "tune", "peer_gone": True}, 0.0)
    bench.add("canary", peer="fake")
    assert [output["finish"] for output in outputs(bench.run(0.2))] == ["length"]


@pytest.mark.parametrize(
    ("role", "queues"), [("prefill", ["bootstrap", "inflight"]), ("decode", ["prealloc", "transfer"])]
)
def test_a_request_passes_the_queues_of_its_role(role: str, queues: list[str]) -> None:
    bench = Bench(role=role)
    bench.run(0.1)
    bench.add("paired", prompt=8, max_tokens=2, peer="peer")
    told = bench.run(3.0)
    seen = [name for step in told if "gauges" in step for name in queues if step["gauges"][name]]
    assert list(dict.fromkeys(seen)) == queues
    assert outputs(told)[-1]["finish"] == "length"


def test_a_partner_that_never_comes_is_given_up_after_five_minutes() -> None:
    bench = Bench(role="prefill")
    bench.add("plain", peer="missing")
    told = bench.run(301.0)
    assert outputs(told) == [{"id": "plain", "new": 0, "finish": "abort"}]
    assert sum(step.get("bootstrap_failed", 0) for step in told) == 1
