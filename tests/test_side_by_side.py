"""The comparison with other programs: that it shows what is so, on simulated engines, and that its controls control."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import health_endpoint
import pytest
from summing_watcher import Config, Judge, Sums, sums

import probe_load
import run
import side_by_side
from beside import sample as names
from beside import scenarios, told
from beside.program import OUR_NAME, Program, ProgramError, Running, other
from beside.sample import Sample
from beside.setting import FULL, QUICK

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data"
HANGS = ("load", "dp", "series")


def compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "bench/side_by_side.py", "--engine", "sim", "--quick", "--rounds", "1", *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


# --- a comparison ---------------------------------------------------------------------------------------------------


@dataclass
class Compared:
    done: subprocess.CompletedProcess[str]
    found: dict[str, Any]

    def after(self, scenario: str, program: str) -> float | None:
        [sample] = [
            sample
            for sample in self.found["samples"]
            if (names.SHORT[sample["scenario"]], sample["program"]) == (scenario, program)
        ]
        assert not sample["early"], sample
        seconds: float | None = sample["figures"][names.DETECTED]
        return seconds


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """One comparison for all claims about it; the scenarios run at once, each on an engine of its own."""
    file = tmp_path_factory.mktemp("compared") / "found.json"
    again = f"again={shlex.quote(sys.executable)} bench/rivals/summing_watcher.py"
    done = compare("--other", again, "--only", "load,dp,series,401", "--json", file)
    assert file.exists(), done.stderr
    return Compared(done, json.loads(file.read_text()))


@pytest.mark.parametrize("scenario", HANGS)
def test_ours_sees_every_hang(compared: Compared, scenario: str) -> None:
    assert compared.after(scenario, OUR_NAME) is not None, compared.done.stdout


def test_ours_takes_no_401_for_a_hang(compared: Compared) -> None:
    assert compared.after("401", OUR_NAME) is None


@pytest.mark.parametrize("scenario", [*HANGS, "401"])
def test_the_engines_own_health_endpoint_sees_no_hang(compared: Compared, scenario: str) -> None:
    assert compared.after(scenario, told.HEALTH_ENDPOINT) is None


def test_a_watcher_that_adds_up_sees_the_plain_hang(compared: Compared) -> None:
    """Without this one, the next would be true of a program that sees nothing at all."""
    assert compared.after("load", told.SUMMING) is not None


@pytest.mark.parametrize("scenario", ["dp", "series"])
def test_a_watcher_that_adds_up_misses_a_hang_behind_others(compared: Compared, scenario: str) -> None:
    assert compared.after(scenario, told.SUMMING) is None


def test_a_watcher_that_takes_401_for_a_failure_kills_a_healthy_engine(compared: Compared) -> None:
    assert compared.after("401", told.SUMMING) is not None


def test_another_program_is_shown_as_what_it_is(compared: Compared) -> None:
    """The same rival under another name: what the harness says of it comes from the program, not from the name."""
    assert compared.after("load", "again") is not None
    assert compared.after("dp", "again") is None
    assert compared.after("401", "again") is not None


def test_a_comparison_tells_people_who_was_right_and_how_much_slower(compared: Compared) -> None:
    assert compared.done.returncode == 0, compared.done.stdout + compared.done.stderr
    assert re.search(r"^503, s +summing +1( +\d+\.\d+){4}$", compared.done.stdout, re.MULTILINE), compared.done.stdout
    assert re.search(r"^one core of two frozen +1 of 1 +0 of 1 +0 of 1 +0 of 1$", compared.done.stdout, re.MULTILINE)
    assert compared.found["broken_controls"] == []
    assert {figure["what"] for figure in compared.found["figures"]} >= {
        "frozen under load: to 503, latest",
        "401 on the canary: rounds in which the 503 was wrong",
    }


def test_what_programs_cost_is_measured_of_each(tmp_path: Path) -> None:
    done = compare("--only", "cost,latency,page", "--no-controls", "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["samples"]
    ours = {
        name: value for sample in found if sample["program"] == OUR_NAME for name, value in sample["figures"].items()
    }
    assert set(ours) == {
        "CPU, engine at work, % of a core",
        "CPU, engine idle, % of a core",
        "resident, MiB",
        "resident at its highest, MiB",
        "p50, ms",
        "p99, ms",
        "CPU per poll, ms",
        "/healthz p50, ms",
        "/healthz p99, ms",
    }
    assert all(value > 0 for value in ours.values())


# --- programs that are of no use ------------------------------------------------------------------------------------


def python(code: str) -> Program:
    return Program("of-no-use", (sys.executable, "-c", code))


def started(program: Program, start_sec: float) -> str:
    with pytest.raises(ProgramError) as raised, Running(program, "http://127.0.0.1:1", "{}", start_sec=start_sec):
        pytest.fail("it was taken for usable")
    return str(raised.value)


def test_a_program_that_is_not_there_is_one_sentence_before_anything_else() -> None:
    done = compare("--other", "go=/nonexistent/watcher --flag")
    assert done.returncode == 2
    assert done.stderr == "go (/nonexistent/watcher --flag) cannot be started: No such file or directory\n"


def test_a_program_that_ends_is_quoted() -> None:
    said = started(python("raise SystemExit('no config')"), 20)
    assert "ended with exit code 1 before it answered; its last line: no config" in said


def test_a_program_that_never_answers_is_named() -> None:
    said = started(python("import time; print('I am busy', flush=True); time.sleep(60)"), 0.5)
    assert "did not answer GET /healthz with 200 or 503 on the address in LISTEN within 0.5 s" in said
    assert said.endswith("its last line: I am busy")


def test_two_programs_of_one_name_are_told_apart_by_their_caller() -> None:
    done = compare("--other", "/bin/true", "--other", "true=/bin/false")
    assert (done.returncode, done.stderr) == (
        2,
        "two programs are called true; name them apart: --other NAME=COMMAND\n",
    )


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("go=./watcher --flag 'a b'", Program("go", ("./watcher", "--flag", "a b"))),
        ("/usr/bin/watcher --flag", Program("watcher", ("/usr/bin/watcher", "--flag"))),
        ("./watcher --level=3", Program("watcher", ("./watcher", "--level=3"))),
    ],
)
def test_a_program_is_named_or_called_by_its_command(text: str, program: Program) -> None:
    assert other(text) == program


@pytest.mark.parametrize("text", ["", " ", "go= ", "go='unclosed"])
def test_no_command_is_one_sentence(text: str) -> None:
    with pytest.raises(ProgramError, match=r"names no command|cannot be split"):
        other(text)


def test_what_a_program_starts_ends_with_it() -> None:
    server = f"{sys.executable} {ROOT}/bench/rivals/health_endpoint.py"
    with Running(Program("wrapped", ("sh", "-c", f"{server} & wait")), "http://127.0.0.1:1", "{}") as running:
        assert len(running._pids()) == 2
        assert running.memory_mib()[0] > 10, "the child's memory is not counted"
    assert running._pids() == []


# --- what is told ---------------------------------------------------------------------------------------------------


def frozen(program: str, after: float | None, scenario: str = names.FREEZE_LOAD, **more: Any) -> Sample:
    return Sample(scenario, program, 0, {names.DETECTED: after}, **more)


@pytest.mark.parametrize(
    ("sample", "is_broken"),
    [
        (frozen(told.HEALTH_ENDPOINT, 40.0), True),
        (frozen(told.HEALTH_ENDPOINT, None), False),
        (frozen(told.SUMMING, None), True),
        (frozen(told.SUMMING, 42.0), False),
        (frozen(told.SUMMING, 42.0, names.FREEZE_ONE_CORE), True),
        (frozen(told.SUMMING, None, names.FREEZE_ONE_CORE), False),
        (frozen(told.SUMMING, None, names.UNAUTHORIZED), True),
        (frozen(OUR_NAME, None), False),
    ],
)
def test_a_control_that_does_what_it_cannot_do_spoils_the_run(sample: Sample, is_broken: bool) -> None:
    assert bool(told.broken_controls([sample])) is is_broken


def test_a_503_from_before_the_freeze_is_not_right() -> None:
    assert told.is_right(frozen(OUR_NAME, 31.0))
    assert not told.is_right(frozen(OUR_NAME, 31.0, early=True))
    assert not told.is_right(frozen(OUR_NAME, None))


def test_a_503_without_a_hang_is_not_right() -> None:
    assert told.is_right(frozen(OUR_NAME, None, names.UNAUTHORIZED))
    assert not told.is_right(frozen(OUR_NAME, 30.5, names.UNAUTHORIZED))


def test_one_round_too_late_misses_the_bound_and_is_told() -> None:
    late = frozen(OUR_NAME, 36.4, story=["+0.0 s: 200 ok: growing", "+36.4 s: 503 hung: stall-hang"], history=["{}"])
    samples = [frozen(OUR_NAME, 31.0), late]
    assert [figure.held for figure in told.figures(samples, FULL) if figure.what.endswith("latest")] == [False]
    assert told.timelines(samples) == [
        "frozen under load, round 1, what enginewatch said: +0.0 s: 200 ok: growing; +36.4 s: 503 hung: stall-hang"
    ]


def test_never_is_neither_a_number_nor_a_ratio() -> None:
    [table, _] = told.tables([frozen(OUR_NAME, 31.0), frozen("go", None), frozen("slow", 46.5)], "an engine")
    assert table.rows == [
        (names.DETECTED, OUR_NAME, "1", "31.0", "31.0", "31.0", ""),
        (names.DETECTED, "go", "1", "never", "never", "never", ""),
        (names.DETECTED, "slow", "1", "46.5", "46.5", "46.5", "1.50"),
    ]


def test_a_program_that_closes_every_connection_unread_is_no_reason_to_measure_no_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def turn_away() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=turn_away, daemon=True).start()
        took, problem = scenarios._asked(server.getsockname()[1], 0.1)
        server.shutdown(socket.SHUT_RDWR)
    assert took == {}
    samples = [
        Sample(names.LATENCY, OUR_NAME, 0, {"p50, ms": 0.5}),
        Sample(names.LATENCY, "go", 0, took, story=problem),
    ]
    assert told.tables(samples, "an engine")[0].rows == [("p50, ms", OUR_NAME, "1", "0.500", "0.500", "0.500", "")]
    [note] = told.unanswered(samples)
    assert note.startswith("/healthz latency, round 1: go was not measured: ")


def test_the_document_has_a_place_for_it_apart_from_the_other_figures() -> None:
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    once = run.written(document, "a comparison", side_by_side.BEGIN, side_by_side.END)
    assert once.partition(run.END)[0] == document.partition(run.END)[0]
    assert run.written(once, "figures").partition(run.END)[2] == once.partition(run.END)[2]


def test_part_of_a_comparison_is_not_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_by_side.options(["--write", "--quick"])
    assert "--write wants the whole comparison" in capsys.readouterr().err


def test_thresholds_are_whole_numbers_for_programs_that_read_nothing_else() -> None:
    for setting in (FULL, QUICK):
        config = json.loads(setting.config("tiny"))
        assert all(isinstance(value, int) for name, value in config.items() if name.endswith("_sec"))


class Unkept(http.server.BaseHTTPRequestHandler):
    """HTTP/1.0, no length: closes after each answer."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def unkept_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unkept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_program_that_keeps_no_connection_can_be_measured(unkept_port: int) -> None:
    assert len(probe_load.ask(unkept_port, "/healthz", 200, 0.05)) == 10


