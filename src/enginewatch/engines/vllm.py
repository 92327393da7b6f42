"""vLLM, V0 and V1, and its forms behind Ray Serve, OpenTelemetry and Dynamo's pass-through.

Sources: the source of the releases 0.10.2, 0.11.0 to 0.12.0, 0.15.1, 0.18.0, 0.21.0, 0.24.0, 0.28.0 and 0.32.0, and a
live 0.32.0 whose processes were stopped with SIGSTOP. A fact that is bound to a version has it beside it.

What surprises people:
    - During a (chunked) prefill every counter stands still, also the number of iterations; only the KV usage rises,
      block by block. One prompt of a million tokens is minutes of flat counters and then one jump.
    - During decode the KV usage stands still for whole blocks; the counters move every step.
    - A core that hangs on its first step after an idle time looks idle: nothing running, nothing waiting. Only a
      canary sees it.
    - A paused engine with pending requests looks just like that, and its page says awake. Only /is_paused tells,
      and only with VLLM_SERVER_DEV_MODE=1.
    - With several API servers (the default with data parallelism) the gauges of a core are absent until its first step.
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
    # By the number of new tokens, with each step that produced an output.
    Leg("generation_tokens", Metric(("generation_tokens_total",)), LegKind.COUNTER, Grain.STEP),
    # By the whole prompt, once per request, with its first output.
    Leg("prompt_tokens", Metric(("prompt_tokens_total",)), LegKind.COUNTER, Grain.STEP),
    # A histogram in spite of its name: one observation per step that produced an output, none for a step of a prefill.
    Leg("iterations", Metric(("iteration_tokens_total_count",)), LegKind.COUNTER, Grain.STEP),
    # Aborts and errors are counted here too, and clients giving up on a corpse are not progress.
    Leg(
        "requests_finished",
        Metric(("request_success_total",), where={"finished_reason": frozenset({"stop", "length"})}),
        LegKind.COUNTER,
        Grain.REQUEST,
    ),
    # Published with every step. gpu_cache_usage_perc is V0 and V1 up to 0.11, in 0.10.2 to 0.11 beside the new name.
    Leg(
        "kv_cache_usage",
        Metric(("kv_cache_usage_perc", "gpu_cache_usage_perc")),
        LegKind.RISING_GAUGE,
        Grain.STEP,
    ),
    # Not legs: prefix_cache_queries_total moves when a request is admitted, num_preemptions_total moves in a livelock;
    # neither proves that anything was computed. request_generation_tokens_* and prompt_tokens_cached_total are near
    # misses.
)

# Since 0.21, one of the two parts of num_requests_waiting. It is the remote KV mostly, a LoRA or grammar sometimes.
_DEFERRED = Metric(("num_requests_waiting_by_reason",), where={"reason": frozenset({"deferred"})})

# An unknown rank is refused with 400 in 0.32; 0.11.1 fails with 500 on a rank that another node serves, hence
# from_first_core: behind hybrid load balancing a server's cores keep their global names but are counted from zero.
# Not verified for the Rust front end (VLLM_USE_RUST_FRONTEND=1, >= 0.24).
_AIM = (
    Aim(
        header="X-data-parallel-rank",
        since=(0, 11, 1),
        source="vllm-project/vllm#24945; /v1/completions reads it in the source of 0.11.1, 0.12.0 and 0.32.0, "
        "not in that of 0.11.0",
        from_first_core=True,
    ),
)

# Limits, none of which can read as a hang: with --skip-tokenizer-init a text prompt is refused with 400 (the operator
# gives a body whose prompt is a list of token ids), and pooling models have no /v1/completions at all. A chat model
# needs no chat template here.
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
    # Both are stale while a core hangs: the last completed step wrote them.
    running=Metric(("num_requests_running",)),
    waiting=Metric(("num_requests_waiting",)),
    deferred=_DEFERRED,
    queues=(Queue("deferred", _DEFERRED),),
    # The source label is that of prompt_tokens_by_source_total (>= 0.18); the NIXL histogram has none.
    transfers=Metric(
        ("prompt_tokens_by_source_total", "nixl_bytes_transferred_sum"),
        where={"source": frozenset({"external_kv_transfer", ""})},
    ),
    # Start of the API-server process, before the model load; absent with several API servers (multiprocess registry),
    # which is the default as soon as data_parallel_size is above one.
    start_time=Metric(("process_start_time_seconds",), prefixed=False),
    page_flags=(
        # Since 0.12. Written by the front end when a sleep is done and when a wake is complete; not on /pause.
        PageFlag("sleeping", Metric(("engine_sleep_state",), where={"sleep_state": frozenset({"awake"})}), 0.0),
        # In 0.32, from the first such call on: gauges of calls that are being awaited. Falling asleep copies the
        # weights to the host, and a weight update holds the cores for as long as the trainer takes. A call whose caller
        # has given up stays in flight until the core answers, so one that is tried again counts twice.
        PageFlag("sleeping", Metric(("sleep_mode_operations_in_flight",)), 1.0, counts_calls=True),
        PageFlag("paused", Metric(("rl_weight_update_operations_in_flight",)), 1.0, counts_calls=True),
    ),
    # Dev mode only, since 0.12 or before. Both make a round trip through every core's loop: a hung core gives no
    # answer, which proves nothing. /is_sleeping is also true while paused (0.32), so the exact one is asked first.
    flag_endpoints=(
        FlagEndpoint("paused", "/is_paused", key="is_paused"),
        FlagEndpoint("sleeping", "/is_sleeping", key="is_sleeping"),
    ),
    # None: "No available shared memory broadcast block found" also appears while compiling, loading and in long steps.
    log_signatures=(),
    # A decode or prefill worker without kv_transfer_params runs the request by itself and pins nothing.
    canaries={"agg": _CANARY, "prefill": _CANARY, "decode": _CANARY},
    # VLLM::EngineCore, VLLM::EngineCore_DP0, VLLM::Worker, VLLM::Worker_TP0... VLLM::APIServer_0 is no rank.
    rank_titles=("VLLM::EngineCore", "VLLM::Worker"),
    # In the source of 0.11 to 0.32.
    owners=("vllm",),
    version_paths=(("/version", "version"),),
    how_to_get_metrics="Start vLLM without --disable-log-stats: with it the page has no vllm: series at all.",
    how_to_be_named="Where a router depends on the identity, start one API server (--api-server-count 1) and leave "
    "PROMETHEUS_MULTIPROC_DIR unset; for a prefill worker with Mooncake at least name its bootstrap server in "
    "IDENTITY_KV_BOOTSTRAP_URL.",
    how_to_tell_a_pause="Where engines are paused (RL), start vLLM with VLLM_SERVER_DEV_MODE=1 on an address that only "
    "the sidecar reaches, or use mode: shadow.",
)
