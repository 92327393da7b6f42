"""The vLLM scheduler model, step by step, without processes and without time passing."""

from __future__ import annotations

from typing import Any

from enginewatch.lab.sim.vllm_core import VllmCore

Step = dict[str, Any]


class Bench:
    """Drives a core on a virtual clock."""

    def __init__(self, **config: Any) -> None:
        defaults = {
            "step_sec": 0.01,
            "max_batched_tokens": 16,
            "max_running": 8,
            "block_size": 16,
            "kv_blocks": 1024,
            "transfer_sec": 0.5,
        }
        self.core = VllmCore(defaults | config)
        self.now = 0.0

    def add(self, id_: str, prompt: int = 4, max_tokens: int = 1, **fields: Any) -> None:
        self.core.handle({"op": "add", "id": id_, "prompt": prompt, "max": max_tokens, **fields}, self.now)

    def call(self, name: str, **args: Any) -> list[Step]:
        return self.core.handle({"op": "call", "call": 1, "name": name, "args": args}, self.now)

    def step(self) -> Step | None:
        seconds = self.core.begin(self.now)
        if seconds is None:
            return self.core.rest(self.now)
        self.now += seconds
        return self.core.complete(self.now)

    def steps(self) -> list[Step]:
        """Steps until there is nothing more to run."""
        told = []
        while (seconds := self.core.begin(self.now)) is not None:
            self.now += seconds
            told.append(self.core.complete(self.now))
        return told


def test_a_chunked_prefill_raises_only_the_kv_gauge_until_its_last_chunk() -> None:
    bench = Bench()
    bench.add("long", prompt=160, max_tokens=3)
    told = bench.steps()
    prefill = told[:9]
    assert all(step["outputs"] == [] for step in prefill)
    assert [step["running"] for step in prefill] == [1] * 9
    usage = [step["kv"] for step in prefill]
    assert usage == sorted(set(usage))
    assert [len(step["outputs"]) for step in told[9:]] == [1, 1, 1]
    assert told[-1]["kv"] == 0


def test_decoding_keeps_the_kv_gauge_flat_within_one_block() -> None:
    bench = Bench(block_size=128)
    bench.add("short", prompt=4, max_tokens=30)
    usage = {step["kv"] for step in bench.steps()[:-1]}
    assert len(usage) == 1


def test_the_prompt_is_told_once_with_the_first_output() -> None:
    bench = Bench()
    bench.add("one", max_tokens=4)
    outputs = [output for step in bench.steps() for output in step["outputs"]]
    assert [output.get("first", False) for output in outputs] == [True, False, False, False]
    assert outputs[-1]["finish"] == "length"


def test_admission_is_told_at_the_first_step_of_a_prefill() -> None:
    bench = Bench()
    bench.add("long", prompt=160)
    first, second, *_ = bench.steps()
    assert (first["queries"], second["queries"]) == (160, 0)


def test_a_canary_waits_behind_a_prefill_that_uses_the_whole_budget() -> None:
    bench = Bench()
    bench.add("long", prompt=160)
    bench.step()
    bench.add("canary", prompt=1)
    order = [output["id"] for step in bench.steps() for output in step["outputs"]]
    assert order == ["long", "canary"]


def test_a_canary_is_served_beside_decoding_requests() -> None:
    bench = Bench()
    bench.add("decoding", max_tokens=50)
    bench.step()
    bench.add("canary", prompt=1)
    step = bench.step()
    assert step is not None
    assert {output["id"] for output in step["outputs"]} == {"decoding", "canary"}


def test_an_unchunked_prefill_is_one_long_step() -> None:
    bench = Bench()
    bench.add("long", prompt=10_000, chunks=1, chunk_sec=30.0)
    (step,) = bench.steps()
    assert bench.now == 30.0
    assert step["outputs"][0]["finish"] == "length"


def test_requests_beyond_the_running_limit_wait() -> None:
    bench = Bench(max_running=2, max_batched_tokens=64)
    for number in range(5):
        bench.add(str(number), max_tokens=9)
    step = bench.step()
    assert step is not None
    assert (step["running"], step["waiting"], step["deferred"]) == (2, 3, 0)


def test_a_paused_core_says_nothing_of_a_request_that_arrives() -> None:
    bench = Bench()
    bench.call("pause", mode="keep")
    bench.add("unseen")
    assert bench.step() is None
    assert bench.core.rest_sec() is None
    assert bench.call("is_paused")[-1]["value"]["paused"] is True
    bench.call("resume")
    assert [output["id"] for step in bench.steps() for output in step["outputs"]] == ["unseen"]


def test_pausing_by_default_aborts_what_is_under_way() -> None:
    bench = Bench()
    bench.add("running", max_tokens=50)
    bench.step()
    told, answer = bench.call("pause")
    assert told["outputs"] == [{"id": "running", "new": 0, "finish": "abort"}]
    assert answer["value"]["paused"] is True


def test_pausing_with_wait_lets_running_requests_end_first() -> None:
    bench = Bench()
    bench.add("running", max_tokens=3)
    bench.step()
    assert bench.call("pause", mode="wait")[-1]["value"]["paused"] is False
    bench.add("late")
    assert [output["id"] for step in bench.steps() for output in step["outputs"]] == ["running", "running"]
    assert bench.call("is_paused")[-1]["value"]["paused"] is True


def test_an_abort_is_told_although_no_step_follows() -> None:
    bench = Bench()
    bench.add("gone", max_tokens=50)
    bench.step()
    bench.core.handle({"op": "abort", "id": "gone"}, bench.now)
    told = bench.step()
    assert told is not None
    assert (told["running"], told["kv"], told["outputs"]) == (0, 0, [])


def test_a_full_cache_preempts_the_youngest_and_everybody_finishes() -> None:
    bench = Bench(kv_blocks=4, max_batched_tokens=64)
    for name in ("old", "young"):
        bench.add(name, prompt=16, max_tokens=30)
    told = bench.steps()
    assert sum(step["preemptions"] for step in told) >= 1
    finished = [output["id"] for step in told for output in step["outputs"] if "finish" in output]
    assert finished == ["old", "young"]
    produced = [output["id"] for step in told for output in step["outputs"]]
    assert produced.count("young") == 30


def test_a_request_for_remote_kv_is_deferred_until_the_transfer_is_over() -> None:
    bench = Bench()
    bench.add("remote", prompt=64, peer="peer")
    told = bench.step()
    assert told is not None
    assert (told["running"], told["waiting"], told["deferred"]) == (0, 1, 1)
    bench.now += 1.0
    (step,) = bench.steps()
    assert step["outputs"][0]["remote"] is True


def test_a_partner_that_is_gone_leaves_the_request_deferred() -> None:
    bench = Bench()
    bench.core.handle({"op": "tune", "peer_gone": True}, 0.0)
    bench.add("remote", prompt=64, peer="peer")
    for _ in range(5):
        bench.now += 100.0
        told = bench.step()
        assert told is not None
        assert (told["waiting"], told["deferred"]) == (1, 1)
