"""The vocabulary in which an engine is described: what its page says and how to ask it.

An engine is data. One module per engine fills in a `Profile`; nothing elsewhere in the package branches on which
engine it is looking at. Facts about engines live here with their versions and sources, never in `core`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

Role = Literal["agg", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("agg", "prefill", "decode")
ToldRole = Literal["agg", "prefill", "decode", "dynamic"]
DYNAMIC: Literal["dynamic"] = "dynamic"
"""What an engine says that changes its role as it runs: no single one."""


class LegKind(StrEnum):
    """How a leg proves progress."""

    COUNTER = "counter"
    """A rise is progress; a fall is a reset of that series."""
    RISING_GAUGE = "rising-gauge"
    """Only a rise is progress; a fall is clients giving up on a corpse."""


class Grain(StrEnum):
    """When a leg moves."""

    STEP = "step"
    """During work, at least once per scheduler step that produced something."""
    REQUEST = "request"
    """Only when a request ends, so that one long request looks frozen."""


class AnswerFormat(StrEnum):
    """What a complete canary answer looks like; `core.answer` judges by it."""

    OPENAI_COMPLETION = "openai-completion"
    """OpenAI text completion, one JSON object or server-sent events ending in `[DONE]`."""
    SGLANG_GENERATE = "sglang-generate"
    """SGLang's native /generate: `{"text": ..., "meta_info": {...}}`, or the same as server-sent events."""
    ANY_2XX = "any-2xx"
    """A user's own path: any 2xx that is read to its end."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Series picked from a page by full sample name and, where needed, by label values.

    Attributes:
        names: sample names (with `_total`, `_count`...), all spellings over the versions. A name is matched whole:
            `_created`, `_bucket` and longer names that begin alike are other metrics.
        where: label -> allowed values; a series with another value is not this metric. A missing label counts as the
            empty value, as in Prometheus itself, so that only an allowed `""` lets in series without the label.
        prefixed: whether the profile's prefixes are put before the names (`vllm:` + name).
    """

    names: tuple[str, ...]
    where: Mapping[str, frozenset[str]] = field(default_factory=dict)
    prefixed: bool = True

    def full_names(self, prefixes: tuple[str, ...]) -> tuple[str, ...]:
        """The sample names as they stand on a page."""
        if not self.prefixed:
            return self.names
        return tuple(prefix + name for prefix in prefixes for name in self.names)

    def accepts(self, labels: Mapping[str, str]) -> bool:
        """Whether a series of one of the names belongs to this metric."""
        return all(labels.get(label, "") in allowed for label, allowed in self.where.items())


@dataclass(frozen=True, slots=True)
class Leg:
    """One progress signal of a core, under the public name that /verdict shows."""

    name: str
    metric: Metric
    kind: LegKind
    grain: Grain


@dataclass(frozen=True, slots=True)
class Queue:
    """A prefill/decode queue: requests that wait for the partner, not for this engine."""

    name: str
    metric: Metric


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Durations that an engine measures while it starts and sets once per process: no two processes share one.

    Attributes:
        anchor: the one that names the process, as it is spelled over the versions, best first; of a page no more than
            one series may be meant. Where each rank has its own, `where` fixes the rank: a page that has come in part
            must not make another the lowest.
        others: those that only tell a change. None that an engine sets again while it runs, or one worker of several
            after the other.
    """

    anchor: tuple[Metric, ...]
    others: tuple[Metric, ...] = ()


@dataclass(frozen=True, slots=True)
class PageFlag:
    """A gauge that tells on the page that the engine rests on purpose: the state holds when `metric` equals `value`.

    Attributes:
        counts_calls: `metric` counts calls that hold the engine and are being awaited; the state holds from `value` on.
            Such a call never comes back from a core that hung, so it is believed for a limited time (`core.rest`).
    """

    state: Literal["paused", "sleeping"]
    metric: Metric
    value: float
    counts_calls: bool = False

    def holds(self, value: float) -> bool:
        """Whether the state holds where `metric` has this value."""
        return value >= self.value if self.counts_calls else value == self.value


@dataclass(frozen=True, slots=True)
class FlagEndpoint:
    """An endpoint that tells whether the engine rests: GET `path`, JSON object, `key` true.

    404, 405 or 501 there means that this engine does not have it.

    Where the engine says it by a status instead, `status` is set and `key` is empty: the state holds when `path`
    answers with `status` while `sound_path` answers 200. When that one answers otherwise the engine has another trouble
    as well, and whether it rests cannot be told; a 200 of `path` is a no.

    Attributes:
        since: the first engine version (as a tuple of numbers) of which this is true; the same answers of an older one
            mean something else. Empty: of every version that has the endpoint. See `Profile.flags_for`.
    """

    state: Literal["paused", "sleeping"]
    path: str
    key: str = ""
    status: int | None = None
    sound_path: str = ""
    since: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Aim:
    """How a canary is aimed at one core, and since when the engine honours it.

    Exactly one of `header` and `body_field` is set; `value_for` gives the value.
    `since` is the first engine version (as a tuple of numbers) known to honour it; `source` says how we know.

    Attributes:
        from_first_core: the engine counts from the first of the server's own cores, not from rank zero.
    """

    since: tuple[int, ...]
    source: str
    header: str | None = None
    body_field: str | None = None
    from_first_core: bool = False

    def value_for(self, core: str, cores: Iterable[str]) -> int | None:
        """What to send to reach `core`, one of the page's `cores`; None where their names are not ranks."""
        if not core.isdecimal():
            return None
        if not self.from_first_core:
            return int(core)
        ranks = [int(name) for name in cores if name.isdecimal()]
        return int(core) - min(ranks, default=0)


