"""Simulated engines for tests: real processes on a port of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from enginewatch.lab.sim.process import SimProcess

SimFactory = Callable[..., SimProcess]


@pytest.fixture
def sim() -> Iterator[SimFactory]:
    """Start simulated engines, `sim("vllm", dp=2, step_ms=5)`; all their processes end with the test."""
    started: list[SimProcess] = []

    def start(engine: str = "vllm", **options: Any) -> SimProcess:
        process = SimProcess(engine, **options)
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.close()
