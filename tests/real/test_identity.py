"""Which process is this real vLLM? What /engine and the sidecar's log say, and what a router's guard makes of it.

Engines are killed and started again in place, as a kubelet does it, and each time that takes a minute. So each story is
lived through once and written down; the tests look at it from several sides.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.real.engine import ONE_CORE, VllmProcess, get, started_at
from tests.real.sidecar import STALL_SEC, SidecarProcess, unix

pytestmark = [pytest.mark.real, pytest.mark.timeout(60, func_only=True)]

SLOW_SEC = 30.0
"""What a wait may take on a busy machine; no claim here is about time."""

END_SEC = 90.0
"""How long vLLM may take to end after one of its processes has died (measured: 3 to 13 s)."""

NO_CANARY = {"active_probe_enabled": False}
"""Nobody asks the engine for anything: its counters stay where they are."""

COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count")


@dataclass(frozen=True)
class Look:
    """One look at /engine, and right after it one at the engine's own page."""

    at: float
    """Unix seconds when /engine had answered."""
    status: int
    said: dict[str, Any]
    serves: bool
    """Whether the engine served its page. Where it did not, it had not served it when /engine answered either."""


@contextlib.contextmanager
def looking(sidecar: SidecarProcess, engine: VllmProcess) -> Iterator[list[Look]]:
    """Looks, several times a second, throughout the block and once after it."""
    looks: list[Look] = []
    over = threading.Event()

    def look() -> None:
        last = False
        while not last:
            last = over.wait(0.1)
            status, body = get(f"{sidecar.url}/engine", timeout=SLOW_SEC)
            at = time.time()
            try:
                serves = get(f"{engine.url}/metrics", timeout=SLOW_SEC)[0] == 200
            except OSError:
                serves = False
            looks.append(Look(at, status, json.loads(body), serves))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        watching = pool.submit(look)
        try:
            yield looks
        finally:
            over.set()
            watching.result()


def identified(sidecar: SidecarProcess, *, other_than: str = "") -> dict[str, Any]:
    """What /engine says once it knows the engine, or another one than a former one.

    Raises:
        AssertionError: Not within `SLOW_SEC`.
    """
    deadline = time.monotonic() + SLOW_SEC
    while True:
        status, body = get(f"{sidecar.url}/engine")
        said: dict[str, Any] = json.loads(body)
        if status == 200 and said["engine_id"] != other_than:
            return said
        assert time.monotonic() < deadline, f"not identified anew within {SLOW_SEC} s: {status} {said}"
        time.sleep(0.1)


def page_start(engine: VllmProcess) -> float:
    return engine.metric("process_start_time_seconds")


def counters(engine: VllmProcess) -> dict[str, float]:
    return {name: engine.metric(name) for name in COUNTERS}


def ids(looks: list[Look]) -> list[str]:
    """The ids in the order in which they were seen, each once per run of its kind."""
    return [engine_id for engine_id, _ in itertools.groupby(look.said.get("engine_id", "none") for look in looks)]


def logged(sidecar: SidecarProcess, words: str) -> list[dict[str, Any]]:
    """The lines of the sidecar's log that hold these words."""
    return [line for line in map(json.loads, sidecar.log) if words in line["message"]]


# --- a router's guard -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """One `guard live`, and right after it one look at the engine's own /health."""

    code: int
    line: str
    healthy: bool
    """Whether /health was 200. Where it was not, it had not been when the guard ended either."""


class Router:
    """The guard's view of a router whose only prefill and only decode engine is this one."""

    def __init__(self, engine: VllmProcess, sidecar_port: int, directory: Path) -> None:
        self._engine = engine
        self._directory = directory
        own = {
            "GUARD_PREFILL": f"127.0.0.1:{engine.port}",
            "GUARD_DECODE": f"127.0.0.1:{engine.port}",
            "GUARD_PREFILL_WATCHER_PORT": str(sidecar_port),
            "GUARD_DECODE_WATCHER_PORT": str(sidecar_port),
            "GUARD_ROUTER": "vllm",
            "GUARD_RUN_DIR": str(directory),
            # A probe's deadline would be the machine's business here: it starts an interpreter beside a loading engine.
            "GUARD_DEADLINE_SEC": str(SLOW_SEC),
        }
        inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
        self._environment: Mapping[str, str] = inherited | own

    def _guard(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "enginewatch", "guard", *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * SLOW_SEC,
        )

    def boot(self) -> list[str]:
        """The arguments with which the router is started."""
        done = self._guard("boot", "--", sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))")
        assert done.returncode == 0, done
        arguments: list[str] = json.loads(done.stdout)
        return arguments

    def snapshot(self, role: str) -> list[str]:
        return (self._directory / f"{role}-ips").read_text().splitlines()

    def live(self) -> Tick:
        done = self._guard("live")
        assert done.stderr == ""
        try:
            healthy = get(f"{self._engine.url}/health", timeout=SLOW_SEC)[0] == 200
        except OSError:
            healthy = False
        return Tick(done.returncode, done.stdout, healthy)

    @contextlib.contextmanager
    def ticking(self) -> Iterator[list[Tick]]:
        """Ticks, one after the other, throughout the block."""
        ticks: list[Tick] = []
        over = threading.Event()

        def tick() -> None:
            while not over.wait(1):
                ticks.append(self.live())

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            ticking = pool.submit(tick)
            try:
                yield ticks
            finally:
                over.set()
                ticking.result()


