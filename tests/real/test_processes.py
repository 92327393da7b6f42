"""Processes of a real vLLM that freeze, die, come back, or rest on purpose: every state on the way, not only the end.

One engine in development mode serves all tests, since only there can it be paused; two of them kill it and start it
again in its place. Each test has sidecars of its own. Thresholds are a fifth to a sixth of the defaults, so the ratios
between them are those of production; how long the engine itself takes to die or to load is not scaled.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.real.engine import ONE_CORE, VllmProcess, get, post, started_at
from tests.real.hangs import (
    ALIVE,
    DETECT_SEC,
    SAMPLING_SEC,
    assert_hang_is_seen_and_forgotten,
    is_200,
    is_503,
)
from tests.real.sidecar import CANARY_SEC, POLL_SEC, STALL_SEC, Sample, SidecarProcess, unix

pytestmark = [pytest.mark.real, pytest.mark.timeout(600, func_only=True)]

METRICS_SEC = 2.0
UNREACH_SEC = 6.0

PATIENT_STALL_SEC = 60.0
"""Longer than vLLM needs to end after its core has died (measured: 3 to 13 s), which the small threshold is not."""

GONE_SEC = 90.0
"""The same, on a busy machine."""

KUBELET_GRACE_SEC = 10.0
"""Between SIGTERM and SIGKILL; a kubelet's default is 30 s."""

GRACES = ("probe-fail-grace", "unreach-grace")

SLOW_SEC = 20.0
"""What waits may take longer than they should: the machine may be busy, and no claim is about that."""


@pytest.fixture(scope="module")
def shared_engine(vllm_venv: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    log = tmp_path_factory.mktemp("processes") / "vllm.log"
    with VllmProcess.start(vllm_venv, tiny_model, log, ONE_CORE, {"VLLM_SERVER_DEV_MODE": "1"}) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: VllmProcess) -> VllmProcess:
    """Serving, awake and idle; a test that failed half-way must not fail those after it."""
    try:
        post(f"{shared_engine.url}/resume", timeout=10)
        shared_engine.complete("Are you there?", timeout=10)
    except (OSError, AssertionError):
        shared_engine.restart()
        shared_engine.wait_ready()
    shared_engine.wait_idle()
    return shared_engine


@contextlib.contextmanager
def watching(
    engine: VllmProcess, directory: Path, settings: Mapping[str, Any] | None = None
) -> Iterator[SidecarProcess]:
    """A sidecar that has already seen the engine alive: its first canary has come back."""
    with SidecarProcess(engine.url, directory, settings) as process:
        process.wait(lambda sample: sample.state == "stall-active-ok", 30, "proven alive by a canary")
        yield process


def is_in(*states: str) -> Any:
    return lambda sample: sample.state in states


def statuses(samples: list[Sample]) -> set[int]:
    return {sample.status for sample in samples}


# --- frozen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [True, False], ids=["under load", "while idle"])
def test_a_frozen_worker_is_reported_and_forgiven(engine: VllmProcess, tmp_path: Path, busy: bool) -> None:
    """VLLM itself gives up after 300 s, with an exit; its /health says 200 all that time."""
    with watching(engine, tmp_path) as sidecar, engine.loaded() if busy else contextlib.nullcontext():
        if busy:
            sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing")
        assert_hang_is_seen_and_forgotten(engine, sidecar, "with a frozen worker", role="worker")


