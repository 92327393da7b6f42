"""An engine that rests on purpose looks exactly like a wedged one; only it itself can tell."""

from __future__ import annotations

import pytest
from direct_watch import DirectWatch, kinds, vllm_page
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Flags, Outcome
from enginewatch.core.settings import Settings

WAKING = 'vllm:sleep_mode_operations_in_flight{operation="wake"}'
UPDATING = 'vllm:rl_weight_update_operations_in_flight{operation="update"}'
AWAKE = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"}'


def sleeps(engine: ScriptedEngine) -> ScriptedEngine:
    engine.extra[AWAKE] = 0.0
    return engine.hang()


def wakes(engine: ScriptedEngine) -> ScriptedEngine:
    engine.extra[AWAKE] = 1.0
    return engine.resume()


def pauses(engine: ScriptedEngine) -> ScriptedEngine:
    engine.flags = Flags.PAUSED
    return engine.hang()


def resumes(engine: ScriptedEngine) -> ScriptedEngine:
    engine.flags = Flags.CLEAR
    return engine.resume()


def with_flags(flags: Flags = Flags.CLEAR) -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.flags = flags
    return engine


# --- by the page ----------------------------------------------------------------------------------------------------


def test_an_engine_that_sleeps_by_its_page_is_neither_hung_nor_asked() -> None:
    engine = ScriptedEngine().busy().at(62, sleeps)
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert shell.state == "paused"
    assert "sleeping" in shell.watch.verdict.reason
    assert [t for t, _ in shell.canaries if t > 65] == []


def test_the_same_engine_awake_is_hung() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.extra[AWAKE] = 1.0
    assert VirtualShell(engine).run(600).acted()


@pytest.mark.parametrize("calls", [1.0, 2.0])
@pytest.mark.parametrize("series", [WAKING, UPDATING])
def test_a_wake_or_a_weight_update_under_way_is_not_a_hang(series: str, calls: float) -> None:
    """Canaries once killed workers during weight transfers (dynamo#14703). A caller that tries again counts twice."""
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().extra.update({series: calls}))
    assert VirtualShell(engine).run(300).acted() == []
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().extra.update({series: 0.0}))
    assert VirtualShell(engine).run(300).acted(), "the negative control: none is under way"


def test_an_engine_that_hangs_as_it_wakes_is_found_after_half_an_hour() -> None:
    """Its gauge says asleep until the wake is complete (vLLM 0.32), and from a hung core no wake ever comes back."""
    engine = ScriptedEngine().busy().at(62, sleeps).at(122, lambda e: e.extra.update({WAKING: 1.0}))
    shell = VirtualShell(engine).run(3000)
    assert 122 + 1800 + 30 <= shell.acted()[0] <= 122 + 1800 + 10 + 41
    assert [log.level for log in shell.logs if "has not come back" in log.event] == ["warning"]


def test_an_engine_that_sleeps_for_as_long_and_is_not_being_woken_is_left_alone() -> None:
    """The control of the test above."""
    shell = VirtualShell(ScriptedEngine().busy().at(62, sleeps)).run(3000)
    assert shell.acted() == []
    assert shell.state == "paused"


def test_calls_one_after_the_other_are_believed_each_for_itself() -> None:
    engine = ScriptedEngine().busy()
    for begin in range(62, 7262, 1200):
        engine.at(begin, lambda e: e.hang().extra.update({UPDATING: 1.0}))
        engine.at(begin + 1150, lambda e: e.resume().extra.update({UPDATING: 0.0}))
    assert VirtualShell(engine).run(7300).acted() == []


def test_a_page_without_the_gauge_of_calls_does_not_start_the_half_hour_afresh() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().extra.update({UPDATING: 1.0}))
    for lacking in range(361, 6000, 300):
        engine.at(lacking, lambda e: e.extra.clear()).at(lacking + 5, lambda e: e.extra.update({UPDATING: 1.0}))
    assert 62 + 1800 + 30 <= VirtualShell(engine).run(4000).acted()[0] <= 62 + 1800 + 30 + 41


def test_calls_that_follow_one_another_without_a_pause_are_no_call_that_never_came_back() -> None:
    """Each poll meets one. The engine works meanwhile, and the last of them is a long one."""
    engine = ScriptedEngine().busy()
    engine.extra[UPDATING] = 1.0
    engine.at(2500, ScriptedEngine.hang).at(2560, ScriptedEngine.resume)
    assert VirtualShell(engine).run(2700).acted() == []
    engine = ScriptedEngine(2).busy().at(62, lambda e: e.hang("1").extra.update({UPDATING: 1.0}))
    assert VirtualShell(engine).run(2700).acted(), (
        "the control: a sibling that works does not hide the one that is held"
    )


