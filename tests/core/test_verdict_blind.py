"""A page that tells nothing: the canary alone decides, patiently."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from direct_watch import DirectWatch, kinds, vllm_page
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Flags, Outcome
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import ALL_NAMES, PROFILES

CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)
NOT_A_PAGE = ["http_401", "http_403", "http_404", "http_405", "http_422", "http_501", "malformed"]


def without_legs(engine: ScriptedEngine) -> ScriptedEngine:
    engine.hide = lambda series: series.startswith("vllm:")
    return engine


def with_legs(engine: ScriptedEngine) -> ScriptedEngine:
    engine.hide = lambda series: False
    return engine


# --- entering and leaving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", NOT_A_PAGE)
def test_an_answer_that_is_not_metrics_is_no_legs_at_once(failure: str) -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, lambda e: e.fail(failure))).run(66)
    assert shell.state == "no-legs"


@pytest.mark.parametrize("failure", ["http_500", "http_502", "http_503", "timeout", "reset", "truncated", "refused"])
def test_no_answer_and_5xx_are_not(failure: str) -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, lambda e: e.fail(failure))).run(66)
    assert shell.state != "no-legs"


def test_a_page_that_never_had_legs_is_no_legs_at_once() -> None:
    """--disable-log-stats leaves only process_* and python_*: unknown, never idle."""
    shell = VirtualShell(without_legs(ScriptedEngine())).run(3)
    assert shell.states == ["no-legs"]


def test_a_page_that_loses_all_its_legs_is_so_only_after_three_scrapes() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, without_legs)).run(74)
    assert "no-legs" not in shell.states
    assert shell.run(76).state == "no-legs"


def test_two_pages_without_legs_forget_nothing() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(82, without_legs).at(92, with_legs)
    shell = VirtualShell(engine).run(180)
    assert shell.acted()[0] <= 62 + 36 + 5


def test_what_is_remembered_counts_until_canaries_had_the_time_to_decide() -> None:
    """Two of 30 s each, one of 5 s that may be under way, two polls: 75 s after the third page without legs."""
    for back_at, baseline in ((82 + 10 + 74, False), (82 + 10 + 84, True)):
        engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(82, without_legs).at(back_at, with_legs)
        shell = VirtualShell(engine).run(back_at + 5)
        began = [core.stalled_for_sec < 5 for core in shell.watch.explain(shell.now).cores]
        assert began == [baseline]


def test_legs_that_come_back_end_it() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.fail("http_401")).at(100, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(111)
    assert shell.state == "growing"
    assert shell.watch.restarts == 0


# --- what decides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", NOT_A_PAGE)
def test_canaries_that_fail_in_a_row_are_a_hang(failure: str) -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail(failure))
    shell = VirtualShell(engine).run(300)
    assert shell.state == "canary-hang"
    assert shell.acted()[0] >= 62 + 60, "two patient canaries"


@pytest.mark.parametrize("failure", NOT_A_PAGE)
def test_canaries_that_go_through_are_not(failure: str) -> None:
    shell = VirtualShell(ScriptedEngine().busy().fail(failure)).run(900)
    assert shell.acted() == []
    assert shell.states == ["no-legs"]


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_neither_are_canaries_that_are_turned_away(outcome: Outcome) -> None:
    """An API key that covers /metrics covers the canary's path as well."""
    shell = VirtualShell(ScriptedEngine().fail("http_401").answer(outcome)).run(900)
    assert shell.acted() == []
    assert outcome.value in shell.watch.verdict.reason


def test_error_answers_of_an_engine_that_was_never_armed_are_not() -> None:
    shell = VirtualShell(ScriptedEngine().fail("http_404").answer(Outcome.ERROR_ANSWER)).run(900)
    assert shell.acted() == []


def test_one_failed_canary_is_not_enough() -> None:
    engine = ScriptedEngine().busy().fail("http_404").at(62, ScriptedEngine.hang).at(94, ScriptedEngine.resume)
    shell = VirtualShell(engine).run(300)
    assert any(outcome is Outcome.TIMEOUT for _, _, outcome in shell.results)
    assert shell.acted() == []


def test_a_success_between_two_failures_starts_the_run_again() -> None:
    watch = DirectWatch()
    t = 0.0
    for outcome in (Outcome.OK, Outcome.TIMEOUT, Outcome.OK, Outcome.TIMEOUT):
        watch.fails(t, "http_404")
        watch.canary(t + 1, outcome)
        assert watch.state == "no-legs"
        t += 5


