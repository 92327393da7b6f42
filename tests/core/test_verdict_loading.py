"""An engine that is not there: startup, restarting, unreachable, replaced, and a watcher that did not run itself."""

from __future__ import annotations

import pytest
from direct_watch import DirectWatch, kinds, vllm_page
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings

USUAL = Settings(warmup_sec=0)
CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)
NO_PAGE = ["timeout", "reset", "truncated", "http_500", "http_503"]


# --- startup --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["refused", *NO_PAGE])
def test_until_the_first_page_the_engine_is_loading_whatever_fails(failure: str) -> None:
    shell = VirtualShell(ScriptedEngine().hang().fail(failure)).run(1800)
    assert shell.states == ["startup"]
    assert shell.watch.identity is None


@pytest.mark.parametrize("failure", ["refused", *NO_PAGE])
def test_loading_for_longer_than_the_budget_is_a_hang(failure: str) -> None:
    """Stuck at "Starting to load model" for 3.5 h (vllm#20891)."""
    shell = VirtualShell(ScriptedEngine().hang().fail(failure), Settings(startup_budget_sec=600)).run(700)
    assert shell.states == ["startup", "startup-hang"]
    assert 600 < shell.acted()[0] <= 606


def test_a_load_within_the_budget_is_not() -> None:
    engine = ScriptedEngine().fail("refused").at(590, lambda e: e.fail(None))
    shell = VirtualShell(engine, Settings(startup_budget_sec=600)).run(700)
    assert shell.acted() == []


def test_the_default_budget_is_an_hour_and_a_half() -> None:
    shell = VirtualShell(ScriptedEngine().fail("refused")).run(5399)
    assert shell.acted() == []
    assert shell.run(5410).acted()


def test_a_startup_hang_knows_no_warm_up() -> None:
    shell = VirtualShell(ScriptedEngine().fail("refused"), Settings(startup_budget_sec=60, warmup_sec=3600)).run(100)
    assert shell.state == "startup-hang"
    assert shell.watch.verdict.acting


def test_a_page_ends_a_startup_hang() -> None:
    engine = ScriptedEngine().fail("refused").at(100, lambda e: e.fail(None))
    shell = VirtualShell(engine, Settings(startup_budget_sec=60, warmup_sec=0)).run(103)
    assert shell.state == "baseline"


def test_a_complete_canary_starts_the_loading_budget_afresh() -> None:
    """It serves although its metrics do not come: that is no engine that cannot load."""
    settings = Settings(startup_budget_sec=600)
    serving = VirtualShell(ScriptedEngine().fail("timeout"), settings).run(3000)
    assert serving.acted() == []
    assert VirtualShell(ScriptedEngine().hang().fail("timeout"), settings).run(700).acted()


@pytest.mark.parametrize(("failure", "canaries"), [("refused", False), *((failure, True) for failure in NO_PAGE)])
def test_while_scrapes_fail_canaries_go_out_unless_nobody_listens(failure: str, canaries: bool) -> None:
    shell = VirtualShell(ScriptedEngine().hang().fail(failure)).run(100)
    assert bool(shell.canaries) is canaries


@pytest.mark.parametrize("failure", ["http_404", "http_401", "malformed"])
def test_an_answer_that_is_not_a_page_ends_startup_like_a_page(failure: str) -> None:
    watch = DirectWatch(Settings(warmup_sec=600))
    watch.fails(0, "refused")
    asked = watch.fails(5, failure)
    assert watch.state == "no-legs"
    assert "StartCanary" in kinds(asked), "the arming canary"
    # Warm-up has begun: canaries that fail now are shown, not acted on.
    for t in (10, 15, 20, 25, 30):
        watch.fails(t, failure)
    watch.canary(35, Outcome.TIMEOUT)
    for t in (35, 40, 45, 50, 55, 60):
        watch.fails(t, failure)
    watch.canary(65, Outcome.TIMEOUT)
    assert watch.state == "warmup-canary-hang"


@pytest.mark.parametrize("failure", ["http_404", "malformed"])
def test_an_answer_that_is_not_a_page_ends_restarting_and_warm_up_begins_again(failure: str) -> None:
    engine = ScriptedEngine().at(1000, lambda e: e.fail("refused")).at(1100, lambda e: e.hang().fail(failure))
    shell = VirtualShell(engine, Settings(warmup_sec=600)).run(1250)
    assert "restarting" in shell.states
    assert shell.state == "warmup-canary-hang"
    assert shell.acted() == []


