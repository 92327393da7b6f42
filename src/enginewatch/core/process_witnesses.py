"""Which process answers, by all that tells it: the page (`identity.py`) and the KV engine ids (`kv_engines.py`).

What both say is put together here, and said in the log where an operator has to know; what follows from a replacement
is the verdict's.
"""

from __future__ import annotations

from typing import Final, Literal, Protocol

from enginewatch.core.events import KvBootstrapRead
from enginewatch.core.fingerprint import Durations
from enginewatch.core.identity import Change, Identity, IdentityTracker, tell_source
from enginewatch.core.kv_engines import KvEngines, KvNews
from enginewatch.core.progress import PageNews
from enginewatch.engines import UNKNOWN
from enginewatch.engines.profile import Profile

SILENT_READS: Final = 12
"""So many reads may a bootstrap server that was never heard be silent beside an engine that serves pages."""


class Say(Protocol):
    """Writes one line of the log."""

    def __call__(self, level: Literal["info", "warning", "error"], event: str, **fields: object) -> None:
        """As `events.Log`."""


class ProcessWitnesses:
    """Puts together what tells the process.

    Args:
        tracker: follows the page.
        say: writes to the log.
    """

    def __init__(self, tracker: IdentityTracker, say: Say) -> None:
        self.kv = KvEngines()
        self._tracker = tracker
        self._say = say
        self._said_kv_changes = False
        self._silent_reads = 0

    def interrupted(self) -> None:
        """A scrape failed: meanwhile another engine may have loaded."""
        self._tracker.interrupted()
        self.kv.interrupted()

    def answered(
        self, news: PageNews | None, durations: Durations, *, begun: float, now: float, profile: Profile | None
    ) -> Change:
        """The engine answered, with a page or (None) with something else.

        Args:
            news: what the page changed.
            durations: how long its start took, by the page.
            begun: when it was asked for, on the judgement's clock.
            now: the caller's monotonic seconds.
            profile: the engine's kind; None while it is not known.
        """
        tracker = self._tracker
        before, believed, falls_believed = tracker.identity, tracker.believes_names, tracker.believes_falls
        change = tracker.page(
            news.start_time if news is not None else None,
            fell=news is not None and news.fell,
            rose=news is not None and news.rose,
            now=now,
            durations=durations,
            awaits_durations=profile is None or profile.fingerprint is not None,
            told_elsewhere=news is not None and self.kv.said_before(begun),
        )
        if tracker.identity is not before:
            self._tell_source(before, profile or UNKNOWN)
        if believed and not tracker.believes_names:
            self._say(
                "error",
                "the page names another process every time and is not believed: ENGINE_URL must name one engine",
            )
        if falls_believed and not tracker.believes_falls:
            self._say(
                "error",
                "counters fall again and again, which is no replacement any more: ENGINE_URL must name one engine",
            )
        replaced = change is Change.REPLACED
        if news is not None or replaced:
            self.kv.page_taken(begun, replaced=replaced, confirmed=self._names_another(before))
        return change

    def kv_read(self, event: KvBootstrapRead, t: float) -> bool:
        """The KV bootstrap server was asked. Returns whether ids changed: that counts with the next page."""
        if not event.engine_ids:
            self._kv_silent(event.failure)
            return False
        news = self.kv.hear(event.engine_ids, t)
        if news in (KvNews.RETURNED, KvNews.DISBELIEVED) and not self._said_kv_changes:
            self._said_kv_changes = True
            self._say(
                "error",
                "the KV bootstrap server tells other engine ids again and again: IDENTITY_KV_BOOTSTRAP_URL must name "
                "that of this engine",
            )
        return news is KvNews.REPLACED

    def _kv_silent(self, why: str) -> None:
        self.kv.silence(why)
        if self.kv.heard_at is not None or not self._tracker.has_met_process:
            return
        self._silent_reads += 1
        if self._silent_reads == SILENT_READS:
            self._say(
                "warning",
                f"the KV bootstrap server has told no engine ids so far ({why}), so that no change of them shows: "
                "IDENTITY_KV_BOOTSTRAP_URL must name that of this engine",
            )

    def _names_another(self, before: Identity | None) -> bool:
        """Whether the page gives the process another name than the one it had before."""
        now = self._tracker.identity
        if before is None or now is None or not (before.is_durable and now.is_durable):
            return False
        return before.engine_id != now.engine_id

    def _tell_source(self, before: Identity | None, profile: Profile) -> None:
        now = self._tracker.identity
        if now is None or (before is not None and before.source == now.source):
            return
        level, sentence = tell_source(now, profile.how_to_be_named)
        self._say(level, sentence, source=now.source, engine_id=now.engine_id)