def test_a_frozen_api_server_is_reported_after_unreach_sec(engine: VllmProcess, tmp_path: Path) -> None:
    reach = {"metrics_timeout_sec": METRICS_SEC, "unreach_sec": UNREACH_SEC}
    with watching(engine, tmp_path, reach) as sidecar, engine.loaded():
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing")
        with engine.stopped("api-server"):
            frozen_at = time.time()
            with pytest.raises(TimeoutError):
                get(f"{engine.url}/health", timeout=1)
            reported = sidecar.wait(is_503, UNREACH_SEC + METRICS_SEC + POLL_SEC + CANARY_SEC + SLOW_SEC, "reported")
            time.sleep(3 * POLL_SEC)
            assert statuses(sidecar.since(reported.at)) == {503}, sidecar.told()
            assert set(sidecar.states(reported.at)) == {"unreach-hang"}, sidecar.told()
        sidecar.wait(is_200, SLOW_SEC, "forgiven")
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing again")

    on_the_way = [sample for sample in sidecar.since(frozen_at) if sample.at < reported.at]
    graces = [state for state in dict.fromkeys(sample.state for sample in on_the_way) if state not in ALIVE]
    assert graces[0] == "unreach-grace", sidecar.told()
    assert set(graces) <= {"unreach-grace", "unreach-hang"}, sidecar.told()
    assert "canaries failed meanwhile" in reported.body
    assert reported.at - frozen_at >= UNREACH_SEC - SAMPLING_SEC, sidecar.told()


def test_an_api_server_frozen_for_less_than_unreach_sec_is_not_reported(engine: VllmProcess, tmp_path: Path) -> None:
    """The control of the test above: the same freeze, ended in its grace."""
    reach = {"metrics_timeout_sec": METRICS_SEC, "unreach_sec": UNREACH_SEC + SLOW_SEC}
    with watching(engine, tmp_path, reach) as sidecar, engine.loaded():
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing")
        with engine.stopped("api-server"):
            frozen_at = time.time()
            sidecar.wait(is_in("unreach-grace"), METRICS_SEC + POLL_SEC + SLOW_SEC, "noticed")
            time.sleep(2 * (METRICS_SEC + POLL_SEC))  # two more scrapes and canaries fail
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing again")
        time.sleep(2 * POLL_SEC)
        assert statuses(sidecar.since(frozen_at)) == {200}, sidecar.told()
        canaries = sidecar.series("enginewatch_canaries_total")
        assert canaries['{outcome="timeout"}'] >= 2, "canaries must have failed, or the time alone was put to the test"


# --- at rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "wake", "word"),
    [("/pause?mode=keep", "/resume", "paused"), ("/sleep?level=1", "/wake_up", "sleeping")],
    ids=["paused", "asleep"],
)
def test_an_engine_at_rest_with_pending_requests_is_not_hung(
    engine: VllmProcess, tmp_path: Path, rest: str, wake: str, word: str
) -> None:
    """Sleep is half a sleep here: the CPU's worker ignores it (and --enable-sleep-mode is refused), the rest obeys."""
    with watching(engine, tmp_path) as sidecar, engine.loaded():
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing")
        begun = time.time()
        assert post(f"{engine.url}{rest}") == 200
        resting = sidecar.wait(is_in("paused"), SLOW_SEC, "seen at rest")
        tokens = engine.metric("vllm:generation_tokens_total")
        with pytest.raises(TimeoutError):
            engine.complete("A request that has to wait", timeout=CANARY_SEC)
        time.sleep(DETECT_SEC)
        assert engine.metric("vllm:generation_tokens_total") == tokens, "the engine did not rest"
        assert sidecar.states(resting.at) == ["paused"], sidecar.told()
        assert f"it is {word}" in sidecar.samples[-1].body
        assert post(f"{engine.url}{wake}") == 200
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing again")
        assert statuses(sidecar.since(begun)) == {200}, sidecar.told()

        # The control: the same requests wait as long for a core that is frozen, and nothing says that it rests.
        with engine.stopped("core"):
            reported = sidecar.wait(is_503, DETECT_SEC + SLOW_SEC, "reported")
        assert reported.state == "stall-hang", sidecar.told()
        sidecar.wait(is_200, SLOW_SEC, "forgiven")