# --- restarting -----------------------------------------------------------------------------------------------------


def test_a_crash_and_a_reload_of_half_an_hour_are_not_a_hang() -> None:
    engine = ScriptedEngine().busy().at(100, lambda e: e.fail("refused")).at(1900, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(2000)
    assert shell.acted() == []
    assert "restarting" in shell.states


@pytest.mark.parametrize("failure", NO_PAGE)
def test_whatever_fails_after_the_refusal_the_engine_is_still_loading(failure: str) -> None:
    """The port is bound before the model is loaded; a proxy answers 503 in between."""
    engine = ScriptedEngine().busy().at(100, lambda e: e.hang().fail("refused")).at(110, lambda e: e.fail(failure))
    shell = VirtualShell(engine).run(1900)
    assert shell.acted() == []
    assert shell.state == "restarting"


def test_a_reload_longer_than_the_budget_is_a_hang() -> None:
    engine = ScriptedEngine().busy().at(100, lambda e: e.fail("refused"))
    shell = VirtualShell(engine, Settings(warmup_sec=0, startup_budget_sec=600)).run(800)
    assert shell.state == "startup-hang"
    assert 700 < shell.acted()[0] <= 706


def test_a_refused_connection_hides_an_earlier_hang() -> None:
    """The kubelet did its work: without this it would kill the reloading engine again and again."""
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(120, lambda e: e.fail("refused"))
    shell = VirtualShell(engine).run(118)
    assert shell.watch.verdict.acting
    shell.run(121)
    assert shell.state == "restarting"
    assert not shell.watch.verdict.hung


def test_a_new_process_after_the_refusal_starts_with_no_failure_on_record() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(120, lambda e: e.fail("refused")).at(150, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(600)
    assert [t for t in shell.acted() if t > 120.1] == []
    assert shell.watch.restarts == 1


def test_the_same_process_after_a_refusal_is_as_hung_as_before() -> None:
    """Its start time says that it is the same; nothing has moved since it was declared hung."""
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(120, lambda e: e.fail("refused")).at(144, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(300)
    assert next(round(t) for t in shell.acted() if t > 121) == 145
    assert all(verdict.acting for t, verdict in shell.timeline if t > 145.005)


@pytest.mark.parametrize("how", ["moves", "canary"])
def test_and_well_again_once_it_proves_life(how: str) -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(120, lambda e: e.fail("refused")).at(144, lambda e: e.fail(None).resume())
    if how == "canary":
        engine.at(144, ScriptedEngine.idle)
    shell = VirtualShell(engine).run(600)
    assert [t for t in shell.acted() if t > (145.1 if how == "canary" else 121)] == []


def test_what_may_be_another_process_has_to_fail_a_canary_of_its_own() -> None:
    """Without a start time, one refused poll and counters that did not fall tell neither way."""
    engine = ScriptedEngine(start_time=None).busy().at(62, ScriptedEngine.hang)
    engine.at(119, lambda e: e.fail("refused")).at(124, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(300)
    assert shell.watch.restarts == 0
    again = [t for t in shell.acted() if t > 121]
    assert 125 + 5 <= again[0] <= 125 + 11


def restart_between_two_polls(engine: ScriptedEngine, at: float) -> ScriptedEngine:
    return engine.at(at, lambda e: e.fail("refused")).at(at + 3, lambda e: e.restart().busy(rate=0.0))


@pytest.mark.parametrize("settings", [USUAL, CANARY_OFF])
def test_an_engine_that_hung_at_zero_and_restarts_within_a_poll_is_not_blamed(settings: Settings) -> None:
    """No start time, no counter that fell, busy at once: nothing tells it from the one before, but its canaries."""
    engine = ScriptedEngine(start_time=None).busy(rate=0.0)
    engine.hang().cores["0"].tokens = 0.0
    restart_between_two_polls(engine, 124).at(145, lambda e: e.busy())
    shell = VirtualShell(engine, settings).run(300)
    assert [t for t in shell.acted() if t < 124]
    assert shell.watch.restarts == 0
    assert [t for t in shell.acted() if t > 125.02] == []


@pytest.mark.parametrize("start_time", [1000.0, None])
@pytest.mark.parametrize("refused", [1, 2, 5])
def test_a_frozen_engine_is_found_although_its_connection_is_refused_now_and_then(
    refused: int, start_time: float | None
) -> None:
    engine = ScriptedEngine(start_time=start_time).busy().at(62, ScriptedEngine.hang)
    for poll in range(12, 200, 1 + refused):
        engine.at(5 * poll - 1, lambda e: e.fail(None)).at(5 * poll + 4, lambda e: e.fail("refused"))
    shell = VirtualShell(engine).run(900)
    if start_time is None and refused > 1:
        assert shell.acted() == [], "a known limit: each time it looks like another process"
        return
    assert shell.acted()[0] <= 62 + 40 * (1 + refused) + 20
    acted = [t for t in shell.acted() if t > 500]
    assert acted
    hung_pages = {round(t) for t, verdict in shell.timeline if t > 500 and verdict.acting}
    assert len(hung_pages) >= 80 // (1 + refused) - 1, "on every page"


@pytest.mark.parametrize("start_time", [1000.0, None])
@pytest.mark.parametrize("refused", [1, 2, 5])
def test_an_engine_at_work_or_at_rest_behind_such_refusals_is_not(refused: int, start_time: float | None) -> None:
    for engine in (ScriptedEngine(start_time=start_time), ScriptedEngine(start_time=start_time).busy()):
        for poll in range(12, 200, 1 + refused):
            engine.at(5 * poll - 1, lambda e: e.fail(None)).at(5 * poll + 4, lambda e: e.fail("refused"))
        assert VirtualShell(engine).run(900).acted() == []


@pytest.mark.parametrize("start_time", [1000.0, None])
@pytest.mark.parametrize("up", [4, 8, 20])
def test_an_engine_that_crashes_again_and_again_is_not_hung(up: float, start_time: float | None) -> None:
    """Each process hangs at once and dies, a canary under way; the next one answers 12 s later."""
    engine = ScriptedEngine(start_time=start_time)
    t = 60.0
    while t < 1500:
        engine.at(t, lambda e: e.fail("refused").answer(Outcome.REFUSED))
        engine.at(t + 12, lambda e: e.restart().hang())
        t += 12 + up
    assert VirtualShell(engine).run(1500).acted() == []


def test_time_in_which_nobody_listened_counts_for_nothing() -> None:
    """Two canaries lost a minute apart, with a minute of refusals between, are no freeze of a minute."""
    engine = ScriptedEngine().at(62, lambda e: e.answer(Outcome.REFUSED)).at(67, lambda e: e.fail("refused"))
    engine.at(127, lambda e: e.fail(None)).at(142, lambda e: e.answer(None))
    assert VirtualShell(engine).run(300).acted() == []


# --- unreachable ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["timeout", "reset", "truncated"])
def test_scrapes_and_canaries_that_fail_for_twice_the_stall_are_a_hang(failure: str) -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail(failure))
    shell = VirtualShell(engine).run(200)
    assert shell.states[-2:] == ["unreach-grace", "unreach-hang"]
    assert 65 + 60 <= shell.acted()[0] <= 65 + 66


@pytest.mark.parametrize("failure", ["timeout", "reset", "truncated"])
def test_scrapes_that_fail_while_canaries_go_through_are_not(failure: str) -> None:
    """A slow /metrics in front of an engine at work."""
    engine = ScriptedEngine().busy().at(62, lambda e: e.fail(failure))
    shell = VirtualShell(engine).run(600)
    assert shell.acted() == []
    assert shell.state == "unreach-grace"


def test_the_sentence_tells_how_long_scrapes_fail_and_when_a_canary_last_went_through() -> None:
    """Measured from the last complete canary alone, an outage of hours would read as one of seconds."""
    engine = ScriptedEngine().busy().at(62, lambda e: e.fail("timeout")).at(602, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(636)
    assert shell.watch.verdict.reason == (
        "/metrics fails (timeout) for 570 s, but canaries go through: 35 s of 60 s since the last complete one"
    )
    shell.run(700)
    assert "has failed for 630 s, 95 s of them since the last complete canary" in shell.watch.verdict.reason
    never = VirtualShell(ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))).run(86)
    assert never.watch.verdict.reason == "/metrics fails (timeout) for 20 s of 60 s"


def test_the_operators_own_limit_counts() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))
    shell = VirtualShell(engine, Settings(warmup_sec=0, unreach_sec=150)).run(300)
    assert 65 + 150 <= shell.acted()[0] <= 65 + 156


