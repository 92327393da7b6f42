"""When is a frozen core hung? The active rule, the passive rule, and what counts as movement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from direct_watch import DirectWatch, vllm_page
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings

CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)
THREE_FAILURES = Settings(warmup_sec=0, active_probe_min_failures=3)


def frozen_with_failed_canaries(kv: float = 0.0) -> DirectWatch:
    """Baseline at 0, frozen since, two canaries failed by 25, the first begun at 10; ripe at 35.2 (first + 25)."""
    watch = DirectWatch()
    page = vllm_page(kv=kv, running=1)
    watch.page(0, page)
    watch.canary(0.1, Outcome.OK)
    watch.page(5, page)
    watch.canary(5.1, Outcome.OK)
    watch.page(10.2, page)
    watch.canary(15.2, Outcome.TIMEOUT)
    watch.page(15.3, page, recheck=True)
    watch.page(20, page)
    watch.canary(25, Outcome.TIMEOUT)
    watch.page(25.1, page, recheck=True)
    watch.page(30, page)
    watch.canary(35, Outcome.TIMEOUT)
    return watch


# --- the active rule ------------------------------------------------------------------------------------------------


def test_a_frozen_busy_core_whose_canaries_fail_is_hung() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang)).run(180)
    assert shell.state == "stall-hang"
    assert shell.acted()[0] <= 62 + 36


def test_the_same_core_left_alone_is_never_hung() -> None:
    shell = VirtualShell(ScriptedEngine().busy()).run(180)
    assert shell.acted() == []
    assert shell.state == "growing"


def test_a_frozen_core_whose_canaries_go_through_is_idle_not_hung() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.idle)
    assert VirtualShell(engine).run(600).acted() == []


def test_a_wedged_idle_core_is_hung_although_its_page_looks_idle() -> None:
    shell = VirtualShell(ScriptedEngine().at(62, ScriptedEngine.hang)).run(180)
    assert shell.acted()[0] <= 62 + 36
    assert "0 running, 0 waiting" in shell.watch.verdict.reason


def test_a_core_that_moves_while_every_canary_fails_is_never_hung() -> None:
    shell = VirtualShell(ScriptedEngine().busy().answer(Outcome.TIMEOUT)).run(600)
    assert shell.acted() == []


def test_a_hang_shorter_than_the_threshold_is_not_declared() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(62 + 28, ScriptedEngine.resume)
    shell = VirtualShell(engine).run(300)
    assert shell.acted() == []
    assert any(outcome is Outcome.TIMEOUT for _, _, outcome in shell.results), "a canary did fail meanwhile"


def test_one_lost_canary_never_kills() -> None:
    engine = ScriptedEngine().at(62, lambda e: e.answer(Outcome.TIMEOUT)).at(74, lambda e: e.answer(None))
    shell = VirtualShell(engine).run(300)
    assert [outcome for _, _, outcome in shell.results].count(Outcome.TIMEOUT) == 1
    assert "probe-fail-grace" in shell.states
    assert shell.acted() == []


@pytest.mark.parametrize("needed", [1, 2, 3, 4])
def test_as_many_canaries_must_fail_in_a_row_as_the_operator_asks_for(needed: int) -> None:
    settings = Settings(warmup_sec=0, active_probe_min_failures=needed)
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), settings).run(240)
    declared = shell.acted()[0]
    assert sum(t <= declared for t, _, _ in shell.results) >= needed


def test_and_no_more_than_that() -> None:
    settings = Settings(warmup_sec=0, active_probe_min_failures=2, active_probe_timeout_sec=13)
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), settings).run(180)
    assert sum(t <= shell.acted()[0] for t, _, outcome in shell.results if outcome is Outcome.TIMEOUT) == 2


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FROZEN, Outcome.REFUSED, Outcome.ERROR_ANSWER])
@pytest.mark.parametrize("is_busy", [False, True])
def test_no_answer_a_broken_one_nobody_there_and_an_error_all_count_as_failed(outcome: Outcome, is_busy: bool) -> None:
    """Idle it is the sharper test: without a failed canary a busy core would be hung all the same."""
    engine = ScriptedEngine().busy() if is_busy else ScriptedEngine()
    engine.at(62, ScriptedEngine.hang).at(62, lambda e: e.answer(outcome))
    assert VirtualShell(engine).run(180).state == "stall-hang"


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_a_full_queue_and_a_wrong_request_are_no_failures(outcome: Outcome) -> None:
    """HTTP 401 on an idle engine's canary once restarted it for good."""
    engine = ScriptedEngine().at(62, lambda e: e.answer(outcome))
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert shell.state == outcome.value


