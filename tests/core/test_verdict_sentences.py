"""Every verdict says why in one sentence that a tired operator understands at 3 a.m., and names the core."""

from __future__ import annotations

import itertools
import re

import pytest
from scenes import SCENES, run
from virtual_shell import ScriptedEngine

from enginewatch.core.settings import Settings
from enginewatch.core.states import CORE_STATES, ENGINE_STATES, EVERYDAY, HUNG


def test_there_is_a_scene_for_every_state() -> None:
    assert set(SCENES) == {state.name for state in (*ENGINE_STATES, *CORE_STATES)}


@pytest.mark.parametrize("state", list(SCENES))
def test_every_state_can_be_reached_and_says_why_in_one_sentence(state: str) -> None:
    verdict = SCENES[state]().watch.verdict
    assert verdict.state == state
    assert verdict.hung is verdict.acting is (state in HUNG)
    assert verdict.reason.strip() == verdict.reason != ""
    assert "\n" not in verdict.reason
    assert len(verdict.reason) <= 250
    assert not re.search(r"\. [A-Z]", verdict.reason), "one sentence"
    assert not re.search(r"nan|inf\b|None|Outcome|e\+\d", verdict.reason), "nothing that is no language"


@pytest.mark.parametrize("state", [state.name for state in CORE_STATES])
def test_a_core_that_decided_is_named(state: str) -> None:
    verdict = SCENES[state]().watch.verdict
    assert verdict.core == "0"
    assert "core 0" in verdict.reason


@pytest.mark.parametrize("state", [state.name for state in ENGINE_STATES])
def test_a_state_of_the_engine_as_a_whole_names_no_core(state: str) -> None:
    assert SCENES[state]().watch.verdict.core is None


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("startup", ["loading", "refused"]),
        ("startup-hang", ["budget of 60 s"]),
        ("unreach-grace", ["/metrics", "timeout", "of 60 s"]),
        ("unreach-hang", ["/metrics", "reset", "canaries failed"]),
        ("paused", ["paused"]),
        ("canary-hang", ["404", "canaries in a row failed", "timeout"]),
        ("no-legs", ["not metrics", "canaries alone"]),
        ("growing", ["generation_tokens"]),
        ("kv-growing", ["kv_cache_usage"]),
        ("stall-hang", ["limit 30 s", "canaries in a row failed", "1 running"]),
        ("stall-hang-log", ["the log", "canary failed", "1 running"]),
        ("probe-fail-grace", ["canaries in a row failed", "of 30 s"]),
        ("saturated", ["full"]),
        ("misconfigured", ["no hang"]),
        ("peer-stall", ["2 requests", "transfer", "partner"]),
    ],
)
def test_the_sentence_names_the_witnesses(state: str, words: list[str]) -> None:
    reason = SCENES[state]().watch.verdict.reason
    for word in words:
        assert word in reason


def test_the_sentence_is_the_log_line_of_a_transition() -> None:
    shell = SCENES["stall-hang"]()
    declared = next(verdict for _, verdict in shell.timeline if verdict.acting)
    line = next(log for log in shell.logs if log.fields.get("to") == "stall-hang")
    assert line.event == declared.reason
    assert line.level == "error"
    assert line.fields == {"from": "probe-fail-grace", "to": "stall-hang", "core": "0"}
    assert shell.evidence == [declared.reason]


def test_a_hang_that_is_not_acted_on_is_logged_as_a_warning() -> None:
    shell = run(ScriptedEngine().busy().at(62, ScriptedEngine.hang), 180, Settings())
    assert next(log for log in shell.logs if log.fields.get("to") == "warmup-stall-hang").level == "warning"


@pytest.mark.parametrize(
    ("state", "level"),
    [
        ("misconfigured", "warning"),
        ("no-legs", "warning"),
        ("observer-gap", "warning"),
        ("replaced", "info"),
        ("paused", "info"),
        ("restarting", "info"),
    ],
)
def test_states_in_which_an_operator_has_something_to_correct_are_warnings(state: str, level: str) -> None:
    assert {log.level for log in SCENES[state]().logs if log.fields.get("to") == state} == {level}


def test_changes_among_everyday_states_are_not_logged() -> None:
    engine = ScriptedEngine()
    for second in range(20, 600, 40):
        engine.at(second, ScriptedEngine.busy).at(second + 10, ScriptedEngine.prefill).at(
            second + 20, ScriptedEngine.idle
        )
    shell = run(engine, 600)
    assert {"growing", "kv-growing", "stall-active-ok", "freeze-grace"} <= set(shell.states)
    transitions = [log.fields for log in shell.logs if "to" in log.fields]
    assert not any(fields["to"] in EVERYDAY and fields["from"] in EVERYDAY for fields in transitions)
    assert len(transitions) == 1, "out of startup"


def test_evidence_is_captured_once_per_hang() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(200, ScriptedEngine.resume)
    engine.at(302, ScriptedEngine.hang)
    assert len(run(engine, 500).evidence) == 2


def test_evidence_is_captured_when_a_hang_is_declared_in_warm_up_not_again_when_it_is_acted_on() -> None:
    shell = run(ScriptedEngine().busy().at(62, ScriptedEngine.hang), 700, Settings())
    assert shell.watch.verdict.acting
    assert len(shell.evidence) == 1


def test_hung_changed_at_moves_only_when_hung_changes() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(200, ScriptedEngine.resume)
    timeline = run(engine, 300).timeline
    changes = {verdict.hung_changed_at for _, verdict in timeline}
    assert len(changes) == 3, "the start, the hang, its end"


def test_the_same_verdict_is_not_published_twice() -> None:
    timeline = [verdict for _, verdict in run(ScriptedEngine().busy(), 300).timeline]
    assert all(earlier != later for earlier, later in itertools.pairwise(timeline))


@pytest.mark.parametrize(("rate", "standing"), [(None, "idle"), (0.0, "nothing moves")])
def test_only_a_core_without_requests_is_called_idle(rate: float | None, standing: str) -> None:
    engine = ScriptedEngine()
    if rate is not None:
        engine.busy(rate=rate)
    alive = [verdict for _, verdict in run(engine, 100).timeline if verdict.state == "stall-active-ok"]
    assert alive
    assert {verdict.reason for verdict in alive} == {f"core 0: {standing}, the last canary went through"}
