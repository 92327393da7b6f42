"""The recent past, as JSON Lines in bounded memory.

Two shelves. The ring holds events and verdicts, newest last, and forgets the oldest by bytes, not by count. Evidence
(what explained a hang at the moment it was declared) stands beside it, so that an hour of later polls does not push it
out; the engine process it is about is gone by the time somebody asks.

Everyday states are noted once a minute at most. After a state that is not everyday has begun, everything is noted for
two minutes, then the same kind once a minute. Of a page only the samples that changed are kept, and those encoded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from enginewatch.core.events import (
    CanaryDone,
    EngineDescribed,
    Event,
    FlagsRead,
    KvBootstrapRead,
    LogChannelChanged,
    LogHits,
    Scraped,
    ScrapeFailed,
    SettingsChanged,
    Tick,
    Verdict,
)
from enginewatch.core.states import EVERYDAY
from enginewatch.sidecar.board import rfc3339
from enginewatch.sidecar.config import public_settings

RING_BYTES = 256 * 1024
ENTRY_BYTES = 16 * 1024
EVIDENCE_COUNT = 5
EVIDENCE_BYTES = 64 * 1024
QUIET_SEC = 60.0
"""Least time between two notes of the same kind while nothing changes."""
DETAIL_SEC = 120.0
"""How long everything is noted after a state that is not everyday has begun."""

_CHANGED_SERIES = 50
_STORY_ENTRIES = 80
_EVIDENCE_SAMPLES = 300
_MAX_NOTES = 64

_Entry = tuple[int, bytes]


class History:
    """Notes what happened and gives it back as JSON Lines.

    Args:
        unix: unix seconds of a moment on the monotonic clock.
    """

    def __init__(self, unix: Callable[[float], float]) -> None:
        self._unix = unix
        self._ring: deque[_Entry] = deque()
        self._ring_bytes = 0
        self._evidence: deque[_Entry] = deque(maxlen=EVIDENCE_COUNT)
        self._count = 0
        self._state = ""
        self._detail_until = float("-inf")
        self._noted: dict[str, float] = {}
        self._samples: Mapping[str, float] = {}

    def lines(self) -> bytes:
        """Everything held, oldest first, one JSON object per line."""
        entries = sorted((*self._ring, *self._evidence))
        return b"".join(line for _, line in entries)

    @property
    def size_bytes(self) -> int:
        """Bytes held."""
        return self._ring_bytes + sum(len(line) for _, line in self._evidence)

    def note_event(self, event: Event, now: float) -> None:
        """Notes an event, unless its like was noted a moment ago."""
        before = self._samples
        if isinstance(event, Scraped):
            self._samples = event.samples
        if isinstance(event, Scraped | KvBootstrapRead) and self._state in EVERYDAY:
            return
        if isinstance(event, Tick) or not self._is_due(_like(event), now, always=_is_rare(event)):
            return
        self._keep(now, _plain_event(event, before))

    def note_verdict(self, verdict: Verdict, now: float) -> None:
        """Notes a verdict, unless it is the same state's, or an everyday one, a moment after the last."""
        changed = verdict.state != self._state
        everyday = verdict.state in EVERYDAY and (self._state in EVERYDAY or not self._state)
        self._state = verdict.state
        if changed and verdict.state not in EVERYDAY:
            self._detail_until = now + DETAIL_SEC
        if self._is_due("verdict", now, always=changed and not everyday, detail=not everyday):
            self._keep(now, _plain_verdict(verdict))

    def keep_evidence(
        self, reason: str, verdict: Verdict, explanation: Mapping[str, Any], story: Sequence[Any], now: float
    ) -> None:
        """Keeps what explains a hang that was just declared."""
        body: dict[str, Any] = {
            "at": rfc3339(self._unix(now)),
            "kind": "evidence",
            "reason": reason,
            "verdict": _plain_verdict(verdict),
            "explanation": dict(explanation),
            "story": self._plain_story(story[-_STORY_ENTRIES:]),
            "samples": dict(list(self._samples.items())[:_EVIDENCE_SAMPLES]),
        }
        line = msgspec.json.encode(body)
        for least in ("samples", "story", "explanation"):
            if len(line) <= EVIDENCE_BYTES:
                break
            body[least] = f"<too large: {len(line)} bytes>"
            line = msgspec.json.encode(body)
        self._count += 1
        self._evidence.append((self._count, line + b"\n"))

    def _plain_story(self, story: Iterable[Any]) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        before: Mapping[str, float] = {}
        for number, entry in enumerate(story):
            if isinstance(entry.event, Tick):
                continue
            plain = _plain_event(entry.event, before, whole=number > 0)
            if isinstance(entry.event, Scraped):
                before = entry.event.samples
            told.append({"at": rfc3339(self._unix(entry.now)), **plain, "state": entry.state})
        return told

    def _is_due(self, like: str, now: float, *, always: bool, detail: bool = True) -> bool:
        last = self._noted.get(like)
        if not always and last is not None and now - last < QUIET_SEC and not (detail and now < self._detail_until):
            return False
        if len(self._noted) >= _MAX_NOTES:
            self._noted.clear()
        self._noted[like] = now
        return True

    def _keep(self, now: float, body: dict[str, Any]) -> None:
        at = rfc3339(self._unix(now))
        line = msgspec.json.encode({"at": at, **body}) + b"\n"
        if len(line) > ENTRY_BYTES:
            line = msgspec.json.encode({"at": at, "kind": body["kind"], "too_large_bytes": len(line)}) + b"\n"
        self._count += 1
        self._ring.append((self._count, line))
        self._ring_bytes += len(line)
        while self._ring_bytes > RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft()[1])


