"""The families on TensorRT-LLM's Prometheus page: names, labels and buckets of `metrics/collector.py` (main of 2026).

All come from a multiprocess registry: no `process_*`, no `*_created`, every HELP the same, a series only after its
first value, and a `pid` on each gauge, because the gauges do not choose another multiprocess mode.
"""

from __future__ import annotations

from enginewatch.lab.sim.page import Family, Kind

COMMON = ("model_name", "engine_type")
GAUGE = (*COMMON, "pid")
HELP = "Multiprocess metric"

_LATENCY = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_PREFILL = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560)
_CACHED = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_BATCH = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

CONFIG: dict[str, dict[str, str]] = {
    "trtllm_model_config_info": {"dtype": "auto", "quantization": "none"},
    "trtllm_parallel_config_info": {
        "tensor_parallel_size": "1",
        "pipeline_parallel_size": "1",
        "context_parallel_size": "1",
        "gpu_count": "1",
    },
    "trtllm_kv_cache_config_info": {
        "enable_block_reuse": "True",
        "enable_partial_reuse": "True",
        "free_gpu_memory_fraction": "0.9",
        "cache_dtype": "auto",
    },
}
"""Gauges that are 1 from the start, with the labels of their own; the model's names are added."""
MODEL_LABELS = ("model", "served_model_name")

ITERATION_GAUGES: dict[str, tuple[str, ...]] = {
    "trtllm_num_requests_running": ("numActiveRequests",),
    "trtllm_num_requests_waiting": ("numQueuedRequests",),
    "trtllm_max_num_active_requests": ("maxNumActiveRequests",),
    "trtllm_gpu_memory_usage_bytes": ("gpuMemUsage",),
    "trtllm_cpu_memory_usage_bytes": ("cpuMemUsage",),
    "trtllm_pinned_memory_usage_bytes": ("pinnedMemUsage",),
    "trtllm_max_batch_size_static": ("maxBatchSizeStatic",),
    "trtllm_max_batch_size_runtime": ("maxBatchSizeRuntime",),
    "trtllm_max_num_tokens_runtime": ("maxNumTokensRuntime",),
    "trtllm_kv_cache_hit_rate": ("kvCacheStats", "cacheHitRate"),
    "trtllm_kv_cache_max_blocks": ("kvCacheStats", "maxNumBlocks"),
    "trtllm_kv_cache_free_blocks": ("kvCacheStats", "freeNumBlocks"),
    "trtllm_kv_cache_used_blocks": ("kvCacheStats", "usedNumBlocks"),
    "trtllm_kv_cache_tokens_per_block": ("kvCacheStats", "tokensPerBlock"),
    "trtllm_num_context_requests": ("inflightBatchingStats", "numContextRequests"),
    "trtllm_num_generation_requests": ("inflightBatchingStats", "numGenRequests"),
    "trtllm_num_paused_requests": ("inflightBatchingStats", "numPausedRequests"),
    "trtllm_num_scheduled_requests": ("inflightBatchingStats", "numScheduledRequests"),
    "trtllm_total_context_tokens": ("inflightBatchingStats", "numCtxTokens"),
    "trtllm_avg_decoded_tokens_per_iter": ("inflightBatchingStats", "avgNumDecodedTokensPerIter"),
}
"""Gauge -> where its value stands in the record of an iteration."""


def _family(name: str, kind: Kind, own: tuple[str, ...] = (), buckets: tuple[float, ...] = ()) -> Family:
    return Family(name, kind, HELP, (GAUGE if kind == "gauge" else COMMON) + own, buckets)


FAMILIES: tuple[Family, ...] = (
    _family("trtllm_request_success", "counter", ("finished_reason",)),
    _family("trtllm_request_error", "counter", ("http_code",)),
    _family("trtllm_prompt_tokens", "counter"),
    _family("trtllm_generation_tokens", "counter"),
    _family("trtllm_prompt_cached_tokens", "counter"),
    _family("trtllm_num_requests_completed", "counter"),
    _family("trtllm_kv_cache_reused_blocks", "counter"),
    _family("trtllm_kv_cache_missed_blocks", "counter"),
    _family("trtllm_e2e_request_latency_seconds", "histogram", buckets=_LATENCY),
    _family("trtllm_time_to_first_token_seconds", "histogram", buckets=_TTFT),
    _family("trtllm_time_per_output_token_seconds", "histogram", buckets=_TPOT),
    _family("trtllm_request_queue_time_seconds", "histogram", buckets=_LATENCY),
    _family("trtllm_request_prefill_time_seconds", "histogram", buckets=_PREFILL),
    _family("trtllm_request_decode_time_seconds", "histogram", buckets=_LATENCY),
    _family("trtllm_request_inference_time_seconds", "histogram", buckets=_LATENCY),
    _family("trtllm_prompt_cached_tokens_per_request", "histogram", buckets=_CACHED),
    _family("trtllm_prefill_batch_tokens", "histogram", buckets=_BATCH),
    _family("trtllm_iteration_latency_seconds", "gauge"),
    _family("trtllm_kv_cache_utilization", "gauge"),
    _family("trtllm_prefill_batch_occupancy", "gauge"),
    *(_family(name, "gauge") for name in ITERATION_GAUGES),
    *(
        _family(name, "gauge", (*own, *(MODEL_LABELS if name == "trtllm_model_config_info" else ())))
        for name, own in CONFIG.items()
    ),
)
