"""Signals: to the guard while it waits, and to the router that it became. A pod that is deleted must not hang."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dns_server import SILENCE, DnsServer
from fleet import Fleet
from guard_run import Guard, ended, wait_until

AS_PID_1 = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--")
AS_PID_1_OF_ROOT = ("unshare", "--pid", "--fork", "--kill-child", "--")

PROMPTLY_SEC = 20
"""Far from the budget of 600 s, and far enough for a busy machine."""


@pytest.fixture(scope="module")
def first_process() -> Iterator[tuple[str, ...]]:
    """Runs what follows as the first process of a process table of its own, as in a container."""
    for wrapper in (AS_PID_1, AS_PID_1_OF_ROOT):
        if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode == 0:
            yield wrapper
            return
    if os.environ.get("CI") and os.geteuid() == 0:
        pytest.fail("root could make no process table in CI")
    pytest.skip("this kernel lets this user make no process table")


@pytest.fixture
def waiting(guard: Guard, fleet: Fleet) -> Guard:
    """A boot that would wait for ten minutes: the decode's sidecar refuses."""
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    decode["127.0.0.4"].sidecar.refuse()
    guard.between(prefill, decode).settings |= {"GUARD_BUDGET_SEC": "600", "GUARD_PARTIAL_SEC": "600"}
    return guard


def until_it_waits(process: subprocess.Popen[str]) -> None:
    """Its first line on stderr says that it has begun."""
    assert process.stderr is not None
    assert process.stderr.readline().startswith("guard: ")


