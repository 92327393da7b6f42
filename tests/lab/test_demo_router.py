"""The demo's router: it must pin what a router with Mooncake pins, or the demo would prove nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from tests.lab.sim_asking import eventually, hangs

from enginewatch.lab.demo_pair import free_port
from enginewatch.lab.sim.process import SimProcess

Pair = tuple[SimProcess, SimProcess]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        prefill = stack.enter_context(SimProcess("vllm", role="prefill", bootstrap_port=0, step_ms=5))
        yield prefill, stack.enter_context(SimProcess("vllm", role="decode", step_ms=5))


@contextmanager
def router(pair: Pair, bootstrap_port: int | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    prefill, decode = pair
    port = free_port()
    command = [sys.executable, "-m", "enginewatch.lab.demo_router", "--port", str(port)]
    command += ["--prefill", prefill.url, str(bootstrap_port or prefill.bootstrap_port), "--decode", decode.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def health(url: str) -> int:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as response:
            return int(response.status)
    except urllib.error.URLError:
        return 0


def complete(url: str, timeout: float = 20) -> dict[str, Any]:
    body = json.dumps({"model": "simulated-model", "prompt": "Test", "max_tokens": 3}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def carried(decode: SimProcess) -> list[str]:
    """The engine ids in the requests that reached the decode engine."""
    return [each["kv_transfer_params"]["remote_engine_id"] for each in decode.requests()]


def test_requests_carry_the_engine_id_of_the_routers_start_until_it_is_started_again(pair: Pair) -> None:
    prefill, decode = pair
    first = prefill.state()["kv_engine_ids"][0]
    with router(pair) as (_, url):
        eventually(lambda: health(url) == 200, within=20)
        assert complete(url)["usage"]["completion_tokens"] == 3
        prefill.restart()
        prefill.wait_serving(prefill.starts + 1)
        second = prefill.state()["kv_engine_ids"][0]
        assert second != first
        assert health(url) == 200
        assert hangs(lambda: complete(url, timeout=1.0))
        assert carried(decode) == [first, first]
    with router(pair) as (_, url):
        eventually(lambda: health(url) == 200, within=20)
        assert complete(url)["usage"]["completion_tokens"] == 3
        assert carried(decode) == [first, first, second]


def test_it_ends_at_sigterm_with_a_request_that_hangs(pair: Pair) -> None:
    prefill, _ = pair
    with router(pair) as (process, url):
        eventually(lambda: health(url) == 200, within=20)
        complete(url)
        prefill.restart()
        prefill.wait_serving(prefill.starts + 1)
        assert hangs(lambda: complete(url, timeout=1.0))
        process.terminate()
        assert process.wait(10) == 0


def test_without_a_bootstrap_server_it_does_not_start_and_says_so(pair: Pair) -> None:
    port = free_port()
    with router(pair, bootstrap_port=port) as (process, _):
        _, error = process.communicate(timeout=20)
        assert process.returncode == 1
        assert error == f"router: the bootstrap server http://127.0.0.1:{port} tells no engine id\n"