@dataclass(frozen=True, slots=True)
class DeathNotice:
    """Where an engine says that its core is gone: GET `path` is answered with `status`.

    For an engine that answers a canary with a client error (4xx) whatever has gone wrong inside, so that a dead core
    cannot be told from a request it does not like. Asked only after such an answer; any other answer to it, or none,
    proves nothing.
    """

    path: str
    status: int


@dataclass(frozen=True, slots=True)
class CanaryRequest:
    """A request that must travel the whole engine to be answered.

    `body` is JSON; the string value `"{model}"` anywhere in it is replaced by the served model's name.
    """

    method: str
    path: str
    body: Mapping[str, Any] | None
    answer: AnswerFormat
    aim: tuple[Aim, ...] = ()
    """Newest first; `aim_for` picks."""
    raw_body: str | None = None
    """A user's body that is not a JSON object, sent as it is; `body` is None then."""
    death_notice: DeathNotice | None = None

    def aim_for(self, version: str | None) -> Aim | None:
        """How to aim at a core on this engine version; None where it is not known to honour any way."""
        numbers = version_tuple(version or "")
        return next((aim for aim in self.aim if numbers and numbers >= aim.since), None)


@dataclass(frozen=True, slots=True)
class RoleWords:
    """How an engine tells the role of a worker. Only where one of another role cannot answer the canary.

    Attributes:
        words: what its words mean.
        key: of the answers of the `version_paths`.
        label: of its series.
        agg_beside: a label that the series have on which `agg` is to be believed; the other roles are on all.
    """

    words: Mapping[str, ToldRole]
    key: str
    label: str
    agg_beside: str

    def on_series(self, series: str) -> ToldRole | None:
        """What one series in its canonical form says."""
        word = _label_of(series, self.label)
        told = self.words.get(word) if word is not None else None
        return None if told == "agg" and _label_of(series, self.agg_beside) is None else told


def _label_of(series: str, label: str) -> str | None:
    # Every poll asks this of every series, and in the canonical form a quote within a value is escaped.
    for before in "{,":
        _, found, rest = series.partition(f'{before}{label}="')
        if found:
            return rest.partition('"')[0]
    return None