def test_an_outage_shorter_than_the_limit_is_not() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))
    engine.at(122, lambda e: e.resume().fail(None))
    assert VirtualShell(engine).run(300).acted() == []


def test_the_time_alone_is_not_enough() -> None:
    """Canaries that find a full queue, for as long as one likes."""
    engine = ScriptedEngine().busy().at(62, lambda e: e.fail("timeout").answer(Outcome.SATURATED))
    assert VirtualShell(engine).run(900).acted() == []


def test_one_failed_canary_in_an_outage_is_not_enough() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout")).at(72, ScriptedEngine.resume)
    assert VirtualShell(engine).run(300).acted() == []


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        pytest.param(CANARY_OFF, None, id="off"),
        pytest.param(USUAL, Outcome.MISCONFIGURED, id="misconfigured"),
        pytest.param(USUAL, Outcome.ERROR_ANSWER, id="errors, never armed"),
    ],
)
def test_without_a_usable_canary_the_time_alone_decides(settings: Settings, outcome: Outcome | None) -> None:
    engine = ScriptedEngine().busy().answer(outcome).at(62, lambda e: e.hang().fail("timeout"))
    engine.answers = False
    shell = VirtualShell(engine, settings).run(200)
    assert shell.state == "unreach-hang"
    assert shell.acted()[0] >= 65 + 60


