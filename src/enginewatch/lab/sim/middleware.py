"""What happens around every request: counting, the API key, faults."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from enginewatch.lab.sim import spoil
from enginewatch.lab.sim.engine import Engine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes(Protocol):
    """What the middleware asks the engine's routes."""

    generation_paths: frozenset[str]
    queue_full_text: str
    """What a 503 says when the queue is full."""

    def add_routes(self, app: web.Application) -> None:
        """Register the engine's routes."""

    def needs_key(self, path: str) -> bool:
        """Whether the API key guards a path."""

    def sample_answer(self, path: str, *, stream: bool, finish: str | None, outputs: int) -> tuple[bytes, str]:
        """A complete answer made up without the engine: body and content type."""

    def error_object(self, message: str) -> dict[str, Any]:
        """An error as this engine puts it into a 200."""


class HttpCounts(Protocol):
    """What a page counts of HTTP."""

    def http_began(self, route: str, method: str) -> None:
        """A request arrived."""

    def http_ended(
        self, route: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Its response has ended."""

    def http_left(self, route: str, method: str) -> None:
        """Its client left before that."""


def counting(counts: HttpCounts) -> Any:
    """Count requests as the engine's own instrumentation does, except those to the simulation itself."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "none"
        if route.startswith("/_sim"):
            return await handler(request)
        began = time.monotonic()
        counts.http_began(route, request.method)
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = error
        except ConnectionResetError:
            # The client left while the answer was being written; aiohttp would print a traceback.
            counts.http_left(route, request.method)
            return web.Response(status=499)
        except BaseException:
            counts.http_left(route, request.method)
            raise
        size = response.body_length or len(getattr(response, "body", None) or b"")
        seconds = time.monotonic() - began
        counts.http_ended(route, request.method, response.status, seconds, request.content_length or 0, size)
        if isinstance(response, web.HTTPException):
            raise response
        return response

    return middleware


def guarded(engine: Engine, routes: Routes) -> Any:
    """Refuse requests without the API key."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = engine.options.api_key
        if key and routes.needs_key(request.path) and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return middleware


def noted(engine: Engine, routes: Routes) -> Any:
    """Keep what generation requests say of their partner, and how they were answered: 499 = the client left."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in routes.generation_paths:
            return await handler(request)
        arrived = await engine.arrivals.begin(request)
        status = 499
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            arrived["status"] = status

    return middleware


def spoiled(engine: Engine, routes: Routes) -> Any:
    """Give generation requests the wrong answer that is in force; count the open ones."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in ("/health", "/health_generate") and engine.faults.health:
            return web.Response(status=int(engine.faults.health))
        if request.path not in routes.generation_paths:
            return await handler(request)
        engine.open_requests += 1
        try:
            kind = engine.faults.take_answer()
            return await _spoil(request, kind, engine, routes) if kind else await handler(request)
        finally:
            engine.open_requests -= 1

    return middleware


async def _spoil(request: web.Request, kind: str, engine: Engine, routes: Routes) -> web.StreamResponse:
    try:
        stream = bool((await request.json()).get("stream"))
    except (ValueError, AttributeError):
        stream = False
    if kind == "hang":
        await spoil.hang()
    if kind == "reset":
        spoil.reset(request)
        return web.Response()
    if kind == "html":
        return spoil.html()
    if kind == "queue-full":
        engine.page.rejected()
        return spoil.status(503, routes.queue_full_text)
    if kind.isdigit():
        if kind == "429":
            engine.page.rejected()
        return spoil.status(int(kind), "simulated fault")
    if kind == "error-object":
        body, content_type = json.dumps(routes.error_object("simulated fault")).encode(), "application/json"
        if stream:
            body, content_type = b"data: " + body + b"\n\ndata: [DONE]\n\n", "text/event-stream"
        return web.Response(body=body, content_type=content_type)
    if kind == "freeze":
        body, content_type = routes.sample_answer(request.path, stream=stream, finish=None, outputs=1)
        first = body[: body.index(b"\n\n") + 2] if stream else body[: len(body) // 2]
        return await spoil.freeze(request, first, content_type)
    finish, outputs = ("error", 1) if kind == "error-finish" else ("length", 0)
    body, content_type = routes.sample_answer(request.path, stream=stream, finish=finish, outputs=outputs)
    return web.Response(body=body, content_type=content_type)
