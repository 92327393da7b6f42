"""Whatever answers, a scrape ends in samples or in one word of the vocabulary, and in time."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
import zlib
from itertools import pairwise

import pytest
from tests.client.servers import (
    Handler,
    Recorder,
    Serve,
    answering,
    open_sockets,
    read_request,
    reset,
    response,
    wait_for_ever,
)

from enginewatch.client.target import EngineClient, ScrapeFailure, Target
from enginewatch.core.exposition import PageReader
from enginewatch.engines.vllm import PROFILE as VLLM

NAMES = frozenset({"vllm:generation_tokens_total"})
SERIES = 'vllm:generation_tokens_total{engine="0"}'
PAGE = f"# TYPE vllm:generation_tokens counter\n{SERIES} 5.0\nother 1\n".encode()
SAMPLES = {SERIES: 5.0}


async def scrape(url: str, *, timeout_sec: float = 5.0) -> dict[str, float] | ScrapeFailure:
    return await EngineClient(Target.parse(url)).scrape(NAMES, timeout_sec=timeout_sec, profile=VLLM)


def after_a_request(*parts: bytes, then_reset: bool = False) -> Handler:
    """Writes the parts one after the other, each arriving for itself, then closes or resets."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        if then_reset:
            reset(writer)

    return handle


CHUNK = b"%x\r\n%b\r\n" % (len(PAGE), PAGE)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        response(PAGE),
        response(PAGE, headers="Content-Type: text/plain; version=1.0.0\r\nContent-Encoding: identity\r\n"),
        b"HTTP/1.0 200 OK\r\n\r\n" + PAGE,
        CHUNKED + CHUNK + b"0\r\n\r\n",
        response(gzip.compress(PAGE), headers="Content-Encoding: gzip\r\n"),
        response(gzip.compress(PAGE[:30]) + gzip.compress(PAGE[30:]), headers="Content-Encoding: GZip\r\n"),
        response(zlib.compress(PAGE), headers="Content-Encoding: deflate\r\n"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + response(PAGE),
        response(PAGE, status="203 Transformed"),
    ],
    ids=["sized", "identity", "until-close", "chunked", "gzip", "gzip-members", "deflate", "after-100", "203"],
)
async def test_a_page_is_read_however_it_is_sent(serve: Serve, answer: bytes) -> None:
    assert await scrape(await serve(answering(answer))) == SAMPLES


async def test_a_page_that_drips_within_the_deadline_is_read(serve: Serve) -> None:
    answer = response(PAGE)
    pieces = [answer[at : at + 9] for at in range(0, len(answer), 9)]
    assert await scrape(await serve(after_a_request(*pieces))) == SAMPLES


async def test_an_empty_page_is_a_page_with_nothing_known_on_it(serve: Serve) -> None:
    assert await scrape(await serve(answering(response(b"")))) == {}


