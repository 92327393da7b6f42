"""TensorRT-LLM's profile says what its source says."""

from collections.abc import Callable
from typing import Any

import pytest
import re2
from scripted_profile import ScriptedProfile
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings
from enginewatch.engines import ALL_NAMES, CONSUMED_PATHS, UNKNOWN, recognise
from enginewatch.engines.profile import Grain
from enginewatch.engines.trtllm import PROFILE

READ = PROFILE.on_json_statistics()


def test_every_leg_of_its_page_moves_only_when_a_request_ends() -> None:
    assert {leg.grain for leg in PROFILE.legs} == {Grain.REQUEST}


def test_no_gauge_of_its_page_calls_it_busy() -> None:
    """They are written when a request ends: running=1 stays there for as long as the engine is idle."""
    assert not PROFILE.running.names
    assert not PROFILE.waiting.names
    assert not {name for name in ALL_NAMES if name.startswith("trtllm") and "num_requests" in name}


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "", "error"])
def test_a_client_that_gives_up_is_no_progress(reason: str) -> None:
    leg = next(leg for leg in PROFILE.legs if leg.name == "requests_finished")
    assert not leg.metric.accepts({"finished_reason": reason})
    assert leg.metric.accepts({"finished_reason": "length"})
    assert leg.metric.accepts({"finished_reason": "not_finished"}), "a prefill worker's share of a request"


def test_its_page_is_not_where_its_statistics_are() -> None:
    assert PROFILE.json_statistics is not None
    assert PROFILE.json_statistics.path == "/metrics"
    assert PROFILE.metrics_path not in CONSUMED_PATHS
    assert frozenset({"/metrics"}) == CONSUMED_PATHS


def test_the_statistics_move_with_each_iteration_unless_they_come_with_the_end_of_a_request() -> None:
    assert [(leg.name, leg.grain) for leg in READ.legs] == [("iterations", Grain.STEP)]
    assert [leg.grain for leg in PROFILE.on_json_statistics(batched=True).legs] == [Grain.REQUEST]
    assert READ.names() == {"json:iter", "json:numActiveRequests", "json:numQueuedRequests"}
    assert READ.reads_json_statistics
    assert READ.kind == PROFILE.kind
    assert READ.canaries == PROFILE.canaries
    assert READ.names().isdisjoint(ALL_NAMES), "no page is searched for them"


def test_the_same_choice_is_the_same_profile() -> None:
    """So that it is not learned anew each time the engine says again who it is."""
    assert PROFILE.on_json_statistics() == READ
    assert PROFILE.on_json_statistics(batched=True) != READ


def test_an_engine_without_such_statistics_has_nothing_to_switch() -> None:
    assert UNKNOWN.on_json_statistics() is UNKNOWN


def test_a_worker_with_a_role_is_asked_to_do_both_halves_by_itself() -> None:
    for role in ("prefill", "decode"):
        body = PROFILE.canaries[role].body
        assert body is not None
        assert body["disaggregated_params"] == {"request_type": "context_and_generation"}
    assert "disaggregated_params" not in (PROFILE.canaries["agg"].body or {})


@pytest.mark.parametrize(
    ("line", "means_dead"),
    [
        ("[11/29/2026-23:38:55] [TRT-LLM] [E] Hang detected after 300 seconds.", True),
        ("[TRT-LLM] [E] [_torch][RANK 7] Executor loop crashed on this rank; hard-killing all 8 ranks in 9.9 s", True),
        ("[TRT-LLM] [I] Started background iteration stats collector task", False),
        ("[TRT-LLM] [W] hang detection is paused", False),
    ],
)
def test_only_a_dead_executor_writes_a_signature(line: str, means_dead: bool) -> None:
    assert any(re2.search(pattern, line) for pattern in PROFILE.log_signatures) == means_dead


def test_the_oldest_pages_have_no_prefix(parse: Callable[[str], Any]) -> None:
    """As 89fd9b7 wrote them. Such a page does not tell whose it is; its /v1/models does."""
    page = parse(
        'request_success_total{engine_type="undefined",finished_reason="length",model_name="undefined"} 4.0\n'
        'e2e_request_latency_seconds_count{engine_type="undefined",model_name="undefined"} 4.0\n'
    )
    assert list(page.legs(PROFILE)) == ["requests_finished"]
    assert recognise(page.names) is None


def test_of_the_gauges_that_stay_where_they_are_none_is_read(load: Callable[[str], Any]) -> None:
    page = load("trtllm-050f80d-names-generated")
    assert "trtllm_num_requests_running" in page.names
    assert "trtllm_num_requests_running" not in PROFILE.names()


# --- what the judgement makes of it, in seconds that are written here and not taken from the profile ------------------

HUNG_AT = 302.0
LATE_SEC = 20.0
"""A poll, a canary and a little."""


def test_without_its_page_two_canaries_of_a_minute_each_are_a_hang() -> None:
    engine = ScriptedProfile(PROFILE).fail("http_404").at(HUNG_AT, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings(warmup_sec=0), kind="trtllm").run(HUNG_AT + 600)
    hung_at = shell.first("canary-hang")
    assert hung_at is not None
    assert HUNG_AT + 105 <= hung_at <= HUNG_AT + 120 + LATE_SEC


def test_a_503_on_its_page_is_no_load() -> None:
    """It does not listen before its model is loaded; a 503 that stays is an executor that has died."""
    engine = ScriptedProfile(PROFILE).busy()
    engine.at(HUNG_AT, lambda engine: engine.hang().fail("http_503").answer(Outcome.ERROR_ANSWER))
    shell = VirtualShell(engine, Settings(warmup_sec=0), kind="trtllm").run(HUNG_AT + 600)
    hung_at = shell.first("unreach-hang")
    assert hung_at is not None
    assert HUNG_AT + 300 <= hung_at <= HUNG_AT + 300 + LATE_SEC
