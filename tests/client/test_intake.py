"""What an engine sends is taken in small sips, and what is nothing but packaging is not taken at all."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest
from aiohttp.client_proto import ResponseHandler
from tests.client.servers import Handler, Serve, answering, read_request, response

from enginewatch.client.intake import SIP_BYTES
from enginewatch.client.target import EngineClient, ScrapeFailure, Target
from enginewatch.core.events import Outcome
from enginewatch.engines.profile import AnswerFormat, CanaryRequest
from enginewatch.engines.vllm import PROFILE as VLLM

NAMES = frozenset({"a_total"})
PROBE = CanaryRequest("GET", "/x", None, AnswerFormat.ANY_2XX)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\n" + b"".join(b"a%d: b\r\n" % number for number in range(60)) + b"\r\n"


def for_ever(begin: bytes, again: bytes) -> Handler:
    """Answers with `begin` and then nothing but `again`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(begin)
        while True:
            writer.write(again * (100_000 // len(again)))
            await writer.drain()

    return handle


async def test_aiohttp_is_never_given_more_than_a_sip(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    # 256 KiB of answers without a body, parsed at once, kept /healthz waiting for a third of a second.
    sips: list[int] = []
    data_received = ResponseHandler.data_received

    def watched(self: Any, data: bytes) -> None:
        sips.append(len(data))
        data_received(self, data)

    monkeypatch.setattr(ResponseHandler, "data_received", watched)
    body = b"# filler\n" * 100_000 + b"a_total 1\n"
    client = EngineClient(Target.parse(await serve(answering(response(body)))))
    assert await client.scrape(NAMES, timeout_sec=5, profile=VLLM) == {"a_total": 1.0}
    assert sum(sips) > len(body)
    assert max(sips) <= SIP_BYTES


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (for_ever(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "before an answer"),
        (for_ever(b"", HINTS), "before an answer"),
        (for_ever(CHUNKED, b"1\r\n#\r\n1\r\n\n\r\n"), "too small"),
        (for_ever(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", gzip.compress(b"")), "members"),
    ],
    ids=["continue", "early-hints", "one-byte-chunks", "empty-gzip-members"],
)
async def test_packaging_without_end_is_no_answer_and_is_not_read_until_the_deadline(
    serve: Serve, handler: Handler, says: str
) -> None:
    client = EngineClient(Target.parse(await serve(handler)))
    async with asyncio.timeout(20):
        result = await client.scrape(NAMES, timeout_sec=60, profile=VLLM)
        report = await client.canary(PROBE, deadline_sec=60)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "malformed"
    assert says in result.detail
    assert report.outcome is Outcome.MISCONFIGURED


async def test_a_stream_of_short_chunks_is_read(serve: Serve) -> None:
    # The control: token by token, as engines stream, is three times as much packaging as text at worst.
    events = b"".join(b"7\r\n: ok\n\n \r\n" for _ in range(50_000))
    client = EngineClient(Target.parse(await serve(answering(CHUNKED + events + b"0\r\n\r\n"))))
    assert (await client.canary(PROBE, deadline_sec=20)).outcome is Outcome.OK
