"""SGLang.

Sources: the source of the releases 0.4.8, 0.4.9, 0.5.3, 0.5.9, 0.5.10, 0.5.14, 0.5.15.post1 and 0.5.18 to 0.5.23. A
fact that is bound to a version has it beside it.

What surprises people:
    - `generation_tokens_total` and `prompt_tokens_total` come from the tokenizer process, move only when a request
      ends and carry no `dp_rank`; `realtime_tokens_total` and `cuda_graph_passes_total` come from the scheduler and
      move per batch.
    - Series of the last two appear only with their first token or pass: absent is not zero.
    - Gauges are published at prefill reports and every 40 decode steps; after the last request `num_running_reqs` kept
      its value for up to 30 s (sgl-project/sglang#26495; corrected in 0.5.18 by #31517).
    - /health is /health_generate: it takes a second when healthy and 20 s when not.
    - Only the first rank of a tensor-parallel group reports, unless --enable-metrics-for-all-schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginewatch.engines.profile import (
    DYNAMIC,
    Aim,
    AnswerFormat,
    CanaryRequest,
    Fingerprint,
    FlagEndpoint,
    Grain,
    Leg,
    LegKind,
    Metric,
    Profile,
    Queue,
    RoleWords,
)

# The second is what the `underscores` escaping scheme, OpenTelemetry collectors and relabelling make of the first.
_PREFIXES = ("sglang:", "sglang_")

# With priority scheduling the total stands under priority="" and the series of each priority come on top of it.
_TOTAL_ONLY = {"priority": frozenset({""})}

_LEGS = (
    # Decode: every step. Prefill: when the result of a batch or chunk is in.
    Leg("realtime_tokens", Metric(("realtime_tokens_total",)), LegKind.COUNTER, Grain.STEP),
    # Every decode batch and every prefill report, with a CUDA graph or without.
    Leg("forward_passes", Metric(("cuda_graph_passes_total",)), LegKind.COUNTER, Grain.STEP),
    Leg("generation_tokens", Metric(("generation_tokens_total",)), LegKind.COUNTER, Grain.REQUEST),
    Leg("prompt_tokens", Metric(("prompt_tokens_total",)), LegKind.COUNTER, Grain.REQUEST),
    Leg("token_usage", Metric(("token_usage",)), LegKind.RISING_GAUGE, Grain.STEP),
    # Not legs: num_aborted_requests_total is clients giving up; generation_tokens_histogram_* and full_token_usage are
    # near misses.
)

# From 0.5.18 on at the latest the tokenizer process sets each phase once, when all schedulers have started: the
# duration of the slowest rank, on one series without a rank. Before that each scheduler sets its own, 0.0 until it is
# known; and there are builds that hand a constant 0.0 to the function that sets both, so that their page never tells.
_RANK_ZERO = {label: frozenset({"", "0"}) for label in ("dp_rank", "pp_rank", "tp_rank", "moe_ep_rank")}
_FINGERPRINT = Fingerprint(
    anchor=(
        Metric(("startup_time_seconds",), where={"phase": frozenset({"load_weight"})}),
        Metric(("engine_load_weights_time",), where=_RANK_ZERO),
    ),
    others=(
        # Not tokenizer_e2e: with several tokenizer workers each sets its own, under the same labels.
        Metric(("startup_time_seconds",), where={"phase": frozenset({"kv_cache_allocation", "scheduler_e2e"})}),
        Metric(("startup_cuda_graph_time_seconds",)),
        Metric(("engine_load_weights_time", "engine_startup_time")),
    ),
    # Near misses: weight_load_duration_seconds is of updates of the weights while the engine runs;
    # startup_available_gpu_memory_gb and max_total_num_tokens are constants that two starts may share.
)

_ROUTED_DP_RANK = Aim(
    body_field="routed_dp_rank",
    since=(0, 5, 10),
    source="sgl-project/sglang#19268; in the source of 0.5.10 every load-balancing method obeys it first, "
    "that of 0.5.9 does not know it",
)
# Not for decode workers: there the old name meant the rank of the prefill partner as well (#19268). The new name must
# be preferred where both exist: 0.5.15.post1 drops the old one without a word, 0.5.19 has it back (#33565).
_DATA_PARALLEL_RANK = Aim(
    body_field="data_parallel_rank",
    since=(0, 4, 8),
    source="sgl-project/sglang#6884; obeyed on /generate in the source of 0.4.8, 0.4.9, 0.5.3 and 0.5.9",
)


def _generate(peer: Mapping[str, Any], aim: tuple[Aim, ...]) -> CanaryRequest:
    # Token ids rather than text: they are accepted with and without --skip-tokenizer-init, and [0] is what the engine's
    # own health check sends.
    return CanaryRequest(
        method="POST",
        path="/generate",
        body={"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **peer},
        answer=AnswerFormat.SGLANG_GENERATE,
        aim=aim,
    )


# 2.2.2.2 is the engine's own fake-transfer host: no partner is needed, nothing is pinned and no KV transfer is tested.
# Nobody is contacted on the port, 8998 is the engine's default. An aimed rank outranks the room, which without one
# always leads to rank 0 under follow_bootstrap_room.
_FAKE_PEER: Mapping[str, Any] = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 0}

PROFILE = Profile(
    kind="sglang",
    title="SGLang",
    prefixes=_PREFIXES,
    metrics_path="/metrics",
    legs=_LEGS,
    # Only with data parallelism.
    core_label="dp_rank",
    running=Metric(("num_running_reqs",), where=_TOTAL_ONLY),
    # Without num_grammar_queue_reqs: a slow grammar is not a stuck scheduler.
    waiting=Metric(("num_queue_reqs",), where=_TOTAL_ONLY),
    queues=(
        # Up to 0.5.10 the prefill side called its bootstrap queue prealloc queue.
        Queue(
            "bootstrap",
            Metric(("num_prefill_bootstrap_queue_reqs", "num_prefill_prealloc_queue_reqs"), where=_TOTAL_ONLY),
        ),
        Queue("inflight", Metric(("num_prefill_inflight_queue_reqs",), where=_TOTAL_ONLY)),
        Queue("prealloc", Metric(("num_decode_prealloc_queue_reqs",), where=_TOTAL_ONLY)),
        Queue("transfer", Metric(("num_decode_transfer_queue_reqs",), where=_TOTAL_ONLY)),
    ),
    # One observation per transfer that succeeded, on the prefill side only; the decode side counts failures alone.
    # Fake transfers, and so canaries, are left out by the engine (0.5.14 and later; 0.5.10 counts them).
    transfers=Metric(("kv_transfer_latency_ms_count",)),
    # Written by the scheduler's loop itself once a second, busy, idle or paused, since 0.5.20. Near miss:
    # process_cpu_seconds_total belongs to a thread that runs on while the loop is stuck.
    heartbeat=Metric(("scheduler_idle_seconds_total", "scheduler_process_cpu_seconds_total")),
    # No start_time: SGLang never exports process_start_time_seconds, and startup_time_seconds is a duration.
    fingerprint=_FINGERPRINT,
    # While generation is paused requests wait in the front end, so a canary gets no answer. /ready is 503 while paused,
    # starting, shutting down or unhealthy, /ping is 503 in all of these but paused; neither asks the scheduler. That
    # holds from 0.5.23 on: /ready exists since 0.5.20, but until 0.5.22 /ping is always 200, so that an engine whose
    # health check failed would look paused. Before 0.5.23 nothing tells a pause from a hang, and in no version does
    # anything tell that memory was released (/release_memory_occupation) or that weights are being updated without a
    # pause: there the operator uses shadow mode.
    flag_endpoints=(FlagEndpoint("paused", "/ready", status=503, sound_path="/ping", since=(0, 5, 23)),),
    gauge_stale_sec=30.0,
    # The seconds in the line vary. A chunk that computes for longer than 20 s prints it as well, hence the canary
    # that must fail beside it.
    log_signatures=(r"Health check failed\. Server couldn't get a response from detokenizer",),
    canaries={
        "agg": _generate({}, (_ROUTED_DP_RANK, _DATA_PARALLEL_RANK)),
        "prefill": _generate(_FAKE_PEER, (_ROUTED_DP_RANK, _DATA_PARALLEL_RANK)),
        "decode": _generate(_FAKE_PEER, (_ROUTED_DP_RANK,)),
    },
    # sglang::scheduler, sglang::scheduler_TP0, sglang::scheduler_DP0_TP0... The detokenizer and the data-parallel
    # controller are no ranks.
    rank_titles=("sglang::scheduler",),
    # In the source of 0.4.8 to 0.5.23.
    owners=("sglang",),
    # Nothing else tells the version. Both go through the scheduler: a hung one does not answer. The second is the old
    # name of the first.
    version_paths=(("/server_info", "version"), ("/get_server_info", "version")),
    # The series of older versions say `unified` in every role; those whose source tells the roles apart give the
    # scheduler's series a moe_ep_rank as well (0.5.10.post1 and later). So `unified` without that label tells nothing,
    # and the scheduler has to be asked.
    role_words=RoleWords(
        words={"null": "agg", "unified": "agg", "prefill": "prefill", "decode": "decode", "dynamic": DYNAMIC},
        key="disaggregation_mode",
        label="engine_type",
        agg_beside="moe_ep_rank",
    ),
    how_to_be_named="Run SGLang 0.5.18 or later: an older one may not tell how long its weights took to load.",
    how_to_get_metrics="Start SGLang with --enable-metrics: without it there is no metrics page.",
)
