"""vLLM's OpenAI server: which routes touch the engine core and which do not.

/health, /ping, /v1/models, /version, /load and /metrics never do, and so they answer while a core hangs. /is_sleeping,
/is_paused and every completion do, and hang with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from enginewatch.lab.sim.engine import Engine, read_json, start_events, tokens_of
from enginewatch.lab.sim.kv_transfer import TransferFailed
from enginewatch.lab.sim.ranks import CoreDied, Stream

_WORD = " token"


class VllmHttp:
    """The routes of one server."""

    generation_paths = frozenset({"/v1/completions", "/v1/chat/completions"})
    queue_full_text = "The engine is currently busy and takes no new request: its queue is full."

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._options = engine.options

    def add_routes(self, app: web.Application) -> None:
        """Register everything but /metrics and /_sim."""
        router = app.router
        router.add_get("/health", self._health)
        router.add_route("*", "/ping", self._health)
        router.add_get("/v1/models", self._models)
        router.add_get("/version", self._version)
        router.add_get("/load", self._load)
        router.add_post("/v1/completions", self._completions)
        router.add_post("/v1/chat/completions", self._chat)
        if self._options.dev_mode:
            router.add_get("/is_sleeping", self._is_sleeping)
            router.add_get("/is_paused", self._is_paused)
            router.add_get("/server_info", self._server_info)
            router.add_post("/pause", self._pause)
            router.add_post("/resume", self._resume)
            router.add_post("/sleep", self._sleep)
            router.add_post("/wake_up", self._wake_up)

    def needs_key(self, path: str) -> bool:
        """Whether the API key guards a path: only the OpenAI routes."""
        return path.startswith("/v1/")

    def error_object(self, message: str) -> dict[str, Any]:
        """An error as this engine puts it into a 200."""
        return _error_body(500, message, "InternalServerError")

    def sample_answer(self, path: str, *, stream: bool, finish: str | None, outputs: int) -> tuple[bytes, str]:
        """A complete answer of `outputs` tokens made up without the engine: body and content type."""
        text, chat = _WORD * outputs, path.endswith("/chat/completions")
        if stream:
            body = b""
            if outputs:
                body = _event(self._chunk(chat, text, finish))
            return body + b"data: [DONE]\n\n", "text/event-stream"
        answer = self._answer(chat, text, finish, 1, outputs)
        if not outputs:
            answer["choices"] = []
        return json.dumps(answer).encode(), "application/json"

    # --- routes that do not touch a core ----------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.ranks.dead else 200)

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._options.model,
            "object": "model",
            "created": int(self._engine.started_at),
            "owned_by": "vllm",
            "root": self._options.model,
            "parent": None,
            "max_model_len": self._options.kv_tokens,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._options.reported_version})

    async def _load(self, request: web.Request) -> web.Response:
        count = self._engine.open_requests if self._options.load_tracking else 0
        return web.json_response({"server_load": count})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": f"model={self._options.model!r}"})

    # --- routes that go through every core's loop -------------------------------------------------------------------

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        states = await self._engine.ranks.call("is_sleeping")
        return web.json_response({"is_sleeping": any(state["sleeping"] for state in states)})

    async def _is_paused(self, request: web.Request) -> web.Response:
        states = await self._engine.ranks.call("is_paused")
        return web.json_response({"is_paused": any(state["paused"] for state in states)})

    async def _pause(self, request: web.Request) -> web.Response:
        await self._engine.set_paused(True, request.query.get("mode", "abort"))
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._engine.set_paused(False, "")
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        await self._engine.set_sleep_level(int(request.query.get("level", "1")))
        return web.Response()

    async def _wake_up(self, request: web.Request) -> web.Response:
        await self._engine.set_sleep_level(0)
        return web.Response()

    # --- completions ------------------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        if not body.get("prompt"):
            return _error(400, "prompt is missing or empty")
        return await self._generate(request, body, tokens_of(body["prompt"]), body.get("max_tokens") or 16, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        if not body.get("messages"):
            return _error(400, "messages is missing or empty")
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 128
        return await self._generate(request, body, tokens_of(body["messages"]), wanted, chat=True)

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompt: int, max_tokens: int, *, chat: bool
    ) -> web.StreamResponse:
        problem = self._problem(request, body, prompt, max_tokens)
        if problem is not None:
            return problem
        streaming = bool(body.get("stream"))
        params = body.get("kv_transfer_params") or {}
        receiver = self._engine.receiver
        fetched = receiver is not None and receiver.concerns(params)
        opened = self._engine.ranks.open(
            prompt,
            max_tokens,
            core=request.headers.get("X-data-parallel-rank"),
            streaming=streaming,
            fields={"peer": "remote" if fetched else _peer(params)},
        )
        try:
            with opened as stream:
                async with self._fetching(stream, params if fetched else None):
                    if streaming:
                        return await self._stream(request, body, stream, chat)
                    finish = (await self._engine.run(stream))["finish"]
                if finish == "error":
                    return _error(500, "Internal server error", "InternalServerError")
                answer = self._answer(chat, _WORD * stream.produced, finish, prompt, stream.produced)
                if params.get("do_remote_decode"):
                    answer["kv_transfer_params"] = self._prefilled(params, stream)
                return web.json_response(answer)
        except CoreDied:
            return _error(500, "The engine core has died.", "InternalServerError")

    @contextlib.asynccontextmanager
    async def _fetching(self, stream: Stream, params: dict[str, Any] | None) -> AsyncIterator[None]:
        """Fetch the KV of a request from another engine, when there is something to fetch, while it waits in the core.

        A transfer that fails ends the request with an error, as kv_load_failure_policy=fail, the default, does.
        """
        receiver = self._engine.receiver
        if params is None or receiver is None:
            yield
            return

        async def fetch() -> None:
            try:
                await receiver.fetch(params)
            except TransferFailed as error:
                self._engine.log.write(f"ERROR pulling kv_caches failed: {error}")
                stream.outputs.put_nowait({"new": 0, "finish": "error"})
            else:
                self._engine.ranks.kv_arrived(stream)

        fetching = asyncio.create_task(fetch())
        try:
            yield
        finally:
            fetching.cancel()

    def _prefilled(self, params: dict[str, Any], stream: Stream) -> dict[str, Any] | None:
        if self._engine.sender is not None:
            return self._engine.sender.prefilled(params, stream.core)
        return {"do_remote_prefill": True, "do_remote_decode": False}

    def _problem(self, request: web.Request, body: dict[str, Any], prompt: int, max_tokens: Any) -> web.Response | None:
        model = body.get("model")
        if model is not None and model != self._options.model:
            return _error(404, f"The model `{model}` does not exist.", "NotFoundError")
        if not isinstance(max_tokens, int) or max_tokens < 1:
            return _error(400, f"max_tokens must be at least 1, got {max_tokens}.")
        if prompt + max_tokens > self._options.kv_tokens:
            return _error(
                400, f"The model's context holds {self._options.kv_tokens} tokens, not {prompt + max_tokens}."
            )
        core = request.headers.get("X-data-parallel-rank")
        if core is not None and (not core.isdigit() or int(core) >= self._options.dp):
            return _error(400, f"data_parallel_rank {core} is out of range [0, {self._options.dp}).")
        return None

    async def _stream(
        self, request: web.Request, body: dict[str, Any], stream: Stream, chat: bool
    ) -> web.StreamResponse:
        response = await start_events(request)
        answer_id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        try:
            finish = None
            while finish is None:
                output = await stream.next()
                finish = output.get("finish")
                chunk = self._chunk(chat, _WORD * output["new"], finish) | {"id": answer_id, "created": created}
                await response.write(_event(chunk))
            if (body.get("stream_options") or {}).get("include_usage"):
                usage = self._chunk(chat, "", None) | {"id": answer_id, "created": created}
                usage |= {"choices": [], "usage": _usage(stream.prompt, stream.produced)}
                await response.write(_event(usage))
        except CoreDied:
            await response.write(_event(_error_body(500, "The engine core has died.", "InternalServerError")))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(self, chat: bool, text: str, finish: str | None, prompt: int, produced: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._options.model,
            "choices": [choice],
            "usage": _usage(prompt, produced),
            "kv_transfer_params": None,
        }

    def _chunk(self, chat: bool, text: str, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if chat else {"text": text, "stop_reason": None}
        return {
            "id": "cmpl-0",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._options.model,
            "choices": [choice],
        }


def _peer(params: dict[str, Any]) -> str:
    """A decode request whose KV comes from a prefill waits for it; everything else runs locally, in every role."""
    return "peer" if params.get("do_remote_prefill") else ""


def _usage(prompt: int, produced: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + produced,
        "completion_tokens": produced,
        "prompt_tokens_details": None,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error_body(code: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _error(code: int, message: str, kind: str = "BadRequestError") -> web.Response:
    return web.json_response(_error_body(code, message, kind), status=code)
