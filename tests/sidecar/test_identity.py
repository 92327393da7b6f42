"""GET /engine of a real sidecar beside a simulated SGLang, whose start durations name its process."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.sidecar.processes import FAST, Watch

from enginewatch.lab.sim.process import SimProcess

# No canary: it would be a counter that falls with the process, and an idle engine is to leave no trace there.
IDLE = {**FAST, "ACTIVE_PROBE_ENABLED": "0"}


def who(watch: Watch, url: str) -> dict[str, Any]:
    watch.wait_for(f"{url}/engine", b"engine_id")
    found: dict[str, Any] = json.loads(watch.get(f"{url}/engine")[1])
    return found


@pytest.mark.parametrize("version", ["0.5.23", "0.5.10"])
def test_an_idle_sglang_keeps_its_id_over_restarts_of_the_sidecar_and_changes_it_with_its_own(version: str) -> None:
    with SimProcess("sglang", version=version) as sim:
        flags = ["--engine-url", sim.url]
        with Watch(*flags, environ=IDLE) as watch:
            first = who(watch, watch.url())
        assert first["source"] == "startup_fingerprint"
        with Watch(*flags, environ=IDLE) as watch:
            url = watch.url()
            again = who(watch, url)
            assert (again["engine_id"], again["restarts"]) == (first["engine_id"], 0)
            sim.restart()
            deadline = time.monotonic() + 60
            while (after := who(watch, url))["engine_id"] == first["engine_id"]:
                assert after["restarts"] == 0
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert (after["source"], after["restarts"]) == ("startup_fingerprint", 1)
            assert watch.get(f"{url}/history")[1].count(b'"state":"replaced"') >= 1
        with Watch(*flags, environ=IDLE) as watch:
            last = who(watch, watch.url())
        assert (last["engine_id"], last["restarts"]) == (after["engine_id"], 0)