@pytest.mark.parametrize("failure", ["timeout", "reset", "truncated", "http_503"])
def test_a_server_that_answers_canaries_is_not_unreachable(failure: str) -> None:
    """401 within milliseconds while /metrics times out: not stuck, and nothing is known of its cores."""
    engine = ScriptedEngine().busy().answer(Outcome.MISCONFIGURED).at(62, lambda e: e.fail(failure))
    shell = VirtualShell(engine).run(3600)
    assert shell.acted() == []
    assert "not watched until one of the two is put right" in shell.watch.verdict.reason
    assert len([log for log in shell.logs if "is not watched" in log.event]) == 1
    assert shell.watch.explain(shell.now).would_flip[0].startswith("nothing while canaries are answered")


def test_and_unreachable_once_it_answers_no_more() -> None:
    engine = ScriptedEngine().busy().answer(Outcome.MISCONFIGURED).at(62, lambda e: e.fail("timeout"))
    engine.at(602, lambda e: e.answer(Outcome.TIMEOUT))
    assert 600 + 60 <= VirtualShell(engine).run(900).acted()[0] <= 600 + 76


def test_such_an_answer_is_no_proof_that_a_declared_hang_is_over() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(112, lambda e: e.fail("timeout").answer(Outcome.MISCONFIGURED))
    shell = VirtualShell(engine).run(400)
    assert all(verdict.acting for t, verdict in shell.timeline if t > 110)


def test_each_outage_says_for_itself_that_nothing_is_watched() -> None:
    engine = ScriptedEngine().busy().answer(Outcome.MISCONFIGURED)
    for start in (62, 362, 662):
        engine.at(start, lambda e: e.fail("timeout")).at(start + 100, lambda e: e.fail(None))
    engine.at(802, lambda e: e.fail("timeout")).at(817, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(900)
    assert len([log for log in shell.logs if "is not watched" in log.event]) == 3, "and a short one nothing"


@pytest.mark.parametrize("when", [65, 100], ids=["from the start", "in the middle"])
def test_an_engine_that_answers_5xx_gets_five_minutes(when: int) -> None:
    """VLLM's own watchdog, and a rescale that answers 503 to every path, end within this."""
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))
    engine.at(when - 3, lambda e: e.fail("http_503")).at(when + 7, lambda e: e.fail("timeout"))
    shell = VirtualShell(engine).run(500)
    assert 65 + 300 <= shell.acted()[0] <= 65 + 306


def test_a_longer_limit_of_the_operators_holds_for_5xx_as_well() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("http_500"))
    assert VirtualShell(engine, Settings(warmup_sec=0, unreach_sec=400)).run(600).acted()[0] >= 65 + 400


