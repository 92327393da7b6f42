"""The command line as people meet it: in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from terminal import terminal

from enginewatch.lab.sim.process import SimProcess

COMMANDS = ("demo", "doctor", "guard", "sim", "watch", "why")
COMMAND_LINE = [sys.executable, "-m", "enginewatch"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND_LINE, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], code: int) -> None:
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_the_commands_that_exist_and_no_other() -> None:
    done = run("--help", COLUMNS="100")
    assert done.returncode == 0
    assert re.findall(r"^│ (\w+) {2,}\w", done.stdout, re.MULTILINE) == sorted(COMMANDS)


def test_called_without_a_command_it_shows_its_help() -> None:
    assert run().stdout == run("--help").stdout


def test_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("enginewatch ")


@pytest.mark.parametrize(
    ("arguments", "code"), [(("live",), 0), (("export", "/nonexistent"), 1), (("ready",), 2), (("--unknown",), 2)]
)
def test_the_exit_code_of_the_guard_is_the_commands(arguments: tuple[str, ...], code: int) -> None:
    done = run("guard", *arguments, GUARD_PREFILL="", GUARD_DECODE="")
    assert done.returncode == code
    assert (done.stdout + done.stderr).count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert f"enginewatch {command}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("docter",), 'did you mean "doctor"'),
        (("wach",), 'did you mean "watch"'),
        (("--nonsense",), "--nonsense"),
        (("sim",), "ENGINE"),
        (("sim", "tensorflow"), "vllm"),
        (("sim", "vllm", "sglang"), "sglang"),
        (("sim", "vllm", "--dp", "0"), "expected 1 to 256"),
        (("sim", "vllm", "--dp", "many"), "many"),
        (("sim", "vllm", "--prot", "1"), "did you mean --port"),
        (("doctor",), "URL"),
        (("doctor", "localhost"), "http://localhost"),
        (("doctor", "http://127.0.0.1:1", "--role", "judge"), "prefill"),
        (("doctor", "http://127.0.0.1:1", "-o", "xml"), "json"),
        (("doctor", "http://127.0.0.1:1", "--active-probe-path", "embed"), "begins with /"),
        (("doctor", "http://127.0.0.1:1", "--active-probe-method", "G 1"), "--active-probe-method"),
        (("why",), "URL"),
        (("why", "not a url"), "http://"),
        (("demo", "--engine", "abacus"), "sglang"),
        (("demo", "--set", "stall_sec"), "KEY=VALUE"),
        (("demo", "--set", "stall_sec=soon"), "float"),
        (("demo", "--svg", "/nonexistent/demo.svg"), "no such directory"),
        (("watch", "--nonsense"), "enginewatch watch --help"),
        (("watch", "--engine-url", "over there"), "--engine-url"),
    ],
)
def test_a_wrong_call_is_answered_with_one_sentence_and_exit_code_2(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert_one_sentence(done, 2)
    assert says in done.stderr
    assert done.stdout == ""


def loaded_by(*arguments: str) -> set[str]:
    """Top-level modules that a command has loaded when it is done."""
    program = (
        "import sys\n"
        "from enginewatch.cli import main\n"
        "try:\n"
        f"    main({list(arguments)!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('\\n', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_watch_loads_nothing_made_for_people() -> None:
    assert not loaded_by("watch", "--help") & {"cyclopts", "rich"}


def test_the_commands_for_people_do_load_it() -> None:
    assert {"cyclopts", "rich"} <= loaded_by("why", "--help")


# --- doctor and why -------------------------------------------------------------------------------------------------


@contextmanager
def somebody(
    body: bytes = b"<html>hello</html>", delay_sec: float = 0.0, asked: threading.Event | None = None
) -> Iterator[str]:
    """A web server that is neither an engine nor a sidecar. `asked` is set with the first request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.set()
            time.sleep(delay_sec)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                pass  # the client left

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_doctor_calls_an_engine_that_is_not_there_critical() -> None:
    done = run("doctor", f"http://127.0.0.1:{closed_port()}")
    assert done.returncode == 3
    assert "CRITICAL" in done.stdout
    assert "nobody listens" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_doctor_knows_a_simulated_engine() -> None:
    with SimProcess("vllm", dev_mode=True) as sim:
        done = run("doctor", sim.url, "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"]
    assert (found["engine"], found["canary"]["outcome"]) == ("vllm", "ok")