# --- the rivals, in virtual time ------------------------------------------------------------------------------------

POLL, STALL, TIMEOUT = 5.0, 30.0, 5.0


def until_hung(judge: Judge, pages: Iterator[Sums], now: float, *, probe_sec: float, limit: float) -> float | None:
    """Polls on with failing probes as the rival's loop does; when it says hung."""
    last = next(pages)
    while now < limit:
        asked_at = now
        if judge.page(last, now):
            now += probe_sec
            judge.probed(False, last, asked_at, now)
            if judge.answer().hung:
                return now
        now += POLL
        last = next(pages)
    return None


def ever(*pages: Sums) -> Iterator[Sums]:
    while True:
        yield from pages


def judge_seen_at_work() -> Judge:
    judge = Judge(Config())
    judge.page(Sums(1, 0), 0)
    judge.page(Sums(2, 0), 5)
    assert judge.state == "growing"
    return judge


def test_a_probe_in_the_loop_makes_a_verdict_late() -> None:
    """40 s from the last movement that it saw: thirty, and a round of timeout and poll interval that began before."""
    assert until_hung(judge_seen_at_work(), ever(Sums(2, 0)), 10, probe_sec=TIMEOUT, limit=100) == 45


def test_a_refused_probe_reads_as_a_hang() -> None:
    judge = Judge(Config())
    assert until_hung(judge, ever(Sums(2, 0)), 0, probe_sec=0, limit=100) == STALL


