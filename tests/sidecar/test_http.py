"""The sidecar's answers, over real sockets; also to those who ask in bad faith."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.sidecar.fakes import WALL, FakeExplanation, FakeIdentity, FakeJudge, House, verdict

from enginewatch.core.events import Verdict
from enginewatch.core.identity import IdentityTracker
from enginewatch.core.settings import Settings
from enginewatch.sidecar import http
from enginewatch.sidecar.board import rfc3339
from enginewatch.sidecar.http import MAX_CONNECTIONS, HttpServer, Pages
from enginewatch.sidecar.listen import bind, url_of
from enginewatch.sidecar.options import Address, StartError

HUNG = Verdict("stall-hang", True, True, "core 0: no progress\nfor 30 s", "0", 0.0)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Site:
    house: House
    server: HttpServer
    port: int

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, request: bytes) -> Reply:
        reader, writer = await self.connect()
        try:
            writer.write(request)
            async with asyncio.timeout(5):
                return await read_reply(reader)
        finally:
            writer.close()

    async def get(self, path: str, method: str = "GET") -> Reply:
        return await self.raw(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    length = int(headers.get("content-length", "0"))
    body = b""
    try:
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError as short:
        body = short.partial
    return Reply(int(head[0].split()[1]), headers, body)


@asynccontextmanager
async def site(judge: FakeJudge | None = None) -> AsyncIterator[Site]:
    house = House(judge)
    sock = bind(Address("127.0.0.1", 0))
    server = HttpServer(Pages(house.board, house.history, house.metrics, house.faults.note), sock)
    await server.start()
    try:
        yield Site(house, server, sock.getsockname()[1])
    finally:
        await server.stop()
        os.close(house._writer)
        os.close(house._log)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in the kernel
            await asyncio.sleep(0.01)


# --- what is answered -------------------------------------------------------------------------------------------------


async def test_healthz_is_200_while_the_engine_lives_and_503_once_it_hangs() -> None:
    async with site() as s:
        alive = await s.get("/healthz")
        assert (alive.status, alive.body) == (200, b"ok: core 0: tokens move")
        assert alive.headers["content-type"].startswith("text/plain")
        s.house.board.verdict = HUNG
        hung = await s.get("/healthz")
        assert (hung.status, hung.body) == (503, b"hung: core 0: no progress for 30 s")


async def test_a_hang_that_is_not_acted_on_is_200() -> None:
    async with site() as s:
        s.house.board.verdict = Verdict("warmup-stall-hang", True, False, "why", "0", 0.0)
        assert (await s.get("/healthz")).status == 200
        assert json.loads((await s.get("/verdict")).body)["hung"] is True


async def test_healthz_fails_open_when_the_watcher_itself_is_stale() -> None:
    async with site() as s:
        s.house.board.verdict = HUNG
        s.house.board.settings = Settings(poll_interval_sec=1, metrics_timeout_sec=2)
        s.house.board.judged_at -= 8.5
        assert (await s.get("/healthz")).status == 503, "not yet: 3 x (1 + 2) s"
        s.house.board.judged_at -= 1
        stale = await s.get("/healthz")
        assert (stale.status, stale.body) == (200, b"ok: watcher stale")
        body = json.loads((await s.get("/verdict")).body)
        assert (body["state"], body["hung"], body["acting"]) == ("stall-hang", True, False)
        assert body["reason"].startswith("watcher stale")
        assert s.house.metric("enginewatch_acting") == 0


async def test_healthz_verbose_is_the_verdict_with_the_same_status() -> None:
    async with site() as s:
        s.house.board.verdict = HUNG
        for path in ("/healthz?verbose", "/healthz?verbose=1", "/healthz?a=b&verbose"):
            verbose = await s.get(path)
            assert verbose.status == 503
            assert json.loads(verbose.body)["state"] == "stall-hang"
        assert (await s.get("/healthz?verbosely")).body.startswith(b"hung")


Moment = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d\dZ$")]


class EngineAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The schema of GET /engine: these keys and no others, in this order."""

    engine_id: Annotated[str, msgspec.Meta(pattern=r"^(pst-\d+\.\d\d|sfp-[0-9a-f]{12}|obs-\d+-\d+)$")]
    started_at: Moment
    source: Literal["process_start_time", "startup_fingerprint", "observed"]
    restarts: Annotated[int, msgspec.Meta(ge=0)]
    watcher_started_at: Moment


