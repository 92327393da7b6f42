"""The families on a SGLang page, by release: names, labels and buckets of 0.5.10.post1, 0.5.19 and 0.5.23.

Two kinds of series: the scheduler's carry its ranks (and `dp_rank` with data parallelism), the tokenizer's only the
model and the engine type.
"""

from __future__ import annotations

from enginewatch.lab.sim.page import Family, Kind

TOKENIZER = ("model_name", "engine_type")
SCHEDULER = (*TOKENIZER, "tp_rank", "pp_rank", "moe_ep_rank")

_LENGTHS = (
    100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12500, 15000, 17500, 20000,
    22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000, 1000000,
    1100000,
)  # fmt: skip
_E2E = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
_RETRACTIONS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 20, 25, 30, 40, 50, 75, 100)
_IMBALANCE = (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 15, 20, 30, 45, 60)
_SYNC = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)

ROUTING_KEY_BOUNDS = ("0", "1", "2", "3", "5", "7", "10", "20", "50", "100", "200", "+Inf")

NEWER = (0, 5, 16)
"""First release with the families of the 0.5.19 page. (0.5.16 brought startup_time_seconds.)"""
NEWEST = (0, 5, 20)
"""First release with the families of the 0.5.23 page, scheduler_idle_seconds_total among them."""

OPEN_FROM_START: dict[str, tuple[str, tuple[str, ...]]] = {
    "sglang:prefill_effective_tokens": ("mode", ("input", "device_hit", "host_hit", "storage_hit")),
    "sglang:dp_attention_tokens": ("kind", ("scheduled", "imbalance")),
    "sglang:dp_attention_steps": ("rank_state", ("active", "idle")),
    "sglang:dp_attention_pairs": ("kind", ("scheduled", "imbalance")),
}
"""Counters with a label of their own that exist from the start, unlike realtime_tokens and cuda_graph_passes."""

STAGES = (
    "other",
    "recv_requests",
    "process_input_requests",
    "get_next_batch_to_run",
    "process_queue",
    "run_batch",
    "process_batch_result",
    "sanity_check_cache",
    "idle",
)


