"""Scrapes: a page of metrics, and everything that can be wrong with it."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable

from aiohttp import web

from enginewatch.lab.sim import spoil
from enginewatch.lab.sim.engine import Engine

Read = Callable[[web.Request, bool], Awaitable[tuple[bytes, str]]]
"""Makes a page and its content type; with false the engine says nothing of itself on it."""


def page_of(engine: Engine) -> Read:
    """The engine's Prometheus page."""

    async def read(request: web.Request, engine_series: bool) -> tuple[bytes, str]:
        return engine.page.render(request.headers.get("Accept", ""), engine_series)

    return read


async def metrics(engine: Engine, request: web.Request, read: Read) -> web.StreamResponse:
    """Answer one scrape, under the faults in force."""
    faults = engine.faults
    engine.page_count += 1
    if faults.metrics_delay_sec:
        await asyncio.sleep(faults.metrics_delay_sec)
    kind = faults.take_metrics()
    if kind == "hang":
        await spoil.hang()
    if kind == "reset":
        spoil.reset(request)
        return web.Response()
    if kind == "html":
        return spoil.html()
    if kind == "json":
        return web.json_response([])
    if kind.isdigit():
        return spoil.status(int(kind), "simulated fault of /metrics")
    page, content_type = await read(request, kind != "no-engine-series")
    if faults.drop_series and not (faults.drop_every_other and engine.page_count % 2):
        page = spoil.without(page, faults.drop_series)
    if kind == "empty":
        page = b""
    if kind == "truncated":
        return await spoil.truncated(request, page, content_type)
    if kind == "drip":
        return await spoil.drip(request, page, content_type, faults.metrics_rate)
    if kind in ("huge", "huge-own"):
        page = spoil.padded(page, faults.metrics_bytes, own=kind == "huge-own")
    headers = {"Content-Type": content_type}
    if engine.page.gzips and "gzip" in request.headers.get("Accept-Encoding", ""):
        page = gzip.compress(page)
        headers["Content-Encoding"] = "gzip"
    return web.Response(body=page, headers=headers)