def test_a_complete_canary_starts_the_outage_afresh() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("http_500"))
    engine.at(101, ScriptedEngine.resume).at(108, lambda e: e.hang().fail("timeout"))
    shell = VirtualShell(engine).run(400)
    last_ok = max(t for t, _, outcome in shell.results if outcome is Outcome.OK)
    assert last_ok + 60 <= shell.acted()[0] <= last_ok + 66, "and the 5xx from before it is forgotten"


def test_an_unreachable_engine_is_not_declared_while_the_scrape_that_ends_it_is_under_way() -> None:
    """The scrape under way when the time runs out may be the good one: the last failed one must be old enough."""
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))
    engine.at(122, lambda e: e.resume().fail(None))
    engine.scrape_sec = 3
    shell = VirtualShell(engine).run(300)
    assert shell.acted() == []


def test_the_first_page_after_an_outage_must_not_kill_an_idle_engine() -> None:
    """Canaries lost in the outage count only for unreach-hang; the one in flight is abandoned and a new one starts."""
    engine = ScriptedEngine().at(62, lambda e: e.fail("timeout").answer(Outcome.TIMEOUT))
    engine.at(119, lambda e: e.fail(None).answer(None))
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_timeout_sec=7)).run(300)
    assert sum(outcome is Outcome.TIMEOUT for _, _, outcome in shell.results) >= 5
    assert shell.abandoned
    assert shell.acted() == []


def test_a_canary_begun_before_the_outage_is_still_the_cores_own() -> None:
    watch = DirectWatch(Settings(warmup_sec=0, active_probe_timeout_sec=14))
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    watch.fails(10, "timeout")
    assert "AbandonCanary" not in kinds(watch.page(15, vllm_page()))
    watch.canary(19, Outcome.TIMEOUT)
    assert watch.state == "probe-fail-grace"


def test_canaries_from_an_outage_do_not_count_for_the_core_even_if_it_still_hangs() -> None:
    engine = ScriptedEngine().at(62, lambda e: e.hang().fail("timeout")).at(118, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(300)
    assert shell.acted()[0] >= 120 + 25
    assert shell.acted()[0] <= 120 + 36


def test_a_failed_recheck_is_no_outage() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    for failure in ("timeout", "refused", "http_500", "http_404", "malformed"):
        watch.fails(1, failure, recheck=True)
        assert watch.state == "baseline"


@pytest.mark.parametrize("failure", ["timeout", "reset", "truncated", "http_503"])
def test_an_earlier_hang_is_shown_unchanged_while_scrapes_fail(failure: str) -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(112, lambda e: e.fail(failure))
    shell = VirtualShell(engine).run(160)
    before = next(verdict for t, verdict in reversed(shell.timeline) if t < 112)
    assert shell.state == "stall-hang"
    assert shell.watch.verdict.core == "0"
    assert shell.watch.verdict.acting
    assert shell.watch.verdict.hung_changed_at == before.hung_changed_at


def test_a_complete_canary_ends_the_hang_shown_during_an_outage() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(112, lambda e: e.fail("timeout"))
    engine.at(131, ScriptedEngine.resume)
    shell = VirtualShell(engine).run(150)
    assert shell.state == "unreach-grace"


def test_a_page_without_progress_after_the_outage_shows_the_hang_again() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.at(112, lambda e: e.fail("timeout")).at(128, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(140)
    assert shell.state == "stall-hang"
    assert all(verdict.acting for t, verdict in shell.timeline if t > 110), "never once 200 in between"


def test_an_unreach_hang_ends_with_a_page() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))
    engine.at(150, lambda e: e.resume().fail(None))
    shell = VirtualShell(engine).run(156)
    assert shell.state == "growing"


def test_outages_that_come_and_go_do_not_add_up() -> None:
    engine = ScriptedEngine()
    for start in range(60, 900, 60):
        engine.at(start, lambda e: e.fail("timeout").answer(Outcome.TIMEOUT))
        engine.at(start + 40, lambda e: e.fail(None).answer(None))
    assert VirtualShell(engine).run(900).acted() == []


# --- replaced -------------------------------------------------------------------------------------------------------


def test_another_start_time_is_another_process_for_one_poll() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(64)
    assert shell.state == "growing"
    shell.run(66)
    assert shell.state == "replaced"
    shell.run(71)
    assert shell.state != "replaced"
    assert shell.watch.restarts == 1


