"""Which canary goes out: the engine's own, under what the operator says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from enginewatch.core.request import canary_request
from enginewatch.core.settings import Settings
from enginewatch.engines import PROFILES, UNKNOWN
from enginewatch.engines.profile import ROLES, AnswerFormat, CanaryRequest, Role

VLLM, SGLANG = PROFILES["vllm"], PROFILES["sglang"]


def request(role: Role = "agg", *, kind: str = "vllm", **settings: Any) -> CanaryRequest:
    found = canary_request(Settings(**settings), PROFILES.get(kind, UNKNOWN), role)
    assert found is not None
    return found


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", ["vllm", "sglang", "unknown"])
def test_without_a_word_of_the_operators_it_is_the_profiles(kind: str, role: Role) -> None:
    assert request(role, kind=kind) is PROFILES.get(kind, UNKNOWN).canaries[role]


def test_switched_off_there_is_none() -> None:
    assert canary_request(Settings(active_probe_enabled=False, active_probe_path="/x"), VLLM, "agg") is None


def test_an_existing_configmap_that_names_health_generate_works_unchanged() -> None:
    """hang-watcher's charts: a path, a method, an empty body."""
    found = request(kind="sglang", active_probe_path="/health_generate", active_probe_method="GET")
    assert (found.method, found.path, found.body, found.raw_body) == ("GET", "/health_generate", None, None)
    assert found.answer is AnswerFormat.ANY_2XX


def test_a_path_of_the_operators_cannot_be_aimed() -> None:
    assert request(active_probe_path="/health").aim == ()
    assert request(active_probe_path="/health").aim_for("0.32.0") is None


def test_a_path_with_a_body_is_posted_unless_a_method_is_given() -> None:
    assert request(active_probe_path="/x").method == "GET"
    assert request(active_probe_path="/x", active_probe_body='{"a": 1}').method == "POST"
    assert request(active_probe_path="/x", active_probe_body='{"a": 1}', active_probe_method="put").method == "PUT"


def test_the_engines_own_path_spelled_out_is_judged_as_the_engines_own() -> None:
    assert request(active_probe_path="/v1/completions") == VLLM.canaries["agg"]


def test_a_method_alone_changes_nothing() -> None:
    """ConfigMaps of the earlier watcher carry its default GET without a path."""
    assert request(active_probe_method="GET") == VLLM.canaries["agg"]


def test_a_body_alone_replaces_the_engines_body_and_keeps_its_judgement() -> None:
    body = {"model": "m", "prompt": [1], "max_tokens": 1}
    found = request(active_probe_body=json.dumps(body))
    own = VLLM.canaries["agg"]
    assert found.body == body
    assert (found.method, found.path, found.answer, found.aim) == (own.method, own.path, own.answer, own.aim)


def test_a_body_that_is_no_json_object_is_sent_as_it_is() -> None:
    for text in ("plain text", "[1, 2]", '"quoted"', "{broken"):
        found = request(active_probe_body=text)
        assert found.raw_body == text
        assert found.body is None


@pytest.mark.parametrize("text", ["", "  ", "\n"])
def test_a_blank_body_is_none(text: str) -> None:
    assert request(active_probe_body=text) == VLLM.canaries["agg"]


def test_a_raw_body_can_be_aimed_by_header_only() -> None:
    """SGLang's rank goes into the body, and there is no field in plain text to put it in."""
    assert request(active_probe_body="plain").aim == VLLM.canaries["agg"].aim
    assert request(kind="sglang", active_probe_body="plain").aim == ()
    assert request(kind="sglang", active_probe_body='{"input_ids": [0]}').aim == SGLANG.canaries["agg"].aim


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_role_decides(role: Role) -> None:
    body = request(role, kind="sglang").body
    assert body is not None
    assert body["bootstrap_host"] == "2.2.2.2"
    assert "bootstrap_host" not in (request(kind="sglang").body or {})
