"""What the judgement is told (events) and what it asks for (instructions). All frozen, all plain data.

The shell feeds events to `Watch.handle(event, now)` in the order in which they happen and carries out the
instructions that come back. `now` and every `started_at` are seconds on one monotonic clock of the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from enginewatch.core.settings import Settings
from enginewatch.engines.profile import ToldRole


class Outcome(StrEnum):
    """How one canary ended; public (contracts: episodes, `canaries_total{outcome}`). See docs/states.md."""

    OK = "ok"
    """Complete to the last byte."""
    TIMEOUT = "timeout"
    """No byte of an answer before the deadline."""
    FROZEN = "frozen"
    """An answer began and stopped before its end."""
    REFUSED = "refused"
    """Nobody listens, or the connection broke before an answer began."""
    ERROR_ANSWER = "error_answer"
    """5xx, an error object or finish_reason error in a 200, an empty stream."""
    SATURATED = "saturated"
    """429, or a 503 that says the queue is full."""
    MISCONFIGURED = "misconfigured"
    """Any redirect, any 4xx but 429, a body that is not the engine's."""
    UNASKED = "unasked"
    """The watcher could not ask (name, certificate, its own resources): as if no canary had been sent."""


FAILURES = frozenset({Outcome.TIMEOUT, Outcome.FROZEN, Outcome.REFUSED})


class Flags(StrEnum):
    """What the engine's pause endpoints said."""

    PAUSED = "paused"
    SLEEPING = "sleeping"
    CLEAR = "clear"
    """It answered: neither."""
    ABSENT = "absent"
    """This engine has no such endpoint (404...): do not ask again until it is replaced."""
    DOUBTFUL = "doubtful"
    """It answered, but another trouble covers what would tell a pause. Keeps one that was told before, begins none."""
    SILENT = "silent"
    """No answer within a second. Proves nothing."""


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scraped:
    """A metrics page was read.

    `samples` maps each surviving series, in the canonical form of `exposition.canonical_series` (labels sorted), to
    its value; non-finite values are already dropped. Empty means: it is a metrics page, without anything we know.
    `recheck` marks the answer to a `Rescrape`, everything else is a poll.
    """

    started_at: float
    samples: Mapping[str, float]
    recheck: bool = False


@dataclass(frozen=True, slots=True)
class ScrapeFailed:
    """A scrape that gave no metrics page.

    `failure` is one of `refused`, `timeout`, `reset`, `truncated`, `malformed` (an answer that is not metrics),
    `http_NNN` (the engine answered with that status) and `unasked` (the watcher could not ask: a name, a certificate,
    its own resources). `detail` is a short phrase for people, never engine text; for `unasked` it says what to change.
    """

    started_at: float
    failure: str
    detail: str = ""
    recheck: bool = False


@dataclass(frozen=True, slots=True)
class EngineDescribed:
    """What the engine says of itself outside the metrics page (answer to `DescribeEngine`); None = it did not say.

    `batches_statistics`: its JSON statistics, where it has any, are filled only when a request ends.
    """

    kind: str | None = None
    version: str | None = None
    batches_statistics: bool = False
    role: ToldRole | None = None


@dataclass(frozen=True, slots=True)
class CanaryDone:
    """The canary started under `token` ended. `detail` is a short phrase for people, never engine text.

    `answered`: an HTTP answer with a status below 500 came, whatever it said.
    """

    token: int
    outcome: Outcome
    detail: str = ""
    answered: bool = False


@dataclass(frozen=True, slots=True)
class FlagsRead:
    """The pause endpoints were asked (answer to `ReadFlags`)."""

    flags: Flags


@dataclass(frozen=True, slots=True)
class KvBootstrapRead:
    """The engine's Mooncake bootstrap server was asked: data-parallel rank -> KV engine id.

    Empty: it told none, and `failure` says why in a short phrase for people, never the server's own text.
    """

    started_at: float
    engine_ids: Mapping[str, str]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class LogHits:
    """Lines that match a hang signature were read since the last time; `patterns` are the patterns' indices."""

    count: int
    patterns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogChannelChanged:
    """The log channel broke (`problem` says how) or works again (None)."""

    problem: str | None


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """New effective settings, judged by from now on."""

    settings: Settings


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. The shell sends one at the start of each poll; it shows that the watcher itself runs."""


Event = (
    Scraped
    | ScrapeFailed
    | EngineDescribed
    | CanaryDone
    | FlagsRead
    | KvBootstrapRead
    | LogHits
    | LogChannelChanged
    | SettingsChanged
    | Tick
)

# --- instructions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartCanary:
    """Send one canary now, beside the loop, and report `CanaryDone(token, ...)`.

    `core` is the core to aim at; None means: do not aim. `deadline_sec` is from send to last byte.
    At most one canary is under way: a `StartCanary` never comes before the last one was done or abandoned.
    """

    token: int
    core: str | None
    deadline_sec: float


@dataclass(frozen=True, slots=True)
class AbandonCanary:
    """Drop the canary under way, close its connection, report nothing."""

    token: int


@dataclass(frozen=True, slots=True)
class Rescrape:
    """Scrape beside the loop after `after_sec` (0 = at once) and report with `recheck=True`.

    One is enough: a newer Rescrape replaces one that has not begun.
    """

    after_sec: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadFlags:
    """Ask the engine's pause endpoints, beside the loop, under a deadline of one second; report `FlagsRead`."""


@dataclass(frozen=True, slots=True)
class DescribeEngine:
    """A new process answers: ask who it is (kind, version, model), beside the loop; report `EngineDescribed`."""


@dataclass(frozen=True, slots=True)
class Publish:
    """This is the verdict from now on."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class CaptureEvidence:
    """A hang was just declared: keep what explains it before the process is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Log:
    """One structured log line: `event` is the sentence, `fields` its key-value pairs."""

    level: Literal["info", "warning", "error"]
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement at one moment.

    Attributes:
        state: public state name, with `warmup-` or `shadow-` before a hang state that is not acted on.
        hung: a hang state holds, acted on or not.
        acting: it is reported: /healthz is 503.
        reason: the sentence that says why; the log line, the /healthz body and the first line of `why`.
        core: the core that decided, None for an engine-wide state.
        hung_changed_at: when `hung` last changed, on the caller's clock.
    """

    state: str
    hung: bool
    acting: bool
    reason: str
    core: str | None
    hung_changed_at: float


Instruction = StartCanary | AbandonCanary | Rescrape | ReadFlags | DescribeEngine | Publish | CaptureEvidence | Log
