"""When canaries go out, to which core, and which of their answers count."""

from __future__ import annotations

import itertools

import pytest
from direct_watch import DirectWatch, kinds, vllm_page
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome, StartCanary
from enginewatch.core.settings import Settings


def asked_of(shell: VirtualShell, since: float = 0.0) -> list[str | None]:
    """The cores that canaries were aimed at, in order."""
    return [canary.core for t, canary in shell.canaries if t >= since]


# --- when -----------------------------------------------------------------------------------------------------------


def test_a_canary_goes_out_once_after_the_first_page_even_if_the_engine_is_at_work() -> None:
    shell = VirtualShell(ScriptedEngine().busy()).run(300)
    assert [t for t, _ in shell.canaries] == [pytest.approx(0.01)]


def test_a_core_at_work_is_not_bothered_again() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(100, ScriptedEngine.idle).at(150, ScriptedEngine.busy)).run(300)
    times = [t for t, _ in shell.canaries]
    assert all(t < 1 or 100 <= t <= 156 for t in times)
    assert len(times) > 3, "the negative control: idle, it was asked"


def test_every_stalled_poll_brings_a_canary() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    settings = Settings(warmup_sec=0, active_probe_timeout_sec=2)
    shell = VirtualShell(engine, settings).run(162)
    times = [round(t, 2) for t, _ in shell.canaries if t > 1]
    assert times == [70.01 + 5 * number for number in range(19)]


def test_no_canary_goes_out_with_canaries_off() -> None:
    shell = VirtualShell(ScriptedEngine(), Settings(warmup_sec=0, active_probe_enabled=False)).run(300)
    assert shell.canaries == []


def test_never_two_at_once_and_each_with_a_token_of_its_own() -> None:
    engine = ScriptedEngine(4).busy().at(62, lambda e: e.hang("0", "2")).at(90, ScriptedEngine.idle)
    shell = VirtualShell(engine).run(300)  # the shell asserts that there is one at a time
    tokens = [canary.token for _, canary in shell.canaries]
    assert tokens == sorted(set(tokens))


def test_the_deadline_is_the_operators() -> None:
    shell = VirtualShell(ScriptedEngine(), Settings(warmup_sec=0, active_probe_timeout_sec=7)).run(100)
    assert {canary.deadline_sec for _, canary in shell.canaries} == {7}


def test_a_gauge_alone_keeps_canaries_back_unless_the_log_speaks() -> None:
    quiet = VirtualShell(ScriptedEngine().prefill()).run(100)
    assert len(quiet.canaries) == 1, "the arming one"
    engine = ScriptedEngine().prefill().at(50, lambda e: setattr(e, "log_hits", 1))
    assert [t for t, _ in VirtualShell(engine).run(100).canaries if t > 50]


# --- idle spacing ---------------------------------------------------------------------------------------------------


def test_an_idle_core_is_asked_no_more_often_than_the_operator_wants() -> None:
    shell = VirtualShell(ScriptedEngine(), Settings(warmup_sec=0, active_probe_idle_sec=60)).run(600)
    times = [t for t, _ in shell.canaries]
    assert 9 <= len(times) <= 11
    assert min(later - earlier for earlier, later in itertools.pairwise(times)) >= 60


def test_idle_spacing_ends_with_the_first_failure() -> None:
    engine = ScriptedEngine().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_idle_sec=60)).run(300)
    failed = next(t for t, _, outcome in shell.results if outcome is Outcome.TIMEOUT)
    after = [t for t, _ in shell.canaries if t >= failed]
    assert max(later - earlier for earlier, later in itertools.pairwise([failed, *after])) <= 5.1
    assert shell.acted()[0] <= 62 + 60 + 36, "and the hang is found, late by the spacing at most"


def test_idle_spacing_does_not_hold_back_canaries_on_a_busy_core() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_idle_sec=3600)).run(180)
    assert shell.acted()[0] <= 62 + 36


