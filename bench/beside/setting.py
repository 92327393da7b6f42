"""The thresholds that every program gets, and how long things are looked at."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Times in seconds.

    Attributes:
        name: as it stands above the tables.
        poll_sec: from one scrape to the next.
        stall_sec: how long a freeze must last.
        canary_sec: deadline of one canary.
        metrics_sec: deadline of one scrape.
        bound_sec: by when a freeze is to be reported.
        window_sec: how long memory and CPU time are looked at.
        load_sec: how long /healthz is asked 200 times a second.
        page_sec: how long a page of 8 MiB is read, once a second.
    """

    name: str
    poll_sec: float
    stall_sec: float
    canary_sec: float
    metrics_sec: float
    bound_sec: float
    window_sec: float
    load_sec: float
    page_sec: float

    @property
    def settle_sec(self) -> float:
        """Until a program has seen an engine alive: two polls for a difference, one for its canary."""
        return 3 * self.poll_sec + min(self.canary_sec, 1)

    @property
    def freeze_limit_sec(self) -> float:
        """How long a frozen engine is left to whoever has not seen it, before that is a `never`."""
        return 2 * self.stall_sec + self.poll_sec + self.canary_sec

    @property
    def blind_limit_sec(self) -> float:
        """The same where programs are expected to be blind: three times the stall."""
        return 3 * self.stall_sec

    @property
    def recovery_bound_sec(self) -> float:
        """Two polls."""
        return 2 * self.poll_sec

    @property
    def recovery_limit_sec(self) -> float:
        """How long a program may take to forgive, before that is a `never`."""
        return 4 * self.poll_sec + self.canary_sec

    def config(self, model: str) -> str:
        """The configuration file of every program, in the keys that all of them speak.

        The canary is named: one token of a completion. A program that asks this engine for a path of another engine's
        would fail for that reason alone.
        """
        return json.dumps(
            {
                "poll_interval_sec": self.poll_sec,
                "stall_sec": self.stall_sec,
                "metrics_timeout_sec": self.metrics_sec,
                "active_probe_enabled": True,
                "active_probe_path": "/v1/completions",
                "active_probe_method": "POST",
                "active_probe_body": json.dumps({"model": model, "prompt": "a", "max_tokens": 1, "temperature": 0}),
                "active_probe_timeout_sec": self.canary_sec,
                "warmup_sec": 0,
            }
        )


# Whole numbers: other programs may read nothing else.
FULL = Setting(
    "poll 5 s, stall 30 s, canary timeout 5 s",
    poll_sec=5,
    stall_sec=30,
    canary_sec=5,
    metrics_sec=10,
    bound_sec=36,
    window_sec=30,
    load_sec=10,
    page_sec=15,
)
QUICK = Setting(
    "poll 1 s, stall 3 s, canary timeout 1 s",
    poll_sec=1,
    stall_sec=3,
    canary_sec=1,
    metrics_sec=2,
    bound_sec=6,
    window_sec=2,
    load_sec=1,
    page_sec=3,
)
