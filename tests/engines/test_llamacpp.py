"""What the llama.cpp profile finds on its server's pages, and which of it moves when."""

from __future__ import annotations

import pytest
from scripted_profile import ScriptedProfile
from tests.engines.test_samples import samples_of
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.progress import Ledger
from enginewatch.core.settings import Settings
from enginewatch.engines import recognise_answer
from enginewatch.engines.llamacpp import PROFILE
from enginewatch.engines.profile import Grain

PAGES = [f"llamacpp-0c1e57098-{name}" for name in ("idle-fresh", "decoding", "long-prompt", "long-prompt-later")]


def moved_between(before: str, after: str) -> set[str]:
    ledger = Ledger(PROFILE)
    for poll, name in enumerate((before, after), start=1):
        ledger.take(samples_of(name), float(poll), float(poll), poll, recheck=False)
    return {name for name, leg in ledger.cores["0"].legs.items() if leg.moved_at is not None}


def test_a_page_without_labels_is_one_core_with_every_leg() -> None:
    ledger = Ledger(PROFILE)
    ledger.take(samples_of(PAGES[0]), 0.0, 0.0, 1, recheck=False)
    [core] = ledger.cores.values()
    assert set(core.legs) == {leg.name for leg in PROFILE.legs}
    assert core.stall_after_sec(30.0) == 120.0
    assert core.stall_after_sec(300.0) == 300.0


def test_all_legs_move_while_requests_come_and_go() -> None:
    assert moved_between(PAGES[0], PAGES[1]) == {"decodes", "prompt_tokens", "predicted_tokens"}


def test_within_a_long_prompt_only_the_number_of_decodes_moves() -> None:
    assert moved_between(PAGES[2], PAGES[3]) == {"decodes"}
    assert {leg.name for leg in PROFILE.legs if leg.grain is Grain.STEP} == {"decodes"}


@pytest.mark.parametrize(("name", "running", "waiting"), [(PAGES[0], 0, 0), (PAGES[1], 2, 2), (PAGES[2], 1, 0)])
def test_slots_at_work_and_requests_without_one_are_told(name: str, running: int, waiting: int) -> None:
    ledger = Ledger(PROFILE)
    ledger.take(samples_of(name), 0.0, 0.0, 1, recheck=False)
    core = ledger.cores["0"]
    assert (core.running(ledger.page), core.waiting(ledger.page, without_deferred=False)) == (running, waiting)


@pytest.mark.parametrize(
    "name",
    ["n_tokens_max", "prompt_tokens_cached_total", "prompt_seconds_total", "prompt_tokens_seconds"],
)
def test_what_is_no_progress_is_not_asked_for(name: str) -> None:
    assert f"llamacpp:{name}" not in PROFILE.names()


def test_its_list_of_models_names_it() -> None:
    # As /v1/models answers; a field of Ollama's stands beside OpenAI's.
    answer = {"models": [{"name": "tiny"}], "object": "list", "data": [{"id": "tiny", "owned_by": "llamacpp"}]}
    assert recognise_answer("/v1/models", answer) is PROFILE


# --- what the judgement makes of it, in seconds that are written here and not taken from the profile ------------------

HUNG_AT = 302.0
LATE_SEC = 20.0
"""A poll, a canary and a little."""


def watch(engine: ScriptedEngine, until: float) -> VirtualShell:
    return VirtualShell(engine, Settings(warmup_sec=0), kind="llamacpp").run(until)


def hung_after(shell: VirtualShell, state: str) -> float:
    told = shell.first(state)
    assert told is not None, shell.states
    assert shell.acted()[0] == told
    return told - HUNG_AT


@pytest.mark.parametrize("stopped_sec", [100, None])
def test_two_minutes_without_a_step_are_a_hang_and_a_hundred_seconds_are_a_batch(stopped_sec: float | None) -> None:
    engine = ScriptedProfile(PROFILE).busy().at(HUNG_AT, ScriptedEngine.hang)
    if stopped_sec is not None:
        engine.at(HUNG_AT + stopped_sec, ScriptedEngine.resume)
        assert watch(engine, 1200).acted() == []
    else:
        assert 115 <= hung_after(watch(engine, 1200), "stall-hang") <= 120 + LATE_SEC


@pytest.mark.parametrize("silent_sec", [100, None])
def test_a_page_may_be_silent_for_as_long_as_a_batch_takes(silent_sec: float | None) -> None:
    """Before August 2026 the loop that computes answered it."""
    engine = ScriptedProfile(PROFILE).busy().at(HUNG_AT, lambda engine: engine.hang().fail("timeout"))
    if silent_sec is not None:
        engine.at(HUNG_AT + silent_sec, lambda engine: engine.resume().fail(None))
        assert watch(engine, 1200).acted() == []
    else:
        assert 120 <= hung_after(watch(engine, 1200), "unreach-hang") <= 120 + LATE_SEC


def test_without_its_page_a_canary_may_wait_ten_minutes_for_a_slot() -> None:
    engine = ScriptedProfile(PROFILE).fail("http_501")
    for core in engine.cores.values():
        core.canary_after = 580.0
    shell = watch(engine, 6000)
    assert shell.acted() == []
    assert {outcome for _, _, outcome in shell.results} == {Outcome.OK}


def test_without_its_page_two_canaries_of_ten_minutes_each_are_a_hang() -> None:
    engine = ScriptedProfile(PROFILE).fail("http_501").at(HUNG_AT, ScriptedEngine.hang)
    assert 1185 <= hung_after(watch(engine, 3000), "canary-hang") <= 1200 + LATE_SEC


@pytest.mark.parametrize(("status", "loads"), [(503, True), (500, False), (502, False)])
def test_a_503_on_its_page_is_a_load_of_any_length_and_no_other_status_is(status: int, loads: bool) -> None:
    engine = ScriptedProfile(PROFILE).busy()
    engine.at(HUNG_AT, lambda engine: engine.hang().fail(f"http_{status}").answer(Outcome.ERROR_ANSWER))
    engine.at(HUNG_AT + 1800, lambda engine: engine.restart())
    shell = watch(engine, HUNG_AT + 2000)
    assert (shell.acted() == []) == loads
    assert ("restarting" in shell.states) == loads
    assert not shell.watch.verdict.acting


def test_its_props_tell_that_it_sleeps_and_of_which_build_it_is() -> None:
    [flag] = PROFILE.flags_for(None)
    assert (flag.state, flag.path, flag.key) == ("sleeping", "/props", "is_sleeping")
    assert PROFILE.version_paths == (("/props", "build_info"),)