def ends_promptly(process: subprocess.Popen[str], code: int) -> None:
    begun = time.monotonic()
    result = ended(process)
    assert result.code == code, result
    assert "Traceback" not in result.err
    assert time.monotonic() - begun < PROMPTLY_SEC


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_wait_at_once_and_no_router_starts(waiting: Guard, number: int, code: int) -> None:
    process = waiting.start("boot", "--", str(waiting.router))
    until_it_waits(process)
    process.send_signal(number)
    ends_promptly(process, code)
    assert not waiting.calls.exists()
    assert list(waiting.run_dir.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_wait_of_a_containers_first_process(
    waiting: Guard, first_process: tuple[str, ...], number: int, code: int
) -> None:
    process = waiting.start("boot", "--", str(waiting.router), wrapped_in=first_process)
    until_it_waits(process)
    os.kill(child_of(process.pid), number)
    ends_promptly(process, code)  # `unshare` hands on its child's exit code
    assert not waiting.calls.exists()


def test_a_signal_ends_the_wait_while_a_lookup_hangs(
    island_guard: Guard, island_fleet: Fleet, dns: DnsServer, first_process: tuple[str, ...]
) -> None:
    prefill, decode = island_fleet.role("127.0.0.2"), island_fleet.role("127.0.0.4")
    dns.a["prefill.test"] = dns.aaaa["prefill.test"] = SILENCE
    island_guard.between(prefill, decode, ("prefill.test", ""))
    for wrapped_in in ((), first_process):
        dns.asked.clear()
        process = island_guard.start(
            "boot", "--", str(island_guard.router), wrapped_in=wrapped_in, GUARD_BUDGET_SEC="600"
        )
        wait_until(lambda: dns.asked["prefill.test"] > 0)
        os.kill(child_of(process.pid) if wrapped_in else process.pid, signal.SIGTERM)
        ends_promptly(process, 143)


def test_a_signal_at_any_moment_ends_the_boot(waiting: Guard) -> None:
    chance = random.Random(6)
    for _ in range(10):
        process = waiting.start("boot", "--", str(waiting.router))
        time.sleep(chance.uniform(0.0, 0.3))
        process.send_signal(signal.SIGTERM)
        result = ended(process)
        assert result.code in (143, -signal.SIGTERM), result  # the latter: before Python ran a line of ours
        assert "Traceback" not in result.err
        assert not waiting.calls.exists()


# --- the router -----------------------------------------------------------------------------------------------------


@pytest.fixture
def ready_to_go(guard: Guard) -> Guard:
    """In front of engines that nobody is asked about, so that the router starts at once."""
    guard.settings |= {
        "GUARD_PREFILL": "127.0.0.2:1",
        "GUARD_DECODE": "127.0.0.4:1",
        "GUARD_PREFILL_WATCHER_PORT": "0",
        "GUARD_DECODE_WATCHER_PORT": "0",
    }
    return guard


SERVES = """\
#!/bin/sh
trap 'exit 41' TERM
echo "$$" > "$ROUTER_CALLS.new" && mv "$ROUTER_CALLS.new" "$ROUTER_CALLS"
while :; do sleep 0.05; done
"""


def test_the_router_takes_over_the_pid_gets_the_signals_and_gives_the_exit_code(ready_to_go: Guard) -> None:
    ready_to_go.router.write_text(SERVES)
    process = ready_to_go.start("boot", "--", str(ready_to_go.router))
    wait_until(ready_to_go.calls.exists)
    assert int(ready_to_go.calls.read_text()) == process.pid
    process.send_signal(signal.SIGTERM)
    ends_promptly(process, 41)


def test_the_router_of_a_container_is_its_first_process(ready_to_go: Guard, first_process: tuple[str, ...]) -> None:
    ready_to_go.router.write_text(SERVES)
    process = ready_to_go.start("boot", "--", str(ready_to_go.router), wrapped_in=first_process)
    wait_until(ready_to_go.calls.exists)
    assert int(ready_to_go.calls.read_text()) == 1
    os.kill(child_of(process.pid), signal.SIGTERM)
    ends_promptly(process, 41)


def test_a_router_killed_by_a_signal_looks_so_from_outside(ready_to_go: Guard) -> None:
    assert ready_to_go.boot("/bin/sh", "-c", "kill -9 $$").code == -signal.SIGKILL


# Without a child: while a shell starts one, it has all signals blocked.
STATE = """\
#!/bin/sh
while read -r line; do
    case $line in SigIgn:*|SigBlk:*|Threads:*) printf '%s\\n' "$line" ;; esac
done < /proc/$$/status > "$ROUTER_CALLS"
ls /proc/$$/fd >> "$ROUTER_CALLS"
"""


def signals_in(state: str, field: str) -> set[int]:
    mask = int(next(line.split()[1] for line in state.splitlines() if line.startswith(f"{field}:")), 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def state_of_a_program(tmp_path: Path, command: list[str]) -> str:
    """What STATE says when it is started so."""
    calls = tmp_path / "calls"
    subprocess.run(
        command, check=True, env={"PATH": os.environ["PATH"], "ROUTER_CALLS": str(calls)}, stdin=subprocess.DEVNULL
    )
    return calls.read_text()


def ignored_by_whoever_runs_this() -> set[int]:
    """What the guard inherits here: a shell ignores some in its background jobs. Popen gives Python's own back."""
    return signals_in(Path("/proc/self/status").read_text(), "SigIgn") - {signal.SIGPIPE, signal.SIGXFSZ}


def test_the_router_starts_with_the_signals_and_files_of_any_other_program(ready_to_go: Guard) -> None:
    ready_to_go.router.write_text(STATE)
    ready_to_go.booted()
    state = ready_to_go.calls.read_text()
    assert signals_in(state, "SigIgn") == ignored_by_whoever_runs_this()
    assert signals_in(state, "SigBlk") == set()
    assert "Threads:\t1\n" in state
    assert {line for line in state.splitlines() if line.isdigit() and int(line) < 10} == {"0", "1", "2"}
    # What the control shows is what the guard must undo: Python ignores these, and an exec would hand that on.
    program = f"import os; os.execv({str(ready_to_go.router)!r}, ['router'])"
    untreated = state_of_a_program(ready_to_go.directory, [sys.executable, "-I", "-S", "-c", program])
    assert {signal.SIGPIPE, signal.SIGXFSZ} <= signals_in(untreated, "SigIgn")


def test_what_the_container_ignored_the_router_ignores(ready_to_go: Guard) -> None:
    ready_to_go.router.write_text(STATE)
    nohup = ["/bin/sh", "-c", 'trap "" HUP INT; exec "$@"', "sh"]
    result = ready_to_go.run("boot", "--", str(ready_to_go.router), wrapped_in=nohup)
    assert result.code == 0, result
    ignored = {signal.SIGHUP, signal.SIGINT} | ignored_by_whoever_runs_this()
    assert signals_in(ready_to_go.calls.read_text(), "SigIgn") == ignored


def test_the_router_keeps_the_environment_and_the_working_directory(ready_to_go: Guard) -> None:
    ready_to_go.router.write_text('#!/bin/sh\n{ env; pwd; } > "$ROUTER_CALLS"\n')
    elsewhere = ready_to_go.directory / "else where"
    elsewhere.mkdir()
    there = ["/bin/sh", "-c", f'cd "{elsewhere}" && exec "$@"', "sh"]
    odd = {"HF_TOKEN": "a b\nc", "EMPTY": "", "RAW": "\udcff", "LC_ALL": "C"}
    result = ready_to_go.run("boot", "--", str(ready_to_go.router), wrapped_in=there, **odd)
    assert result.code == 0, result
    said = ready_to_go.calls.read_bytes().decode(errors="surrogateescape")
    for name, value in {**odd, **ready_to_go.settings}.items():
        assert f"{name}={value}\n" in said
    assert said.endswith(f"{elsewhere}\n")


def test_a_signal_between_wait_and_router_is_never_lost(ready_to_go: Guard) -> None:
    ready_to_go.router.write_text(SERVES)
    chance = random.Random(7)
    for _ in range(10):
        ready_to_go.calls.unlink(missing_ok=True)
        process = ready_to_go.start("boot", "--", str(ready_to_go.router))
        time.sleep(chance.uniform(0.03, 0.3))
        process.send_signal(signal.SIGTERM)
        # The guard's own end, the router's, or the system's for whoever had no handler yet.
        assert ended(process).code in (143, 41, -signal.SIGTERM)


def test_boot_says_what_it_waits_for_and_does_not_repeat_it_each_round(waiting: Guard) -> None:
    result = waiting.boot(GUARD_BUDGET_SEC="4")
    assert result.out == ""
    lines = result.err.splitlines()
    assert all(line.startswith("guard: ") for line in lines)
    waits = [line for line in lines if "127.0.0.4" in line]
    assert len(lines) == len(set(lines))
    assert 1 <= len(waits) <= 4


def child_of(pid: int) -> int:
    """The one child of `unshare --fork`."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: bool(children.read_text()))
    return int(children.read_text().split()[0])
