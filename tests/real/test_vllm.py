"""The sidecar against a real vLLM: what the kubelet would be told while the engine hangs, works, and comes back.

One engine serves all tests; each test has a sidecar of its own. Bounds are those that operators are promised: 503
within stall + poll + canary timeout + 1 s of the freeze, never before stall_sec after the last proof of life, and 200
within two polls of the thaw.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.real.engine import VllmProcess, get, started_at
from tests.real.sidecar import CANARY_SEC, POLL_SEC, STALL_SEC, Sample, SidecarProcess, unix

pytestmark = [pytest.mark.real, pytest.mark.timeout(300, func_only=True)]

DETECT_SEC = STALL_SEC + POLL_SEC + CANARY_SEC + 1
RECOVER_SEC = 2 * POLL_SEC
SAMPLING_SEC = 0.5
"""How far the tests' own clock may be behind what it looks at, on two busy cores."""

ROUNDING_SEC = 0.01
"""Times in the sidecar's answers have two decimals."""

LONG_PROMPT_TOKENS = 20000


def is_503(sample: Sample) -> bool:
    return sample.status == 503


def is_200(sample: Sample) -> bool:
    return sample.status == 200


@pytest.fixture
def sidecar(vllm: VllmProcess, tmp_path: Path) -> Iterator[SidecarProcess]:
    """Watches an engine that it has already seen alive: its first canary has come back."""
    with SidecarProcess(vllm.url, tmp_path) as process:
        process.wait(lambda sample: sample.state == "stall-active-ok", 30, "proven alive by a canary")
        yield process


@dataclass(frozen=True)
class Look:
    """One look at the engine itself."""

    at: float
    health: int
    tokens: float


@contextlib.contextmanager
def engine_looks(engine: VllmProcess) -> Iterator[list[Look]]:
    """What the engine's own /health and token counter say, asked throughout the block."""
    looks: list[Look] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            health = get(f"{engine.url}/health", timeout=30)[0]
            looks.append(Look(time.time(), health, engine.metric("vllm:generation_tokens_total")))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(look)
        try:
            yield looks
        finally:
            over.set()
            asking.result()


def last_proof(sidecar: SidecarProcess) -> float:
    """Unix seconds of the last proof of life, as the sidecar itself reports it."""
    return max(sidecar.series("enginewatch_last_progress_timestamp_seconds").values())


def assert_hang_is_seen_and_forgotten(engine: VllmProcess, sidecar: SidecarProcess, what: str) -> None:
    """Freezes the engine core and thaws it; the claims that hold under load and idle alike."""
    with engine_looks(engine) as looks:
        with engine.stopped("core"):
            frozen_at = time.time()
            reported = sidecar.wait(is_503, DETECT_SEC + 10, f"reported hung {what}")
            verdict = sidecar.json("/verdict")
            proof = last_proof(sidecar)
            time.sleep(3 * POLL_SEC)
            assert {sample.status for sample in sidecar.since(reported.at)} == {503}, sidecar.told()
            thawed_at = time.time()
        recovered = sidecar.wait(is_200, RECOVER_SEC + 20, f"healthy again {what}")
    # On a busy machine the engine itself may take its time to move again; the sidecar cannot know before that.
    tokens = next(look.tokens for look in reversed(looks) if look.at < thawed_at)
    moved_at = next((look.at for look in looks if look.tokens > tokens), thawed_at)

    assert reported.at - frozen_at <= DETECT_SEC + SAMPLING_SEC, sidecar.told()
    assert unix(verdict["since"]) - proof >= STALL_SEC - ROUNDING_SEC, (verdict, proof)
    assert proof <= frozen_at + POLL_SEC + SAMPLING_SEC, "progress was seen long after the freeze: not a real one"
    assert recovered.at - moved_at <= RECOVER_SEC + SAMPLING_SEC, sidecar.told()
    assert reported.body.startswith("hung: ")
    assert (verdict["state"], verdict["hung"], verdict["acting"]) == ("stall-hang", True, True)

    frozen = [look for look in looks if frozen_at + SAMPLING_SEC < look.at < thawed_at]
    assert frozen[-1].at - frozen[0].at > STALL_SEC
    assert {look.tokens for look in frozen} == {tokens}, "the engine was not frozen"
    assert {look.health for look in frozen} == {200}, "the control: vLLM's own /health was expected not to notice"


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
