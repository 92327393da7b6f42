"""Several cores: one hung rank must not hide behind its siblings, nor its siblings fall with it."""

from __future__ import annotations

import pytest
from direct_watch import DirectWatch, vllm_page
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings

CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)


def cores_in(shell: VirtualShell) -> dict[str, str]:
    return {core.core: core.state for core in shell.watch.explain(shell.now).cores}


# --- one of four ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hung", ["0", "1", "3"])
@pytest.mark.parametrize("siblings", ["busy", "idle"])
def test_one_hung_core_of_four_is_found_and_named(siblings: str, hung: str) -> None:
    """Its sum with its siblings keeps growing: the earlier watcher never saw it in 122 s."""
    engine = ScriptedEngine(4)
    if siblings == "busy":
        engine.busy()
    shell = VirtualShell(engine.at(62, lambda e: e.hang(hung))).run(180)
    assert shell.acted()[0] <= 62 + 36
    assert shell.watch.verdict.core == hung
    assert f"core {hung}" in shell.watch.verdict.reason


@pytest.mark.parametrize("siblings", ["busy", "idle"])
def test_four_healthy_cores_are_not(siblings: str) -> None:
    engine = ScriptedEngine(4)
    if siblings == "busy":
        engine.busy("0", "1")
    assert VirtualShell(engine).run(600).acted() == []


def test_an_idle_core_of_four_that_wedges_is_found_by_its_own_canary() -> None:
    engine = ScriptedEngine(4).busy("0", "1", "2").at(62, lambda e: e.hang("3"))
    shell = VirtualShell(engine).run(180)
    assert shell.watch.verdict.core == "3"
    assert shell.acted()[0] <= 62 + 36


def test_one_core_in_a_long_prefill_does_not_make_the_others_suspect() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: e.prefill("1").answer(Outcome.TIMEOUT, "1"))
    assert VirtualShell(engine).run(300).acted() == []


def test_the_engines_verdict_is_its_worst_cores() -> None:
    engine = ScriptedEngine(3).busy("0").prefill("1").at(62, lambda e: e.hang("2"))
    shell = VirtualShell(engine).run(180)
    assert shell.state == "stall-hang"
    assert cores_in(shell)["0"] == "growing"
    assert cores_in(shell)["1"] == "kv-growing"


def test_a_second_hung_core_is_counted_in_the_sentence() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: e.hang("1", "2"))
    shell = VirtualShell(engine).run(240)
    assert "and 1 more" in shell.watch.verdict.reason


def test_the_verdict_stands_until_the_last_hung_core_is_well() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: e.hang("1", "2")).at(182, lambda e: e.resume("1"))
    shell = VirtualShell(engine).run(200)
    assert shell.watch.verdict.acting
    assert shell.watch.verdict.core == "2"
    engine.resume()
    assert not shell.run(211).watch.verdict.hung


def test_all_cores_hung_then_all_resumed_is_well_within_two_polls() -> None:
    engine = ScriptedEngine(4).busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(200)
    assert shell.watch.verdict.acting
    engine.resume()
    assert not shell.run(210.5).watch.verdict.hung


def test_a_core_of_its_own_threshold_does_not_lend_it_to_others() -> None:
    """Core 1 shows only request-grained legs: two minutes for it, 30 s for core 0."""
    page = vllm_page(core="0") | {'vllm:request_success_total{engine="1",finished_reason="stop"}': 5.0}
    watch = DirectWatch(CANARY_OFF)
    busy = page | {
        'vllm:num_requests_running{engine="1",model_name="m"}': 1.0,
        'vllm:num_requests_running{engine="0",model_name="m"}': 1.0,
    }
    watch.page(0, busy)
    for t in range(5, 40, 5):
        watch.page(t, busy)
    assert watch.watch.verdict.core == "0"
    assert [core.core for core in watch.watch.explain(35).cores if core.state == "stall-hang"] == ["0"]


# --- which series belong to which core ------------------------------------------------------------------------------


def test_a_page_without_the_label_has_one_core() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(core=None))
    assert [core.core for core in watch.watch.explain(0).cores] == ["0"]


def test_sglang_without_data_parallelism_has_one_core() -> None:
    shell = VirtualShell(ScriptedSGLang().busy().at(62, ScriptedEngine.hang), kind="sglang").run(180)
    assert cores_in(shell) == {"0": "stall-hang"}


def test_sglang_with_data_parallelism_is_judged_per_rank() -> None:
    engine = ScriptedSGLang(2).busy().at(62, lambda e: e.hang("1"))
    shell = VirtualShell(engine, kind="sglang").run(180)
    assert shell.acted()[0] <= 62 + 36
    assert shell.watch.verdict.core == "1"
    assert cores_in(shell)["0"] == "growing"


def test_the_tokenizers_counters_belong_to_no_rank_and_are_no_legs() -> None:
    """They carry no dp_rank: a sibling's finished requests must not look like rank 0's progress."""
    engine = ScriptedSGLang(2).busy().at(62, ScriptedEngine.hang)
    for second in range(3, 180, 3):
        engine.at(second, lambda e: setattr(e, "finished_tokens", e.finished_tokens + 10))
    shell = VirtualShell(engine, kind="sglang").run(180)
    assert shell.acted()[0] <= 62 + 36
    assert "generation_tokens" not in shell.watch.explain(shell.now).cores[0].legs


