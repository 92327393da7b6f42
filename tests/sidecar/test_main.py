"""`watch` as a process: what starts it, what ends it, and what must not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sidecar.processes import FAST, PAGE, Engine, Watch, scripted


@pytest.fixture
def engine() -> Iterator[Engine]:
    started = Engine()
    yield started
    started.close()


def test_a_healthy_idle_engine_is_ok_a_hung_one_is_503_and_its_recovery_200_again(engine: Engine) -> None:
    with Watch("--engine-url", engine.url, environ=FAST) as watch:
        url = watch.url()
        assert watch.wait_for(f"{url}/healthz", b"the last canary went through")[0] == 200
        assert watch.get(f"{url}/engine")[0] == 200
        engine.hangs = True
        status, body = watch.wait_for(f"{url}/healthz", b"hung: ")
        assert status == 503
        assert b"canaries in a row failed" in body
        assert b'"kind":"evidence"' in watch.get(f"{url}/history")[1]
        engine.hangs = False
        engine.release.set()
        assert watch.wait_for(f"{url}/healthz", b"ok: ")[0] == 200


@pytest.mark.parametrize("kind", ["auto", "trtllm"])
def test_the_statistics_of_tensorrt_llm_are_read_only_when_asked_for(engine: Engine, kind: str) -> None:
    engine.owner, engine.version, engine.page = "tensorrt_llm", "1.2.0", b'[{"iter": 7}]'
    environ = {**FAST, "ENGINE_KIND": kind}
    with Watch("--engine-url", engine.url, environ=environ) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"return_perf_metrics: true")
        watch.wait_for(f"{url}/healthz", b"(the last one: ok)")
        assert "/prometheus/metrics" in engine.asked
    assert "/metrics" not in engine.asked

    with Watch("--engine-url", engine.url, "--trtllm-json-stats", environ=environ) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/verdict", b"iterations")
        assert watch.get(f"{url}/healthz")[0] == 200
    assert "/metrics" in engine.asked


def test_statistics_that_the_engine_does_not_have_are_asked_for_in_vain_and_that_is_said(engine: Engine) -> None:
    environ = {**FAST, "ENGINE_KIND": "vllm", "TRTLLM_JSON_STATS": "1"}
    with Watch("--engine-url", engine.url, environ=environ) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"the last canary went through")
        watch.terminate()
        assert watch.process.stderr is not None
        assert b"TRTLLM_JSON_STATS is for TensorRT-LLM only" in watch.process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_promptly_also_in_the_middle_of_a_hanging_canary(
    engine: Engine, number: signal.Signals
) -> None:
    engine.hangs = True
    with Watch("--engine-url", engine.url, environ={**FAST, "ACTIVE_PROBE_TIMEOUT_SEC": "60"}) as watch:
        watch.wait_for(f"{watch.url()}/healthz", b"core 0")
        code, seconds = watch.terminate(number)
    assert code == 0
    assert seconds < 5, "what it would wait for takes longer by far"


def test_a_hangup_signal_is_ignored(engine: Engine) -> None:
    """A sidecar that exits takes the engine with it."""
    with Watch("--engine-url", engine.url, environ=FAST) as watch:
        url = watch.url()
        watch.process.send_signal(signal.SIGHUP)
        watch.wait_for(f"{url}/healthz", b"the last canary went through")
        watch.process.send_signal(signal.SIGHUP)
        assert watch.get(f"{url}/healthz")[0] == 200
        assert watch.terminate()[0] == 0


def test_an_engine_that_echoes_the_key_does_not_get_it_published(engine: Engine, tmp_path: Path) -> None:
    key = "hunter2-very-secret"
    (tmp_path / "key").write_text(key)
    engine.page = PAGE.replace(b'engine="0"', f'engine="{key}"'.encode())
    engine.version = f"0.32.0-{key}"
    with Watch("--engine-url", engine.url, environ={**FAST, "ENGINE_API_KEY_FILE": str(tmp_path / "key")}) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"core <API key>")
        engine.hangs = True
        watch.wait_for(f"{url}/healthz", b"hung: ")
        pages = [watch.get(url + path)[1] for path in ("/healthz", "/verdict", "/history", "/metrics", "/engine")]
        watch.terminate()
        assert watch.process.stderr is not None
        told = [*pages, watch.process.stderr.read(), json.dumps(watch.lines).encode()]
    assert not [text for text in told if key.encode() in text]


def test_a_bad_engine_url_in_the_environment_leaves_it_up_healthy_and_loud() -> None:
    with Watch(environ={"ENGINE_URL": "nonsense", "STARTUP_BUDGET_SEC": "0.5", **FAST}) as watch:
        url = watch.url()
        time.sleep(1.5)
        status, body = watch.get(f"{url}/healthz")
        assert (status, body) == (200, b"ok: nothing is watched: ENGINE_URL cannot be used, the sidecar's log says why")
        assert json.loads(watch.get(f"{url}/verdict")[1])["state"] == "startup"
        assert watch.get(f"{url}/engine")[0] == 503
        assert b"enginewatch_config_last_reload_successful 0.0" in watch.get(f"{url}/metrics")[1]
        assert watch.terminate()[0] == 0
        assert watch.process.stderr is not None
        told = [json.loads(line) for line in watch.process.stderr]
        assert any(line["level"] == "error" and line.get("key") == "ENGINE_URL" for line in told)


@pytest.mark.parametrize(("name", "says"), [("none", "cannot be read"), ("", "not a regular file"), ("key", "")])
def test_a_key_that_cannot_be_sent_is_told_at_the_start_and_an_engine_that_wants_none_is_watched(
    engine: Engine, tmp_path: Path, name: str, says: str
) -> None:
    (tmp_path / "key").write_text("secret")
    environ = {**FAST, "ENGINE_URL": engine.url, "ENGINE_API_KEY_FILE": str(tmp_path / name)}
    with Watch(environ=environ) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"the last canary went through")
        watch.terminate()
        assert watch.process.stderr is not None
        told = watch.process.stderr.read().decode()
    assert ("no API key is sent" in told) is bool(says)
    assert says in told


@pytest.mark.parametrize(
    "environ",
    [
        {"ENGINE_KIND": "tgi", "ENGINE_ROLE": "router", "LOG_HANG_PATTERN": "(", "METRICS_PATH": "x"},
        {"STALL_SEC": "soon", "MODE": "production", "POLL_INTERVAL_SEC": "NaN"},
        {"CONFIG_FILE": "/"},
        {"CONFIG_FILE": "/dev/zero"},
        {"LOG_FILE": "/dev/zero"},
        {"LOG_FILE": "/var/log/**/["},
        {"ENGINE_API_KEY_FILE": "/nonexistent", "ENGINE_CA_FILE": "/dev/null"},
        {"ENGINE_URL": "https://127.0.0.1:1"},
        {"ENGINE_URL": "http://no-such-name.invalid:8000"},
        {"ENGINE_KIND": "vllm", "IDENTITY_KV_BOOTSTRAP_URL": "http://127.0.0.1:8998"},
        {"SSLKEYLOGFILE": "/nonexistent/keys"},
    ],
)
def test_nothing_in_the_environment_ends_it(environ: dict[str, str]) -> None:
    with Watch(environ={"ENGINE_URL": "http://127.0.0.1:1", "POLL_INTERVAL_SEC": "0.1", **environ}) as watch:
        url = watch.url()
        time.sleep(0.5)
        assert watch.get(f"{url}/healthz")[0] == 200
        code, seconds = watch.terminate()
        assert code == 0
        assert seconds < 5, "what it would wait for takes longer by far"


@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
@pytest.mark.parametrize("exists", [False, True])
def test_the_engines_directory_for_its_metrics_is_the_engines_alone(
    engine: Engine, tmp_path: Path, name: str, exists: bool
) -> None:
    # A pod's containers often share their variables. What stands in that directory stands on the engine's page.
    directory = tmp_path / "multiproc"
    if exists:
        directory.mkdir()
    with Watch("--engine-url", engine.url, environ={**FAST, name: str(directory)}) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"the last canary went through")
        assert b"enginewatch_scrapes_total" in watch.get(f"{url}/metrics")[1]
    assert not exists or not list(directory.iterdir())


def test_a_log_path_that_is_no_text_costs_no_answer(engine: Engine) -> None:
    with Watch("--engine-url", engine.url, environ={**FAST, "LOG_FILE": "/tmp/no-such-\udcff"}) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"the last canary went through")
        status, body = watch.get(f"{url}/verdict")
        assert (status, b"no-such-" in body) == (200, True)
        assert b'internal_errors_total{task="history"} 0.0' in watch.get(f"{url}/metrics")[1]


def test_an_existing_configmap_is_used_and_its_change_is_seen(tmp_path: Path, engine: Engine) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"_": "hang-watcher", "poll_interval_sec": 0.1, "active_probe_path": "/health_generate"})
    )
    with Watch("--engine-url", engine.url, "--config-file", str(config)) as watch:
        url = watch.url()
        settings = json.loads(watch.get(f"{url}/verdict")[1])["settings"]
        assert (settings["poll_interval_sec"], settings["active_probe_path"]) == (0.1, "/health_generate")
        config.write_text('{"poll_interval_sec": 0.2, "mode": "shadow"}')
        watch.wait_for(f"{url}/verdict", b'"mode":"shadow"')
        config.write_text("{")
        watch.wait_for(f"{url}/metrics", b"enginewatch_config_last_reload_successful 0.0")
        assert json.loads(watch.get(f"{url}/verdict")[1])["settings"]["mode"] == "shadow"


def test_stderr_may_be_closed(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    reader, writer = os.pipe()
    os.close(reader)
    with Watch("--listen", f"127.0.0.1:{port}", "--engine-url", engine.url, environ=FAST, stderr=writer) as watch:
        os.close(writer)
        deadline = time.monotonic() + 10
        while True:
            try:
                assert watch.wait_for(f"http://127.0.0.1:{port}/healthz", b"went through")[0] == 200
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def run(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    return subprocess.run(
        [sys.executable, "-m", "enginewatch", "watch", *flags],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_a_bad_flag_is_one_sentence_and_exit_code_2() -> None:
    for flags in (["--engine-url", "nonsense"], ["--bogus"], ["--listen", "x"], ["--log-hang-pattern", "("]):
        ended = run(*flags)
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert ended.stderr.startswith("enginewatch watch: ")


def test_a_port_in_use_is_one_sentence_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run(LISTEN=f"127.0.0.1:{taken.getsockname()[1]}")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "address already in use" in ended.stderr


def test_help_is_on_stdout_and_exit_code_0() -> None:
    ended = run("--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--engine-url URL" in ended.stdout


def test_a_bug_while_it_is_put_together_starts_it_again() -> None:
    script = """
