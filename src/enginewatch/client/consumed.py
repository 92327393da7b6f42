"""Pages that reading empties: TensorRT-LLM's statistics at /metrics. They are not read unless somebody asks for them.

Which engine it is stands on the page, for most of them, so with ENGINE_KIND=auto the page is the first thing to be
read, and with TensorRT-LLM that would take statistics away from whoever collects them, poll after poll.

Rules, for a page on a path that some engine empties (`engines.CONSUMED_PATHS`):
    - Where the engine is not known, or is such an engine, /v1/models is asked first, once: it says whose engine it is
      and touches nothing. Any answer but that of such an engine lets the page be read from then on.
    - Without an answer within `LOOK_SEC` the page is read after all: a server that answers nothing else is still one
      that can be watched.
    - A JSON list on that path, whoever sent it, is not read again, unless the engine says that it is another one: then
      it was no statistics, but perhaps a proxy that answered for it, and to be blind for ever would be worse.
    - Instead of the page /v1/models is asked at each poll, so that an engine that is gone is still noticed.
    - Nobody listening means that another process may come: then nothing is known.
"""

from __future__ import annotations

import asyncio
from typing import Final

from enginewatch.client.exchange import Fault, Line, Question, Trouble
from enginewatch.client.models import MODELS_PATH, parse_json
from enginewatch.client.scrape import Page, ScrapeFailure, no_page, shown_content_type
from enginewatch.core.statistics import NOT_READ
from enginewatch.engines import CONSUMED_PATHS, UNKNOWN, recognise_answer
from enginewatch.engines.profile import Profile

LOOK_SEC: Final = 2.0
"""Longest wait for the engine to say who it is before its page is read."""


class ConsumedPages:
    """What is known of one engine's pages."""

    def __init__(self) -> None:
        self._is_harmless = self._is_consumed = False

    def forget(self) -> None:
        """Nobody listens: what comes next may be another engine."""
        self._is_harmless = self._is_consumed = False

    def seen(self, path: str, page: Page) -> None:
        """A page was read after all; remember what it was."""
        if path in CONSUMED_PATHS and page.is_json_list:
            self._is_consumed, self._is_harmless = True, False

    async def look_first(self, line: Line, path: str, profile: Profile | None, *, until: float) -> Page | None:
        """What to take for the page instead of reading it; None to read it."""
        if path not in CONSUMED_PATHS or self._is_harmless:
            return None
        may_be = profile is None or profile.kind == UNKNOWN.kind or profile.json_statistics is not None
        if not may_be and not self._is_consumed:
            return None
        clock = asyncio.get_running_loop().time
        began = clock()
        patience = until if self._is_consumed else min(until, began + LOOK_SEC)
        try:
            head, body = await line.fetch(Question(MODELS_PATH), until=patience)
        except Trouble as trouble:
            if trouble.fault is Fault.REFUSED or self._is_consumed:
                return no_page(trouble, duration_sec=clock() - began)
            return None
        found = recognise_answer(MODELS_PATH, parse_json(body)) if head.status == 200 else None
        statistics = found.json_statistics if found is not None else None
        if statistics is not None and statistics.path == path:
            self._is_consumed = True
        elif found is not None and found.kind != UNKNOWN.kind:
            self._is_consumed = False
        if not self._is_consumed:
            self._is_harmless = head.status < 500
            return None
        failure = ScrapeFailure("malformed", NOT_READ)
        if head.status >= 500:
            failure = ScrapeFailure(f"http_{head.status}", f"{MODELS_PATH} answered {head.status}")
        return Page(failure, clock() - began, 0, None, head.status, shown_content_type(line, head), None)
