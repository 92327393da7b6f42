"""Hands single events to a judgement, for tests that assert the exact instructions or an order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginewatch.core.events import (
    CanaryDone,
    EngineDescribed,
    Flags,
    FlagsRead,
    Instruction,
    LogHits,
    Outcome,
    Publish,
    Scraped,
    ScrapeFailed,
    SettingsChanged,
    StartCanary,
    Tick,
)
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES
from enginewatch.engines.profile import Role


def vllm_page(
    tokens: float = 100.0,
    *,
    kv: float = 0.0,
    running: float = 0.0,
    waiting: float = 0.0,
    core: str | None = "0",
    start_time: float | None = 1000.0,
    **more: float,
) -> dict[str, float]:
    """One core of a vLLM page; `more` are further series by their bare name."""
    labels = '{model_name="m"}' if core is None else f'{{engine="{core}",model_name="m"}}'
    page = {
        f"vllm:generation_tokens_total{labels}": tokens,
        f"vllm:kv_cache_usage_perc{labels}": kv,
        f"vllm:num_requests_running{labels}": running,
        f"vllm:num_requests_waiting{labels}": waiting,
        **{f"vllm:{name}{labels}": value for name, value in more.items()},
    }
    if start_time is not None:
        page["process_start_time_seconds"] = start_time
    return page


class DirectWatch:
    """A `Watch` at the caller's own times; remembers the canaries it asked for."""

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        kind: str = "vllm",
        role: Role | None = "agg",
        version: str = "0.32.0",
    ) -> None:
        self.watch = Watch(
            settings or Settings(warmup_sec=0), profile=PROFILES.get(kind), role=role, log_channel=True, now=0.0
        )
        self.kind, self.version = kind, version
        self.canaries: list[StartCanary] = []
        self.published: list[Publish] = []

    @property
    def state(self) -> str:
        return self.watch.verdict.state

    @property
    def reason(self) -> str:
        return self.watch.verdict.reason

    @property
    def acting(self) -> bool:
        return self.watch.verdict.acting

    def page(
        self, t: float, samples: dict[str, float], *, begun: float | None = None, recheck: bool = False
    ) -> list[Instruction]:
        """A page read at t whose scrape began at `begun` (the same moment by default)."""
        return self._take(Scraped(t if begun is None else begun, samples, recheck), t)

    def fails(self, t: float, failure: str, *, recheck: bool = False) -> list[Instruction]:
        return self._take(ScrapeFailed(t, failure, recheck=recheck), t)

    def canary(self, t: float, outcome: Outcome, *, token: int | None = None) -> list[Instruction]:
        """The canary asked for last (or another one) ends."""
        return self._take(CanaryDone(self.canaries[-1].token if token is None else token, outcome), t)

    def tick(self, *times: float) -> list[Instruction]:
        asked: list[Instruction] = []
        for t in times:
            asked = self._take(Tick(), t)
        return asked

    def flags(self, t: float, flags: Flags) -> list[Instruction]:
        return self._take(FlagsRead(flags), t)

    def log(self, t: float, hits: int = 1) -> list[Instruction]:
        return self._take(LogHits(hits), t)

    def set(self, t: float, settings: Settings) -> list[Instruction]:
        return self._take(SettingsChanged(settings), t)

    def described(self, t: float, version: str | None = "", kind: str | None = None) -> list[Instruction]:
        return self._take(EngineDescribed(kind or self.kind, self.version if version == "" else version), t)

    def idle_until(self, first: float, last: float, samples: dict[str, float], step: float = 5.0) -> DirectWatch:
        """Pages that never change, every `step` seconds, each canary answered at once."""
        t = first
        while t <= last:
            self.page(t, samples)
            if self.canaries:
                self.canary(t + 0.1, Outcome.OK)
            t += step
        return self

    def _take(self, event: Any, t: float) -> list[Instruction]:
        asked = self.watch.handle(event, t)
        self.canaries += [instruction for instruction in asked if isinstance(instruction, StartCanary)]
        self.published += [instruction for instruction in asked if isinstance(instruction, Publish)]
        return asked


def kinds(asked: Sequence[Instruction]) -> list[str]:
    """The names of instructions, in order."""
    return [type(instruction).__name__ for instruction in asked]
