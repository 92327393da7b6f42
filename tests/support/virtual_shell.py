"""A shell and an engine on virtual time: what the sidecar does around the judgement, without I/O and without waiting.

`ScriptedEngine` follows a script of changes; `VirtualShell` polls it at the settings' cadence, carries out the
instructions of the judgement and records what was published when.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from enginewatch.core.events import (
    AbandonCanary,
    CanaryDone,
    CaptureEvidence,
    DescribeEngine,
    EngineDescribed,
    Event,
    Flags,
    FlagsRead,
    Instruction,
    KvBootstrapRead,
    Log,
    LogHits,
    Outcome,
    Publish,
    ReadFlags,
    Rescrape,
    Scraped,
    ScrapeFailed,
    SettingsChanged,
    StartCanary,
    Tick,
    Verdict,
)
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES
from enginewatch.engines.profile import Role, ToldRole

SCRAPE_SEC = 0.01
ANSWERED = {Outcome.OK, Outcome.SATURATED, Outcome.MISCONFIGURED}


@dataclass
class ScriptedCore:
    """One core of a scripted engine; rates are per second."""

    tokens: float = 100.0
    kv: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    tokens_rate: float = 0.0
    kv_rate: float = 0.0
    hung: bool = False
    canary: Outcome | None = None
    """What a canary gets; None = ok, or timeout while hung."""
    canary_after: float = 0.05

    def advance(self, seconds: float) -> None:
        """Work for a while, unless hung."""
        if not self.hung:
            self.tokens += self.tokens_rate * seconds
            self.kv += self.kv_rate * seconds


class ScriptedEngine:
    """A vLLM-like engine whose behaviour is a script of `at(t, change)`."""

    kind = "vllm"

    def __init__(self, cores: int = 1, *, start_time: float | None = 1000.0, version: str = "0.32.0") -> None:
        self.cores = {str(number): ScriptedCore() for number in range(cores)}
        self.start_time = start_time
        self.version = version
        self.failure: str | None = None
        self.failure_detail = ""
        self.answers = True
        """Whether what refuses a canary is an answer of its server."""
        self.flags = Flags.ABSENT
        self.batches_statistics = False
        self.works_as: Role | None = None
        """The role without whose canary there is no answer; None = any is answered."""
        self.says_role: ToldRole | None = None
        """What it says of itself outside its page."""
        self.hide: Callable[[str], bool] = lambda series: False
        self.extra: dict[str, float] = {}
        self.log_hits = 0
        self.kv_ids: dict[str, str] | None = None
        """What its bootstrap server tells; empty = nobody listens there; None = it is not asked."""
        self.scrape_sec = SCRAPE_SEC
        self.describe_sec = SCRAPE_SEC
        self._script: list[tuple[float, int, Callable[[ScriptedEngine], Any]]] = []
        self._numbers = itertools.count()
        self._now = 0.0

    def at(self, t: float, change: Callable[[Any], Any]) -> ScriptedEngine:
        """Have `change(engine)` happen at time t."""
        heapq.heappush(self._script, (t, next(self._numbers), change))
        return self

    def busy(self, *names: str, rate: float = 50.0) -> ScriptedEngine:
        """Have cores (all of them by default) decode one request."""
        for core in self._chosen(names):
            core.running, core.tokens_rate, core.kv_rate = 1.0, rate, 0.0
        return self

    def prefill(self, *names: str) -> ScriptedEngine:
        """Have cores work on a long prompt: counters flat, KV usage rising."""
        for core in self._chosen(names):
            core.running, core.tokens_rate, core.kv_rate = 1.0, 0.0, 0.0005
        return self

    def idle(self, *names: str) -> ScriptedEngine:
        """Have cores finish what they do."""
        for core in self._chosen(names):
            core.running = core.waiting = core.tokens_rate = core.kv_rate = 0.0
        return self

    def hang(self, *names: str) -> ScriptedEngine:
        """Stop cores as SIGSTOP does: every number stays as it was, a canary gets no answer."""
        for core in self._chosen(names):
            core.hung = True
        return self

    def resume(self, *names: str) -> ScriptedEngine:
        """Let stopped cores go on."""
        for core in self._chosen(names):
            core.hung = False
        return self

    def answer(self, outcome: Outcome | None, *names: str) -> ScriptedEngine:
        """Have canaries end like this; None = as the core's own condition says."""
        for core in self._chosen(names):
            core.canary = outcome
        return self

    def fail(self, failure: str | None) -> ScriptedEngine:
        """Have scrapes fail like this; None = they succeed again."""
        self.failure = failure
        return self

    def restart(self) -> ScriptedEngine:
        """Another process answers from here on: idle, all counters zero, a new start time where there is one."""
        for name in self.cores:
            self.cores[name] = ScriptedCore(tokens=0.0)
        self.failure = None
        if self.start_time is not None:
            self.start_time = 1000.0 + self._now
        return self

    def _chosen(self, names: tuple[str, ...]) -> list[ScriptedCore]:
        return [self.cores[name] for name in names] if names else list(self.cores.values())

    def advance(self, t: float) -> None:
        """Live up to time t."""
        while self._script and self._script[0][0] <= t:
            when, _, change = heapq.heappop(self._script)
            self._live(when)
            change(self)
        self._live(t)

    def _live(self, t: float) -> None:
        for core in self.cores.values():
            core.advance(max(0.0, t - self._now))
        self._now = max(self._now, t)

    def page(self) -> dict[str, float]:
        """The samples of a page, in canonical form."""
        page = dict(self.extra)
        if self.start_time is not None:
            page["process_start_time_seconds"] = self.start_time
        for name, core in self.cores.items():
            labels = f'{{engine="{name}",model_name="m"}}'
            page[f"vllm:generation_tokens_total{labels}"] = float(int(core.tokens + 1e-6))  # however the time was cut
            page[f"vllm:kv_cache_usage_perc{labels}"] = round(core.kv, 9)
            page[f"vllm:num_requests_running{labels}"] = core.running
            page[f"vllm:num_requests_waiting{labels}"] = core.waiting
        return {series: value for series, value in page.items() if not self.hide(series)}

    def answer_canary(self, name: str | None, deadline_sec: float) -> tuple[Outcome, float]:
        """What a canary started now gets, and after how long."""
        core = self.cores[name if name is not None else next(iter(self.cores))]
        if core.canary is not None:
            outcome = core.canary
        else:
            outcome = Outcome.TIMEOUT if core.hung else Outcome.OK
        if outcome in (Outcome.TIMEOUT, Outcome.FROZEN):
            return outcome, deadline_sec
        if outcome is Outcome.OK:
            core.tokens += 1
        return outcome, core.canary_after


