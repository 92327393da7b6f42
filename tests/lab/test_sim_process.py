"""The processes of a simulated engine: titles, ends, restarts, the port, and that no orphan survives."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.lab.conftest import SimFactory
from tests.lab.sim_asking import ask, canary, eventually, hangs, page, value

from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.process import SimError, SimProcess


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody reaps does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    return False


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")


def pids(engine: SimProcess) -> list[int]:
    return [engine.supervisor_pid, engine.pid, *(rank.pid for rank in engine.ranks)]


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def refused(engine: SimProcess) -> bool:
    try:
        ask(engine, "/health", timeout=1.0)
    except ConnectionRefusedError:
        return True
    except (ConnectionError, TimeoutError):
        return False
    return False


@pytest.mark.parametrize(
    ("engine", "dp", "titles"),
    [
        ("vllm", 1, ["VLLM::EngineCore"]),
        ("vllm", 2, ["VLLM::EngineCore_DP0", "VLLM::EngineCore_DP1"]),
        ("sglang", 1, ["sglang::scheduler"]),
        ("sglang", 2, ["sglang::scheduler_DP0", "sglang::scheduler_DP1"]),
        ("trtllm", 1, ["mpi4py.futures.server"]),
    ],
)
def test_ranks_carry_the_titles_of_the_real_ones_and_are_children_of_the_front_end(
    warm: SimFactory, engine: str, dp: int, titles: list[str]
) -> None:
    started = warm(engine, dp=dp, step_ms=5) if dp > 1 else warm(engine, step_ms=5)
    assert [title(rank.pid) for rank in started.ranks] == titles
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert children == [str(rank.pid) for rank in started.ranks]
    assert title(started.supervisor_pid) == "enginewatch-sim"


def test_processes_are_small(warm: SimFactory) -> None:
    for engine in ("vllm", "sglang", "trtllm"):
        started = warm(engine, step_ms=5)
        assert resident_kib(started.pid) < 48 * 1024
        assert resident_kib(started.rank().pid) < 20 * 1024


def test_an_idle_engine_uses_next_to_no_processor(warm: SimFactory) -> None:
    def ticks(engine: SimProcess) -> int:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids(engine)]
        return sum(int(each[11]) + int(each[12]) for each in fields)

    engines = [warm("vllm", step_ms=5), warm("sglang", step_ms=5), warm("trtllm", step_ms=5)]
    before = [ticks(engine) for engine in engines]
    time.sleep(1.0)
    after = [ticks(engine) for engine in engines]
    assert all(new - old <= 3 for new, old in zip(after, before, strict=True))  # hundredths of a second


@pytest.mark.parametrize("victim", ["supervisor", "front end"])
def test_no_orphan_survives_although_its_rank_is_stopped(sim: SimFactory, victim: str) -> None:
    engine = sim("vllm", dp=2)
    engine.stop(0)
    everyone = pids(engine)
    os.kill(engine.supervisor_pid if victim == "supervisor" else engine.pid, signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in everyone))


def test_close_ends_everything_although_a_rank_is_stopped(sim: SimFactory) -> None:
    engine = sim("sglang", dp=2)
    everyone = pids(engine)
    engine.stop(1)
    os.kill(engine.rank(0).pid, signal.SIGSTOP)  # behind its back
    engine.close()
    assert not any(alive(pid) for pid in everyone)


def test_an_engine_ends_with_the_process_that_started_it() -> None:
    starter = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os\n"
            "from enginewatch.lab.sim.process import SimProcess\n"
            "engine = SimProcess('vllm').start()\n"
            "engine.stop()\n"
            "print(engine.supervisor_pid, engine.pid, engine.rank().pid, flush=True)\n"
            "os._exit(0)\n",
        ],
        stdout=subprocess.PIPE,
        check=True,
    )
    everyone = [int(pid) for pid in starter.stdout.split()]
    assert len(everyone) == 3
    eventually(lambda: not any(alive(pid) for pid in everyone))


def test_sigterm_to_the_supervisor_ends_a_loaded_engine_in_good_order(sim: SimFactory) -> None:
    engine = sim("vllm", step_ms=5)
    engine.load(4)
    everyone = pids(engine)
    os.kill(engine.supervisor_pid, signal.SIGTERM)
    eventually(lambda: engine.exit_code() == 0)
    assert not any(alive(pid) for pid in everyone)


def test_an_in_place_restart_is_another_process_on_the_same_port(sim: SimFactory) -> None:
    engine = sim("vllm", step_ms=5)
    canary(engine)
    url, before, old = engine.url, page(engine), pids(engine)
    engine.restart()
    engine.wait_serving(2)
    after = page(engine)
    assert engine.url == url
    assert pids(engine)[0] == old[0]
    assert not set(pids(engine)[1:]) & set(old)
    assert (value(after, "process_start_time_seconds") or 0) > (value(before, "process_start_time_seconds") or 0)
    assert (value(before, "vllm:generation_tokens_total"), value(after, "vllm:generation_tokens_total")) == (1, 0)
    assert engine.state()["restarts"] == 1
    assert not any(alive(pid) for pid in old[1:])


def test_a_restart_replaces_a_stopped_rank(sim: SimFactory) -> None:
    engine = sim("sglang", step_ms=5)
    old = engine.rank().pid
    engine.stop()
    engine.restart()
    engine.wait_serving(2)
    assert canary(engine).status == 200
    assert not alive(old)


def test_a_crashed_engine_refuses_while_it_is_down_and_while_it_loads(sim: SimFactory) -> None:
    engine = sim("vllm", step_ms=5)
    engine.crash(0.3, load_sec=0.5)
    eventually(lambda: refused(engine))
    began = time.monotonic()
    while engine.starts == 1:
        assert refused(engine) or engine.starts > 1 or time.monotonic() - began > 0.7
    assert time.monotonic() - began >= 0.6
    assert canary(engine).status == 200


def test_a_loading_engine_refuses_connections() -> None:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    with contextlib.closing(SimProcess("vllm", port=port, load_sec=1.0)) as engine:
        engine.start(wait=False)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1.0)
        engine.wait_serving(1)
        assert value(page(engine), "process_start_time_seconds") is not None


def test_a_dead_vllm_core_is_a_503_and_then_nobody(sim: SimFactory) -> None:
    engine = sim("vllm", step_ms=5, core_death_exit_sec=1.5)
    os.kill(engine.rank().pid, signal.SIGKILL)
    eventually(lambda: ask(engine, "/health").status == 503, within=1.0)
    assert ask(engine, "/metrics").status == 200
    assert canary(engine).status == 500
    eventually(lambda: refused(engine))
    eventually(lambda: engine.exit_code() == 1)


def test_requests_on_a_core_that_dies_get_an_error(sim: SimFactory) -> None:
    engine = sim("vllm", step_ms=5)
    engine.stop()
    answers: list[int] = []
    client = threading.Thread(target=lambda: answers.append(canary(engine).status))
    client.start()
    eventually(lambda: engine.state()["open_http_requests"] == 1)
    os.kill(engine.rank().pid, signal.SIGKILL)
    client.join()
    assert answers == [500]


def test_a_dead_sglang_scheduler_ends_the_whole_engine(sim: SimFactory) -> None:
    engine = sim("sglang", dp=2, step_ms=5)
    everyone = pids(engine)
    os.kill(engine.rank(1).pid, signal.SIGKILL)
    eventually(lambda: not any(alive(pid) for pid in everyone))


def test_an_engine_that_ended_comes_back_when_told_to_restart(sim: SimFactory) -> None:
    engine = sim("vllm", restart=True, core_death_exit_sec=0.0)
    os.kill(engine.rank().pid, signal.SIGKILL)
    engine.wait_serving(2)
    assert canary(engine).status == 200


def test_a_port_in_use_is_one_sentence(warm: SimFactory) -> None:
    other = warm("vllm", step_ms=5)
    found = subprocess.run(
        [sys.executable, "-m", "enginewatch.lab.sim", "vllm", "--port", str(other.port)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.count("\n") == 1
    assert str(other.port) in found.stderr


def test_a_start_that_fails_is_told_and_leaves_nothing(warm: SimFactory) -> None:
    other = warm("vllm", step_ms=5)
    with pytest.raises(SimError, match="ended with exit code 1"):
        SimProcess("vllm", port=other.port).start()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": "tgi"}, "engine"),
        ({"role": "both"}, "role"),
        ({"dp": 0}, "dp"),
        ({"step_ms": -1.0}, "step-ms"),
        ({"engine": "trtllm", "dp": 2}, "dp is 2"),
        ({"engine": "trtllm", "api_key": "secret"}, "api-key"),
        ({"engine": "trtllm", "iter_stats_interval": 0}, "iter-stats-interval"),
        ({"engine": "trtllm", "hang_detection_sec": -1.0}, "hang-detection-sec"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SimOptions(**({"engine": "vllm"} | options))  # type: ignore[arg-type]


def test_clients_that_leave_leave_nothing_behind(warm: SimFactory) -> None:
    engine = warm("vllm", step_ms=5)
    engine.stop()
    for _ in range(20):
        assert hangs(lambda: canary(engine, timeout=0.02))
    eventually(lambda: engine.state()["open_http_requests"] == 0)
    assert engine.state()["ranks"][0]["open_requests"] == 0
    engine.cont()
    assert canary(engine).status == 200