@pytest.mark.parametrize(
    "identity",
    [
        FakeIdentity(restarts=1),
        FakeIdentity("sfp-0123456789ab", "startup_fingerprint", None, 5.0),
        FakeIdentity("obs-1791943641290-2", "observed", None, 5.0, 1),
    ],
    ids=lambda identity: identity.source,
)
async def test_engine_is_as_its_schema_says_for_each_source(identity: FakeIdentity) -> None:
    async with site(FakeJudge(identity=identity)) as s:
        reply = await s.get("/engine")
        assert reply.status == 200
        assert reply.headers["content-type"] == "application/json"
        answer = msgspec.json.decode(reply.body, type=EngineAnswer)
        assert list(json.loads(reply.body)) == list(EngineAnswer.__struct_fields__)
        assert (answer.engine_id, answer.source) == (identity.engine_id, identity.source)


async def test_engine_has_exactly_its_five_keys() -> None:
    judge = FakeJudge(identity=FakeIdentity(restarts=1))
    async with site(judge) as s:
        reply = await s.get("/engine")
        assert json.loads(reply.body) == {
            "engine_id": "pst-1791943641.29",
            "started_at": "2026-10-14T02:07:21.29Z",
            "source": "process_start_time",
            "restarts": 1,
            "watcher_started_at": rfc3339(WALL),
        }
        head = await s.get("/engine", "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == str(len(reply.body))


@given(st.floats(0, 4e9))
@example(1791943641.285)
@example(0.005)
@example(1.999999)
def test_a_start_time_is_the_same_hundredth_in_the_id_and_in_started_at(start_time: float) -> None:
    seconds = IdentityTracker(0)
    seconds.page(start_time, fell=False, rose=False, now=0.0)
    assert seconds.identity is not None
    moment = datetime.fromisoformat(rfc3339(start_time))
    told = Decimal(int((moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=10))) / 100
    assert seconds.identity.engine_id == f"pst-{told:.2f}"


async def test_an_engine_that_has_not_been_identified_is_a_503_that_says_why_and_never_an_id() -> None:
    async with site() as s:
        reply = await s.get("/engine")
        assert (reply.status, list(json.loads(reply.body))) == (503, ["error"])
        assert reply.headers["content-type"] == "application/json"
        why = "the engine has not been identified: nobody listens at the engine's address yet; it is loading"
        assert json.loads(reply.body)["error"] == why
        assert (await s.get("/engine", "HEAD")).status == 503


async def test_an_engine_known_only_from_sight_started_when_it_was_first_seen_and_that_does_not_move() -> None:
    judge = FakeJudge()
    async with site(judge) as s:
        first_seen = s.house.board.started_at - 60
        judge.identity = FakeIdentity("obs-1-1", "observed", None, first_seen)
        first = json.loads((await s.get("/engine")).body)["started_at"]
        await asyncio.sleep(0.05)
        assert json.loads((await s.get("/engine")).body)["started_at"] == first == rfc3339(WALL - 60)


async def test_verdict_has_the_documented_keys_and_no_request_body() -> None:
    async with site() as s:
        s.house.board.settings = Settings(active_probe_body='{"prompt": "secret"}')
        s.house.judge.explanation = FakeExplanation(would_flip=("a leg that moves",))
        reply = await s.get("/verdict")
        body = json.loads(reply.body)
        assert set(body) == {
            *("state", "hung", "acting", "reason", "since", "cores", "witnesses", "would_flip", "settings")
        }
        assert body["would_flip"] == ["a leg that moves"]
        assert body["settings"]["stall_sec"] == 30
        assert b"secret" not in reply.body


async def test_history_is_json_lines() -> None:
    async with site() as s:
        s.house.history.note_verdict(verdict("startup", "loading"), 0.0)
        s.house.history.note_verdict(HUNG, 1.0)
        reply = await s.get("/history")
        lines = [json.loads(line) for line in reply.body.splitlines()]
        assert [line["state"] for line in lines] == ["startup", "stall-hang"]


async def test_metrics_are_in_the_prometheus_text_format() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    async with site(FakeJudge(identity=FakeIdentity())) as s:
        reply = await s.get("/metrics")
        assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        names = {family.name for family in text_string_to_metric_families(reply.body.decode())}
        assert "enginewatch_verdict_state" in names


async def test_the_root_lists_the_paths_and_unknown_ones_get_one_sentence() -> None:
    async with site() as s:
        index = await s.get("/")
        assert index.status == 200
        for path in ("/healthz", "/engine", "/verdict", "/history", "/metrics"):
            assert path.encode() in index.body
        for path in ("/readyz", "/nope", "/healthz/", "//", "/%00", "/healthz%2f", "/..%2f..%2fetc/passwd"):
            missing = await s.get(path)
            assert missing.status == 404, path
            assert missing.body.count(b"\n") == 1


async def test_head_gives_the_same_head_and_no_body() -> None:
    async with site() as s:
        for path in ("/healthz", "/verdict", "/metrics", "/history", "/"):
            head = await s.get(path, "HEAD")
            assert (head.status, head.body) == (200, b""), path
        s.house.board.verdict = HUNG
        assert (await s.get("/healthz", "HEAD")).status == 503


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
async def test_other_methods_are_refused(method: str) -> None:
    async with site() as s:
        reply = await s.get("/healthz", method)
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


async def test_a_bug_in_the_explanation_costs_the_explanation_and_not_healthz() -> None:
    async with site(FakeJudge(explanation=RuntimeError("a bug"))) as s:
        s.house.board.verdict = HUNG
        assert (await s.get("/healthz")).status == 503
        assert (await s.get("/healthz?verbose")).body.startswith(b"hung: ")
        assert (await s.get("/verdict")).status == 500
        page = (await s.get("/metrics")).body
        assert b"enginewatch_hung 1.0" in page
        assert (s.house.metric('enginewatch_internal_errors_total{task="http"}') or 0) == 2


async def test_a_connection_may_be_used_again() -> None:
    async with site() as s:
        reader, writer = await s.connect()
        for _ in range(3):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await read_reply(reader)).status == 200
        writer.close()


