"""The sidecar's own metrics, in a registry of their own. Names and labels are public (docs/configuration.md).

What is counted is counted as it happens. What holds at a moment (the verdict, ages, the engine's identity) is read from
the board when the page is asked for, so that a core or an identity that is gone leaves no series behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from enginewatch.core.events import Outcome
from enginewatch.core.states import SUPPRESSIONS, all_names
from enginewatch.sidecar.board import Board
from enginewatch.sidecar.config import Problem
from enginewatch.sidecar.reload import Reload

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "enginewatch_"

TASKS = (
    "poll",
    "judge",
    "scrape",
    "canary",
    "recheck",
    "flags",
    "describe",
    "kv_bootstrap",
    "log",
    "config",
    "history",
    "http",
    "loop",
)
"""Values of `internal_errors_total{task}`."""
SCRAPE_OUTCOMES = ("ok", "refused", "timeout", "reset", "truncated", "malformed", "unasked")
"""Values of `scrapes_total{outcome}` besides `http_NNN`."""
_MAX_HTTP_OUTCOMES = 30

_SCRAPE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
_CANARY_BUCKETS = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts what the shell does, and renders everything as text.

    Args:
        board: what holds at the moment.
        standing_problems: what is wrong with the options that are read once.
        on_error: told about an exception that was survived while rendering.
    """

    def __init__(
        self, board: Board, on_error: Callable[[str, Exception], None], standing_problems: Sequence[Problem] = ()
    ) -> None:
        self._standing_problems = tuple(standing_problems)
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_BoardCollector(board, on_error))
        self._scrape_seconds = Histogram(
            PREFIX + "scrape_duration_seconds",
            "Time from question to last byte of a scrape.",
            buckets=_SCRAPE_BUCKETS,
            registry=registry,
        )
        self._scrapes = Counter(PREFIX + "scrapes_total", "Scrapes by outcome.", ["outcome"], registry=registry)
        self._canary_seconds = Histogram(
            PREFIX + "canary_duration_seconds",
            "Time from send to last byte, or to the failure, of a canary.",
            buckets=_CANARY_BUCKETS,
            registry=registry,
        )
        self._canaries = Counter(PREFIX + "canaries_total", "Canaries by outcome.", ["outcome"], registry=registry)
        self._transitions = Counter(
            PREFIX + "verdict_transitions_total",
            "Changes of the verdict's state; changes among everyday states are not counted.",
            ["from", "to"],
            registry=registry,
        )
        self._suppressed = Counter(
            PREFIX + "suppressed_hangs_total", "Hangs shown but not acted on.", ["why"], registry=registry
        )
        self._log_hits = Counter(PREFIX + "log_hits_total", "Log lines that match a signature.", registry=registry)
        self._reload_good = Gauge(
            PREFIX + "config_last_reload_successful",
            "1 if what was last read of the configuration could be used.",
            registry=registry,
        )
        self._reload_at = Gauge(
            PREFIX + "config_last_reload_success_timestamp_seconds",
            "When the configuration was last read and used.",
            registry=registry,
        )
        self._unknown_keys = Gauge(
            PREFIX + "config_unknown_keys", "Keys of the configuration file that nobody reads.", registry=registry
        )
        self._problems = Gauge(
            PREFIX + "config_problem",
            "1 for each key of the configuration that is rejected, unknown or repeated.",
            ["file", "key", "reason"],
            registry=registry,
        )
        self._internal_errors = Counter(
            PREFIX + "internal_errors_total", "Exceptions that were survived.", ["task"], registry=registry
        )
        self._http_outcomes: set[str] = set()
        # A series that begins at 1 has no rate for its first event, so all of them begin at 0.
        for outcome in SCRAPE_OUTCOMES:
            self._scrapes.labels(outcome)
        for canary_outcome in Outcome:
            self._canaries.labels(canary_outcome.value)
        for why in SUPPRESSIONS:
            self._suppressed.labels(why)
        for task in TASKS:
            self._internal_errors.labels(task)

    def render(self) -> bytes:
        """The page, in the Prometheus text format."""
        return generate_latest(self._registry)

    def scraped(self, outcome: str, duration_sec: float) -> None:
        """A scrape ended."""
        if outcome not in SCRAPE_OUTCOMES and outcome not in self._http_outcomes:
            if len(self._http_outcomes) >= _MAX_HTTP_OUTCOMES:
                outcome = "http_other"  # a hostile engine must not mint series without end
            self._http_outcomes.add(outcome)
        self._scrapes.labels(outcome).inc()
        self._scrape_seconds.observe(duration_sec)

    def canary_ended(self, outcome: Outcome, duration_sec: float) -> None:
        """A canary ended."""
        self._canaries.labels(outcome.value).inc()
        self._canary_seconds.observe(duration_sec)

    def state_changed(self, before: str, after: str) -> None:
        """The verdict's state changed, in a way that counts."""
        self._transitions.labels(before, after).inc()

    def hang_suppressed(self, why: str) -> None:
        """A hang was declared and not acted on."""
        self._suppressed.labels(why).inc()

    def log_hits(self, count: int) -> None:
        """Log lines matched."""
        self._log_hits.inc(count)

    def reloaded(self, reload: Reload, unix_sec: float) -> None:
        """The configuration was looked at and something was new."""
        good = not reload.rejected and not self._standing_problems
        self._reload_good.set(good)
        if good:
            self._reload_at.set(unix_sec)
        self._unknown_keys.set(reload.unknown_keys)
        self._problems.clear()
        for problem in (*self._standing_problems, *reload.rejected, *reload.notes):
            self._problems.labels(_printable(problem.where), _printable(problem.key), problem.reason).set(1)

    def internal_error(self, task: str) -> None:
        """An exception was survived."""
        self._internal_errors.labels(task).inc()


