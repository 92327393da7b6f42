"""Many questions under one deadline, whatever becomes of some of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from enginewatch.guard import side_by_side
from enginewatch.guard.side_by_side import SideBySide


@pytest.fixture
def black_hole() -> Iterator[threading.Event]:
    """Holds a question until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_answers_come_as_they_are_ready_and_more_may_be_asked_meanwhile() -> None:
    asking: SideBySide[int] = SideBySide(time.monotonic() + 60)
    asking.start(lambda: 1)
    seen = []
    for answer in asking.answers():
        seen.append(answer)
        if answer < 3:
            asking.start(lambda next_one=answer + 1: next_one)  # type: ignore[misc]
    assert seen == [1, 2, 3]
    assert asking.unanswered == 0


def test_a_black_hole_holds_neither_the_others_nor_the_end(black_hole: threading.Event) -> None:
    begun = time.monotonic()
    asking: SideBySide[int] = SideBySide(begun + 0.5)
    asking.start(lambda: int(black_hole.wait()))
    for number in range(256):
        asking.start(lambda number=number: number)  # type: ignore[misc]
    answers = list(asking.answers())
    assert sorted(answers) == list(range(256))
    assert asking.unanswered == 1
    assert 0.5 <= time.monotonic() - begun < 20


def test_what_is_ready_at_the_deadline_is_still_taken() -> None:
    asking: SideBySide[int] = SideBySide(time.monotonic() - 1)
    answered = threading.Event()

    def question() -> int:
        answered.set()
        return 7

    asking.start(question)
    answered.wait(60)
    until = time.monotonic() + 60
    while asking._answers.empty() and time.monotonic() < until:
        time.sleep(0.001)
    assert list(asking.answers()) == [7]


def test_those_that_wait_at_the_deadline_are_not_asked_any_more() -> None:
    clock = [0.0]
    asking: SideBySide[int] = SideBySide(10.0, now=lambda: clock[0], most_at_once=2)
    for number in range(6):
        asking.start(lambda number=number: number)  # type: ignore[misc]
    answers = asking.answers()
    seen = {next(answers), next(answers)}
    clock[0] = 10.0
    until = time.monotonic() + 60
    while asking._answers.qsize() < 2 and time.monotonic() < until:
        time.sleep(0.001)
    assert seen | set(answers) == {0, 1, 2, 3}
    assert asking.unanswered == 2


def test_no_more_than_so_many_run_at_once_and_none_is_lost() -> None:
    asking: SideBySide[int] = SideBySide(time.monotonic() + 60, most_at_once=3)
    running, most, lock = 0, 0, threading.Lock()

    def question() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001)
        with lock:
            running -= 1
        return 1

    for _ in range(40):
        asking.start(question)
    assert sum(asking.answers()) == 40
    assert 1 <= most <= 3


def test_those_that_matter_most_come_before_those_that_wait() -> None:
    asking: SideBySide[str] = SideBySide(time.monotonic() + 60, most_at_once=1)
    go = threading.Event()
    asking.start(lambda: str(go.wait()))
    asking.start(lambda: "later")
    asking.start(lambda: "first", first=True)
    go.set()
    assert list(asking.answers()) == ["True", "first", "later"]


class Scarce(threading.Thread):
    """A thread of a system that gives only so many."""

    left = 0

    def start(self) -> None:
        if Scarce.left <= 0:
            raise RuntimeError("can't start new thread")
        Scarce.left -= 1
        super().start()

    def run(self) -> None:
        super().run()
        Scarce.left += 1


def test_a_system_without_threads_leaves_the_questions_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "Thread", Scarce)
    monkeypatch.setattr(Scarce, "left", 0)
    asking: SideBySide[int] = SideBySide(time.monotonic() + 60)
    asking.start(lambda: 1)
    asking.start(lambda: 2)
    assert list(asking.answers()) == []
    assert asking.unanswered == 2


def test_a_system_with_few_threads_gives_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "Thread", Scarce)
    monkeypatch.setattr(Scarce, "left", 2)
    asking: SideBySide[int] = SideBySide(time.monotonic() + 60)
    for number in range(20):
        asking.start(lambda number=number: number)  # type: ignore[misc]
    assert set(asking.answers()) <= set(range(20))
    assert asking.unanswered < 20


def test_a_question_gives_up_a_little_before_the_deadline_so_that_its_answer_says_why() -> None:
    now = time.monotonic()
    for seconds in (0.1, 1.0, 4.0):
        assert now < SideBySide[int](now + seconds).answer_by < now + seconds
