"""The sidecar and the doctor against a real vLLM that is started in other ways than the plain one.

Each configuration is loaded once and ended before the next one is. A configuration shows something else and hides
something else: what is asserted is what an operator is promised in it, the states on the way included, and beside each
detection stands a control that shows what would not have seen it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.real.engine import ONE_CORE, VllmProcess, get
from tests.real.sidecar import POLL_SEC, STALL_SEC, Sample, SidecarProcess

API_KEY = "sesame-4711"
CONFIGURATIONS: dict[str, Sequence[str]] = {
    "two-api-servers": ("--api-server-count", "2"),
    # Two API servers as well: that is the default with data parallelism.
    "data-parallel": ("--data-parallel-size", "2"),
    "no-log-stats": ("--disable-log-stats",),
    "api-key": (),
}

DETECT_SEC = 30.0
"""Within this a hang must be seen. The promise is stall + poll + canary timeout (test_vllm.py holds it to that, on an
engine that has the cores for itself); here several processes and their load share them."""
RECOVER_SEC = 30.0
QUIET_SEC = 3 * STALL_SEC
"""How long nothing must happen in a test that claims it."""
ROUNDING_SEC = 0.01
"""Times in the sidecar's answers have two decimals."""

ALIVE = {"growing", "freeze-grace", "stall-active-ok"}
"""What a healthy core looks like; its own canaries make it grow."""

pytestmark = [pytest.mark.real, pytest.mark.timeout(400, func_only=True)]


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, vllm_venv: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    """The engine of one configuration; pytest ends it before it starts that of the next one."""
    name: str = request.param
    log = tmp_path_factory.mktemp(name) / "vllm.log"
    env = {"VLLM_API_KEY": API_KEY} if name == "api-key" else {}
    with VllmProcess.start(vllm_venv, tiny_model, log, [*ONE_CORE, *CONFIGURATIONS[name]], env) as process:
        yield process


