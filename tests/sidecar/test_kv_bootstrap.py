"""A real sidecar beside a small engine and its bootstrap server: what a change of KV engine ids does, and what no
bootstrap server can do."""

from __future__ import annotations

import http.server
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.sidecar.processes import FAST, PAGE, Bootstrap, Engine, Watch, body, kv_ids, scripted

from enginewatch.lab.sim.process import SimProcess

OBSERVED = b"\n".join(line for line in PAGE.splitlines() if b"process_start_time_seconds" not in line) + b"\n"
"""The page of a vLLM with several API servers: nothing on it names the process."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    started = Engine()
    started.page = OBSERVED
    yield started
    started.close()


def who(watch: Watch, url: str) -> dict[str, Any]:
    watch.wait_for(f"{url}/engine", b"engine_id")
    found: dict[str, Any] = json.loads(watch.get(f"{url}/engine")[1])
    return found


def watching(engine: Engine, bootstrap_url: str, environ: Mapping[str, str] = {}) -> Watch:
    return Watch("--engine-url", engine.url, environ={**FAST, "IDENTITY_KV_BOOTSTRAP_URL": bootstrap_url, **environ})


def value(watch: Watch, url: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", watch.get(f"{url}/metrics")[1].decode(), re.MULTILINE)
    assert found is not None, series
    return float(found[1])


def test_only_the_kv_engine_id_changes_and_the_engine_was_replaced_and_is_judged_anew(engine: Engine) -> None:
    with Bootstrap(kv_ids(rank0="a")) as bootstrap, watching(engine, bootstrap.url) as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"the last canary went through")
        before = who(watch, url)
        engine.hangs = True
        assert watch.wait_for(f"{url}/healthz", b"hung: ")[0] == 503
        bootstrap.wait_until_asked(1)
        assert b'"state":"replaced"' not in watch.get(f"{url}/history")[1]

        bootstrap.tell(rank0="b")
        watch.wait_for(f"{url}/engine", b'"restarts":1')
        after = who(watch, url)
        watch.wait_for(f"{url}/history", b'"state":"replaced","hung":false')
        bootstrap.wait_until_asked(5)
        assert who(watch, url) == after, "and that once"
        assert value(watch, url, "enginewatch_engine_restarts_total") == 1

    assert (before["source"], before["restarts"]) == ("observed", 0)
    assert after["engine_id"] != before["engine_id"]
    assert after["watcher_started_at"] == before["watcher_started_at"]


def test_control_a_rank_that_joins_and_silence_replace_nothing(engine: Engine) -> None:
    bootstrap = Bootstrap(kv_ids(rank0="a"))
    try:
        with watching(engine, bootstrap.url) as watch:
            url = watch.url()
            before = who(watch, url)
            bootstrap.wait_until_asked(3)
            bootstrap.tell(rank0="a", rank1="b")
            watch.wait_for(f"{url}/verdict", b"KV engine ids of 2 ranks")
            bootstrap.close()
            watch.wait_for(f"{url}/verdict", b"nobody listens")
            assert who(watch, url) == before
            assert before["restarts"] == 0
            assert watch.get(f"{url}/healthz")[0] == 200
    finally:
        bootstrap.close()


@pytest.mark.parametrize(("ranks", "source"), [(1, "process_start_time"), (2, "observed")])
def test_a_simulated_prefill_worker_that_restarts_in_place_was_replaced_once_though_two_witnesses_tell_it(
    ranks: int, source: str
) -> None:
    with SimProcess("vllm", role="prefill", dp=ranks, bootstrap_port=0) as sim:
        flags = ["--engine-url", sim.url, "--identity-kv-bootstrap-url", f"http://127.0.0.1:{sim.bootstrap_port}"]
        with Watch(*flags, environ={**FAST, "ENGINE_ROLE": "prefill"}) as watch:
            url = watch.url()
            watch.wait_for(f"{url}/verdict", b"KV engine ids of %d rank" % ranks)
            before = who(watch, url)
            sim.restart()
            watch.wait_for(f"{url}/engine", b'"restarts":1')
            polls = value(watch, url, 'enginewatch_scrapes_total{outcome="ok"}')
            deadline = time.monotonic() + 30
            while value(watch, url, 'enginewatch_scrapes_total{outcome="ok"}') < polls + 10:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            watch.wait_for(f"{url}/verdict", b'"kv_bootstrap","says":"same"')
            after = who(watch, url)
    assert (after["restarts"], after["source"]) == (1, source)
    assert after["engine_id"] != before["engine_id"]


def test_the_bootstrap_server_is_sent_no_key_and_asked_nothing_but_its_query(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2-very-secret")
    with (
        Bootstrap(kv_ids(rank0="a")) as bootstrap,
        watching(engine, f"{bootstrap.url}/query", {"ENGINE_API_KEY_FILE": str(tmp_path / "key")}) as watch,
    ):
        watch.wait_for(f"{watch.url()}/verdict", b"KV engine ids of 1 rank")
        asked = list(bootstrap.asked)
    assert {path for path, _ in asked} == {"/query"}
    assert not [headers for _, headers in asked if "hunter2" in str(headers) or "authorization" in headers]


def endless(bootstrap: Bootstrap, handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b'{"0": {"engine_id": "')
    while not bootstrap.release.is_set():
        handler.wfile.write(b"a" * 65536)


def drips(bootstrap: Bootstrap, handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while not bootstrap.release.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def never_answers(bootstrap: Bootstrap, handler: http.server.BaseHTTPRequestHandler) -> None:
    bootstrap.release.wait(60)


def no_http(bootstrap: Bootstrap, handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x00\xff" * 1000)


def test_a_hostile_bootstrap_server_harms_neither_the_sidecar_nor_its_polls(engine: Engine) -> None:
    with Bootstrap(kv_ids(rank0="elsewhere")) as elsewhere:
        harms = [
            endless,
            drips,
            never_answers,
            no_http,
            body(b"", 307, {"Location": f"{elsewhere.url}/query"}),
            body(b"not json"),
            body(b"[" * 200_000),
            body(b'{"0":' * 40_000),
            body(b'{"0": {"engine_id": ["b"]}, "1": 7}'),
            body(json.dumps({str(rank): {"engine_id": "made-up"} for rank in range(5000)}).encode()),
            body(b'{"0": {"engine_id": "b"}}', 500),
            body(b"\x1f\x8b" + b"\x00" * 100, 200, {"Content-Encoding": "gzip"}),
        ]
        good = kv_ids(rank0="a")
        answers = [good, *(answer for harm in harms for answer in (harm, good))]
        with Bootstrap(*answers) as bootstrap, watching(engine, bootstrap.url) as watch:
            url = watch.url()
            before = who(watch, url)
            polls, began = value(watch, url, 'enginewatch_scrapes_total{outcome="ok"}'), time.monotonic()
            deadline = began + 60
            while len(bootstrap.asked) < len(answers):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            polls = value(watch, url, 'enginewatch_scrapes_total{outcome="ok"}') - polls
            spent = time.monotonic() - began
            assert who(watch, url) == before
            assert watch.get(f"{url}/healthz")[0] == 200
            for task in ("kv_bootstrap", "poll", "scrape", "judge"):
                assert value(watch, url, f'enginewatch_internal_errors_total{{task="{task}"}}') == 0
            # Two of them keep it waiting for two seconds each: were polls to wait with it, far fewer would be made.
            assert polls > len(answers) + 5, f"{polls} polls in {spent:.1f} s"
            assert elsewhere.asked == []

            bootstrap.tell(rank0="b")
            watch.wait_for(f"{url}/engine", b'"restarts":1')


def test_a_bad_url_is_told_by_log_and_metric_and_the_engine_is_watched(engine: Engine) -> None:
    with watching(engine, "http://user:secret@127.0.0.1:8998") as watch:
        url = watch.url()
        watch.wait_for(f"{url}/healthz", b"the last canary went through")
        page = watch.get(f"{url}/metrics")[1].decode()
        assert re.search(r'^enginewatch_config_problem\{.*key="IDENTITY_KV_BOOTSTRAP_URL".*\} 1', page, re.MULTILINE)
        assert b"kv_bootstrap" not in watch.get(f"{url}/verdict")[1]
        watch.terminate()
        assert watch.process.stderr is not None
        told = [json.loads(line) for line in watch.process.stderr]
    (line,) = [line for line in told if line.get("key") == "IDENTITY_KV_BOOTSTRAP_URL"]
    assert "http://127.0.0.1:8998" in line["reason"], "an example of a good one"
    assert "secret" not in str(told) + page


def test_a_watch_that_breaks_and_starts_again_is_the_same_sidecar_to_those_who_ask(
    engine: Engine, tmp_path: Path
) -> None:
    """`restarts` counts since `watcher_started_at`, so both stand; and the wall clock was set meanwhile."""
    script = f"""
