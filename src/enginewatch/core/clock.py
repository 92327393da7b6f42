"""The judgement's clock: the caller's monotonic time without the stretches in which the watcher did not run.

A watcher that was frozen for ten minutes has seen nothing for ten minutes. If that time counted, every engine would
look frozen to it. So the time is taken off every clock at once: all times in the judgement are on this one.
"""

from __future__ import annotations


class GapClock:
    """Maps the caller's monotonic seconds to watched seconds, and notices gaps."""

    __slots__ = ("_before", "_gap_began", "_gap_ended", "_last", "_skipped")

    def __init__(self, now: float) -> None:
        self._last = now
        self._skipped = 0.0
        self._before = 0.0
        self._gap_began = self._gap_ended = float("-inf")

    def advance(self, now: float, *, longest: float, keep: float) -> bool:
        """Move on to `now`. Returns True when more than `longest` passed since the last call: a gap.

        All of a gap but `keep` seconds is taken off the clock.
        """
        last, self._last = self._last, max(now, self._last)
        if now - last <= longest:
            return False
        self._before = self._skipped
        self._gap_began, self._gap_ended = last, now
        self._skipped += now - last - keep
        return True

    def at(self, now: float) -> float:
        """Watched time at the caller's `now`; for a moment before the last gap, on the clock of before it.

        A moment inside the gap (something that went on while the watcher slept) counts as the gap's begin. Moments
        before the gap before that one may come out early by its length: they are older than anything in use.
        """
        if now >= self._gap_ended:
            return now - self._skipped
        return min(now, self._gap_began) - self._before
