"""A canary goes out as the profile says, is judged at its last byte, and leaves nothing behind in the engine."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.client.servers import (
    Handler,
    Recorder,
    Serve,
    answering,
    connections_to,
    open_sockets,
    read_request,
    reset,
    response,
    wait_for_ever,
)

from enginewatch.client.target import CanaryReport, EngineClient, Target
from enginewatch.core.events import Outcome
from enginewatch.engines import PROFILES
from enginewatch.engines.profile import Aim, AnswerFormat, CanaryRequest

VLLM = PROFILES["vllm"].canaries["agg"]
SGLANG = PROFILES["sglang"].canaries["agg"]
NO_MODEL_NEEDED = replace(VLLM, body={"prompt": "Test", "max_tokens": 1})
HEADER = Aim(since=(1,), source="test", header="X-data-parallel-rank")
FIELD = Aim(since=(1,), source="test", body_field="routed_dp_rank")

COMPLETE = response(
    json.dumps({"object": "text_completion", "choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}),
    headers="Content-Type: application/json\r\n",
)
MODELS = response(
    json.dumps(
        {"data": [{"id": "adapter", "parent": "tiny"}, {"id": "tiny", "parent": None, "owned_by": "vllm"}]},
    )
)


async def send(url: str, request: CanaryRequest = NO_MODEL_NEEDED, **how: Any) -> CanaryReport:
    return await EngineClient(Target.parse(url)).canary(request, **{"deadline_sec": 5.0, **how})


def sent_body(request: bytes) -> Any:
    return json.loads(request.partition(b"\r\n\r\n")[2])


# --- what goes out --------------------------------------------------------------------------------------------------


async def test_the_models_name_is_read_once_and_filled_in(serve: Serve) -> None:
    server = Recorder({"/v1/models": MODELS, "/v1/completions": COMPLETE})
    client = EngineClient(Target.parse(await serve(server)))
    for _ in range(2):
        assert (await client.canary(VLLM, deadline_sec=5)).outcome is Outcome.OK
    assert server.paths() == ["/v1/models", "/v1/completions", "/v1/completions"]
    assert sent_body(server.requests[1]) == {"model": "tiny", "prompt": "Test", "max_tokens": 1, "temperature": 0}


async def test_a_forgotten_model_is_read_anew(serve: Serve) -> None:
    server = Recorder({"/v1/models": MODELS, "/v1/completions": COMPLETE})
    client = EngineClient(Target.parse(await serve(server)))
    await client.canary(VLLM, deadline_sec=5)
    client.forget_model()
    await client.canary(VLLM, deadline_sec=5)
    assert server.paths().count("/v1/models") == 2


async def test_a_model_the_engine_no_longer_serves_is_read_anew(serve: Serve) -> None:
    server = Recorder({"/v1/models": MODELS})
    client = EngineClient(Target.parse(await serve(server)))
    assert (await client.canary(VLLM, deadline_sec=5)).outcome is Outcome.MISCONFIGURED
    server.answers["/v1/completions"] = COMPLETE
    assert (await client.canary(VLLM, deadline_sec=5)).outcome is Outcome.OK
    assert server.paths().count("/v1/models") == 2


async def test_a_given_model_is_not_asked_for(serve: Serve) -> None:
    server = Recorder({"/v1/completions": COMPLETE})
    report = await send(await serve(server), replace(VLLM, body={"deep": [{"model": "{model}"}]}), model="given")
    assert report.outcome is Outcome.OK
    assert sent_body(server.requests[0]) == {"deep": [{"model": "given"}]}


async def test_a_header_aims_at_the_core(serve: Serve) -> None:
    server = Recorder({"/v1/completions": COMPLETE})
    report = await send(await serve(server), core="3", aim=HEADER)
    assert report.aimed
    assert b"X-data-parallel-rank: 3\r\n" in server.requests[0]


async def test_a_server_that_counts_its_own_cores_from_zero_is_aimed_at_so(serve: Serve) -> None:
    server = Recorder({"/v1/completions": COMPLETE})
    report = await send(await serve(server), core="9", cores=("8", "9"), aim=replace(HEADER, from_first_core=True))
    assert report.aimed
    assert b"X-data-parallel-rank: 1\r\n" in server.requests[0]


async def test_a_body_field_aims_at_the_core(serve: Serve) -> None:
    server = Recorder({"/v1/completions": COMPLETE})
    report = await send(await serve(server), core="3", aim=FIELD)
    assert report.aimed
    assert sent_body(server.requests[0])["routed_dp_rank"] == 3


@pytest.mark.parametrize(
    ("request_", "core", "aim"),
    [
        (NO_MODEL_NEEDED, "3", None),
        (NO_MODEL_NEEDED, None, HEADER),
        (NO_MODEL_NEEDED, "a\r\nX: y", HEADER),
        (replace(NO_MODEL_NEEDED, body=None, raw_body="[1]"), "3", FIELD),
    ],
    ids=["no-aim", "no-core", "core-is-no-rank", "no-object-to-put-it-in"],
)
async def test_what_cannot_be_aimed_goes_out_unaimed_and_says_so(
    serve: Serve, request_: CanaryRequest, core: str | None, aim: Aim | None
) -> None:
    server = Recorder({"/v1/completions": COMPLETE})
    report = await send(await serve(server), request_, core=core, aim=aim)
    assert report.outcome is Outcome.OK
    assert not report.aimed
    assert b"rank" not in server.requests[0]


async def test_an_operators_own_request_goes_out_as_it_is(serve: Serve) -> None:
    server = Recorder({"/health_generate?deep=1": response("whatever", status="202 Accepted")})
    request = CanaryRequest("GET", "health_generate?deep=1", None, AnswerFormat.ANY_2XX)
    assert (await send(await serve(server), request)).outcome is Outcome.OK
    assert server.requests[0].startswith(b"GET /health_generate?deep=1 HTTP/1.1\r\n")


async def test_a_raw_body_is_sent_unchanged(serve: Serve) -> None:
    server = Recorder({"/x": response("ok")})
    request = CanaryRequest("POST", "/x", None, AnswerFormat.ANY_2XX, raw_body='{"model": "{model}"')
    assert (await send(await serve(server), request)).outcome is Outcome.OK
    assert server.requests[0].endswith(b'\r\n\r\n{"model": "{model}"')


@pytest.mark.parametrize("method", ["GE T", "GET\r\nX: y"])
async def test_a_method_that_is_not_http_is_a_matter_of_configuration(serve: Serve, method: str) -> None:
    server = Recorder({"/x": response("ok")})
    report = await send(await serve(server), CanaryRequest(method, "/x", None, AnswerFormat.ANY_2XX))
    assert report.outcome is Outcome.MISCONFIGURED
    assert server.requests == []


# --- what comes back ------------------------------------------------------------------------------------------------


def head_then(*, body: bytes = b"", then_reset: bool = False, then_wait: bool = False) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n" + body)
        await writer.drain()
        await asyncio.sleep(0.02)
        if then_reset:
            reset(writer)
        elif then_wait:
            await reader.read()

    return handle


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)


async def reset_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    reset(writer)


@pytest.mark.parametrize(
    ("handler", "outcome"),
    [
        (answering(COMPLETE), Outcome.OK),
        (wait_for_ever, Outcome.TIMEOUT),
        (head_then(then_wait=True), Outcome.FROZEN),
        (head_then(body=b'{"choices": [', then_wait=True), Outcome.FROZEN),
        (head_then(body=b'{"choices": ['), Outcome.FROZEN),
        (head_then(body=b'{"choices": [', then_reset=True), Outcome.FROZEN),
        (close_at_once, Outcome.REFUSED),
        (reset_at_once, Outcome.REFUSED),
        (answering(b"SSH-2.0-OpenSSH_9.2\r\n"), Outcome.MISCONFIGURED),
        (answering(response("<html></html>")), Outcome.MISCONFIGURED),
        (answering(response(b"{}", headers="Content-Encoding: br\r\n")), Outcome.MISCONFIGURED),
        (answering(response("{}", status="401 Unauthorized")), Outcome.MISCONFIGURED),
        (answering(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 9\r\n\r\n"), Outcome.MISCONFIGURED),
        (answering(response("{}", status="422 Unprocessable")), Outcome.MISCONFIGURED),
        (answering(response("{}", status="429 Too Many Requests")), Outcome.SATURATED),
        (answering(response("The request queue is full.", status="503 Busy")), Outcome.SATURATED),
        (answering(response("{}", status="503 Dead")), Outcome.ERROR_ANSWER),
        (answering(response("{}", status="500 Oops")), Outcome.ERROR_ANSWER),
        (answering(b"HTTP/1.1 500 Oops\r\nContent-Length: 9\r\n\r\n"), Outcome.ERROR_ANSWER),
    ],
)
async def test_each_answer_has_its_outcome(serve: Serve, handler: Handler, outcome: Outcome) -> None:
    waits = outcome is Outcome.TIMEOUT or outcome is Outcome.FROZEN
    report = await send(await serve(handler), deadline_sec=0.5 if waits else 20)
    assert report.outcome is outcome
    assert report.detail
    assert report.duration_sec < 10


async def test_nobody_listening_is_refused(unused_url: str) -> None:
    assert (await send(unused_url)).outcome is Outcome.REFUSED


async def test_a_stopped_server_is_a_timeout(frozen_url: str) -> None:
    assert (await send(frozen_url, deadline_sec=0.1)).outcome is Outcome.TIMEOUT


async def test_a_name_that_does_not_resolve_says_nothing_about_the_engine() -> None:
    report = await send("http://engine.invalid")
    assert report.outcome is Outcome.UNASKED
    assert "engine.invalid" in report.detail


async def test_a_redirect_is_never_followed(serve: Serve) -> None:
    moved = response("", status="307 Temporary Redirect", headers="Location: /elsewhere\r\n")
    server = Recorder({"/v1/completions": moved, "/elsewhere": COMPLETE})
    assert (await send(await serve(server))).outcome is Outcome.MISCONFIGURED
    assert server.paths() == ["/v1/completions"]


async def test_a_body_without_end_is_cut_off_before_it_fills_memory(serve: Serve) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    assert (await send(await serve(flood), deadline_sec=20)).outcome is Outcome.MISCONFIGURED


@pytest.mark.parametrize(
    ("models", "outcome"),
    [
        (response("{}", status="401 Unauthorized"), Outcome.MISCONFIGURED),
        (response("", status="404 Not Found"), Outcome.MISCONFIGURED),
        (response("not JSON"), Outcome.MISCONFIGURED),
        (response('{"data": []}'), Outcome.MISCONFIGURED),
        (response('{"data": [{"id": 7}, 5]}'), Outcome.MISCONFIGURED),
        (response("[" * 100_000), Outcome.MISCONFIGURED),
        (response("x" * 1_000_000), Outcome.MISCONFIGURED),
        (response("", status="429 Slow"), Outcome.SATURATED),
        (response("the queue is full", status="503 Busy"), Outcome.SATURATED),
        (response("", status="500 Oops"), Outcome.ERROR_ANSWER),
    ],
)
async def test_without_a_model_the_canary_tells_why(serve: Serve, models: bytes, outcome: Outcome) -> None:
    report = await send(await serve(Recorder({"/v1/models": models})), VLLM)
    assert report.outcome is outcome
    assert "model" in report.detail


async def test_the_deadline_includes_the_question_for_the_model(serve: Serve) -> None:
    async def slow_models(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if b"/v1/models" in await read_request(reader):
            await asyncio.sleep(1)
            writer.write(MODELS)
        else:
            await reader.read()

    began = time.monotonic()
    report = await send(await serve(slow_models), VLLM, deadline_sec=1.5)
    assert report.outcome is Outcome.TIMEOUT
    # Two deadlines, one for each question, would be 2.5 s.
    assert time.monotonic() - began < 2.4


async def test_a_rejected_canary_names_the_role_it_was_made_for(serve: Serve) -> None:
    url = await serve(answering(response("", status="400 Bad Request")))
    assert "role decode" in (await send(url, role="decode")).detail


@pytest.mark.parametrize("text", ["secret prompt", "<b>inject</b>"])
async def test_nothing_the_engine_said_is_in_the_report(serve: Serve, text: str) -> None:
    for status in ("200 OK", "400 Bad", "503 Busy"):
        report = await send(await serve(answering(response(json.dumps({"error": text}), status=status))))
        assert text not in repr(report)


# --- what is left behind --------------------------------------------------------------------------------------------


async def test_a_thousand_canaries_to_a_frozen_engine_leave_no_task_and_no_socket(frozen_url: str) -> None:
    client = EngineClient(Target.parse(frozen_url))

    async def round_(count: int) -> None:
        reports = await asyncio.gather(*(client.canary(NO_MODEL_NEEDED, deadline_sec=0.05) for _ in range(count)))
        assert {report.outcome for report in reports} == {Outcome.TIMEOUT}

    await round_(50)
    await asyncio.sleep(0)
    tasks, sockets = asyncio.all_tasks(), open_sockets()
    for _ in range(20):
        await round_(50)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    assert open_sockets() == sockets
    assert connections_to(frozen_url) == 0


async def test_a_cancelled_canary_leaves_no_task_and_no_socket(frozen_url: str) -> None:
    client = EngineClient(Target.parse(frozen_url))
    tasks, sockets = asyncio.all_tasks(), open_sockets()
    canaries = [asyncio.create_task(client.canary(NO_MODEL_NEEDED, deadline_sec=60)) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert open_sockets() == sockets + 20
    for canary in canaries:
        canary.cancel()
    assert all(
        isinstance(ended, asyncio.CancelledError) for ended in await asyncio.gather(*canaries, return_exceptions=True)
    )
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks
    assert open_sockets() == sockets


async def test_an_engine_that_wakes_up_sees_that_nobody_waits(frozen_url: str, frozen_listener: socket.socket) -> None:
    assert (await send(frozen_url, deadline_sec=0.1)).outcome is Outcome.TIMEOUT
    connection, _ = await asyncio.to_thread(frozen_listener.accept)
    with connection:
        connection.settimeout(1)
        assert connection.recv(65536).startswith(b"POST /v1/completions")
        try:
            assert connection.recv(65536) == b""
        except ConnectionError:
            pass


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
async def test_a_request_too_large_for_the_engines_buffers_does_not_linger(
    frozen_url: str, frozen_listener: socket.socket
) -> None:
    request = CanaryRequest("POST", "/x", None, AnswerFormat.ANY_2XX, raw_body="x" * 20_000_000)
    sockets = open_sockets()
    assert (await send(frozen_url, request, deadline_sec=0.5)).outcome is Outcome.TIMEOUT
    await asyncio.sleep(0.01)
    assert open_sockets() == sockets


async def test_an_engine_sees_at_once_that_nobody_waits_any_more(serve: Serve) -> None:
    gone = asyncio.Event()

    async def notice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        try:
            await reader.read()
        finally:
            gone.set()

    assert (await send(await serve(notice), deadline_sec=0.1)).outcome is Outcome.TIMEOUT
    await asyncio.wait_for(gone.wait(), 1)


# --- whether anything answered --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "answered"),
    [
        (COMPLETE, True),
        (response("no key", status="401 Unauthorized"), True),
        (response("", status="404 Not Found"), True),
        (response("", status="302 Found", headers="Location: /\r\n"), True),
        (response("<html>"), True),
        (response("oops", status="500 Oops"), False),
        (response("bad gateway", status="502 Bad Gateway"), False),
        (b"SSH-2.0-OpenSSH\r\n", False),
    ],
    ids=["complete", "locked", "absent", "moved", "foreign", "broken", "gateway", "no HTTP"],
)
async def test_a_report_says_whether_the_server_answered(serve: Serve, answer: bytes, answered: bool) -> None:
    assert (await send(await serve(answering(answer)))).answered is answered
    # The same where the model's name has to be asked for first.
    if answer != COMPLETE:
        assert (await send(await serve(answering(answer)), VLLM)).answered is answered


async def test_nobody_and_silence_are_no_answer(serve: Serve, unused_url: str) -> None:
    assert not (await send(unused_url)).answered
    assert not (await send(await serve(wait_for_ever), deadline_sec=0.3)).answered