def _plain_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "kind": "verdict",
        "state": verdict.state,
        "hung": verdict.hung,
        "acting": verdict.acting,
        "reason": verdict.reason,
        "core": verdict.core,
    }


def _plain_event(event: Event, before: Mapping[str, float], *, whole: bool = True) -> dict[str, Any]:
    match event:
        case Scraped():
            changed = {series: value for series, value in event.samples.items() if before.get(series) != value}
            gone = [series for series in before if series not in event.samples]
            return {
                "kind": "scraped",
                "series": len(event.samples),
                "recheck": event.recheck,
                "changed": dict(list(changed.items())[:_CHANGED_SERIES]) if whole else {},
                "gone": gone[:_CHANGED_SERIES],
            }
        case ScrapeFailed():
            return {
                "kind": "scrape-failed",
                "failure": event.failure,
                "detail": event.detail,
                "recheck": event.recheck,
            }
        case CanaryDone():
            return {"kind": "canary", "outcome": event.outcome, "detail": event.detail}
        case FlagsRead():
            return {"kind": "flags", "flags": event.flags}
        case KvBootstrapRead():
            return {"kind": "kv-bootstrap", "ranks": len(event.engine_ids), "failure": event.failure}
        case LogHits():
            return {"kind": "log-hits", "count": event.count, "patterns": event.patterns}
        case LogChannelChanged():
            return {"kind": "log-channel", "problem": event.problem}
        case EngineDescribed():
            return {"kind": "described", "engine": event.kind, "version": event.version, "role": event.role}
        case SettingsChanged():
            return {"kind": "settings", "settings": public_settings(event.settings)}
        case Tick():
            return {"kind": "tick"}


def _like(event: Event) -> str:
    """What makes two events the same to somebody who reads the history."""
    match event:
        case ScrapeFailed():
            return f"scrape-failed {event.failure}"
        case CanaryDone():
            return f"canary {event.outcome}"
        case FlagsRead():
            return f"flags {event.flags}"
        case KvBootstrapRead():
            return f"kv-bootstrap {event.failure}"
        case _:
            return type(event).__name__


def _is_rare(event: Event) -> bool:
    return isinstance(event, SettingsChanged | LogChannelChanged | EngineDescribed)