def scheduler_gauges(version: tuple[int, ...]) -> dict[str, str]:
    """Plain gauges of the scheduler: name without prefix -> help."""
    gauges = {
        "num_running_reqs": "The number of running requests.",
        "num_queue_reqs": "The number of requests in the waiting queue.",
        "num_grammar_queue_reqs": "The number of requests in the grammar waiting queue.",
        "gen_throughput": "The generation throughput (token/s).",
        "cache_hit_rate": "The prefix cache hit rate.",
        "decode_sum_seq_lens": "The sum of all sequence lengths in decode.",
        "token_usage": "The token usage.",
        "full_token_usage": "The token usage for full attention layers.",
        "swa_token_usage": "The token usage for SWA layers.",
        "mamba_usage": "The token usage for Mamba layers.",
        "num_used_tokens": "The number of used tokens.",
        "spec_accept_length": "Mean acceptance length of speculative decoding.",
        "spec_accept_rate": "Acceptance rate of speculative decoding.",
        "num_prefill_inflight_queue_reqs": "The number of requests in the prefill inflight queue.",
        "num_decode_prealloc_queue_reqs": "The number of requests in the decode prealloc queue.",
        "num_decode_transfer_queue_reqs": "The number of requests in the decode transfer queue.",
        "pending_prealloc_token_usage": "The token usage for pending preallocated tokens (not preallocated yet).",
        "utilization": "The utilization.",
        "new_token_ratio": "The new token ratio.",
        "is_cuda_graph": "Whether the batch is using CUDA graph.",
        "num_unique_running_routing_keys": "Number of unique routing keys in running batch.",
        "max_total_num_tokens": "Maximum total number of tokens in the KV cache pool.",
    }
    if version < NEWER:
        gauges |= {
            "num_running_reqs_offline_batch": "The number of running low-priority offline batch requests.",
            "engine_startup_time": "The time taken for the engine to start up.",
            "engine_load_weights_time": "The time taken for the engine to load weights.",
        }
    else:
        gauges |= {
            "fwd_occupancy": "Forward pass GPU occupancy percentage.",
            "kv_available_tokens": "Number of free token slots in the KV cache pool.",
            "kv_evictable_tokens": "Number of evictable (radix-cached) token slots in the KV cache pool.",
            "kv_used_tokens": "Number of actively used token slots in the KV cache pool.",
            "swa_available_tokens": "Number of free token slots in the SWA pool (hybrid-SWA only).",
            "swa_evictable_tokens": "Number of evictable (radix-cached) token slots in the SWA pool.",
            "swa_used_tokens": "Number of actively used token slots in the SWA pool.",
            "mamba_available_tokens": "Number of free state slots in the mamba SSM pool (hybrid-SSM only).",
            "mamba_evictable_tokens": "Number of evictable (radix-cached) state slots in the mamba SSM pool.",
            "mamba_used_tokens": "Number of actively used state slots in the mamba SSM pool.",
            "spec_cap_length": "Mean confidence-scheduled verify window per verify step, with the bonus slot.",
            "spec_block_accept_length": "Mean uncapped full-block accept length per verify step.",
            "spec_num_steps": "Currently active speculative_num_steps.",
            "spec_num_draft_tokens": "Currently active speculative_num_draft_tokens.",
        }
    if version >= NEWEST:
        gauges |= {
            "num_decode_host_receive_queue_reqs": "Requests in the decode transfer queue received into host memory.",
            "num_decode_deferred_kv_release_reqs": "Failed decode requests whose KV is held until the transfer ended.",
            "prealloc_full_token_usage": "Share of the full-attention KV pool held by requests in KV transfer.",
            "prealloc_swa_token_usage": "Share of the SWA KV pool held by requests in KV transfer.",
        }
    gauges[bootstrap_gauge(version)] = "The number of requests in the prefill bootstrap queue."
    return gauges


def bootstrap_gauge(version: tuple[int, ...]) -> str:
    """The prefill bootstrap queue was called prealloc queue up to 0.5.10."""
    return "num_prefill_prealloc_queue_reqs" if version <= (0, 5, 10) else "num_prefill_bootstrap_queue_reqs"