@pytest.mark.parametrize("legs", [True, False])
@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_lost_canaries_and_then_refused_ones_do_not_kill_an_idle_engine(outcome: Outcome, *, legs: bool) -> None:
    """A proxy in front of it was restarted, lost two canaries, and asks for a key or limits the rate since."""
    engine = ScriptedEngine().at(60.5, lambda e: e.answer(Outcome.TIMEOUT if legs else Outcome.REFUSED))
    if not legs:
        engine.hide = lambda series: series.startswith("vllm:")
    engine.at(76, lambda e: e.answer(outcome))
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert sum(failed in (Outcome.TIMEOUT, Outcome.REFUSED) for _, _, failed in shell.results) >= 2
    engine = ScriptedEngine().at(62, lambda e: e.hang().answer(Outcome.TIMEOUT)).at(76, lambda e: e.answer(outcome))
    engine.at(120, lambda e: e.answer(Outcome.TIMEOUT))
    shell = VirtualShell(engine).run(600)
    assert shell.state == "stall-hang", "the control: one more failure makes those before it count again"
    assert "(timeout)" in shell.watch.verdict.reason


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_an_answer_that_is_neither_does_not_break_a_run_of_failures(outcome: Outcome) -> None:
    watch = DirectWatch()
    page = vllm_page()
    watch.page(0, page)
    watch.canary(0.1, Outcome.OK)
    watch.page(5, page)
    watch.canary(9.9, Outcome.TIMEOUT)
    watch.page(10, page)
    watch.canary(10.1, outcome)
    assert watch.state == outcome.value
    watch.page(15, page)
    watch.canary(20, Outcome.TIMEOUT)
    watch.page(20.1, page)
    watch.canary(25, Outcome.TIMEOUT)
    watch.page(25.1, page)
    watch.page(30, page)
    assert watch.state == "probe-fail-grace"
    watch.page(35, page, recheck=True)
    assert watch.state == "stall-hang"


def test_the_first_failure_must_lie_early_in_the_freeze() -> None:
    """Ten idle minutes, then two canaries fail in quick succession: that is not yet a hang."""
    watch = DirectWatch().idle_until(0, 595, vllm_page())
    watch.canaries.clear()
    for t in (600, 605):
        watch.page(t, vllm_page())
        watch.canary(t + 0.1, Outcome.REFUSED)
        watch.page(t + 0.2, vllm_page(), recheck=True)
    assert watch.state == "probe-fail-grace"


def test_declared_not_before_a_page_begun_after_the_last_failure_shows_no_progress() -> None:
    watch = frozen_with_failed_canaries()
    watch.tick(35.3)
    assert not watch.watch.verdict.hung, "the last page is older than the last failure"
    watch.page(35.5, vllm_page(running=1), begun=34.9)
    assert not watch.watch.verdict.hung, "that page was begun before it"
    watch.page(35.6, vllm_page(running=1), begun=35.4, recheck=True)
    assert watch.state == "stall-hang"


def test_a_page_after_the_last_failure_that_shows_progress_clears_it() -> None:
    watch = frozen_with_failed_canaries()
    watch.page(35.6, vllm_page(101, running=1), recheck=True)
    assert watch.state == "probe-fail-but-growing"
    watch.page(40, vllm_page(101, running=1))
    assert watch.state == "growing", "what a recheck saw is the movement of the poll that follows"
    watch.page(45, vllm_page(101, running=1))
    assert watch.state == "freeze-grace"