@dataclass(frozen=True, slots=True)
class JsonStatistics:
    """Statistics per iteration as a JSON list of objects, which reading removes: they are read only when asked for.

    Other readers of the same list lose what we take. An empty list is no news: the engine may be idle or hung, its
    statistics may be off, or somebody else may have read them.

    Attributes:
        path: where they are, in place of the metrics page.
        counter: key of the iteration's number, which only rises in one process.
        running: key of the number of requests being worked on.
        waiting: key of the number of requests in the queue.
        waits_sec: how long the engine keeps the reader of an empty list waiting.
        batched_by: path of a page; where it exists, this list is filled only when a request ends.
        why_empty: a few words: what is the matter with a list that was always empty.
        how_to_get: one sentence: what to change then.
        cost: one sentence: what reading them costs.
    """

    path: str
    counter: str
    running: str
    waiting: str
    waits_sec: float
    batched_by: str
    why_empty: str
    how_to_get: str
    cost: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that is read."""
        return (self.counter, self.running, self.waiting)

    def series(self, key: str) -> str:
        """The name under which the value of `key` goes on, as if it had stood on a page."""
        return f"json:{key}"


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything enginewatch knows about one kind of engine."""

    kind: str
    title: str
    prefixes: tuple[str, ...]
    metrics_path: str
    legs: tuple[Leg, ...]
    core_label: str
    running: Metric
    waiting: Metric
    canaries: Mapping[Role, CanaryRequest]
    rank_titles: tuple[str, ...]
    """Beginnings of the process titles of the engine's ranks (what a drill may stop)."""
    owners: tuple[str, ...] = ()
    """What `owned_by` says in the engine's /v1/models: how it is recognised where its page does not tell."""
    deferred: Metric | None = None
    """Part of `waiting` that waits for a remote partner; not this engine's work in roles prefill and decode."""
    queues: tuple[Queue, ...] = ()
    transfers: Metric | None = None
    """Counters of successful transfers between prefill and decode; failures do not count."""
    heartbeat: Metric | None = None
    """Counters that the scheduler loop itself advances, also when idle."""
    start_time: Metric | None = None
    """Unix time at which the engine's process started: a durable identity."""
    fingerprint: Fingerprint | None = None
    """What names the process where there is no start time. No profile has both."""
    page_flags: tuple[PageFlag, ...] = ()
    flag_endpoints: tuple[FlagEndpoint, ...] = ()
    gauge_stale_sec: float = 0.0
    """How long the busy gauges may keep an old value on a healthy engine."""
    longest_step_sec: float = 0.0
    """How long one step may take on a healthy engine in which no leg moves, or in which its page gives no answer.

    A core is not declared hung before that, and neither is an engine whose page fails, unless the operator gives
    `unreach_sec`. 0 where steps are far shorter than any sensible `stall_sec`.
    """
    longest_wait_sec: float = 0.0
    """How long a canary may wait its turn behind whole requests on a healthy engine.

    Where the page tells nothing a canary is given that long, since nothing else tells a full engine from a hung one.
    0 where a new request joins those that run.
    """
    loading_status: int | None = None
    """What the metrics page answers while a process loads its model, and never otherwise.

    None where nobody listens meanwhile. A process that starts within one poll would else be an engine that has failed.
    """
    log_signatures: tuple[str, ...] = ()
    """RE2 patterns of lines that mean a dead scheduler, and nothing else."""
    version_paths: tuple[tuple[str, str], ...] = ()
    """(path, JSON key) pairs that tell the engine's version, best first.

    Asked once per process, under a deadline: where an engine answers this only through its core, the profile says so.
    """
    role_words: RoleWords | None = None
    """How the engine tells the worker's role; None where it does not, or where that changes nothing."""
    how_to_get_metrics: str = ""
    """One sentence for `doctor`: what to change when there is no page."""
    how_to_get_legs: str = ""
    """One sentence for `doctor`: what to do about a page that is there and has no legs; empty: `how_to_get_metrics`."""
    how_to_get_metrics_in_short: str = ""
    """The same in a few words, for the sentence that says why the page tells nothing."""
    why_no_legs: str = "the page has none of this engine's progress series"
    """What is the matter with a page that has no legs, in a few words."""
    json_statistics: JsonStatistics | None = None
    """Statistics that the engine has beside its page, to be read in its place where the operator asks for it."""
    reads_json_statistics: bool = False
    """Whether this is the profile of an engine whose JSON statistics are read; see `on_json_statistics`."""
    how_to_be_named: str = ""
    """One sentence: what to change where the page names no process, neither by `start_time` nor by `fingerprint`."""
    how_to_tell_a_pause: str = ""
    """One sentence for `doctor`: what to change when the engine has none of its pause endpoints."""

    def flags_for(self, version: str | None) -> tuple[FlagEndpoint, ...]:
        """The flag endpoints whose answers can be trusted on this engine version (None: not known)."""
        numbers = version_tuple(version or "")
        return tuple(flag for flag in self.flag_endpoints if numbers >= flag.since)

    def on_json_statistics(self, *, batched: bool = False) -> Profile:
        """This engine with its JSON statistics in place of its metrics page; the profile itself where it has none.

        Args:
            batched: the list is filled only when a request ends (`JsonStatistics.batched_by`).
        """
        found = self.json_statistics
        if found is None:
            return self
        counter, running, waiting = (Metric((found.series(key),), prefixed=False) for key in found.keys)
        grain = Grain.REQUEST if batched else Grain.STEP
        return replace(
            self,
            metrics_path=found.path,
            legs=(Leg("iterations", counter, LegKind.COUNTER, grain),),
            core_label="",
            running=running,
            waiting=waiting,
            deferred=None,
            queues=(),
            transfers=None,
            heartbeat=None,
            start_time=None,
            fingerprint=None,
            page_flags=(),
            # An entry is written when an iteration ends, and a list is read once: there are no old values.
            gauge_stale_sec=0.0,
            how_to_get_metrics=found.how_to_get,
            how_to_get_metrics_in_short="",
            how_to_get_legs="",
            how_to_be_named="",
            why_no_legs=found.why_empty,
            reads_json_statistics=True,
        )

    def names(self) -> frozenset[str]:
        """Full names of every sample this profile asks a page for."""
        found: set[str] = set()
        for metric in self.metrics():
            found.update(metric.full_names(self.prefixes))
        return frozenset(found)

    def metrics(self) -> tuple[Metric, ...]:
        """Every metric of the profile, in no particular order."""
        single = (self.running, self.waiting, self.deferred, self.transfers, self.heartbeat, self.start_time)
        fingerprint = self.fingerprint
        return (
            *((*fingerprint.anchor, *fingerprint.others) if fingerprint is not None else ()),
            *(leg.metric for leg in self.legs),
            *(queue.metric for queue in self.queues),
            *(flag.metric for flag in self.page_flags),
            *(metric for metric in single if metric is not None),
        )


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `0.5.10.post1` -> (0, 5, 10), `0.32.0+cpu` -> (0, 32, 0), junk -> ()."""
    match = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){0,4})", version.strip())
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()