def test_a_core_that_freezes_while_it_is_paused_is_reported(engine: VllmProcess, tmp_path: Path) -> None:
    """Only an answer says that it rests, and a frozen core gives none: the last yes expires."""
    with watching(engine, tmp_path) as sidecar, engine.loaded():
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing")
        assert post(f"{engine.url}/pause?mode=keep") == 200
        sidecar.wait(is_in("paused"), SLOW_SEC, "seen paused")
        with engine.stopped("core"):
            frozen_at = time.time()
            reported = sidecar.wait(is_503, DETECT_SEC + SLOW_SEC, "reported")
            assert sidecar.states(frozen_at)[0] == "paused", sidecar.told()
            assert reported.at - frozen_at >= STALL_SEC, sidecar.told()
        sidecar.wait(is_in("paused"), SLOW_SEC, "seen paused again")
        assert post(f"{engine.url}/resume") == 200
        sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing again")


@pytest.mark.parametrize(
    ("before", "call", "gauge"),
    [
        ("/resume", "/start_weight_update", "vllm:rl_weight_update_operations_in_flight"),
        ("/sleep?level=1", "/wake_up", "vllm:sleep_mode_operations_in_flight"),
    ],
    ids=["weight update", "wake"],
)
def test_calls_that_hold_the_core_are_believed_for_a_limited_time(
    engine: VllmProcess, tmp_path: Path, before: str, call: str, gauge: str
) -> None:
    """A stopped core stands in for one that a trainer or a copy of the weights holds; its caller tries again.

    The same freeze without the calls is a hang in the tests above, and half an hour is not waited for.
    """
    with watching(engine, tmp_path) as sidecar, concurrent.futures.ThreadPoolExecutor(2) as pool:
        begun = time.time()
        assert post(f"{engine.url}{before}") == 200
        with engine.stopped("core"):
            calls = [pool.submit(post, f"{engine.url}{call}", 120) for _ in range(2)]
            resting = sidecar.wait(is_in("paused"), SLOW_SEC, "seen at rest")
            time.sleep(DETECT_SEC)
            assert engine.metric(gauge) == 2
            assert sidecar.states(resting.at) == ["paused"], sidecar.told()
            (flips,) = sidecar.json("/verdict")["would_flip"]
            left = re.fullmatch(r"the call that holds the engine .* comes back, else (\d+) s do", flips)
            assert left is not None, flips
            assert 1000 < int(left[1]) < 1800
        # There is no trainer, so the start of an update is an error; what counts is that the core has answered.
        assert {done.result() for done in calls} <= {200, 500}
        sidecar.wait(is_in("stall-active-ok"), SLOW_SEC, "proven alive by a canary")
        assert statuses(sidecar.since(begun)) == {200}, sidecar.told()


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["core", "api-server"])
def test_a_killed_engine_is_left_to_the_kubelet_and_its_successor_is_judged_anew(
    engine: VllmProcess, tmp_path: Path, role: str
) -> None:
    """Two sidecars that differ in their warm-up alone, each the control of the other once the successor hangs."""
    patient = {"stall_sec": PATIENT_STALL_SEC}
    with (
        watching(engine, tmp_path / "cold", patient) as cold,
        watching(engine, tmp_path / "warm", {**patient, "warmup_sec": 3600}) as warm,
    ):
        before = {sidecar: sidecar.json("/engine") for sidecar in (cold, warm)}
        with engine.loaded():
            for sidecar in (cold, warm):
                sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing")
            killed_at = time.time()
            engine.kill(role)
            gone = {sidecar: sidecar.wait(is_in("restarting"), GONE_SEC, "seen gone") for sidecar in (cold, warm)}
        engine.wait_ended(GONE_SEC)
        engine.restart()
        engine.wait_ready()
        for sidecar in (cold, warm):
            sidecar.wait(is_in(*ALIVE), SLOW_SEC, "seen alive")
            dying = [sample for sample in sidecar.since(killed_at) if sample.at < gone[sidecar].at]
            assert statuses(dying) <= {200}, sidecar.told()
            assert {sample.state for sample in dying} <= {*ALIVE, *GRACES, "restarting"}, sidecar.told()
            assert_replaced(engine, sidecar, gone[sidecar], before[sidecar])

        for sidecar in (cold, warm):
            sidecar.configure({"stall_sec": STALL_SEC})
        assert_hang_of_the_successor(engine, cold, warm)


