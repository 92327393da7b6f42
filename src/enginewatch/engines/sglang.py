"""SGLang.

Sources: the source of the releases 0.5.10.post1, 0.5.15.post1 and 0.5.18 to 0.5.23. Where a fact is bound to a version
the comment beside it says so.

What surprises people:
    - `generation_tokens_total` and `prompt_tokens_total` come from the tokenizer process and move only when a request
      ends; `realtime_tokens_total` and `cuda_graph_passes_total` come from the scheduler and move per batch. The first
      two carry no `dp_rank`.
    - Gauges are published at prefill reports and every 40 decode steps; after the last request `num_running_reqs` kept
      its value for up to 30 s (sgl-project/sglang#26495; corrected in 0.5.18 by #31517).
    - /health is /health_generate: it takes a second when healthy and 20 s when not.
    - A series of `realtime_tokens_total` appears only with its first token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginewatch.engines.profile import (
    Aim,
    AnswerFormat,
    CanaryRequest,
    Grain,
    Leg,
    LegKind,
    Metric,
    Profile,
    Queue,
)

_PREFIXES = ("sglang:", "sglang_")

# With priority scheduling the total stands under priority="" and the series of each priority come on top of it.
_TOTAL_ONLY = {"priority": frozenset({""})}

_LEGS = (
    Leg("realtime_tokens", Metric(("realtime_tokens_total",)), LegKind.COUNTER, Grain.STEP),
    Leg("forward_passes", Metric(("cuda_graph_passes_total",)), LegKind.COUNTER, Grain.STEP),
    Leg("generation_tokens", Metric(("generation_tokens_total",)), LegKind.COUNTER, Grain.REQUEST),
    Leg("prompt_tokens", Metric(("prompt_tokens_total",)), LegKind.COUNTER, Grain.REQUEST),
    Leg("token_usage", Metric(("token_usage",)), LegKind.RISING_GAUGE, Grain.STEP),
)

_AIM = (
    Aim(
        body_field="routed_dp_rank",
        since=(0, 5, 10),
        source="sgl-project/sglang#19268 renames data_parallel_rank to routed_dp_rank on /generate",
    ),
)


def _generate(extra: Mapping[str, Any]) -> CanaryRequest:
    return CanaryRequest(
        method="POST",
        path="/generate",
        body={"text": "Test", "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **extra},
        answer=AnswerFormat.SGLANG_GENERATE,
        aim=_AIM,
    )


# 2.2.2.2 is the engine's own fake-transfer host: no peer is needed and no KV transfer is tested.
_FAKE_PEER = {"bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 0}

PROFILE = Profile(
    kind="sglang",
    title="SGLang",
    prefixes=_PREFIXES,
    metrics_path="/metrics",
    legs=_LEGS,
    core_label="dp_rank",
    running=Metric(("num_running_reqs",), where=_TOTAL_ONLY),
    waiting=Metric(("num_queue_reqs",), where=_TOTAL_ONLY),
    queues=(
        # Up to 0.5.10 the prefill side called its bootstrap queue prealloc queue.
        Queue("bootstrap", Metric(("num_prefill_bootstrap_queue_reqs", "num_prefill_prealloc_queue_reqs"))),
        Queue("inflight", Metric(("num_prefill_inflight_queue_reqs",))),
        Queue("prealloc", Metric(("num_decode_prealloc_queue_reqs",))),
        Queue("transfer", Metric(("num_decode_transfer_queue_reqs",))),
    ),
    # Written by the scheduler loop itself, since 0.5.20. sglang:process_cpu_seconds_total is not: a thread of its own
    # advances it while the loop is stuck.
    heartbeat=Metric(("scheduler_idle_seconds_total",)),
    gauge_stale_sec=30.0,
    log_signatures=(r"Health check failed\. Server couldn't get a response from detokenizer",),
    canaries={"agg": _generate({}), "prefill": _generate(_FAKE_PEER), "decode": _generate(_FAKE_PEER)},
    rank_titles=("sglang::scheduler",),
    version_paths=(),
    how_to_get_metrics="Start SGLang with --enable-metrics: without it there is no metrics page.",
)