import asyncio, os, sys, time
from enginewatch.sidecar import main
from enginewatch.sidecar.shell import Shell
runs, tells, flag = Shell.run, time.time, {str(tmp_path / "break")!r}
async def breaks(self):
    running = asyncio.ensure_future(runs(self))
    while not os.path.exists(flag):
        await asyncio.sleep(0.05)
    os.unlink(flag)
    time.time = lambda: tells() + 3600
    running.cancel()
    await asyncio.wait([running])
    raise RuntimeError("a bug")
Shell.run, main._RESTART_SEC = breaks, 0.01
os.environ.update({dict(FAST)!r})
sys.exit(main.run_watch(sys.argv[1:]))
"""
    with Bootstrap(kv_ids(rank0="a")) as bootstrap:
        flags = ["--engine-url", engine.url, "--identity-kv-bootstrap-url", bootstrap.url]
        with scripted(script, *flags) as watch:
            url = watch.url()
            who(watch, url)
            bootstrap.wait_until_asked(2)
            bootstrap.tell(rank0="b")
            watch.wait_for(f"{url}/engine", b'"restarts":1')
            before = who(watch, url)
            (tmp_path / "break").touch()
            assert watch.process.stderr is not None
            for raw in watch.process.stderr:
                if "starts again" in json.loads(raw)["event"]:
                    break
            assert who(watch, url) == before
            watch.wait_for(f"{url}/healthz", b"the last canary went through")
            bootstrap.wait_until_asked(3)
            assert who(watch, url) == before
