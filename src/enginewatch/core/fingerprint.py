"""The startup durations that fingerprint a process, where nothing on the page names it.

An engine measures how long its start took and sets each duration once, to the nanosecond: no two processes share one.
One of them, the anchor, names the process; the others only tell a change. What each page says is compared with what is
known of the process:

    - A value above zero in a series that had another one is another process. Zero, and absent, mean "not yet".
    - A series that joins is the same process; a series that is missing is nothing.
    - After a replacement, what the page goes on showing of the process before is nothing either: values may survive in
      files, and each of the new process's own appears when it has written it.

The anchor is one series, that of rank zero, and not of the lowest rank on the page: which rank is lowest depends on how
much of a page has come, and an id that did would be another one after a restart of the sidecar. See docs/adr/0020.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from enginewatch.core.exposition import canonical_series
from enginewatch.engines.profile import Profile

_PROCESS_LABEL: Final = "pid"
_UNSEEN: Final = float("nan")  # equals no value
_MOST_SERIES: Final = 512
"""More than any engine has, one or two per rank; a page that makes them up must not take the memory."""
_MOST_BYTES: Final = 256 * 1024
"""So much of their text, as it is held; a page that gives them long names must not take it either."""


@dataclass(frozen=True, slots=True)
class Durations:
    """What one page says.

    Attributes:
        values: key -> seconds above zero. A key is a series without its `pid` label.
        anchors: the anchor's keys seen so far on any page, best first.
        several: the keys of `values` that stand on the page more than once, with all their values.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    anchors: tuple[str, ...] = ()
    several: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


NO_DURATIONS: Final = Durations()


class DurationSeries:
    """Finds the startup durations on the pages of one engine."""

    __slots__ = (
        "_anchors",
        "_found",
        "_held_bytes",
        "_keys",
        "_last",
        "_may_give_up",
        "_others",
        "_said",
        "anchors",
        "names",
    )

    def __init__(self, profile: Profile) -> None:
        found, prefixes = profile.fingerprint, profile.prefixes
        self._anchors = [(metric.full_names(prefixes), metric) for metric in found.anchor] if found else []
        self._others = [(metric.full_names(prefixes), metric) for metric in found.others] if found else []
        self.names = frozenset(name for names, _ in (*self._anchors, *self._others) for name in names)
        """Full sample names among which they are."""
        self._keys: dict[str, str] = {}
        self._held_bytes = 0
        self._may_give_up = False
        """Once for each page that says something new: pages of names never seen before must not take the time."""
        self._last: dict[str, float | None] = {}
        self._said = NO_DURATIONS
        self._found: dict[str, int] = {}
        self.anchors: tuple[str, ...] = ()
        """Keys of the anchor seen so far, best first."""

    def __len__(self) -> int:
        return len(self._keys)

    def adopt(self, series: str, name: str, labels: Mapping[str, str]) -> Collection[str]:
        """First sight of a series that may be a startup duration; `name` is one of `names`.

        Returns:
            The series given up for it: each is at first sight again should it come back.
        """
        if series in self._keys:
            return ()
        meant = [name in names and metric.accepts(labels) for names, metric in (*self._anchors, *self._others)]
        if not any(meant):
            return ()
        key = series
        if _PROCESS_LABEL in labels:
            key = canonical_series(name, {label: text for label, text in labels.items() if label != _PROCESS_LABEL})
        size_bytes = _held_bytes(series, key)
        given_up = self._make_room(size_bytes)
        if self._lacks_room(size_bytes):
            return given_up
        self._held_bytes += size_bytes
        self._keys[series] = key
        self._last[series] = _UNSEEN
        place = meant.index(True)
        if place < len(self._anchors):
            self._found[key] = place
            self.anchors = tuple(sorted(self._found, key=lambda each: (self._found[each], each)))
        return given_up

    def _lacks_room(self, size_bytes: int) -> bool:
        return len(self._keys) >= _MOST_SERIES or self._held_bytes + size_bytes > _MOST_BYTES

    def _make_room(self, size_bytes: int) -> Collection[str]:
        """Give up, if need be, the series that the last page did not have: those of the pids of dead processes."""
        if not (self._may_give_up and self._lacks_room(size_bytes)):
            return ()
        self._may_give_up = False
        gone = [series for series, value in self._last.items() if value is None]
        for series in gone:
            self._held_bytes -= _held_bytes(series, self._keys.pop(series))
            del self._last[series]
        kept = set(self._keys.values())
        self._found = {key: place for key, place in self._found.items() if key in kept}
        return gone

    def on(self, samples: Mapping[str, float]) -> Durations:
        """What a page says: the same object again while it says the same."""
        get = samples.get
        for series, value in self._last.items():
            if get(series) != value:
                break
        else:
            return self._said
        self._last = {series: get(series) for series in self._keys}
        self._may_give_up = True
        values: dict[str, float] = {}
        several: dict[str, tuple[float, ...]] = {}
        for series, key in self._keys.items():
            value = self._last[series] or 0.0
            if value > 0:
                before = values.setdefault(key, value)
                if before != value:
                    several[key] = (*several.get(key, (before,)), value)
        self._said = Durations(values, self.anchors, several)
        return self._said


