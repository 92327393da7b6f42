"""Simulated engines for tests: real processes on a port of their own."""

from __future__ import annotations

import contextlib
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


@pytest.fixture(scope="session")
def _kept() -> Iterator[dict[str, SimProcess]]:
    engines: dict[str, SimProcess] = {}
    yield engines
    for engine in engines.values():
        engine.close()


@pytest.fixture
def warm(_kept: dict[str, SimProcess]) -> Iterator[SimFactory]:
    """Engines that are shared by tests with the same options, healthy and without load; counters are not at zero.

    Saves most of a second per test. A test that kills or restarts processes uses `sim` instead.
    """
    used: list[tuple[str, SimProcess]] = []

    def borrow(engine: str = "vllm", **options: Any) -> SimProcess:
        key = f"{engine} {sorted(options.items())}"
        if key not in _kept:
            _kept[key] = SimProcess(engine, **options).start()
        used.append((key, _kept[key]))
        return _kept[key]

    yield borrow
    for key, engine in used:
        with contextlib.suppress(Exception):
            engine.calm()
            continue
        _kept.pop(key).close()