def test_a_gauge_that_says_asleep_for_good_on_an_engine_at_work_hides_no_hang() -> None:
    engine = ScriptedEngine().busy()
    engine.extra[AWAKE] = 0.0
    shell = VirtualShell(engine.at(602, ScriptedEngine.hang)).run(800)
    assert 602 + 25 <= shell.acted()[0] <= 602 + 41
    assert [log.level for log in shell.logs if "its counters rise" in log.event] == ["warning"]


def test_a_counter_that_is_late_when_it_falls_asleep_does_not_wake_it() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.extra.update({AWAKE: 0.0})).at(72, ScriptedEngine.hang)
    assert VirtualShell(engine).run(800).acted() == []


def test_until_when_a_call_is_believed_is_said() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().extra.update({UPDATING: 1.0}))
    shell = VirtualShell(engine).run(966)
    (flips,) = shell.watch.explain(shell.now).would_flip
    assert flips == "the call that holds the engine starts every clock afresh when it comes back, else 899 s do"


def test_a_page_that_loses_the_flag_says_nothing_more() -> None:
    engine = ScriptedEngine().busy().at(62, sleeps).at(122, lambda e: e.extra.clear())
    shell = VirtualShell(engine).run(240)
    assert 125 + 30 <= shell.acted()[0] <= 125 + 36


# --- by the endpoints -----------------------------------------------------------------------------------------------


def test_an_engine_that_says_it_is_paused_is_neither_hung_nor_asked() -> None:
    engine = with_flags().busy().at(62, pauses)
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert shell.state == "paused"
    assert [t for t, _ in shell.canaries if t > 71] == []


@pytest.mark.parametrize("flags", [Flags.CLEAR, Flags.ABSENT, Flags.SILENT])
def test_an_engine_that_does_not_say_so_is_hung(flags: Flags) -> None:
    """No answer proves nothing: a hung core gives none."""
    engine = with_flags().busy().at(62, lambda e: setattr(e.hang(), "flags", flags))
    assert VirtualShell(engine).run(180).acted()[0] <= 62 + 36


def test_the_endpoints_are_read_on_stalled_polls_only() -> None:
    shell = VirtualShell(with_flags().busy().at(62, ScriptedEngine.idle)).run(120)
    times = [t for t, instruction in shell.asked if type(instruction).__name__ == "ReadFlags"]
    assert times
    assert min(times) > 62


def test_a_yes_counts_for_three_polls() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.described(0.1)
    watch.page(5, vllm_page())
    watch.flags(5.5, Flags.PAUSED)
    states = []
    for t in (10, 15, 20, 25):
        watch.page(t, vllm_page())
        states.append(watch.state)
    assert states[:2] == ["paused", "paused"]
    assert states[2] != "paused"


def test_a_yes_repeated_holds_for_as_long_as_it_is_repeated() -> None:
    shell = VirtualShell(with_flags().busy().at(62, pauses)).run(2000)
    assert shell.states[-1] == "paused"
    assert shell.states.count("paused") == 1, "never once left"


def test_a_no_ends_it_at_once() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.described(0.1)
    watch.page(5, vllm_page())
    watch.flags(5.5, Flags.PAUSED)
    watch.page(10, vllm_page())
    watch.flags(10.5, Flags.CLEAR)
    assert watch.state != "paused"


def test_an_engine_that_pauses_and_then_wedges_is_found_when_the_yes_has_expired() -> None:
    engine = with_flags().busy().at(62, pauses).at(122, lambda e: setattr(e, "flags", Flags.SILENT))
    shell = VirtualShell(engine).run(300)
    assert 122 + 30 <= shell.acted()[0] <= 122 + 15 + 36


