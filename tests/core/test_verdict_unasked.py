"""A watcher that cannot ask: a name that does not resolve, a certificate that is not trusted, no file descriptor left.

Nothing is known of the engine then. It is neither killed for it nor is what was known of it forgotten.
"""

from __future__ import annotations

import pytest
from direct_watch import DirectWatch, kinds, vllm_page
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Log, Outcome, ScrapeFailed
from enginewatch.core.settings import Settings

USUAL = Settings(warmup_sec=0)
CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)
WHY = "cannot resolve engine.example: correct the host in ENGINE_URL"


def cannot_ask(engine: ScriptedEngine) -> ScriptedEngine:
    return engine.fail("unasked").answer(Outcome.UNASKED)


def can_ask(engine: ScriptedEngine) -> ScriptedEngine:
    return engine.fail(None).answer(None)


# --- it never kills -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [USUAL, CANARY_OFF])
def test_an_engine_that_cannot_be_asked_for_a_day_is_not_killed(settings: Settings) -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(100, cannot_ask), settings).run(24 * 3600)
    assert shell.acted() == []
    assert shell.state == "observer-gap"


@pytest.mark.parametrize("settings", [USUAL, CANARY_OFF])
def test_one_that_answers_nothing_instead_is(settings: Settings) -> None:
    """The control: the same time, but the questions were put."""
    shell = VirtualShell(ScriptedEngine().busy().at(100, lambda e: e.hang().fail("timeout")), settings).run(200)
    assert shell.state == "unreach-hang"
    assert shell.acted()


def test_the_time_to_load_stands_still_while_nobody_can_ask() -> None:
    settings = Settings(startup_budget_sec=600)
    shell = VirtualShell(cannot_ask(ScriptedEngine()), settings).run(3000)
    assert shell.states == ["startup"]
    # From here on the engine is asked and does not come: now its budget counts.
    shell.engine.fail("refused")
    assert shell.run(3595).acted() == []
    assert shell.run(3610).state == "startup-hang"


def test_a_reload_neither() -> None:
    settings = Settings(warmup_sec=0, startup_budget_sec=600)
    engine = ScriptedEngine().busy().at(100, lambda e: e.fail("refused")).at(500, cannot_ask)
    shell = VirtualShell(engine, settings).run(5000)
    assert shell.acted() == []
    assert shell.state == "restarting"
    engine.fail("refused")
    assert shell.run(5190).acted() == []
    assert shell.run(5210).state == "startup-hang"


def test_it_does_not_add_to_an_outage_and_does_not_end_one() -> None:
    engine = ScriptedEngine().busy().at(100, lambda e: e.hang().fail("timeout"))
    shell = VirtualShell(engine, USUAL).run(140)
    assert shell.state == "unreach-grace"
    cannot_ask(engine)
    assert shell.run(1000).acted() == []
    engine.fail("timeout").answer(None)
    assert shell.run(1012).acted() == []
    assert shell.run(1030).state == "unreach-hang"


def test_an_engine_that_idled_meanwhile_is_not_killed_by_the_first_page() -> None:
    engine = ScriptedEngine().busy().at(100, lambda e: cannot_ask(e.idle())).at(2000, can_ask)
    shell = VirtualShell(engine, USUAL).run(2600)
    assert shell.acted() == []
    assert shell.state in ("stall-active-ok", "growing")


# --- it forgets nothing ---------------------------------------------------------------------------------------------


def hung() -> VirtualShell:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), USUAL).run(120)
    assert shell.state == "stall-hang"
    return shell


def test_a_flicker_does_not_take_a_declared_hang_back() -> None:
    """A kubelet that counts failures in a row must not begin again."""
    shell = hung()
    before = len(shell.timeline)
    cannot_ask(shell.engine)
    shell.run(140)
    can_ask(shell.engine)
    shell.run(160)
    assert all(verdict.acting for _, verdict in shell.timeline[before:])


def test_a_declared_hang_is_not_reported_for_ever_by_a_watcher_that_cannot_see() -> None:
    """The kubelet has long restarted the engine; killing it again while it loads would never end."""
    shell = hung()
    cannot_ask(shell.engine)
    assert shell.run(160).watch.verdict.acting
    shell.run(175)
    assert shell.state == "observer-gap"
    assert not shell.watch.verdict.hung
    assert "a hang was seen before that" in shell.watch.verdict.reason


def test_it_is_reported_again_with_the_first_page_that_shows_it_still_holds() -> None:
    shell = hung()
    cannot_ask(shell.engine)
    shell.run(1000)
    can_ask(shell.engine)
    assert shell.run(1006).state == "stall-hang"
    assert shell.watch.verdict.acting


