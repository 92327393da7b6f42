"""Asking many at once under one deadline.

Every question has a daemon thread of its own, because a lookup (getaddrinfo) blocks for as long as it likes and nothing
can interrupt it. Whoever asks waits for the answers, never for the threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, Generic, TypeVar

Answer = TypeVar("Answer")

MOST_AT_ONCE: Final = 512
LAST_WORD_SEC: Final = 0.2
LAST_WORD_SHARE: Final = 0.1


class SideBySide(Generic[Answer]):
    """Questions that run side by side until a deadline.

    Args:
        deadline: when to stop waiting, on the monotonic clock.
        now: that clock.
        most_at_once: so many run at a time; the others wait until one of them has its answer.

    Attributes:
        answer_by: when a question should give up by itself: a little before the deadline, so that its answer still
            tells why there is none.
    """

    def __init__(
        self, deadline: float, now: Callable[[], float] = time.monotonic, most_at_once: int = MOST_AT_ONCE
    ) -> None:
        self.answer_by = deadline - min(LAST_WORD_SEC, LAST_WORD_SHARE * max(deadline - now(), 0.0))
        self._deadline = deadline
        self._now = now
        self._most_at_once = most_at_once
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._waiting: deque[Callable[[], Answer]] = deque()
        self._running = 0

    @property
    def unanswered(self) -> int:
        """Questions without an answer so far, those included that were never asked."""
        return self._running + len(self._waiting)

    def start(self, question: Callable[[], Answer], *, first: bool = False) -> None:
        """Ask one more; it must not raise.

        Args:
            question: runs in a thread.
            first: before those that wait.
        """
        if first:
            self._waiting.appendleft(question)
        else:
            self._waiting.append(question)
        self._start_waiting()

    def answers(self) -> Iterator[Answer]:
        """The answers as they come, until there is nothing left to wait for or the deadline is there.

        More may be started meanwhile.
        """
        while self._running:
            left = self._deadline - self._now()
            try:
                answer = self._answers.get(timeout=left) if left > 0 else self._answers.get_nowait()
            except Empty:
                return
            self._running -= 1
            if left > 0:  # those that wait have no time left: thousands that fail one by one would still take long
                self._start_waiting()
            yield answer

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self._most_at_once:
            question = self._waiting[0]
            try:
                Thread(target=self._answer, args=(question,), daemon=True).start()
            except RuntimeError:
                return  # the system gives no more threads: when one has ended, perhaps
            self._waiting.popleft()
            self._running += 1

    def _answer(self, question: Callable[[], Answer]) -> None:
        self._answers.put(question())