def test_doctor_asks_with_a_canary_of_ones_own_and_a_flag_wins_over_the_variable() -> None:
    with SimProcess("vllm") as sim:
        by_variable = run("doctor", sim.url, "-o", "json", ACTIVE_PROBE_PATH="/nowhere")
        by_flag = run("doctor", sim.url, "-o", "json", "--active-probe-path", "/version", ACTIVE_PROBE_PATH="/nowhere")
        with_body = run(
            "doctor",
            sim.url,
            *("-o", "json", "--active-probe-path", "/v1/completions", "--active-probe-method", "POST"),
            *("--active-probe-body", '{"model": "{model}", "prompt": "Hello", "max_tokens": 2}'),
        )
    canaries = [json.loads(done.stdout)["canary"] for done in (by_variable, by_flag, with_body)]
    assert [canary["outcome"] for canary in canaries] == ["misconfigured", "ok", "ok"]
    assert "404" in canaries[0]["detail"]
    assert "no leg moved" in by_flag.stdout, "it is judged by that canary, which does not reach the core"
    assert "no leg moved" not in with_body.stdout


def test_doctor_names_a_variable_that_cannot_be_used() -> None:
    done = run("doctor", "http://127.0.0.1:1", ACTIVE_PROBE_PATH="embed")
    assert_one_sentence(done, 2)
    assert "ACTIVE_PROBE_PATH: expected a path that begins with /" in done.stderr


def test_doctor_shows_tables_on_a_terminal_and_says_the_same_as_in_a_pipe() -> None:
    with SimProcess("vllm", dp=2) as sim:
        plain = run("doctor", sim.url)
        with terminal([*COMMAND_LINE, "doctor", sim.url], {}) as seen:
            assert seen.end() == plain.returncode
    assert "\x1b" in seen.screen
    assert "╭" in seen.screen
    for word in ("generation_tokens", "kv_cache_usage", "0.32.0", f"(exit code {plain.returncode})"):
        assert word in plain.stdout
        assert word in seen.screen


def test_doctor_does_not_take_a_stranger_for_an_engine() -> None:
    with somebody() as url:
        done = run("doctor", url, "-o", "json")
    found = json.loads(done.stdout)
    assert found["engine"] == "unknown"
    assert done.returncode == found["exit_code"] != 0


def test_why_says_so_when_there_is_no_sidecar() -> None:
    with somebody() as url:
        done = run("why", url)
    assert_one_sentence(done, 1)
    assert "not an enginewatch sidecar" in done.stderr


def test_why_says_so_when_nobody_answers() -> None:
    assert_one_sentence(run("why", f"http://127.0.0.1:{closed_port()}"), 1)


# --- ends -----------------------------------------------------------------------------------------------------------


# Whatever runs the tests may ignore it, as a shell does in its background jobs, and that is inherited.
HEEDS_CTRL_C = ["env", "--default-signal=INT"]


def test_ctrl_c_ends_a_command_quietly_with_130() -> None:
    asked = threading.Event()
    with somebody(delay_sec=20, asked=asked) as url:
        process = subprocess.Popen(
            [*HEEDS_CTRL_C, *COMMAND_LINE, "doctor", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    assert (process.returncode, out, error) == (130, "", "")


def test_a_reader_that_leaves_is_not_an_error_worth_a_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = subprocess.Popen([*COMMAND_LINE, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (1, "")


def test_sim_announces_itself_and_ends_quietly_with_ctrl_c() -> None:
    with subprocess.Popen(
        [*HEEDS_CTRL_C, *COMMAND_LINE, "sim", "vllm", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["url"].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (0, "")


def test_sim_on_a_taken_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("sim", "vllm", "--port", str(taken.getsockname()[1]))
    assert_one_sentence(done, 1)
    assert "--port" in done.stderr