@pytest.mark.parametrize(
    ("handler", "failure"),
    [
        (after_a_request(), "reset"),
        (after_a_request(then_reset=True), "reset"),
        (after_a_request(b"HTTP/1.1 200 OK\r\nContent-Le"), "reset"),
        (after_a_request(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", PAGE), "truncated"),
        (after_a_request(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", PAGE, then_reset=True), "truncated"),
        (after_a_request(CHUNKED, CHUNK), "truncated"),
        (after_a_request(b"HTTP/1.1 200 OK\r\n\r\n", PAGE[:-12]), "truncated"),
        (after_a_request(b"HTTP/1.1 200 OK\r\n\r\n", PAGE[:-12], then_reset=True), "truncated"),
        (answering(response(gzip.compress(PAGE)[:-9], headers="Content-Encoding: gzip\r\n")), "truncated"),
        (answering(response(b"not gzip", headers="Content-Encoding: gzip\r\n")), "malformed"),
        (answering(response(PAGE, headers="Content-Encoding: br\r\n")), "malformed"),
        (answering(response(b"<html>hello</html>")), "malformed"),
        (answering(response(b'[{"iter": 1}]')), "malformed"),
        (answering(response(b"\x00\x01\x02")), "malformed"),
        (answering(CHUNKED + b"zz\r\n" + PAGE), "malformed"),
        (answering(b"SSH-2.0-OpenSSH_9.2\r\n"), "malformed"),
        (answering(b"\x15\x03\x03\x00\x02\x02\x28"), "malformed"),
        (answering(b"HTTP/1.1 abc\r\n\r\n"), "malformed"),
        (answering(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"), "malformed"),
        (answering(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n"), "malformed"),
        (answering(b"HTTP/1.1 200 OK\r\n" + b"X: a\r\n" * 100_000 + b"\r\n"), "malformed"),
        (answering(response(b"", status="401 Unauthorized")), "http_401"),
        (answering(response(PAGE, status="404 Not Found")), "http_404"),
        (answering(response(PAGE, status="503 Loading")), "http_503"),
        (answering(b"HTTP/1.1 500 Oops\r\nContent-Length: 9999\r\n\r\n"), "http_500"),
    ],
)
async def test_each_way_to_fail_has_its_word(serve: Serve, handler: Handler, failure: str) -> None:
    result = await scrape(await serve(handler))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == failure
    assert result.detail


async def test_nobody_listening_is_refused(unused_url: str) -> None:
    result = await scrape(unused_url)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "refused"


async def test_nobody_listening_on_any_address_of_a_name_is_refused(unused_url: str) -> None:
    result = await scrape(unused_url.replace("127.0.0.1", "localhost"))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "refused"


async def test_a_stopped_server_is_a_timeout_although_the_kernel_takes_the_connection(frozen_url: str) -> None:
    result = await scrape(frozen_url, timeout_sec=0.1)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "timeout"


async def test_a_name_that_does_not_resolve_never_reads_as_a_process_that_is_gone() -> None:
    result = await scrape("http://engine.invalid:8000")
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "unasked"
    assert result.detail.startswith("cannot resolve engine.invalid: correct")


async def test_a_name_server_without_an_answer_says_nothing_about_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> list[object]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    result = await scrape("http://engine.example:8000", timeout_sec=0.1)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "unasked"
    assert result.detail.startswith("cannot resolve engine.example in time")


async def test_a_watcher_out_of_file_descriptors_does_not_blame_the_engine(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await serve(answering(response(PAGE)))

    def exhausted(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("enginewatch.client.exchange.socket.socket", exhausted)
    result = await scrape(url)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "unasked"
    assert "no connection can be opened" in result.detail
    assert "limit of open files" in result.detail


async def test_one_deadline_holds_for_the_whole_body(serve: Serve) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"# still here\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    began = time.monotonic()
    result = await scrape(await serve(drip), timeout_sec=0.3)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "timeout"
    assert time.monotonic() - began < 5


async def test_one_deadline_holds_for_endless_headers(serve: Serve) -> None:
    async def headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(1000):
            writer.write(b"X-%d: y\r\n" % number)
            await writer.drain()
            await asyncio.sleep(0.02)

    began = time.monotonic()
    result = await scrape(await serve(headers), timeout_sec=0.3)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "timeout"
    assert time.monotonic() - began < 5


async def test_one_deadline_holds_for_endless_early_hints(serve: Serve) -> None:
    async def hints(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        while True:
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    result = await scrape(await serve(hints), timeout_sec=0.2)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "timeout"


@pytest.mark.parametrize("zipped", [False, True])
async def test_more_than_8_mib_is_not_metrics(serve: Serve, zipped: bool) -> None:
    body = b"# filler\n" * (1024 * 1024)
    answer = response(gzip.compress(body), headers="Content-Encoding: gzip\r\n") if zipped else response(body)
    result = await scrape(await serve(answering(answer)))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "malformed"
    assert "8388608" in result.detail


async def test_a_gzip_bomb_is_never_unpacked_into_memory(serve: Serve) -> None:
    bomb = response(gzip.compress(b"# filler\n" * 20_000_000), headers="Content-Encoding: gzip\r\n")
    url = await serve(answering(bomb))
    tracemalloc.start()
    try:
        result = await scrape(url)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(result, ScrapeFailure)
    assert peak < 3 * 1024 * 1024


async def test_the_event_loop_gets_a_turn_between_any_two_pieces_of_a_page(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 7 MiB take about 60 ms to read; a /healthz that waits for all of it would miss its 5 ms by far. Compressed they
    # arrive at once, so that nothing but the reader itself gives way.
    body = gzip.compress(b'vllm:other_total{engine="0"} 1\n' * (7 * 1024 * 1024 // 31))
    url = await serve(answering(response(body, headers="Content-Encoding: gzip\r\n")))
    turns = 0
    turns_at_piece: list[int] = []
    sizes: list[int] = []

    class Watched(PageReader):
        def feed(self, chunk: bytes) -> None:
            turns_at_piece.append(turns)
            sizes.append(len(chunk))
            super().feed(chunk)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr("enginewatch.client.target.PageReader", Watched)
    others = asyncio.create_task(other())
    assert await scrape(url) == {}
    others.cancel()
    assert max(sizes) <= 64 * 1024
    assert len(turns_at_piece) > 100
    assert all(before < after for before, after in pairwise(turns_at_piece))


async def test_an_answer_is_asked_for_plain_and_in_text_format(serve: Serve) -> None:
    server = Recorder({"/metrics": response(PAGE)})
    assert await scrape(await serve(server)) == SAMPLES
    head = server.requests[0].lower()
    assert b"accept-encoding: identity\r\n" in head
    assert b"accept: text/plain;version=0.0.4" in head


async def test_the_operators_metrics_path_replaces_the_profiles(serve: Serve) -> None:
    server = Recorder({"/prefix/custom": response(PAGE)})
    client = EngineClient(Target.parse(f"{await serve(server)}/prefix", metrics_path="/custom"))
    assert await client.scrape(NAMES, timeout_sec=5, profile=VLLM) == SAMPLES


async def test_a_proxy_in_the_environment_is_not_used(
    serve: Serve, unused_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, unused_url)
    assert await scrape(await serve(answering(response(PAGE)))) == SAMPLES


# --- redirects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("location", ["/metrics/", "metrics/", "{url}/metrics/"])
async def test_a_redirect_within_the_origin_is_followed_once_without_the_key(
    serve: Serve, tmp_path_factory: pytest.TempPathFactory, location: str
) -> None:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("hunter2")
    server = Recorder({"/metrics/": response(PAGE)})
    url = await serve(server)
    server.answers["/metrics"] = response(
        "", status="307 Temporary Redirect", headers=f"Location: {location.format(url=url)}\r\n"
    )
    client = EngineClient(Target.parse(url, api_key_file=str(key)))
    page = await client.read_page(NAMES, timeout_sec=5, profile=VLLM)
    assert page.result == SAMPLES
    assert page.redirected_to == "/metrics/"
    assert server.paths() == ["/metrics", "/metrics/"]
    assert b"hunter2" in server.requests[0]
    assert b"hunter2" not in server.requests[1]


@pytest.mark.parametrize("location", ["/base/metrics/", "metrics/", "{url}/base/metrics/", "/metrics/"])
async def test_a_redirect_below_a_base_path_leads_where_it_says(serve: Serve, location: str) -> None:
    # The last one is of an engine behind a proxy that takes the base path off.
    server = Recorder({"/base/metrics/": response(PAGE)})
    url = await serve(server)
    server.answers["/base/metrics"] = response(
        "", status="307 Temporary Redirect", headers=f"Location: {location.format(url=url)}\r\n"
    )
    assert await scrape(f"{url}/base") == SAMPLES
    assert server.paths() == ["/base/metrics", "/base/metrics/"]


@pytest.mark.parametrize(
    "location", ["{elsewhere}/metrics", "//{host}/metrics", "https://{here}/metrics", "http://[", ""]
)
async def test_a_redirect_to_another_origin_is_not_followed(serve: Serve, location: str) -> None:
    elsewhere = Recorder({"/metrics": response(PAGE)})
    other = await serve(elsewhere)
    server = Recorder({})
    url = await serve(server)
    target = location.format(elsewhere=other, host=other.removeprefix("http://"), here=url.removeprefix("http://"))
    server.answers["/metrics"] = response("", status="302 Found", headers=f"Location: {target}\r\n")
    result = await scrape(url)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "http_302"
    assert elsewhere.requests == []
    assert len(server.requests) == 1


async def test_redirects_in_a_circle_end_after_one(serve: Serve) -> None:
    server = Recorder({"/metrics": response("", status="308 Again", headers="Location: /metrics\r\n")})
    result = await scrape(await serve(server))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "http_308"
    assert len(server.requests) == 2


# --- what is left behind --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handler", [wait_for_ever, answering(response(PAGE))], ids=["frozen", "healthy"])
async def test_scrapes_leave_no_task_and_no_socket(serve: Serve, handler: Handler) -> None:
    url = await serve(handler)
    await scrape(url, timeout_sec=0.01)
    await asyncio.sleep(0.05)
    tasks, sockets = len(asyncio.all_tasks()), open_sockets()
    for _ in range(20):
        await scrape(url, timeout_sec=0.01)
    await asyncio.sleep(0.05)
    assert len(asyncio.all_tasks()) <= tasks
    assert open_sockets() <= sockets


async def test_a_connection_that_breaks_is_one_failure_not_two_attempts(serve: Serve) -> None:
    connections = 0

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)

    result = await scrape(await serve(close))
    assert isinstance(result, ScrapeFailure)
    assert connections == 1


async def test_closing_the_client_ends_what_is_under_way(serve: Serve) -> None:
    client = EngineClient(Target.parse(await serve(wait_for_ever)))
    under_way = asyncio.create_task(client.scrape(NAMES, timeout_sec=60, profile=VLLM))
    await asyncio.sleep(0.05)
    await client.close()
    result = await asyncio.wait_for(under_way, 1)
    assert isinstance(result, ScrapeFailure)
