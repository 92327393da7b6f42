"""The judgement's clock: the caller's time without the stretches in which the watcher did not run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewatch.core.clock import GapClock

LONGEST, KEEP = 20.0, 5.0


def advance(clock: GapClock, *times: float) -> list[bool]:
    return [clock.advance(now, longest=LONGEST, keep=KEEP) for now in times]


def test_without_gaps_it_is_the_callers_clock() -> None:
    clock = GapClock(100.0)
    assert advance(clock, 105, 110, 130) == [False, False, False]
    assert clock.at(130) == 130


def test_a_gap_is_taken_off_but_for_one_poll() -> None:
    clock = GapClock(0.0)
    assert advance(clock, 10, 610) == [False, True]
    assert clock.at(610) == 15
    assert clock.at(615) == 20


def test_a_pause_of_exactly_the_longest_is_no_gap() -> None:
    clock = GapClock(0.0)
    assert advance(clock, LONGEST, 2 * LONGEST + 0.001) == [False, True]


def test_what_began_before_the_gap_keeps_its_time() -> None:
    clock = GapClock(0.0)
    advance(clock, 10, 610)
    assert clock.at(9) == 9


def test_what_began_inside_the_gap_began_when_it_began() -> None:
    """A request that went on while the watcher slept: its moment counts as the gap's beginning."""
    clock = GapClock(0.0)
    advance(clock, 10, 610)
    assert clock.at(300) == 10


def test_gaps_add_up() -> None:
    clock = GapClock(0.0)
    advance(clock, 10, 110, 115, 1115)
    assert clock.at(1115) == 10 + KEEP + 5 + KEEP


def test_a_step_back_is_no_gap_and_does_not_make_the_next_step_one() -> None:
    clock = GapClock(0.0)
    assert advance(clock, 10, 9, 25) == [False, False, False]


@given(st.lists(st.floats(0, 100), max_size=40))
def test_it_never_runs_backwards_and_never_faster_than_the_callers(steps: list[float]) -> None:
    clock = GapClock(0.0)
    now = before = 0.0
    for step in steps:
        now += step
        clock.advance(now, longest=LONGEST, keep=KEEP)
        t = clock.at(now)
        assert before - 1e-9 <= t <= now + 1e-9
        assert t - before <= min(step, LONGEST) + 1e-9
        before = t


@pytest.mark.parametrize("origin", [-1e6, 0.0, 4e8])
def test_where_the_callers_clock_begins_does_not_matter(origin: float) -> None:
    clock = GapClock(origin)
    advance(clock, origin + 10, origin + 610)
    assert clock.at(origin + 610) - clock.at(origin + 10) == pytest.approx(KEEP)