class _BoardCollector(Collector):
    """What holds at the moment at which the page is asked for."""

    def __init__(self, board: Board, on_error: Callable[[str, Exception], None]) -> None:
        self._board = board
        self._on_error = on_error

    def describe(self) -> list[Metric]:
        return []  # nothing may be asked of the judgement while the registry is being built

    def collect(self) -> Iterator[Metric]:
        board = self._board
        state = GaugeMetricFamily(PREFIX + "verdict_state", "1 for the state that holds.", labels=["state"])
        for name in dict.fromkeys((*all_names(), board.verdict.state)):
            state.add_metric([name], float(name == board.verdict.state))
        yield state
        yield _gauge("hung", "1 while a hang state holds, acted on or not.", board.verdict.hung)
        yield _gauge("acting", "1 while /healthz answers 503.", board.is_acting)
        yield _gauge("loop_age_seconds", "Time since a poll was last judged.", board.loop_age())
        yield from self._of_the_engine()
        yield from self._of_cores()

    def _of_the_engine(self) -> Iterator[Metric]:
        judge = self._board.judge
        info = GaugeMetricFamily(
            PREFIX + "engine_info",
            "Who the engine is; absent until it has been identified.",
            labels=["engine_id", "source", "kind", "role"],
        )
        restarts = 0
        if judge is not None:
            restarts = judge.restarts
            if judge.identity is not None:
                kind = judge.profile.kind if judge.profile is not None else "unknown"
                info.add_metric([judge.identity.engine_id, str(judge.identity.source), kind, judge.role], 1)
        yield info
        yield CounterMetricFamily(
            PREFIX + "engine_restarts", "Replacements of the engine's process seen so far.", value=restarts
        )

    def _of_cores(self) -> Iterator[Metric]:
        stalled = GaugeMetricFamily(
            PREFIX + "core_stalled_seconds", "Time since this core's last proof of life.", labels=["core"]
        )
        progress = GaugeMetricFamily(
            PREFIX + "last_progress_timestamp_seconds", "When a leg of this core last moved.", labels=["core"]
        )
        try:
            cores = self._board.explain()["cores"]
        except Exception as error:
            self._on_error("judge", error)
            cores = []
        now = self._board.unix(self._board.clock())
        for core in cores:
            stalled.add_metric([core["core"]], core["stalled_for_sec"])
            moved = [leg["moved_ago_sec"] for leg in core["legs"].values() if leg["moved_ago_sec"] is not None]
            if moved:
                progress.add_metric([core["core"]], round(now - min(moved), 3))
        yield stalled
        yield progress


def _gauge(name: str, help: str, value: Any) -> Metric:
    return GaugeMetricFamily(PREFIX + name, help, value=float(value))


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
