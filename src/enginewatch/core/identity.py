"""Which process is this, and was it replaced?

Two sources so far:
    - `process_start_time`: the engine's own `process_start_time_seconds`. Durable: it tells a replacement from a mere
      registry reset, and survives a restart of the sidecar.
    - `observed`: nothing on the page names the process. The sidecar mints an id and renews it when counters fall, or
      when nobody listened on two polls in a row and no counter is higher on the page that follows.

A start time that is another one on page after page, with no failed scrape in which an engine could have loaded, is not
believed: every page would be a replacement, with its warm-up, for ever, and hide any hang. Then identity is observed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Literal

REFUSED_MEANS_GONE: Final = 2
FORMER: Final = 16
"""So many replaced processes are remembered."""
STRAYS: Final = 3
"""Pages in a row after which a process that was replaced before is the engine again."""
SHORTEST_LOAD_SEC: Final = 15.0
"""No engine starts, loads a model and answers in less; so two replacements that are less apart are not two."""
HASTY: Final = FORMER + 1
"""Hasty replacements in a row after which start times are not believed: up to `FORMER` engines that answer in turn are
told apart by theirs."""
STEADY: Final = 5
"""Pages in a row with the same start time after which it is believed again."""

Source = Literal["process_start_time", "observed"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The engine process behind the address.

    Attributes:
        engine_id: `pst-<unix seconds, two decimals>` or `obs-<watcher start in ms>-<n>`.
        source: what the id is taken from.
        started_at_unix: the process's own start as unix time, None where only the sidecar's first sight is known.
        first_seen: when the sidecar first saw it, on the caller's monotonic clock.
        restarts: replacements this sidecar has seen.
    """

    engine_id: str
    source: Source
    started_at_unix: float | None
    first_seen: float
    restarts: int


class Change(Enum):
    """What a page says about the process."""

    FIRST = auto()
    SAME = auto()
    REPLACED = auto()


class IdentityTracker:
    """Follows the identity over the pages of one engine."""

    def __init__(self, watcher_started_ms: int) -> None:
        self._watcher_started_ms = watcher_started_ms
        self._minted = 0
        self._refused_in_a_row = 0
        self._former: deque[str] = deque(maxlen=FORMER)
        self._stray: float | None = None
        self._strays_in_a_row = 0
        self._replaced_at = float("-inf")
        self._hasty_in_a_row = 0
        self._last_start_time: float | None = None
        self._steady_pages = 0
        self.believes_start_times = True
        self.identity: Identity | None = None

    def refused(self) -> None:
        """A poll found nobody listening."""
        self._refused_in_a_row += 1

    def interrupted(self) -> None:
        """A poll failed: meanwhile another engine may have loaded, however quickly."""
        self._hasty_in_a_row = 0

    def is_stray(self, start_time: float | None) -> bool:
        """Whether a page that says this comes from a process that was replaced before.

        Processes do not come back. One that seems to is a second one behind the same address, and every switch between
        the two would be a replacement, with its warm-up, for ever. Only when nothing but that process has answered for
        `STRAYS` pages is it the engine again.
        """
        if start_time is None or not self.believes_start_times or _durable_id(start_time) not in self._former:
            self._stray, self._strays_in_a_row = None, 0
            return False
        if start_time != self._stray:  # with several engines in turn, each stray is another one's
            self._stray, self._strays_in_a_row = start_time, 0
        self._strays_in_a_row += 1
        return self._strays_in_a_row < STRAYS

    def page(
        self, start_time: float | None, *, fell: bool, rose: bool, now: float, told_elsewhere: bool = False
    ) -> Change:
        """Take in what one page says. `fell` and `rose`: whether any counter did, against the page before.

        `told_elsewhere`: something beside the page, the KV engine ids, says that another process answers it. An id
        taken from the page is the page's to tell all the same, and stands until a page tells another.

        Returns FIRST for the first page ever, REPLACED when another process answers now.
        """
        change = self._page(start_time, fell=fell or told_elsewhere, rose=rose, now=now)
        known = self.identity
        if not told_elsewhere or known is None or change is not Change.SAME:
            return change
        self.identity = replace(known, restarts=known.restarts + 1)
        return Change.REPLACED

    def _page(self, start_time: float | None, *, fell: bool, rose: bool, now: float) -> Change:
        gone, self._refused_in_a_row = self._refused_in_a_row >= REFUSED_MEANS_GONE, 0
        known = self.identity
        if start_time is not None and self._is_believed(start_time, now):
            engine_id = _durable_id(start_time)
            if known is not None and known.engine_id == engine_id:
                return Change.SAME
            # An observed identity that gets a name without a sign of a replacement is the same process.
            replaced = known is not None and (known.source == "process_start_time" or fell or (gone and not rose))
            self._set(engine_id, "process_start_time", start_time, now, replaced=replaced)
        else:
            replaced = known is not None and (fell or (gone and not rose))
            named = known is not None and (known.source == "observed" or self.believes_start_times)
            if named and not replaced:
                return Change.SAME
            self._minted += 1
            self._set(f"obs-{self._watcher_started_ms}-{self._minted}", "observed", None, now, replaced=replaced)
        if replaced:
            return Change.REPLACED
        return Change.FIRST if known is None else Change.SAME

    def _is_believed(self, start_time: float, now: float) -> bool:
        """Whether this page's start time names the process, after all that were seen before."""
        self._steady_pages = self._steady_pages + 1 if start_time == self._last_start_time else 1
        self._last_start_time = start_time
        if not self.believes_start_times:
            self.believes_start_times = self._steady_pages >= STEADY
            return self.believes_start_times
        known = self.identity
        if known is None or known.source == "observed" or known.engine_id == _durable_id(start_time):
            return True
        hasty = now - self._replaced_at < SHORTEST_LOAD_SEC
        self._hasty_in_a_row = self._hasty_in_a_row + 1 if hasty else 0
        self._replaced_at = now
        if self._hasty_in_a_row >= HASTY:
            self.believes_start_times = False
            self._hasty_in_a_row = 0
        return self.believes_start_times

    def _set(
        self, engine_id: str, source: Source, started_at_unix: float | None, now: float, *, replaced: bool
    ) -> None:
        restarts = self.identity.restarts if self.identity is not None else 0
        if replaced and self.identity is not None:
            self._former.append(self.identity.engine_id)
        self.identity = Identity(engine_id, source, started_at_unix, now, restarts + replaced)


def _durable_id(start_time: float) -> str:
    return f"pst-{start_time:.2f}"
