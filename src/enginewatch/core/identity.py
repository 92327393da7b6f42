"""Which process is this, and was it replaced?

Two sources so far:
    - `process_start_time`: the engine's own `process_start_time_seconds`. Durable: it tells a replacement from a mere
      registry reset, and survives a restart of the sidecar.
    - `observed`: nothing on the page names the process. The sidecar mints an id and renews it when counters fall, or
      when nobody listened on two polls in a row and no counter is higher on the page that follows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Literal

REFUSED_MEANS_GONE: Final = 2
FORMER: Final = 16
"""So many replaced processes are remembered."""
STRAYS: Final = 3
"""Pages in a row after which a process that was replaced before is the engine again."""

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
        self._strays_in_a_row = 0
        self.identity: Identity | None = None

    def refused(self) -> None:
        """A poll found nobody listening."""
        self._refused_in_a_row += 1

    def is_stray(self, start_time: float | None) -> bool:
        """Whether a page that says this comes from a process that was replaced before.

        Processes do not come back. One that seems to is a second one behind the same address, and every switch between
        the two would be a replacement, with its warm-up, for ever. Only when nothing but that process has answered for
        `STRAYS` pages is it the engine again.
        """
        if start_time is None or _durable_id(start_time) not in self._former:
            self._strays_in_a_row = 0
            return False
        self._strays_in_a_row += 1
        return self._strays_in_a_row < STRAYS

    def page(self, start_time: float | None, *, fell: bool, rose: bool, now: float) -> Change:
        """Take in what one page says. `fell` and `rose`: whether any counter did, against the page before.

        Returns FIRST for the first page ever, REPLACED when another process answers now.
        """
        gone, self._refused_in_a_row = self._refused_in_a_row >= REFUSED_MEANS_GONE, 0
        known = self.identity
        if start_time is not None:
            engine_id = _durable_id(start_time)
            if known is not None and known.engine_id == engine_id:
                return Change.SAME
            # An observed identity that gets a name without a sign of a replacement is the same process.
            replaced = known is not None and (known.source == "process_start_time" or fell or (gone and not rose))
            self._set(engine_id, "process_start_time", start_time, now, replaced=replaced)
        else:
            replaced = known is not None and (fell or (gone and not rose))
            if known is not None and not replaced:
                return Change.SAME
            self._minted += 1
            self._set(f"obs-{self._watcher_started_ms}-{self._minted}", "observed", None, now, replaced=replaced)
        if replaced:
            return Change.REPLACED
        return Change.FIRST if known is None else Change.SAME

    def _set(
        self, engine_id: str, source: Source, started_at_unix: float | None, now: float, *, replaced: bool
    ) -> None:
        restarts = self.identity.restarts if self.identity is not None else 0
        if replaced and self.identity is not None:
            self._former.append(self.identity.engine_id)
        self.identity = Identity(engine_id, source, started_at_unix, now, restarts + replaced)


def _durable_id(start_time: float) -> str:
    return f"pst-{start_time:.2f}"
