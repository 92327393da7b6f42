"""Two engines behind one address: a configuration error that must neither hide a hang for ever nor kill."""

from __future__ import annotations

from functools import partial
from random import Random

import pytest
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.identity import HASTY, MOST_STRAYS, IdentityTracker
from enginewatch.core.settings import Settings


def alternate(engine: ScriptedEngine, first: int, last: int, *, back: bool = True) -> ScriptedEngine:
    """From `first` on, every other second another process answers (with `back` the old one in between)."""

    def other(engine: ScriptedEngine) -> None:
        engine.start_time = 2000.0

    def this(engine: ScriptedEngine) -> None:
        engine.start_time = 1000.0

    for second in range(first, last, 10):
        engine.at(second + 2, other)
        if back:
            engine.at(second + 7, this)
    return engine


def test_a_process_that_comes_back_is_no_replacement() -> None:
    shell = VirtualShell(alternate(ScriptedEngine().busy(), 30, 300)).run(300)
    assert shell.watch.restarts == 1
    assert len([log for log in shell.logs if "two engine processes" in log.event]) == 1
    assert shell.acted() == []


def test_a_hang_behind_it_is_declared() -> None:
    engine = alternate(ScriptedEngine().busy(), 30, 400).at(200, ScriptedEngine.hang)
    assert VirtualShell(engine).run(300).state == "stall-hang"


def test_a_process_that_alone_goes_on_answering_is_the_engine_again() -> None:
    engine = ScriptedEngine().busy()
    engine.at(32, lambda e: setattr(e, "start_time", 2000.0)).at(62, lambda e: setattr(e, "start_time", 1000.0))
    shell = VirtualShell(engine).run(120)
    identity = shell.watch.identity
    assert identity is not None
    assert identity.engine_id == "pst-1000.00"
    assert shell.state == "growing"
    assert shell.run(121).watch.restarts == 2


def test_two_that_are_asked_at_random_are_no_endless_replacements() -> None:
    """A Service with two endpoints: each answers several times in a row now and then."""
    chance = Random(1)
    engine = ScriptedEngine().busy().at(60, ScriptedEngine.hang)

    def another(engine: ScriptedEngine) -> None:
        engine.start_time = chance.choice((1000.0, 2000.0))

    for second in range(62, 7200, 5):
        engine.at(second, another)
    shell = VirtualShell(engine).run(7200)
    assert shell.watch.restarts <= 5, "and not one a minute"
    assert (shell.state, shell.watch.verdict.acting) == ("stall-hang", True)


def test_one_that_is_left_alone_is_judged_after_two_minutes_at_most() -> None:
    tracker, now, alone = IdentityTracker(1), 0.0, 0
    tracker.page(1000.0, fell=False, rose=False, now=now)
    for turn in range(12):
        alone, start_time = 0, 1000.0 * (2 - turn % 2)
        now += 60.0
        while tracker.is_stray(start_time):
            alone, now = alone + 1, now + 5.0
        tracker.page(start_time, fell=False, rose=False, now=now)
        assert tracker.restarts == turn + 1
    assert alone == MOST_STRAYS - 1


def test_counters_that_go_to_and_fro_between_two_values_are_no_life() -> None:
    engine = ScriptedEngine().busy().at(60, ScriptedEngine.hang)

    def swap(engine: ScriptedEngine) -> None:
        core = engine.cores["0"]
        core.tokens = 50.0 if core.tokens > 60 else 70.0

    for second in range(62, 400, 5):
        engine.at(second, swap)
    shell = VirtualShell(engine).run(150)
    assert shell.state == "stall-hang"


@pytest.mark.parametrize("how", ["in turn", "at random"])
def test_a_hang_of_two_engines_that_nothing_tells_apart_is_declared(how: str) -> None:
    engine = ScriptedEngine(start_time=None).busy().at(60, ScriptedEngine.hang)
    chance = Random(1)

    def another(engine: ScriptedEngine) -> None:
        core = engine.cores["0"]
        others = (50.0, 70.0) if how == "at random" else (50.0,) if core.tokens > 60 else (70.0,)
        core.tokens = chance.choice(others)

    for second in range(62, 3600, 5):
        engine.at(second, another)
    shell = VirtualShell(engine).run(3600)
    assert HASTY <= shell.watch.restarts <= HASTY + 1, "and not one every few pages for ever"
    assert len([log for log in shell.logs if "ENGINE_URL must name one engine" in log.event]) == 1
    assert (shell.state, shell.watch.verdict.acting) == ("stall-hang", True)


def test_after_a_failed_scrape_counters_that_fall_are_believed_again() -> None:
    tracker = IdentityTracker(1)
    for now in range(100):
        tracker.page(None, fell=True, rose=False, now=float(now))
    assert tracker.restarts == HASTY
    tracker.interrupted()
    tracker.page(None, fell=True, rose=False, now=100.0)
    assert tracker.restarts == HASTY + 1