def test_a_hang_is_never_declared_on_a_page_read_before_the_threshold_was_reached() -> None:
    """The time may run out between two polls; only a page that still shows no progress then declares."""
    watch = frozen_with_failed_canaries()
    watch.page(35.05, vllm_page(running=1), recheck=True)  # after the last failure, before first failure + 25
    assert watch.state == "probe-fail-grace"
    watch.tick(35.3)
    assert not watch.watch.verdict.hung
    watch.page(35.4, vllm_page(101, running=1))
    assert watch.state == "probe-fail-but-growing"


def test_when_the_recheck_after_a_failure_fails_the_next_poll_decides() -> None:
    watch = frozen_with_failed_canaries()
    watch.fails(35.3, "timeout", recheck=True)
    assert watch.state == "probe-fail-grace", "a failed recheck is not an outage"
    watch.page(40, vllm_page(running=1))
    assert watch.state == "stall-hang"


def test_the_freeze_clock_runs_on_while_scrapes_fail() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(72, lambda e: e.fail("timeout")).at(83, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(180)
    assert shell.acted()[0] <= 62 + 5 + 30 + 10 + 6, "the outage only cost canaries, not the clock"


def test_a_declared_hang_stays_until_the_core_proves_life() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(600)
    declared = shell.acted()[0]
    assert all(verdict.acting for t, verdict in shell.timeline if t >= declared)


@pytest.mark.parametrize("busy", [True, False])
def test_a_core_that_resumes_is_well_within_two_polls(busy: bool) -> None:
    engine = ScriptedEngine()
    if busy:
        engine.busy()
    engine.at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(153)
    assert shell.watch.verdict.acting
    engine.resume()
    shell.run(163.5)
    assert not shell.watch.verdict.hung


# --- what counts as movement ----------------------------------------------------------------------------------------


def test_a_long_prefill_with_flat_counters_and_rising_kv_is_not_a_hang() -> None:
    """VLLM counts nothing during a chunked prefill; 989k tokens took 230 s (sparkring#231)."""
    engine = ScriptedEngine().busy().at(60, ScriptedEngine.prefill).at(60, lambda e: e.answer(Outcome.TIMEOUT))
    shell = VirtualShell(engine).run(60 + 230)
    assert shell.acted() == []
    assert shell.state == "kv-growing"


def test_a_prefill_that_stops_allocating_is_a_hang() -> None:
    engine = ScriptedEngine().busy().at(60, ScriptedEngine.prefill).at(160, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(260)
    assert 160 + 25 <= shell.acted()[0] <= 160 + 36


def test_a_falling_kv_gauge_does_not_hide_a_hang() -> None:
    """Clients that give up on a corpse free its blocks."""
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.cores["0"].kv = 0.9
    for second in range(62, 120, 3):
        engine.at(second, lambda e: setattr(e.cores["0"], "kv", e.cores["0"].kv - 0.04))
    assert VirtualShell(engine).run(120).acted()[0] <= 62 + 36


def _fill(value: float, engine: ScriptedEngine) -> None:
    engine.cores["0"].kv = value


def going_round(engine: ScriptedEngine, values: list[float], *, first: int = 62, until: int = 700) -> ScriptedEngine:
    """The KV usage is another of these values on each poll, in turn."""
    for number, second in enumerate(range(first, until, 5)):
        value = values[number % len(values)]
        engine.at(second, partial(_fill, value))
    return engine


@pytest.mark.parametrize(
    "values",
    [[0.2, 0.1], [0.1, 0.2, 0.3], [0.3, 0.2, 0.3, 0.1], [0.1, 0.2, 0.3, 0.4, 0.5]],
    ids=["two", "three", "four", "five"],
)
@pytest.mark.parametrize("settings", [Settings(warmup_sec=0), CANARY_OFF])
def test_a_kv_gauge_that_goes_round_among_a_few_values_does_not_hide_a_hang(
    values: list[float], settings: Settings
) -> None:
    engine = going_round(ScriptedEngine().busy().at(62, ScriptedEngine.hang), values)
    shell = VirtualShell(engine, settings).run(700)
    assert shell.acted()
    assert shell.acted()[0] <= 62 + 3 * 5 * len(values) + 46
    assert all(verdict.acting for t, verdict in shell.timeline if t >= shell.acted()[0])


@pytest.mark.parametrize("values", [[0.2, 0.1], [0.1, 0.2, 0.3, 0.4, 0.5]], ids=["two", "five"])
def test_nor_does_it_make_an_engine_that_works_hung(values: list[float]) -> None:
    """Its counters move, or, at rest, its canaries go through: then the gauge is believed again."""
    for engine in (ScriptedEngine().busy(), ScriptedEngine().busy().answer(Outcome.TIMEOUT), ScriptedEngine()):
        assert VirtualShell(going_round(engine, values)).run(700).acted() == []


@pytest.mark.parametrize("retraced", [1, 2])
def test_a_prefill_whose_gauge_falls_as_another_request_ends_goes_on_being_one(retraced: int) -> None:
    """Some steps up, one request is aborted, then up the very same steps and on from there."""
    steps = [0.02, 0.04, 0.06, 0.08, 0.1]
    engine = ScriptedEngine().prefill().answer(Outcome.TIMEOUT)
    engine.cores["0"].kv_rate = 0.0
    values = steps + retraced * steps + [round(0.2 + 0.01 * step, 9) for step in range(60)]
    assert VirtualShell(going_round(engine, values, first=2, until=400)).run(400).acted() == []


def test_a_long_prompt_that_clients_give_up_on_and_ask_for_again_and_again_is_work() -> None:
    engine = ScriptedEngine().prefill().answer(Outcome.TIMEOUT)
    engine.cores["0"].kv_rate = 0.0
    values = [round(0.02 * step, 9) for step in range(1, 8)]
    assert VirtualShell(going_round(engine, values, first=2)).run(700).acted() == []


def test_a_prefill_after_work_is_believed_whatever_the_gauge_did_before() -> None:
    watch = DirectWatch()
    t = 0.0
    for tokens in range(40):
        watch.page(t := t + 5, vllm_page(tokens, kv=0.1 + 0.1 * (tokens % 2), running=1))
    watch.page(t := t + 5, vllm_page(39, kv=0.1, running=1))
    watch.page(t := t + 5, vllm_page(39, kv=0.2, running=1))
    assert watch.state == "kv-growing"


def test_a_rising_kv_gauge_is_progress() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    for second in range(62, 120, 3):
        engine.at(second, lambda e: setattr(e.cores["0"], "kv", e.cores["0"].kv + 0.001))
    assert VirtualShell(engine).run(120).acted() == []


@pytest.mark.parametrize(
    "series",
    [
        'vllm:generation_tokens_created{engine="0",model_name="m"}',
        'vllm:request_generation_tokens_sum{engine="0",model_name="m"}',
        'vllm:request_generation_tokens_count{engine="0",model_name="m"}',
        'vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"}',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}',
        'vllm:request_success_total{engine="0",finished_reason="error",model_name="m"}',
        'vllm:prefix_cache_queries_total{engine="0",model_name="m"}',
        'vllm:num_preemptions_total{engine="0",model_name="m"}',
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}',
    ],
)
def test_near_misses_and_aborts_are_no_progress(series: str) -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.extra[series] = 0.0
    _let_rise(engine, series)
    assert VirtualShell(engine).run(120).acted(), "a hung core was hidden by something that is not a leg"