def started_with(configuration: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engine", [configuration], indirect=True, scope="module")


@contextlib.contextmanager
def watching(
    engine: VllmProcess,
    directory: Path,
    settings: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[SidecarProcess]:
    """A sidecar that has seen the engine alive: a canary has come back from each core."""
    with SidecarProcess(engine.url, directory, settings, environment) as sidecar:
        deadline = time.monotonic() + 30
        while canaries(sidecar)["ok"] < len(engine.pids("core")):
            assert time.monotonic() < deadline, f"no canary came back: {sidecar.told()}"
            time.sleep(0.1)
        sidecar.wait(lambda sample: sample.state in ALIVE | {"no-legs"}, 30, "watching")
        yield sidecar


def canaries(sidecar: SidecarProcess) -> dict[str, float]:
    """Canaries that have ended, by outcome."""
    return {labels.split('"')[1]: count for labels, count in sidecar.series("enginewatch_canaries_total").items()}


def path(samples: Iterable[Sample], core: str | None = None) -> list[str]:
    """The states in the order in which they were seen: of the engine, or of one core."""
    seen = (sample.state if core is None else sample.cores[core] for sample in samples if core in (None, *sample.cores))
    return [state for state, _ in itertools.groupby(seen)]


def in_order(states: Sequence[str], *wanted: str) -> bool:
    rest = iter(states)
    return all(state in rest for state in wanted)


@dataclass(frozen=True)
class Frozen:
    """What was seen of one freeze."""

    before: list[Sample]
    """From the freeze until it was reported."""
    reported: list[Sample]
    """From there to the thaw."""
    after: list[Sample]
    """From the thaw until well after the recovery."""
    verdict: dict[str, Any]
    """While it was reported."""
    looks: tuple[Mapping[str, float], Mapping[str, float]]
    cores: dict[str, float]
    """Seconds since each core's last proof of life, by the first verdict that reported it."""


@contextlib.contextmanager
def stopped(engine: VllmProcess, pids: Sequence[int]) -> Iterator[None]:
    try:
        for pid in pids:
            engine.stop(pid)
        yield
    finally:
        for pid in pids:
            engine.cont(pid)


def freeze(
    engine: VllmProcess,
    sidecar: SidecarProcess,
    pids: Sequence[int],
    hang: str,
    look: Callable[[], Mapping[str, float]] = dict,
) -> Frozen:
    """Stops processes until the sidecar reports the engine as hung, and lets them go on.

    Claims what holds in every configuration: healthy before, hung from the report to the thaw without a flicker,
    healthy soon after it and for good. `look` is taken when the hang is reported and again before the thaw.
    """
    with stopped(engine, pids):
        begun = time.time()
        report = sidecar.wait(lambda sample: sample.status == 503, DETECT_SEC, f"reported as {hang}")
        verdict = sidecar.json("/verdict")
        first_look = look()
        time.sleep(3 * POLL_SEC)
        looks = (first_look, look())
        thawed = time.time()
    recovery = sidecar.wait(lambda sample: sample.status == 200, RECOVER_SEC, "healthy again")
    time.sleep(4 * POLL_SEC)
    seen = sidecar.since(begun)
    frozen = Frozen(
        before=[sample for sample in seen if sample.at < report.at],
        reported=[sample for sample in seen if report.at <= sample.at < thawed],
        after=[sample for sample in seen if sample.at >= thawed],
        verdict=verdict,
        looks=looks,
        cores={core["core"]: core["stalled_for_sec"] for core in verdict["cores"]},
    )
    assert {sample.status for sample in frozen.before} == {200}, sidecar.told()
    assert {(sample.status, sample.state) for sample in frozen.reported} == {(503, hang)}, sidecar.told()
    assert report.body.startswith("hung: "), report
    assert (verdict["state"], verdict["hung"], verdict["acting"]) == (hang, True, True), verdict
    assert {sample.status for sample in frozen.after if sample.at >= recovery.at} == {200}, sidecar.told()
    return frozen


def assert_core_hung(frozen: Frozen, core: str, sidecar: SidecarProcess, *, loaded: bool) -> None:
    """One core's way into the hang and out of it, where canaries are what tells."""
    before, after = path(frozen.before, core), path(frozen.after, core)
    assert set(before) <= ALIVE | {"probe-fail-grace"}, (before, sidecar.told())
    assert in_order(before, "growing", "probe-fail-grace") if loaded else "probe-fail-grace" in before, sidecar.told()
    assert path(frozen.reported, core) == ["stall-hang"], sidecar.told()
    assert frozen.cores[core] >= STALL_SEC - ROUNDING_SEC, "declared hung sooner than stall_sec after a proof of life"
    assert frozen.verdict["reason"].startswith(f"core {core}: no progress for "), frozen.verdict
    assert "canaries in a row failed (timeout)" in frozen.verdict["reason"], frozen.verdict
    assert ("0 running" in frozen.verdict["reason"]) is not loaded, frozen.verdict
    assert set(after) <= ALIVE | {"stall-hang", "probe-fail-but-growing"}, (after, sidecar.told())
    assert ({"growing"} if loaded else ALIVE) & set(after), (after, sidecar.told())


HEALTHY = {"/health": 200}


def health(engine: VllmProcess) -> dict[str, float]:
    """What the engine says of its own health: the control of every hang of a core."""
    return {"/health": get(f"{engine.url}/health")[0]}


MARKS = {"ok": "ok", "warning": "WARNING", "unknown": "UNKNOWN", "critical": "CRITICAL"}
EXIT_CODES = {"ok": 0, "warning": 1, "critical": 3, "unknown": 4}


def examine(url: str, level: str, expected: Sequence[tuple[str, str]], *options: str) -> dict[str, Any]:
    """What `enginewatch doctor` finds, as JSON; fails unless JSON, text and exit code tell what is expected.

    Args:
        url: the engine's.
        level: of the whole.
        expected: level and pattern of each finding, all of them, in their order; a pattern begins with what is found,
            and where something is to be done holds that after an arrow.
        options: of the command.
    """
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    command = [sys.executable, "-m", "enginewatch", "doctor", url, *options]
    text, data = (
        subprocess.run([*command, "-o", form], env=environment, capture_output=True, text=True, check=False, timeout=60)
        for form in ("text", "json")
    )
    assert (text.stderr, data.stderr) == ("", "")
    found: dict[str, Any] = json.loads(data.stdout)
    told = [(finding["level"], f"{finding['what']} -> {finding['fix']}") for finding in found["findings"]]
    assert [name for name, _ in told] == [name for name, _ in expected], data.stdout
    words = " ".join(text.stdout.split())
    for (name, sentence), (_, pattern) in zip(told, expected, strict=True):
        assert re.match(pattern, sentence), (pattern, sentence)
        assert re.search(f"{MARKS[name]} {pattern}", words), (pattern, text.stdout)
    assert (found["level"], found["exit_code"]) == (level, EXIT_CODES[level]), data.stdout
    assert (text.returncode, data.returncode) == (EXIT_CODES[level], EXIT_CODES[level])
    assert words.endswith(f"{MARKS[level]} (exit code {EXIT_CODES[level]})"), text.stdout
    return found


PAGE = ("ok", r"Metrics page at /metrics: \d+ kB in ")
VLLM = ("ok", r"vLLM 0\.\d+\.\d+\S*, by its metrics page\.")
VLLM_BY_ANSWERS = ("ok", r"vLLM 0\.\d+\.\d+\S*, by its answers\.")
CORES = ("ok", r"2 cores by label engine: 0, 1; each is judged by itself\.")
NO_LEGS = ("warning", r"The page has no progress legs: .* -> Start vLLM without --disable-log-stats")
CANARY = ("ok", r"The canary was answered in .*; moved: .*generation_tokens, iterations, prompt_tokens")
REFUSED = r"The canary does not fit: .*401.* Without one a hang is seen only under load\."
NO_PAUSE = ("ok", r"No pause endpoints: .* -> .*VLLM_SERVER_DEV_MODE=1")
STARTED_AT = ("ok", r"Identity: the process that started at 20\d\d-")
OBSERVED = ("warning", r"Identity: only observed\. .*several API servers: .* -> .*--api-server-count 1")


# --- data parallel ----------------------------------------------------------------------------------------------------


@started_with("data-parallel")
def test_doctor_aims_a_canary_at_each_data_parallel_core(engine: VllmProcess) -> None:
    answered = ("ok", r"2 of 2 cores answered their canary")
    found = examine(engine.url, "warning", [PAGE, VLLM, CORES, answered, NO_PAUSE, OBSERVED])
    assert {core["name"]: core["canary"]["aimed"] for core in found["cores"]} == {"0": True, "1": True}
    assert [core["missing_legs"] for core in found["cores"]] == [[], []]


@started_with("data-parallel")
def test_a_core_that_hangs_under_load_is_seen_although_the_other_works(engine: VllmProcess, tmp_path: Path) -> None:
    def tokens() -> dict[str, float]:
        return {core: engine.metric("vllm:generation_tokens_total", core) for core in ("0", "1")}

    with watching(engine, tmp_path) as sidecar, engine.loaded(core="0"), engine.loaded(core="1"):
        sidecar.wait(lambda sample: set(sample.cores.values()) == {"growing"}, 30, "seen growing on both cores")
        frozen = freeze(engine, sidecar, engine.pids("core")[1:], "stall-hang", look=tokens)
    assert_core_hung(frozen, "1", sidecar, loaded=True)
    others = [sample.cores["0"] for sample in (*frozen.before, *frozen.reported)]
    assert set(others) <= ALIVE, others
    assert others.count("growing") > len(others) / 2, others
    # The control: whoever looks at the sum over the cores sees an engine at work.
    at_first, later = frozen.looks
    assert later["1"] == at_first["1"]
    assert sum(later.values()) > sum(at_first.values())
    engine.wait_idle()


@started_with("data-parallel")
def test_a_core_that_hangs_while_idle_is_seen_by_the_canary_aimed_at_it(engine: VllmProcess, tmp_path: Path) -> None:
    with watching(engine, tmp_path) as sidecar:
        frozen = freeze(engine, sidecar, engine.pids("core")[:1], "stall-hang")
    assert_core_hung(frozen, "0", sidecar, loaded=False)
    assert {sample.cores["1"] for sample in (*frozen.before, *frozen.reported)} <= ALIVE


@started_with("data-parallel")
def test_without_an_aim_a_core_that_hangs_while_idle_is_not_seen(engine: VllmProcess, tmp_path: Path) -> None:
    """The control of the test above: a canary of the operator's own is not known to reach one core or the other.

    Doctor has a look at the same hang and names the core.
    """
    own = {"active_probe_path": "/v1/models"}
    with SidecarProcess(engine.url, tmp_path, own) as sidecar:
        sidecar.wait(lambda sample: sample.state == "idle", 30, "watching idle cores")
        with stopped(engine, engine.pids("core")[:1]):
            begun = time.time()
            answered = ("ok", r"1 of 2 cores answered their canary")
            hung = ("critical", r"The canary to core 0 failed after .*; no counter moved meanwhile\. -> If it stays so")
            examine(engine.url, "critical", [PAGE, VLLM, CORES, answered, hung, NO_PAUSE, OBSERVED])
            time.sleep(max(0.0, begun + QUIET_SEC - time.time()))
            seen = sidecar.since(begun)
    assert {sample.status for sample in seen} == {200}, sidecar.told()
    assert seen[-1].state == "idle", seen[-1]
    assert "no canary can be aimed" in seen[-1].body, seen[-1]


# --- two API servers --------------------------------------------------------------------------------------------------


@started_with("two-api-servers")
def test_doctor_says_what_two_api_servers_cost(engine: VllmProcess) -> None:
    examine(engine.url, "warning", [PAGE, VLLM, CANARY, NO_PAUSE, OBSERVED])


@started_with("two-api-servers")
def test_an_identity_behind_two_api_servers_is_observed_only(engine: VllmProcess, tmp_path: Path) -> None:
    with watching(engine, tmp_path) as sidecar:
        said = sidecar.json("/engine")
        assert (said["source"], said["restarts"]) == ("observed", 0)
        assert said["engine_id"].startswith("obs-")
        with engine.loaded():
            sidecar.wait(lambda sample: sample.state == "growing", 30, "seen growing")
            time.sleep(2 * STALL_SEC)
        # Pages come from either server: it must not look like one process after the other.
        assert sidecar.json("/engine") == said
        assert set(path(sidecar.samples)) <= ALIVE | {"startup", "baseline"}, sidecar.told()


@started_with("two-api-servers")
def test_the_core_behind_two_api_servers_is_seen_to_hang_under_load(engine: VllmProcess, tmp_path: Path) -> None:
    with watching(engine, tmp_path) as sidecar, engine.loaded():
        sidecar.wait(lambda sample: sample.state == "growing", 30, "seen growing")
        frozen = freeze(engine, sidecar, engine.pids("core"), "stall-hang", look=lambda: health(engine))
    assert_core_hung(frozen, "0", sidecar, loaded=True)
    assert frozen.looks == (HEALTHY, HEALTHY), "the control: vLLM's own /health was expected not to notice"
    engine.wait_idle()


@started_with("two-api-servers")
def test_the_core_behind_two_api_servers_is_seen_to_hang_while_idle(engine: VllmProcess, tmp_path: Path) -> None:
    with watching(engine, tmp_path) as sidecar:
        frozen = freeze(engine, sidecar, engine.pids("core"), "stall-hang", look=lambda: health(engine))
    assert_core_hung(frozen, "0", sidecar, loaded=False)
    assert frozen.looks == (HEALTHY, HEALTHY), "the control: vLLM's own /health was expected not to notice"


@started_with("two-api-servers")
def test_one_stopped_api_server_of_two_is_no_hung_engine(engine: VllmProcess, tmp_path: Path) -> None:
    """A known limit: half an engine is not reported. What is promised is that nothing wrong is said of it.

    Both servers accept on one socket, so new connections go to the one that runs: most canaries come back, and those
    that do not are counted. Patient settings: a canary that a busy machine delays must not decide this.
    """
    patient = {"stall_sec": 12, "active_probe_timeout_sec": 4}
    with watching(engine, tmp_path, patient) as sidecar, stopped(engine, engine.pids("api-server")[:1]):
        begun, before = time.time(), canaries(sidecar)
        time.sleep(20)
        seen, ended = sidecar.since(begun), canaries(sidecar)
        identity, in_history = sidecar.json("/engine"), sidecar.history()
    assert {sample.status for sample in seen} == {200}, sidecar.told()
    assert set(path(seen)) <= ALIVE | {"probe-fail-grace", "probe-fail-but-growing", "unreach-grace"}, path(seen)
    assert identity["restarts"] == 0
    assert ended["ok"] > before["ok"]
    failures = [event for event in in_history if event["kind"] == "canary" and event["outcome"] != "ok"]
    assert len(failures) == sum(ended.values()) - ended["ok"], (
        "the share of failed canaries is not what the metric says"
    )


@started_with("two-api-servers")
def test_two_stopped_api_servers_of_two_cannot_be_reached(engine: VllmProcess, tmp_path: Path) -> None:
    with watching(engine, tmp_path) as sidecar:
        frozen = freeze(engine, sidecar, engine.pids("api-server"), "unreach-hang")
    assert in_order(path(frozen.before), "unreach-grace"), path(frozen.before)
    assert set(path(frozen.before)) <= ALIVE | {"unreach-grace"}, path(frozen.before)
    assert set(path(frozen.after)) <= ALIVE | {"unreach-hang"}, path(frozen.after)


# --- without log stats ------------------------------------------------------------------------------------------------


@started_with("no-log-stats")
def test_doctor_names_the_flag_that_took_the_progress_legs_away(engine: VllmProcess) -> None:
    canary = ("ok", r"The canary was answered in .*; there are no legs that could move")
    found = examine(engine.url, "warning", [PAGE, VLLM_BY_ANSWERS, NO_LEGS, canary, NO_PAUSE, STARTED_AT])
    assert found["cores"] == []


@started_with("no-log-stats")
def test_without_log_stats_the_canary_alone_sees_a_hang(engine: VllmProcess, tmp_path: Path) -> None:
    with watching(engine, tmp_path) as sidecar:
        begun = time.time()
        time.sleep(QUIET_SEC)
        idle = sidecar.since(begun)
        assert {(sample.status, sample.state) for sample in idle} == {(200, "no-legs")}, sidecar.told()
        frozen = freeze(engine, sidecar, engine.pids("core"), "canary-hang", look=lambda: health(engine))
        assert frozen.looks == (HEALTHY, HEALTHY), "the control: vLLM's own /health was expected not to notice"
    assert path(frozen.before) == ["no-legs"]
    assert "canaries in a row failed (timeout)" in frozen.verdict["reason"], frozen.verdict
    assert set(path(frozen.after)) <= {"canary-hang", "no-legs"}, path(frozen.after)


@started_with("no-log-stats")
def test_without_log_stats_and_canaries_it_is_said_that_nothing_is_watched(engine: VllmProcess, tmp_path: Path) -> None:
    """The control of the test above: the canary is all there is. Doctor's own canary finds the same hang."""
    with SidecarProcess(engine.url, tmp_path, {"active_probe_enabled": False}) as sidecar:
        sidecar.wait(lambda sample: sample.state == "no-legs", 30, "without anything to go by")
        with stopped(engine, engine.pids("core")):
            begun = time.time()
            hung = ("critical", r"The canary failed after .*; nothing else tells whether it works\. -> If it stays so")
            examine(engine.url, "critical", [PAGE, VLLM_BY_ANSWERS, NO_LEGS, hung, NO_PAUSE, STARTED_AT])
            time.sleep(max(0.0, begun + QUIET_SEC - time.time()))
            seen = sidecar.since(begun)
    assert {(sample.status, sample.state) for sample in seen} == {(200, "no-legs")}, sidecar.told()
    assert "not watched: " in seen[-1].body, seen[-1]
    loud = [line for line in sidecar.log if "the engine is not watched" in line]
    assert len(loud) == 1, sidecar.log
    assert json.loads(loud[0])["level"] == "error", loud


# --- API key ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text(f"{API_KEY}\n")
    return file


@started_with("api-key")
def test_doctor_with_the_api_key_finds_nothing_to_correct(engine: VllmProcess, key_file: Path) -> None:
    examine(engine.url, "ok", [PAGE, VLLM, CANARY, NO_PAUSE, STARTED_AT], "--api-key-file", str(key_file))


@started_with("api-key")
def test_doctor_without_the_api_key_asks_for_it(engine: VllmProcess) -> None:
    refused = ("warning", rf"{REFUSED} -> Put the key into a file .*ENGINE_API_KEY_FILE")
    examine(engine.url, "warning", [PAGE, VLLM, refused, NO_PAUSE, STARTED_AT])


@started_with("api-key")
def test_doctor_with_a_wrong_api_key_says_that_it_is_wrong(engine: VllmProcess, key_file: Path) -> None:
    key_file.write_text("barley")
    refused = ("warning", rf"{REFUSED} -> Correct the key in ENGINE_API_KEY_FILE")
    examine(engine.url, "warning", [PAGE, VLLM, refused, NO_PAUSE, STARTED_AT], "--api-key-file", str(key_file))


@started_with("api-key")
def test_with_the_api_key_canaries_come_back(engine: VllmProcess, tmp_path: Path, key_file: Path) -> None:
    with watching(engine, tmp_path, environment={"ENGINE_API_KEY_FILE": str(key_file)}) as sidecar:
        with engine.loaded():
            sidecar.wait(lambda sample: sample.state == "growing", 30, "seen growing")
        engine.wait_idle()
        sidecar.wait(lambda sample: sample.state == "stall-active-ok", 30, "proven alive by a canary")
        ended = canaries(sidecar)
        assert ended.pop("ok") > 0
        assert not any(ended.values()), ended
        frozen = freeze(engine, sidecar, engine.pids("core"), "stall-hang")
    assert_core_hung(frozen, "0", sidecar, loaded=False)


@started_with("api-key")
def test_without_the_api_key_nothing_is_killed_and_a_hang_under_load_is_still_seen(
    engine: VllmProcess, tmp_path: Path
) -> None:
    with SidecarProcess(engine.url, tmp_path) as sidecar:
        sidecar.wait(lambda sample: sample.state == "misconfigured", 30, "without the key")
        begun = time.time()
        time.sleep(QUIET_SEC)
        idle = sidecar.since(begun)
        assert {(sample.status, sample.state) for sample in idle} == {(200, "misconfigured")}, sidecar.told()
        ended = canaries(sidecar)
        assert ended.pop("misconfigured") >= 3
        assert not any(ended.values()), ended
        # The control: without the key an idle engine that hangs cannot be told from one that is idle.
        with stopped(engine, engine.pids("core")):
            begun = time.time()
            time.sleep(QUIET_SEC)
            assert {sample.status for sample in sidecar.since(begun)} == {200}, sidecar.told()
        with engine.loaded():
            sidecar.wait(lambda sample: sample.state == "growing", 30, "seen growing")
            frozen = freeze(engine, sidecar, engine.pids("core"), "stall-hang")
    assert in_order(path(frozen.before), "growing", "misconfigured"), path(frozen.before)
    assert set(path(frozen.before)) <= ALIVE | {"misconfigured"}, path(frozen.before)
    assert "busy, and no usable canary (the last one: misconfigured)" in frozen.verdict["reason"], frozen.verdict
    assert frozen.cores["0"] >= STALL_SEC - ROUNDING_SEC
    assert in_order(path(frozen.after), "growing"), path(frozen.after)
    engine.wait_idle()


# --- plain ------------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_to_correct_in_a_plain_engine(vllm: VllmProcess) -> None:
    """Last, so that the engine which the other files use is started when those above have ended."""
    found = examine(vllm.url, "ok", [PAGE, VLLM, CANARY, NO_PAUSE, STARTED_AT])
    assert (found["engine"], found["version"], found["role"]) == ("vllm", vllm.version(), "agg")
    assert [core["missing_legs"] for core in found["cores"]] == [[]]
