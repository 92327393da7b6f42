"""How the pause endpoints' answers add up."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.client.servers import Handler, Recorder, Serve, answering, read_request, response, wait_for_ever

from enginewatch.client.target import EngineClient, Target
from enginewatch.core.events import Flags
from enginewatch.engines import PROFILES

VLLM = PROFILES["vllm"].flag_endpoints
SGLANG = PROFILES["sglang"].flag_endpoints
YES, NO = "true", "false"


def vllm(paused: str | bytes | None, sleeping: str | bytes | None) -> Handler:
    """An engine whose endpoints say yes, no, raw bytes, or nothing at all (None)."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await read_request(reader)).split(b" ")[1].decode()
        said = paused if path == "/is_paused" else sleeping
        if said is None:
            await reader.read()
        elif isinstance(said, bytes):
            writer.write(said)
        else:
            writer.write(response(f'{{"{path[1:]}": {said}}}'))

    return handle


ABSENT = response("", status="404 Not Found")


@pytest.mark.parametrize(
    ("paused", "sleeping", "flags"),
    [
        (NO, NO, Flags.CLEAR),
        (YES, NO, Flags.PAUSED),
        (YES, YES, Flags.PAUSED),
        (NO, YES, Flags.SLEEPING),
        (YES, None, Flags.PAUSED),
        (None, YES, Flags.SLEEPING),
        (None, NO, Flags.SILENT),
        (None, None, Flags.SILENT),
        (ABSENT, ABSENT, Flags.ABSENT),
        (ABSENT, NO, Flags.CLEAR),
        (ABSENT, YES, Flags.SLEEPING),
        (ABSENT, None, Flags.SILENT),
        (response("", status="405 Method Not Allowed"), response("", status="501 Not Implemented"), Flags.ABSENT),
        (response("", status="401 Unauthorized"), response("", status="401 Unauthorized"), Flags.SILENT),
        (response("", status="500 Oops"), NO, Flags.SILENT),
        ("1", "1", Flags.SILENT),
        (response("[]"), response("not JSON"), Flags.SILENT),
        (response("{}"), response("x" * 100_000), Flags.SILENT),
    ],
)
async def test_the_answers_add_up(
    serve: Serve, paused: str | bytes | None, sleeping: str | bytes | None, flags: Flags
) -> None:
    client = EngineClient(Target.parse(await serve(vllm(paused, sleeping))))
    assert await client.read_flags(VLLM, timeout_sec=0.5) is flags


async def test_endpoints_are_asked_side_by_side(serve: Serve) -> None:
    client = EngineClient(Target.parse(await serve(wait_for_ever)))
    began = time.monotonic()
    assert await client.read_flags(VLLM, timeout_sec=1.0) is Flags.SILENT
    assert time.monotonic() - began < 1.9


async def test_an_engine_without_pause_endpoints_is_not_asked(unused_url: str) -> None:
    assert await EngineClient(Target.parse(unused_url)).read_flags(()) is Flags.ABSENT


async def test_nobody_listening_is_silence_not_absence(unused_url: str) -> None:
    assert await EngineClient(Target.parse(unused_url)).read_flags(VLLM) is Flags.SILENT


OK, UNAVAILABLE = response("ok"), response("", status="503 Service Unavailable")
LOCKED, BROKEN = response("", status="401 Unauthorized"), response("", status="502 Bad Gateway")


@pytest.mark.parametrize(
    ("ready", "ping", "flags"),
    [
        (UNAVAILABLE, OK, Flags.PAUSED),
        (UNAVAILABLE, UNAVAILABLE, Flags.DOUBTFUL),
        (UNAVAILABLE, LOCKED, Flags.DOUBTFUL),
        (OK, OK, Flags.CLEAR),
        (OK, UNAVAILABLE, Flags.CLEAR),
        (LOCKED, LOCKED, Flags.SILENT),
        (BROKEN, OK, Flags.SILENT),
        (ABSENT, OK, Flags.ABSENT),
    ],
    ids=["paused", "unhealthy", "half locked", "serving", "odd", "locked", "broken", "older"],
)
async def test_a_pause_told_by_a_status_needs_the_other_path_to_be_well(
    serve: Serve, ready: bytes, ping: bytes, flags: Flags
) -> None:
    client = EngineClient(Target.parse(await serve(Recorder({"/ready": ready, "/ping": ping}))))
    assert await client.read_flags(SGLANG) is flags


async def test_a_pause_told_by_a_status_is_not_guessed_from_silence(serve: Serve) -> None:
    async def only_ready(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/ready" in await read_request(reader):
            writer.write(UNAVAILABLE)
        else:
            await reader.read()

    client = EngineClient(Target.parse(await serve(only_ready)))
    assert await client.read_flags(SGLANG, timeout_sec=0.5) is Flags.SILENT


async def test_a_flag_is_not_read_from_behind_a_redirect(serve: Serve) -> None:
    moved = response('{"is_paused": true}', status="302 Found", headers="Location: /is_sleeping\r\n")
    client = EngineClient(Target.parse(await serve(answering(moved))))
    assert await client.read_flags(VLLM) is Flags.SILENT
