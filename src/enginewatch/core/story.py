"""What happened lately: the events that the judgement was given, with the state after each, in bounded memory.

The bound is on what is remembered, not on how long: pages of an engine with many cores are heavy, and their series'
names are held once however many pages carry them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from enginewatch.core.events import Event, KvBootstrapRead, Scraped

_EVENTS: Final = 400
_SAMPLES: Final = 20_000
_SAMPLE_BYTES: Final = 128
"""A series that was not on the page before weighs one sample more for each so many bytes; others are held once."""


@dataclass(frozen=True, slots=True)
class StoryEntry:
    """One event and the state after it, on the caller's clock."""

    now: float
    event: Event
    state: str


class Story:
    """The most recent events; feeding them to a new `Watch` gives the same states."""

    def __init__(self) -> None:
        self._entries: deque[StoryEntry] = deque(maxlen=_EVENTS)
        self._weights: deque[int] = deque()
        self._weight = 0

    def remember(self, entry: StoryEntry, new_name_bytes: int = 0) -> None:
        """One more event. `new_name_bytes`: bytes of series names that its page was the first to bring."""
        if len(self._entries) == _EVENTS:
            self._forget_oldest()
        weight = _weight(entry.event, new_name_bytes)
        self._entries.append(entry)
        self._weights.append(weight)
        self._weight += weight
        while self._weight > _SAMPLES and len(self._entries) > 1:
            self._forget_oldest()

    def entries(self) -> list[StoryEntry]:
        """What is remembered, oldest first."""
        return list(self._entries)

    def _forget_oldest(self) -> None:
        self._entries.popleft()
        self._weight -= self._weights.popleft()


def _weight(event: Event, new_name_bytes: int) -> int:
    if type(event) is Scraped:
        return len(event.samples) + max(0, new_name_bytes) // _SAMPLE_BYTES
    # A rank and its id are two texts, that of the id as long as a name.
    return 2 * len(event.engine_ids) if type(event) is KvBootstrapRead else 0
