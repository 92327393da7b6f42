"""TensorRT-LLM: by a page that moves when a request ends, by statistics that reading removes, and by neither."""

from __future__ import annotations

import pytest
from scripted_trtllm import ScriptedTrtllm
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings
from enginewatch.core.statistics import NOT_READ
from enginewatch.engines.trtllm import PROFILE

USUAL = Settings(warmup_sec=0)
NO_CANARIES = Settings(warmup_sec=0, active_probe_enabled=False)
HUNG_AT = 302.0
REQUEST_GRAINED_SEC = 120.0
"""The threshold where every leg moves only at the end of a request."""
LATE_SEC = 17.0
"""A poll, a canary, the wait for an empty list and a little."""

by_page_and_list = pytest.mark.parametrize("by_json", [False, True], ids=["page", "list"])


def watch(engine: ScriptedEngine, until: float, settings: Settings = USUAL, *, kind: str = "trtllm") -> VirtualShell:
    assert isinstance(engine, ScriptedTrtllm)
    return VirtualShell(engine, settings, kind=kind, json_statistics=engine.by_json).run(until)


def hung_after(shell: VirtualShell, state: str = "stall-hang") -> float:
    """How long after the hang the verdict came."""
    told = shell.first(state)
    assert told is not None, shell.states
    assert shell.acted()[0] == told
    return told - HUNG_AT


# --- what must not be killed ----------------------------------------------------------------------------------------


@by_page_and_list
@pytest.mark.parametrize("settings", [USUAL, NO_CANARIES], ids=["canaries", "no canaries"])
def test_an_hour_without_work_is_no_hang(by_json: bool, settings: Settings) -> None:
    shell = watch(ScriptedTrtllm(by_json=by_json), 3600, settings)
    assert shell.acted() == []


@by_page_and_list
def test_ten_minutes_over_one_request_are_no_hang_when_canaries_go_through(by_json: bool) -> None:
    engine = ScriptedTrtllm(by_json=by_json).at(62, lambda e: e.busy()).at(662, lambda e: e.end_request().idle())
    shell = watch(engine, 1200)
    assert shell.acted() == []
    assert not {"probe-fail-grace", "probe-fail-but-growing"} & set(shell.states)


def test_by_its_statistics_a_canary_may_wait_behind_one_request_for_ever() -> None:
    engine = ScriptedTrtllm(by_json=True)
    engine.at(62, lambda e: e.busy().set_full())
    shell = watch(engine, 3600)
    assert shell.acted() == []
    assert shell.state == "growing"


def test_by_its_page_alone_a_canary_may_wait_behind_one_request_for_two_minutes() -> None:
    """A known limit: nothing on the page tells a full engine from a hung one. The operator raises stall_sec."""
    engine = ScriptedTrtllm()
    engine.at(HUNG_AT, lambda e: e.busy().set_full())
    shell = watch(engine, 1200)
    assert REQUEST_GRAINED_SEC - 10 <= hung_after(shell) <= REQUEST_GRAINED_SEC + LATE_SEC
    assert "move only at request ends" in shell.watch.verdict.reason

    patient = ScriptedTrtllm()
    patient.at(HUNG_AT, lambda e: e.busy().set_full())
    patient.at(HUNG_AT + 600, lambda e: e.end_request().idle().set_full(False))
    assert watch(patient, 1500, Settings(warmup_sec=0, stall_sec=660)).acted() == []


@pytest.mark.parametrize(
    "settings", [NO_CANARIES, Settings(warmup_sec=0, active_probe_path="/elsewhere")], ids=["off", "refused"]
)
def test_a_gauge_that_nobody_writes_kills_nobody(settings: Settings) -> None:
    """After the last request the page says running=1 for ever; one long request shows the same."""
    engine = ScriptedTrtllm()
    engine.end_request()
    engine.at(62, lambda e: e.busy().answer(Outcome.MISCONFIGURED))
    engine.at(100, lambda e: e.end_request().idle())
    shell = watch(engine, 3600, settings)
    assert max(engine.page()[series] for series in engine.page() if "running" in series) == 1.0
    assert shell.acted() == []


@by_page_and_list
def test_a_full_queue_is_no_hang(by_json: bool) -> None:
    engine = ScriptedTrtllm(by_json=by_json).at(62, lambda e: e.busy().answer(Outcome.SATURATED))
    shell = watch(engine, 1200)
    assert shell.acted() == []


@by_page_and_list
def test_a_crash_and_half_an_hour_of_loading_are_one_replacement(by_json: bool) -> None:
    engine = ScriptedTrtllm(by_json=by_json)
    engine.at(10, lambda e: e.busy()).at(200, lambda e: e.end_request())
    engine.at(HUNG_AT, lambda e: e.hang().fail("refused")).at(HUNG_AT + 1800, lambda e: e.restart())
    shell = watch(engine, HUNG_AT + 2400)
    assert shell.acted() == []
    assert "restarting" in shell.states
    assert shell.watch.restarts == 1


