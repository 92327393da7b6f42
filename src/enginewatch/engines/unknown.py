"""An engine that nobody has described (TGI, LMDeploy, a proxy in front of several engines).

There are no legs: a page without legs leaves the judgement to the canary alone, and the OpenAI completion is the one
request that most engines answer. Some such engines are known by name, so that `doctor` can say what canary fits them.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Stranger:
    """An engine without a profile that can be told by its page or its list of models.

    Attributes:
        names: samples that stand on its page from the start, and on no other engine's.
        owners: what `owned_by` says in its /v1/models.
        canary: one sentence for `doctor`: which canary goes through the whole engine.
    """

    title: str
    canary: str
    names: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()


STRANGERS: tuple[Stranger, ...] = (
    # Its /health answers 503 while the queue is full (huggingface/text-generation-inference#3241), and generates only
    # after an error. Its owned_by is the model's own name.
    Stranger(
        "Text Generation Inference",
        "The usual canary fits, and so does ACTIVE_PROBE_PATH=/generate with "
        'ACTIVE_PROBE_BODY={"inputs": "Test", "parameters": {"max_new_tokens": 1}}; /health does not, it answers 503 '
        "while the queue is full.",
        names=frozenset({"tgi_queue_size", "tgi_batch_current_size", "tgi_request_count"}),
    ),
    Stranger(
        "LMDeploy",
        "The usual canary (/v1/completions) fits; a profile could be written for its page, see "
        "docs/adding-an-engine.md.",
        names=frozenset({"lmdeploy:num_requests_running", "lmdeploy:generation_tokens_total"}),
        owners=frozenset({"lmdeploy"}),
    ),
    Stranger(
        "Text Embeddings Inference",
        'It completes nothing: set ACTIVE_PROBE_PATH=/embed and ACTIVE_PROBE_BODY={"inputs": "Test"}.',
        names=frozenset({"te_queue_size", "te_request_count"}),
    ),
)