@pytest.mark.parametrize(
    "series",
    [
        'vllm:prompt_tokens_total{engine="0",model_name="m"}',
        'vllm:iteration_tokens_total_count{engine="0",model_name="m"}',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"}',
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}',
        'vllm_generation_tokens_total{engine="0",model_name="m"}',
        'ray_vllm_generation_tokens_total{engine="0",model_name="m"}',
        'vllm:gpu_cache_usage_perc{engine="0",model_name="m"}',
    ],
)
def test_every_other_leg_alone_is_progress(series: str) -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.extra[series] = 0.0
    _let_rise(engine, series)
    assert VirtualShell(engine).run(120).acted() == []


def _let_rise(engine: ScriptedEngine, series: str) -> None:
    for second in range(3, 120, 3):
        engine.at(second, lambda e: e.extra.update({series: e.extra[series] + 1}))


def test_what_rises_in_one_series_is_not_cancelled_by_what_falls_in_another() -> None:
    """Series are kept apart: a sum would stand still here for ever. A durable identity makes the fall a mere reset."""
    up, down = (f'vllm:prompt_tokens_total{{engine="0",model_name="{model}"}}' for model in ("lora-a", "lora-b"))
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.extra.update({up: 0.0, down: 1000.0})
    for second in range(3, 180, 3):
        engine.at(second, lambda e: e.extra.update({up: e.extra[up] + 1, down: e.extra[down] - 1}))
    shell = VirtualShell(engine).run(180)
    assert shell.acted() == []