# --- one API server: the process's own start ------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """One process of the engine, by three witnesses."""

    engine: dict[str, Any]
    """What /engine said."""
    page_sec: float
    """process_start_time_seconds on its page."""
    kernel_sec: float
    """When the kernel started it, in Unix seconds."""


@dataclass(frozen=True)
class InPlace:
    """An engine that was killed and started again in its place."""

    old: Process
    watched_anew: dict[str, Any]
    """/engine of a second sidecar in the place of the first, before the engine died."""
    looks: list[Look]
    """From before its death until after the new one was known."""
    died_at: float
    new: Process
    router: list[str]
    """What the guard started the router with, at first."""
    snapshots: dict[str, list[str]]
    healthy: Tick
    """While the first sidecar watched the first process."""
    sidecar_restarted: Tick
    """While the second one did."""
    ticks: list[Tick]
    """From before the engine's death until after the new one was known."""
    at_last: Tick


def process(engine: VllmProcess, said: dict[str, Any]) -> Process:
    return Process(said, page_start(engine), started_at(engine.pid))


@contextlib.contextmanager
def left_ready(engine: VllmProcess) -> Iterator[None]:
    """Others use this engine after us, also where something fails half-way."""
    try:
        yield
    except BaseException:
        engine.restart()
        engine.wait_ready()
        raise


@pytest.fixture(scope="module")
def in_place(vllm: VllmProcess, tmp_path_factory: pytest.TempPathFactory) -> InPlace:
    directory = tmp_path_factory.mktemp("in-place")
    with SidecarProcess(vllm.url, directory / "first") as sidecar:
        old = process(vllm, identified(sidecar))
        router = Router(vllm, sidecar.port, directory / "router")
        started_with = router.boot()
        snapshots = {role: router.snapshot(role) for role in ("prefill", "decode")}
        healthy = router.live()
    second = SidecarProcess(vllm.url, directory / "second", port=sidecar.port)
    with second as sidecar, left_ready(vllm):
        watched_anew = identified(sidecar)
        sidecar_restarted = router.live()
        with looking(sidecar, vllm) as looks, router.ticking() as ticks:
            vllm.kill("api-server")
            vllm.wait_ended(END_SEC)
            died_at = time.time()
            sidecar.wait(lambda sample: sample.state == "restarting", SLOW_SEC, "seen gone")
            vllm.restart()
            vllm.wait_ready()
            said = identified(sidecar, other_than=old.engine["engine_id"])
        return InPlace(
            old=old,
            watched_anew=watched_anew,
            looks=looks,
            died_at=died_at,
            new=process(vllm, said),
            router=started_with,
            snapshots=snapshots,
            healthy=healthy,
            sidecar_restarted=sidecar_restarted,
            ticks=ticks,
            at_last=router.live(),
        )


@pytest.mark.parametrize("which", ["old", "new"])
def test_the_id_is_the_start_on_the_page_and_that_is_when_the_kernel_started_the_process(
    in_place: InPlace, which: str
) -> None:
    it: Process = getattr(in_place, which)
    assert it.engine["source"] == "process_start_time"
    assert re.fullmatch(r"pst-\d+\.\d\d", it.engine["engine_id"])
    assert it.engine["engine_id"] == f"pst-{it.page_sec:.2f}"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\dZ", it.engine["started_at"])
    assert abs(unix(it.engine["started_at"]) - it.page_sec) <= 0.01
    assert abs(unix(it.engine["started_at"]) - it.kernel_sec) < 2


