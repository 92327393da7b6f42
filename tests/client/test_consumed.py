"""Statistics that reading removes are not read by accident, and read with care when they are asked for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from tests.client.servers import Recorder, Serve, read_request, response, wait_for_ever

from enginewatch.client import consumed
from enginewatch.client.describe import describe as describe_on
from enginewatch.client.exchange import Line
from enginewatch.client.target import CanaryReport, EngineClient, ScrapeFailure, Target
from enginewatch.core.events import Outcome
from enginewatch.core.statistics import NOT_READ
from enginewatch.engines import PROFILES, UNKNOWN
from enginewatch.engines.profile import Profile

TRTLLM, VLLM = PROFILES["trtllm"], PROFILES["vllm"]
READ = TRTLLM.on_json_statistics()
NAMES = frozenset({"a_total", "trtllm_generation_tokens_total"})

JSON = "Content-Type: application/json\r\n"
LIST = response(json.dumps([{"iter": 7, "numActiveRequests": 2, "numQueuedRequests": 1}]), headers=JSON)
EMPTY = response("[]", headers=JSON)
PAGE = response("a_total 1.0\n")


def models(owner: str | None) -> bytes:
    return response(json.dumps({"data": [{"id": "tiny", "object": "model"} | ({"owned_by": owner} if owner else {})]}))


def client_of(url: str, **target: str) -> EngineClient:
    return EngineClient(Target.parse(url, **target))


async def scrape(client: EngineClient, profile: Profile | None) -> dict[str, float] | ScrapeFailure:
    return await client.scrape(NAMES, timeout_sec=5, profile=profile)


# --- not by accident ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [None, UNKNOWN, TRTLLM], ids=["auto", "unknown", "given"])
async def test_the_list_of_an_engine_that_says_who_it_is_is_never_read(serve: Serve, profile: Profile | None) -> None:
    server = Recorder({"/v1/models": models("tensorrt_llm"), "/metrics": LIST})
    client = client_of(await serve(server), metrics_path="/metrics")
    for _ in range(3):
        found = await scrape(client, profile)
        assert isinstance(found, ScrapeFailure)
        assert (found.failure, found.detail) == ("malformed", NOT_READ)
    assert "/metrics" not in server.paths()


async def test_by_its_profile_the_page_is_elsewhere(serve: Serve) -> None:
    server = Recorder({"/metrics": LIST, "/prometheus/metrics": response("trtllm_generation_tokens_total 3.0\n")})
    found = await scrape(client_of(await serve(server)), TRTLLM)
    assert found == {"trtllm_generation_tokens_total": 3.0}
    assert server.paths() == ["/prometheus/metrics"]


@pytest.mark.parametrize("answer", [models("someone"), models(None), response("", status="404 Not Found")])
async def test_any_other_engine_is_asked_once_and_then_read(serve: Serve, answer: bytes) -> None:
    server = Recorder({"/v1/models": answer, "/metrics": PAGE})
    client = client_of(await serve(server))
    for _ in range(3):
        assert await scrape(client, None) == {"a_total": 1.0}
    assert server.paths() == ["/v1/models", "/metrics", "/metrics", "/metrics"]


async def test_an_engine_that_is_known_to_be_another_is_not_asked(serve: Serve) -> None:
    server = Recorder({"/metrics": PAGE})
    assert await scrape(client_of(await serve(server)), VLLM) == {"a_total": 1.0}
    assert server.paths() == ["/metrics"]


@pytest.mark.parametrize("profile", [None, VLLM], ids=["auto", "taken for another"])
async def test_a_list_behind_a_front_that_hides_who_it_is_is_read_once(serve: Serve, profile: Profile | None) -> None:
    server = Recorder({"/v1/models": response("", status="401 Unauthorized"), "/metrics": LIST})
    client = client_of(await serve(server))
    for _ in range(4):
        found = await scrape(client, profile)
        assert isinstance(found, ScrapeFailure)
        assert found.failure == "malformed"
    assert server.paths().count("/metrics") == 1


@pytest.mark.parametrize("profile", [None, UNKNOWN, VLLM], ids=["auto", "unknown", "known"])
async def test_a_list_from_an_engine_that_says_it_is_another_does_not_blind(
    serve: Serve, profile: Profile | None
) -> None:
    # A proxy answered for it, once. It was not read any more until somebody refused a connection.
    server = Recorder({"/v1/models": models("vllm"), "/metrics": LIST})
    client = client_of(await serve(server))
    assert isinstance(await scrape(client, profile), ScrapeFailure)
    server.answers["/metrics"] = PAGE
    assert await scrape(client, profile) == {"a_total": 1.0}
    server.answers["/v1/models"] = models(None)
    assert await scrape(client, profile) == {"a_total": 1.0}, "and it is not asked again"


async def test_that_an_engine_is_gone_or_silent_is_seen_without_its_page(serve: Serve, unused_url: str) -> None:
    server = Recorder({"/v1/models": models("tensorrt_llm"), "/metrics": LIST})
    client = client_of(await serve(server))
    await scrape(client, None)

    async def failure_of(line: Line) -> str:
        client.line = line
        found = await client.scrape(NAMES, timeout_sec=0.3, profile=None)
        assert isinstance(found, ScrapeFailure)
        return found.failure

    server.answers["/v1/models"] = response("", status="503 Service Unavailable")
    assert await failure_of(client.line) == "http_503"
    assert await failure_of(Line(await serve(wait_for_ever))) == "timeout"
    assert await failure_of(Line(unused_url)) == "refused"

    another = Recorder({"/v1/models": models("vllm"), "/metrics": PAGE})
    client.line = Line(await serve(another))
    assert await scrape(client, None) == {"a_total": 1.0}, "what comes after nobody listened may be another engine"


async def test_a_server_that_answers_nothing_but_its_page_is_read(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b" /metrics " in await read_request(reader):
            writer.write(PAGE)
            await writer.drain()
        else:
            await reader.read()

    monkeypatch.setattr(consumed, "LOOK_SEC", 0.1)
    assert await scrape(client_of(await serve(handle)), None) == {"a_total": 1.0}


# --- when they are asked for ----------------------------------------------------------------------------------------


async def test_asked_for_the_list_is_read_in_place_of_the_page(serve: Serve) -> None:
    server = Recorder({"/metrics": LIST, "/prometheus/metrics": PAGE})
    client = client_of(await serve(server), metrics_path="/prometheus/metrics")
    assert await scrape(client, READ) == {
        "json:iter": 7.0,
        "json:numActiveRequests": 2.0,
        "json:numQueuedRequests": 1.0,
    }
    server.answers["/metrics"] = EMPTY
    assert await scrape(client, READ) == {"json:iter": 7.0}
    assert server.paths() == ["/metrics", "/metrics"]


async def test_after_nobody_listened_an_empty_list_is_another_processs(serve: Serve, unused_url: str) -> None:
    server = Recorder({"/metrics": LIST})
    client = client_of(await serve(server))
    await scrape(client, READ)
    line, client.line = client.line, Line(unused_url)
    assert isinstance(await scrape(client, READ), ScrapeFailure)
    client.line, server.answers["/metrics"] = line, EMPTY
    assert await scrape(client, READ) == {}


async def test_the_engines_own_wait_does_not_count_against_the_deadline(serve: Serve) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(0.6)
        writer.write(EMPTY)
        await writer.drain()

    client = client_of(await serve(handle))
    assert await client.scrape(NAMES, timeout_sec=0.3, profile=READ) == {}
    assert READ.json_statistics is not None
    impatient = replace(READ, json_statistics=replace(READ.json_statistics, waits_sec=0.0))
    assert isinstance(await client.scrape(NAMES, timeout_sec=0.3, profile=impatient), ScrapeFailure)


async def test_two_reads_at_once_are_put_one_after_the_other(serve: Serve) -> None:
    """Of two, one could end with an older iteration after the other, and a count that falls is another process."""
    counts = iter((1, 2, 3))
    under_way: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        under_way.append(1)
        assert len(under_way) == 1, "two at once"
        await asyncio.sleep(0.05)
        writer.write(response(json.dumps([{"iter": next(counts)}])))
        await writer.drain()
        under_way.pop()

    client = client_of(await serve(handle))
    pages = await asyncio.gather(*(scrape(client, READ) for _ in range(3)))
    assert pages == [{"json:iter": 1.0}, {"json:iter": 2.0}, {"json:iter": 3.0}]


async def test_a_read_that_waits_for_another_in_vain_is_a_timeout_and_lets_the_next_through(serve: Serve) -> None:
    assert READ.json_statistics is not None
    hasty = replace(READ, json_statistics=replace(READ.json_statistics, waits_sec=0.0))
    client = client_of(await serve(wait_for_ever))
    long = asyncio.create_task(client.scrape(NAMES, timeout_sec=60, profile=hasty))
    await asyncio.sleep(0.05)
    found = await client.scrape(NAMES, timeout_sec=0.1, profile=hasty)
    assert isinstance(found, ScrapeFailure)
    assert found.failure == "timeout"
    long.cancel()
    await asyncio.wait([long])
    client.line = Line(await serve(Recorder({"/metrics": LIST})))
    assert isinstance(await scrape(client, hasty), dict)


async def test_a_list_that_was_cut_off_is_no_list(serve: Serve) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b'HTTP/1.0 200 OK\r\n\r\n[{"iter": 7}, {"iter": 8}')
        await writer.drain()

    found = await scrape(client_of(await serve(handle)), READ)
    assert isinstance(found, ScrapeFailure)
    assert found.failure == "malformed"


@pytest.mark.parametrize(
    ("answer", "batches"),
    [
        (response("# page\n"), True),
        (response("", status="404 Not Found"), False),
        (response("", status="401 Unauthorized"), True),
    ],
)
async def test_whether_the_list_is_filled_at_request_ends_is_told_by_the_page_beside_it(
    serve: Serve, answer: bytes, batches: bool
) -> None:
    server = Recorder({"/v1/models": models("tensorrt_llm"), "/prometheus/metrics": answer})
    line = Line(await serve(server))
    for profiles in ((), (TRTLLM,), (READ,)):
        assert (await describe_on(line, profiles, timeout_sec=1)).batches_statistics is batches
    assert "/metrics" not in server.paths()
    assert not (await describe_on(line, (VLLM,), timeout_sec=1)).batches_statistics


# --- a dead executor ------------------------------------------------------------------------------------------------

REFUSED = response('{"object": "error", "message": "x", "code": 400}', status="400 Bad Request", headers=JSON)


async def send(server: Recorder, serve: Serve, role: str = "agg") -> CanaryReport:
    request = TRTLLM.canaries[role]  # type: ignore[index]
    return await client_of(await serve(server)).canary(request, model="tiny", deadline_sec=5)


@pytest.mark.parametrize("role", ["agg", "prefill", "decode"])
async def test_a_refused_canary_is_an_error_when_the_engine_says_that_its_core_is_gone(serve: Serve, role: str) -> None:
    """NVIDIA/TensorRT-LLM#18663: the front end lives on, answers 400 to every request and 503 on /health, for ever."""
    server = Recorder({"/v1/completions": REFUSED, "/health": response("", status="503 Service Unavailable")})
    report = await send(server, serve, role)
    assert report.outcome is Outcome.ERROR_ANSWER
    assert "/health says 503" in report.detail
    assert server.paths() == ["/v1/completions", "/health"]


