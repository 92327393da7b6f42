"""An engine whose page tells nothing: `no-legs` and `canary-hang`.

Rules:
    - A page that never had legs, or an answer that is not a page, is so at once; a page that lost all of them only
      after `LEGLESS_PAGES` good scrapes, and then nothing remembered counts any more.
    - Canaries alone decide, and they are patient: a hang is not declared before stall_sec have passed since the last
      complete one, however fast the others fail. Without canaries the engine is not watched, and that is said loudly.
"""

from __future__ import annotations

from typing import Final

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings
from enginewatch.core.states import Finding

LEGLESS_PAGES: Final = 3
"""Good scrapes without any leg before everything remembered is forgotten."""


class Blindness:
    """Follows pages without progress legs; times are on the judgement's clock."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.failures = 0
        """Failed canaries in a row since it began."""
        self._proof_at = float("-inf")
        self._why = ""
        self._last: Outcome | None = None
        self._pages = 0

    def page_without_legs(self, t: float, why: str, *, at_once: bool) -> tuple[bool, bool]:
        """One more poll without legs. Returns (it has just begun, everything remembered is to be forgotten)."""
        self._pages += 1
        self._why = why
        forget = self._pages >= LEGLESS_PAGES
        begins = self.since is None and (at_once or forget)
        if begins:
            self.since = self._proof_at = t
            self.failures, self._last = 0, None
        return begins, forget

    def end(self) -> bool:
        """Legs are back, or another process is. Returns True when that changes anything."""
        was, self.since = self.since is not None, None
        self._pages = 0
        return was

    def canary_answered(self, outcome: Outcome, *, failed: bool) -> None:
        """A canary sent for want of legs ended other than ok."""
        self._last = outcome
        self.failures += failed

    def proof(self, t: float, outcome: Outcome | None = None) -> None:
        """A complete canary, or the end of a pause."""
        self._proof_at = t
        self.failures, self._last = 0, outcome

    def finding(self, t: float, settings: Settings, *, canaries_on: bool) -> Finding | None:
        """The state that holds, None while there are legs to judge by."""
        if self.since is None:
            return None
        if self.failures >= settings.active_probe_min_failures and t - self._proof_at >= settings.stall_sec:
            return Finding(
                "canary-hang",
                f"{self.failures} canaries in a row failed ({self._last}) and there is nothing else to judge by: "
                f"{self._why}",
            )
        if not canaries_on:
            return Finding("no-legs", f"not watched: {self._why}, and canaries are off")
        said = f" (the last one: {self._last})" if self._last is not None else ""
        return Finding("no-legs", f"{self._why}: canaries alone decide{said}")
