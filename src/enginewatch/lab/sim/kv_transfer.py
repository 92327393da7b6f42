"""How a simulated vLLM pair hands KV over: Mooncake's bootstrap server and side channel, or NIXL's parameters.

Kept from the real connectors (read in vLLM 0.32.0):
    - a prefill process has an engine id of its own, new with every start, with `_dp<rank>` when there are several
      cores; its side channel listens on a port that the system gives, so that it too is new;
    - Mooncake: the bootstrap server answers `GET /query` with each rank's engine id and the side channel's address. A
      decode that meets an unknown id asks it once and keeps the answer for good. An id that the answer lacks fails the
      request at once. An id it knows from earlier is looked up at the address of that time: where the process has been
      replaced nobody listens there, and the request waits until the transfer times out;
    - NIXL: the prefill's answer itself names engine id, host and port of the side channel, so they are always fresh.

Simplified: one JSON line each way instead of ZeroMQ and RDMA. And the sender looks at the engine id, which the real one
does not, so that a port that a new process was given again by chance does not heal what would have hung.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Coroutine
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from enginewatch.lab.sim.options import SimOptions, reachable

Params = dict[str, Any]
"""A request's `kv_transfer_params`."""

_RECONNECT_SEC = 0.1
_QUERY_SEC = 30.0
"""vLLM's VLLM_MOONCAKE_CONNECTOR_TIMEOUT."""


class TransferFailed(Exception):  # noqa: N818  what happened, as the engine's log puts it
    """The KV of a request will not come."""


class Address(NamedTuple):
    """Where a side channel listens."""

    host: str
    port: int


class Sender:
    """The prefill's side: the bootstrap server, the side channel, and what has been computed for whom.

    Attributes:
        engine_ids: by rank.
        queries: how often the bootstrap server was asked.
    """

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        own = str(uuid.uuid4())
        self.engine_ids = [own] if options.dp == 1 else [f"{own}_dp{rank}" for rank in range(options.dp)]
        self.queries = 0
        self._ready: dict[str, asyncio.Event] = {}
        self._side: asyncio.Server | None = None
        self._bootstrap: web.AppRunner | None = None
        self._talks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: an address cannot be had.
        """
        options = self._options
        self._side = await asyncio.start_server(self._talk, options.host, 0)
        if options.bootstrap_port < 0:
            return
        app = web.Application()
        app.router.add_get("/query", self._query)
        self._bootstrap = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._bootstrap.setup()
        site = web.TCPSite(self._bootstrap, options.host, options.bootstrap_port, reuse_address=True, reuse_port=True)
        await site.start()

    async def close(self) -> None:
        """Stop listening; whoever waits for a transfer is let go."""
        for talk in self._talks:
            talk.cancel()
        if self._side is not None:
            self._side.close()
        if self._bootstrap is not None:
            await self._bootstrap.cleanup()

    def prefilled(self, params: Params, core: str) -> Params | None:
        """A prompt has been computed for a decode: what the answer tells of it."""
        if self._options.bootstrap_port >= 0:
            # Mooncake's ids are the router's; a request without one keeps nothing, and no answer tells anything.
            if params.get("transfer_id"):
                self._event(str(params["transfer_id"])).set()
            return None
        request_id = f"cmpl-{uuid.uuid4().hex}"
        self._event(request_id).set()
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [1],
            "remote_engine_id": self.engine_ids[int(core)],
            "remote_request_id": request_id,
            "remote_host": reachable(self._options.host),
            "remote_port": self._port,
            "tp_size": 1,
        }

    @property
    def _port(self) -> int:
        assert self._side is not None
        return int(self._side.sockets[0].getsockname()[1])

    def _event(self, transfer: str) -> asyncio.Event:
        if transfer not in self._ready:
            self._ready[transfer] = asyncio.Event()
            # Nobody may ever ask: the real one gives the blocks back after a while as well.
            forget = self._ready.pop
            asyncio.get_running_loop().call_later(self._options.transfer_timeout_sec, forget, transfer, None)
        return self._ready[transfer]

    async def _query(self, request: web.Request) -> web.Response:
        self.queries += 1
        host = reachable(self._options.host)
        address = f"tcp://{f'[{host}]' if ':' in host else host}:{self._port}"
        return web.json_response(
            {
                str(rank): {"engine_id": engine_id, "worker_addr": {"0": {"0": address}}}
                for rank, engine_id in enumerate(self.engine_ids)
            }
        )

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        try:
            asked = json.loads(await reader.readline())
            if asked["engine_id"] not in self.engine_ids:
                await reader.read()  # until the other side gives up
                return
            if await _first(self._event(asked["transfer"]).wait(), reader.read()):
                writer.write(b"{}\n")
                await writer.drain()
        except (ConnectionError, ValueError, KeyError, asyncio.CancelledError):
            pass
        finally:
            self._talks.discard(talk)
            writer.close()


class Receiver:
    """The decode's side: which engine ids it has met, and where their side channels were."""

    def __init__(self, options: SimOptions) -> None:
        self._timeout_sec = options.transfer_timeout_sec
        self._known: dict[str, Address] = {}

    @staticmethod
    def concerns(params: Params) -> bool:
        """Whether the KV of a request comes from an engine that the request names."""
        where = params.get("remote_bootstrap_addr") or isinstance(params.get("remote_port"), int)
        return bool(params.get("do_remote_prefill") and params.get("remote_engine_id") and where)

    async def fetch(self, params: Params) -> None:
        """Return when the KV has arrived.

        Raises:
            TransferFailed: it will not: the engine id is unknown where the request points, or the time is up.
        """
        engine_id = str(params["remote_engine_id"])
        if params.get("remote_bootstrap_addr"):
            address = await self._met(engine_id, str(params["remote_bootstrap_addr"]))
            transfer = str(params.get("transfer_id"))
        else:
            address = Address(str(params["remote_host"]), int(params["remote_port"]))
            transfer = str(params.get("remote_request_id"))
        question = json.dumps({"engine_id": engine_id, "transfer": transfer}).encode() + b"\n"
        try:
            async with asyncio.timeout(self._timeout_sec):
                await _ask(address, question)
        except TimeoutError:
            raise TransferFailed(
                f"nothing came from engine {engine_id} at {address.host}:{address.port} in {self._timeout_sec:g} s"
            ) from None

    async def _met(self, engine_id: str, bootstrap: str) -> Address:
        if engine_id not in self._known:
            self._known |= await _query(bootstrap)
        if engine_id not in self._known:
            raise TransferFailed(f"engine {engine_id} is not known to the bootstrap server {bootstrap}")
        return self._known[engine_id]


async def _first(wanted: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> bool:
    """Whether the first of two ends, and not the second; the one that is left over is cancelled."""
    tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


async def _query(bootstrap: str) -> dict[str, Address]:
    """The engines behind a bootstrap server; none when it gives no usable answer."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_QUERY_SEC)) as session,
            session.get(f"{bootstrap}/query") as answer,
        ):
            told = await answer.json()
        return {entry["engine_id"]: _address(entry["worker_addr"]["0"]["0"]) for entry in told.values()}
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, AttributeError, TypeError):
        return {}


def _address(url: str) -> Address:
    parts = urlsplit(url)
    return Address(parts.hostname or "", parts.port or 0)


async def _ask(address: Address, question: bytes) -> None:
    """Return when a question has been answered; like ZeroMQ, connects again for ever where nobody listens."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            try:
                writer.write(question)
                if await reader.readline():
                    return
            finally:
                writer.close()
        await asyncio.sleep(_RECONNECT_SEC)