@pytest.mark.parametrize("health", [response(""), response("", status="404 Not Found"), response("", status="500 No")])
async def test_a_refused_canary_of_an_engine_that_is_well_is_only_a_misfit(serve: Serve, health: bytes) -> None:
    report = await send(Recorder({"/v1/completions": REFUSED, "/health": health}), serve)
    assert report.outcome is Outcome.MISCONFIGURED


async def test_health_is_asked_only_after_a_refusal(serve: Serve) -> None:
    whole = response(json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}), headers=JSON)
    server = Recorder({"/v1/completions": whole, "/health": response("", status="503 Service Unavailable")})
    assert (await send(server, serve)).outcome is Outcome.OK
    server.answers["/v1/completions"] = response("", status="429 Too Many Requests")
    assert (await send(server, serve)).outcome is Outcome.SATURATED
    assert "/health" not in server.paths()


async def test_a_canary_that_cannot_be_told_dead_in_time_is_a_misfit(serve: Serve) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/health" in await read_request(reader):
            await reader.read()
        writer.write(REFUSED)
        await writer.drain()

    client = client_of(await serve(handle))
    report = await client.canary(TRTLLM.canaries["agg"], model="tiny", deadline_sec=0.3)
    assert report.outcome is Outcome.MISCONFIGURED
