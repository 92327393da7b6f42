"""What the HTTP answers are made of: the last verdict, who the engine is, and how long ago the loop last judged.

Answers come from memory. Nothing here waits for the engine, and `/healthz` does no work that could fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from enginewatch.core.events import Event, Instruction, Verdict
from enginewatch.core.settings import Settings
from enginewatch.engines.profile import CanaryRequest, FlagEndpoint, Profile, Role
from enginewatch.sidecar.config import public_settings

MAX_REASON_CHARS = 1000


class KnownEngine(Protocol):
    """An identified engine process, as `core.identity.Identity` describes it."""

    @property
    def engine_id(self) -> str:
        """Public id."""

    @property
    def source(self) -> str:
        """What the id is taken from."""

    @property
    def started_at_unix(self) -> float | None:
        """Unix seconds; None where only the first sight is known."""

    @property
    def first_seen(self) -> float:
        """Monotonic seconds."""

    @property
    def restarts(self) -> int:
        """Replacements seen so far."""


class Judge(Protocol):
    """What the sidecar needs of the judgement; `core.verdict.Watch` is the one in use."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in one event; say what to do."""

    @property
    def verdict(self) -> Verdict:
        """The last published verdict."""

    @property
    def profile(self) -> Profile | None:
        """The engine recognised so far."""

    @property
    def version(self) -> str | None:
        """Its version, where it said so."""

    @property
    def role(self) -> Role:
        """The worker's role."""

    @property
    def canary(self) -> CanaryRequest | None:
        """The canary request as it stands."""

    @property
    def canary_role(self) -> Role:
        """The role that it is for."""

    @property
    def core_names(self) -> tuple[str, ...]:
        """The cores on its page."""

    @property
    def flag_endpoints(self) -> tuple[FlagEndpoint, ...]:
        """The pause endpoints that can be trusted on its version."""

    @property
    def identity(self) -> KnownEngine | None:
        """The process behind the address."""

    @property
    def why_unidentified(self) -> str:
        """One sentence that says why `identity` is None."""

    @property
    def restarts(self) -> int:
        """Replacements seen so far."""

    @property
    def names(self) -> frozenset[str]:
        """Sample names to ask the page for."""

    def explain(self, now: float) -> Any:
        """A dataclass with `cores`, `witnesses` and `would_flip`."""

    def story(self) -> Sequence[Any]:
        """Recent entries with `now`, `event` and `state`."""


class Board:
    """The sidecar's standing, as the HTTP answers and the metrics show it.

    Args:
        judge: the judgement; None where there is nothing to watch.
        verdict: what holds until the first judgement.
        settings: the effective hot settings.
        started_at: when the sidecar began, on the judgement's clock.
        clock: monotonic seconds, the judgement's clock.
        unix_offset: unix seconds at the clock's zero, taken once: wall-clock time that is set back must not move what
            people read.
    """

    def __init__(
        self,
        *,
        judge: Judge | None,
        verdict: Verdict,
        settings: Settings,
        started_at: float,
        clock: Callable[[], float],
        unix_offset: float,
    ) -> None:
        self.judge = judge
        self.verdict = verdict
        self.settings = settings
        self.clock = clock
        self.started_at = started_at
        self.judged_at = clock()
        self._unix_offset = unix_offset

    def unix(self, moment: float) -> float:
        """Unix seconds of a moment on the monotonic clock."""
        return moment + self._unix_offset

    def loop_age(self) -> float:
        """Seconds since a poll was last judged."""
        return max(0.0, self.clock() - self.judged_at)

    @property
    def is_stale(self) -> bool:
        """Whether the watcher itself has not judged for so long that its verdict must not kill."""
        return self.loop_age() > self.settings.stale_after_sec

    @property
    def is_acting(self) -> bool:
        """Whether /healthz is 503."""
        return self.verdict.acting and not self.is_stale

    def health(self) -> tuple[int, str]:
        """Status and body of /healthz."""
        if self.is_stale:
            return 200, "ok: watcher stale"
        verdict = self.verdict
        reason = " ".join(verdict.reason.split())[:MAX_REASON_CHARS]
        return (503, f"hung: {reason}") if verdict.acting else (200, f"ok: {reason}")

    def engine(self) -> dict[str, Any] | None:
        """Body of /engine; None until the engine has been identified."""
        identity = self.judge.identity if self.judge is not None else None
        if identity is None:
            return None
        started = identity.started_at_unix
        return {
            "engine_id": identity.engine_id,
            "started_at": rfc3339(started if started is not None else self.unix(identity.first_seen)),
            "source": str(identity.source),
            "restarts": identity.restarts,
            "watcher_started_at": rfc3339(self.unix(self.started_at)),
        }

    def why_unidentified(self) -> str:
        """The sentence in place of `engine`, while that is None."""
        return self.judge.why_unidentified if self.judge is not None else self.verdict.reason

    def explain(self) -> dict[str, Any]:
        """The judgement's explanation as plain data: `cores`, `witnesses`, `would_flip`."""
        if self.judge is None:
            return {"cores": [], "witnesses": [], "would_flip": []}
        plain = msgspec.to_builtins(self.judge.explain(self.clock()), str_keys=True)
        return {key: plain[key] for key in ("cores", "witnesses", "would_flip")}

    def verdict_body(self) -> dict[str, Any]:
        """Body of /verdict."""
        verdict = self.verdict
        reason = verdict.reason
        if self.is_stale:
            reason = f"watcher stale: nothing was judged for {self.loop_age():.0f} s; before that: {reason}"
        return {
            "state": verdict.state,
            "hung": verdict.hung,
            "acting": self.is_acting,
            "reason": reason,
            "since": rfc3339(self.unix(verdict.hung_changed_at)),
            **self.explain(),
            "settings": public_settings(self.settings),
        }


def rfc3339(unix_sec: float) -> str:
    """UTC with two decimals, `2026-10-14T02:07:21.29Z`."""
    try:
        # By way of the text, as an engine's id has it: the two must not differ by a hundredth.
        whole, hundredths = divmod(round(float(f"{unix_sec:.2f}") * 100), 100)
        moment = datetime.fromtimestamp(whole, UTC)
    except (ValueError, OverflowError, OSError):
        # An engine may claim any start time; an impossible one must not take the answer down.
        moment, hundredths = datetime.fromtimestamp(0, UTC), 0
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{hundredths:02d}Z"
