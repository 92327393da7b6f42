"""Which engine is this: from its page, else from what it answers."""

from collections.abc import Callable
from typing import Any

import pytest

from enginewatch.engines import ALL_NAMES, PROFILES, RECOGNITION_PATHS, UNKNOWN, recognise, recognise_answer

Load = Callable[[str], Any]

VLLM, SGLANG, TRTLLM = PROFILES["vllm"], PROFILES["sglang"], PROFILES["trtllm"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vllm-0.32.0-single-idle-fresh", "vllm"),
        ("vllm-0.32.0-single-decoding", "vllm"),
        ("vllm-0.32.0-dp2-api2-engine0-hung", "vllm"),
        ("vllm-0.32.0-api2-after", "vllm"),
        ("sglang-0.5.10.post1-collector-generated", "sglang"),
        ("sglang-0.5.19-collector-generated", "sglang"),
        ("sglang-0.5.23-collector-generated", "sglang"),
        # It passes on vLLM's series; what it adds of its own is nobody's profile.
        ("dynamo-mocker-1.6.1-system", "vllm"),
    ],
)
def test_an_engine_is_known_by_its_page(load: Load, name: str, kind: str) -> None:
    names = load(name).names
    assert recognise(names) is PROFILES[kind]
    assert recognise(names & ALL_NAMES) is PROFILES[kind], "also by what the filter leaves of the page"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["vllm:num_requests_running"], "vllm"),
        (["vllm_num_requests_running"], "vllm"),
        (["ray_vllm:num_requests_running"], "vllm"),
        (["ray_vllm_num_requests_running"], "vllm"),
        (["sglang:num_running_reqs"], "sglang"),
        (["sglang_num_running_reqs"], "sglang"),
        (["vllm:something_of_next_year"], "vllm"),
        (["vllm:num_requests_running", "sglang:num_running_reqs", "sglang:num_queue_reqs"], "sglang"),
        ([], None),
        (["process_start_time_seconds", "python_info", "http_requests_total"], None),
        (["trtllm_generation_tokens_total"], "trtllm"),
        (["trtllm:request_success_total"], "trtllm"),
        (["tgi_batch_current_size", "lmdeploy:num_requests_running"], None),
        # Without its prefix anybody's, and what Dynamo counts about TensorRT-LLM is Dynamo's.
        (["request_success_total", "e2e_request_latency_seconds_count"], None),
        (["trtllm_num_aborted_requests_total", "trtllm_request_type_image_total"], None),
        (["vllm_router_requests_total", "sglang_router_requests_total"], None),
        (["my_vllm:num_requests_running"], None),
    ],
)
def test_an_engine_is_known_by_its_names(names: list[str], kind: str | None) -> None:
    found = recognise(iter(names))
    assert (found.kind if found else None) == kind


@pytest.mark.parametrize(
    ("path", "payload", "expected"),
    [
        ("/v1/models", {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}, VLLM),
        ("/v1/models", {"data": [{"id": "m", "owned_by": "sglang"}, {"id": "lora", "owned_by": "sglang"}]}, SGLANG),
        ("/v1/models", {"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}, TRTLLM),
        ("/v1/models", {"data": [{"id": "m", "owned_by": "nvidia"}]}, UNKNOWN),
        ("/v1/models", {"data": [{"id": "m"}]}, None),
        ("/v1/models", {"data": []}, None),
        ("/v1/models", {"data": [{"id": "m", "owned_by": ["vllm"]}, 7, None]}, None),
        ("/v1/models", {"data": "vllm"}, None),
        ("/v1/models", {}, None),
        ("/v1/models", [{"owned_by": "vllm"}], None),
        (
            "/get_model_info",
            {"model_path": "m", "tokenizer_path": "m", "is_generation": True, "preferred_sampling_params": None},
            SGLANG,
        ),
        (
            "/model_info",
            {"model_path": "m", "tokenizer_path": "m", "is_generation": True, "weight_version": "default"},
            SGLANG,
        ),
        ("/model_info", {"model_path": "m"}, None),
        ("/version", {"version": "0.32.0"}, VLLM),
        ("/version", {"version": 3}, None),
        ("/version", {"version": "1.0", "name": "other"}, None),
        ("/somewhere", {"version": "0.32.0"}, None),
        ("/version", None, None),
        ("/version", "0.32.0", None),
    ],
)
def test_an_engine_is_known_by_its_answers(path: str, payload: object, expected: object) -> None:
    assert recognise_answer(path, payload) is expected


def test_the_answer_that_two_engines_share_is_asked_for_last() -> None:
    assert RECOGNITION_PATHS[0] == "/v1/models"
    assert RECOGNITION_PATHS[-1] == "/version"


def test_an_engine_without_a_profile_has_no_legs_but_a_canary_and_a_start_time() -> None:
    assert UNKNOWN.legs == ()
    assert UNKNOWN.canaries["agg"].path == "/v1/completions"
    assert UNKNOWN.names() == {"process_start_time_seconds"}
    assert not UNKNOWN.canaries["agg"].aim
