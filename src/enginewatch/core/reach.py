"""Does the engine answer at all? `startup`, `restarting`, `unreach-grace`, `unreach-hang`, `startup-hang`.

Rules:
    - Until the first answer the engine is loading, whatever fails. A refused connection after that means that its
      process is gone and the kubelet knows: it is loading again, and an earlier hang is not shown. Without this an
      engine that crashed and reloads would be killed for ever. Whether the hang is over is for the process that answers
      next: it may be the same one. An engine that answers while it loads, and says so, is that too.
    - A scrape that the watcher could not put (`unasked`) says nothing: it begins, continues and ends no outage, and its
      time counts neither towards one nor towards loading.
    - Any other failed scrape is an outage. It is a hang when it lasts and canaries fail as well; canaries begun during
      it count for nothing else. An earlier hang stands until a page or a complete canary ends it.
    - Where no canary is usable the time alone decides, unless the server answers them at once (401...): then it is not
      stuck, whatever is wrong with /metrics, and a watcher that sees nothing of the cores must not kill.
"""

from __future__ import annotations

from typing import Final, Literal

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings
from enginewatch.core.states import HUNG, Finding

PATIENT_SEC: Final = 300.0
"""How long an outage must last at least where the engine answered 5xx (it still answers; vLLM's own watchdog and an
elastic rescale end within this), or was asleep when it began."""

Phase = Literal["startup", "restarting", "running"]


def is_an_answer(failure: str) -> bool:
    """Whether a failed scrape means `no-legs`: the engine answered, but not with a page.

    501 is such an answer, unlike the other 5xx: it says that this server has no such page (llama.cpp without
    --metrics), not that it failed.
    """
    return failure in ("malformed", "http_501") or (failure.startswith("http_") and not failure.startswith("http_5"))


def is_unasked(failure: str) -> bool:
    """Whether the watcher could not ask, so that nothing is known of the engine."""
    return failure == "unasked"