@pytest.mark.parametrize("neither", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_an_answer_that_is_neither_does_not(neither: Outcome) -> None:
    watch = DirectWatch()
    t = 0.0
    for outcome in (Outcome.OK, Outcome.TIMEOUT, neither, Outcome.TIMEOUT):
        watch.fails(t, "http_404")
        watch.canary(t + 1, outcome)
        t += 5
    watch.tick(t, t + 10, t + 20)
    assert watch.state == "canary-hang"


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.ERROR_ANSWER])
def test_failures_that_come_fast_do_not_hasten_it(outcome: Outcome) -> None:
    """Two errors in ten seconds, from an engine that was healthy before and is after: it was 503 at the second."""
    for recovers_at, acts in ((85, False), (300, True)):
        engine = ScriptedEngine().fail("http_404").at(62, lambda e: e.answer(outcome))
        engine.at(recovers_at, lambda e: e.answer(None))
        shell = VirtualShell(engine).run(200)
        last_ok = max(t for t, _, said in shell.results if said is Outcome.OK and t < recovers_at)
        assert bool(shell.acted()) is acts
        assert all(last_ok + 30 <= t <= last_ok + 30 + 5.1 for t in shell.acted()[:1])


def test_the_canarys_deadline_is_the_stall_time_here() -> None:
    """There is no other witness, and a prefill may hold a canary back for longer than five seconds."""
    shell = VirtualShell(ScriptedEngine().fail("http_404")).run(100)
    assert {canary.deadline_sec for _, canary in shell.canaries} == {30.0}
    longer = Settings(warmup_sec=0, active_probe_timeout_sec=45)
    shell = VirtualShell(ScriptedEngine().fail("http_404"), longer).run(100)
    assert {canary.deadline_sec for _, canary in shell.canaries} == {45.0}


def test_every_poll_is_a_stalled_one_here() -> None:
    shell = VirtualShell(ScriptedEngine().busy().fail("http_404")).run(101)
    assert [round(t) for t, _ in shell.canaries] == list(range(0, 101, 5))


def test_canaries_that_failed_before_it_began_do_not_count() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(88, lambda e: e.fail("http_404"))
    shell = VirtualShell(engine).run(300)
    began = shell.first("no-legs")
    assert began is not None
    assert shell.acted()[0] >= began + 30


def test_a_canary_hang_ends_with_a_complete_canary() -> None:
    engine = ScriptedEngine().fail("http_404").at(62, ScriptedEngine.hang).at(170, ScriptedEngine.resume)
    shell = VirtualShell(engine).run(168)
    assert shell.state == "canary-hang"
    assert shell.run(230).state == "no-legs"


def test_the_patient_canary_makes_room_when_legs_come_back() -> None:
    watch = DirectWatch()
    watch.fails(0, "malformed")
    token = watch.canaries[-1].token
    asked = watch.page(5, vllm_page())
    assert "AbandonCanary" in kinds(asked)
    assert watch.canary(20, Outcome.TIMEOUT, token=token) == []


# --- without canaries -----------------------------------------------------------------------------------------------


def test_without_canaries_it_is_healthy_and_said_loudly() -> None:
    shell = VirtualShell(ScriptedEngine().hang().fail("http_404"), CANARY_OFF).run(900)
    assert shell.acted() == []
    assert "not watched" in shell.watch.verdict.reason
    loud = [log for log in shell.logs if log.level == "error"]
    assert len(loud) == 1
    assert "not watched" in loud[0].event


# --- pages that alternate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["http_404", "malformed"])
def test_a_declared_hang_is_not_hidden_by_an_answer_that_is_not_a_page(failure: str) -> None:
    """What cannot be read proves nothing: a kubelet that asks twice must not meet one 200 every other poll."""
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(112)
    assert shell.state == "stall-hang"
    engine.at(113, lambda e: e.fail(failure)).at(118, lambda e: e.fail(None))
    shell.run(125)
    assert all(verdict.acting for t, verdict in shell.timeline if t > 110)


