"""vLLM's metrics page: names, labels and buckets of 0.32.0, moved only by what the cores report.

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
from enginewatch.lab.sim.page import Families, Family, in_use
from enginewatch.lab.sim.ranks import Stream

_CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_CORE = ("model_name", "engine")
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N = (1, 2, 5, 10, 20)
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

_LABEL_VALUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "vllm:engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "vllm:prompt_tokens_by_source": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    "vllm:prompt_tokens_cached_by_source": ("source", ("device", "host", "p2p", "disk", "external_unspecified")),
    "vllm:request_success": ("finished_reason", ("stop", "length", "abort", "error", "repetition")),
}
"""Families with a label of their own: all its values are on the page from the start."""


_SET_BY_STEPS = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
    }
)
"""Gauges of which a multiprocess registry shows no series, only the comments, before a core's first step."""


def _family(name: str, kind: Any, help_: str, buckets: tuple[float, ...] = ()) -> Family:
    own = (_LABEL_VALUES[name][0],) if name in _LABEL_VALUES else ()
    return Family(name, kind, help_, _CORE + own, buckets)


_CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_max_concurrency": "256.0",
    "kv_cache_memory_bytes": "1073741824",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}

FAMILIES: tuple[Family, ...] = (
    _family(
        "vllm:estimated_flops_per_gpu",
        "counter",
        "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations).",
    ),
    _family(
        "vllm:estimated_read_bytes_per_gpu",
        "counter",
        "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations).",
    ),
    _family(
        "vllm:estimated_write_bytes_per_gpu",
        "counter",
        "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations).",
    ),
    _family("vllm:num_requests_running", "gauge", "Number of requests in model execution batches."),
    _family("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    _family(
        "vllm:num_requests_waiting_by_reason",
        "gauge",
        "Number of waiting requests by reason: 'capacity' = waiting for room; 'deferred' = held back by something that "
        "passes (LoRA budget, KV transfer). The reasons add up to vllm:num_requests_waiting.",
    ),
    _family(
        "vllm:engine_sleep_state",
        "gauge",
        "Engine sleep state: awake = 1 awake, weights_offloaded = 1 sleep level 1, discard_all = 1 sleep level 2.",
    ),
    _family("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    _family("vllm:prefix_cache_queries", "counter", "Prefix cache queries, in terms of number of queried tokens."),
    _family("vllm:prefix_cache_hits", "counter", "Prefix cache hits, in terms of number of cached tokens."),
    _family(
        "vllm:external_prefix_cache_queries",
        "counter",
        "External prefix cache queries from KV connectors, in terms of number of queried tokens.",
    ),
    _family(
        "vllm:external_prefix_cache_hits",
        "counter",
        "External prefix cache hits from KV connectors, in terms of number of cached tokens.",
    ),
    _family("vllm:mm_cache_queries", "counter", "Multi-modal cache queries, in terms of number of queried items."),
    _family("vllm:mm_cache_hits", "counter", "Multi-modal cache hits, in terms of number of cached items."),
    _family("vllm:num_preemptions", "counter", "Cumulative number of preemption from the engine."),
    _family("vllm:prompt_tokens", "counter", "Number of prefill tokens processed."),
    _family("vllm:prompt_tokens_by_source", "counter", "Number of prompt tokens by source."),
    _family("vllm:prompt_tokens_cached", "counter", "Number of cached prompt tokens (local + external)."),
    _family(
        "vllm:prompt_tokens_cached_by_source",
        "counter",
        "Prefix-cache hit tokens by the tier that held them, counted at admission.",
    ),
    _family("vllm:generation_tokens", "counter", "Number of generation tokens processed."),
    _family("vllm:request_success", "counter", "Count of successfully processed requests."),
    Family(
        "vllm:admission_rejections",
        "counter",
        "Number of admission attempts rejected by a queue limit, by reason.",
        ("model_name", "reason"),
    ),
    _family("vllm:request_prompt_tokens", "histogram", "Number of prefill tokens processed.", _TOKENS),
    _family("vllm:request_generation_tokens", "histogram", "Number of generation tokens processed.", _TOKENS),
    _family("vllm:iteration_tokens_total", "histogram", "Histogram of number of tokens per engine_step.", _STEP_TOKENS),
    _family(
        "vllm:request_max_num_generation_tokens",
        "histogram",
        "Histogram of maximum number of requested generation tokens.",
        _TOKENS,
    ),
    _family("vllm:request_params_n", "histogram", "Histogram of the n request parameter.", _N),
    _family("vllm:request_params_max_tokens", "histogram", "Histogram of the max_tokens request parameter.", _TOKENS),
    _family("vllm:time_to_first_token_seconds", "histogram", "Histogram of time to first token in seconds.", _TTFT),
    _family("vllm:inter_token_latency_seconds", "histogram", "Histogram of inter-token latency in seconds.", _ITL),
    _family(
        "vllm:request_time_per_output_token_seconds",
        "histogram",
        "Histogram of time_per_output_token_seconds per request.",
        _ITL,
    ),
    _family("vllm:e2e_request_latency_seconds", "histogram", "Histogram of e2e request latency in seconds.", _LATENCY),
    _family(
        "vllm:request_queue_time_seconds",
        "histogram",
        "Histogram of time spent in WAITING phase for request.",
        _LATENCY,
    ),
    _family(
        "vllm:request_inference_time_seconds",
        "histogram",
        "Histogram of time spent in RUNNING phase for request.",
        _LATENCY,
    ),
    _family(
        "vllm:request_prefill_time_seconds",
        "histogram",
        "Histogram of time spent in PREFILL phase for request.",
        _LATENCY,
    ),
    _family(
        "vllm:request_decode_time_seconds",
        "histogram",
        "Histogram of time spent in DECODE phase for request.",
        _LATENCY,
    ),
    _family(
        "vllm:request_num_preemptions",
        "histogram",
        "Histogram of the number of times a request was preempted.",
        _PREEMPTIONS,
    ),
    _family(
        "vllm:request_prefill_kv_computed_tokens",
        "histogram",
        "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
        _TOKENS,
    ),
    Family(
        "vllm:cache_config_info",
        "gauge",
        "Information of the LLMEngine CacheConfig",
        (
            *_CACHE_CONFIG,
            "engine",
            "block_size",
            "effective_attention_block_size",
            "kv_cache_size_tokens",
            "num_gpu_blocks",
        ),
    ),
)


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
            if self._options.multiprocess and family.name in _SET_BY_STEPS:
                continue
            if family.name in _LABEL_VALUES:
                label, values = _LABEL_VALUES[family.name]
                for value in values:
                    self._families.open(family.name, **common, **{label: value})
            elif family.labels == _CORE:
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
        self._families.set("vllm:cache_config_info", 1, **_CACHE_CONFIG, **own)

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
            registries = [in_use(registry, _SET_BY_STEPS) for registry in registries]
        return b"".join(generate_latest(registry) for registry in registries), _CONTENT_TYPE

    def _labels(self, core: str) -> dict[str, str]:
        return {"model_name": self._options.model, "engine": core}
