"""Which process is this, and was it replaced?

Three sources:
    - `process_start_time`: the engine's own `process_start_time_seconds`. Durable: it tells a replacement from a mere
      registry reset, and survives a restart of the sidecar.
    - `startup_fingerprint`: how long the start took, of an engine that tells that and no start time (`fingerprint.py`).
      Durable as well, once the anchor is on the page.
    - `observed`: nothing on the page names the process. The sidecar mints an id and renews it when counters fall, or
      when nobody listened on two polls in a row and no counter is higher on the page that follows. On the sidecar's own
      host counters do not matter then: nothing stands between that could have refused, and where a process left its
      values behind, the next one's page begins higher than the last one that was read.

A durable id is made of what one page says and of nothing else. So it cannot change while that value stands, and a
sidecar that has just started makes the same of it. A page that does not name the process changes no durable id by
itself: the last one stands, until the page has named none for `PATIENCE_SEC` although a replacement shows.

A name that is another one on page after page, with no failed scrape in which an engine could have loaded, is not
believed: every page would be a replacement, with its warm-up, for ever, and hide any hang. Then identity is observed.
Counters that fall on page after page are not believed for the same reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Literal

from enginewatch.core.fingerprint import NO_DURATIONS, Durations, ProcessDurations

REFUSED_MEANS_GONE: Final = 2
FORMER: Final = 16
"""So many replaced processes are remembered."""
STRAYS: Final = 3
"""Pages in a row after which a process that was replaced before is the engine again. Twice as many each next time."""
MOST_STRAYS: Final = 24
"""But no more: it takes so long until a process that alone is left is judged."""
SHORTEST_LOAD_SEC: Final = 15.0
"""No engine starts, loads a model and answers in less; so two replacements that are less apart are not two."""
HASTY: Final = FORMER + 1
"""Hasty replacements in a row after which names are not believed: up to `FORMER` engines that answer in turn are told
apart by theirs. So many in a row, with no failed scrape between, are believed of counters that fall."""
STEADY: Final = 5
"""Pages in a row with the same name after which it is believed again."""
PATIENCE_SEC: Final = 60.0
"""So long may good pages name no process that they are expected to name, before an id is minted for it."""

Source = Literal["process_start_time", "startup_fingerprint", "observed"]


@dataclass(frozen=True, slots=True)
class Identity:
    """The engine process behind the address.

    Attributes:
        engine_id: `pst-<unix seconds, two decimals>`, `sfp-<12 hex digits>` or `obs-<watcher start in ms>-<n>`.
        source: what the id is taken from.
        started_at_unix: the process's own start as unix time, None where only the sidecar's first sight is known.
        first_seen: when the sidecar first saw the process, on the caller's monotonic clock.
        restarts: replacements this sidecar has seen.
    """

    engine_id: str
    source: Source
    started_at_unix: float | None
    first_seen: float
    restarts: int

    @property
    def is_durable(self) -> bool:
        """Whether another sidecar would make the same id for the same process."""
        return self.source != "observed"


class Change(Enum):
    """What a page says about the process."""

    FIRST = auto()
    SAME = auto()
    REPLACED = auto()


@dataclass(frozen=True, slots=True)
class _Former:
    """A process that was replaced. `engine_id` is empty where it was replaced before it was named."""

    engine_id: str
    durations: Mapping[str, float]

    def showed(self, values: Mapping[str, float], anchors: tuple[str, ...]) -> bool:
        """Whether these are this process's durations: its anchor, or where the page has none, nothing else."""
        decisive = [key for key in anchors if key in values] or values
        return all(self.durations.get(key) == values[key] for key in decisive)


