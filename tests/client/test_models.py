"""What the small JSON answers of an engine may cost."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from enginewatch.client.models import parse_json, served_model


@pytest.mark.parametrize("item", [b"[],", b"{},", b'{"":0},', b'"ab",', b"0.5,", b"[[]],"])
def test_no_answer_takes_much_memory(item: bytes) -> None:
    # 256 KiB of empty objects took 6 MB, at each canary, and four such answers are read side by side.
    body = b'{"data":[' + item * ((256 * 1024 - 20) // len(item)) + b"0]}"
    tracemalloc.start()
    try:
        parse_json(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * 1024 * 1024


def test_a_model_with_hundreds_of_adapters_is_read() -> None:
    permission = {f"allow_{number}": False for number in range(12)}
    models = [
        {"id": f"adapter-{number}", "object": "model", "created": 1, "owned_by": "vllm", "root": "/models/x"}
        | {"parent": "base" if number else None, "max_model_len": 8192, "permission": [permission]}
        for number in range(400)
    ]
    assert served_model(parse_json(json.dumps({"object": "list", "data": models}).encode())) == "adapter-0"


@pytest.mark.parametrize("body", [b"", b"[" * 10_000, b"{", b"\xff", b'"\\ud800"', b"9" * 5000])
def test_what_is_no_json_is_none(body: bytes) -> None:
    assert parse_json(body) is None or body.startswith(b"9")