def test_an_engine_without_the_endpoints_is_not_asked_again_until_it_is_replaced() -> None:
    engine = with_flags(Flags.ABSENT).at(302, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(600)
    times = [t for t, instruction in shell.asked if type(instruction).__name__ == "ReadFlags"]
    assert len(times) == 2
    assert times[1] > 302


def test_a_question_that_is_never_answered_is_asked_again() -> None:
    watch = DirectWatch()
    asked = []
    for poll in range(20):
        asked += kinds(watch.page(5.0 * poll, vllm_page()))
        if poll == 0:
            watch.described(0.1)
    assert 4 <= asked.count("ReadFlags") <= 8


@pytest.mark.parametrize(("version", "asked"), [("0.5.23", True), ("0.5.22", False)])
def test_sglang_is_asked_only_where_its_answer_can_be_trusted(version: str, asked: bool) -> None:
    engine = ScriptedSGLang(version=version)
    engine.flags = Flags.CLEAR
    shell = VirtualShell(engine, kind="sglang").run(100)
    assert any(type(instruction).__name__ == "ReadFlags" for instruction in shell.instructions) is asked


# --- a pause that can no longer be told -----------------------------------------------------------------------------


def unhealthy(engine: ScriptedEngine) -> None:
    """A /health that meets a pause: from then on SGLang answers 503 to what would tell the pause."""
    engine.flags = Flags.DOUBTFUL


def paused_sglang() -> ScriptedSGLang:
    engine = ScriptedSGLang()
    engine.flags = Flags.CLEAR
    engine.busy().at(62, pauses)
    return engine


def test_a_pause_that_was_told_is_believed_when_it_can_no_longer_be() -> None:
    shell = VirtualShell(paused_sglang().at(92, unhealthy), kind="sglang").run(1500)
    assert shell.acted() == []
    assert shell.state == "paused"
    assert "said that it is paused" in shell.watch.verdict.reason
    assert [t for t, _ in shell.canaries if t > 71] == []
    assert len([log for log in shell.logs if "calls itself unhealthy" in log.event]) == 1


def test_an_engine_that_never_said_that_it_is_paused_is_not_believed_to_be() -> None:
    engine = ScriptedSGLang().busy()
    engine.at(62, lambda e: setattr(e.hang(), "flags", Flags.DOUBTFUL))
    assert 62 + 30 <= VirtualShell(engine, kind="sglang").run(180).acted()[0] <= 62 + 36


def test_it_is_believed_for_half_an_hour_after_the_last_plain_yes() -> None:
    shell = VirtualShell(paused_sglang().at(92, unhealthy), kind="sglang").run(3000)
    assert 90 + 1800 + 30 <= shell.acted()[0] <= 90 + 1800 + 10 + 41
    assert any("judged again" in log.event for log in shell.logs)


def test_a_plain_no_ends_it_and_the_engine_is_judged() -> None:
    engine = paused_sglang().at(92, unhealthy).at(122, lambda e: setattr(e, "flags", Flags.CLEAR))
    engine.at(152, unhealthy)
    assert 122 + 30 <= VirtualShell(engine, kind="sglang").run(300).acted()[0] <= 122 + 5 + 41


def test_a_counter_that_moves_ends_it_and_the_engine_is_judged() -> None:
    """Resumed at 122, it works until it hangs at 152, unhealthy all the time."""
    engine = paused_sglang().at(92, unhealthy).at(122, ScriptedEngine.resume).at(152, ScriptedEngine.hang)
    shell = VirtualShell(engine, kind="sglang").run(128)
    assert shell.state == "growing"
    assert 152 + 28 <= shell.run(300).acted()[0] <= 152 + 41


def test_a_counter_that_moved_just_before_the_pause_does_not_end_it() -> None:
    """The page after the yes shows the last tokens from before it."""
    watch = DirectWatch(kind="sglang", version="0.5.23")
    page = {'sglang:realtime_tokens_total{mode="decode"}': 5.0, "sglang:token_usage": 0.1}
    moved = {**page, 'sglang:realtime_tokens_total{mode="decode"}': 6.0}
    watch.page(0, page)
    watch.described(0.1)
    watch.page(5, page)
    watch.flags(5.5, Flags.PAUSED)
    watch.page(10, moved)
    watch.flags(10.5, Flags.DOUBTFUL)
    for t in (15, 20, 25, 30):
        watch.page(t, moved)
        watch.flags(t + 0.5, Flags.DOUBTFUL)
        assert watch.state == "paused"


def test_silence_in_between_does_not_make_it_unbelievable() -> None:
    engine = paused_sglang().at(92, unhealthy).at(122, lambda e: setattr(e, "flags", Flags.SILENT)).at(142, unhealthy)
    shell = VirtualShell(engine, kind="sglang").run(1500)
    assert shell.acted() == []
    assert shell.state == "paused"


def test_a_yes_repeated_makes_it_certain_again() -> None:
    engine = paused_sglang().at(92, unhealthy).at(1502, lambda e: setattr(e, "flags", Flags.PAUSED))
    engine.at(1602, unhealthy)
    shell = VirtualShell(engine, kind="sglang").run(1600)
    assert shell.watch.verdict.reason == "the engine says it is paused: no canary, no hang"
    assert shell.run(3000).acted() == []


def test_another_process_is_not_believed_for_what_the_one_before_it_said() -> None:
    engine = paused_sglang().at(92, unhealthy).at(122, lambda e: setattr(e.restart().hang(), "flags", Flags.DOUBTFUL))
    assert 122 + 30 <= VirtualShell(engine, kind="sglang").run(300).acted()[0] <= 122 + 46


def test_what_ends_it_is_said() -> None:
    shell = VirtualShell(paused_sglang().at(92, unhealthy), kind="sglang").run(991)
    (flips,) = shell.watch.explain(shell.now).would_flip
    assert flips == "a counter that moves or a plain no of the pause endpoints ends the pause, else 899 s do"
    pause = next(witness for witness in shell.watch.explain(shell.now).witnesses if witness.name == "pause")
    assert pause.detail == "it said so, and is unhealthy since"


# --- beginning and end ----------------------------------------------------------------------------------------------


def test_a_pause_that_begins_takes_the_canary_back() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.described(0.1)
    watch.canary(0.2, Outcome.OK)
    watch.page(5, vllm_page())
    assert "AbandonCanary" in kinds(watch.flags(5.5, Flags.PAUSED))
    watch.canary(10, Outcome.TIMEOUT)
    assert watch.state == "paused"


def test_the_end_of_a_pause_is_a_proof_of_life() -> None:
    engine = with_flags().busy().at(62, pauses).at(122, lambda e: setattr(e, "flags", Flags.CLEAR))
    shell = VirtualShell(engine).run(300)
    assert 122 + 30 <= shell.acted()[0] <= 122 + 5 + 36


def test_that_proof_is_as_old_as_the_end_of_the_pause() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.described(0.1)
    watch.page(5, vllm_page())
    watch.flags(5.5, Flags.PAUSED)
    watch.page(10, vllm_page())
    watch.flags(13, Flags.CLEAR)
    assert watch.watch.explain(14).cores[0].stalled_for_sec == 1.0


def test_canaries_that_failed_before_a_pause_are_forgotten() -> None:
    engine = with_flags(Flags.SILENT).at(62, ScriptedEngine.hang)
    engine.at(82, lambda e: setattr(e, "flags", Flags.PAUSED)).at(87, resumes)
    shell = VirtualShell(engine).run(300)
    assert any(outcome is Outcome.TIMEOUT for _, _, outcome in shell.results)
    assert shell.acted() == []


def test_a_pause_ends_a_declared_hang() -> None:
    engine = with_flags(Flags.SILENT).busy().at(62, ScriptedEngine.hang)
    engine.at(122, lambda e: setattr(e, "flags", Flags.PAUSED))
    shell = VirtualShell(engine).run(180)
    assert shell.acted()
    assert shell.state == "paused"
    assert not shell.watch.verdict.hung


def test_a_pause_of_an_engine_without_legs_stops_its_canaries_too() -> None:
    engine = with_flags().busy()
    engine.hide = lambda series: series.startswith("vllm:")
    engine.at(62, pauses)
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert shell.state == "paused"


def test_a_pause_of_a_replaced_engine_is_not_the_new_ones() -> None:
    engine = with_flags().busy().at(62, pauses)
    engine.at(122, lambda e: setattr(e.restart(), "flags", Flags.CLEAR))
    shell = VirtualShell(engine).run(126)
    assert shell.state == "replaced"
    assert shell.run(131).state != "paused"


def test_a_sleeping_engine_that_does_not_answer_is_unreachable_not_paused() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, sleeps).at(122, lambda e: e.fail("timeout"))).run(130)
    assert shell.state == "unreach-grace"


def test_the_first_canary_waits_until_the_engine_is_awake() -> None:
    engine = sleeps(ScriptedEngine()).at(62, wakes)
    shell = VirtualShell(engine, Settings(warmup_sec=0)).run(120)
    assert min(t for t, _ in shell.canaries) >= 62


# --- an engine that rests and then answers no more ------------------------------------------------------------------


def asleep(engine: ScriptedEngine) -> None:
    engine.extra['vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"}'] = 0.0


def test_an_engine_that_sleeps_and_answers_no_more_is_hung_by_the_time_alone() -> None:
    engine = ScriptedEngine().at(30, asleep).at(60, lambda e: e.fail("timeout"))
    shell = VirtualShell(engine).run(700)
    assert shell.first("unreach-hang") is not None
    assert shell.acted()[0] >= 60 + 300


def test_one_that_takes_its_time_to_wake_up_is_not() -> None:
    engine = ScriptedEngine().at(30, asleep).at(60, lambda e: e.fail("timeout"))
    engine.at(300, lambda e: e.fail(None)).at(300, lambda e: e.extra.clear())
    assert VirtualShell(engine).run(700).acted() == []