# --- to which core --------------------------------------------------------------------------------------------------


def test_with_one_core_a_canary_is_not_aimed() -> None:
    assert set(asked_of(VirtualShell(ScriptedEngine()).run(100))) == {None}


def test_with_several_cores_every_canary_is_aimed() -> None:
    assert set(asked_of(VirtualShell(ScriptedEngine(4)).run(100))) == {"0", "1", "2", "3"}


@pytest.mark.parametrize(
    ("version", "aimed"), [("0.32.0", True), ("0.11.1", True), ("0.11.0", False), ("0.9.2", False), ("dev", False)]
)
def test_vllm_canaries_are_aimed_only_at_versions_known_to_honour_it(version: str, aimed: bool) -> None:
    shell = VirtualShell(ScriptedEngine(2, version=version)).run(100)
    assert bool(shell.canaries) is aimed, "an unaimed answer proves nothing about any one of several cores"


@pytest.mark.parametrize(("version", "aimed"), [("0.5.23", True), ("0.5.10", True), ("0.4.8", True), ("0.4.7", False)])
def test_sglang_canaries_likewise(version: str, aimed: bool) -> None:
    shell = VirtualShell(ScriptedSGLang(2, version=version), kind="sglang").run(100)
    assert bool(shell.canaries) is aimed


def test_several_cores_wait_for_the_version_before_the_first_canary() -> None:
    watch = DirectWatch()
    both = vllm_page(core="0") | vllm_page(core="1")
    assert "StartCanary" not in kinds(watch.page(0, both))
    assert "StartCanary" in kinds(watch.described(0.2))


def test_an_engine_that_does_not_tell_its_version_is_asked_again_later() -> None:
    watch = DirectWatch()
    asked = [kinds(watch.page(5.0 * poll, vllm_page(100 + poll))) for poll in range(1)]
    watch.described(0.1, version=None)
    asked += [kinds(watch.page(5.0 * poll, vllm_page(100 + poll))) for poll in range(1, 40)]
    assert 3 <= sum("DescribeEngine" in each for each in asked) <= 5


def test_unaimable_cores_are_judged_passively() -> None:
    engine = ScriptedEngine(2, version="0.10.2").busy().at(62, lambda e: e.hang("1"))
    shell = VirtualShell(engine).run(180)
    assert 62 + 25 <= shell.acted()[0] <= 62 + 41
    assert shell.watch.verdict.core == "1"


def test_unaimable_idle_cores_are_not_hung() -> None:
    engine = ScriptedEngine(2, version="0.10.2").at(62, lambda e: e.hang("1"))
    assert VirtualShell(engine).run(600).acted() == []


@pytest.mark.parametrize("hung", ["0", "3", "7"])
def test_seven_idle_siblings_do_not_delay_the_eighths_verdict(hung: str) -> None:
    engine = ScriptedEngine(8).at(62, lambda e: e.hang(hung))
    shell = VirtualShell(engine).run(180)
    assert shell.acted()[0] <= 62 + 36
    assert shell.watch.verdict.core == hung


def test_all_eight_hung_at_once_are_declared_in_the_time_of_one() -> None:
    engine = ScriptedEngine(8).busy().at(62, ScriptedEngine.hang)
    assert VirtualShell(engine).run(180).acted()[0] <= 62 + 36


def test_a_core_with_a_failed_canary_is_asked_until_it_is_proven_or_declared() -> None:
    engine = ScriptedEngine(4).at(62, lambda e: e.hang("2"))
    shell = VirtualShell(engine).run(180)
    failed = next(t for t, canary, outcome in shell.results if outcome is Outcome.TIMEOUT)
    between = [canary.core for t, canary in shell.canaries if failed <= t < shell.acted()[0]]
    assert set(between) == {"2"}


