"""The families on vLLM's page: names, labels and buckets of 0.32.0."""

from __future__ import annotations

from enginewatch.lab.sim.page import Family, Kind

CORE = ("model_name", "engine")
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

LABEL_VALUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "vllm:engine_sleep_state": ("sleep_state", ("awake", "weights_offloaded", "discard_all")),
    "vllm:prompt_tokens_by_source": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    "vllm:prompt_tokens_cached_by_source": ("source", ("device", "host", "p2p", "disk", "external_unspecified")),
    "vllm:request_success": ("finished_reason", ("stop", "length", "abort", "error", "repetition")),
}
"""Families with a label of their own: all its values are on the page from the start."""


SET_BY_STEPS = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
    }
)
"""Gauges of which a multiprocess registry shows no series, only the comments, before a core's first step."""


def _family(name: str, kind: Kind, help_: str, buckets: tuple[float, ...] = ()) -> Family:
    own = (LABEL_VALUES[name][0],) if name in LABEL_VALUES else ()
    return Family(name, kind, help_, CORE + own, buckets)


CACHE_CONFIG = {
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
            *CACHE_CONFIG,
            "engine",
            "block_size",
            "effective_attention_block_size",
            "kv_cache_size_tokens",
            "num_gpu_blocks",
        ),
    ),
)
