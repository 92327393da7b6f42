"""llama.cpp's `llama-server --metrics`.

Sources: the source of the server at commit 0c1e57098 (September 2026; it is what llama-cpp-python 0.3.36 carries), the
same compiled and stopped with SIGSTOP, earlier versions as far as named, and the threads named.

What surprises people:
    - Without --metrics the page answers 501; while the model loads, every path answers 503.
    - Of the counters only `n_decode_total` moves during work: once per batch, of up to --batch-size tokens (2048).
      `tokens_predicted_total` moves when a request ends. `prompt_tokens_total` moved once per request, with its first
      token; now it does whenever a batch with output is through, for all prompt tokens since.
    - Until August 2026 (ggml-org/llama.cpp#27041) the loop that computes also answered the page, between two batches:
      one large batch on a slow machine was minutes without an answer (ikawrakow/ik_llama.cpp#1210: half an hour;
      ggml-org/llama.cpp#24866: 10 s in normal work). Now it answers within a batch, with counters that stand still.
    - /health is answered beside that loop and notices no hang (ggml-org/llama.cpp#27388).
    - A request beyond the slots (--parallel) waits until one of those that run has ended, and so does a canary. Then
      the legs move, and it counts for nothing.
    - The process is one: stopped, nothing of it answers.
"""

from __future__ import annotations

from enginewatch.engines.profile import (
    AnswerFormat,
    CanaryRequest,
    FlagEndpoint,
    Grain,
    Leg,
    LegKind,
    Metric,
    Profile,
)

_LEGS = (
    # Since ggml-org/llama.cpp#9283 (September 2024): with each call of llama_decode(), that is each batch of prompts,
    # of generated tokens, or of both.
    Leg("decodes", Metric(("n_decode_total",)), LegKind.COUNTER, Grain.STEP),
    # Step by step only in late versions, and there beside `decodes`: the grain is what every version keeps.
    Leg("prompt_tokens", Metric(("prompt_tokens_total",)), LegKind.COUNTER, Grain.REQUEST),
    Leg("predicted_tokens", Metric(("tokens_predicted_total",)), LegKind.COUNTER, Grain.REQUEST),
    # Not legs: n_tokens_max is called a counter and is the longest sequence so far; prompt_tokens_cached_total moves
    # when a prompt is found in the cache, before anything is computed; the seconds follow the tokens; and
    # prompt_tokens_seconds and predicted_tokens_seconds are averages.
)

# One token. The OpenAI path takes it in every version, whatever the model's chat template is. An embedding or reranking
# server answers 501, which counts for nothing until a canary has once succeeded.
_CANARY = CanaryRequest(
    method="POST",
    path="/v1/completions",
    body={"model": "{model}", "prompt": "Test", "max_tokens": 1, "temperature": 0},
    answer=AnswerFormat.OPENAI_COMPLETION,
)

PROFILE = Profile(
    kind="llamacpp",
    title="llama.cpp",
    prefixes=("llamacpp:", "llamacpp_"),
    metrics_path="/metrics",
    legs=_LEGS,
    # No series has labels; one process is one core.
    core_label="",
    # Slots at work, and requests that wait for one.
    running=Metric(("requests_processing",)),
    waiting=Metric(("requests_deferred",)),
    # No start_time: the page has no process_start_time_seconds, and the header Process-Start-Time-Unix is none of a
    # page's series (and was not sent for long: ggml-org/llama.cpp#5850).
    flag_endpoints=(
        # With --sleep-idle-seconds (since December 2025, ggml-org/llama.cpp#18228) the model is unloaded when nobody
        # asks. /props is answered beside the loop, and neither wakes the server nor keeps it awake. It says so until
        # the model is loaded again.
        FlagEndpoint("sleeping", "/props", key="is_sleeping"),
    ),
    # On every path but those of its web interface, from the moment it listens; nothing else answers the page so.
    loading_status=503,
    # A batch of 2048 tokens takes a CPU a minute and more; nothing moves meanwhile, and old versions do not answer.
    longest_step_sec=120.0,
    longest_wait_sec=600.0,
    # None: no line of its log means a dead loop.
    log_signatures=(),
    # It has no split into prefill and decode workers.
    canaries={"agg": _CANARY, "prefill": _CANARY, "decode": _CANARY},
    rank_titles=("llama-server",),
    owners=("llamacpp",),
    # Such as "b11012-4bc272fd7". Answered beside the loop; guarded by --api-key, as the page is.
    version_paths=(("/props", "build_info"),),
    how_to_get_metrics="Start llama-server with --metrics: without it the page answers 501.",
    how_to_tell_a_pause="Only versions since December 2025 can sleep, and say so at /props.",
)
