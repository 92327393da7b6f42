"""trtllm-serve: which routes touch the executor, and what it answers when that is stuck or dead.

From `serve/openai_server.py` of NVIDIA/TensorRT-LLM (@0005772 of 2026-02 and main of 2026-08):
    - /health reads a flag and asks nothing of the executor: 200 while it hangs, 503 once it has died;
    - /health_generate is a chat of one token without a time limit of its own;
    - GET /metrics is JSON and takes what it answers away (trtllm_stats.py); /prometheus/metrics exists only with
      `return_perf_metrics`;
    - whatever goes wrong with a request is a 400 with an error object, a dead executor too; a stream has begun with its
      200 by then and ends with an error event;
    - unknown fields of a request are refused; there is no API key.

A worker of a disaggregated pair: trtllm-serve itself runs a plain request in either role. Dynamo's worker does not: its
decode refuses one without `disaggregated_params` (ai-dynamo/dynamo#8215), its prefill ends after the first token.
The simulated one is as strict as Dynamo's, since what passes there passes everywhere.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from typing import Any

from aiohttp import web

from enginewatch.lab.sim.engine import Engine, read_json, start_events, tokens_of
from enginewatch.lab.sim.ranks import CoreDied, Stream
from enginewatch.lab.sim.trtllm_stats import IterationStats

REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")
UNAVAILABLE = "LLM is unavailable. Please check the server logs for more details."
DECODE_NEEDS_PARAMS = "Disaggregated params are required for decode mode"
_DEAD = "The executor has shut down after a fatal error."
_WORD = " token"
_FOREIGN = frozenset(
    {"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "sampling_params"}
)
"""What other engines read in a request and this one refuses, as it refuses every field that it does not know."""


class TrtllmHttp:
    """The routes of one server."""

    generation_paths = frozenset({"/v1/completions", "/v1/chat/completions"})
    queue_full_text = "The request queue is full."

    def __init__(self, engine: Engine, stats: IterationStats) -> None:
        self._engine = engine
        self._options = engine.options
        self._stats = stats

    def add_routes(self, app: web.Application) -> None:
        """Register everything but the pages of metrics and /_sim."""
        router = app.router
        router.add_get("/health", self._health)
        if not self._options.no_health_generate:
            router.add_get("/health_generate", self._health_generate)
        router.add_get("/version", self._version)
        router.add_get("/v1/models", self._models)
        router.add_get("/server_info", self._server_info)
        router.add_post("/v1/completions", self._completions)
        router.add_post("/v1/chat/completions", self._chat)

    def needs_key(self, path: str) -> bool:
        """Never: trtllm-serve has no API key."""
        return False

    def error_object(self, message: str) -> dict[str, Any]:
        """An error as this engine puts it into a 200: the event that ends a broken stream."""
        return {"error": {"message": message, "type": "server_error", "code": None, "param": None}}

    def sample_answer(self, path: str, *, stream: bool, finish: str | None, outputs: int) -> tuple[bytes, str]:
        """A complete answer of `outputs` tokens made up without the engine: body and content type."""
        text, chat = _WORD * outputs, path.endswith("/chat/completions")
        if stream:
            body = _event(self._chunk(chat, text, finish)) if outputs else b""
            return body + b"data: [DONE]\n\n", "text/event-stream"
        answer = self._answer(chat, text, finish, 1, outputs)
        if not outputs:
            answer["choices"] = []
        return json.dumps(answer).encode(), "application/json"

    # --- metrics ----------------------------------------------------------------------------------------------------

    async def records(self, request: web.Request, engine_series: bool) -> tuple[bytes, str]:
        """GET /metrics: the records of iterations since the last time anybody asked."""
        records = await self._stats.scraped() if engine_series and self._options.iter_stats else []
        return json.dumps(records).encode(), "application/json"

    # --- routes that do not touch the executor ----------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        if not self._engine.ranks.dead:
            return web.Response()
        if self._options.exit_when_dead:
            self._engine.end(1)
        return web.Response(status=503, text=UNAVAILABLE)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._options.reported_version})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._options.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "tensorrt_llm",
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"disaggregated_params": {}})

    # --- generation -------------------------------------------------------------------------------------------------

    async def _health_generate(self, request: web.Request) -> web.Response:
        """As the real one: a chat of one token, treated like anybody's, without a time limit."""
        if self._options.role == "decode":
            return web.Response(status=500, text="Generation health check failed")
        try:
            with self._engine.ranks.open(tokens_of("hi"), 1) as stream:
                await self._engine.run(stream)
        except CoreDied:
            return web.Response(status=500, text="Generation health check failed")
        return web.Response(text="Generation health check OK")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        if not body.get("prompt"):
            return web.json_response({"error": "prompt: Field required"}, status=400)
        return await self._generate(request, body, tokens_of(body["prompt"]), body.get("max_tokens", 16), chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        if not body.get("messages"):
            return web.json_response({"error": "messages: Field required"}, status=400)
        wanted = body.get("max_completion_tokens", body.get("max_tokens", 128))
        return await self._generate(request, body, tokens_of(body["messages"]), wanted, chat=True)

    async def _generate(
        self, request: web.Request, body: dict[str, Any], prompt: int, wanted: Any, *, chat: bool
    ) -> web.StreamResponse:
        params = body.get("disaggregated_params")
        problem = self._problem(body, params, prompt, wanted)
        if problem is not None:
            return problem
        kind = params["request_type"] if params else "context_only" if self._options.role == "prefill" else ""
        context_only = kind == "context_only"
        peer = "peer" if kind == "generation_only" else ""
        streaming = bool(body.get("stream"))
        try:
            opened = self._engine.ranks.open(
                prompt, 1 if context_only else wanted, streaming=streaming, fields={"peer": peer}
            )
            with opened as stream:
                if streaming:
                    return await self._stream(request, body, stream, chat)
                finish = (await self._engine.run(stream))["finish"]
                # The context server hands the request on, unless its one token was all that was wanted.
                finish = "not_finished" if context_only and wanted > 1 else finish
                answer = self._answer(chat, _WORD * stream.produced, finish, prompt, stream.produced)
                if context_only:
                    answer["choices"][0]["disaggregated_params"] = _handed_on(stream)
                return web.json_response(answer)
        except CoreDied:
            return _error(400, _DEAD)

    def _problem(self, body: dict[str, Any], params: Any, prompt: int, wanted: Any) -> web.Response | None:
        unknown = sorted(body.keys() & _FOREIGN)
        if unknown:
            return web.json_response({"error": f"{unknown[0]}: Extra inputs are not permitted"}, status=400)
        if params is None and self._options.role == "decode":
            return _error(400, DECODE_NEEDS_PARAMS)
        if params is not None:
            kind = params.get("request_type") if isinstance(params, dict) else None
            if kind not in REQUEST_TYPES:
                return _error(400, f"Unknown request_type: {kind}. Must be one of {', '.join(REQUEST_TYPES)}.")
        if not isinstance(wanted, int) or wanted < 1:
            return _error(400, f"max_tokens must be greater than 0, got max_tokens={wanted}")
        if prompt + wanted > self._options.kv_tokens:
            return _error(400, f"The prompt and its answer have {prompt + wanted} tokens, more than max_seq_len.")
        return None

    async def _stream(
        self, request: web.Request, body: dict[str, Any], stream: Stream, chat: bool
    ) -> web.StreamResponse:
        response = await start_events(request)
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        try:
            finish = None
            while finish is None:
                output = await stream.next()
                finish = output.get("finish")
                await response.write(_event(self._chunk(chat, _WORD * output["new"], finish) | {"id": answer_id}))
            if (body.get("stream_options") or {}).get("include_usage"):
                usage = {"choices": [], "usage": _usage(stream.prompt, stream.produced)}
                await response.write(_event(self._chunk(chat, "", None) | {"id": answer_id} | usage))
        except CoreDied:
            await response.write(_event(self.error_object(_DEAD)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _answer(self, chat: bool, text: str, finish: str | None, prompt: int, produced: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._options.model,
            "choices": [choice | {"disaggregated_params": None}],
            "usage": _usage(prompt, produced),
            "prompt_token_ids": None,
        }

    def _chunk(self, chat: bool, text: str, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        choice |= {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
        return {
            "id": "cmpl-0",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": self._options.model,
            "choices": [choice],
            "usage": None,
        }


def _handed_on(stream: Stream) -> dict[str, Any]:
    """What a generation server needs to fetch the KV of this prompt."""
    return {
        "request_type": "context_only",
        "first_gen_tokens": [323],
        "ctx_request_id": int(stream.id, 16),
        "encoded_opaque_state": base64.b64encode(f"simulated state {stream.id}".encode()).decode(),
        "draft_tokens": None,
    }


def _usage(prompt: int, produced: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + produced,
        "completion_tokens": produced,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _error(code: int, message: str, kind: str = "BadRequestError") -> web.Response:
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": code}
    return web.json_response(body, status=code)
