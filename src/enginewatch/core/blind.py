"""An engine whose page tells nothing: `no-legs` and `canary-hang`.

Rules:
    - A page that never had legs, or an answer that is not a page, is so at once; a page that lost all of them only
      after `LEGLESS_PAGES` good scrapes. What is remembered of the cores counts until canaries have had the time to
      decide instead of it: a frozen engine whose legs show up now and then would never be judged
      otherwise, its cores forgotten each time and its patient canaries abandoned each time.
    - Canaries alone decide, and they are patient: a hang is not declared before stall_sec have passed since the last
      complete one, however fast the others fail. Without canaries the engine is not watched, and that is said loudly.
    - A declared hang holds: legs that come back must have moved, or a canary must be complete, to end it.
"""

from __future__ import annotations

from typing import Final

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings
from enginewatch.core.states import Finding

LEGLESS_PAGES: Final = 3
"""Good scrapes without any leg after which canaries alone decide."""


def how_long_canaries_take_sec(settings: Settings, deadline_sec: float) -> float:
    """How long they need at most to decide, with one still under way for a core when they begin."""
    canaries_sec = settings.active_probe_min_failures * deadline_sec + settings.active_probe_timeout_sec
    return canaries_sec + 2 * settings.poll_interval_sec


class Blindness:
    """Follows pages without progress legs of one process; times are on the judgement's clock."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.failures = 0
        """Failed canaries in a row since it began."""
        self._proof_at = float("-inf")
        self.why = ""
        """What is the matter with the page, in a few words."""
        self._last: Outcome | None = None
        self._last_failure: Outcome | None = None
        self._pages = 0
        self._declared = False
        """A hang was declared, and nothing has proved life since."""

    def page_without_legs(self, t: float, why: str, *, at_once: bool, patience_sec: float) -> tuple[bool, bool]:
        """One more poll without legs. Returns (it has just begun, everything remembered is to be forgotten)."""
        self._pages += 1
        self.why = why
        lost = self._pages >= LEGLESS_PAGES
        begins = self.since is None and (at_once or lost)
        if begins:
            self.since = t
            if not self._declared:
                self._proof_at = t
                self.failures, self._last = 0, None
        forget = lost and self.since is not None and t - self.since >= patience_sec
        return begins, forget

    def legs_are_back(self) -> bool:
        """A page has legs again. Returns True when that changes anything."""
        was, self.since = self.since is not None, None
        self._pages = 0
        return was

    def legs_moved(self) -> None:
        """A leg moved: whatever was declared for want of legs is over."""
        self._declared = False

    def canary_answered(self, outcome: Outcome, *, failed: bool) -> None:
        """A canary sent for want of legs ended other than ok."""
        self._last = outcome
        if failed:
            self.failures += 1
            self._last_failure = outcome

    def forget_failures(self) -> None:
        """The canaries so far were of a kind that the engine may not be able to answer."""
        self.failures, self._last = 0, None

    def proof(self, t: float, outcome: Outcome | None = None) -> None:
        """A complete canary, or the end of a pause."""
        self._proof_at = t
        self.failures, self._last = 0, outcome

    def finding(self, t: float, settings: Settings, *, canaries_on: bool) -> Finding | None:
        """The state that holds, None while there are legs to judge by."""
        if self.since is None:
            return None
        self._declared = self._is_hung(t, settings)
        if self._declared:
            return Finding("canary-hang", f"{self._failed()} and there is nothing else to judge by: {self.why}")
        if not canaries_on:
            return Finding("no-legs", f"not watched: {self.why}, and canaries are off")
        said = f" (the last one: {self._last})" if self._last is not None else ""
        return Finding("no-legs", f"{self.why}: canaries alone decide{said}")

    def held(self, t: float, settings: Settings) -> Finding | None:
        """The hang that was declared for want of legs and stands although there are some again."""
        self._declared = self._declared and self._is_hung(t, settings)
        return Finding("canary-hang", f"{self._failed()}, and nothing has moved since") if self._declared else None

    def _is_hung(self, t: float, settings: Settings) -> bool:
        enough = self.failures >= settings.active_probe_min_failures
        if not self._declared and self._last in (Outcome.MISCONFIGURED, Outcome.SATURATED):
            return False  # lost canaries, then refused ones: the next failure makes them count again
        return enough and t - self._proof_at >= settings.stall_sec

    def _failed(self) -> str:
        return f"{self.failures} canaries in a row failed ({self._last_failure})"
