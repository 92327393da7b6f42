"""Prefill and decode workers: a queue that stands still is the partner's fault, or a stale identity's. Not a hang."""

from __future__ import annotations

import pytest
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings
from enginewatch.engines.profile import Role

SGLANG_QUEUES = [
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_prealloc_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
]
DEFERRED = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"}'
CAPACITY = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"}'
EXTERNAL = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"}'
LOCAL = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"}'
FAILED = 'vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"}'


def sglang(queue: str, *, role: Role, busy: bool = False) -> VirtualShell:
    engine = ScriptedSGLang()
    engine.queues[queue] = 0.0
    if busy:
        engine.busy()
    engine.at(62, lambda e: e.queues.update({queue: 3.0}))
    return VirtualShell(engine, kind="sglang", role=role)


def vllm(role: Role = "decode", also: str | None = None) -> VirtualShell:
    engine = ScriptedEngine()
    engine.extra.update({DEFERRED: 0.0} | ({also: 0.0} if also else {}))
    engine.at(62, lambda e: _waiting(e, 2.0))
    return VirtualShell(engine, role=role)


def _waiting(engine: ScriptedEngine, requests: float) -> None:
    engine.extra[DEFERRED] = engine.cores["0"].waiting = requests


def _let_rise(engine: ScriptedEngine, series: str) -> None:
    for second in range(3, 300, 3):
        engine.at(second, lambda e: e.extra.update({series: e.extra[series] + 1}))


@pytest.mark.parametrize("queue", SGLANG_QUEUES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_queue_that_stands_still_is_a_peer_stall_not_a_hang(role: Role, queue: str) -> None:
    shell = sglang(queue, role=role).run(200)
    assert shell.state == "peer-stall"
    assert shell.acted() == []
    first = shell.first("peer-stall")
    assert first is not None
    assert 65 + 60 <= first <= 65 + 66


@pytest.mark.parametrize("queue", SGLANG_QUEUES)
def test_an_aggregated_worker_has_no_peer(queue: str) -> None:
    """The series exist, at zero or not, in every role."""
    assert "peer-stall" not in sglang(queue, role="agg").run(300).states


def test_vllm_requests_deferred_for_ever_are_one() -> None:
    """The prefill restarted and its engine_id is stale: requests hang 480 s (smg#2491)."""
    shell = vllm().run(200)
    assert shell.state == "peer-stall"
    assert shell.acted() == []
    assert "partner" in shell.watch.verdict.reason
    assert "deferred" in shell.watch.verdict.reason


def test_a_busy_worker_may_have_a_stuck_queue_too() -> None:
    assert sglang(SGLANG_QUEUES[3], role="decode", busy=True).run(200).state == "peer-stall"


def test_a_queue_that_falls_now_and_then_is_no_stall() -> None:
    shell = vllm()
    for second in range(70, 400, 40):
        shell.engine.at(second, lambda e: _waiting(e, 5.0)).at(second + 20, lambda e: _waiting(e, 4.0))
    assert "peer-stall" not in shell.run(400).states


def test_a_queue_that_only_grows_is() -> None:
    shell = vllm()
    for second in range(70, 200, 7):
        shell.engine.at(second, lambda e: _waiting(e, e.extra[DEFERRED] + 1))
    assert "peer-stall" in shell.run(200).states


def test_a_queue_that_empties_in_time_is_no_stall() -> None:
    shell = vllm()
    shell.engine.at(118, lambda e: _waiting(e, 0.0)).at(128, lambda e: _waiting(e, 1.0))
    assert "peer-stall" not in shell.run(180).states


@pytest.mark.parametrize("series", [EXTERNAL, 'vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"}'])
def test_successful_transfers_acquit_the_partner(series: str) -> None:
    shell = vllm(also=series)
    _let_rise(shell.engine, series)
    assert "peer-stall" not in shell.run(300).states


@pytest.mark.parametrize("series", [LOCAL, FAILED])
def test_failed_transfers_and_local_work_do_not(series: str) -> None:
    shell = vllm(also=series)
    _let_rise(shell.engine, series)
    assert "peer-stall" in shell.run(300).states


def test_requests_that_wait_for_capacity_are_this_engines_own() -> None:
    engine = ScriptedEngine()
    engine.extra[CAPACITY] = 4.0
    engine.cores["0"].waiting = 4.0
    assert "peer-stall" not in VirtualShell(engine, role="decode").run(300).states


def test_the_operators_own_limit_counts() -> None:
    engine = ScriptedEngine()
    engine.extra[DEFERRED] = 0.0
    engine.at(62, lambda e: _waiting(e, 2.0))
    shell = VirtualShell(engine, Settings(warmup_sec=0, peer_stall_sec=200), role="decode").run(400)
    first = shell.first("peer-stall")
    assert first is not None
    assert first >= 65 + 200


def test_a_hang_outranks_a_stuck_queue() -> None:
    shell = vllm()
    shell.engine.at(62, ScriptedEngine.hang)
    assert shell.run(200).state == "stall-hang"


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_so_does_what_the_last_canary_said(outcome: Outcome) -> None:
    shell = vllm()
    shell.engine.at(62, lambda e: e.answer(outcome))
    assert shell.run(200).state == outcome.value


@pytest.mark.parametrize(("role", "hung"), [("decode", False), ("prefill", False), ("agg", True)])
def test_requests_deferred_for_a_partner_do_not_make_a_pd_worker_busy(role: Role, hung: bool) -> None:
    """Without canaries only a busy core can be hung."""
    engine = ScriptedEngine()
    engine.extra[DEFERRED] = 0.0
    engine.at(62, lambda e: _waiting(e, 2.0))
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_enabled=False), role=role).run(300)
    assert bool(shell.acted()) is hung


def test_others_that_wait_do() -> None:
    engine = ScriptedEngine()
    engine.extra[DEFERRED] = 2.0
    engine.cores["0"].waiting = 3.0
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_enabled=False), role="decode").run(300)
    assert shell.acted()


def test_a_peer_stall_is_logged_since_it_is_no_everyday_state() -> None:
    shell = vllm().run(200)
    assert any(log.fields.get("to") == "peer-stall" for log in shell.logs)