def test_a_replacement_of_an_idle_engine_is_seen_although_no_counter_falls() -> None:
    """0 before, 0 after: counters alone miss it."""
    engine = ScriptedEngine()
    engine.cores["0"].tokens = 0
    engine.at(62, lambda e: setattr(e, "start_time", 2000.0))
    shell = VirtualShell(engine, CANARY_OFF).run(66)
    assert shell.state == "replaced"


def test_a_counter_that_fell_without_a_durable_identity_is_another_process() -> None:
    engine = ScriptedEngine(start_time=None).busy().at(62, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(66)
    assert shell.state == "replaced"
    assert shell.watch.identity is not None
    assert shell.watch.identity.source == "observed"


@pytest.mark.parametrize(("failure", "replaced"), [("refused", True), ("timeout", False), ("http_503", False)])
def test_a_refused_outage_after_which_no_counter_is_higher_is_another_process(failure: str, replaced: bool) -> None:
    """Without a durable identity; idle before and after, at zero or not."""
    engine = ScriptedEngine(start_time=None).at(62, lambda e: e.fail(failure)).at(73, lambda e: e.fail(None))
    shell = VirtualShell(engine, CANARY_OFF).run(76)
    assert bool(shell.watch.restarts) is replaced


@pytest.mark.parametrize("failure", ["http_404", "malformed"])
@pytest.mark.parametrize("start_time", [1000.0, None])
def test_an_answer_that_is_not_a_page_leaves_the_identity_alone(start_time: float | None, failure: str) -> None:
    engine = ScriptedEngine(start_time=start_time).busy()
    engine.at(62, lambda e: e.fail(failure)).at(102, lambda e: e.fail(None))
    shell = VirtualShell(engine).run(61)
    before = shell.watch.identity
    assert shell.run(200).watch.identity == before


@pytest.mark.parametrize(("start_time", "counted"), [(1000.0, False), (None, True)])
def test_after_a_refused_outage_it_is_a_replacement_only_where_no_page_could_say_otherwise(
    start_time: float | None, counted: bool
) -> None:
    """A durable identity stands until a page names another one; an observed one cannot."""
    engine = ScriptedEngine(start_time=start_time).busy()
    engine.at(62, lambda e: e.fail("refused")).at(73, lambda e: e.fail("http_404"))
    shell = VirtualShell(engine).run(90)
    assert bool(shell.watch.restarts) is counted


def test_a_counter_that_fell_with_one_is_a_registry_reset() -> None:
    """An elastic rescale rebuilds vLLM's logger: counters begin at zero, the process lives on."""
    engine = ScriptedEngine().busy().at(62, lambda e: setattr(e.cores["0"], "tokens", 0.0))
    shell = VirtualShell(engine).run(66)
    assert shell.state == "regress"
    assert shell.watch.restarts == 0
    assert any("registry reset" in log.event for log in shell.logs)
    assert shell.run(71).state == "growing", "this poll only"


def test_a_registry_reset_is_a_proof_of_life_and_leaves_warm_up_alone() -> None:
    engine = ScriptedEngine().busy().at(700, lambda e: setattr(e.cores["0"], "tokens", 0.0))
    engine.at(703, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings()).run(800)
    assert 705 + 30 <= shell.acted()[0] <= 705 + 31, "warm-up did not begin again"


def test_a_replacement_begins_warm_up_again() -> None:
    engine = ScriptedEngine().busy().at(702, ScriptedEngine.restart).at(703, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings()).run(800)
    assert shell.acted() == []
    assert shell.state == "warmup-stall-hang"
    assert shell.run(1400).acted()[0] >= 705 + 600


def test_a_replacement_clears_a_hang_and_its_failures() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(112, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(600)
    assert [t for t in shell.acted() if t > 115.1] == []


def test_what_was_begun_before_a_replacement_is_thrown_away() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100))
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page(100))
    old = watch.canaries[-1].token
    watch.page(6, vllm_page(0, start_time=2000.0), recheck=True)
    watch.canary(10, Outcome.TIMEOUT, token=old)
    watch.page(10.1, vllm_page(500), begun=5.9)  # an old page of the old process, read late
    assert watch.watch.restarts == 1
    identity = watch.watch.identity
    assert identity is not None
    assert identity.started_at_unix == 2000.0


