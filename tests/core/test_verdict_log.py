"""What the engine's log may add: it shortens the wait, it never decides alone."""

from __future__ import annotations

import pytest
from direct_watch import DirectWatch, vllm_page
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import LogChannelChanged, LogHits, Outcome
from enginewatch.core.settings import Settings

CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)

PATIENT = Settings(warmup_sec=0, active_probe_timeout_sec=14)
"""One canary spans several polls."""


def hit(engine: ScriptedEngine) -> None:
    engine.log_hits = 1


def keep_hitting(engine: ScriptedEngine, first: int, last: int) -> ScriptedEngine:
    for second in range(first, last, 5):
        engine.at(second, hit)
    return engine


# --- the rule -------------------------------------------------------------------------------------------------------


def test_frozen_counters_a_signature_and_a_failed_canary_are_a_hang_after_the_shorter_stall() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(68, hit)
    shell = VirtualShell(engine).run(180)
    assert shell.acted()[0] <= 62 + 5 + 15 + 1
    assert shell.states[-1] == "stall-hang-log"
    assert "log" in shell.watch.verdict.reason


def test_without_the_signature_the_same_core_waits_for_the_whole_stall() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(180)
    assert shell.acted()[0] >= 65 + 30
    assert "stall-hang-log" not in shell.states


def test_a_signature_alone_is_nothing_while_canaries_go_through() -> None:
    """SGLang prints even that line in a chunk longer than 20 s, hence the canary beside it."""
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.idle)
    assert VirtualShell(keep_hitting(engine, 62, 600)).run(600).acted() == []


def test_a_signature_is_nothing_while_a_counter_moves() -> None:
    engine = ScriptedEngine().busy().answer(Outcome.TIMEOUT)
    shell = VirtualShell(keep_hitting(engine, 62, 600)).run(600)
    assert shell.acted() == []
    assert set(shell.states) <= {"baseline", "growing", "startup"}


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_a_canary_that_was_turned_away_does_not_confirm_it(outcome: Outcome) -> None:
    engine = ScriptedEngine().at(62, lambda e: e.answer(outcome))
    assert VirtualShell(keep_hitting(engine, 62, 300)).run(300).acted() == []


def test_one_canary_is_enough_here() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(68, hit)
    settings = Settings(warmup_sec=0, active_probe_timeout_sec=14)
    shell = VirtualShell(engine, settings).run(90)
    assert len([1 for _, _, outcome in shell.results if outcome is Outcome.TIMEOUT]) == 1
    assert shell.state == "stall-hang-log"


def test_counters_must_have_been_frozen_for_the_shorter_stall() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(62, hit).at(62, lambda e: e.answer(Outcome.REFUSED))
    shell = VirtualShell(engine).run(180)
    assert shell.acted()[0] >= 65 + 15


def test_declared_only_on_a_page_begun_after_the_failed_canary() -> None:
    """A chunk of 25 s: the line at 20 s, the canary lost, and the page that follows shows that it went on."""
    watch = DirectWatch(PATIENT)
    watch.page(0, vllm_page(100, running=1))
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page(100, running=1))
    watch.page(10, vllm_page(100, running=1))
    watch.log(11)
    watch.page(15, vllm_page(100, running=1))
    watch.canary(19, Outcome.TIMEOUT)
    assert not watch.watch.verdict.hung
    watch.page(19.1, vllm_page(500, running=1), recheck=True)
    assert watch.state == "probe-fail-but-growing"


def test_and_it_is_when_that_page_shows_no_progress() -> None:
    watch = DirectWatch(PATIENT)
    watch.page(0, vllm_page(100, running=1))
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page(100, running=1))
    watch.page(10, vllm_page(100, running=1))
    watch.log(11)
    watch.page(15, vllm_page(100, running=1))
    watch.canary(19, Outcome.TIMEOUT)
    watch.page(19.1, vllm_page(100, running=1), recheck=True)
    assert watch.state == "stall-hang-log"


# --- what a rising gauge may and may not do -------------------------------------------------------------------------


def test_a_rising_gauge_does_not_outrank_it() -> None:
    engine = ScriptedEngine().prefill().at(62, lambda e: e.answer(Outcome.TIMEOUT))
    shell = VirtualShell(keep_hitting(engine, 62, 180)).run(180)
    assert shell.state == "stall-hang-log"


def test_without_the_log_the_same_prefill_lives() -> None:
    engine = ScriptedEngine().prefill().at(62, lambda e: e.answer(Outcome.TIMEOUT))
    assert VirtualShell(engine).run(180).acted() == []


def test_a_gauge_that_rises_while_the_canary_is_out_does_not_void_its_failure() -> None:
    watch = DirectWatch(PATIENT)
    kv = 0.1
    watch.page(0, vllm_page(kv=kv, running=1))
    watch.canary(0.1, Outcome.OK)
    watch.log(1)
    watch.page(5, vllm_page(kv=kv, running=1))
    for t in (9, 12):
        kv += 0.01
        watch.page(t, vllm_page(kv=kv, running=1))
    watch.canary(14, Outcome.TIMEOUT)
    watch.page(16, vllm_page(kv=kv + 0.01, running=1))
    assert watch.state == "stall-hang-log"


