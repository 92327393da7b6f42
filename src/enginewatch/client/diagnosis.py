"""What `enginewatch doctor` found, as data: the JSON of `-o json` and what the text is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from enginewatch.engines.profile import Role, ToldRole

Level = Literal["ok", "warning", "unknown", "critical"]
EXIT_CODES: dict[Level, int] = {"ok": 0, "warning": 1, "critical": 3, "unknown": 4}
_WORST_FIRST: tuple[Level, ...] = ("critical", "unknown", "warning", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing worth knowing. `fix` says what to change; empty where nothing has to be."""

    level: Level
    what: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class FoundPage:
    """The metrics page.

    Attributes:
        path: where it was asked for.
        asked: False where the question could not be put (name, certificate): nothing is known about the engine then.
        failure: a word of `events.ScrapeFailed`; None for a page that was read.
        detail: the failure in a short phrase.
        redirected_to: the path on which it really is.
    """

    path: str
    asked: bool
    failure: str | None
    detail: str
    status: int | None
    content_type: str
    size_bytes: int
    duration_sec: float
    redirected_to: str | None


@dataclass(frozen=True, slots=True)
class FoundCanary:
    """How one canary ended; `outcome` is a word of `events.Outcome`."""

    outcome: str
    detail: str
    duration_sec: float
    aimed: bool


@dataclass(frozen=True, slots=True)
class FoundLeg:
    """A progress leg that is on the page; `moved`: it made progress while the canary went through the engine."""

    name: str
    kind: str
    grain: str
    value: float
    moved: bool


@dataclass(frozen=True, slots=True)
class FoundCore:
    """One engine core. `canary` is the one aimed at it; None where none could be."""

    name: str
    legs: tuple[FoundLeg, ...]
    missing_legs: tuple[str, ...]
    running: float | None
    waiting: float | None
    queues: dict[str, float]
    heartbeat: bool
    canary: FoundCanary | None = None


@dataclass(frozen=True, slots=True)
class FoundIdentity:
    """What names the engine's process.

    Attributes:
        source: what a sidecar would take it from, by the page as it is now.
        started_at: RFC 3339; None where only a sidecar's first sight is known.
        engine_id: the id that every sidecar would publish; None where each makes up its own (`observed`).
        missing: the durable source that pages of this engine can have, and this one has not: of the start time that
            stays so, the anchor of a fingerprint may come yet.
    """

    source: Literal["process_start_time", "startup_fingerprint", "observed"]
    started_at: str | None
    engine_id: str | None = None
    missing: Literal["process_start_time", "startup_fingerprint"] | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        engine: kind of the profile in use; `unknown` where none fits.
        could_be: title of the engine without a profile that this seems to be.
        engine_from: what told the kind: the operator, the page, other answers of the engine's, or nothing.
        page_of: kind of the engine whose series stand on the page.
        role: the worker's role; `role_from` says what told it.
        role_told: the role that the engine says it has; None where it does not say.
        core_label: the label that names cores on this engine's page.
        can_aim: whether a sidecar can aim canaries at a core on this version.
        canary: the one that was not aimed at a core, the worst of several where there are several cores; None where
            each core got its own, or none was sent.
        unanswered: a path that answers through the engine's core, and did not.
        guarded: the path that would have told the version, and wants an API key, or another one.
        answers_of: kind of the engine that the other answers are of, where it was given and the page is nobody's.
        told_at: the path of the answer that says so.
        has_key: a file with an API key was given.
        loading: it listens, but has yet to load its model; nothing else was asked.
        pause: a word of `events.Flags`; None where it was not asked for.
        log_signatures: patterns that this engine's log is searched for by default.
        key_problem: why the API key cannot be sent; None where it can or there is none.
    """

    url: str
    engine: str
    engine_title: str
    engine_from: Literal["given", "page", "answers", "nothing"]
    page_of: str | None
    version: str | None
    model: str | None
    role: Role
    role_from: Literal["given", "engine", "default"]
    page: FoundPage
    core_label: str
    can_aim: bool
    cores: tuple[FoundCore, ...]
    canary: FoundCanary | None
    pause: str | None
    identity: FoundIdentity | None
    log_signatures: tuple[str, ...]
    key_problem: str | None
    role_told: ToldRole | None = None
    unanswered: str | None = None
    could_be: str | None = None
    guarded: str | None = None
    answers_of: str | None = None
    told_at: str | None = None
    has_key: bool = False
    loading: bool = False
    findings: tuple[Finding, ...] = ()
    level: Level = "ok"
    exit_code: int = 0


def worst(findings: tuple[Finding, ...]) -> Level:
    """The level of the whole: not to know outranks a warning, because then the question is still open."""
    levels = {finding.level for finding in findings}
    return next((level for level in _WORST_FIRST if level in levels), "ok")


def to_json(diagnosis: Diagnosis) -> bytes:
    """The diagnosis as one JSON object."""
    return msgspec.json.encode(diagnosis)