def test_a_leg_that_comes_and_goes_unchanged_does_not_hide_a_hang() -> None:
    """A page that loses one series every other scrape kept the earlier watcher at 200 for ever."""
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    for poll in range(0, 200, 10):
        engine.at(poll - 1, lambda e: setattr(e, "hide", lambda series: "generation_tokens" in series))
        engine.at(poll + 4, lambda e: setattr(e, "hide", lambda series: False))
    assert VirtualShell(engine).run(125).acted()[0] <= 62 + 36


def test_a_page_that_loses_and_regains_a_leg_of_a_healthy_engine_is_no_hang() -> None:
    engine = ScriptedEngine()
    for poll in range(0, 600, 10):
        engine.at(poll - 1, lambda e: setattr(e, "hide", lambda series: "generation_tokens" in series))
        engine.at(poll + 4, lambda e: setattr(e, "hide", lambda series: False))
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert shell.watch.restarts == 0


def test_a_leg_born_later_counts_from_zero() -> None:
    """SGLang's scheduler counters appear with their first token: that first value is progress."""
    watch = DirectWatch(kind="sglang")
    watch.page(0, {"sglang:token_usage": 0.0})
    watch.canary(0.1, Outcome.OK)
    watch.page(5, {"sglang:token_usage": 0.0, 'sglang:realtime_tokens_total{mode="decode"}': 7.0})
    assert watch.state == "growing"
    watch.page(10, {"sglang:token_usage": 0.0, 'sglang:realtime_tokens_total{mode="decode"}': 7.0})
    assert watch.state == "freeze-grace"


def test_a_leg_born_at_zero_is_no_progress() -> None:
    watch = DirectWatch(kind="sglang")
    watch.page(0, {"sglang:token_usage": 0.0})
    watch.page(5, {"sglang:token_usage": 0.0, 'sglang:realtime_tokens_total{mode="decode"}': 0.0})
    assert watch.state == "freeze-grace"


# --- the passive rule -----------------------------------------------------------------------------------------------


def test_without_canaries_a_busy_frozen_core_is_hung_after_the_threshold() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), CANARY_OFF).run(180)
    assert 62 + 25 <= shell.acted()[0] <= 62 + 41
    assert shell.canaries == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda core: setattr(core, "running", 1.0), id="running"),
        pytest.param(lambda core: setattr(core, "waiting", 3.0), id="waiting"),
    ],
)
def test_without_canaries_running_or_waiting_requests_make_a_frozen_core_suspect(change: Callable[..., None]) -> None:
    engine = ScriptedEngine().hang()
    change(engine.cores["0"])
    assert VirtualShell(engine, CANARY_OFF).run(120).acted()


def test_without_canaries_an_idle_core_is_never_hung() -> None:
    shell = VirtualShell(ScriptedEngine().at(62, ScriptedEngine.hang), CANARY_OFF).run(600)
    assert shell.acted() == []
    assert shell.state == "idle"


def test_an_absent_gauge_is_not_busy() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.hide = lambda series: "num_requests" in series
    assert VirtualShell(engine, CANARY_OFF).run(600).acted() == []


def test_without_canaries_the_first_request_after_an_idle_hour_is_not_hung_at_once() -> None:
    """The core was frozen for an hour when it became busy; its first step may take a while."""
    engine = ScriptedEngine().at(3600, lambda e: setattr(e.cores["0"], "running", 1.0))
    engine.at(3620, lambda e: e.busy())
    assert VirtualShell(engine, CANARY_OFF).run(3700).acted() == []