def _held_bytes(series: str, key: str) -> int:
    # One character beyond Latin-1 makes Python keep all of them in up to four bytes.
    return sum(len(text) if text.isascii() else 4 * len(text) for text in (series, key))


class ProcessDurations:
    """The startup durations known of the process that answers, and those that the one before may have left behind."""

    __slots__ = ("_anchor", "left", "own")

    def __init__(self) -> None:
        self.own: dict[str, float] = {}
        self.left: dict[str, float] = {}
        self._anchor: str | None = None

    def settle(self, page: Durations, dead: list[Mapping[str, float]]) -> Mapping[str, float]:
        """The page's values with each key once.

        Of several processes' values that stand side by side, it is the one that no process before had, and that is not
        known yet; where that is more than one, the page does not tell.
        """
        values = dict(page.values)
        for key, several in page.several.items():
            gone = {each.get(key) for each in dead} | {self.left.get(key)}
            alive = {value for value in several if value not in gone}
            new = alive - {self.own.get(key)}
            if len(new) == 1:
                values[key] = new.pop()
            elif alive and not new:
                values[key] = alive.pop()
            else:
                del values[key]
        return values

    def contradicts(self, values: Mapping[str, float]) -> bool:
        """Whether a series has another value than this process had in it."""
        own = self.own
        return any(own.get(key, value) != value for key, value in values.items())

    def agrees(self, values: Mapping[str, float]) -> bool:
        """Whether a series has the value that this process had in it."""
        own = self.own
        return any(own.get(key) == value for key, value in values.items())

    def join(self, values: Mapping[str, float]) -> None:
        """Take in a page of this process."""
        for key, value in values.items():
            if self.left.get(key) != value:
                self.own.setdefault(key, value)

    def begin(self, values: Mapping[str, float]) -> None:
        """Another process answers, with this page."""
        before = {**self.left, **self.own}
        self.own = {key: value for key, value in values.items() if before.get(key) != value}
        self.left = before
        self._anchor = None

    def forget(self, *, left_only: bool = False) -> None:
        """Forget the process; or only what the one before may have left."""
        self.left = {}
        if not left_only:
            self.own = {}
            self._anchor = None

    def name(self, anchors: tuple[str, ...]) -> str | None:
        """The id that this process' anchor gives, None while it is not known."""
        # The first that was known stays, whatever better one joins: the id must not change.
        if self._anchor is None:
            self._anchor = next((key for key in anchors if key in self.own), None)
        return fingerprint_id(self.own[self._anchor]) if self._anchor is not None else None

    def has_left_anchor(self, values: Mapping[str, float], anchors: tuple[str, ...]) -> bool:
        """Whether the page shows an anchor of the process before."""
        return any(key in values and self.left.get(key) == values[key] for key in anchors)


def fingerprint_id(anchor: float) -> str:
    """The id of the process whose weights took so many seconds to load: of the exact value, as it was read."""
    return f"sfp-{hashlib.sha256(repr(anchor).encode()).hexdigest()[:12]}"
