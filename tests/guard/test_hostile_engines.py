"""What answers on an engine's ports may be anything. The guard believes identities, ends in time, and never crashes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable

import pytest
from fleet import HEALTHY, Answer, Fleet, dripping, endless, http, identity, silent
from guard_run import Guard

NEW = "pst-99.00"

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def changed(**fields: object) -> bytes:
    said = {
        "engine_id": NEW,
        "started_at": "2026-10-14T02:07:21.29Z",
        "source": "process_start_time",
        "restarts": 0,
        "watcher_started_at": "2026-10-14T01:52:10.48Z",
    }
    return http(json.dumps(said | fields))


def chunked(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def headers_for_ever(connection: socket.socket) -> None:
    endless(b"HTTP/1.1 200 OK\r\n", b"X-Padding: " + b"x" * 4000 + b"\r\n")(connection)


def one_header_for_ever(connection: socket.socket) -> None:
    endless(b"HTTP/1.1 200 OK\r\nX-Padding: ", b"x" * 65536)(connection)


def continue_for_ever(connection: socket.socket) -> None:
    endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", every_sec=0.05)(connection)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


NO_IDENTITY: dict[str, Answer] = {
    "nothing": b"",
    "a reset": reset,
    "not HTTP": b"\x00\xff\xfe garbage \r\n\r\n",
    "a TLS alert": b"\x15\x03\x01\x00\x02\x02\x16",
    "HTTP/0.9": body_of(identity(NEW)),
    "a status that is no number": identity(NEW).replace(b" 200 ", b" two hundred "),
    "a status of 20": identity(NEW).replace(b" 200 ", b" 20 "),
    "another 2xx": identity(NEW).replace(b" 200 OK", b" 203 Non-Authoritative"),
    "an identity with an error": identity(NEW).replace(b" 200 OK", b" 503 Service Unavailable"),
    "a redirect to one": identity(NEW).replace(b" 200 OK\r\n", b" 301 Moved\r\nLocation: /engine\r\n"),
    "no body": http(""),
    "HTML": http("<html><body>it works</body></html>"),
    "half of it": http(body_of(identity(NEW))[:40]),
    "a body shorter than announced": identity(NEW)[:-20],
    "a list": http(b"[" + body_of(identity(NEW)) + b"]"),
    "null": http("null"),
    "a number": http("17"),
    "a string": http('"pst-99.00"'),
    "UTF-16": http(body_of(identity(NEW)).decode().encode("utf-16")),
    "bytes that are no text": http(b"\xff" * 300),
    "deeply nested": http(b"[" * 60000),
    "a huge body": http(b'{"padding": "' + b"x" * 200_000 + b'", ' + body_of(identity(NEW))[1:]),
    "a body that never ends": endless(b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536),
    "chunks that never end": endless(CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "a chunk of a wrong size": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "a chunk of a negative size": CHUNKED + b"-5\r\n{}\r\n0\r\n\r\n",
    "a chunk size that never ends": endless(CHUNKED, b"0" * 65536),
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n" + b"x" * 50,
    "headers that never end": headers_for_ever,
    "one header that never ends": one_header_for_ever,
    "100 Continue for ever": continue_for_ever,
    "a slow drip": dripping(identity(NEW)),
    "silence": silent,
    "no engine_id": changed(engine_id=None),
    "an id that is a number": changed(engine_id=17),
    "an empty id": changed(engine_id=""),
    "an id of 129 characters": changed(engine_id="x" * 129),
    "an id with the snapshot's separator": changed(engine_id="pst-1|2"),
    "an id with a line end": changed(engine_id="pst-1.00\n127.0.0.9||"),
    "an id that ends in a line end": changed(engine_id="pst-1.00\n"),
    "an id with NUL": changed(engine_id="pst-1.00\x00"),
    "an id with a letter that is not ASCII": changed(engine_id="pst-1.00é"),
    "an id with a digit that is not ASCII": changed(engine_id="pst-1.0٣"),
    "restarts as text": changed(restarts="0"),
    "restarts as a fraction": changed(restarts=0.5),
    "restarts as a yes": changed(restarts=True),
    "negative restarts": changed(restarts=-1),
    "no restarts": changed(restarts=None),
    "restarts that are not a number": http(body_of(changed()).replace(b'"restarts": 0', b'"restarts": NaN')),
    "5,000 digits of restarts": http(body_of(changed()).replace(b'"restarts": 0', b'"restarts": ' + b"9" * 5000)),
    "the watcher's start as a number": changed(watcher_started_at=1791943641.29),
    "the watcher's start with the separator": changed(watcher_started_at="2026|"),
    "the watcher's start with a line end": changed(watcher_started_at="2026\n127.0.0.9||"),
    "a watcher's start of 65 characters": changed(watcher_started_at="2" * 65),
    "half a character in the watcher's start": changed(watcher_started_at="\ud800"),
    "a source that is a list": changed(source=["process_start_time"]),
}

IDENTITY: dict[str, Answer] = {
    "as it is": identity(NEW),
    "chunked": chunked(body_of(identity(NEW))),
    "until the end of the connection": b"HTTP/1.0 200 OK\r\n\r\n" + body_of(identity(NEW)),
    "a reason of its own": identity(NEW).replace(b"200 OK", b"200 Fine, thanks"),
    "further keys": changed(model="m", started_at=None),
    "an id of 128 characters": changed(engine_id="x" * 128),
    "a source that is new": changed(source="pidfd", restarts=1),
}


def at_addresses(net: str, names: Iterable[str]) -> dict[str, str]:
    """An address for each."""
    return {f"127.0.{net}.{number}": name for number, name in enumerate(names, start=1)}


def test_what_is_no_identity_never_fires(guard: Guard, fleet: Fleet) -> None:
    known, unknown = at_addresses("1", NO_IDENTITY), at_addresses("2", NO_IDENTITY)
    prefill, decode = fleet.role(*known), fleet.role(*unknown)
    # Prefill with identities, decode with the sentinels: neither rule 2 nor rule 3 may hold.
    guard.between(prefill, decode).recorded(prefill.lines(), [f"{address}||" for address in unknown])
    for role, names in ((prefill, known), (decode, unknown)):
        for address, name in names.items():
            role[address].says(NO_IDENTITY[name])
    begun = time.monotonic()
    result = guard.live(GUARD_DEADLINE_SEC="6")
    assert result.code == 0, [name for address, name in (known | unknown).items() if f" {address} " in result.out]
    assert result.err == ""
    assert f"{2 * len(NO_IDENTITY)} engines" in result.line
    assert len(result.line) < 1000
    assert time.monotonic() - begun < 6 + 15
    assert all(one.sidecar.asked["/engine"] == 1 for role in (prefill, decode) for one in role.engines.values())
    assert sum(one.engine.connections for role in (prefill, decode) for one in role.engines.values()) == 0


@pytest.mark.parametrize("answer", IDENTITY.values(), ids=IDENTITY)
def test_what_is_an_identity_fires_however_it_is_sent(guard: Guard, fleet: Fleet, answer: Answer) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    guard.between(prefill, decode).recorded(prefill.lines(), decode.lines())
    prefill["127.0.0.2"].says(answer)
    assert guard.live().code == 1


def test_garbage_at_boot_ends_as_the_sentinel_and_the_router_starts(guard: Guard, fleet: Fleet) -> None:
    names = at_addresses("1", NO_IDENTITY)
    prefill, decode = fleet.role("127.0.0.2", *names), fleet.role("127.0.0.4")
    for address, name in names.items():
        prefill[address].says(NO_IDENTITY[name])
    guard.between(prefill, decode).booted(GUARD_BUDGET_SEC="3")
    assert guard.snapshot("prefill") == sorted([*(f"{address}||" for address in names), prefill["127.0.0.2"].line])
    assert all(prefill[address].sidecar.asked["/engine"] >= 1 for address in names)


NOT_HEALTHY: dict[str, Answer] = {
    "201": http("", status="201 Created"),
    "a redirect": http("", status="302 Found", headers="Location: /ok\r\n"),
    "not HTTP": b"200 OK\r\n\r\n",
    "HTTP/0.9": b"ok",
    "headers that never end": headers_for_ever,
    "a slow drip": dripping(HEALTHY),
    "silence": silent,
    "nothing": b"",
}


def test_only_a_200_is_health(guard: Guard, fleet: Fleet) -> None:
    names = at_addresses("1", NOT_HEALTHY)
    prefill, decode = fleet.role(*names), fleet.role("127.0.0.4")
    guard.between(prefill, decode).recorded(prefill.lines(), decode.lines())
    for address, name in names.items():
        prefill[address].says(identity(NEW))
        prefill[address].health(NOT_HEALTHY[name])
    result = guard.live(GUARD_DEADLINE_SEC="2")
    assert (result.code, result.err) == (0, ""), result
    assert result.line
    assert all(prefill[address].engine.asked["/health"] == 1 for address in names)


def test_a_large_body_of_health_is_health(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    guard.between(prefill, decode).recorded(prefill.lines(), decode.lines())
    prefill["127.0.0.2"].says(identity(NEW))
    prefill["127.0.0.2"].health(http(b"x" * 200_000))
    assert guard.live().code == 1


def test_no_proxy_of_the_environment_is_asked(guard: Guard, fleet: Fleet) -> None:
    prefill, decode, proxy = fleet.role("127.0.0.2"), fleet.role("127.0.0.4"), fleet.role("127.0.0.9")
    through = f"http://127.0.0.9:{proxy.port}"
    variables = {"http_proxy": through, "HTTP_PROXY": through, "ALL_PROXY": through}
    guard.between(prefill, decode).booted(**variables)
    assert guard.live(**variables).code == 0
    assert proxy["127.0.0.9"].engine.connections == 0


def test_256_engines_are_judged_under_the_deadline_though_some_are_black_holes(guard: Guard, fleet: Fleet) -> None:
    prefill = fleet.role(*(f"127.0.2.{number}" for number in range(128)))
    decode = fleet.role(*(f"127.0.3.{number}" for number in range(128)))
    guard.between(prefill, decode).recorded(prefill.lines(), decode.lines())
    everyone = [*prefill.engines.values(), *decode.engines.values()]
    for number, engine in enumerate(everyone):
        if number % 8 == 0:
            engine.sidecar.black_hole()
        elif number % 8 == 1:
            engine.says(silent)
    begun = time.monotonic()
    result = guard.live()
    took = time.monotonic() - begun
    assert result.code == 0, result
    assert took < 4 + 10
    assert len(result.line) < 1000
    last = decode["127.0.3.127"]
    last.says(identity(NEW))
    result = guard.live()
    assert result.code == 1, result
    assert "127.0.3.127" in result.line


def test_what_an_engine_says_reaches_the_line_as_one_line_of_plain_text(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    prefill["127.0.0.2"].says(identity("obs-1", source="observed", watcher_started_at="2026 Ж \u202e"))
    guard.between(prefill, decode).booted(GUARD_BUDGET_SEC="1")
    prefill["127.0.0.2"].says(identity("obs-1", source="observed", watcher_started_at="2026 Ж"))
    for locale in ("C", "C.UTF-8"):
        result = guard.live(LC_ALL=locale)
        assert result.code == 1, result
        assert result.line.isascii()
        assert result.line.isprintable()
