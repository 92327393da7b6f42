"""An engine that nobody has described (TGI, LMDeploy, a proxy in front of several engines).

There are no legs: a page without legs leaves the judgement to the canary alone, and the OpenAI completion is the one
request that most engines answer.
"""

from __future__ import annotations

from enginewatch.engines.profile import AnswerFormat, CanaryRequest, Metric, Profile

_CANARY = CanaryRequest(
    method="POST",
    path="/v1/completions",
    body={"model": "{model}", "prompt": "Test", "max_tokens": 1, "temperature": 0},
    answer=AnswerFormat.OPENAI_COMPLETION,
)

PROFILE = Profile(
    kind="unknown",
    title="an engine without a profile",
    prefixes=(),
    metrics_path="/metrics",
    legs=(),
    core_label="",
    running=Metric(()),
    waiting=Metric(()),
    canaries={"agg": _CANARY, "prefill": _CANARY, "decode": _CANARY},
    rank_titles=(),
    start_time=Metric(("process_start_time_seconds",), prefixed=False),
    how_to_get_metrics="enginewatch has no profile for this engine; where it is a known one in disguise, name it with "
    "ENGINE_KIND.",
)