def test_a_hung_engine_is_restarted_once_and_not_for_ever(engine: VllmProcess, tmp_path: Path) -> None:
    """What a 503 is for: the kubelet ends the engine, and then it loads for many times each of the thresholds."""
    reach = {"metrics_timeout_sec": METRICS_SEC, "unreach_sec": UNREACH_SEC}
    with watching(engine, tmp_path, reach) as sidecar:
        before = sidecar.json("/engine")
        with engine.loaded():
            sidecar.wait(is_in("growing"), SLOW_SEC, "seen growing")
            engine.stop(engine.pids("core")[0])
            reported = sidecar.wait(is_503, DETECT_SEC + SLOW_SEC, "reported")
            engine.ask_to_end()
            with contextlib.suppress(AssertionError):
                engine.wait_ended(KUBELET_GRACE_SEC)
            engine.restart()
            gone = sidecar.wait(is_in("restarting"), SLOW_SEC, "seen gone", since=reported.at)
        engine.wait_ready()
        sidecar.wait(is_in(*ALIVE), SLOW_SEC, "seen alive")
        hung = [sample for sample in sidecar.since(reported.at) if sample.at < gone.at]
        assert {sample.state for sample in hung} <= {"stall-hang", "restarting"}, sidecar.told()
        assert_replaced(engine, sidecar, gone, before)


def assert_replaced(engine: VllmProcess, sidecar: SidecarProcess, gone: Sample, before: dict[str, Any]) -> None:
    """What /healthz, /history and /engine told from the end of one process to the first answers of the next."""
    assert statuses(sidecar.since(gone.at)) == {200}, sidecar.told()
    loading, *loaded = sidecar.states(gone.at)
    assert loading == "restarting"
    assert "restarting" not in loaded, sidecar.told()
    noted = [event["state"] for event in sidecar.noted()]
    noted = noted[noted.index("restarting") :]
    assert [state for state in noted if state not in ALIVE] == ["restarting", "replaced"], noted

    after = sidecar.json("/engine")
    assert after["engine_id"].startswith("pst-")
    assert after["engine_id"] != before["engine_id"]
    assert after["restarts"] == before["restarts"] + 1 == 1
    assert abs(unix(after["started_at"]) - started_at(engine.pid)) < 1.0


def assert_hang_of_the_successor(engine: VllmProcess, cold: SidecarProcess, warm: SidecarProcess) -> None:
    """The same freeze is acted on where there is no warm-up, and only shown where it lasts."""
    for sidecar in (cold, warm):
        sidecar.wait(is_in(*ALIVE), SLOW_SEC, "seen alive")
    with engine.stopped("core"):
        frozen_at = time.time()
        reported = cold.wait(is_503, DETECT_SEC + SLOW_SEC, "reported without warm-up")
        assert reported.state == "stall-hang", cold.told()
        shown = warm.wait(is_in("warmup-stall-hang"), DETECT_SEC + SLOW_SEC, "shown in warm-up")
        verdict = warm.json("/verdict")
        assert (verdict["hung"], verdict["acting"]) == (True, False)
        time.sleep(3 * POLL_SEC)
        assert set(warm.states(shown.at)) == {"warmup-stall-hang"}, warm.told()
    cold.wait(is_200, SLOW_SEC, "forgiven")
    warm.wait(is_in(*ALIVE), SLOW_SEC, "alive again")
    assert statuses(warm.since(frozen_at)) == {200}, warm.told()
    assert warm.series("enginewatch_suppressed_hangs_total")['{why="warmup"}'] == 1
