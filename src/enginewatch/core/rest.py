"""Does the engine rest on purpose? `paused`: no canary, no hang.

Rules:
    - The page's own gauges tell for as long as they stand. The pause endpoints are asked beside the loop on stalled
      polls and while resting; a yes counts for `PAUSE_POLLS` polls, a no ends it, no answer proves nothing.
    - A call that holds the engine (vLLM: a wake, a weight update) is a rest while it is awaited, for `CALL_SEC` at
      most: from a core that hung it never comes back. After that the page says nothing until the call is over, not even
      by the gauge that says asleep until the engine is awake again.
      A counter that moves on every core shows that it came back, whatever the gauge counts; a page that lacks the
      gauge says nothing about it.
    - A gauge that says asleep while counters go on rising is not believed until it has said awake.
    - A doubtful answer (SGLang: paused or not, a /health that met the pause has made the server call itself unhealthy)
      counts like a yes while the last plain answer was a yes and no counter has moved since, for `DOUBT_SEC` at most.
      It never begins a pause.
    - An engine without such endpoints is not asked again until it is replaced; but only once its version is known,
      since that decides which endpoints can be trusted.
"""

from __future__ import annotations

from typing import Final

from enginewatch.core.events import Flags

PAUSE_POLLS: Final = 3
"""Polls for which a yes of the pause endpoints counts, and after which an unanswered question is asked again."""
DOUBT_SEC: Final = 1800.0
"""How long after its last plain yes an engine is believed to rest that can only answer doubtfully since."""

CALL_SEC: Final = 1800.0
"""How long an engine is believed to rest because of a call that is awaited. Wakes and weight updates take seconds to
minutes."""
ROSE_ASLEEP: Final = 3
"""Pages with a risen counter after which a gauge that says asleep on all of them is not believed. One may be late."""


class Rest:
    """Follows what the engine says about pauses and sleep; times are on the judgement's clock."""

    def __init__(self) -> None:
        self.by_page: str | None = None
        self.call_since: float | None = None
        """Since when a call that holds the engine has been awaited."""
        self.by_flags: str | None = None
        self.absent = False
        self.said: Flags | None = None
        """What the endpoints said last, for people; never judged by."""
        self._rose_asleep = 0
        self.doubt_until: float | None = None
        """While the pause rests on a yes that cannot be repeated: until when it is believed."""
        self._told: str | None = None
        self._told_at = float("-inf")
        self._until_poll = -1
        self._asked_poll = -PAUSE_POLLS

    @property
    def state(self) -> str | None:
        """`paused` or `sleeping` when the engine says so."""
        return self.by_page or self.by_flags

    def read(
        self, resting: str | None, t: float, *, call_awaited: bool | None, rose: bool, worked_until: float
    ) -> str | None:
        """A page was read. Returns a sentence for the log when what it says is no longer believed.

        Args:
            resting: what the page says.
            t: now.
            call_awaited: whether a call that holds the engine is among it; None where the page does not tell.
            rose: a counter is higher than on the page before.
            worked_until: when a counter was last seen to rise on the core on which that is longest ago.
        """
        if call_awaited:
            self.call_since = max(t if self.call_since is None else self.call_since, worked_until)
        elif call_awaited is not None:
            self.call_since = None
        overdue = self.call_since is not None and t - self.call_since >= CALL_SEC
        if resting is None:
            self._rose_asleep = 0
        elif rose and not call_awaited and self.by_page is not None:
            self._rose_asleep += 1
        works = self._rose_asleep >= ROSE_ASLEEP and not call_awaited
        was, self.by_page = self.by_page, None if overdue or works else resting
        if was is not None and overdue:
            return f"a call that holds the engine has not come back for {CALL_SEC:g} s: judged again"
        if was is not None and works:
            return f"the page says that the engine is {resting}, and its counters rise: not believed, judged again"
        return None

    @property
    def call_until(self) -> float | None:
        """While the page says that it rests and a call that holds the engine is awaited: until when it is believed."""
        return self.call_since + CALL_SEC if self.call_since is not None and self.by_page is not None else None

    def says(self, t: float) -> str:
        """The sentence for people while it rests."""
        if self.by_page is None and self.doubt_until is not None:
            left = max(0.0, self.doubt_until - t)
            return (
                f"the engine said that it is {self.state}, and calls itself unhealthy since, which hides it: no "
                f"canary, no hang for another {left:.0f} s"
            )
        return f"the engine says it is {self.state}: no canary, no hang"

    def poll(self, poll: int) -> None:
        """A poll begins: an old yes may have expired."""
        if self.by_flags is not None and poll > self._until_poll:
            self._over()

    def ask(self, poll: int) -> bool:
        """Whether to ask the endpoints now; if so, it counts as asked."""
        if self.absent or poll < self._asked_poll + PAUSE_POLLS:
            return False
        self._asked_poll = poll
        return True

    def told(self, flags: Flags, poll: int, t: float, *, version_known: bool) -> bool:
        """The endpoints were asked. Returns True when the engine has just become unable to repeat its yes."""
        self.said = flags
        self._asked_poll = poll - PAUSE_POLLS  # answered: the next poll may ask again
        if flags is Flags.DOUBTFUL:
            return self._doubted(poll, t)
        if flags is Flags.ABSENT:
            self.absent = version_known
        elif flags is Flags.CLEAR:
            self._told = None
            self._over()
        elif flags is not Flags.SILENT:
            self.by_flags = self._told = flags.value
            self._told_at = t
            self.doubt_until = None
            self._until_poll = poll + PAUSE_POLLS - 1
        return False

    def counters_moved(self, since: float) -> None:
        """A page shows that the engine has worked after `since`, when the page before it began."""
        if since < self._told_at:
            return  # perhaps before it paused
        self._told = None
        if self.doubt_until is not None:
            self._over()

    def _doubted(self, poll: int, t: float) -> bool:
        until = self._told_at + DOUBT_SEC
        if self._told is None or t > until:
            self._told = None
            if self.doubt_until is not None:
                self._over()
            return False
        begins = self.doubt_until is None
        self.by_flags, self.doubt_until = self._told, until
        self._until_poll = poll + PAUSE_POLLS - 1
        return begins

    def _over(self) -> None:
        self.by_flags = self.doubt_until = None
