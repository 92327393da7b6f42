"""Carrying out the faults that are visible in an HTTP answer."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct

from aiohttp import web

_HTML = b"<!DOCTYPE html><html><head><title>Welcome</title></head><body>It works.</body></html>"
_DRIP_PERIOD_SEC = 0.1


async def hang() -> None:
    """Never answer; ends only when the client leaves (the handler is cancelled then)."""
    await asyncio.Event().wait()


def reset(request: web.Request) -> None:
    """Drop the connection with a TCP reset."""
    transport = request.transport
    if transport is None:
        return
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def status(code: int, message: str) -> web.Response:
    """An error answer as the engines word it: a JSON object with a message."""
    headers = {"Location": "/elsewhere"} if 300 <= code < 400 else None
    body = {"error": {"message": message, "type": "simulated", "param": None, "code": code}}
    return web.json_response(body, status=code, headers=headers)


def html() -> web.Response:
    """Something else answers on this address."""
    return web.Response(body=_HTML, content_type="text/html")


async def freeze(request: web.Request, first: bytes, content_type: str) -> web.StreamResponse:
    """Begin an answer and never end it."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    await response.write(first)
    await hang()
    return response


async def truncated(request: web.Request, page: bytes, content_type: str) -> web.StreamResponse:
    """Promise the whole page, send half of it and close, inside a line."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    response.content_length = len(page)
    await response.prepare(request)
    end = page.rfind(b"\n", 0, len(page) // 2)
    cut = end - 3 if end > 0 else len(page) // 2
    await response.write(page[:cut])
    if request.transport is not None:
        request.transport.close()
    return response


async def drip(request: web.Request, page: bytes, content_type: str, rate: float) -> web.StreamResponse:
    """Send the page at `rate` bytes a second."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    size = max(1, int(rate * _DRIP_PERIOD_SEC))
    for start in range(0, len(page), size):
        await response.write(page[start : start + size])
        await asyncio.sleep(size / rate)
    await response.write_eof()
    return response


def padded(page: bytes, size: int, *, own: bool) -> bytes:
    """The page behind so much padding that it has exactly `size` bytes.

    The padding comes first, so that a reader that stops early sees nothing of the page proper. `own` repeats a counter
    that every watcher of the engine wants, under ever new cores; otherwise the names are foreign. A page of JSON is
    padded with records (`own`) or white space.
    """
    if page.startswith(b"["):
        return _padded_json(page, size, own=own)
    engine = next((name for name in (b"sglang:", b"trtllm_") if b"\n" + name in page), b"vllm:")
    name = engine + b"generation_tokens_total" if own else b"foreign:series_total"
    missing = size - len(page)
    lines: list[bytes] = []
    number = 0
    while missing > 120:
        line = b'%s{model_name="padding",engine="%d",dp_rank="%d"} %d.0\n' % (
            name,
            number + 1000,
            number + 1000,
            number,
        )
        lines.append(line)
        missing -= len(line)
        number += 1
    if missing > 0:
        lines.append(b"#" + b" " * max(0, missing - 2) + b"\n")
    return b"".join(lines) + page


def _padded_json(page: bytes, size: int, *, own: bool) -> bytes:
    record = b'{"iter": 1, "numActiveRequests": 1, "numQueuedRequests": 0}'
    rest = page[1:]
    count = max(0, (size - len(page)) // (len(record) + 2)) if own else 0
    records = b"".join(record + b", " for _ in range(count))
    if count and rest.lstrip().startswith(b"]"):
        records = records[:-2]
    return b"[" + b" " * max(0, size - len(page) - len(records)) + records + rest


def without(page: bytes, names: list[str]) -> bytes:
    """The page without the series and comments of the named samples or families, or the records without these keys."""
    if page.startswith(b"["):
        kept = [{key: value for key, value in record.items() if key not in names} for record in json.loads(page)]
        return json.dumps(kept).encode()
    dropped = "|".join(re.escape(name) for name in names)
    endings = rb"(?:_total|_created|_bucket|_count|_sum)?"
    pattern = rb"(?m)^(?:# (?:HELP|TYPE) )?(?:%s)%s(?=[{ ]).*\n" % (dropped.encode(), endings)
    return re.sub(pattern, b"", page)