def test_a_page_that_loses_its_load_gauges_for_once_does_not_begin_that_time_again() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(83, lambda e: setattr(e, "hide", lambda series: "num_requests" in series))
    engine.at(88, lambda e: setattr(e, "hide", lambda series: False))
    assert VirtualShell(engine, CANARY_OFF).run(180).acted()[0] <= 62 + 41


def test_a_page_that_says_idle_does() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(83, lambda e: setattr(e.cores["0"], "running", 0.0))
    engine.at(88, lambda e: setattr(e.cores["0"], "running", 1.0))
    assert VirtualShell(engine, CANARY_OFF).run(180).acted()[0] >= 90 + 30


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_with_an_unusable_canary_a_busy_frozen_core_is_hung_all_the_same(outcome: Outcome) -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).answer(outcome)
    assert 62 + 25 <= VirtualShell(engine).run(180).acted()[0] <= 62 + 41


@pytest.mark.parametrize("outcome", [Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_with_an_unusable_canary_a_busy_moving_core_is_not(outcome: Outcome) -> None:
    assert VirtualShell(ScriptedEngine().busy().answer(outcome)).run(600).acted() == []


def test_sglang_gets_the_time_in_which_its_gauges_may_be_stale() -> None:
    """num_running_reqs kept its last value for 30 s on an idle engine (sgl-project/sglang#26495)."""
    engine = ScriptedSGLang().busy()
    engine.at(60, ScriptedEngine.idle)
    engine.at(60, lambda e: setattr(e.cores["0"], "running", 24.0))
    engine.at(92, lambda e: setattr(e.cores["0"], "running", 0.0))
    assert VirtualShell(engine, CANARY_OFF, kind="sglang").run(300).acted() == []


def test_sglang_frozen_and_busy_beyond_that_time_is_hung() -> None:
    engine = ScriptedSGLang().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, CANARY_OFF, kind="sglang").run(300)
    assert 62 + 55 <= shell.acted()[0] <= 62 + 71


def test_a_passive_hang_is_never_declared_before_the_poll_has_read_its_page() -> None:
    """The poll that would show progress is under way when the time runs out."""
    settings = Settings(warmup_sec=0, active_probe_enabled=False, stall_sec=29)
    engine = ScriptedEngine().busy()
    engine.at(62, ScriptedEngine.hang).at(93.5, ScriptedEngine.resume)
    shell = VirtualShell(engine, settings).run(120)
    assert shell.acted() == []
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    assert VirtualShell(engine, settings).run(120).acted(), "the negative control: it does hang without the resumption"


# --- the heartbeat --------------------------------------------------------------------------------------------------


def test_a_frozen_heartbeat_is_the_one_passive_sign_of_a_wedged_idle_engine() -> None:
    engine = ScriptedSGLang()
    engine.heartbeat = 0.0
    engine.at(62, lambda e: setattr(e, "loop_turns", False)).at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, CANARY_OFF, kind="sglang").run(300)
    assert 62 + 55 <= shell.acted()[0] <= 62 + 71
    assert "loop does not turn" in shell.watch.verdict.reason


def test_a_turning_heartbeat_says_idle_and_is_no_leg() -> None:
    engine = ScriptedSGLang()
    engine.heartbeat = 0.0
    shell = VirtualShell(engine, CANARY_OFF, kind="sglang").run(300)
    assert shell.acted() == []
    assert shell.state == "idle"
    assert "loop turns" in shell.watch.verdict.reason
    assert "growing" not in shell.states


def test_a_turning_heartbeat_neither_stops_canaries_nor_voids_their_failure() -> None:
    engine = ScriptedSGLang()
    engine.heartbeat = 0.0
    engine.at(62, lambda e: e.answer(Outcome.TIMEOUT))
    shell = VirtualShell(engine, kind="sglang").run(180)
    assert shell.acted()[0] <= 62 + 36


def test_without_a_heartbeat_an_idle_engine_with_canaries_off_cannot_tell() -> None:
    shell = VirtualShell(ScriptedSGLang(), CANARY_OFF, kind="sglang").run(300)
    assert shell.state == "idle"
    assert "cannot tell" in shell.watch.verdict.reason