def test_a_restart_between_two_polls_shows_in_the_iterations() -> None:
    engine = ScriptedTrtllm(by_json=True)
    engine.at(10, lambda e: e.busy()).at(HUNG_AT, lambda e: e.restart())
    shell = watch(engine, HUNG_AT + 300)
    assert shell.watch.restarts == 1
    assert "replaced" in shell.states
    assert shell.acted() == []


def test_polls_shorter_than_the_wait_for_an_empty_list_are_no_gap_of_the_watcher() -> None:
    hasty = Settings(warmup_sec=0, poll_interval_sec=0.25, metrics_timeout_sec=1.0)
    shell = watch(ScriptedTrtllm(by_json=True), 600, hasty)
    assert "observer-gap" not in shell.states
    assert shell.acted() == []


# --- what must be found ---------------------------------------------------------------------------------------------


def test_by_its_page_a_hang_is_found_after_two_minutes() -> None:
    engine = ScriptedTrtllm().at(10, lambda e: e.busy()).at(HUNG_AT, ScriptedEngine.hang)
    assert REQUEST_GRAINED_SEC - 10 <= hung_after(watch(engine, 900)) <= REQUEST_GRAINED_SEC + LATE_SEC


@pytest.mark.parametrize("load", ["busy", "idle"])
def test_by_its_statistics_a_hang_is_found_as_fast_as_with_any_engine(load: str) -> None:
    engine = ScriptedTrtllm(by_json=True)
    if load == "busy":
        engine.at(10, lambda e: e.busy())
    engine.at(HUNG_AT, ScriptedEngine.hang).at(HUNG_AT + 200, ScriptedEngine.resume)
    shell = watch(engine, 900)
    assert USUAL.stall_sec - 10 <= hung_after(shell) <= USUAL.stall_sec + LATE_SEC
    assert not shell.watch.verdict.acting, "and forgiven when it works again"


def test_by_its_page_a_hang_while_idle_is_found_by_canaries() -> None:
    engine = ScriptedTrtllm().at(HUNG_AT, ScriptedEngine.hang)
    assert REQUEST_GRAINED_SEC - 10 <= hung_after(watch(engine, 900)) <= REQUEST_GRAINED_SEC + LATE_SEC


def test_a_list_that_is_filled_when_a_request_ends_is_given_the_patience_of_such_a_page() -> None:
    """With return_perf_metrics on as well newer versions hold the statistics back until a request ends."""
    engine = ScriptedTrtllm(by_json=True)
    engine.held_back = engine.batches_statistics = True
    engine.at(62, lambda e: e.busy().set_full())
    engine.at(162, lambda e: e.end_request().idle().set_full(False))
    engine.at(HUNG_AT, ScriptedEngine.hang)
    shell = watch(engine, 900)
    assert REQUEST_GRAINED_SEC - 10 <= hung_after(shell) <= REQUEST_GRAINED_SEC + LATE_SEC


@by_page_and_list
def test_a_front_end_that_outlives_its_executor_is_restarted(by_json: bool) -> None:
    """NVIDIA/TensorRT-LLM#18663: it answers for ever; the canary's 400 is an error because /health says 503."""
    engine = ScriptedTrtllm(by_json=by_json).at(10, lambda e: e.busy())
    engine.at(HUNG_AT, lambda e: e.hang().answer(Outcome.ERROR_ANSWER))
    limit = USUAL.stall_sec if by_json else REQUEST_GRAINED_SEC
    assert limit - 10 <= hung_after(watch(engine, 900)) <= limit + LATE_SEC


@pytest.mark.parametrize(("failure", "limit"), [("timeout", USUAL.unreach_after_sec), ("http_500", 300.0)])
def test_so_is_one_that_does_not_give_its_statistics_any_more(failure: str, limit: float) -> None:
    engine = ScriptedTrtllm(by_json=True).at(10, lambda e: e.busy())
    engine.at(HUNG_AT, lambda e: e.hang().answer(Outcome.ERROR_ANSWER).fail(failure))
    assert limit <= hung_after(watch(engine, 900), "unreach-hang") <= limit + LATE_SEC


def test_an_executor_that_was_dead_before_the_sidecar_came_is_not_seen() -> None:
    """A known limit of every engine: an error counts only once a canary has succeeded."""
    engine = ScriptedTrtllm()
    engine.hang().answer(Outcome.ERROR_ANSWER)
    assert watch(engine, 3600).acted() == []


def test_the_line_in_its_log_that_a_rank_crashed_speeds_up_the_verdict() -> None:
    engine = ScriptedTrtllm().at(10, lambda e: e.busy())
    engine.at(HUNG_AT, ScriptedEngine.hang).at(HUNG_AT + 6, lambda e: setattr(e, "log_hits", 1))
    assert hung_after(watch(engine, 900), "stall-hang-log") <= USUAL.log_stall_sec + LATE_SEC


# --- statistics that tell nothing -----------------------------------------------------------------------------------