@pytest.mark.parametrize("failure", ["http_404", "malformed"])
def test_a_hang_is_found_although_every_other_answer_is_not_a_page(failure: str) -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    for poll in range(10, 300, 10):
        engine.at(poll - 1, lambda e: e.fail(failure)).at(poll + 4, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(300)
    assert shell.acted()[0] <= 62 + 46
    assert all(verdict.acting for t, verdict in shell.timeline if t >= shell.acted()[0])


@pytest.mark.parametrize("failure", ["http_404", "malformed"])
def test_an_idle_engine_behind_such_pages_is_not(failure: str) -> None:
    engine = ScriptedEngine()
    for poll in range(10, 300, 10):
        engine.at(poll - 1, lambda e: e.fail(failure)).at(poll + 4, lambda e: e.fail(None))
    assert VirtualShell(engine).run(300).acted() == []


def test_a_hang_is_found_although_every_other_page_has_no_legs() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    for poll in range(10, 300, 10):
        engine.at(poll - 1, without_legs).at(poll + 4, with_legs)
    shell = VirtualShell(engine).run(300)
    assert shell.acted()[0] <= 62 + 41
    assert all(verdict.acting for t, verdict in shell.timeline if t >= shell.acted()[0])


def showing_legs_on_every(nth: int, engine: ScriptedEngine, *, until: float) -> ScriptedEngine:
    """From 60 s on its page carries legs on one poll of so many."""
    for poll in range(60, int(until), 5):
        engine.at(poll - 0.5, with_legs if poll // 5 % nth == 0 else without_legs)
    return engine


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("nth", [2, 3, 4, 5, 6, 8, 13, 14, 15, 16, 17, 20, 40, 100])
def test_a_hang_is_found_and_stays_however_rarely_the_page_has_legs(nth: int, cores: int) -> None:
    engine = ScriptedEngine(cores).busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(showing_legs_on_every(nth, engine, until=1200)).run(1200)
    assert shell.acted()[0] <= 62 + 2 * 75, "twice what patient canaries need: legs may show up in between"
    assert all(verdict.acting for t, verdict in shell.timeline if t >= shell.acted()[0])


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("nth", [3, 4, 8, 15, 16, 20, 100])
def test_neither_work_nor_rest_is_a_hang_however_rarely_the_page_has_legs(nth: int, cores: int) -> None:
    for engine in (ScriptedEngine(cores).busy(), ScriptedEngine(cores), ScriptedEngine(cores).busy("0")):
        assert VirtualShell(showing_legs_on_every(nth, engine, until=1200)).run(1200).acted() == []


@pytest.mark.parametrize("nth", [4, 8, 16])
@pytest.mark.parametrize("settings", [Settings(warmup_sec=0), CANARY_OFF])
def test_nor_is_an_engine_whose_canaries_cannot_be_used(nth: int, settings: Settings) -> None:
    for engine in (ScriptedEngine().busy(), ScriptedEngine()):
        engine = showing_legs_on_every(nth, engine.answer(Outcome.MISCONFIGURED), until=1200)
        assert VirtualShell(engine, settings).run(1200).acted() == []


@pytest.mark.parametrize("nth", [4, 8, 13])
def test_without_canaries_a_busy_engine_behind_such_pages_is_found_by_its_load(nth: int) -> None:
    engine = showing_legs_on_every(nth, ScriptedEngine().busy().at(62, ScriptedEngine.hang), until=600)
    assert VirtualShell(engine, CANARY_OFF).run(600).acted()


def test_a_canary_hang_is_not_ended_by_legs_that_do_not_move() -> None:
    engine = without_legs(ScriptedEngine()).at(62, ScriptedEngine.hang).at(182, with_legs)
    shell = VirtualShell(engine).run(400)
    assert all(verdict.acting for t, verdict in shell.timeline if t >= shell.acted()[0])
    assert shell.state == "stall-hang", "in the end the core itself is judged"


@pytest.mark.parametrize("how", ["moves", "canary", "replaced", "paused", "restarting"])
def test_it_is_ended_by_anything_that_proves_life(how: str) -> None:
    engine = without_legs(ScriptedEngine()).at(62, ScriptedEngine.hang).at(162, with_legs)
    engine.flags = Flags.SILENT
    shell = VirtualShell(engine).run(166)
    assert shell.state == "canary-hang"
    changes: dict[str, Callable[[ScriptedEngine], object]] = {
        "moves": lambda e: setattr(e.cores["0"], "tokens", 500.0),
        "canary": ScriptedEngine.resume,
        "replaced": ScriptedEngine.restart,
        "paused": lambda e: setattr(e, "flags", Flags.PAUSED),
        "restarting": lambda e: e.fail("refused"),
    }
    engine.at(167, changes[how])
    shell.run(171)
    assert not shell.watch.verdict.hung


# --- which engine is it ---------------------------------------------------------------------------------------------


def test_auto_asks_for_every_name_until_it_knows_the_engine() -> None:
    watch = Watch(Settings(), profile=None, now=0.0)
    assert watch.names == ALL_NAMES
    shell = VirtualShell(ScriptedEngine().busy(), kind="auto").run(30)
    assert shell.watch.profile is PROFILES["vllm"]
    assert shell.watch.names == PROFILES["vllm"].names()


def test_an_engine_that_auto_does_not_know_is_judged_by_its_canary() -> None:
    engine = ScriptedEngine()
    engine.hide = lambda series: series.startswith("vllm:")
    engine.kind = "unknown"
    engine.at(62, ScriptedEngine.hang)
    assert VirtualShell(engine, kind="auto").run(300).state == "canary-hang"


def test_auto_finds_out_when_another_kind_of_engine_takes_the_place() -> None:
    watch = DirectWatch(kind="auto")
    for t in (0, 5, 10):
        watch.page(t, vllm_page(100 + t))
        watch.described(t + 0.1, kind="vllm")
    sglang = {'sglang:realtime_tokens_total{mode="decode"}': 5.0, "sglang:token_usage": 0.1}
    for t in (15, 20, 25, 30, 35):
        names = watch.watch.names
        watch.page(t, {series: value + t for series, value in sglang.items() if series.partition("{")[0] in names})
    assert watch.watch.profile is PROFILES["sglang"]
    assert watch.state == "growing"


def test_a_named_engine_is_never_taken_for_another() -> None:
    watch = DirectWatch(kind="vllm")
    for t in (0, 5, 10, 15, 20):
        watch.page(t, {"sglang:token_usage": 0.1})
        watch.described(t + 0.1, kind="sglang")
    assert watch.watch.profile is PROFILES["vllm"]
    assert watch.state == "no-legs"
