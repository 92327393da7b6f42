"""Engines without a profile for the virtual shell, and their pages as text: TGI and LMDeploy.

Names and formats are those of huggingface/text-generation-inference at db931fc and LMDeploy 0.18.0; the values are made
up. Their counters move, and nothing of that may matter: what nobody has described is not judged by.
"""

from __future__ import annotations

from collections.abc import Callable

from virtual_shell import ScriptedEngine


class ScriptedStranger(ScriptedEngine):
    """An engine whose page holds nothing that any profile asks for."""

    kind = "unknown"

    def __init__(self, render: Callable[[ScriptedEngine], dict[str, float]]) -> None:
        super().__init__(start_time=None, version="")
        self._render = render

    def page(self) -> dict[str, float]:
        return self._render(self)


def tgi(engine: ScriptedEngine) -> dict[str, float]:
    [core] = engine.cores.values()
    steps = float(int(core.tokens))
    return {
        'tgi_batch_inference_count{method="prefill"}': steps,
        'tgi_batch_inference_count{method="decode"}': steps,
        'tgi_batch_inference_success{method="decode"}': steps,
        "tgi_batch_current_size": core.running,
        "tgi_queue_size": core.waiting,
        "tgi_request_count": steps,
    }


def lmdeploy(engine: ScriptedEngine) -> dict[str, float]:
    [core] = engine.cores.values()
    labels = '{engine="0",model_name="m"}'
    return {
        f"lmdeploy:generation_tokens_total{labels}": float(int(core.tokens)),
        f"lmdeploy:prompt_tokens_total{labels}": float(int(core.tokens)),
        f"lmdeploy:num_requests_running{labels}": core.running,
        f"lmdeploy:num_requests_waiting{labels}": core.waiting,
    }


# Blank lines between families, no HELP, and integers, as TGI writes them.
TGI_PAGE = """# TYPE tgi_request_count counter
tgi_request_count 12

# TYPE tgi_batch_inference_count counter
tgi_batch_inference_count{method="prefill"} 12
tgi_batch_inference_count{method="decode"} 240

# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 1

# TYPE tgi_queue_size gauge
tgi_queue_size 0

# TYPE tgi_request_duration histogram
tgi_request_duration_bucket{le="0.1"} 3
tgi_request_duration_bucket{le="+Inf"} 12
tgi_request_duration_sum 31.7
tgi_request_duration_count 12
"""

LMDEPLOY_PAGE = """# HELP lmdeploy:num_requests_running Number of requests in model execution batches.
# TYPE lmdeploy:num_requests_running gauge
lmdeploy:num_requests_running{engine="0",model_name="m"} 1.0
# HELP lmdeploy:generation_tokens_total Number of generation tokens processed.
# TYPE lmdeploy:generation_tokens_total counter
lmdeploy:generation_tokens_total{engine="0",model_name="m"} 240.0
"""

EMBEDDINGS_PAGE = """# TYPE te_request_count counter
te_request_count{method="single"} 5

# TYPE te_queue_size gauge
te_queue_size 0
"""
