"""`guard drain` as a preStop hook of a simulated engine, with the sidecar beside it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from enginewatch.guard.gauges import read_load
from enginewatch.lab.sim.process import SimProcess
from watcher import Watcher

FAST = {"poll_interval_sec": 0.5, "stall_sec": 5, "active_probe_timeout_sec": 1, "warmup_sec": 0}
PATIENCE_SEC = 60.0


class Hook:
    """A drain that runs."""

    def __init__(self, engine: str, sidecar: str = "", deadline_sec: float = 300) -> None:
        flags = ["--engine", engine, "--sidecar", sidecar, "--deadline-sec", str(deadline_sec)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "enginewatch.guard", "drain", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """What it says at its end."""
        said, _ = self.process.communicate(timeout=PATIENCE_SEC)
        assert self.process.returncode == 0
        assert said.count("\n") == 1
        return said.strip()

    @property
    def waits(self) -> bool:
        return self.process.poll() is None


def running(sim: SimProcess) -> float | None:
    with urllib.request.urlopen(f"{sim.url}/metrics", timeout=PATIENCE_SEC) as page:
        load = read_load(page.read())
    return load and load.running


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[SimProcess]:
    with SimProcess(request.param) as sim:
        sim.load(2, max_tokens=1_000_000)
        until = time.monotonic() + PATIENCE_SEC
        while running(sim) != 2:
            assert time.monotonic() < until
            time.sleep(0.1)
        yield sim


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_drain_ends_when_a_hang_is_declared_and_without_a_sidecar_it_waits(engine: SimProcess) -> None:
    with Watcher(engine.url, FAST) as sidecar:
        sidecar.wait(lambda: "moves" in sidecar.health()[1], PATIENCE_SEC, "at work")
        with Hook(engine.url, sidecar.url) as beside, Hook(engine.url) as alone:
            time.sleep(1.5)
            assert beside.waits
            assert sidecar.health()[0] == 200
            engine.stop()
            line = beside.line()
            assert line.startswith("not drained: the sidecar says that the engine hangs")
            assert sidecar.health()[0] == 503
            # With a deadline it ends there: the requests are still counted.
            with Hook(engine.url, deadline_sec=5) as limited:
                assert limited.line().startswith("not drained within 5 s: 2 running")
            assert alone.waits
            engine.cont()


@pytest.mark.parametrize("engine", ["vllm", "sglang"], indirect=True)
def test_a_drain_ends_when_the_last_request_has(engine: SimProcess) -> None:
    with Hook(engine.url) as hook:
        time.sleep(1.5)
        assert hook.waits
        engine.calm()
        assert hook.line().startswith("drained: nothing runs or waits")
