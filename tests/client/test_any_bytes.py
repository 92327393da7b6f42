"""Whatever bytes come back, each question ends in a word of its vocabulary and never in an exception."""

from __future__ import annotations

import asyncio
import gzip
import random
from typing import Any

import pytest
from tests.client.servers import Serve, read_request, response

from enginewatch.client.target import CanaryReport, Description, EngineClient, ScrapeFailure, Target
from enginewatch.core.events import Flags
from enginewatch.engines import PROFILES
from enginewatch.engines.vllm import PROFILE as VLLM

PAGE = b'# a page\nvllm:generation_tokens_total{engine="0"} 5\n' * 5
SEEDS = (
    response(PAGE),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(PAGE), PAGE),
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(PAGE),
    response("", status="307 Temporary Redirect", headers="Location: /metrics/\r\nSet-Cookie: a=b; Path=/\r\n"),
    response('data: {"choices": []}\n\ndata: [DONE]\n\n', headers="Content-Type: text/event-stream\r\n"),
    response('{"is_paused": true, "version": "1", "data": [{"id": "x"}]}'),
)
SPLICES = (
    b"\r\n",
    b"\0",
    b"Content-Length: 5\r\n",
    b"Location: \xff//[\r\n",
    b"Location: http://[::1\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Type: \xff\r\n",
)
WORDS = {"refused", "timeout", "reset", "truncated", "malformed"}


def damaged(chance: random.Random) -> bytes:
    answer = bytearray(chance.choice(SEEDS))
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(answer) + 1)
        match chance.randrange(4):
            case 0 if at < len(answer):
                answer[at] = chance.randrange(256)
            case 1:
                del answer[at : at + chance.randrange(20)]
            case 2:
                answer[at:at] = chance.randbytes(chance.randrange(10))
            case _:
                answer[at:at] = chance.choice(SPLICES)
    return bytes(answer)


@pytest.mark.parametrize("seed", range(4))
async def test_damaged_answers_never_raise(serve: Serve, seed: int) -> None:
    chance = random.Random(seed)
    answer = b""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        cut = chance.randrange(len(answer) + 1)
        for part in (answer[:cut], answer[cut:]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    client = EngineClient(Target.parse(await serve(handle)))
    vllm = PROFILES["vllm"]
    for _ in range(60):
        answer = damaged(chance)
        page = await client.scrape(vllm.names(), timeout_sec=5, profile=VLLM)
        assert isinstance(page, dict) or page.failure in WORDS or page.failure.startswith("http_")
        assert isinstance(await client.canary(vllm.canaries["agg"], model="x", deadline_sec=5), CanaryReport)
        assert await client.read_flags(vllm.flag_endpoints, timeout_sec=5) in Flags
        assert isinstance(await client.describe(timeout_sec=5), Description)
        # Control: the answer is read where it is whole.
        answer = response(PAGE)
        assert not isinstance(await client.scrape(vllm.names(), timeout_sec=5, profile=VLLM), ScrapeFailure)
    assert complaints == []
