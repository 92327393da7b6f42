"""Does the engine rest on purpose? `paused`: no canary, no hang.

Rules:
    - The page's own gauges tell for as long as they stand. The pause endpoints are asked beside the loop on stalled
      polls and while resting; a yes counts for `PAUSE_POLLS` polls, a no ends it, no answer proves nothing.
    - An engine without such endpoints is not asked again until it is replaced; but only once its version is known,
      since that decides which endpoints can be trusted.
"""

from __future__ import annotations

from typing import Final

from enginewatch.core.events import Flags

PAUSE_POLLS: Final = 3
"""Polls for which a yes of the pause endpoints counts, and after which an unanswered question is asked again."""


class Rest:
    """Follows what the engine says about pauses and sleep."""

    def __init__(self) -> None:
        self.by_page: str | None = None
        self.by_flags: str | None = None
        self.absent = False
        self.said: Flags | None = None
        """What the endpoints said last, for people; never judged by."""
        self._until_poll = -1
        self._asked_poll = -PAUSE_POLLS

    @property
    def state(self) -> str | None:
        """`paused` or `sleeping` when the engine says so."""
        return self.by_page or self.by_flags

    def poll(self, poll: int) -> None:
        """A poll begins: an old yes may have expired."""
        if self.by_flags is not None and poll > self._until_poll:
            self.by_flags = None

    def ask(self, poll: int) -> bool:
        """Whether to ask the endpoints now; if so, it counts as asked."""
        if self.absent or poll < self._asked_poll + PAUSE_POLLS:
            return False
        self._asked_poll = poll
        return True

    def told(self, flags: Flags, poll: int, *, version_known: bool) -> None:
        """The endpoints were asked."""
        self.said = flags
        self._asked_poll = poll - PAUSE_POLLS  # answered: the next poll may ask again
        if flags is Flags.ABSENT:
            self.absent = version_known
        elif flags is Flags.CLEAR:
            self.by_flags = None
        elif flags is not Flags.SILENT:
            self.by_flags = flags.value
            self._until_poll = poll + PAUSE_POLLS - 1