def test_a_sidecar_that_was_restarted_says_the_same_of_the_same_process(in_place: InPlace) -> None:
    first, second = in_place.old.engine, in_place.watched_anew
    same = ("engine_id", "started_at", "source")
    assert [second[key] for key in same] == [first[key] for key in same]
    assert (first["restarts"], second["restarts"]) == (0, 0)
    assert unix(second["watcher_started_at"]) > unix(first["watcher_started_at"])


def test_the_old_id_stands_until_the_new_process_serves_its_page(in_place: InPlace) -> None:
    loading = [look for look in in_place.looks if look.at > in_place.died_at and not look.serves]
    assert loading[-1].at - loading[0].at > 10, "too short for a load: what was seen of it?"
    assert {look.status for look in in_place.looks} == {200}
    assert [look.said for look in loading] == [in_place.watched_anew] * len(loading)
    assert ids(in_place.looks) == [in_place.old.engine["engine_id"], in_place.new.engine["engine_id"]]


def test_the_new_process_is_one_restart_of_another_one(in_place: InPlace) -> None:
    old, new = in_place.watched_anew, in_place.new.engine
    assert new["engine_id"] != old["engine_id"]
    assert new["restarts"] == old["restarts"] + 1 == 1
    assert unix(new["started_at"]) > unix(old["started_at"])
    assert new["watcher_started_at"] == old["watcher_started_at"]


def test_the_guard_starts_the_router_with_the_engine_and_writes_down_who_it_is(
    vllm: VllmProcess, in_place: InPlace
) -> None:
    assert in_place.router == ["--prefill", vllm.url, "--decode", vllm.url]
    old = in_place.old.engine
    line = f"127.0.0.1|0|{old['watcher_started_at']}|{old['engine_id']}"
    assert in_place.snapshots == {"prefill": [line], "decode": [line]}


def test_the_guard_does_not_fire_while_only_the_sidecar_is_another_one(in_place: InPlace) -> None:
    assert (in_place.healthy.code, in_place.healthy.healthy) == (0, True), in_place.healthy
    assert (in_place.sidecar_restarted.code, in_place.sidecar_restarted.healthy) == (0, True)


def test_the_guard_fires_once_the_new_engine_is_healthy_and_not_while_it_loads(in_place: InPlace) -> None:
    loading = [tick for tick in in_place.ticks if not tick.healthy]
    assert len(loading) > 5, in_place.ticks
    assert {tick.code for tick in loading} == {0}, in_place.ticks
    assert all(tick.healthy for tick in (*in_place.ticks, in_place.at_last) if tick.code == 1)
    assert in_place.at_last.code == 1, in_place.at_last
    for name in ("127.0.0.1", in_place.old.engine["engine_id"], in_place.new.engine["engine_id"]):
        assert name in in_place.at_last.line


# --- two API servers: nothing on the page names the process ----------------------------------------------------------


@dataclass(frozen=True)
class Idle:
    """An engine with two API servers, of which nobody ever asked anything: killed and started again in its place."""

    old: dict[str, Any]
    """What /engine said."""
    old_counters: dict[str, float]
    exit_code: int
    """With which it ended after one of its two API servers was killed."""
    looks: list[Look]
    new: dict[str, Any]
    new_counters: dict[str, float]
    log: list[dict[str, Any]]
    """The sidecar's log lines about the source of the identity."""


@dataclass(frozen=True)
class Kept:
    """The same engine with a multiprocess directory that outlives its processes, killed at work."""

    old: dict[str, Any]
    old_counters: dict[str, float]
    old_running: float
    new: dict[str, Any]
    new_counters: dict[str, float]
    new_running: float
    later: dict[str, Any]
    """/engine some polls later."""
    story: list[tuple[int, str]]
    """/healthz from the new process's first page until then, each answer once per run of its kind."""


@dataclass(frozen=True)
class TwoServers:
    idle: Idle
    kept: Kept


