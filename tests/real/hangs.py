"""What holds of a hang that a test makes, whichever process of the engine it freezes and whatever the engine does.

Bounds are those that operators are promised: 503 within stall + poll + canary timeout + 1 s of the freeze, never before
stall_sec after the last proof of life, and 200 within two polls of the thaw.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.real.engine import VllmProcess, get
from tests.real.sidecar import CANARY_SEC, POLL_SEC, STALL_SEC, Sample, SidecarProcess, unix

DETECT_SEC = STALL_SEC + POLL_SEC + CANARY_SEC + 1
RECOVER_SEC = 2 * POLL_SEC
SAMPLING_SEC = 0.5
"""How far the tests' own clock may be behind what it looks at, on two busy cores."""

ROUNDING_SEC = 0.01
"""Times in the sidecar's answers have two decimals."""

ALIVE = ("growing", "stall-active-ok", "freeze-grace", "probe-fail-but-growing")
"""States of an engine that works or waits for work; freeze-grace until the canary of that poll is back."""


def is_503(sample: Sample) -> bool:
    return sample.status == 503


def is_200(sample: Sample) -> bool:
    return sample.status == 200


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


def assert_hang_is_seen_and_forgotten(
    engine: VllmProcess, sidecar: SidecarProcess, what: str, role: str = "core"
) -> None:
    """Freezes a process of the engine and thaws it; the claims that hold under load and idle alike."""
    with engine_looks(engine) as looks:
        with engine.stopped(role):
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
    on_the_way = [sample.state for sample in sidecar.since(frozen_at) if sample.at < reported.at]
    assert set(on_the_way) <= {*ALIVE, "probe-fail-grace", "stall-hang"}, sidecar.told()
    assert "probe-fail-grace" in on_the_way, sidecar.told()
    assert reported.body.startswith("hung: ")
    assert (verdict["state"], verdict["hung"], verdict["acting"]) == ("stall-hang", True, True)

    frozen = [look for look in looks if frozen_at + SAMPLING_SEC < look.at < thawed_at]
    assert frozen[-1].at - frozen[0].at > STALL_SEC
    assert {look.tokens for look in frozen} == {tokens}, "the engine was not frozen"
    assert {look.health for look in frozen} == {200}, "the control: vLLM's own /health was expected not to notice"