import sys
from enginewatch.sidecar import main
put_together, tries = main._watch, []
async def flaky(*arguments):
    tries.append(1)
    if len(tries) < 3:
        raise RuntimeError("a bug")
    await put_together(*arguments)
main._watch, main._RESTART_SEC = flaky, 0.01
sys.exit(main.run_watch(sys.argv[1:]))
"""
    with scripted(script, "--engine-url", "http://127.0.0.1:1") as watch:
        assert watch.get(f"{watch.url()}/healthz")[0] == 200
        assert [line["error"] for line in watch.lines if "error" in line] == ["RuntimeError"] * 2
        assert watch.terminate()[0] == 0


def test_while_it_cannot_be_put_together_it_fails_open() -> None:
    script = """
import sys
from enginewatch.sidecar import listen, main
async def broken(options, sock, journal, life):
    journal.write("info", "about to break", url=listen.url_of(sock))
    sock.close()
    raise RuntimeError("a bug")
main._watch = broken
sys.exit(main.run_watch(sys.argv[1:]))
"""
    with scripted(script, "--engine-url", "http://127.0.0.1:1") as watch:
        url = watch.url()
        for _ in range(20):
            status, body = watch.get(f"{url}/healthz")
            assert (status, body[:19]) == (200, b"ok: watcher broken,")
        assert watch.terminate()[0] == 0


def test_a_name_lookup_that_hangs_does_not_delay_the_end() -> None:
    script = """