@pytest.fixture(scope="module")
def two_servers(vllm_venv: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoServers:
    directory = tmp_path_factory.mktemp("two-servers")
    (kept := directory / "multiprocess").mkdir()
    args = (*ONE_CORE, "--api-server-count", "2")
    with (
        VllmProcess.start(vllm_venv, tiny_model, directory / "vllm.log", args, untouched=True) as engine,
        SidecarProcess(engine.url, directory / "sidecar", NO_CANARY) as sidecar,
    ):
        idle = _replace_idle(engine, sidecar, kept)
        return TwoServers(idle, _replace_busy(engine, sidecar))


def _replace_idle(engine: VllmProcess, sidecar: SidecarProcess, kept: Path) -> Idle:
    old, old_counters = identified(sidecar), counters(engine)
    with looking(sidecar, engine) as looks:
        engine.kill("api-server", 0)
        exit_code = engine.wait_ended(END_SEC)
        # The directory begins empty, so this process's page is that of one which made its own.
        engine.restart({"PROMETHEUS_MULTIPROC_DIR": str(kept)})
        engine.wait_ready(untouched=True)
        new = identified(sidecar, other_than=old["engine_id"])
    log = [line for line in map(json.loads, sidecar.log) if "observed" in str(line)]
    return Idle(old, old_counters, exit_code, looks, new, counters(engine), log)


def _replace_busy(engine: VllmProcess, sidecar: SidecarProcess) -> Kept:
    old = sidecar.json("/engine")
    with engine.loaded():
        sidecar.wait(lambda sample: sample.state == "growing", SLOW_SEC, "seen growing")
        old_counters, old_running = counters(engine), engine.metric("vllm:num_requests_running")
        engine.restart()
    sidecar.wait(lambda sample: sample.state == "restarting", SLOW_SEC, "seen gone")
    engine.wait_ready(untouched=True)
    served_at = time.time()
    new_counters, new_running = counters(engine), engine.metric("vllm:num_requests_running")
    new = identified(sidecar, other_than=old["engine_id"])
    time.sleep(3 * STALL_SEC)
    story = [key for key, _ in itertools.groupby((look.status, look.state) for look in sidecar.since(served_at))]
    return Kept(old, old_counters, old_running, new, new_counters, new_running, sidecar.json("/engine"), story)


def test_behind_two_api_servers_the_identity_is_observed_and_a_warning_says_how_to_get_a_better_one(
    two_servers: TwoServers,
) -> None:
    old = two_servers.idle.old
    assert (old["source"], old["restarts"]) == ("observed", 0)
    assert re.fullmatch(r"obs-\d+-1", old["engine_id"])
    assert abs(unix(old["started_at"]) - unix(old["watcher_started_at"])) < SLOW_SEC, "the first sight of it"
    warnings = [line for line in two_servers.idle.log if line["level"] == "warning"]
    assert len(warnings) == 1, two_servers.idle.log
    assert "--api-server-count 1" in str(warnings[0]), warnings


def test_an_api_server_of_two_that_dies_ends_the_engine(two_servers: TwoServers) -> None:
    """So an engine with another set of API servers is always another engine."""
    assert two_servers.idle.exit_code == 1


def test_an_idle_engine_behind_two_api_servers_that_dies_and_comes_back_is_another_one(two_servers: TwoServers) -> None:
    idle = two_servers.idle
    # The control: by its counters it is the same one.
    assert set(idle.old_counters.values()) == {0.0}
    assert idle.new_counters == idle.old_counters
    assert idle.new["source"] == "observed"
    assert idle.new["engine_id"] != idle.old["engine_id"]
    assert idle.new["restarts"] == 1


def test_its_old_id_stands_until_it_serves_its_page_again(two_servers: TwoServers) -> None:
    idle = two_servers.idle
    assert {look.status for look in idle.looks} == {200}
    silent = [look for look in idle.looks if not look.serves]
    assert len(silent) > 10, "it was never seen away"
    assert [look.said for look in silent] == [idle.old] * len(silent)
    assert ids(idle.looks) == [idle.old["engine_id"], idle.new["engine_id"]]


def test_the_values_of_a_dead_process_in_a_directory_that_outlives_it_do_not_hide_the_new_one(
    two_servers: TwoServers,
) -> None:
    kept = two_servers.kept
    # The control: its page goes on where that of the dead one ended, requests that run included.
    assert all(kept.new_counters[name] >= value > 0 for name, value in kept.old_counters.items()), kept
    assert kept.new_running == kept.old_running > 0
    assert kept.new["source"] == "observed"
    assert kept.new["engine_id"] != kept.old["engine_id"]
    assert (kept.old["restarts"], kept.new["restarts"]) == (1, 2)
    assert kept.later == kept.new


def test_requests_of_a_dead_process_are_no_hang_of_the_new_one(two_servers: TwoServers) -> None:
    """With canaries off nothing ever makes it write gauges of its own."""
    kept = two_servers.kept
    assert kept.new_running > 0
    assert {status for status, _ in kept.story} == {200}, kept.story
    assert kept.story[-1][1] == "idle", kept.story