def test_counters_that_fall_and_then_rise_to_ever_new_values_are() -> None:
    engine = ScriptedEngine().busy().at(60, lambda e: setattr(e.cores["0"], "tokens", 0.0))
    shell = VirtualShell(engine).run(300)
    assert "regress" in shell.states
    assert shell.state == "growing"
    assert shell.acted() == []


# --- a start time that is another one on every page -----------------------------------------------------------------


def renamed_every(pages: int, engine: ScriptedEngine, *, first: int = 62, until: int = 1500) -> ScriptedEngine:
    """Every so many polls the page tells a start time that it never told before."""

    def rename(engine: ScriptedEngine) -> None:
        engine.start_time = (engine.start_time or 0.0) + 7.0

    for second in range(first, until, 5 * pages):
        engine.at(second, rename)
    return engine


@pytest.mark.parametrize("pages", [1, 2])
def test_a_hang_behind_ever_new_start_times_is_found(pages: int) -> None:
    """It was `replaced` on every page, in a warm-up that never ended."""
    engine = renamed_every(pages, ScriptedEngine().busy().at(63, ScriptedEngine.hang))
    shell = VirtualShell(engine).run(400)
    assert shell.acted()[0] <= 65 + 18 * 5 * pages + 41
    assert all(verdict.acting for t, verdict in shell.timeline if t >= shell.acted()[0])
    loud = [log.event for log in shell.logs if log.level == "error" and "is not believed" in log.event]
    assert len(loud) == 1


def test_its_warm_up_ends() -> None:
    engine = renamed_every(1, ScriptedEngine().busy().at(63, ScriptedEngine.hang))
    shell = VirtualShell(engine, Settings()).run(900)
    assert 65 + 16 * 5 + 600 <= shell.acted()[0] <= 65 + 17 * 5 + 600 + 1


@pytest.mark.parametrize("pages", [1, 2])
def test_an_engine_at_work_or_at_rest_behind_them_is_not_hung(pages: int) -> None:
    for engine in (ScriptedEngine().busy(), ScriptedEngine()):
        shell = VirtualShell(renamed_every(pages, engine)).run(900)
        assert shell.acted() == []
        identity = shell.watch.identity
        assert identity is not None
        assert identity.source == "observed"
        assert identity.restarts == 17


def test_start_times_that_settle_are_believed_again() -> None:
    engine = renamed_every(1, ScriptedEngine().busy(), until=400).at(600, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(500)
    identity = shell.watch.identity
    assert identity is not None
    assert identity.source == "process_start_time"
    restarts = identity.restarts
    assert shell.run(700).watch.restarts == restarts + 1, "and a replacement is seen again"


def in_turn(engines: int, engine: ScriptedEngine) -> ScriptedEngine:
    """So many engines answer in turn, one poll each."""

    def answers(number: int, engine: ScriptedEngine) -> None:
        engine.start_time = 2000.0 + number

    for poll, second in enumerate(range(62, 1500, 5)):
        engine.at(second, partial(answers, poll % engines))
    return engine


@pytest.mark.parametrize("engines", [2, 3, 5, 12, 16])
def test_a_hang_behind_several_engines_in_turn_is_found(engines: int) -> None:
    engine = in_turn(engines, ScriptedEngine().busy()).at(302, ScriptedEngine.hang)
    assert VirtualShell(engine).run(1500).acted()[0] <= 302 + 46 + 2 * 5 * engines


@pytest.mark.parametrize("engines", [2, 3, 5, 12, 16])
def test_as_many_engines_as_are_remembered_are_told_apart(engines: int) -> None:
    shell = VirtualShell(in_turn(engines, ScriptedEngine().busy())).run(1500)
    assert shell.acted() == []
    assert shell.watch.restarts == engines
    assert not [log for log in shell.logs if "is not believed" in log.event]


@pytest.mark.parametrize("refused", [True, False])
def test_an_engine_that_crashes_and_loads_again_and_again_is_believed(refused: bool) -> None:
    """Down for 7 s of 20 s, or so slow a poll that nobody sees it down."""
    engine = ScriptedEngine()
    for second in range(62, 1500, 20):
        if refused:
            engine.at(second, lambda e: e.fail("refused"))
        engine.at(second + 7, lambda e: e.restart().busy())
    shell = VirtualShell(engine).run(1500)
    assert shell.watch.restarts == 72
    assert shell.acted() == []


@pytest.mark.parametrize("failure", ["refused", "timeout", "http_502"])
def test_so_is_one_that_loads_faster_than_any_does_but_was_seen_down(failure: str) -> None:
    engine = ScriptedEngine()
    for second in range(61, 700, 10):
        engine.at(second, lambda e: e.fail(failure)).at(second + 5, lambda e: e.restart().busy())
    shell = VirtualShell(engine).run(700)
    assert shell.watch.restarts == 63
    assert shell.acted() == []
