"""`/_sim/...`: the switches of the simulation itself.

- `GET /_sim`: this list, for people
- `GET /_sim/state`: processes, restarts, open requests
- `GET /_sim/requests`: the last generation requests: kv_transfer_params, bootstrap_*, status (null while open)
- `GET /_sim/faults`, `POST /_sim/faults`: states (faults.py)
- `POST /_sim/load`: synthetic clients (load.py); `{"concurrency": 0}` stops them
- `POST /_sim/prefill {"seconds", "chunks", "prompt_tokens", "core"}`: one prompt whose prefill takes that long;
  chunks 1 = a single forward pass
- `POST /_sim/restart {"load_sec"}`: another process on the same port, killed and started in place
- `POST /_sim/crash {"down_sec", "load_sec"}`: dies; refused for `down_sec`, then starts and loads
- `POST /_sim/calm`: no fault, no pause, no load; counters stay
- `POST /_sim/reset_counters`: counters from zero in the same process
- `POST /_sim/log {"lines": [...]}`: lines into the log file; `{"detokenizer": true}` SGLang's line
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from enginewatch.lab.sim.engine import Engine, read_json
from enginewatch.lab.sim.enginelog import DETOKENIZER_LINE
from enginewatch.lab.sim.faults import ANSWERS, METRICS, Faults
from enginewatch.lab.sim.load import Load, LoadOptions, load_options

_CHUNK_SEC = 0.25
"""Pace of a chunked prefill unless given: real vLLM moved its KV gauge every 0.3 s in a prompt of a million tokens."""
_ANSWER_FIRST_SEC = 0.05


class Control:
    """The switches of one front end."""

    def __init__(self, engine: Engine, supervise: Callable[[dict[str, Any]], None], restarts: int) -> None:
        self._engine = engine
        self._supervise = supervise
        self._restarts = restarts
        self._load = Load(engine)
        self._tasks: set[asyncio.Task[None]] = set()

    def add_routes(self, app: web.Application) -> None:
        """Register `/_sim/...`."""
        for path in ("/_sim", "/_sim/"):
            app.router.add_get(path, self._list)
        app.router.add_get("/_sim/state", self._state)
        app.router.add_get("/_sim/requests", self._requests)
        app.router.add_get("/_sim/faults", self._faults)
        app.router.add_post("/_sim/faults", self._set_faults)
        app.router.add_post("/_sim/load", self._set_load)
        app.router.add_post("/_sim/prefill", self._prefill)
        app.router.add_post("/_sim/restart", self._restart)
        app.router.add_post("/_sim/crash", self._restart)
        app.router.add_post("/_sim/calm", self._calm)
        app.router.add_post("/_sim/reset_counters", self._reset)
        app.router.add_post("/_sim/log", self._log)

    async def _list(self, request: web.Request) -> web.Response:
        return web.Response(text=_help())

    async def _state(self, request: web.Request) -> web.Response:
        engine = self._engine
        return web.json_response(
            {
                "engine": engine.options.engine,
                "role": engine.options.role,
                "model": engine.options.model,
                "version": engine.options.reported_version,
                "pid": os.getpid(),
                "supervisor_pid": os.getppid(),
                "started_at": engine.started_at,
                "restarts": self._restarts,
                "ranks": [
                    {"core": rank.core, "pid": rank.pid, "alive": rank.alive, "open_requests": len(rank.streams)}
                    for rank in engine.ranks.all
                ],
                "open_http_requests": engine.open_requests,
                "kv_engine_ids": engine.sender.engine_ids if engine.sender is not None else [],
                "bootstrap_queries": engine.sender.queries if engine.sender is not None else 0,
                "pages_served": engine.page_count,
                "paused": engine.paused,
                "sleep_level": engine.sleep_level,
                "load": self._load.describe(),
            }
        )

    async def _requests(self, request: web.Request) -> web.Response:
        return web.json_response({"requests": self._engine.arrivals.told()})

    async def _faults(self, request: web.Request) -> web.Response:
        return web.json_response(self._engine.faults.to_dict())

    async def _set_faults(self, request: web.Request) -> web.Response:
        engine = self._engine
        before = engine.faults.to_dict()
        changes = await read_json(request)
        if changes.get("deadlock") and engine.hold is None:
            return _refuse(f"a simulated {engine.options.engine} cannot deadlock; stop its rank with kill -STOP")
        try:
            engine.faults.update(changes)
        except ValueError as error:
            return _refuse(str(error))
        faults = engine.faults
        self._tune()
        if faults.deadlock != before["deadlock"] and engine.hold is not None:
            engine.hold(faults.deadlock)
        # A core that hangs would never acknowledge; the switch must not wait for it.
        if faults.paused != before["paused"]:
            self._begin(engine.set_paused(faults.paused, "keep"))
        if faults.sleeping != before["sleeping"]:
            self._begin(engine.set_sleep_level(faults.sleeping))
        await asyncio.sleep(0)
        return web.json_response(faults.to_dict())

    def _tune(self) -> None:
        faults, ranks = self._engine.faults, self._engine.ranks
        ranks.tune(peer_gone=faults.peer_gone)
        for rank in ranks.all:
            slow = faults.step_delay_core in ("", rank.core)
            ranks.tune(rank.core, extra_sec=faults.step_delay_sec if slow else 0.0)

    async def _calm(self, request: web.Request) -> web.Response:
        engine = self._engine
        self._load.stop()
        engine.faults.update(Faults().to_dict())
        if engine.hold is not None:
            engine.hold(False)
        self._tune()
        if engine.sleep_level:
            await engine.set_sleep_level(0)
        await engine.set_paused(False, "")
        return web.json_response({})

    async def _set_load(self, request: web.Request) -> web.Response:
        try:
            self._load.start(load_options(await read_json(request)))
        except ValueError as error:
            return _refuse(str(error))
        await asyncio.sleep(0)
        return web.json_response(self._load.describe())

    async def _prefill(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        try:
            seconds = float(body.get("seconds", 10))
            chunks = int(body.get("chunks", max(1, round(seconds / _CHUNK_SEC))))
            prompt = int(body.get("prompt_tokens", max(chunks, min(10**6, self._engine.options.kv_tokens // 2))))
            core = str(body["core"]) if "core" in body else None
        except (TypeError, ValueError):
            return _refuse("expected numbers: seconds, chunks, prompt_tokens, core")
        if chunks < 1 or not chunks <= prompt < self._engine.options.kv_tokens:
            return _refuse("expected 1 <= chunks <= prompt_tokens < the engine's KV capacity")
        if core is not None and core not in {rank.core for rank in self._engine.ranks.all}:
            return _refuse(f"there is no core {core}")
        options = self._engine.options
        if options.engine == "sglang" and options.role == "decode":
            return _refuse("a SGLang decode engine does not prefill")
        peer = "fake" if options.engine == "sglang" and options.role == "prefill" else ""
        self._load.once(prompt, 1, core, {"chunks": chunks, "chunk_sec": seconds / chunks, "peer": peer})
        await asyncio.sleep(0)
        return web.json_response({"seconds": seconds, "chunks": chunks, "prompt_tokens": prompt})

    async def _restart(self, request: web.Request) -> web.Response:
        body = await read_json(request) if request.can_read_body else {}
        order = {
            "event": "restart",
            "down_sec": float(body.get("down_sec", 0.0)),
            "load_sec": float(body.get("load_sec", 0.0)),
        }
        # The supervisor kills this process; the answer goes out first.
        asyncio.get_running_loop().call_later(_ANSWER_FIRST_SEC, self._supervise, order)
        return web.json_response(order, status=202)

    async def _reset(self, request: web.Request) -> web.Response:
        self._engine.page.reset()
        return web.json_response({})

    async def _log(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        lines = [str(line) for line in body.get("lines", [])]
        if body.get("detokenizer"):
            now = time.strftime("%H:%M:%S")
            lines.append(DETOKENIZER_LINE.format(seconds=20, now=now, heard=now))
        for line in lines:
            self._engine.log.write(line)
        if "partial" in body:
            self._engine.log.write_partial(str(body["partial"]))
        return web.json_response({"lines": len(lines)})

    def _begin(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _help() -> str:
    """What can be switched, from the documentation of the code itself."""
    switches = (__doc__ or "").partition("- ")
    faults = inspect.cleandoc(Faults.__doc__ or "").partition("Attributes:\n")[2]
    load = inspect.cleandoc(LoadOptions.__doc__ or "").partition("Attributes:\n")[2]
    return (
        f"{switches[1]}{switches[2]}\n"
        f"POST /_sim/faults takes a JSON object of these; null puts one back:\n{faults}\n"
        f"answer:  {', '.join(ANSWERS)}\n"
        f"metrics: {', '.join(METRICS)}\n\n"
        f"POST /_sim/load takes a JSON object of these:\n{load}\n"
        "To hang a core: kill -STOP its rank's process, whose pid /_sim/state shows; TensorRT-LLM also: deadlock.\n"
    )


def _refuse(reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=400)
