"""A sidecar beside a simulated SGLang worker of a pair: a canary of another role would wait for a partner for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.sidecar.processes import FAST, Watch

from enginewatch.lab.sim.process import SimProcess


@pytest.fixture(params=["prefill", "decode"])
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[SimProcess, str]]:
    engine = SimProcess("sglang", role=request.param, step_ms=5)
    try:
        yield engine.start(), request.param
    finally:
        engine.close()


def _canaries(watch: Watch, url: str, outcome: str) -> float:
    line = f'enginewatch_canaries_total{{outcome="{outcome}"}} '
    found = [row for row in watch.get(f"{url}/metrics")[1].decode().splitlines() if row.startswith(line)]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.mark.parametrize("given", ["", "agg"])
def test_a_worker_of_a_pair_is_healthy_and_its_hang_is_seen_whatever_engine_role_says(
    worker: tuple[SimProcess, str], given: str
) -> None:
    engine, role = worker
    environ = {**FAST, "ACTIVE_PROBE_TIMEOUT_SEC": "1", "ENGINE_ROLE": given}
    with Watch("--engine-url", engine.url, environ=environ) as watch:
        url = watch.url()
        deadline = time.monotonic() + 30
        while _canaries(watch, url, "ok") < 5:
            assert watch.get(f"{url}/healthz")[0] == 200
            assert time.monotonic() < deadline, watch.get(f"{url}/verdict")
            time.sleep(0.05)
        assert f'role="{given or role}"'.encode() in watch.get(f"{url}/metrics")[1]
        engine.stop()
        assert watch.wait_for(f"{url}/healthz", b"hung: ", timeout_sec=40)[0] == 503
        watch.terminate()
        assert watch.process.stderr is not None
        said = watch.process.stderr.read().decode()
    warning = f"ENGINE_ROLE is {given}, but the engine says that it is {role}"
    assert (warning in said, f"its role is {role}" in said) == (bool(given), not given)