def test_and_while_scrapes_fail_in_another_way() -> None:
    shell = hung()
    cannot_ask(shell.engine)
    shell.run(1000)
    shell.engine.fail("timeout").answer(None)
    assert shell.run(1006).state == "stall-hang"


def test_one_that_works_again_is_not() -> None:
    shell = hung()
    cannot_ask(shell.engine)
    shell.run(1000)
    can_ask(shell.engine.resume())
    assert not shell.run(1006).watch.verdict.hung


def test_a_hang_is_found_although_every_other_question_cannot_be_put() -> None:
    """A watcher at its limit of open files."""
    engine = ScriptedEngine().busy()
    for turn in range(60):
        engine.at(64 + 10 * turn, cannot_ask).at(69 + 10 * turn, can_ask)
    engine.at(100, ScriptedEngine.hang)
    shell = VirtualShell(engine, USUAL).run(300)
    acted = shell.acted()
    assert acted
    assert acted[0] < 180


def test_an_idle_engine_behind_such_a_watcher_is_not_killed() -> None:
    engine = ScriptedEngine()
    for turn in range(60):
        engine.at(64 + 10 * turn, cannot_ask).at(69 + 10 * turn, can_ask)
    assert VirtualShell(engine, USUAL).run(700).acted() == []


# --- canaries -------------------------------------------------------------------------------------------------------


def test_a_canary_that_could_not_be_sent_counts_for_nothing() -> None:
    """Not even as a canary that is unusable: that would leave a busy engine to its gauges alone."""
    engine = ScriptedEngine().busy().answer(Outcome.UNASKED).at(62, lambda e: setattr(e.cores["0"], "tokens_rate", 0.0))
    shell = VirtualShell(engine, USUAL).run(600)
    assert shell.acted() == []
    assert shell.state == "freeze-grace"
    refused = ScriptedEngine().busy().answer(Outcome.MISCONFIGURED)
    refused.at(62, lambda e: setattr(e.cores["0"], "tokens_rate", 0.0))
    assert VirtualShell(refused, USUAL).run(600).acted(), "the control: a canary that the engine does not accept"


def test_it_does_not_break_a_run_of_failures() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, USUAL).run(76)
    engine.answer(Outcome.UNASKED)
    shell.run(84)
    engine.answer(None)
    assert shell.run(110).state == "stall-hang"


def test_it_is_not_sent_again_before_the_next_poll() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    assert "StartCanary" not in kinds(watch.canary(5.1, Outcome.UNASKED))
    assert "StartCanary" in kinds(watch.page(10, vllm_page()))


def test_an_arming_canary_that_could_not_be_sent_is_sent_with_the_next_poll() -> None:
    """Else error answers would not count before the engine's first idle moment."""
    watch = DirectWatch()
    watch.page(0, vllm_page(100))
    watch.canary(0.1, Outcome.UNASKED)
    assert "StartCanary" in kinds(watch.page(5, vllm_page(200)))
    watch.canary(5.1, Outcome.OK)
    assert "StartCanary" not in kinds(watch.page(10, vllm_page(300)))


def test_no_canary_goes_out_while_the_watcher_cannot_ask() -> None:
    shell = VirtualShell(ScriptedEngine().at(62, cannot_ask), USUAL).run(64)
    sent = len(shell.canaries)
    assert len(shell.run(600).canaries) == sent


# --- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [True, False])
def test_the_sentence_says_what_to_change_and_an_operator_is_warned_once(loaded: bool) -> None:
    watch = DirectWatch()
    if loaded:
        watch.page(0, vllm_page())
    warned: list[str] = []
    for t in (5.0, 10.0, 15.0):
        asked = watch.watch.handle(ScrapeFailed(t, "unasked", WHY), t)
        warned += [log.event for log in asked if isinstance(log, Log) and log.level == "warning"]
    assert watch.state == ("observer-gap" if loaded else "startup")
    assert watch.reason == f"the watcher cannot ask the engine: {WHY}"
    assert warned == [watch.reason]


def test_the_explanation_says_it_too() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.watch.handle(ScrapeFailed(5.0, "unasked", WHY), 5.0)
    told = watch.watch.explain(9.0)
    reachability = next(witness for witness in told.witnesses if witness.name == "reachability")
    assert (reachability.says, reachability.age_sec, reachability.detail) == ("cannot ask", 4.0, WHY)
    assert told.would_flip == ("nothing is judged until the watcher can ask the engine again",)


def test_a_hang_that_is_reported_on_says_for_how_long() -> None:
    shell = hung()
    cannot_ask(shell.engine)
    shell.run(131)
    assert "another 34 s" in shell.watch.explain(131).would_flip[1]
