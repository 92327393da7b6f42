"""What a Mooncake bootstrap server's answers are taken for, also one that means harm."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from tests.client.servers import Recorder, Serve, answering, read_request, response, wait_for_ever

from enginewatch.client.kv_bootstrap import MAX_BODY_BYTES, NOBODY_YET, NOT_ITS_ANSWER, KvBootstrap, kv_answer

ANSWER = {
    "0": {"engine_id": "1f0c-a", "worker_addr": {"0": {"0": "tcp://10.0.0.7:41803"}}},
    "1": {"engine_id": "1f0c-a_dp1", "worker_addr": {}, "pp_size": 1, "shard_info": {}},
}


async def test_the_ids_are_read_by_rank_and_the_rest_of_an_entry_is_left_alone(serve: Serve) -> None:
    server = Recorder({"/query": response(json.dumps(ANSWER))})
    kv = KvBootstrap(await serve(server))
    answer = await kv.read(timeout_sec=10)
    assert (answer.ids, answer.failure) == ({"0": "1f0c-a", "1": "1f0c-a_dp1"}, "")
    assert server.paths() == ["/query"]


async def test_nothing_registered_yet_is_said_and_is_no_id(serve: Serve) -> None:
    answer = await KvBootstrap(await serve(answering(response("{}")))).read(timeout_sec=10)
    assert (answer.ids, answer.failure) == ({}, NOBODY_YET)


async def test_it_is_sent_no_key(serve: Serve) -> None:
    server = Recorder({"/query": response(json.dumps(ANSWER))})
    await KvBootstrap(await serve(server)).read(timeout_sec=10)
    (request,) = server.requests
    assert b"authorization" not in request.lower()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'"0"',
        b"null",
        b'{"0": null}',
        b'{"0": "1f0c"}',
        b'{"0": {"engine_id": 7}}',
        b'{"0": {"engine_id": null}}',
        b'{"0": {"engine_id": ""}}',
        b'{"0": {"engine_id": ["a"]}}',
        b'{"0": {"engine_id": "a\\nb"}}',
        b'{"0": {"engine_id": "' + b"a" * 129 + b'"}}',
        b'{"0": {"worker_addr": {}}}',
        b'{"-1": {"engine_id": "a"}}',
        b'{"0.5": {"engine_id": "a"}}',
        b'{"123456": {"engine_id": "a"}}',
        '{"\u0663": {"engine_id": "a"}}'.encode(),
        b'{"1f0c-a": {"0": {"0": {"0": "tcp://10.0.0.7:1"}}}}',
        b'{"error": {"code": 1}}',
        b'{"0": {"engine_id": "a"}',
        b'{"0": {"engine_id": "a\xff"}}',
        b'{"0":' * 100_000,
        b"[" * 200_000,
        b'{"0":{"engine_id":"a","worker_addr":' + b"[" * 5_000 + b"]" * 5_000 + b"}}",
        json.dumps({str(rank): {"engine_id": "a"} for rank in range(1025)}).encode(),
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_no_answer_of_such_a_server_holds_no_ids(body: bytes) -> None:
    answer = kv_answer(body)
    assert (answer.ids, answer.failure) == ({}, NOT_ITS_ANSWER)


def test_an_entry_that_is_none_is_as_if_its_rank_were_missing() -> None:
    body = b'{"0": {"engine_id": "a"}, "1": {"engine_id": 7}, "version": "2", "2": []}'
    assert kv_answer(body).ids == {"0": "a"}


@pytest.mark.parametrize("status", ["404 Not Found", "500 Internal Server Error", "204 No Content", "401 Unauthorized"])
async def test_another_status_is_told_and_its_body_counts_for_nothing(serve: Serve, status: str) -> None:
    body = "" if status.startswith("204") else json.dumps(ANSWER)
    answer = await KvBootstrap(await serve(answering(response(body, status=status)))).read(timeout_sec=10)
    assert (answer.ids, answer.failure) == ({}, f"it answers HTTP {status[:3]}")


async def test_a_redirect_is_not_followed(serve: Serve) -> None:
    elsewhere = Recorder({"/query": response(json.dumps(ANSWER))})
    location = f"Location: {await serve(elsewhere)}/query\r\n"
    url = await serve(answering(response("", status="307 Temporary Redirect", headers=location)))
    answer = await KvBootstrap(url).read(timeout_sec=10)
    assert (answer.ids, answer.failure) == ({}, "it answers HTTP 307")
    assert elsewhere.requests == []


async def test_nobody_listens(unused_url: str) -> None:
    assert (await KvBootstrap(unused_url).read(timeout_sec=10)).failure == "nobody listens"


async def test_a_name_that_does_not_resolve_is_told_without_the_engines_variable() -> None:
    answer = await KvBootstrap("http://no-such-name.invalid:8998").read(timeout_sec=10)
    assert answer.failure == "it could not be asked: its name or its certificate"


async def test_an_answer_without_end_is_given_up_at_its_limit(serve: Serve) -> None:
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n{")
        while True:
            writer.write(b" " * 65536)
            await writer.drain()
            sent += 65536

    answer = await KvBootstrap(await serve(endless)).read(timeout_sec=60)
    assert (answer.ids, answer.failure) == ({}, "the answer is not HTTP, or too long")
    assert sent < 100 * MAX_BODY_BYTES


async def test_one_that_drips_or_never_answers_is_given_up_at_the_deadline(serve: Serve) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    for handler in (drip, wait_for_ever):
        began = time.monotonic()
        answer = await KvBootstrap(await serve(handler)).read(timeout_sec=0.5)
        assert (answer.ids, answer.failure) == ({}, "no answer in time")
        assert time.monotonic() - began < 10