import socket, sys, time
from enginewatch.sidecar import main
asks = socket.getaddrinfo
def hanging(host, *rest, **named):
    if host == "engine":
        time.sleep(60)
    return asks(host, *rest, **named)
socket.getaddrinfo = hanging
sys.exit(main.run_watch(sys.argv[1:]))
"""
    with scripted(script, "--engine-url", "http://engine:8000") as watch:
        assert watch.get(f"{watch.url()}/healthz")[0] == 200
        time.sleep(0.3)
        code, seconds = watch.terminate()
    assert code == 0
    assert seconds < 30


def test_it_loads_nothing_made_for_people_and_no_simulator() -> None:
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "enginewatch", "watch", "--listen", "127.0.0.1:0"],
        env={**inherited, "ENGINE_URL": "http://127.0.0.1:1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    loaded = set()
    for line in process.stderr:
        loaded.add(line.rpartition("|")[2].strip())
        if '"url"' in line:
            break
    process.terminate()
    process.communicate(timeout=10)
    assert "aiohttp.web" in loaded
    # `rich` itself is tried by structlog, and kept from it.
    unwanted = ("rich.", "cyclopts", "enginewatch.lab", "prometheus_client.parser", "enginewatch.client.doctor")
    assert [name for name in loaded if name.startswith(unwanted)] == []