def families(version: tuple[int, ...], *, dp: bool) -> list[Family]:
    """Every family that a page of this release can have."""
    scheduler = (*SCHEDULER, "dp_rank") if dp else SCHEDULER
    streaming = ("is_streaming",) if version >= NEWER else ()

    def of_scheduler(name: str, kind: Kind, help_: str, *labels: str, buckets: tuple[float, ...] = ()) -> Family:
        return Family(f"sglang:{name}", kind, help_, (*scheduler, *labels), buckets)

    def of_tokenizer(name: str, kind: Kind, help_: str, *labels: str, buckets: tuple[float, ...] = ()) -> Family:
        return Family(f"sglang:{name}", kind, help_, (*TOKENIZER, *labels), buckets)

    found = [of_scheduler(name, "gauge", help_) for name, help_ in scheduler_gauges(version).items()]
    found += [
        of_scheduler("realtime_tokens", "counter", "Total number of tokens processed, by mode.", "mode"),
        of_scheduler(
            "cuda_graph_passes", "counter", "Total number of forward passes categorized by CUDA graph.", "mode"
        ),
        of_scheduler("num_retracted_reqs", "gauge", "The number of retracted requests.", "pid"),
        of_scheduler("num_paused_reqs", "gauge", "The number of paused requests by async weight sync.", "pid"),
        of_scheduler("num_bootstrap_failed_reqs", "counter", "The number of bootstrap failed requests."),
        of_scheduler("num_transfer_failed_reqs", "counter", "The number of transfer failed requests."),
        of_tokenizer("prompt_tokens", "counter", "Number of prefill tokens processed.", *streaming),
        of_tokenizer("generation_tokens", "counter", "Number of generation tokens processed.", *streaming),
        of_tokenizer("cached_tokens", "counter", "Number of cached prompt tokens by source.", "cache_source"),
        of_tokenizer("num_requests", "counter", "Number of requests processed.", *streaming),
        of_tokenizer("num_aborted_requests", "counter", "Number of requests aborted."),
        of_tokenizer(
            "e2e_request_latency_seconds",
            "histogram",
            "Histogram of End-to-end request latency in seconds",
            *streaming,
            buckets=_E2E,
        ),
        Family("sglang:process_cpu_seconds", "counter", "CPU time of the engine's processes.", ("component",)),
    ]
    found += [
        of_scheduler(name, "gauge", f"Distribution of routing keys by {what} (gt < count <= le).", "gt", "le")
        for name, what in (
            ("routing_key_running_req_count", "running request count"),
            ("routing_key_all_req_count", "running+waiting request count"),
        )
    ]
    if version < NEWER:
        found.append(
            of_tokenizer(
                "num_retractions", "histogram", "Histogram of retraction counts per request.", buckets=_RETRACTIONS
            )
        )
    else:
        found += [
            of_scheduler("prefill_effective_tokens", "counter", "Effective prefill tokens, without re-counts.", "mode"),
            of_tokenizer("prompt_tokens_histogram", "histogram", "Histogram of prompt token length.", buckets=_LENGTHS),
            of_tokenizer(
                "uncached_prompt_tokens_histogram",
                "histogram",
                "Histogram of uncached (compute) prompt token length.",
                buckets=_LENGTHS,
            ),
            of_tokenizer(
                "generation_tokens_histogram", "histogram", "Histogram of generation token length.", buckets=_LENGTHS
            ),
            of_tokenizer("startup_time_seconds", "gauge", "Engine startup duration by phase in seconds.", "phase"),
            of_tokenizer(
                "startup_cuda_graph_time_seconds", "gauge", "CUDA graph capture duration by phase in seconds.", "phase"
            ),
        ]
    if version >= NEWEST:
        found += [
            of_scheduler(
                "scheduler_idle_seconds",
                "counter",
                "Total wall time while the scheduler has no runnable or queued work.",
            ),
            of_scheduler(
                "scheduler_process_cpu_seconds",
                "counter",
                "Total CPU time consumed by the scheduler process across all threads.",
            ),
            of_scheduler(
                "scheduler_stage_seconds",
                "counter",
                "Total scheduler-loop wall time attributed to each stage, by its overlap with the forward pass.",
                "category",
                "forward_overlap",
            ),
            of_scheduler("dp_attention_tokens", "counter", "Tokens of MLP-sync steps on this DP rank.", "kind"),
            of_scheduler("dp_attention_steps", "counter", "MLP-sync steps on this DP rank.", "rank_state"),
            of_scheduler("dp_attention_pairs", "counter", "Causal pairs attended by MLP-sync steps.", "kind"),
            of_scheduler(
                "dp_attention_token_imbalance_ratio",
                "histogram",
                "Per MLP-sync step, max tokens over mean tokens across the DP ranks.",
                buckets=_IMBALANCE,
            ),
            of_scheduler(
                "dp_attention_sync_wait_seconds",
                "histogram",
                "Wall time of this DP rank's MLP-sync all-gather per step.",
                buckets=_SYNC,
            ),
            Family(
                "sglang:http_requests",
                "counter",
                "Total number of HTTP requests by endpoint and method",
                ("endpoint", "method"),
            ),
            Family(
                "sglang:http_requests_active",
                "gauge",
                "Number of currently active HTTP requests",
                ("endpoint", "method"),
            ),
            Family("sglang:routing_keys_active", "gauge", "Number of unique routing keys with active requests"),
        ]
    return found
