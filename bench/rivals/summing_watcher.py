"""A small honest watcher that adds up what every core says. The second control of bench/side_by_side.py.

    ENGINE_URL=http://127.0.0.1:8000 LISTEN=:9091 CONFIG_FILE=config.json python bench/rivals/summing_watcher.py

It works as watchers of its kind are described to work, and has their blind spots on purpose:

- every poll adds up each progress counter over all series, so that a busy core hides one that is stopped;
- a sum that fell is a restart and begins the stall anew, so that a page that loses a series now and then does too;
- the probe is sent from within the poll loop, which sleeps after its work: while probes time out, a round takes the
  timeout and the poll interval, and verdicts come that much later;
- every probe that is not answered with a 2xx is a failure, so that a missing API key reads as a hang.

It is a fair one otherwise: a prefill that fills the cache is progress, an idle engine is probed before it is judged,
and a failed probe is forgiven when a counter moved meanwhile. No log channel, no identity. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rival_server import Answer, serve

COUNTERS = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
    "sglang:generation_tokens_total",
    "sglang:prompt_tokens_total",
)
GAUGES = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
NO_PAGE = (OSError, http.client.HTTPException, ValueError)


@dataclass(frozen=True)
class Config:
    """The keys it knows; times in seconds."""

    poll_interval_sec: float = 5
    stall_sec: float = 30
    metrics_timeout_sec: float = 10
    active_probe_enabled: bool = True
    active_probe_path: str = "/health_generate"
    active_probe_method: str = "GET"
    active_probe_body: str = ""
    active_probe_timeout_sec: float = 5
    warmup_sec: float = 0

    @classmethod
    def read(cls, path: Path) -> Config:
        """From the file; keys that it does not know are somebody else's."""
        try:
            found: Mapping[str, object] = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sums:
    """What is left of a page."""

    tokens: float
    cache: float


def sums(page: str) -> Sums | None:
    """Adds up the series of a page; None if it has no counter."""
    tokens: list[float] = []
    cache = 0.0
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in COUNTERS:
            tokens.append(float(line.rpartition(" ")[2]))
        elif name in GAUGES:
            cache += float(line.rpartition(" ")[2])
    return Sums(sum(tokens), cache) if tokens else None


class Judge:
    """The judgement alone. Times are the caller's monotonic seconds."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._last: Sums | None = None
        self._first_at: float | None = None
        self._moved_at = 0.0
        self._answered_at = 0.0
        self.state = "startup"

    def page(self, found: Sums | None, now: float) -> bool:
        """Takes a page in; whether a probe is wanted now."""
        if self._first_at is None:
            self._first_at = now
        self._answered_at = now
        before, self._last = self._last, found
        if found is None:
            self.state = "no-tp"
        elif before is None:
            self.state = "baseline"
        elif found.tokens < before.tokens:
            self.state = "regress"
        elif found.tokens > before.tokens:
            self.state = "growing"
        elif found.cache > before.cache:
            self.state = "kv-growing"
        elif self._config.active_probe_enabled:
            return True
        else:
            self.state = "idle"
        self._moved_at = now
        return False

    def probed(self, ok: bool, after: Sums | None, asked_at: float, now: float) -> None:
        """Takes in how a probe ended that was asked at a moment, and the page that was read after a failure."""
        if ok:
            self.state = "stall-active-ok"
            self._moved_at = now
        elif after is not None and self._last is not None and after.tokens > self._last.tokens:
            self.state = "probe-fail-but-growing"
            self._moved_at = now
            self._last = after
        elif asked_at - self._moved_at >= self._config.stall_sec:
            self.state = self._hang("stall-hang", now)
        else:
            self.state = "probe-fail-grace"

    def unreachable(self, now: float) -> None:
        """Takes in that there was no page."""
        if self._first_at is not None and now - self._answered_at >= self._config.stall_sec:
            self.state = self._hang("unreach-hang", now)

    def answer(self) -> Answer:
        """What /healthz says."""
        return Answer(self.state.endswith("-hang") and not self.state.startswith("warmup-"), self.state)

    def _hang(self, state: str, now: float) -> str:
        assert self._first_at is not None
        return f"warmup-{state}" if now - self._first_at < self._config.warmup_sec else state


class Engine:
    """The engine as one asks it."""

    def __init__(self, url: str, config: Config) -> None:
        self._url = url.rstrip("/")
        self._config = config

    def page(self) -> Sums | None:
        """Its page.

        Raises:
            OSError: there was none in time.
        """
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=self._config.metrics_timeout_sec) as answer:
            return sums(answer.read().decode(errors="replace"))

    def probe(self) -> bool:
        """Whether a probe was answered with a 2xx."""
        config = self._config
        request = urllib.request.Request(
            self._url + config.active_probe_path,
            method=config.active_probe_method,
            data=config.active_probe_body.encode() or None,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=config.active_probe_timeout_sec) as answer:
                answer.read()
        except (OSError, http.client.HTTPException):
            return False
        return True


def one_round(judge: Judge, engine: Engine) -> None:
    """One poll, with its probe if it wants one."""
    try:
        found = engine.page()
    except NO_PAGE:
        judge.unreachable(time.monotonic())
        return
    asked_at = time.monotonic()
    if not judge.page(found, asked_at):
        return
    ok = engine.probe()
    after = None
    if not ok:
        try:
            after = engine.page()
        except NO_PAGE:
            after = None
    judge.probed(ok, after, asked_at, time.monotonic())


def main() -> None:
    config = Config.read(Path(os.environ.get("CONFIG_FILE", "/etc/hang-watcher/config.json")))
    judge = Judge(config)
    engine = Engine(os.environ["ENGINE_URL"], config)
    with serve(os.environ.get("LISTEN", ":9090")) as board:
        while True:
            one_round(judge, engine)
            board.answer = judge.answer()
            time.sleep(config.poll_interval_sec)


if __name__ == "__main__":
    main()
