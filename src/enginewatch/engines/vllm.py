"""vLLM, V0 and V1, and its forms behind Ray Serve and OpenTelemetry.

Sources: the source of the releases 0.10.2, 0.11.0, 0.12.0, 0.15.1, 0.18.0, 0.21.0, 0.24.0, 0.28.0 and 0.32.0, and a
live 0.32.0 whose processes were stopped with SIGSTOP; older names from V0. Where a fact is bound to a version the
comment beside it says so.

What surprises people:
    - During a (chunked) prefill every counter stands still, also the number of iterations; only the KV usage rises,
      block by block. One prompt of a million tokens is minutes of flat counters and then one jump.
    - A core that hangs on its first step after an idle time looks idle: nothing running, nothing waiting. Only a
      canary sees it.
    - A paused engine with pending requests looks just like that, and its page says awake. Only /is_paused tells,
      and only with VLLM_SERVER_DEV_MODE=1.
    - Every data-parallel core has its own `engine` label; a hung one is invisible in sums.
"""

from __future__ import annotations

from enginewatch.engines.profile import (
    Aim,
    AnswerFormat,
    CanaryRequest,
    FlagEndpoint,
    Grain,
    Leg,
    LegKind,
    Metric,
    PageFlag,
    Profile,
    Queue,
)

# `vllm_` is what OpenTelemetry collectors, relabelling and the `underscores` escaping scheme make of `vllm:`;
# Ray Serve puts `ray_` before it and newer Ray replaces the colon as well.
_PREFIXES = ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_")

_LEGS = (
    # Per step that produced an output, by the number of new tokens.
    Leg("generation_tokens", Metric(("generation_tokens_total",)), LegKind.COUNTER, Grain.STEP),
    # Once per request with its first output, by the whole prompt.
    Leg("prompt_tokens", Metric(("prompt_tokens_total",)), LegKind.COUNTER, Grain.STEP),
    # A histogram in spite of its name: one observation per step that produced an output, none for prefill-only steps.
    Leg("iterations", Metric(("iteration_tokens_total_count",)), LegKind.COUNTER, Grain.STEP),
    # Aborts and errors are counted here too: clients giving up on a corpse are not progress.
    Leg(
        "requests_finished",
        Metric(("request_success_total",), where={"finished_reason": frozenset({"stop", "length"})}),
        LegKind.COUNTER,
        Grain.REQUEST,
    ),
    # `gpu_cache_usage_perc` is V0 and V1 up to 0.11, beside the new name in 0.10.2 to 0.11.
    Leg(
        "kv_cache_usage",
        Metric(("kv_cache_usage_perc", "gpu_cache_usage_perc")),
        LegKind.RISING_GAUGE,
        Grain.STEP,
    ),
    # Not legs: prefix_cache_queries_total moves when a request is admitted and num_preemptions_total moves in a
    # livelock; neither proves that anything was computed. request_generation_tokens_* are near misses of the above.
)

# Since 0.21; the two reasons add up to num_requests_waiting. `deferred` waits for remote KV, a LoRA or a grammar.
_DEFERRED = Metric(("num_requests_waiting_by_reason",), where={"reason": frozenset({"deferred"})})

_AIM = (
    Aim(
        header="X-data-parallel-rank",
        since=(0, 11, 0),
        source="vllm-project/vllm#24945 (merged 2025-09): read by /v1/completions and /v1/chat/completions",
    ),
)

_CANARY = CanaryRequest(
    method="POST",
    path="/v1/completions",
    body={"model": "{model}", "prompt": "Test", "max_tokens": 1, "temperature": 0},
    answer=AnswerFormat.OPENAI_COMPLETION,
    aim=_AIM,
)

PROFILE = Profile(
    kind="vllm",
    title="vLLM",
    prefixes=_PREFIXES,
    metrics_path="/metrics",
    legs=_LEGS,
    # V1 only; a V0 page carries model_name alone and has one core.
    core_label="engine",
    running=Metric(("num_requests_running",)),
    waiting=Metric(("num_requests_waiting",)),
    deferred=_DEFERRED,
    queues=(Queue("waiting_deferred", _DEFERRED),),
    transfers=Metric(
        ("prompt_tokens_by_source_total", "nixl_bytes_transferred_sum"),
        where={"source": frozenset({"external_kv_transfer", ""})},
    ),
    # Start of the API-server process, before the model load; absent with several API servers (multiprocess registry),
    # which is the default as soon as data_parallel_size is above one.
    start_time=Metric(("process_start_time_seconds",), prefixed=False),
    # Since 0.12; set by the front end on sleep and wake, not on /pause.
    page_flags=(
        PageFlag("sleeping", Metric(("engine_sleep_state",), where={"sleep_state": frozenset({"awake"})}), 0.0),
    ),
    # Dev mode only. Both make a round trip through every core's loop: a hung core gives no answer, which proves
    # nothing. /is_sleeping is also true while paused (0.32), so the more exact one is asked first.
    flag_endpoints=(
        FlagEndpoint("paused", "/is_paused", "is_paused"),
        FlagEndpoint("sleeping", "/is_sleeping", "is_sleeping"),
    ),
    # None: "No available shared memory broadcast block found" also appears while compiling, loading and in long steps.
    log_signatures=(),
    # A decode or prefill worker without kv_transfer_params runs the request by itself and pins nothing.
    canaries={"agg": _CANARY, "prefill": _CANARY, "decode": _CANARY},
    rank_titles=("VLLM::EngineCore", "VLLM::Worker"),
    version_paths=(("/version", "version"),),
    how_to_get_metrics="Start vLLM without --disable-log-stats: with it the page has no vllm: series at all.",
)
