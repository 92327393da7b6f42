"""Who an engine says it is, and that finding out never waits long."""

from __future__ import annotations

import asyncio

import pytest
from tests.client.servers import Recorder, Serve, read_request, response, wait_for_ever

from enginewatch.client.target import Description, EngineClient, Target
from enginewatch.engines import PROFILES

VLLM_ANSWERS = {
    "/v1/models": response('{"object": "list", "data": [{"id": "tiny", "owned_by": "vllm"}]}'),
    "/version": response('{"version": "0.32.0+cpu"}'),
}
SGLANG_ANSWERS = {
    "/v1/models": response('{"object": "list", "data": [{"id": "tiny", "owned_by": "sglang"}]}'),
    "/model_info": response('{"model_path": "x", "tokenizer_path": "x", "is_generation": true}'),
    "/server_info": response('{"version": "0.5.23", "disaggregation_mode": "prefill"}'),
}


async def describe(url: str, *kinds: str, timeout_sec: float = 2.0) -> Description:
    client = EngineClient(Target.parse(url))
    return await client.describe(*(PROFILES[kind] for kind in kinds), timeout_sec=timeout_sec)


async def test_vllm_says_who_it_is_without_its_core(serve: Serve) -> None:
    found = await describe(await serve(Recorder(VLLM_ANSWERS)))
    assert found == Description(kind="vllm", version="0.32.0+cpu", model="tiny", told_at="/v1/models")


async def test_sglang_says_who_it_is(serve: Serve) -> None:
    found = await describe(await serve(Recorder(SGLANG_ANSWERS)))
    assert found == Description(kind="sglang", version="0.5.23", model="tiny", role="prefill", told_at="/v1/models")


async def test_an_older_sglang_is_asked_by_the_older_path(serve: Serve) -> None:
    answers = {**SGLANG_ANSWERS, "/get_server_info": response('{"version": "0.4.9"}')}
    del answers["/server_info"]
    assert (await describe(await serve(Recorder(answers)))).version == "0.4.9"


async def test_a_hung_sglang_is_recognised_and_costs_one_deadline(serve: Serve) -> None:
    recorder = Recorder(SGLANG_ANSWERS)
    asked_of_the_core: list[str] = []

    async def hung(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        path = request.split(b" ")[1].decode()
        if "server_info" in path:
            asked_of_the_core.append(path)
            await reader.read()
        else:
            writer.write(recorder.answers.get(path, response("", status="404 Not Found")))

    found = await describe(await serve(hung), timeout_sec=0.3)
    assert found == Description(
        kind="sglang", version=None, model="tiny", unanswered="/server_info", told_at="/v1/models"
    )
    assert asked_of_the_core == ["/server_info"]


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
async def test_a_version_that_wants_a_key_is_told_from_one_that_is_not_there(serve: Serve, status: str) -> None:
    found = await describe(await serve(Recorder({"/server_info": response("", status=status)})), "sglang")
    assert (found.version, found.guarded) == (None, "/server_info")
    assert (await describe(await serve(Recorder({})), "sglang")).guarded is None


async def test_a_version_that_another_path_tells_wants_no_key(serve: Serve) -> None:
    refused = response("", status="401 Unauthorized")
    answers = {"/server_info": refused, "/get_server_info": SGLANG_ANSWERS["/server_info"]}
    found = await describe(await serve(Recorder(answers)), "sglang")
    assert (found.version, found.guarded) == ("0.5.23", None)


async def test_a_silent_front_end_is_not_taken_for_a_silent_core(serve: Serve) -> None:
    assert (await describe(await serve(wait_for_ever), "vllm", timeout_sec=0.1)).unanswered is None


async def test_a_known_profile_is_asked_for_its_version_although_the_engine_does_not_say_who_it_is(
    serve: Serve,
) -> None:
    url = await serve(Recorder({"/server_info": SGLANG_ANSWERS["/server_info"]}))
    assert await describe(url, "sglang") == Description(kind=None, version="0.5.23", role="prefill")
    assert await describe(url) == Description()


async def test_another_engine_is_unknown_rather_than_the_next_best(serve: Serve) -> None:
    answers = {
        "/v1/models": response('{"data": [{"id": "tiny", "owned_by": "nvidia"}]}'),
        "/version": response('{"version": "1.2.0"}'),
    }
    found = await describe(await serve(Recorder(answers)))
    assert found.kind == "unknown"
    assert found.version is None


async def test_nobody_or_nothing_is_an_empty_description(serve: Serve, unused_url: str) -> None:
    assert await describe(unused_url) == Description()
    assert await describe(await serve(wait_for_ever), timeout_sec=0.1) == Description()


async def test_a_version_that_is_none_is_not_taken(serve: Serve) -> None:
    for said in ("5", '"' + "9" * 100 + '"', '"1\\n2"', '""', "null"):
        answers = {**VLLM_ANSWERS, "/version": response(f'{{"version": {said}}}')}
        assert (await describe(await serve(Recorder(answers)))).version is None