def test_statistics_that_are_always_empty_leave_it_to_canaries_and_say_how_to_get_them() -> None:
    engine = ScriptedTrtllm(by_json=True)
    engine.statistics_on = False
    engine.at(10, lambda e: e.busy())
    shell = watch(engine, 1200)
    assert shell.states == ["no-legs"]
    assert "enable_iter_perf_stats: true" in shell.watch.verdict.reason
    assert any("enable_iter_perf_stats: true" in log.event for log in shell.logs)

    engine.at(1202, ScriptedEngine.hang)
    shell.run(1600)
    assert shell.state == "canary-hang"
    assert shell.acted()[0] - 1202 <= 2 * PROFILE.longest_wait_sec + LATE_SEC


def test_statistics_that_begin_later_are_taken_up() -> None:
    engine = ScriptedTrtllm(by_json=True)
    engine.statistics_on = False
    engine.at(10, lambda e: e.busy()).at(400, lambda e: setattr(e, "statistics_on", True))
    shell = watch(engine, 600)
    assert shell.state == "growing"
    assert shell.watch.restarts == 0


@pytest.mark.parametrize("since", [0.0, 300.0])
def test_statistics_that_somebody_else_reads_prove_no_hang_of_a_busy_engine(since: float) -> None:
    engine = ScriptedTrtllm(by_json=True).at(10, lambda e: e.busy())
    engine.at(since, lambda e: setattr(e, "others_read", True))
    shell = watch(engine, 3600)
    assert shell.acted() == []
    assert shell.state in ("no-legs", "stall-active-ok")
    assert shell.watch.restarts == 0


def test_an_empty_list_is_not_called_a_page_without_legs_once_there_was_one() -> None:
    engine = ScriptedTrtllm(by_json=True).at(10, lambda e: e.busy()).at(HUNG_AT, ScriptedEngine.hang)
    shell = watch(engine, 900)
    assert "no-legs" not in {verdict.state for t, verdict in shell.timeline if t > 15}
    [core] = shell.watch.explain(shell.now).cores
    assert core.running is None, "an empty list says nothing of the load"
    assert core.legs["iterations"].value > 0, "and the count stays what it was"


@pytest.mark.parametrize("failure", ["http_404", "malformed", "http_500"])
def test_statistics_that_go_away_end_no_engine_whose_canaries_go_through(failure: str) -> None:
    engine = ScriptedTrtllm(by_json=True).at(10, lambda e: e.busy()).at(HUNG_AT, lambda e: e.fail(failure))
    shell = watch(engine, 3600)
    assert shell.acted() == []


def test_a_rank_that_answers_no_question_is_a_page_that_fails() -> None:
    """The front end asks it for the statistics, and waits for as long as it is stopped."""
    engine = ScriptedTrtllm(by_json=True).at(10, lambda e: e.busy()).at(HUNG_AT, lambda e: e.hang().fail("timeout"))
    limit = USUAL.unreach_after_sec
    assert limit <= hung_after(watch(engine, 900), "unreach-hang") <= limit + LATE_SEC


def test_without_a_page_it_is_said_what_to_switch_on() -> None:
    shell = watch(ScriptedTrtllm().fail("http_404"), 60)
    assert shell.state == "no-legs"
    assert "return_perf_metrics: true" in shell.watch.verdict.reason


@pytest.mark.parametrize("wanted", [True, False])
def test_statistics_that_are_wanted_are_said_to_wait_for_the_engine_to_say_who_it_is(wanted: bool) -> None:
    engine = ScriptedTrtllm(by_json=wanted).fail("malformed")
    engine.failure_detail = NOT_READ
    engine.kind = "unknown"
    shell = watch(engine, 60, kind="auto")
    assert shell.state == "no-legs"
    reason = shell.watch.verdict.reason
    assert ("before it is known which engine this is" in reason) == wanted
    assert ("not metrics" in reason) == (not wanted)


def test_before_its_first_request_the_page_has_nothing_and_the_canary_changes_that() -> None:
    shell = watch(ScriptedTrtllm(), 60)
    assert shell.states[0] == "no-legs"
    assert "before the first request" in shell.timeline[0][1].reason
    assert shell.state in ("growing", "stall-active-ok")


def test_recognised_it_is_read_as_the_operator_wants() -> None:
    known = watch(ScriptedTrtllm(by_json=True), 60, kind="auto").watch.profile
    assert known is not None
    assert known.reads_json_statistics
    known = watch(ScriptedTrtllm(), 60, kind="auto").watch.profile
    assert known is not None
    assert not known.reads_json_statistics


@pytest.mark.parametrize("wait_sec", [45.0, 55.0])
def test_without_a_page_a_canary_may_wait_a_minute_behind_a_queue(wait_sec: float) -> None:
    """It comes without a page, and where it queues nothing else tells."""
    engine = ScriptedTrtllm()
    engine.core.canary_after = wait_sec
    shell = watch(engine.busy().fail("http_404"), 3600)
    assert shell.acted() == []
    assert {outcome for _, _, outcome in shell.results} == {Outcome.OK}
