"""TensorRT-LLM (trtllm-serve), also as the worker behind Dynamo, which passes its series on.

Sources: tensorrt_llm/metrics/collector.py at 89fd9b7 and 050f80d, serve/openai_server.py at 0005772 and later,
serve/openai_protocol.py, _torch/pyexecutor/hang_detector.py at 06c5e53, all of NVIDIA/TensorRT-LLM, and the issues and
pull requests named below. No engine ran for this profile.

What surprises people:
    - /metrics is not a metrics page. It is a JSON list of statistics per iteration, and READING REMOVES THEM. They are
      never read unless the operator asks for it. The reader of an empty list is kept waiting for 2 s, up to release 1.3
      by a server that does nothing else meanwhile (its RPC waited in the event loop).
    - The Prometheus page is at /prometheus/metrics and exists only with `return_perf_metrics: true`. Everything on it
      moves when a request ends: one long request looks frozen. Before the first request ends it holds no progress
      series at all.
    - Its gauges (trtllm_num_requests_running and the like) are written by a task that is woken when a request ends.
      They show one long request as nothing, and keep the last value for ever when the engine is idle: nothing here
      calls an engine busy by them. In a multiprocess registry they carry a `pid` label as well, and where the operator
      set PROMETHEUS_MULTIPROC_DIR those of dead processes stay.
    - /v1/completions answers 400 to whatever goes wrong inside, so a dead executor looks like a bad request. Only
      /health tells, since 1.2 (#9057), and only of an executor that is gone: a hung one is 200 (#4441, #9628).
    - After a hard kill of the executor the front end may stay up, and answer 503 on /health, for ever (#18663).
    - Nothing names the process: no process_start_time_seconds (multiprocess registry), no id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enginewatch.engines.profile import (
    AnswerFormat,
    CanaryRequest,
    DeathNotice,
    Grain,
    JsonStatistics,
    Leg,
    LegKind,
    Metric,
    Profile,
)

# The second is what older Dynamo workers put before the names, and what relabelling may make of the first.
_PREFIXES = ("trtllm_", "trtllm:")

_LEGS = (
    # Both since the collector knows them; 89fd9b7 has only requests and latencies.
    Leg("generation_tokens", Metric(("generation_tokens_total",)), LegKind.COUNTER, Grain.REQUEST),
    Leg("prompt_tokens", Metric(("prompt_tokens_total",)), LegKind.COUNTER, Grain.REQUEST),
    # The bare name is that of 89fd9b7, which had no prefix of its own. `cancelled` and `timeout` are clients giving up;
    # a prefill worker's share of a request ends as `not_finished`.
    Leg(
        "requests_finished",
        Metric(
            ("trtllm_request_success_total", "trtllm:request_success_total", "request_success_total"),
            where={"finished_reason": frozenset({"stop", "length", "not_finished"})},
            prefixed=False,
        ),
        LegKind.COUNTER,
        Grain.REQUEST,
    ),
    # Not legs: kv_cache_utilization and all that comes from iterations is written together with these, when a request
    # ends; num_requests_completed_total counts cancelled ones.
)

# Nothing goes on while /health says this: the executor was shut down, or met a fatal error.
_DEATH_NOTICE = DeathNotice("/health", 503)


def _completion(more: Mapping[str, Any]) -> CanaryRequest:
    return CanaryRequest(
        method="POST",
        path="/v1/completions",
        body={"model": "{model}", "prompt": "Test", "max_tokens": 1, "temperature": 0, **more},
        answer=AnswerFormat.OPENAI_COMPLETION,
        # No aim: all ranks go through one executor loop in step, one hung rank stops all of them.
        death_notice=_DEATH_NOTICE,
    )


# Prefill and decode by itself: no partner, no transfer, nothing pinned. A generation worker refuses a request without
# parameters (ai-dynamo/dynamo#8521).
_BY_ITSELF = {"disaggregated_params": {"request_type": "context_and_generation"}}

PROFILE = Profile(
    kind="trtllm",
    title="TensorRT-LLM",
    prefixes=_PREFIXES,
    metrics_path="/prometheus/metrics",
    legs=_LEGS,
    # No series carries one: a page is one core. With attention data parallelism the ranks run in step.
    core_label="",
    # No gauge of this page may call the engine busy, see above.
    running=Metric(()),
    waiting=Metric(()),
    owners=("tensorrt_llm",),
    # Without its page, which is how it comes, nothing tells a queue from a hang. Two canaries in a row are as patient
    # then as the page would be, on which everything moves when a request ends.
    longest_wait_sec=60.0,
    # Written just before all ranks are killed (since #15612, shut down before), and never otherwise: the first when
    # the executor's loop has not come round for hang_detection_timeout, the second when it crashed on one rank.
    log_signatures=(
        r"Hang detected after [0-9.]+ seconds\.",
        r"Executor loop crashed on this rank; hard-killing",
    ),
    canaries={"agg": _completion({}), "prefill": _completion(_BY_ITSELF), "decode": _completion(_BY_ITSELF)},
    # Also with one GPU the executor runs in a process of its own, below mpi4py's pool.
    rank_titles=("mpi4py.futures.server",),
    version_paths=(("/version", "version"),),
    how_to_get_metrics="Start trtllm-serve with return_perf_metrics: true in its options file (--config, formerly "
    "--extra_llm_api_options): without it there is no metrics page.",
    # Its collector makes a series when it first has a value for it.
    how_to_get_legs="They come with the first request that ends: send one and look again.",
    how_to_get_metrics_in_short="there is one only with return_perf_metrics: true",
    why_no_legs="its page has no progress series, as before the first request has ended",
    json_statistics=JsonStatistics(
        path="/metrics",
        counter="iter",
        running="numActiveRequests",
        waiting="numQueuedRequests",
        waits_sec=2.0,
        batched_by="/prometheus/metrics",
        why_empty="its list of iteration statistics was always empty (enable_iter_perf_stats: true fills it, and "
        "nobody else may read it)",
        how_to_get="Start trtllm-serve with enable_iter_perf_stats: true in its options file, and let nobody else read "
        "its /metrics: without it the list stays empty.",
        cost="Whoever else reads /metrics of this engine loses what the sidecar reads, and the other way round; and up "
        "to release 1.3 all of the server waits for up to 2 s whenever an empty list is read.",
    ),
)
