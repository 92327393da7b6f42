"""The sidecar against a real vLLM: what the kubelet would be told while the engine hangs, works, and comes back.

One engine serves all tests; each test has a sidecar of its own. `hangs.py` has the bounds.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.real.engine import VllmProcess, post, started_at
from tests.real.hangs import DETECT_SEC, assert_hang_is_seen_and_forgotten
from tests.real.sidecar import CANARY_SEC, POLL_SEC, STALL_SEC, SidecarProcess, unix

pytestmark = [pytest.mark.real, pytest.mark.timeout(300, func_only=True)]

LONG_PROMPT_TOKENS = 20000


@pytest.fixture
def sidecar(vllm: VllmProcess, tmp_path: Path) -> Iterator[SidecarProcess]:
    """Watches an engine that it has already seen alive: its first canary has come back."""
    with SidecarProcess(vllm.url, tmp_path) as process:
        process.wait(lambda sample: sample.state == "stall-active-ok", 30, "proven alive by a canary")
        yield process


def test_vllm_and_its_version_are_recognised(vllm: VllmProcess, sidecar: SidecarProcess) -> None:
    [labels] = sidecar.series("enginewatch_engine_info")
    assert 'kind="vllm"' in labels
    assert 'role="agg"' in labels
    # Asked for beside the loop, so it may come a moment after the first verdict.
    deadline = time.monotonic() + 10
    while not (said := [event for event in sidecar.history() if event["kind"] == "described"]):
        assert time.monotonic() < deadline, sidecar.history()
        time.sleep(0.1)
    assert (said[-1]["engine"], said[-1]["version"]) == ("vllm", vllm.version())


def test_engine_names_the_process_that_the_kernel_started(vllm: VllmProcess, sidecar: SidecarProcess) -> None:
    engine = sidecar.json("/engine")
    assert abs(unix(engine["started_at"]) - started_at(vllm.pids("api-server")[0])) < 1.0
    assert engine["restarts"] == 0


def test_an_idle_engine_stays_healthy(sidecar: SidecarProcess) -> None:
    begun = time.time()
    time.sleep(STALL_SEC + 3 * POLL_SEC)
    assert {sample.status for sample in sidecar.since(begun)} == {200}, sidecar.told()
    assert {sample.state for sample in sidecar.since(begun)} <= {"stall-active-ok", "growing", "freeze-grace"}


def test_a_core_frozen_under_load_is_reported_and_forgiven(vllm: VllmProcess, sidecar: SidecarProcess) -> None:
    with vllm.loaded():
        sidecar.wait(lambda sample: sample.state == "growing", 10, "seen growing")
        assert_hang_is_seen_and_forgotten(vllm, sidecar, "under load")
    vllm.wait_idle()


def test_a_core_frozen_while_idle_is_reported_and_forgiven(vllm: VllmProcess, sidecar: SidecarProcess) -> None:
    assert_hang_is_seen_and_forgotten(vllm, sidecar, "while idle")


def test_without_a_canary_a_core_frozen_while_idle_is_not_seen(vllm: VllmProcess, tmp_path: Path) -> None:
    """The control of the test above: what sees that hang is the canary, nothing else can."""
    with SidecarProcess(vllm.url, tmp_path, {"active_probe_enabled": False}) as sidecar:
        sidecar.wait(lambda sample: sample.state in ("freeze-grace", "idle"), 30, "watching an idle engine")
        with vllm.stopped("core"):
            frozen_at = time.time()
            with pytest.raises(TimeoutError):
                vllm.complete("Is anybody there?", timeout=CANARY_SEC)
            time.sleep(DETECT_SEC + POLL_SEC)
            seen = sidecar.since(frozen_at)
    assert {sample.status for sample in seen} == {200}, sidecar.told()
    assert seen[-1].state == "idle"


def test_a_long_prefill_that_moves_no_counter_stays_healthy(vllm: VllmProcess, sidecar: SidecarProcess) -> None:
    counters = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count")
    flat: list[float] = []
    begun = time.time()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Token ids, not text: the prompt's length is then what it says.
        prefill = pool.submit(vllm.complete, [7] * LONG_PROMPT_TOKENS, timeout=200.0)
        before: dict[str, float] = {}
        while not prefill.done():
            now = {name: vllm.metric(name) for name in counters}
            if now != before:
                before, frozen_at = now, time.time()
            flat.append(time.time() - frozen_at)
            time.sleep(0.2)
        assert prefill.result()["usage"]["prompt_tokens"] == LONG_PROMPT_TOKENS
    assert max(flat) > 1.5 * STALL_SEC, "the prefill was too short to prove anything: raise LONG_PROMPT_TOKENS"
    seen = sidecar.since(begun)
    assert {sample.status for sample in seen} == {200}, sidecar.told()
    assert "kv-growing" in {sample.state for sample in seen}, sidecar.told()


def test_without_development_mode_nobody_can_pause_the_engine(vllm: VllmProcess, sidecar: SidecarProcess) -> None:
    """And the sidecar has found out, so it asks no more: no flag of this engine's can hide a hang."""
    assert post(f"{vllm.url}/pause") == 404
    deadline = time.monotonic() + 10
    while not (said := {event["flags"] for event in sidecar.history() if event["kind"] == "flags"}):
        assert time.monotonic() < deadline, sidecar.history()
        time.sleep(0.1)
    assert said == {"absent"}