# --- bad faith --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % n for n in range(5000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GARBAGE\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_request_that_is_none_is_refused_and_the_next_client_served(request_bytes: bytes) -> None:
    async with site() as s:
        try:
            reply = await s.raw(request_bytes)
            assert 400 <= reply.status < 500
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # cut off: as good
        assert (await s.get("/healthz")).status == 200
        assert (s.house.metric('enginewatch_internal_errors_total{task="loop"}') or 0) == 0


async def test_a_body_without_end_is_not_read() -> None:
    async with site() as s:
        reader, writer = await s.connect()
        writer.write(b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n" + b"x" * 65536)
        assert (await read_reply(reader)).status == 405
        async with asyncio.timeout(5):
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
        writer.close()


async def test_many_idle_connections_do_not_keep_the_kubelet_out() -> None:
    async with site() as s:
        idlers = [await s.connect() for _ in range(3 * MAX_CONNECTIONS)]
        for _, writer in idlers[::2]:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        for _ in range(20):
            assert (await s.get("/healthz")).status == 200
        assert s.server.connections <= MAX_CONNECTIONS
        for _, writer in idlers:
            writer.close()


async def test_of_too_many_connections_one_that_had_its_answer_goes_before_one_that_still_waits() -> None:
    # Those that send request after request are never idle: a kubelet between two of its turns was the longest idle one.
    async with site() as s:
        waiting, slow = await s.connect()
        slow.write(b"GET /healthz HTTP/1.1\r\n")
        busy = [await s.connect() for _ in range(MAX_CONNECTIONS - 1)]
        for reader, writer in busy:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await read_reply(reader)).status == 200
        newcomers = [await s.connect() for _ in range(MAX_CONNECTIONS // 2)]
        slow.write(b"Host: x\r\n\r\n")
        assert (await read_reply(waiting)).status == 200
        for _, writer in ((waiting, slow), *busy, *newcomers):
            writer.close()


async def test_connections_leave_the_sidecar_descriptors_for_its_own_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((-1, MAX_CONNECTIONS), (1024, MAX_CONNECTIONS), (64, 24), (16, 4)):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        async with site() as s:
            idlers = [await s.connect() for _ in range(MAX_CONNECTIONS + 10)]
            assert (await s.get("/healthz")).status == 200
            assert s.server.connections <= most
            for _, writer in idlers:
                writer.close()


async def test_who_takes_too_long_over_the_first_request_is_shut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_REQUEST_SEC", 0.2)
    monkeypatch.setattr(http, "_SWEEP_SEC", 0.05)
    async with site() as s:
        reader, writer = await s.connect()
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        await until(lambda: s.server.connections == 1)
        async with asyncio.timeout(5):
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
        assert s.server.connections == 0
        writer.close()


async def test_who_does_not_read_the_answer_is_shut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DRAIN_SEC", 0.3)
    monkeypatch.setattr(http, "_SWEEP_SEC", 0.05)
    async with site() as s:
        monkeypatch.setattr(type(s.house.history), "lines", lambda _: b"x" * 20_000_000)
        reader, writer = await s.connect()
        writer.write(b"GET /history HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: s.server.connections == 1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: s.server.connections == 0)
        assert (await s.get("/healthz")).status == 200
        writer.close()


async def test_long_answers_are_refused_while_many_lie_unread_and_healthz_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site() as s:
        monkeypatch.setattr(type(s.house.history), "lines", lambda _: b"x" * 12_000_000)
        reader, writer = await s.connect()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /history HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: s.server._unread_bytes() > http.MAX_UNREAD_BYTES)
        for path in ("/history", "/metrics", "/verdict"):
            assert (await s.get(path)).status == 503
        assert (await s.get("/healthz?verbose")).body.startswith(b"ok: ")
        assert (await s.get("/")).status == 200
        writer.transport.abort()
        await until(lambda: s.server._unread_bytes() == 0)
        assert (await s.get("/metrics")).status == 200


async def test_a_page_that_takes_work_is_put_together_a_few_times_a_second_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site() as s:
        rendered = []
        render = s.house.metrics.render

        def counting() -> bytes:
            rendered.append(1)
            return render()

        monkeypatch.setattr(s.house.metrics, "render", counting)
        monkeypatch.setattr(s.house.board, "clock", lambda: 0.0)
        pages = Pages(s.house.board, s.house.history, s.house.metrics, s.house.faults.note)
        for _ in range(100):
            assert pages.answer("GET", "/metrics", verbose=False).status == 200
        assert len(rendered) == http.MAX_RENDERS_PER_SEC


async def test_a_flood_does_not_put_an_old_verdict_into_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as s:
        monkeypatch.setattr(s.house.board, "clock", lambda: 0.0)
        pages = Pages(s.house.board, s.house.history, s.house.metrics, s.house.faults.note)
        for _ in range(100):
            assert pages.answer("GET", "/verdict", verbose=False).status == 200
        s.house.board.verdict = HUNG
        for path, status in (("/healthz", 503), ("/verdict", 200)):
            answer = pages.answer("GET", path, verbose=True)
            assert answer.status == status
            assert json.loads(answer.body)["state"] == "stall-hang"


async def test_stopping_does_not_wait_for_clients() -> None:
    async with site() as s:
        connections = [await s.connect() for _ in range(10)]
        connections[0][1].write(b"GET /healthz HTTP/1.1\r\n")
        await until(lambda: s.server.connections == 10)
        began = asyncio.get_running_loop().time()
        await s.server.stop()
        assert asyncio.get_running_loop().time() - began < 0.5
        for _, writer in connections:
            writer.close()


# --- the listen address -----------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_sentence() -> None:
    with bind(Address("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError) as caught:
            bind(Address("127.0.0.1", port))
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"enginewatch watch: cannot listen on 127.0.0.1:{port}: address already in use; choose another address with "
        "--listen or LISTEN"
    )


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-name.invalid", "\u2603" * 70])
def test_an_address_that_is_not_ours_is_one_sentence(host: str) -> None:
    with pytest.raises(StartError) as caught:
        bind(Address(host, 0))
    assert "\n" not in str(caught.value)


def test_no_host_means_both_families_where_there_are_both() -> None:
    with bind(Address("", 0)) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_no_host_without_ipv6_means_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.has_dualstack_ipv6", lambda: False)
    with bind(Address("", 0)) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


# --- time for people --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unix", "text"),
    [
        (1791943641.29, "2026-10-14T02:07:21.29Z"),
        (0, "1970-01-01T00:00:00.00Z"),
        (1791943641.999, "2026-10-14T02:07:22.00Z"),
        (1e300, "1970-01-01T00:00:00.00Z"),
        (float("inf"), "1970-01-01T00:00:00.00Z"),
        (-5.0, "1969-12-31T23:59:55.00Z"),
    ],
)
def test_times_have_two_decimals_and_impossible_ones_do_not_break_the_answer(unix: float, text: str) -> None:
    assert rfc3339(unix) == text
