"""A prefill/decode router that does what vllm-router with Mooncake does, and nothing else: it pins a process.

At its start it asks each prefill's bootstrap server once for the engine id, and from then on puts that id into every
request that it sends to a decode engine. A stand-in for the demo, which is to run with nothing else installed.

    python -m enginewatch.lab.demo_router --port 8080 --prefill http://10.0.0.1:8000 8998 --decode http://10.0.0.2:8000
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

_BOOT_SEC = 10.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill engine as the router knows it since its start.

    Attributes:
        url: base URL.
        bootstrap: address of its bootstrap server.
        engine_id: what that one said at the router's start.
    """

    url: str
    bootstrap: str
    engine_id: str


class Router:
    """Sends every request to a prefill and a decode engine, in turn."""

    def __init__(self, prefills: Sequence[Prefill], decodes: Sequence[str], session: aiohttp.ClientSession) -> None:
        self._session = session
        self._pairs = zip(itertools.cycle(prefills), itertools.cycle(decodes), strict=False)

    def application(self) -> web.Application:
        """Its routes."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._completions)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        prefill, decode = next(self._pairs)
        transfer = f"xfer-{uuid.uuid4().hex}"
        for_prefill = {"do_remote_decode": True, "transfer_id": transfer}
        for_decode = {
            "do_remote_prefill": True,
            "remote_engine_id": prefill.engine_id,
            "remote_bootstrap_addr": prefill.bootstrap,
            "transfer_id": transfer,
        }
        try:
            await self._post(prefill.url, {**body, "max_tokens": 1, "kv_transfer_params": for_prefill})
            answer = await self._post(decode, {**body, "kv_transfer_params": for_decode})
        except aiohttp.ClientError as error:
            return web.json_response({"error": type(error).__name__}, status=502)
        return web.json_response(answer)

    async def _post(self, url: str, body: dict[str, Any]) -> Any:
        async with self._session.post(url + "/v1/completions", json=body) as response:
            response.raise_for_status()
            return await response.json()


async def pinned(session: aiohttp.ClientSession, url: str, port: str) -> Prefill:
    """Ask a prefill's bootstrap server who it is.

    Raises:
        ValueError: it gave no engine id; a sentence.
    """
    host = urlsplit(url).hostname or ""
    bootstrap = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        async with session.get(bootstrap + "/query", timeout=aiohttp.ClientTimeout(total=_BOOT_SEC)) as response:
            engine_id = str((await response.json())["0"]["engine_id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError):
        raise ValueError(f"the bootstrap server {bootstrap} tells no engine id") from None
    return Prefill(url, bootstrap, engine_id)


async def serve(port: int, prefills: Sequence[Sequence[str]], decodes: Sequence[str]) -> None:
    """Serve on 127.0.0.1 until cancelled; raises ValueError as `pinned` does."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        known = await asyncio.gather(*(pinned(session, url, boot) for url, boot in prefills))
        runner = web.AppRunner(Router(known, decodes, session).application(), handle_signals=True, shutdown_timeout=0.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            print(f"router: on port {port}, pinned {', '.join(one.engine_id for one in known)}", file=sys.stderr)
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 where it cannot start."""
    parser = argparse.ArgumentParser(prog="demo_router")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", nargs=2, action="append", required=True, metavar=("URL", "BOOTSTRAP_PORT"))
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    options = parser.parse_args(arguments)
    try:
        asyncio.run(serve(options.port, options.prefill, options.decode))
    except web.GracefulExit:
        return 0
    except (OSError, ValueError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