def test_a_suspect_that_proves_life_makes_room_for_its_siblings() -> None:
    engine = ScriptedEngine(4).at(62, lambda e: e.hang("2")).at(83, lambda e: e.resume("2"))
    shell = VirtualShell(engine).run(180)
    assert shell.acted() == []
    assert set(asked_of(shell, since=100)) == {"0", "1", "2", "3"}


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_a_suspect_whose_answer_was_neither_makes_room_too(outcome: Outcome) -> None:
    engine = ScriptedEngine(2).at(62, lambda e: e.hang("1")).at(76, lambda e: e.answer(outcome, "1"))
    shell = VirtualShell(engine).run(180)
    assert set(asked_of(shell, since=100)) == {"0", "1"}


def test_busy_cores_are_asked_before_idle_ones() -> None:
    engine = ScriptedEngine(4).busy().at(62, ScriptedEngine.idle)
    engine.at(62, lambda e: setattr(e.cores["2"], "running", 1.0))
    shell = VirtualShell(engine).run(75)
    assert asked_of(shell, since=62)[:4] == ["2", "0", "1", "3"]


def test_of_idle_cores_the_longest_without_proof_is_asked_first() -> None:
    engine = ScriptedEngine(3).busy()
    engine.at(52, lambda e: e.idle("1")).at(57, lambda e: e.idle("2")).at(62, lambda e: e.idle("0"))
    for core in engine.cores.values():
        core.canary_after = 30.0  # one at a time, and slow: the order shows
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_timeout_sec=60)).run(150)
    assert asked_of(shell, since=52)[:3] == ["1", "2", "0"]


def test_declared_cores_come_last_so_that_they_do_not_starve_a_sibling_that_freezes_later() -> None:
    engine = ScriptedEngine(4).at(62, lambda e: e.hang("0", "1")).at(162, lambda e: e.hang("3"))
    shell = VirtualShell(engine).run(260)
    three = [t for t, verdict in shell.timeline if "and 2 more" in verdict.reason]
    assert three
    assert three[0] <= 162 + 50, "later than alone: two dead cores are asked as well, but not much"


def test_after_an_answer_the_next_core_is_asked_at_once() -> None:
    shell = VirtualShell(ScriptedEngine(4)).run(9)
    assert asked_of(shell) == ["0", "1", "2", "3"], "the arming one, and the three whose first stalled poll it is"
    batch = [t for t, _ in shell.canaries if t >= 5]
    assert batch == pytest.approx([5.01, 5.06, 5.11])


# --- arming ---------------------------------------------------------------------------------------------------------


def test_an_error_answer_counts_only_once_a_canary_has_succeeded_on_this_process() -> None:
    """A request that this engine never accepts must not kill it."""
    never = VirtualShell(ScriptedEngine().answer(Outcome.ERROR_ANSWER)).run(600)
    assert never.acted() == []
    assert never.state == "misconfigured"
    armed = VirtualShell(ScriptedEngine().at(62, lambda e: e.answer(Outcome.ERROR_ANSWER))).run(180)
    assert armed.acted()


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FROZEN, Outcome.REFUSED])
def test_other_failures_count_without_arming(outcome: Outcome) -> None:
    assert VirtualShell(ScriptedEngine().answer(outcome)).run(180).acted()


def test_a_new_process_has_to_be_armed_again() -> None:
    engine = ScriptedEngine().at(62, ScriptedEngine.restart).at(62, lambda e: e.answer(Outcome.ERROR_ANSWER))
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert shell.state == "misconfigured"


def test_the_arming_canary_goes_out_again_after_a_replacement() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.restart).at(62, ScriptedEngine.busy)
    shell = VirtualShell(engine).run(300)
    assert [round(t) for t, _ in shell.canaries] == [0, 65]


def test_an_unarmed_busy_engine_that_answers_errors_is_left_to_the_passive_rule() -> None:
    engine = ScriptedEngine().busy().answer(Outcome.ERROR_ANSWER).at(62, ScriptedEngine.hang)
    assert VirtualShell(engine).run(180).acted()