class IdentityTracker:
    """Follows the identity over the pages of one engine.

    Args:
        watcher_started_ms: unix time in milliseconds, part of `observed` identities.
        is_loopback: the engine is on the sidecar's own host.
    """

    def __init__(self, watcher_started_ms: int, *, is_loopback: bool = False) -> None:
        self._is_loopback = is_loopback
        self._watcher_started_ms = watcher_started_ms
        self._minted = 0
        self._refused_in_a_row = 0
        self._former: deque[_Former] = deque(maxlen=FORMER)
        self._stray: _Former | None = None
        self._strays_in_a_row = 0
        self._strays_needed = STRAYS
        self._replaced_at = float("-inf")
        self._hasty_in_a_row = 0
        self._falls_in_a_row = 0
        self._last_name: float | None = None
        self._steady_pages = 0
        self._met_at: float | None = None
        self._durations = ProcessDurations()
        self._settled: Durations | None = None
        self._awaits_name = False
        self._suspects = False
        self._unnamed_since: float | None = None
        self.names_process = False
        """Whether the last page showed by its name, or a duration, that the known process answers."""
        self.believes_names = True
        self.believes_falls = True
        """Whether counters that fall would be a replacement, where nothing else tells."""
        self.restarts = 0
        """Replacements seen so far, also before the process was identified."""
        self.identity: Identity | None = None

    @property
    def has_met_process(self) -> bool:
        """Whether there was a page of any process, identified or not."""
        return self._met_at is not None

    @property
    def suspects_replacement(self) -> bool:
        """Whether another process may answer than the one whose id stands, and no page has told yet."""
        return self._suspects

    def refused(self) -> None:
        """A poll found nobody listening."""
        self._refused_in_a_row += 1

    def interrupted(self) -> None:
        """A poll failed: meanwhile another engine may have loaded, however quickly."""
        self._hasty_in_a_row = self._falls_in_a_row = 0
        self._unnamed_since = None

    def is_stray(self, start_time: float | None, durations: Durations = NO_DURATIONS) -> bool:
        """Whether a page that says this comes from a process that was replaced before.

        Processes do not come back. One that seems to is a second one behind the same address, and every switch between
        the two would be a replacement, with its warm-up, for ever. Only when nothing but that process has answered for
        `STRAYS` pages is it the engine again, and for more each time: of two that are asked at random each answers
        three times in a row every minute or so.
        """
        if not self._former or (start_time is None and durations is self._settled):
            self._stray, self._strays_in_a_row = None, 0
            return False
        former = self._former_on(start_time, durations) if self.believes_names else None
        if former is None:
            self._stray, self._strays_in_a_row = None, 0
            return False
        if former is not self._stray:  # with several engines in turn, each stray is another one's
            self._stray, self._strays_in_a_row = former, 0
        self._strays_in_a_row += 1
        if self._strays_in_a_row < self._strays_needed:
            return True
        self._strays_needed = min(2 * self._strays_needed, MOST_STRAYS)
        self._durations.forget(left_only=True)  # what it shows is its own
        return False

    def _former_on(self, start_time: float | None, durations: Durations) -> _Former | None:
        published = self.identity.engine_id if self.identity is not None else None
        if start_time is not None:
            name = _start_time_id(start_time)
            return next((each for each in self._former if each.engine_id == name != published), None)
        values = durations.values
        if not values or durations.several or self._durations.agrees(values):
            return None
        if not self._durations.contradicts(values):
            return None  # this process may not have set them yet, and these are what the one before left behind
        return next((each for each in self._former if each.showed(values, durations.anchors)), None)

    def page(
        self,
        start_time: float | None,
        *,
        fell: bool,
        rose: bool,
        now: float,
        durations: Durations = NO_DURATIONS,
        awaits_durations: bool = False,
        told_elsewhere: bool = False,
    ) -> Change:
        """Take in what one page says.

        Args:
            start_time: of the process, in unix seconds.
            fell: whether any counter fell against the page before.
            rose: whether any rose.
            now: the caller's monotonic seconds.
            durations: how long the start took.
            awaits_durations: the engine is of a kind whose pages tell that sooner or later, or of no known kind yet:
                nothing is minted for a process before `PATIENCE_SEC` of pages that do not.
            told_elsewhere: something beside the page says that another process answers it. A durable id is the page's
                to tell all the same, and stands until a page tells another.

        Returns:
            FIRST for the first page ever, REPLACED when another process answers now.
        """
        gone, self._refused_in_a_row = self._refused_in_a_row >= REFUSED_MEANS_GONE, 0
        if not told_elsewhere and self._says_the_same(start_time, durations):
            return Change.SAME
        first = self._met_at is None
        self._met_at = now if self._met_at is None else self._met_at
        values = durations.values
        if durations.several:
            values = self._durations.settle(durations, [each.durations for each in self._former])
        self._note_name(start_time if start_time is not None else _anchor_on(values, durations.anchors))
        another = self.believes_names and self._is_another(start_time, values) and self._is_believed(now)
        if not self.believes_names:
            start_time, values = None, {}
            self._durations.forget()
        agrees = self._durations.agrees(values)
        self.names_process = agrees or start_time is not None
        # Counters and refusals alone decide where nothing tells the process: elsewhere registries are reset.
        blank = self._awaits_name and start_time is None
        replaced = another or (told_elsewhere and not first)
        if (fell or (gone and (self._is_loopback or not rose))) and not (first or replaced or agrees):
            if blank or not self._stands:
                replaced = self._is_fall_believed()
            else:
                self._suspects = self._suspects or start_time is None
        if self.names_process:
            self._suspects = False
        if not replaced:
            self._durations.join(values)
        elif not another and (agrees or (self._stands and self.names_process and not self._awaits_name)):
            self._count(now)  # by the page's own word it is the same process
            self._durations.join(values)
        else:
            self._leave(now)
            self._durations.begin(values)
        if self._identify(start_time, values, durations.anchors, now, renew=replaced, patient=awaits_durations):
            replaced = True
        has_news = self._suspects or self._awaits_name or not self._stands or not self._durations.agrees(values)
        self._settled = None if has_news else durations
        if replaced:
            return Change.REPLACED
        return Change.FIRST if first else Change.SAME

    def _says_the_same(self, start_time: float | None, durations: Durations) -> bool:
        """Whether the page names the process that is known, as the one before did. A short way for most pages."""
        known = self.identity
        if known is None or self._awaits_name or self._suspects or not self.believes_names:
            return False
        if start_time is not None:
            same = known.started_at_unix == start_time == self._last_name and not durations.values
        else:
            same = durations is self._settled
        self.names_process = self.names_process or same
        return same

    @property
    def _stands(self) -> bool:
        """Whether the published id is one that stands until a page tells another."""
        return self.identity is not None and self.identity.is_durable and self.believes_names

    def _is_another(self, start_time: float | None, values: Mapping[str, float]) -> bool:
        """Whether the page says that another process answers than the one known."""
        known = self.identity
        if start_time is not None and known is not None and known.is_durable and not self._awaits_name:
            return known.engine_id != _start_time_id(start_time)
        return self._durations.contradicts(values)

    def _note_name(self, name: float | None) -> None:
        if name is None:
            return
        self._steady_pages = self._steady_pages + 1 if name == self._last_name else 1
        self._last_name = name
        if not self.believes_names:
            self.believes_names = self._steady_pages >= STEADY

    def _is_believed(self, now: float) -> bool:
        """Whether another process is believed, after all that were seen before."""
        hasty = now - self._replaced_at < SHORTEST_LOAD_SEC
        self._hasty_in_a_row = self._hasty_in_a_row + 1 if hasty else 0
        self._replaced_at = now
        if self._hasty_in_a_row >= HASTY:
            self.believes_names = False
            self._hasty_in_a_row = 0
        return self.believes_names

    def _is_fall_believed(self) -> bool:
        """Whether counters that fell, or a refusal, tell another process, after all that fell before.

        Here it counts that no scrape failed, and not how fast they follow one another: two engines that are asked at
        random show a fall every 20 s.
        """
        self._falls_in_a_row += 1
        self.believes_falls = self._falls_in_a_row <= HASTY
        return self.believes_falls

    def _identify(
        self,
        start_time: float | None,
        values: Mapping[str, float],
        anchors: tuple[str, ...],
        now: float,
        *,
        renew: bool,
        patient: bool,
    ) -> bool:
        """Publish the id that fits what is known now. Returns whether that is a replacement of its own."""
        known = self.identity
        source: Source = "process_start_time" if start_time is not None else "startup_fingerprint"
        name = _start_time_id(start_time) if start_time is not None else self._durations.name(anchors)
        if name is not None and not self._suspects:
            self._awaits_name, self._unnamed_since = False, None
            if known is None or known.engine_id != name:
                self._publish(name, source, start_time)
            return False
        if known is not None and known.is_durable and self.believes_names:
            # Another process answers, and does not say which: until it does, the id of the one before stands.
            self._awaits_name = self._awaits_name or renew
            expects = self._awaits_name or self._suspects
        else:
            expects = known is None and patient
            if not expects and (renew or known is None or known.is_durable):
                self._mint()
        if not expects:
            return False
        if self._durations.has_left_anchor(values, anchors):
            # The page has an anchor; its own may come late.
            self._unnamed_since = None
            return False
        if self._unnamed_since is None:
            self._unnamed_since = now
        if now - self._unnamed_since < PATIENCE_SEC:
            return False
        unseen = self._suspects and not self._awaits_name
        if unseen:
            self._leave(now)
            self._durations.forget()
        self._mint()
        return unseen

    def _count(self, now: float) -> None:
        """One more replacement."""
        self.restarts += 1
        self._met_at = now
        if self.identity is not None:
            self.identity = replace(self.identity, restarts=self.restarts)

    def _leave(self, now: float) -> None:
        """Another process answers than the one known so far."""
        known = self.identity
        named = known is not None and known.is_durable and not self._awaits_name
        self._former.append(_Former(known.engine_id if named and known is not None else "", self._durations.own))
        self._unnamed_since = None
        self._suspects = False
        self._count(now)

    def _mint(self) -> None:
        self._minted += 1
        self._awaits_name = self._suspects = False
        self._unnamed_since = None
        self._publish(f"obs-{self._watcher_started_ms}-{self._minted}", "observed", None)

    def _publish(self, engine_id: str, source: Source, started_at_unix: float | None) -> None:
        first_seen = self._met_at if self._met_at is not None else 0.0
        self.identity = Identity(engine_id, source, started_at_unix, first_seen, self.restarts)


def tell_source(identity: Identity, how_to_be_named: str) -> tuple[Literal["info", "warning"], str]:
    """The level and the sentence of the log line for an identity whose source is another one than before.

    `how_to_be_named`: what the operator can change about an observed one; empty where there is nothing.
    """
    match identity.source:
        case "process_start_time":
            return "info", "the engine's identity is its own start time"
        case "startup_fingerprint":
            return "info", "the engine's identity is the time that its weights took to load"
        case "observed":
            remedy = how_to_be_named or "Nothing makes this engine's page name its process."
            return "warning", (
                "the engine's identity is only observed: a restart of the sidecar renews it, and a replacement shows "
                f"only in counters that fall, in an outage, or in KV engine ids where they are read. {remedy}"
            )


def _start_time_id(start_time: float) -> str:
    return f"pst-{start_time:.2f}"


def _anchor_on(values: Mapping[str, float], anchors: tuple[str, ...]) -> float | None:
    return next((values[key] for key in anchors if key in values), None)