def test_the_same_counters_are_legs_where_no_series_carries_the_label() -> None:
    engine = ScriptedSGLang().busy().at(62, ScriptedEngine.hang)
    for second in range(3, 180, 3):
        engine.at(second, lambda e: setattr(e, "finished_tokens", e.finished_tokens + 10))
    assert VirtualShell(engine, kind="sglang").run(180).acted() == []


def test_the_label_may_turn_up_after_the_first_page() -> None:
    """The scheduler's series appear with their first token; until then the page seemed to have one core."""
    engine = ScriptedSGLang(2)
    engine.hide = lambda series: "dp_rank" in series
    engine.at(31, lambda e: setattr(e, "hide", lambda series: False)).at(31, ScriptedEngine.busy)
    engine.at(62, lambda e: e.hang("1"))
    shell = VirtualShell(engine, kind="sglang").run(180)
    assert shell.watch.verdict.core == "1"
    assert shell.acted()[0] <= 62 + 36
    assert set(cores_in(shell)) == {"0", "1"}


def test_external_load_balancing_shows_one_core_under_its_own_number() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(core="5"))
    for t in (5, 10):
        watch.page(t, vllm_page(core="5"))
    assert watch.watch.verdict.core == "5"


def test_priority_parts_do_not_make_an_idle_core_busy() -> None:
    """The total is under the empty priority; a stale part of it is not the load."""
    page = {
        'sglang:realtime_tokens_total{mode="decode"}': 5.0,
        'sglang:num_running_reqs{priority=""}': 0.0,
        'sglang:num_running_reqs{priority="1"}': 3.0,
    }
    watch = DirectWatch(CANARY_OFF, kind="sglang")
    for t in range(0, 300, 5):
        watch.page(t, page)
    assert watch.state == "idle"


# --- cores that come and go -----------------------------------------------------------------------------------------


def test_a_core_absent_from_three_pages_is_retired() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: setattr(e, "hide", lambda series: 'engine="3"' in series))
    shell = VirtualShell(engine).run(73)
    assert "3" in cores_in(shell)
    shell.run(76)
    assert "3" not in cores_in(shell)


def test_a_hung_core_that_is_scaled_away_takes_its_hang_with_it() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: e.hang("3"))
    engine.at(121, lambda e: setattr(e, "hide", lambda series: 'engine="3"' in series))
    shell = VirtualShell(engine).run(124)
    assert shell.state == "stall-hang"
    assert shell.run(136).state == "growing"


def test_a_core_absent_from_two_pages_is_not_forgotten() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: e.hang("3"))
    engine.at(81, lambda e: setattr(e, "hide", lambda series: 'engine="3"' in series))
    engine.at(91, lambda e: setattr(e, "hide", lambda series: False))
    shell = VirtualShell(engine).run(180)
    assert shell.watch.verdict.core == "3"
    assert shell.acted()[0] <= 62 + 41


def test_pages_without_any_core_do_not_count_towards_retiring_one() -> None:
    """Absent from three scrapes *while others remain*."""
    both = vllm_page(core="0") | vllm_page(core="1")
    watch = DirectWatch()
    watch.page(0, both)
    watch.page(5, {"process_start_time_seconds": 1000.0})
    watch.page(10, {"process_start_time_seconds": 1000.0})
    watch.page(15, vllm_page(core="0"))
    assert {core.core for core in watch.watch.explain(15).cores} == {"0", "1"}


def test_an_absent_core_is_not_declared_on_pages_that_do_not_show_it() -> None:
    """The page after the last failure must show no progress; a page without the core shows nothing."""
    engine = ScriptedEngine(2).busy().at(62, lambda e: e.hang("1"))
    engine.at(91, lambda e: setattr(e, "hide", lambda series: 'engine="1"' in series))
    shell = VirtualShell(engine).run(103)
    assert shell.acted() == []


def test_a_core_that_appears_later_begins_with_its_own_baseline() -> None:
    engine = ScriptedEngine(2).busy()
    engine.hide = lambda series: 'engine="1"' in series
    engine.at(62, lambda e: setattr(e, "hide", lambda series: False))
    shell = VirtualShell(engine).run(66)
    assert cores_in(shell) == {"0": "growing", "1": "baseline"}
    assert shell.run(300).acted() == []


def test_sixty_four_cores_one_of_them_hung() -> None:
    engine = ScriptedEngine(64).busy().at(62, lambda e: e.hang("41"))
    shell = VirtualShell(engine).run(130)
    assert shell.acted()[0] <= 62 + 36
    assert shell.watch.verdict.core == "41"


def test_sixty_four_idle_cores_one_of_them_hung() -> None:
    engine = ScriptedEngine(64).at(62, lambda e: e.hang("41"))
    shell = VirtualShell(engine).run(130)
    assert shell.acted()[0] <= 62 + 36 + 64 * 0.05
    assert shell.watch.verdict.core == "41"
