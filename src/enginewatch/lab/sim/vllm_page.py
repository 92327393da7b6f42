"""vLLM's metrics page, moved only by what the cores report.

The front end of the real engine counts what the messages of its cores say, step by step, and so does this one. What
therefore stands still while a core hangs, and what a prefill moves, comes out by itself.
"""

from __future__ import annotations

import time
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from enginewatch.lab.sim.http_page import HTTP_FAMILIES, HttpPage
from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.page import Families, in_use
from enginewatch.lab.sim.ranks import Stream
from enginewatch.lab.sim.vllm_families import CACHE_CONFIG, CORE, FAMILIES, LABEL_VALUES, SET_BY_STEPS

_CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class VllmPage:
    """What the front end counts, and the page made of it.

    With several API servers the registry is a multiprocess one: no process_*, no python_*, no *_created.
    """

    gzips = False

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self.reset()

    def reset(self) -> None:
        """All counters from zero with a new birth date, in the same process: what rebuilding the stat logger does."""
        options = self._options
        single = not options.multiprocess
        if single:
            prometheus_client.enable_created_metrics()  # type: ignore[no-untyped-call]
        else:
            prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._process = CollectorRegistry()
        if single:
            GCCollector(self._process)
            PlatformCollector(self._process)
            ProcessCollector(registry=self._process)
        self._engine = CollectorRegistry()
        self._http = CollectorRegistry()
        self._families = Families(FAMILIES, self._engine)
        self._http_page = HttpPage(Families(HTTP_FAMILIES, self._http))
        for core in range(options.dp):
            self._open(str(core))
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._families.add("vllm:admission_rejections", 0, model_name=options.model, reason=reason)

    def _open(self, core: str) -> None:
        common = {"model_name": self._options.model, "engine": core}
        for family in FAMILIES:
            if self._options.multiprocess and family.name in SET_BY_STEPS:
                continue
            if family.name in LABEL_VALUES:
                label, values = LABEL_VALUES[family.name]
                for value in values:
                    self._families.open(family.name, **common, **{label: value})
            elif family.labels == CORE:
                self._families.open(family.name, **common)
        self.sleep_state(core, 0)
        size = str(self._options.block_size)
        own = {
            "engine": core,
            "block_size": size,
            "effective_attention_block_size": size,
            "kv_cache_size_tokens": str(self._options.kv_tokens),
            "num_gpu_blocks": str(self._options.kv_tokens // self._options.block_size),
        }
        self._families.set("vllm:cache_config_info", 1, **CACHE_CONFIG, **own)

    # --- what moves it ----------------------------------------------------------------------------------------------

    def sleep_state(self, core: str, level: int) -> None:
        """Set by the front end on sleep (level 1 or 2) and wake (0), never on pause."""
        for value, on in (("awake", level == 0), ("weights_offloaded", level == 1), ("discard_all", level == 2)):
            self._families.set("vllm:engine_sleep_state", float(on), sleep_state=value, **self._labels(core))

    def rejected(self) -> None:
        """A request was turned away because the queue is full."""
        self._families.add("vllm:admission_rejections", 1, model_name=self._options.model, reason="max_num_queued_reqs")

    def http_began(self, route: str, method: str) -> None:
        """A request arrived: not counted, this instrumentation counts ends."""

    def http_left(self, route: str, method: str) -> None:
        """A client left before the end of the response: not counted either."""

    def http_ended(
        self, route: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """A response has ended."""
        self._http_page.ended(route, method, status, seconds, request_bytes, response_bytes)

    def on_ready(self, core: str, pid: int) -> None:
        """A core's process started. Its series have existed since the page was made."""

    def on_step(self, core: str, message: dict[str, Any]) -> None:
        """A core completed a step: gauges always, counters as far as it produced output."""
        labels = self._labels(core)
        capacity = message["waiting"] - message["deferred"]
        self._families.set("vllm:num_requests_running", message["running"], **labels)
        self._families.set("vllm:num_requests_waiting", message["waiting"], **labels)
        self._families.set("vllm:num_requests_waiting_by_reason", capacity, reason="capacity", **labels)
        self._families.set("vllm:num_requests_waiting_by_reason", message["deferred"], reason="deferred", **labels)
        self._families.set("vllm:kv_cache_usage_perc", message["kv"], **labels)
        self._families.add("vllm:prefix_cache_queries", message["queries"], **labels)
        self._families.add("vllm:num_preemptions", message["preemptions"], **labels)
        new = sum(output["new"] for output in message["outputs"])
        if new:
            self._families.add("vllm:generation_tokens", new, **labels)
            self._families.observe("vllm:iteration_tokens_total", message["tokens"], **labels)

    def on_output(self, core: str, output: dict[str, Any], stream: Stream) -> None:
        """One request's share of a step."""
        labels = self._labels(core)
        now = time.monotonic()
        if output["new"]:
            if output.get("first"):
                source = "external_kv_transfer" if output.get("remote") else "local_compute"
                self._families.add("vllm:prompt_tokens", stream.prompt, **labels)
                self._families.add("vllm:prompt_tokens_by_source", stream.prompt, source=source, **labels)
                self._families.observe("vllm:time_to_first_token_seconds", now - stream.arrived_at, **labels)
            else:
                self._families.observe("vllm:inter_token_latency_seconds", now - stream.moved_at, **labels)
        if "finish" in output:
            self.on_finish(core, output, stream)

    def on_abort(self, stream: Stream) -> None:
        """A client left: counted at once by the front end, hung core or not, which is why it is no progress."""
        self.on_finish(stream.core, {"finish": "abort"}, stream)

    def on_finish(self, core: str, output: dict[str, Any], stream: Stream) -> None:
        """A request ended, whatever the reason."""
        labels = self._labels(core)
        self._families.add("vllm:request_success", 1, finished_reason=output["finish"], **labels)
        prefill, decode = output.get("prefill", 0.0), output.get("decode", 0.0)
        per_token = decode / (stream.produced - 1) if stream.produced > 1 else 0.0
        for name, value in (
            ("vllm:request_prompt_tokens", stream.prompt),
            ("vllm:request_generation_tokens", stream.produced),
            ("vllm:request_max_num_generation_tokens", stream.max_tokens),
            ("vllm:request_params_n", 1),
            ("vllm:request_params_max_tokens", stream.max_tokens),
            ("vllm:request_time_per_output_token_seconds", per_token),
            ("vllm:e2e_request_latency_seconds", time.monotonic() - stream.arrived_at),
            ("vllm:request_queue_time_seconds", output.get("queue", 0.0)),
            ("vllm:request_inference_time_seconds", prefill + decode),
            ("vllm:request_prefill_time_seconds", prefill),
            ("vllm:request_decode_time_seconds", decode),
            ("vllm:request_num_preemptions", 0),
            ("vllm:request_prefill_kv_computed_tokens", stream.prompt),
        ):
            self._families.observe(name, value, **labels)

    def render(self, accept: str, engine_series: bool) -> tuple[bytes, str]:
        """The page and its content type: process series, the engine's, the HTTP instrumentation's.

        What the client accepts is ignored (0.32.0). `engine_series` false is --disable-log-stats.
        """
        registries = [self._process, self._engine, self._http] if engine_series else [self._process, self._http]
        if self._options.multiprocess:
            registries = [in_use(registry, SET_BY_STEPS) for registry in registries]
        return b"".join(generate_latest(registry) for registry in registries), _CONTENT_TYPE

    def _labels(self, core: str) -> dict[str, str]:
        return {"model_name": self._options.model, "engine": core}