def test_a_counter_that_moves_while_the_canary_is_out_does() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100, running=1))
    watch.canary(0.1, Outcome.OK)
    watch.log(1)
    watch.page(5, vllm_page(100, running=1))
    watch.page(9, vllm_page(101, running=1))
    watch.canary(14, Outcome.TIMEOUT)
    for t in (16, 21, 26):
        watch.page(t, vllm_page(101, running=1))
    assert not watch.watch.verdict.hung


def test_a_declared_log_hang_ends_with_a_counter_not_with_a_gauge() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100, kv=0.1, running=1))
    watch.canary(0.1, Outcome.OK)
    watch.log(1)
    watch.page(5, vllm_page(100, kv=0.1, running=1))
    watch.canary(10, Outcome.TIMEOUT)
    watch.page(16, vllm_page(100, kv=0.1, running=1))
    assert watch.state == "stall-hang-log"
    watch.page(21, vllm_page(100, kv=0.5, running=1))
    assert watch.state == "stall-hang-log"
    watch.page(26, vllm_page(101, kv=0.5, running=1))
    assert watch.state == "growing" or watch.state == "probe-fail-but-growing"


# --- which signatures count -----------------------------------------------------------------------------------------


def test_a_signature_older_than_the_last_counter_progress_does_not_count() -> None:
    engine = ScriptedEngine().busy().at(52, hit).at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(180)
    assert "stall-hang-log" not in shell.states
    assert shell.acted()[0] >= 65 + 30


def test_a_signature_older_than_the_last_complete_canary_does_not_count() -> None:
    engine = ScriptedEngine().at(62, hit).at(82, ScriptedEngine.hang)
    assert "stall-hang-log" not in VirtualShell(engine).run(180).states


def test_a_signature_from_before_a_replacement_does_not_count() -> None:
    engine = ScriptedEngine().busy().at(62, hit).at(63, ScriptedEngine.restart).at(66, ScriptedEngine.hang)
    assert "stall-hang-log" not in VirtualShell(engine).run(180).states


def test_a_signature_outside_the_window_does_not_count() -> None:
    settings = Settings(warmup_sec=0, log_window_sec=20, log_stall_sec=40, stall_sec=60)
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(68, hit)
    assert "stall-hang-log" not in VirtualShell(engine, settings).run(200).states
    wide = Settings(warmup_sec=0, log_window_sec=120, log_stall_sec=40, stall_sec=60)
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(68, hit)
    assert "stall-hang-log" in VirtualShell(engine, wide).run(200).states


def test_no_lines_are_no_signature() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(70)
    shell.feed(LogHits(0))
    assert "stall-hang-log" not in shell.run(180).states


def test_one_signature_speaks_against_every_core_but_only_the_frozen_one_is_hung() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: e.hang("2")).at(68, hit)
    shell = VirtualShell(engine).run(180)
    assert shell.state == "stall-hang-log"
    assert shell.watch.verdict.core == "2"
    assert [core.core for core in shell.watch.explain(shell.now).cores if core.state == "stall-hang-log"] == ["2"]


# --- with canaries off ----------------------------------------------------------------------------------------------


def test_with_canaries_off_a_busy_core_is_enough() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(68, hit)
    shell = VirtualShell(engine, CANARY_OFF).run(180)
    assert shell.acted()[0] <= 62 + 26
    assert "stall-hang-log" in shell.states


def test_with_canaries_off_the_first_request_after_an_idle_hour_gets_that_time_too() -> None:
    engine = ScriptedEngine().at(3600, lambda e: setattr(e.cores["0"], "running", 1.0)).at(3612, ScriptedEngine.busy)
    assert VirtualShell(keep_hitting(engine, 3500, 3700), CANARY_OFF).run(3700).acted() == []
    engine = ScriptedEngine().at(3600, lambda e: setattr(e.cores["0"], "running", 1.0)).at(3630, ScriptedEngine.busy)
    assert VirtualShell(keep_hitting(engine, 3500, 3700), CANARY_OFF).run(3625).acted(), "and no more than that"


def test_with_canaries_off_an_idle_one_is_not() -> None:
    engine = ScriptedEngine().at(62, ScriptedEngine.hang)
    assert VirtualShell(keep_hitting(engine, 62, 300), CANARY_OFF).run(300).acted() == []


# --- the channel ----------------------------------------------------------------------------------------------------


def test_a_broken_channel_falls_back_to_the_rest_and_says_so() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(50)
    shell.feed(LogChannelChanged("the file is gone"))
    assert any(log.level == "warning" and "the file is gone" in log.event for log in shell.logs)
    assert shell.run(180).acted()[0] <= 62 + 36
    shell.feed(LogChannelChanged(None))
    assert shell.logs[-1].level == "info"


def test_the_log_does_not_shorten_warm_up() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(68, hit)
    shell = VirtualShell(engine, Settings()).run(180)
    assert shell.acted() == []
    assert shell.state == "warmup-stall-hang-log"
