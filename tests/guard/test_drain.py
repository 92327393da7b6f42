"""The rules of a drain, in virtual time: each with what must not set it off."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewatch.guard.drain import CALM_PAGES, UNREADABLE_SEC, Drain, Questions, Round, run
from enginewatch.guard.gauges import Load
from enginewatch.guard.main import run as guard
from enginewatch.guard.plain_http import Address

BUSY = Round(None, Load(2, 1))
EMPTY = Round(None, Load(0, 0))
SILENT = Round(None, None, "connection refused")
HUNG = Round("core 0 frozen for 31 s", None)
FLAGS = ["--engine", "http://127.0.0.1:8000", "--sidecar", "http://127.0.0.1:9090"]


class VirtualTime:
    """A clock that only sleeping moves, and questions that take no time unless told."""

    def __init__(self, rounds: Iterable[Round], takes_sec: float = 0.0) -> None:
        self.now = 1000.0
        self.rounds: Iterator[Round] = iter(rounds)
        self.takes_sec = takes_sec
        self.asked = 0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def questions(self, sidecar: Address | None, engine: Address) -> Questions:
        outer = self

        class Scripted(Questions):
            def ask(self, until: float) -> Round:
                outer.asked += 1
                outer.now += min(outer.takes_sec, max(0.0, until - outer.now))
                return next(outer.rounds)

        return Scripted(sidecar, engine)

    def drain(self, *flags: str) -> int:
        return run([*FLAGS, *flags], clock=self.clock, sleep=self.sleep, questions=self.questions)


def told(rounds: Iterable[Round], capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[float, str]:
    """Seconds it took and the line it ended with."""
    time = VirtualTime(rounds)
    assert time.drain(*flags) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    return time.now - 1000.0, out.strip()


def test_an_empty_engine_is_left_after_two_pages(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, line = told(itertools.repeat(EMPTY), capsys)
    assert seconds == 1
    assert line.startswith("drained: nothing runs or waits")


def test_one_empty_page_between_busy_ones_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, line = told([*[BUSY, EMPTY] * 20, EMPTY], capsys)
    assert seconds == 40
    assert line.startswith("drained")


def test_an_empty_page_an_unread_one_and_an_empty_one_are_not_two_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, _ = told([EMPTY, SILENT, EMPTY, SILENT, EMPTY, EMPTY], capsys)
    assert seconds == 5


@pytest.mark.parametrize("load", [Load(1, 0), Load(0, 1), Load(0, 0, 1)])
def test_whatever_an_engine_still_has_is_waited_for(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    seconds, _ = told([*[Round(None, load)] * 100, EMPTY, EMPTY], capsys)
    assert seconds == 101


def test_a_hang_ends_it_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, line = told([BUSY, BUSY, HUNG], capsys)
    assert seconds == 2
    assert "hangs" in line
    assert "core 0 frozen for 31 s" in line


def test_a_saturated_engine_that_moves_is_drained_until_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    moving = (Round(None, Load(256, 1000 + n % 7)) for n in itertools.count())
    seconds, line = told(moving, capsys, "--deadline-sec", "120")
    assert seconds == 120
    assert line == f"not drained within 120 s: 256 running, {1000 + 120 % 7} waiting"


def test_the_deadline_is_five_minutes_unless_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(itertools.repeat(BUSY), capsys)[0] == 300


def test_a_round_of_questions_does_not_outlast_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    time = VirtualTime(itertools.repeat(BUSY), takes_sec=4)
    assert time.drain("--deadline-sec", "10.5") == 0
    assert time.now - 1000.0 == 10.5
    assert "not drained within 10.5 s" in capsys.readouterr().out


def test_thirty_seconds_without_a_count_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, line = told(itertools.repeat(SILENT), capsys)
    assert seconds == UNREADABLE_SEC
    assert "could not be counted" in line
    assert "connection refused" in line


def test_one_page_within_thirty_seconds_keeps_it_going(capsys: pytest.CaptureFixture[str]) -> None:
    gaps = itertools.cycle([*[SILENT] * 29, BUSY])
    seconds, line = told(gaps, capsys)
    assert seconds == 300
    assert line.startswith("not drained within 300 s")


def test_an_answer_of_many_seconds_counts_as_the_time_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    time = VirtualTime(itertools.repeat(SILENT), takes_sec=4)
    assert time.drain() == 0
    assert 30 <= time.now - 1000.0 <= 34
    assert time.asked == 8
    capsys.readouterr()


@given(st.lists(st.sampled_from([BUSY, EMPTY, SILENT]), max_size=60))
def test_nothing_is_called_drained_without_two_empty_pages_in_a_row(rounds: list[Round]) -> None:
    drain = Drain(0.0, 300.0)
    seen: list[Round] = []
    for now, told in enumerate(rounds):
        end = drain.handle(told, float(now))
        seen.append(told)
        last = seen[-CALM_PAGES:]
        assert (last == [EMPTY] * CALM_PAGES) == (end is not None and end.startswith("drained"))
        if end is not None:
            break


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--engine"),
        (["--engine", ""], "not an address"),
        (["--engine", "ftp://127.0.0.1"], "not an address"),
        (["--engine", "http://127.0.0.1:99999"], "not an address"),
        (["--engine", "http://127.0.0.1:8000/a b"], "not an address"),
        ([*FLAGS, "--sidecar", "http://"], "not an address"),
        ([*FLAGS, "--deadline-sec", "soon"], "not a number of seconds"),
        ([*FLAGS, "--deadline-sec", "0"], "not a number of seconds"),
        ([*FLAGS, "--deadline-sec", "nan"], "not a number of seconds"),
        ([*FLAGS, "--deadline", "5"], "--deadline"),
        ([*FLAGS, "now"], "now"),
    ],
)
def test_bad_flags_are_one_sentence(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(["drain", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_help_names_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(["drain", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(flag in out for flag in ("--engine", "--sidecar", "--deadline-sec"))
