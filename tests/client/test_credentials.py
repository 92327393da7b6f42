"""The API key and the CA file are read when they are used, and the key is seen by nobody but the engine."""

from __future__ import annotations

import json
import logging
import os
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.client.servers import Recorder, Serve, answering, response

from enginewatch.client.credentials import Unusable, read_key
from enginewatch.client.exchange import Question, Trouble
from enginewatch.client.target import EngineClient, ScrapeFailure, Target
from enginewatch.core.events import Outcome
from enginewatch.core.exposition import parse_series
from enginewatch.engines.profile import AnswerFormat, CanaryRequest
from enginewatch.engines.vllm import PROFILE as VLLM

KEY = "hunter2-very-secret"
PROBE = CanaryRequest("GET", "/x", None, AnswerFormat.ANY_2XX)


def key_sent(request: bytes) -> str | None:
    for line in request.decode().split("\r\n"):
        if line.lower().startswith("authorization:"):
            return line.partition(":")[2].strip()
    return None


async def test_the_key_goes_as_a_bearer_token(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"  {KEY}\n")
    server = Recorder({"/x": response("ok")})
    client = EngineClient(Target.parse(await serve(server), api_key_file=str(tmp_path / "key")))
    assert (await client.canary(PROBE, deadline_sec=5)).outcome is Outcome.OK
    assert key_sent(server.requests[0]) == f"Bearer {KEY}"


async def test_without_a_key_file_no_key_is_sent(serve: Serve) -> None:
    server = Recorder({"/x": response("ok")})
    await EngineClient(Target.parse(await serve(server))).canary(PROBE, deadline_sec=5)
    assert key_sent(server.requests[0]) is None


async def test_a_rotated_key_is_used_with_the_next_question(serve: Serve, tmp_path: Path) -> None:
    # Kubernetes swaps a symlink; the old file goes away.
    (tmp_path / "old").write_text("old")
    (tmp_path / "new").write_text("new")
    (tmp_path / "key").symlink_to("old")
    server = Recorder({"/x": response("ok")})
    client = EngineClient(Target.parse(await serve(server), api_key_file=str(tmp_path / "key")))
    await client.canary(PROBE, deadline_sec=5)
    (tmp_path / "link").symlink_to("new")
    (tmp_path / "link").rename(tmp_path / "key")
    (tmp_path / "old").unlink()
    await client.canary(PROBE, deadline_sec=5)
    assert [key_sent(request) for request in server.requests] == ["Bearer old", "Bearer new"]


@pytest.mark.parametrize("key", [KEY, r'quote"and\slash'])
async def test_an_echoed_key_is_taken_out_of_series_and_versions(serve: Serve, tmp_path: Path, key: str) -> None:
    (tmp_path / "key").write_text(key)
    value = key.replace("\\", "\\\\").replace('"', '\\"')
    server = Recorder(
        {
            "/metrics": response(f'vllm:x{{engine="0",who="is {value}"}} 1\nvllm:x{{engine="1"}} 2\n'),
            "/version": response(json.dumps({"version": key})),
            "/v1/models": response(json.dumps({"data": [{"id": f"a {key}", "owned_by": "vllm"}]})),
        }
    )
    client = EngineClient(Target.parse(await serve(server), api_key_file=str(tmp_path / "key")))
    page = await client.scrape(frozenset({"vllm:x"}), timeout_sec=5, profile=VLLM)
    assert page == {'vllm:x{engine="0",who="is <API key>"}': 1.0, 'vllm:x{engine="1"}': 2.0}
    (tmp_path / "key").write_text("rotated-and-new")
    told = await client.describe()
    assert (told.version, told.model) == ("<API key>", "a <API key>"), "the key before the last rotation as well"


@pytest.mark.parametrize(
    ("key", "line", "series"),
    [
        ("abcdef0123456789", 'vllm:num_requests{abcdef0123456789="x"}', 'vllm:num_requests{"<API key>"="x"}'),
        ("a.key/beyond", '# TYPE\n{"vllm:num_requests","a.key/beyond"="x"}', 'vllm:num_requests{"<API key>"="x"}'),
        ("requests", "vllm:num_requests", "vllm:num_requests"),
        ("requests", 'vllm:num_requests{who="requests"}', 'vllm:num_requests{who="<API key>"}'),
        ('="x",who=', 'vllm:num_requests{engine="x",who="y"}', 'vllm:num_requests{engine="x",who="y"}'),
    ],
)
async def test_what_is_left_of_a_series_is_the_text_of_one(
    serve: Serve, tmp_path: Path, key: str, line: str, series: str
) -> None:
    # The judgement reads it, and a text that is none would have broken every poll.
    (tmp_path / "key").write_text(key)
    client = EngineClient(
        Target.parse(await serve(answering(response(f"{line} 1\n"))), api_key_file=str(tmp_path / "key"))
    )
    page = await client.scrape(frozenset({"vllm:num_requests"}), timeout_sec=5, profile=VLLM)
    assert page == {series: 1.0}
    assert parse_series(series)


