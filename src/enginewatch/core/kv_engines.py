"""The KV engine ids of a prefill engine, and whether they say that another process answers now.

vLLM's Mooncake connector runs a bootstrap server beside the engine, which tells an `engine_id` for each data-parallel
rank: a new one with each start. Rules:

1. A rank that has another id than before is a replacement. A rank that was not there before is the same process, and
   so is one that is missing, an empty answer, silence and garbage: ranks register one by one while an engine loads.
2. All ranks of an engine are replaced together, and so are its page and its ids, whichever shows first. So after a
   replacement each other rank may show a new id once without that being another one; until it has stood unchanged on
   `SETTLED` reads.
3. Ids do not come back. One that seems to is a second server behind the same address, as with `strays` on the page; it
   counts for nothing however long it answers, or each switch would be a replacement, with its warm-up, for ever.
4. Ids that are new again and again while every page was read (a server that makes them up, or one of many behind a
   balancer) are not believed after `ALONE` replacements, until a scrape fails: an engine that starts has to load first.

A change counts with the first page that was asked for after it was heard: a bootstrap server answers long before the
engine it belongs to does, and until then the previous process is the one that was published.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import Final

SETTLED: Final = 3
"""Reads with the old id after which a rank that did not change with the others is taken to have stayed."""
ALONE: Final = 3
"""Replacements in a row, with no failed scrape between, that are believed on the word of the ids alone."""
FORMER: Final = 256
"""So many ids that were replaced are remembered."""
MAX_RANKS: Final = 1024
"""So many ranks are followed: a server that makes them up must not take the memory."""


class KvNews(Enum):
    """What one answer says about the process."""

    NOTHING = auto()
    REPLACED = auto()
    RETURNED = auto()
    """A rank has an id again that it had before the last."""
    DISBELIEVED = auto()
    """A new id again, once too often to be believed."""


class KvEngines:
    """Follows the ids over the answers of one bootstrap server."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._former: deque[tuple[str, str]] = deque(maxlen=FORMER)
        self._may_follow: dict[str, int] = {}
        self._alone_in_a_row = 0
        self.heard_at: float | None = None
        """When ids were last told."""
        self.changed_at: float | None = None
        """Since when a change waits for a page to count with."""
        self.failure: str | None = None
        """Why the last read gave no ids; None = it did, or there was none yet."""

    @property
    def is_asked(self) -> bool:
        """Whether there is a bootstrap server to ask."""
        return self.heard_at is not None or self.failure is not None

    @property
    def ranks(self) -> int:
        """How many ranks have told an id so far."""
        return len(self._ids)

    def silence(self, why: str) -> None:
        """A read gave no ids. That proves nothing."""
        self.failure = why

    def hear(self, ids: Mapping[str, str], t: float) -> KvNews:
        """Take in one answer: rank -> engine id. Not empty; times are the judgement's."""
        self.failure = None
        self.heard_at = t
        news = KvNews.NOTHING
        changed: dict[str, str] = {}
        for rank, engine_id in ids.items():
            known = self._ids.get(rank)
            if known is None:
                if len(self._ids) < MAX_RANKS:
                    self._ids[rank] = engine_id
            elif engine_id == known:
                self._stood(rank)
            elif (rank, engine_id) in self._former:
                news = KvNews.RETURNED
            elif self._may_follow.pop(rank, 0):
                self._take(rank, engine_id)
            else:
                changed[rank] = engine_id
        for rank, engine_id in changed.items():
            self._take(rank, engine_id)
        if not changed:
            return news
        if self._alone_in_a_row >= ALONE:
            return KvNews.DISBELIEVED
        self._alone_in_a_row += 1
        self._let_follow(except_for=changed)
        self.changed_at = t
        return KvNews.REPLACED

    def said_before(self, asked_at: float) -> bool:
        """Whether a change waits that was heard before a page was asked for: it counts with that page."""
        return self.changed_at is not None and self.changed_at <= asked_at

    def page_taken(self, asked_at: float, *, replaced: bool, confirmed: bool = False) -> None:
        """A page was judged.

        `replaced`: another process, whatever told it; then ids that change belong to that. `confirmed`: by the page's
        own word, so that the ids were not alone in it.
        """
        if confirmed:
            self._alone_in_a_row = 0
        if replaced:
            if self.changed_at is None:
                self._let_follow()
            self.changed_at = None
        elif self.said_before(asked_at):
            self.changed_at = None

    def interrupted(self) -> None:
        """A scrape failed: meanwhile another engine may have loaded."""
        self._alone_in_a_row = 0

    def _stood(self, rank: str) -> None:
        left = self._may_follow.get(rank, 0) - 1
        if left > 0:
            self._may_follow[rank] = left
        else:
            self._may_follow.pop(rank, None)

    def _take(self, rank: str, engine_id: str) -> None:
        self._former.append((rank, self._ids[rank]))
        self._ids[rank] = engine_id

    def _let_follow(self, except_for: Collection[str] = ()) -> None:
        self._may_follow = {rank: SETTLED for rank in self._ids if rank not in except_for}