def test_a_page_that_loses_a_series_hides_a_hang() -> None:
    pages = ever(Sums(100, 0), Sums(40, 0))
    assert until_hung(judge_seen_at_work(), pages, 10, probe_sec=TIMEOUT, limit=1000) is None


def test_a_core_at_work_hides_one_that_is_stopped() -> None:
    page = (DATA / "vllm-0.32.0-dp2-api2-engine0-hung.prom").read_text()
    moved = re.sub(r'(vllm:generation_tokens_total{engine="1"[^}]*} )\S+', r"\g<1>99999.0", page)
    before, after = sums(page), sums(moved)
    assert before is not None
    assert after is not None
    assert after.tokens > before.tokens
    assert until_hung(judge_seen_at_work(), iter([before, after] * 100), 10, probe_sec=TIMEOUT, limit=500) is None


def test_a_probe_that_is_answered_is_life() -> None:
    judge = judge_seen_at_work()
    assert judge.page(Sums(2, 0), 10)
    judge.probed(True, None, 10, 10.1)
    assert (judge.state, judge.answer().hung) == ("stall-active-ok", False)


def test_a_failed_probe_is_forgiven_when_something_moved_meanwhile() -> None:
    judge = judge_seen_at_work()
    assert judge.page(Sums(2, 0), 60)
    judge.probed(False, Sums(3, 0), 60, 65)
    assert (judge.state, judge.answer().hung) == ("probe-fail-but-growing", False)


def test_a_page_without_counters_is_nothing_to_judge() -> None:
    assert sums("process_cpu_seconds_total 1.0\n") is None
    judge = Judge(Config())
    assert not judge.page(None, 100)
    assert (judge.state, judge.answer().hung) == ("no-tp", False)


def test_three_failures_in_a_row_are_what_a_kubelet_acts_on() -> None:
    probe = health_endpoint.Probe(3)
    assert [probe.asked(problem).hung for problem in ("x", "x", "", "x", "x", "x", "x", "")] == [
        *(False, False, False, False, False),
        *(True, True, False),
    ]