# --- which answers count --------------------------------------------------------------------------------------------


def test_a_canary_begun_before_the_last_proof_of_life_counts_for_nothing() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100))
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page(100))
    watch.page(9, vllm_page(101), recheck=True)
    watch.canary(10, Outcome.TIMEOUT)
    assert watch.state == "growing"
    watch.page(15, vllm_page(101))
    watch.page(20, vllm_page(101))
    assert watch.state == "freeze-grace", "no failure is on record"


def test_a_canary_begun_after_it_counts() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100))
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page(100))
    watch.canary(10, Outcome.TIMEOUT)
    assert watch.state == "probe-fail-grace"


def test_a_late_success_is_a_proof_of_life_whenever_it_began() -> None:
    watch = DirectWatch(Settings(warmup_sec=0, active_probe_timeout_sec=60))
    watch.page(0, vllm_page())
    for t in (5, 10, 15, 20):
        watch.page(t, vllm_page())
    assert len(watch.canaries) == 1
    watch.canary(22, Outcome.OK)
    assert watch.state == "stall-active-ok"


@pytest.mark.parametrize("outcome", list(Outcome))
def test_an_answer_under_a_token_that_is_not_the_one_under_way_changes_nothing(outcome: Outcome) -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    before = watch.watch.verdict
    assert watch.canary(6, outcome, token=77) == []
    assert watch.canary(6, outcome, token=1) == [], "that one was answered before"
    assert watch.watch.verdict == before


def test_an_answer_to_an_abandoned_canary_is_thrown_away() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    before = watch.canaries[-1].token
    assert "AbandonCanary" in kinds(watch.page(7, vllm_page(0, start_time=2000.0), recheck=True))
    assert watch.canary(10, Outcome.TIMEOUT, token=before) == []
    assert watch.state == "replaced"


def test_a_canary_that_is_never_reported_does_not_end_all_canaries() -> None:
    """A shell that loses one must not blind the watcher; it is said once, and the next goes out."""
    watch = DirectWatch()
    asked = [instruction for poll in range(12) for instruction in watch.page(5.0 * poll, vllm_page())]
    assert sum(isinstance(each, StartCanary) for each in asked) == 2
    assert kinds(asked).count("AbandonCanary") == 1
    assert any("never reported" in each.event for each in asked if type(each).__name__ == "Log")  # type: ignore[union-attr]


def test_when_no_answer_is_ever_reported_nothing_is_declared() -> None:
    """A broken shell cannot see, and one that cannot see must not kill."""
    watch = DirectWatch()
    for poll in range(100):
        watch.page(5.0 * poll, vllm_page(running=1))
    assert not watch.watch.verdict.hung


def test_a_canary_for_a_core_that_was_retired_meanwhile_is_no_ones() -> None:
    settings = Settings(warmup_sec=0, active_probe_timeout_sec=60)
    watch = DirectWatch(settings)
    both = vllm_page(core="0") | vllm_page(core="1")
    watch.page(0, both)
    watch.described(0.1)
    watch.canary(0.2, Outcome.OK)
    watch.page(5, both)
    assert watch.canaries[-1].core == "1", "the longest without proof"
    for t in (10, 15, 20, 25):
        watch.page(t, vllm_page(core="0"))
    watch.canary(26, Outcome.TIMEOUT)
    assert watch.state in ("stall-active-ok", "freeze-grace")
    assert watch.watch.explain(26).cores[0].core == "0"


def test_an_unaimed_answer_proves_nothing_about_one_of_several_cores() -> None:
    """Asked during an outage, when no core is aimed at: core 1 stays hung."""
    engine = ScriptedEngine(2).busy().at(62, lambda e: e.hang("1"))
    engine.at(112, lambda e: e.fail("timeout")).at(141, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(200)
    assert any(canary.core is None and outcome is Outcome.OK for _, canary, outcome in shell.results)
    assert shell.state == "stall-hang"
    assert shell.watch.verdict.core == "1"
