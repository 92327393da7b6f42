"""SGLang's HTTP server: native and OpenAI routes, and health that goes through the scheduler.

/health and /health_generate are one handler: it sends a one-token request, looks every second whether anything came
from a scheduler, and gives up after a while. /server_info asks the schedulers and hangs with them; /ready, /ping,
/model_info, /v1/models and /v1/loads do not. A pause is told by /ready alone: /ping stays 200, until a /health that was
asked meanwhile gives up.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

from aiohttp import web

from enginewatch.engines.profile import version_tuple
from enginewatch.lab.sim.engine import Engine, read_json, start_events, tokens_of
from enginewatch.lab.sim.enginelog import DETOKENIZER_LINE
from enginewatch.lab.sim.ranks import CoreDied, Stream

FAKE_HOST = "2.2.2.2"
"""The engine's own bootstrap host for requests without a partner."""
_HEALTH_LOOK_SEC = 1.0
_READY_SINCE = (0, 5, 20)
_PING_TELLS_SINCE = (0, 5, 23)
"""Before, /ping is a constant 200."""
_WORD = " token"
_OPENAI_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})


class SglangHttp:
    """The routes of one server."""

    generation_paths = _OPENAI_PATHS | {"/generate"}
    queue_full_text = "The request queue is full."

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._options = engine.options
        self._version = version_tuple(engine.options.reported_version)
        self._healthy = True
        self._probed = 0

    def add_routes(self, app: web.Application) -> None:
        """Register everything but /metrics and /_sim."""
        router = app.router
        for path in ("/health", "/health_generate"):
            router.add_get(path, self._health)
        if self._version >= _READY_SINCE:
            router.add_get("/ready", self._ready)
        router.add_get("/ping", self._ping)
        for path in ("/model_info", "/get_model_info"):
            router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            router.add_get(path, self._server_info)
        router.add_get("/v1/models", self._models)
        router.add_get("/v1/loads", self._loads)
        router.add_route("*", "/generate", self._native)
        router.add_post("/v1/completions", self._completions)
        router.add_post("/v1/chat/completions", self._chat)
        router.add_post("/pause_generation", self._pause)
        router.add_post("/continue_generation", self._continue)

    def needs_key(self, path: str) -> bool:
        """Whether the API key guards a path: all but health, metrics and the simulation's own."""
        return not path.startswith(("/health", "/metrics", "/_sim"))

    def error_object(self, message: str) -> dict[str, Any]:
        """An error as this engine puts it into a 200."""
        return {"error": {"message": message}}

    def sample_answer(self, path: str, *, stream: bool, finish: str | None, outputs: int) -> tuple[bytes, str]:
        """A complete answer of `outputs` tokens made up without the engine: body and content type."""
        if path in _OPENAI_PATHS:
            answer = self._openai(path.endswith("/chat/completions"), _WORD * outputs, finish, 1, outputs, stream)
            if not outputs:
                answer["choices"] = []
        else:
            answer = self._answer("0", _WORD * outputs, finish, 1, outputs, 0.0)
        if not stream:
            return json.dumps(answer).encode(), "application/json"
        return (_event(answer) if outputs else b"") + b"data: [DONE]\n\n", "text/event-stream"

    # --- health -----------------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        ranks = self._engine.ranks
        began = time.monotonic()
        self._probed += 1
        core = str((self._probed - 1) % self._options.dp)
        peer = "" if self._options.role == "agg" else "fake"
        try:
            with ranks.open(1, 1, core=core, probe=True, fields={"peer": peer}):
                while time.monotonic() - began < self._options.health_timeout_sec:
                    await asyncio.sleep(_HEALTH_LOOK_SEC)
                    if ranks.output_at > began:
                        self._healthy = True
                        return web.Response()
        except CoreDied:
            return web.Response(status=503)
        self._healthy = False
        heard = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - ranks.output_at)))
        self._engine.log.write(
            DETOKENIZER_LINE.format(
                seconds=self._options.health_timeout_sec, now=time.strftime("%H:%M:%S"), heard=heard
            )
        )
        return web.Response(status=503)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._is_up and not self._engine.paused else 503)

    async def _ping(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._is_up or self._version < _PING_TELLS_SINCE else 503)

    @property
    def _is_up(self) -> bool:
        """The server's own status, which a failed /health changes and a pause does not."""
        return self._healthy and not self._engine.ranks.dead

    # --- descriptions -----------------------------------------------------------------------------------------------

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._options.model,
                "tokenizer_path": self._options.model,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": "default",
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        states = await self._engine.ranks.call("server_info")
        return web.json_response(
            {
                "model_path": self._options.model,
                "served_model_name": self._options.model,
                "dp_size": self._options.dp,
                "disaggregation_mode": "null" if self._options.role == "agg" else self._options.role,
                "version": self._options.reported_version,
                "internal_states": states,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._options.model,
            "object": "model",
            "created": int(self._engine.started_at),
            "owned_by": "sglang",
            "root": self._options.model,
            "parent": None,
            "max_model_len": self._options.kv_tokens,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _loads(self, request: web.Request) -> web.Response:
        """Read from what the schedulers last published: never waits, and its timestamps age with a hung one."""
        loads = [
            {"dp_rank": int(rank.core), "timestamp": self._engine.ranks.loop_at.get(rank.core, 0.0)}
            for rank in self._engine.ranks.all
        ]
        return web.json_response({"timestamp": time.time(), "dp_rank_count": self._options.dp, "loads": loads})

    async def _pause(self, request: web.Request) -> web.Response:
        body = await read_json(request) if request.can_read_body else {}
        await self._engine.set_paused(True, str(body.get("mode", "abort")))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._engine.set_paused(False, "")
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    # --- generation -------------------------------------------------------------------------------------------------

    async def _native(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        prompt = body.get("text") or body.get("input_ids")
        if not prompt:
            return _error(400, "Either text or input_ids should be provided.")
        wanted = (body.get("sampling_params") or {}).get("max_new_tokens", 128)
        return await self._generate(request, body, tokens_of(prompt), wanted)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        if not body.get("prompt"):
            return _error(400, "prompt is missing or empty")
        return await self._generate(request, body, tokens_of(body["prompt"]), body.get("max_tokens") or 16)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        if not body.get("messages"):
            return _error(400, "messages is missing or empty")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 128
        return await self._generate(request, body, tokens_of(body["messages"]), wanted)

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompt: int, wanted: Any
    ) -> web.StreamResponse:
        core = self._core(body)
        if core is not None and core not in {rank.core for rank in self._engine.ranks.all}:
            return _error(400, f"routed_dp_rank {core} is out of range [0, {self._options.dp}).")
        if not isinstance(wanted, int) or wanted < 1:
            return _error(400, f"max_new_tokens must be at least 1, got {wanted}.")
        if prompt + wanted > self._options.kv_tokens:
            return _error(400, f"The context holds {self._options.kv_tokens} tokens, not {prompt + wanted}.")
        streaming = bool(body.get("stream"))
        opened = self._engine.ranks.open(
            prompt, wanted, core=core, streaming=streaming, fields={"peer": self._peer(body)}
        )
        rid = str(body.get("rid") or uuid.uuid4().hex)
        try:
            with opened as stream:
                if streaming:
                    return await self._stream(request, body, stream, rid)
                finish = (await self._engine.run(stream))["finish"]
                return web.json_response(self._whole(request, stream, rid, finish))
        except CoreDied:
            return _error(500, "The scheduler has died.")

    def _core(self, body: dict[str, Any]) -> str | None:
        for name in ("routed_dp_rank", "data_parallel_rank"):
            if body.get(name) is not None:
                return str(body[name])
        # Partners find each other by the room's number, and room 0 of a fake request is always rank 0.
        room = body.get("bootstrap_room")
        return str(room % self._options.dp) if self._options.role != "agg" and isinstance(room, int) else None

    def _peer(self, body: dict[str, Any]) -> str:
        if self._options.role == "agg":
            return ""
        host = body.get("bootstrap_host")
        return "missing" if not host else "fake" if host == FAKE_HOST else "peer"

    async def _stream(self, request: web.Request, body: dict[str, Any], stream: Stream, rid: str) -> web.StreamResponse:
        response = await start_events(request)
        try:
            finish = None
            while finish is None:
                output = await stream.next()
                finish = output.get("finish")
                text = _WORD * (output["new"] if request.path in _OPENAI_PATHS else stream.produced)
                await response.write(_event(self._part(request, stream, rid, text, finish)))
            if (body.get("stream_options") or {}).get("include_usage"):
                usage = self._openai(False, "", None, stream.prompt, stream.produced, True) | {"choices": []}
                await response.write(_event(usage | {"usage": _usage(stream.prompt, stream.produced)}))
        except CoreDied:
            await response.write(_event(self.error_object("The scheduler has died.")))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _whole(self, request: web.Request, stream: Stream, rid: str, finish: str) -> dict[str, Any]:
        return self._part(request, stream, rid, _WORD * stream.produced, finish, whole=True)

    def _part(
        self, request: web.Request, stream: Stream, rid: str, text: str, finish: str | None, *, whole: bool = False
    ) -> dict[str, Any]:
        if request.path in _OPENAI_PATHS:
            chat = request.path.endswith("/chat/completions")
            return self._openai(chat, text, finish, stream.prompt, stream.produced, not whole)
        took = time.monotonic() - stream.arrived_at
        return self._answer(rid, text, finish, stream.prompt, stream.produced, took)

    def _answer(
        self, rid: str, text: str, finish: str | None, prompt: int, produced: int, took: float
    ) -> dict[str, Any]:
        reason: dict[str, Any] | None = None if finish is None else {"type": finish}
        if reason is not None:
            reason |= {"length": produced} if finish == "length" else {"message": "Aborted", "status_code": None}
        return {
            "text": text,
            "output_ids": [323] * produced,
            "meta_info": {
                "id": rid,
                "finish_reason": reason,
                "prompt_tokens": prompt,
                "weight_version": "default",
                "completion_tokens": produced,
                "cached_tokens": 0,
                "e2e_latency": took,
            },
        }

    def _openai(
        self, chat: bool, text: str, finish: str | None, prompt: int, produced: int, part: bool
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        if not chat:
            choice["text"] = text
        else:
            choice["delta" if part else "message"] = {"role": "assistant", "content": text}
        kind = "text_completion" if not chat else "chat.completion.chunk" if part else "chat.completion"
        return {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": self._options.model,
            "choices": [choice],
            "usage": None if part else _usage(prompt, produced),
        }


def _usage(prompt: int, produced: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + produced, "completion_tokens": produced}


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error(code: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "BadRequestError", "code": code}}, status=code)