async def test_an_echoed_key_is_taken_out_of_what_is_shown_of_an_answers_head(serve: Serve, tmp_path: Path) -> None:
    key = "a/key+with=signs%2F"
    (tmp_path / "key").write_text(key)
    padding = "text/plain; " + 182 * "x"
    server = Recorder(
        {
            "/metrics": response("", status="307 X", headers=f"Location: /page?k={quote(key, safe='')}\r\n"),
            "/v1/models": response(
                '{"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}', headers=f"Content-Type: {padding}{key}\r\n"
            ),
        }
    )
    client = EngineClient(Target.parse(await serve(server), api_key_file=str(tmp_path / "key")))
    redirected = await client.read_page(frozenset({"vllm:x"}), timeout_sec=5, profile=VLLM)
    assert redirected.redirected_to == "/page?k=<API key>"
    not_read = await client.read_page(frozenset({"vllm:x"}), timeout_sec=5)
    assert not_read.content_type == f"{padding}<API key>"[:200], "not the beginning of the key either"


async def test_a_key_too_short_to_be_a_secret_garbles_nothing(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("vllm")
    client = EngineClient(
        Target.parse(await serve(answering(response("vllm:x 1\n"))), api_key_file=str(tmp_path / "key"))
    )
    assert await client.scrape(frozenset({"vllm:x"}), timeout_sec=5, profile=VLLM) == {"vllm:x": 1.0}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"two words", "printable ASCII"),
        (b"inject\r\nX: y", "printable ASCII"),
        ("schlüssel".encode(), "printable ASCII"),
        (b"x" * 100_000, "larger than"),
    ],
)
async def test_an_unusable_key_is_not_fatal_and_told_when_the_engine_wants_it(
    serve: Serve, tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    server = Recorder(
        {"/metrics": response("# page\n"), "/x": response("", status="401 Unauthorized")},
    )
    client = EngineClient(Target.parse(await serve(server), api_key_file=str(file)))
    assert await client.scrape(frozenset(), timeout_sec=5, profile=VLLM) == {}
    report = await client.canary(PROBE, deadline_sec=5)
    assert report.outcome is Outcome.MISCONFIGURED
    assert says in report.detail
    assert str(file) in report.detail
    assert key_sent(server.requests[1]) is None


async def test_a_fifo_in_place_of_the_key_does_not_stop_the_loop(serve: Serve, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "key")
    url = await serve(answering(response("", status="401 Unauthorized")))
    report = await EngineClient(Target.parse(url, api_key_file=str(tmp_path / "key"))).canary(PROBE, deadline_sec=5)
    assert "not a regular file" in report.detail


async def test_a_directory_in_place_of_the_key_keeps_no_page_from_being_read(serve: Serve, tmp_path: Path) -> None:
    # What a container runtime makes of a mount whose file does not exist.
    (tmp_path / "key").mkdir()
    server = Recorder({"/metrics": response("# page\n"), "/x": response("", status="401 Unauthorized")})
    client = EngineClient(Target.parse(await serve(server), api_key_file=str(tmp_path / "key")))
    assert await client.scrape(frozenset(), timeout_sec=5, profile=VLLM) == {}
    assert "not a regular file" in (await client.canary(PROBE, deadline_sec=5)).detail


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo"])
def test_no_descriptor_is_left_of_a_file_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "key"
    if kind == "directory":
        file.mkdir()
    elif kind == "fifo":
        os.mkfifo(file)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Unusable):
        read_key(str(file))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
async def test_a_refused_key_is_told_apart_from_a_missing_one(serve: Serve, tmp_path: Path, status: str) -> None:
    (tmp_path / "key").write_text(KEY)
    url = await serve(answering(response("", status=status)))
    without = await EngineClient(Target.parse(url)).scrape(frozenset(), timeout_sec=5, profile=VLLM)
    with_key = await EngineClient(Target.parse(url, api_key_file=str(tmp_path / "key"))).scrape(
        frozenset(), timeout_sec=5, profile=VLLM
    )
    assert isinstance(without, ScrapeFailure)
    assert isinstance(with_key, ScrapeFailure)
    assert "an API key is wanted" in without.detail
    assert "was not accepted" in with_key.detail


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        response("", status="307 Moved", headers="Location: http://elsewhere.invalid/\r\n"),
    ],
)
async def test_the_key_is_in_no_report_no_log_and_no_traceback(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: bytes
) -> None:
    (tmp_path / "key").write_text(KEY)
    client = EngineClient(Target.parse(await serve(answering(answer)), api_key_file=str(tmp_path / "key")))
    with caplog.at_level(logging.DEBUG):
        seen = [
            repr(await client.canary(PROBE, deadline_sec=5)),
            repr(await client.scrape(frozenset(), timeout_sec=5, profile=VLLM)),
            repr(client.target),
            repr(vars(client.line)),
        ]
        # Even what the lowest layer raises, printed with everything it is chained to.
        try:
            await client.line.fetch(Question("/x"), until=10**9)
        except Trouble as trouble:
            seen += traceback.format_exception(trouble)
            seen.append(repr(trouble.__context__))
    assert KEY not in "".join(seen) + caplog.text