class Reach:
    """Follows whether the engine can be reached; times are on the judgement's clock."""

    def __init__(self, t: float) -> None:
        self.phase: Phase = "startup"
        self.phase_since = t
        self.failing_since: float | None = None
        """What an outage is measured from: its first failed scrape, or a complete canary since."""
        self.outage_since = t
        """Its first failed scrape; what the sentence names besides."""
        self.failing_how = ""
        self._failed_at = t
        """When the last scrape failed: the one under way may be the good one."""
        self.only_answers = False
        """The last canary of this outage was no use, but the engine's server answered it: only /metrics fails."""
        self.failures = 0
        """Canaries begun during this outage that failed."""
        self._last: Outcome | None = None
        self._is_patient = False
        self._held: Finding | None = None
        self.unasked_since: float | None = None
        """Since when the watcher cannot ask; None while it can."""
        self.unasked_why = ""
        self._says_it_loads = False
        self.longest_step_sec = 0.0
        """Of the engine's profile: its page may be without an answer for as long."""

    @property
    def down(self) -> bool:
        """Whether the last scrape found no answer, or could not be put."""
        return self.phase != "running" or self.failing_since is not None or self.unasked_since is not None

    def unasked(self, begun: float, why: str) -> None:
        """A poll's scrape could not be put."""
        self.unasked_why = why
        if self.unasked_since is None:
            self.unasked_since = begun

    def asked(self, begun: float) -> None:
        """A poll's scrape, begun then, was put: what passed while none could be counts for nothing."""
        if self.unasked_since is None:
            return
        missed = max(0.0, begun - self.unasked_since)
        self.unasked_since = None
        self.phase_since += missed
        if self.failing_since is not None:
            self.failing_since += missed
            self.outage_since += missed

    def answered(self) -> None:
        """The engine answered a scrape: whatever failed before is over."""
        self.phase = "running"
        self.failing_since = None
        self._begin_afresh()

    def failed(
        self, failure: str, begun: float, t: float, standing: Finding, *, resting: bool, loads: bool = False
    ) -> None:
        """A poll failed; `standing` is what was found before.

        `resting`: the engine's last word was that it is paused or asleep. It may be busy waking up. `loads`: it says
        that it is loading, which only a new process does.
        """
        self.failing_how, self._failed_at = failure, t
        self._says_it_loads = loads
        if failure == "refused" or loads:
            if self.phase == "running":
                self.phase, self.phase_since = "restarting", t
                self.failing_since = None
                self._held = None
            return
        if self.phase == "running":
            if self.failing_since is None:
                self.failing_since = self.outage_since = begun
                self._begin_afresh()
                self._held = standing if standing.state in HUNG else None
            self._is_patient = self._is_patient or resting or failure.startswith("http_5")

    def canary_answered(self, outcome: Outcome, t: float, *, failed: bool, answered: bool) -> None:
        """A canary begun during the outage ended other than ok. `answered`: the HTTP server is well at least."""
        self._last = outcome
        self.failures += failed
        self.only_answers = outcome is Outcome.MISCONFIGURED and answered
        if self.only_answers and self.failing_since is not None:
            # It proves nothing of the cores, so a hang that is held stays; but a server that is stuck answers nothing.
            self.failing_since = t
            self.failures = 0

    def forget_failures(self) -> None:
        """The canaries so far were of a kind that the engine may not be able to answer."""
        self.failures, self._last = 0, None

    def canary_ok(self, t: float) -> None:
        """A complete canary: the outage, or the time to load, starts afresh."""
        if self.failing_since is not None:
            self.failing_since = t
        if self.phase != "running":
            self.phase_since = t
        if self.unasked_since is not None:
            self.unasked_since = t
        self._begin_afresh()

    def _begin_afresh(self) -> None:
        self.failures, self._last = 0, None
        self._is_patient = self.only_answers = False
        self._held = None

    def limit_sec(self, settings: Settings) -> float:
        """How long this outage may last."""
        limit = settings.unreach_after_sec
        if not settings.unreach_sec:
            limit = max(limit, self.longest_step_sec)
        return max(limit, PATIENT_SEC) if self._is_patient else limit

    def lasts_too_long(self, t: float, settings: Settings) -> bool:
        """Whether this outage, whatever was answered in it, has lasted for longer than one may."""
        return self.failing_since is not None and t - self.outage_since >= self.limit_sec(settings)

    def finding(self, t: float, settings: Settings, *, canaries_on: bool) -> Finding | None:
        """The state that holds, None when the engine answers."""
        if self.phase != "running":
            return self._loading(t, settings)
        if self.failing_since is not None:
            return self._outage(max(0.0, self._failed_at - self.failing_since), settings, canaries_on=canaries_on)
        return None

    def _loading(self, t: float, settings: Settings) -> Finding:
        loading = (t if self.unasked_since is None else self.unasked_since) - self.phase_since
        what = "no page from the engine yet" if self.phase == "startup" else "nobody listens any more"
        if self.phase == "restarting" and self._says_it_loads:
            what = f"the page answers {self.failing_how.removeprefix('http_')}, which says that it loads"
        budget = settings.startup_budget_sec
        if loading > budget:
            return Finding("startup-hang", f"{what} for {loading:.0f} s, longer than the budget of {budget:g} s")
        if self.phase == "startup":
            how = f" ({self.failing_how})" if self.failing_how else ""
            return Finding("startup", f"{what}{how}: it is loading")
        return Finding("restarting", f"{what}: the engine's process is gone and is being restarted")

    def _outage(self, failing: float, settings: Settings, *, canaries_on: bool) -> Finding:
        outage = max(failing, self._failed_at - self.outage_since)
        last_sign = "answer to a canary" if self.only_answers else "complete canary"
        since_ok = f", {failing:.0f} s of them since the last {last_sign}" if outage > failing else ""
        limit = self.limit_sec(settings)
        usable = canaries_on and self._last is not Outcome.MISCONFIGURED
        if failing >= limit and (not usable or self.failures >= settings.active_probe_min_failures):
            canaries = f"{self.failures} canaries failed meanwhile" if usable else "no usable canary"
            return Finding(
                "unreach-hang",
                f"/metrics has failed for {outage:.0f} s{since_ok} (limit {limit:g} s, last: {self.failing_how}), "
                f"{canaries}",
            )
        if self._held is not None:
            return self._held
        if self.only_answers:
            return Finding(
                "unreach-grace",
                f"/metrics fails ({self.failing_how}) for {outage:.0f} s and canaries are refused, but the server "
                "answers them: not watched until one of the two is put right",
            )
        if since_ok:
            return Finding(
                "unreach-grace",
                f"/metrics fails ({self.failing_how}) for {outage:.0f} s, but canaries go through: "
                f"{failing:.0f} s of {limit:g} s since the last complete one",
            )
        return Finding("unreach-grace", f"/metrics fails ({self.failing_how}) for {failing:.0f} s of {limit:g} s")
