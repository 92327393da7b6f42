"""Asking many at once under one deadline.

Every question has a daemon thread of its own, because a lookup (getaddrinfo) blocks for as long as it likes and nothing
can interrupt it. Whoever asks waits for the answers, never for the threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, Generic, TypeVar

Answer = TypeVar("Answer")

LAST_WORD_SEC: Final = 0.2
LAST_WORD_SHARE: Final = 0.1


class SideBySide(Generic[Answer]):
    """Questions that run side by side until a deadline.

    Args:
        deadline: when to stop waiting, on the monotonic clock.
        now: that clock.

    Attributes:
        answer_by: when a question should give up by itself: a little before the deadline, so that its answer still
            tells why there is none.
        not_asked: questions for which the system gave no thread.
    """

    def __init__(self, deadline: float, now: Callable[[], float] = time.monotonic) -> None:
        self.deadline = deadline
        self.answer_by = deadline - min(LAST_WORD_SEC, LAST_WORD_SHARE * max(deadline - now(), 0.0))
        self._now = now
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._running = 0
        self.not_asked = 0

    @property
    def unanswered(self) -> int:
        """Questions without an answer so far, those included that were never asked."""
        return self._running + self.not_asked

    def start(self, question: Callable[[], Answer]) -> None:
        """Ask one more. It must not raise; where no thread can be had, it counts as not asked."""
        try:
            Thread(target=lambda: self._answers.put(question()), daemon=True).start()
        except RuntimeError:
            self.not_asked += 1
        else:
            self._running += 1

    def answers(self) -> Iterator[Answer]:
        """The answers as they come, until there is nothing left to wait for or the deadline is there.

        More may be started meanwhile.
        """
        while self._running:
            left = self.deadline - self._now()
            try:
                answer = self._answers.get(timeout=max(left, 0.0)) if left > 0 else self._answers.get_nowait()
            except Empty:
                return
            self._running -= 1
            yield answer
