"""What doctor says about engines without a profile, and about llama.cpp in its three set-ups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_strangers import EMBEDDINGS_PAGE, LMDEPLOY_PAGE, TGI_PAGE
from tests.client.servers import Recorder, Serve, response

from enginewatch.client import doctor
from enginewatch.client.diagnosis import Diagnosis
from enginewatch.client.doctor import diagnose
from enginewatch.client.target import Target
from enginewatch.core.settings import Settings
from enginewatch.engines import ALL_NAMES, PROFILES, STRANGERS

DATA = Path(__file__).parents[1] / "data"
COMPLETION = response(json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}))
NOT_SUPPORTED = response(json.dumps({"error": {"code": 501}}), status="501 Not Implemented")


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SETTLE_SEC", (0.0, 0.05))


def models(owner: str) -> bytes:
    return response(json.dumps({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": owner}]}))


async def examine(serve: Serve, answers: dict[str, bytes], *, kind: str = "auto", **own: str) -> Diagnosis:
    url = await serve(Recorder(answers))
    settings = Settings(active_probe_timeout_sec=20, metrics_timeout_sec=20, **own)  # type: ignore[arg-type]
    return await diagnose(Target.parse(url), kind=kind, settings=settings)


def warnings(found: Diagnosis) -> str:
    return "\n".join(f"{finding.what} {finding.fix}" for finding in found.findings if finding.level == "warning")


def text(found: Diagnosis) -> str:
    return "\n".join(f"{finding.what} {finding.fix}" for finding in found.findings)


@pytest.mark.parametrize(
    ("page", "owner", "title", "advice"),
    [
        (TGI_PAGE, "org/model", "Text Generation Inference", "ACTIVE_PROBE_PATH=/generate"),
        (LMDEPLOY_PAGE, "lmdeploy", "LMDeploy", "/v1/completions"),
    ],
)
async def test_an_engine_known_by_name_is_named_with_its_canary(
    serve: Serve, page: str, owner: str, title: str, advice: str
) -> None:
    answers = {"/metrics": response(page), "/v1/models": models(owner), "/v1/completions": COMPLETION}
    found = await examine(serve, answers)
    assert (found.engine, found.could_be, found.level) == ("unknown", title, "warning")
    assert f"looks like {title}" in warnings(found)
    assert "the canary alone decides" in warnings(found)
    assert advice in warnings(found)
    assert found.canary is not None
    assert found.canary.outcome == "ok"
    assert "--api-server-count" not in text(found), "that is vLLM's"


async def test_one_that_completes_nothing_is_told_the_canary_to_set(serve: Serve) -> None:
    found = await examine(serve, {"/metrics": response(EMBEDDINGS_PAGE)})
    assert found.could_be == "Text Embeddings Inference"
    assert found.canary is not None
    assert found.canary.outcome == "misconfigured"
    assert "ACTIVE_PROBE_PATH=/embed" in warnings(found)


@pytest.mark.parametrize(
    ("page", "path", "body"),
    [
        (EMBEDDINGS_PAGE, "/embed", '{"inputs": "Test"}'),
        (TGI_PAGE, "/generate", '{"inputs": "Test", "parameters": {"max_new_tokens": 1}}'),
    ],
)
async def test_with_the_canary_that_was_advised_nothing_is_left_to_fix(
    serve: Serve, page: str, path: str, body: str
) -> None:
    answers = {"/metrics": response(page), path: response("[[0.1, 0.2]]")}
    found = await examine(serve, answers, active_probe_path=path, active_probe_body=body)
    assert found.canary is not None
    assert found.canary.outcome == "ok"
    assert (found.level, found.exit_code) == ("ok", 0), text(found)
    assert f"{path} answers it" in text(found)


async def test_a_canary_of_ones_own_that_is_refused_leaves_the_advice(serve: Serve) -> None:
    found = await examine(serve, {"/metrics": response(EMBEDDINGS_PAGE)}, active_probe_path="/embedd")
    assert (found.level, found.exit_code) == ("warning", 1)
    assert "ACTIVE_PROBE_PATH=/embed " in warnings(found)
    assert "HTTP 404" in warnings(found)


async def test_without_its_page_an_engine_is_known_by_its_list_of_models(serve: Serve) -> None:
    found = await examine(serve, {"/v1/models": models("lmdeploy"), "/v1/completions": COMPLETION})
    assert found.could_be == "LMDeploy"


async def test_an_engine_that_nobody_knows_is_taken_for_nobody(serve: Serve) -> None:
    answers = {"/metrics": response("my_own_requests_total 3\n"), "/v1/models": models("me")}
    found = await examine(serve, answers | {"/v1/completions": COMPLETION})
    assert found.could_be is None
    assert "no profile for" in warnings(found)


async def test_an_engine_with_a_profile_is_no_stranger(serve: Serve) -> None:
    page = (DATA / "vllm-0.32.0-single-idle-fresh.prom").read_text() + TGI_PAGE
    assert (await examine(serve, {"/metrics": response(page)})).could_be is None


def test_no_name_of_a_stranger_is_kept_by_the_sidecar_or_another_engines() -> None:
    assert len({stranger.title for stranger in STRANGERS}) == len(STRANGERS)
    for stranger in STRANGERS:
        assert stranger.names.isdisjoint(ALL_NAMES)
        assert stranger.names or stranger.owners
        assert not any(name.startswith(profile.prefixes) for name in stranger.names for profile in PROFILES.values())
        assert not any(owner in profile.owners for owner in stranger.owners for profile in PROFILES.values())
        assert stranger.canary.endswith(".")


# --- llama.cpp; the real one is asked in tests/real -----------------------------------------------------------------


LLAMACPP = {
    "/v1/models": models("llamacpp"),
    "/props": response(json.dumps({"build_info": "b11012-4bc272fd7", "is_sleeping": False})),
    "/v1/completions": COMPLETION,
}


async def test_llamacpp_with_its_page(serve: Serve) -> None:
    page = response((DATA / "llamacpp-0c1e57098-decoding.prom").read_bytes())
    found = await examine(serve, LLAMACPP | {"/metrics": page})
    assert (found.engine, found.engine_from, found.version) == ("llamacpp", "page", "b11012-4bc272fd7")
    [core] = found.cores
    assert {leg.name for leg in core.legs} == {"decodes", "prompt_tokens", "predicted_tokens"}
    assert (core.running, core.waiting) == (2.0, 2.0)
    assert found.pause == "clear"


async def test_llamacpp_without_its_page_is_told_the_flag(serve: Serve) -> None:
    found = await examine(serve, LLAMACPP | {"/metrics": NOT_SUPPORTED})
    assert (found.engine, found.engine_from, found.level) == ("llamacpp", "answers", "warning")
    assert "answered 501" in warnings(found)
    assert "--metrics" in warnings(found)


async def test_llamacpp_asleep_gets_no_canary_that_would_wake_it(serve: Serve) -> None:
    asleep = response(json.dumps({"build_info": "b11012-4bc272fd7", "is_sleeping": True}))
    found = await examine(serve, LLAMACPP | {"/props": asleep})
    assert found.pause == "sleeping"
    assert found.canary is None


async def test_llamacpp_behind_its_key_is_asked_for_nothing_but_the_key(serve: Serve) -> None:
    """It guards its page, its list of models and what says that it sleeps."""
    paths = ("/metrics", "/v1/models", "/props", "/v1/completions")
    found = await examine(serve, dict.fromkeys(paths, response("", status="401 Unauthorized")), kind="llamacpp")
    assert (found.level, found.exit_code) == ("warning", 1), text(found)
    fixes = [finding.fix for finding in found.findings if finding.level == "warning"]
    assert all("key into a file" in fix for fix in fixes), fixes
    assert len(fixes) == 4
    assert "--metrics" not in text(found)


LOADING = response(json.dumps({"error": {"message": "Loading model", "code": 503}}), status="503 Service Unavailable")


async def test_llamacpp_that_loads_is_said_to_load_and_to_be_asked_again(serve: Serve) -> None:
    paths = ("/metrics", "/v1/models", "/props", "/v1/completions")
    found = await examine(serve, dict.fromkeys(paths, LOADING), kind="llamacpp")
    assert found.loading
    assert (found.level, found.exit_code) == ("unknown", 4), text(found)
    assert "loading its model" in text(found)
    assert "Look again" in text(found)
    assert found.canary is None, "it could tell nothing more"
    assert "No identity" not in text(found)


@pytest.mark.parametrize(("kind", "status"), [("llamacpp", "500 Oops"), ("vllm", "503 Service Unavailable")])
async def test_another_error_of_the_page_is_no_loading(serve: Serve, kind: str, status: str) -> None:
    """The negative of the one above: only this engine's 503 means it."""
    paths = ("/metrics", "/v1/models", "/v1/completions")
    found = await examine(serve, dict.fromkeys(paths, response("", status=status)), kind=kind)
    assert not found.loading
    assert (found.level, found.exit_code) == ("critical", 3)


async def test_a_server_without_completions_is_told_to_give_a_request_and_is_not_called_broken(serve: Serve) -> None:
    page = (DATA / "llamacpp-0c1e57098-idle-after.prom").read_text()
    answers = {"/metrics": response(page), "/v1/models": models("llamacpp"), "/v1/completions": NOT_SUPPORTED}
    found = await examine(serve, answers)
    assert (found.exit_code, found.level) == (1, "warning"), text(found)
    assert "HTTP 501" in warnings(found)
    assert "active_probe_path" in warnings(found)