def test_a_flapping_scrape_does_not_extend_warm_up() -> None:
    """An engine that fails one scrape every nine minutes must not live in warm-up for ever."""
    engine = ScriptedEngine().busy()
    for minute in range(9, 60, 9):
        engine.at(60 * minute, lambda e: e.fail("timeout")).at(60 * minute + 6, lambda e: e.fail(None))
    engine.at(3000, ScriptedEngine.hang)
    assert VirtualShell(engine, Settings()).run(3100).acted()


def test_neither_does_a_refused_connection_of_the_same_process() -> None:
    engine = ScriptedEngine().busy()
    for minute in range(9, 60, 9):
        engine.at(60 * minute, lambda e: e.fail("refused")).at(60 * minute + 6, lambda e: e.fail(None))
    engine.at(3010, ScriptedEngine.hang)
    assert VirtualShell(engine, Settings()).run(3100).acted()


# --- the watcher itself did not run ---------------------------------------------------------------------------------


def test_time_in_which_the_watcher_did_not_run_does_not_count() -> None:
    """The watcher was stopped for ten minutes; the engine looked frozen all the while."""
    shell = VirtualShell(ScriptedEngine().busy().at(100, ScriptedEngine.hang), CANARY_OFF).run(102)
    shell.freeze(600)
    shell.run(704)
    assert "observer-gap" in shell.states
    assert shell.acted() == []
    assert shell.run(760).acted()[0] >= 702 + 20


def test_observer_gap_is_shown_for_one_poll() -> None:
    shell = VirtualShell(ScriptedEngine().busy()).run(102)
    shell.freeze(100)
    shell.run(203)
    assert shell.state == "observer-gap"
    shell.run(208)
    assert shell.state == "growing"


def test_a_hiccup_shorter_than_two_polls_and_a_scrape_is_no_gap() -> None:
    shell = VirtualShell(ScriptedEngine().busy()).run(102)
    shell.freeze(17)
    assert "observer-gap" not in shell.run(200).states


def test_a_canary_in_flight_across_a_gap_is_thrown_away() -> None:
    shell = VirtualShell(ScriptedEngine().at(62, ScriptedEngine.hang)).run(77)
    shell.freeze(300)
    shell.run(700)
    assert shell.abandoned
    assert shell.acted()[0] >= 377 + 10, "frozen for 12 s before it and for one poll in it"


def test_a_gap_during_an_outage_does_not_make_it_long() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(100, lambda e: e.hang().fail("timeout"))).run(112)
    shell.freeze(300)
    shell.run(425)
    assert shell.acted() == []
    assert shell.run(600).acted(), "the negative control: it is unreachable all the same"


def test_a_gap_during_startup_does_not_use_up_the_budget() -> None:
    shell = VirtualShell(ScriptedEngine().fail("refused"), Settings(startup_budget_sec=600)).run(100)
    shell.freeze(900)
    assert shell.run(1200).acted() == []


def test_a_hang_that_stood_before_a_gap_stands_after_it() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang)).run(120)
    assert shell.state == "stall-hang"
    shell.freeze(100)
    shell.run(230)
    assert shell.state == "stall-hang"


def test_an_answer_that_arrives_across_a_gap_counts_for_nothing_and_is_not_abandoned_again() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    assert "AbandonCanary" not in kinds(watch.canary(300, Outcome.TIMEOUT))
    watch.page(301, vllm_page())
    watch.page(306, vllm_page())
    assert watch.state == "stall-active-ok", "no failure is on record"


def test_gaps_on_every_poll_never_kill() -> None:
    """A watcher starved of CPU sees nothing, and must not kill."""
    watch = DirectWatch()
    for poll in range(100):
        watch.page(40.0 * poll, vllm_page(running=1))
        assert not watch.watch.verdict.hung


def test_a_gap_of_the_watcher_does_not_take_a_declared_hang_back() -> None:
    engine = ScriptedEngine().busy().at(60, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(120)
    assert shell.state == "stall-hang"
    said = len(shell.timeline)
    shell.freeze(300)
    shell.run(600)
    assert {verdict.state for _, verdict in shell.timeline[said:]} == {"stall-hang"}
