"""A simulated prefill/decode pair: who asks whom for the KV, and what a replaced prefill does to a decode."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.lab.conftest import SimFactory
from tests.lab.sim_asking import Answer, ask, eventually, hangs, page, value

from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.process import SimProcess


def query(prefill: SimProcess) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", prefill.bootstrap_port, timeout=5)
    try:
        connection.request("GET", "/query")
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def engine_id(prefill: SimProcess) -> str:
    return str(query(prefill)["0"]["engine_id"])


def compute(prefill: SimProcess, params: dict[str, Any]) -> Answer:
    """The first half of a request, as vllm-router sends it."""
    whole = {"do_remote_decode": True, "do_remote_prefill": False} | params
    return ask(prefill, "/v1/completions", {"prompt": "Test", "max_tokens": 1, "kv_transfer_params": whole})


def decode(decoder: SimProcess, params: dict[str, Any], *, timeout: float = 5.0, stream: bool = False) -> Answer:
    """The second half."""
    whole = {"do_remote_decode": False, "do_remote_prefill": True} | params
    body = {"prompt": "Test", "max_tokens": 4, "stream": stream, "kv_transfer_params": whole}
    return ask(decoder, "/v1/completions", body, timeout=timeout)


def mooncake(prefill: SimProcess, engine: str) -> dict[str, Any]:
    address = f"http://127.0.0.1:{prefill.bootstrap_port}"
    return {"transfer_id": f"xfer-{uuid.uuid4()}", "remote_bootstrap_addr": address, "remote_engine_id": engine}


def through_mooncake(prefill: SimProcess, decoder: SimProcess, engine: str, *, timeout: float = 5.0) -> Answer:
    params = mooncake(prefill, engine)
    assert compute(prefill, {"transfer_id": params["transfer_id"]}).json["kv_transfer_params"] is None
    return decode(decoder, params, timeout=timeout)


def test_a_decode_that_knew_the_dead_engine_id_waits_in_vain_and_the_new_id_is_served(sim: SimFactory) -> None:
    prefill = sim("vllm", role="prefill", bootstrap_port=0, step_ms=5)
    decoder = sim("vllm", role="decode", step_ms=5)
    port, first = prefill.bootstrap_port, engine_id(prefill)
    assert through_mooncake(prefill, decoder, first).json["usage"]["completion_tokens"] == 4
    assert engine_id(prefill) == first, "one process, one id"
    prefill.restart()
    prefill.wait_serving(2)
    second = engine_id(prefill)
    assert prefill.bootstrap_port == port
    assert second != first
    asked = prefill.state()["bootstrap_queries"]
    assert hangs(lambda: through_mooncake(prefill, decoder, first, timeout=1.0))
    assert prefill.state()["bootstrap_queries"] == asked, "the decode asks for ids that are new to it"
    assert through_mooncake(prefill, decoder, second).status == 200
    assert prefill.state()["bootstrap_queries"] == asked + 1
    assert [each["kv_transfer_params"]["remote_engine_id"] for each in decoder.requests()] == [first, first, second]
    assert [each["status"] for each in decoder.requests()] == [200, 499, 200]


def test_a_decode_that_never_met_the_engine_id_fails_at_once(warm: SimFactory) -> None:
    prefill = warm("vllm", role="prefill", bootstrap_port=0, step_ms=5)
    decoder = warm("vllm", role="decode", step_ms=5)
    refused = through_mooncake(prefill, decoder, "nobody's")
    assert (refused.status, refused.json["error"]["type"]) == (500, "InternalServerError")
    assert through_mooncake(prefill, decoder, engine_id(prefill)).status == 200


def test_a_decode_waits_for_a_transfer_that_is_not_computed_yet(warm: SimFactory) -> None:
    prefill = warm("vllm", role="prefill", bootstrap_port=0, step_ms=5)
    decoder = warm("vllm", role="decode", step_ms=5, transfer_timeout_sec=1.0)
    params = mooncake(prefill, engine_id(prefill))
    assert decode(decoder, params).status == 500, "and gives up when its time is over"
    streamed = decode(decoder, params, stream=True)
    assert (streamed.status, '"finish_reason": "error"' in streamed.text) == (200, True)
    compute(prefill, {"transfer_id": params["transfer_id"]})
    assert decode(decoder, params).status == 200


def test_a_request_that_waits_for_kv_is_deferred_in_the_core(warm: SimFactory) -> None:
    prefill = warm("vllm", role="prefill", bootstrap_port=0, step_ms=5)
    decoder = warm("vllm", role="decode", step_ms=5)
    params = mooncake(prefill, engine_id(prefill))
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(decode, decoder, params, timeout=60)
        eventually(
            lambda: value(page(decoder), "vllm:num_requests_waiting_by_reason", reason="deferred") == 1, within=20
        )
        assert not answer.done()
        compute(prefill, {"transfer_id": params["transfer_id"]})
        assert answer.result().status == 200


def test_with_nixl_every_answer_names_the_living_process(sim: SimFactory) -> None:
    prefill = sim("vllm", role="prefill", step_ms=5)
    decoder = sim("vllm", role="decode", step_ms=5)
    assert prefill.bootstrap_port < 0
    asked = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    before = compute(prefill, asked).json["kv_transfer_params"]
    assert decode(decoder, before).status == 200
    prefill.restart()
    prefill.wait_serving(2)
    after = compute(prefill, asked).json["kv_transfer_params"]
    assert after["remote_engine_id"] != before["remote_engine_id"]
    assert decode(decoder, after).status == 200
    assert hangs(lambda: decode(decoder, before, timeout=0.5))


def test_the_bootstrap_server_knows_every_data_parallel_rank_and_is_there_while_the_engine_loads(
    sim: SimFactory,
) -> None:
    prefill = sim("vllm", role="prefill", dp=2, bootstrap_port=0, step_ms=5)
    told = query(prefill)
    assert sorted(told) == ["0", "1"]
    assert [told[rank]["engine_id"].rpartition("_")[2] for rank in "01"] == ["dp0", "dp1"]
    assert told["0"]["worker_addr"]["0"]["0"].startswith("tcp://127.0.0.1:")
    prefill.crash(down_sec=2, load_sec=60)
    eventually(lambda: not answers(prefill), within=20)
    eventually(lambda: answers(prefill), within=20)
    assert not set(ids(told)) & set(ids(query(prefill)))
    with pytest.raises(ConnectionRefusedError):
        ask(prefill, "/health")


def ids(told: dict[str, Any]) -> list[str]:
    return [entry["engine_id"] for entry in told.values()]


def answers(prefill: SimProcess) -> bool:
    try:
        query(prefill)
    except (ConnectionRefusedError, ConnectionResetError, http.client.RemoteDisconnected):
        return False
    return True


def test_two_engines_on_two_addresses_share_both_port_numbers(sim: SimFactory) -> None:
    one = sim("vllm", role="prefill", host="127.0.0.2", bootstrap_port=0)
    other = sim("vllm", role="prefill", host="127.0.0.3", port=one.port, bootstrap_port=one.bootstrap_port)
    assert (one.url, other.url) == (f"http://127.0.0.2:{one.port}", f"http://127.0.0.3:{one.port}")
    assert one.state()["kv_engine_ids"] != other.state()["kv_engine_ids"]


def test_what_a_router_tells_a_sglang_pair_is_kept_and_the_prompt_is_not(warm: SimFactory) -> None:
    engine = warm("sglang", role="prefill", step_ms=5)
    body = {"text": "secret", "sampling_params": {"max_new_tokens": 1}}
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
    assert ask(engine, "/generate", body | room, headers={"X-Request-Id": "mine"}).status == 200
    kept = engine.requests()[-1]
    assert room.items() <= kept.items()
    assert (kept["path"], kept["request_id"], kept["status"]) == ("/generate", "mine", 200)
    assert "secret" not in json.dumps(kept)


def test_a_greeting_in_http2_is_refused_without_a_word(sim: SimFactory, capfd: pytest.CaptureFixture[str]) -> None:
    """sglang-router begins with one."""
    engine = sim("sglang", step_ms=5)
    with socket.create_connection(("127.0.0.1", engine.port), timeout=5) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        assert connection.recv(4096).startswith(b"HTTP/1.")
    assert ask(engine, "/health").status == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "options",
    [
        {"role": "decode", "bootstrap_port": 0},
        {"engine": "sglang", "role": "prefill", "bootstrap_port": 8998},
        {"role": "prefill", "bootstrap_port": 65536},
    ],
)
def test_a_bootstrap_server_that_cannot_be_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="bootstrap-port"):
        SimOptions(**({"engine": "vllm"} | options))  # type: ignore[arg-type]


def test_a_taken_bootstrap_port_is_named(warm: SimFactory) -> None:
    other = warm("vllm", role="prefill", bootstrap_port=0)
    taken = str(other.bootstrap_port)
    found = subprocess.run(
        [sys.executable, "-m", "enginewatch.lab.sim", "vllm", "--role", "prefill", "--bootstrap-port", taken],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (1, "", 1)
    assert f"127.0.0.1:{taken}" in found.stderr
    assert "--bootstrap-port" in found.stderr