@dataclass
class VirtualShell:
    """Runs a Watch against a scripted engine on virtual time. `kind` "auto" leaves it to recognise the engine."""

    engine: ScriptedEngine
    settings: Settings = field(default_factory=lambda: Settings(warmup_sec=0))
    kind: str = "vllm"
    role: Role | None = "agg"
    json_statistics: bool = False

    def __post_init__(self) -> None:
        self.now = 0.0
        self.watch = Watch(
            self.settings,
            profile=PROFILES.get(self.kind),
            role=self.role,
            json_statistics=self.json_statistics,
            now=0.0,
            log_channel=True,
        )
        self.events: list[tuple[float, Event]] = []
        self.timeline: list[tuple[float, Verdict]] = []
        self.heard: list[int] = []
        """For each entry of the timeline: how many events had been handed in by then."""
        self.canaries: list[tuple[float, StartCanary]] = []
        self.results: list[tuple[float, StartCanary, Outcome]] = []
        self.abandoned: list[int] = []
        self.logs: list[Log] = []
        self.evidence: list[str] = []
        self.asked: list[tuple[float, Instruction]] = []
        self.frozen_until = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._canary: StartCanary | None = None
        self._recheck = 0
        self._later(0.0, self._poll)

    # --- what tests ask ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state now."""
        return self.watch.verdict.state

    @property
    def states(self) -> list[str]:
        """Every state published, in order, without repetitions in a row."""
        return [state for state, _ in itertools.groupby(verdict.state for _, verdict in self.timeline)]

    def first(self, state: str) -> float | None:
        """When a state was first published."""
        return next((t for t, verdict in self.timeline if verdict.state == state), None)

    def acted(self) -> list[float]:
        """The times of every published verdict that /healthz would answer with 503."""
        return [t for t, verdict in self.timeline if verdict.acting]

    @property
    def instructions(self) -> list[Instruction]:
        """Everything the judgement asked for, in order."""
        return [instruction for _, instruction in self.asked]

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self, until: float) -> VirtualShell:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= until:
            when, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, when, self.frozen_until)
            self.engine.advance(self.now)
            action()
        self.now = max(self.now, until)
        self.engine.advance(until)
        return self

    def freeze(self, seconds: float) -> None:
        """The watcher itself does not run for a while."""
        self.frozen_until = self.now + seconds

    def feed(self, event: Event) -> None:
        """Hand an event to the judgement now."""
        self.events.append((self.now, event))
        for instruction in self.watch.handle(event, self.now):
            self.asked.append((self.now, instruction))
            self._carry_out(instruction)

    def set(self, **settings: Any) -> None:
        """Change hot settings now."""
        self.feed(SettingsChanged(replace(self.watch.settings, **settings)))

    def _later(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._numbers), action))

    def _poll(self) -> None:
        began = self.now
        # Start to start, but never two polls at once.
        self._later(began + max(self.watch.settings.poll_interval_sec, self.engine.scrape_sec), self._poll)
        self.feed(Tick())
        if self.engine.log_hits:
            self.engine.log_hits, hits = 0, self.engine.log_hits
            self.feed(LogHits(hits))
        if self.engine.kv_ids is not None:
            self._later(began + SCRAPE_SEC / 2, lambda: self._read_kv_bootstrap(began))
        self._later(began + self.engine.scrape_sec, lambda: self._scrape(began, recheck=False))

    def _read_kv_bootstrap(self, began: float) -> None:
        ids = self.engine.kv_ids or {}
        self.feed(KvBootstrapRead(began, dict(ids), "" if ids else "nobody listens"))

    def _scrape(self, began: float, *, recheck: bool) -> None:
        if self.engine.failure is not None:
            self.feed(ScrapeFailed(began, self.engine.failure, self.engine.failure_detail, recheck=recheck))
        else:
            self.feed(Scraped(began, self.engine.page(), recheck=recheck))

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Publish(verdict):
                self.timeline.append((self.now, verdict))
                self.heard.append(len(self.events))
            case StartCanary():
                assert self._canary is None, "two canaries at once"
                self._canary = instruction
                self.canaries.append((self.now, instruction))
                outcome, after = Outcome.TIMEOUT, instruction.deadline_sec
                if self._can_be_answered():
                    outcome, after = self.engine.answer_canary(instruction.core, instruction.deadline_sec)
                self._later(self.now + after, lambda: self._canary_done(instruction, outcome))
            case AbandonCanary(token):
                assert self._canary is not None
                assert self._canary.token == token
                self.abandoned.append(token)
                self._canary = None
            case Rescrape(after_sec):
                self._recheck += 1
                number = self._recheck
                self._later(self.now + after_sec, lambda: self._begin_recheck(number))
            case ReadFlags():
                if self.engine.flags is Flags.SILENT:
                    self._later(self.now + 1.0, lambda: self.feed(FlagsRead(Flags.SILENT)))
                else:
                    self._later(self.now + SCRAPE_SEC, lambda: self.feed(FlagsRead(self.engine.flags)))
            case DescribeEngine():
                engine = self.engine
                described = EngineDescribed(engine.kind, engine.version, engine.batches_statistics, engine.says_role)
                self._later(self.now + engine.describe_sec, lambda: self.feed(described))
            case Log():
                self.logs.append(instruction)
            case CaptureEvidence(reason):
                self.evidence.append(reason)

    def _can_be_answered(self) -> bool:
        """Whether the request is one that the engine's own role takes: else it waits for a partner for ever."""
        works_as, asked = self.engine.works_as, self.watch.canary
        wanted = PROFILES[self.engine.kind].canaries[works_as] if works_as is not None else asked
        return asked is None or wanted is None or asked.body == wanted.body

    def _begin_recheck(self, number: int) -> None:
        if number == self._recheck:
            began = self.now
            self._later(began + self.engine.scrape_sec, lambda: self._scrape(began, recheck=True))

    def _canary_done(self, canary: StartCanary, outcome: Outcome) -> None:
        if self._canary is canary:
            self._canary = None
            self.results.append((self.now, canary, outcome))
            self.feed(CanaryDone(canary.token, outcome, answered=outcome in ANSWERED and self.engine.answers))