# --- request-grained legs -------------------------------------------------------------------------------------------


def test_a_core_whose_legs_move_only_at_request_ends_gets_two_minutes_and_the_reason_says_so() -> None:
    engine = ScriptedSGLang()
    engine.step_series = False
    engine.at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, kind="sglang").run(300)
    assert 62 + 115 <= shell.acted()[0] <= 62 + 126
    assert "request" in shell.watch.verdict.reason


def test_a_longer_stall_setting_still_counts_for_request_grained_legs() -> None:
    engine = ScriptedSGLang()
    engine.step_series = False
    engine.at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings(warmup_sec=0, stall_sec=200), kind="sglang").run(400)
    assert 62 + 195 <= shell.acted()[0] <= 62 + 206


def test_one_step_grained_leg_is_enough_for_the_short_threshold() -> None:
    shell = VirtualShell(ScriptedSGLang().at(62, ScriptedEngine.hang), kind="sglang").run(300)
    assert shell.acted()[0] <= 62 + 36


# --- a page that lacks a leg ----------------------------------------------------------------------------------------


def without_tokens(engine: ScriptedEngine) -> None:
    engine.hide = lambda series: series.startswith("vllm:generation_tokens_total")


def with_everything(engine: ScriptedEngine) -> None:
    engine.hide = lambda series: False


def test_a_page_that_lacks_the_moving_leg_does_not_show_that_nothing_moves() -> None:
    engine = ScriptedEngine().busy().at(0, lambda e: e.answer(Outcome.SATURATED))
    engine.at(59, without_tokens).at(67, with_everything)
    settings = Settings(warmup_sec=0, stall_sec=6)
    assert VirtualShell(engine, settings).run(180).acted() == []


def test_and_when_it_does_not_come_back_the_other_legs_have_to_do() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(62, without_tokens)
    shell = VirtualShell(engine).run(180)
    assert shell.acted()[0] <= 62 + 36


@pytest.mark.parametrize("how", [Outcome.MISCONFIGURED, Outcome.SATURATED, None])
def test_without_a_usable_canary_a_leg_that_moved_until_it_went_away_is_missed(how: Outcome | None) -> None:
    """An engine at work whose token counter is no longer on the page: what is left stands still."""
    engine = ScriptedEngine().busy().answer(how).at(62, without_tokens)
    shell = VirtualShell(engine, Settings(warmup_sec=0) if how else CANARY_OFF).run(600)
    assert shell.acted() == []
    assert "until generation_tokens is on the page again" in " ".join(shell.watch.explain(shell.now).would_flip)


@pytest.mark.parametrize(("away_at", "missed"), [(97, False), (87, True)])
def test_but_not_where_it_had_stood_still_for_the_stall_time_before(away_at: int, missed: bool) -> None:
    engine = ScriptedEngine().busy().answer(Outcome.MISCONFIGURED).at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine.at(away_at, without_tokens), Settings(warmup_sec=0, stall_sec=30)).run(600)
    assert bool(shell.acted()) is not missed


def test_an_engine_at_rest_whose_leg_goes_away_before_it_is_busy_is_not_hung() -> None:
    engine = ScriptedEngine().answer(Outcome.MISCONFIGURED).at(102, without_tokens).at(122, lambda e: e.busy())
    assert VirtualShell(engine).run(600).acted() == []


def test_nor_where_the_same_leg_goes_on_under_other_labels() -> None:
    other = 'vllm:generation_tokens_total{engine="0",model_name="m",pid="7"}'

    def relabel(engine: ScriptedEngine) -> None:
        engine.hide = lambda series: series.startswith("vllm:generation_tokens_total") and "pid" not in series

    def move(value: float, engine: ScriptedEngine) -> None:
        engine.extra[other] = value

    engine = ScriptedEngine().busy().at(62, relabel).at(100, ScriptedEngine.hang)
    for second in range(60, 100):
        engine.at(second, partial(move, float(second)))
    assert VirtualShell(engine, CANARY_OFF).run(300).acted()[0] <= 100 + 36
