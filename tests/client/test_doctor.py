"""What doctor says about an engine, from a healthy one to an address where nobody is."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.client.servers import Recorder, Serve, answering, read_request, response, wait_for_ever

from enginewatch.client import doctor
from enginewatch.client.diagnosis import Diagnosis, Finding, worst
from enginewatch.client.doctor import diagnose, render_text, to_json
from enginewatch.client.target import Target
from enginewatch.core.events import Scraped
from enginewatch.core.exposition import PageReader
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines.profile import Role

PATIENT = Settings(active_probe_timeout_sec=20, metrics_timeout_sec=20)
HASTY = Settings(active_probe_timeout_sec=0.4, metrics_timeout_sec=1.0)
"""For engines that leave something without an answer."""
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SETTLE_SEC", (0.0, 0.05))


class FakeEngine:
    """A vLLM whose counters move when a canary is answered; each core can hang for itself."""

    def __init__(self, cores: int = 1) -> None:
        self.tokens = dict.fromkeys((str(core) for core in range(cores)), 100)
        self.hung: set[str] = set()
        self.busy: set[str] = set()
        self.moves = True
        self.page: Callable[[], bytes] = self.own_page
        self.paths: dict[str, bytes] = {
            "/v1/models": response(json.dumps({"data": [{"id": "tiny", "owned_by": "vllm"}]})),
            "/version": response('{"version": "0.32.0"}'),
        }
        self.canary_answer = response(
            json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": "length"}]}),
        )
        self.start_time: float | None = 1795976293.83
        self.canaries: list[bytes] = []

    def own_page(self) -> bytes:
        lines = ["# TYPE vllm:generation_tokens counter"]
        for core, tokens in self.tokens.items():
            if core in self.busy:
                self.tokens[core] += 7
            lines.append(f'vllm:generation_tokens_total{{engine="{core}"}} {tokens}')
            lines.append(f'vllm:num_requests_running{{engine="{core}"}} {float(core in self.busy)}')
            lines.append(f'vllm:num_requests_waiting{{engine="{core}"}} 0.0')
        if self.start_time is not None:
            lines.append(f"process_start_time_seconds {self.start_time}")
        return response("\n".join(lines) + "\n")

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        method, path = request.decode().split(" ")[:2]
        if path == "/metrics":
            writer.write(self.page())
        elif method == "POST":
            self.canaries.append(request)
            core = "0"
            for line in request.decode().split("\r\n"):
                if line.startswith("X-data-parallel-rank: "):
                    core = line.rpartition(" ")[2]
            if core in self.hung:
                await reader.read()
                return
            self.tokens[core] += self.moves
            writer.write(self.canary_answer)
        else:
            writer.write(self.paths.get(path, response("", status="404 Not Found")))
        await writer.drain()


async def examine(
    url: str, *, kind: str = "auto", role: Role | None = None, settings: Settings = PATIENT, **target: Any
) -> Diagnosis:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DESCRIBE_TIMEOUT_SEC", "FLAGS_TIMEOUT_SEC"):
            patch.setattr(doctor, name, 0.5 if settings is HASTY else 20.0)
        return await diagnose(Target.parse(url, **target), kind=kind, role=role, settings=settings)


def said(found: Diagnosis, level: str | None = None) -> str:
    return "\n".join(
        f"{finding.what} {finding.fix}" for finding in found.findings if level is None or finding.level == level
    )


# --- engines that are well ------------------------------------------------------------------------------------------


async def test_a_healthy_engine_has_nothing_to_fix(serve: Serve) -> None:
    found = await examine(await serve(FakeEngine()))
    assert (found.level, found.exit_code) == ("ok", 0)
    assert (found.engine, found.version, found.model, found.engine_from) == ("vllm", "0.32.0", "tiny", "page")
    assert found.identity is not None
    assert (found.identity.source, found.identity.started_at) == ("process_start_time", "2026-11-29T18:18:13Z")
    assert (found.identity.engine_id, found.identity.missing) == ("pst-1795976293.83", None)
    assert "(process_start_time). It survives a restart of the sidecar." in said(found, "ok")
    assert found.canary is not None
    assert found.canary.outcome == "ok"
    (core,) = found.cores
    assert [(leg.name, leg.moved) for leg in core.legs] == [("generation_tokens", True)]
    assert "kv_cache_usage" in core.missing_legs
    assert (core.running, core.waiting) == (0.0, 0.0)


async def test_each_of_several_cores_gets_its_canary(serve: Serve) -> None:
    engine = FakeEngine(cores=3)
    found = await examine(await serve(engine))
    assert found.level == "ok"
    assert found.can_aim
    assert [core.canary.outcome for core in found.cores if core.canary] == ["ok", "ok", "ok"]
    assert "3 of 3 cores" in said(found)
    assert len(engine.canaries) == 3


async def test_a_real_vllm_page_is_read_as_the_sidecar_reads_it(serve: Serve) -> None:
    engine = FakeEngine()
    page = response((DATA / "vllm-0.32.0-single-decoding.prom").read_bytes())
    engine.page = lambda: page
    found = await examine(await serve(engine))
    (core,) = found.cores
    assert {leg.name for leg in core.legs} == {
        "generation_tokens",
        "prompt_tokens",
        "iterations",
        "requests_finished",
        "kv_cache_usage",
    }
    assert core.missing_legs == ()
    # The page is a still: the canary was answered and nothing moved.
    assert "no leg moved" in said(found, "warning")


async def test_a_real_sglang_page_tells_engine_and_role(serve: Serve) -> None:
    page = (DATA / "sglang-0.5.23-collector-generated.prom").read_bytes()
    found = await examine(await serve(Recorder({"/metrics": response(page)})))
    assert (found.engine, found.engine_from) == ("sglang", "page")
    assert (found.role, found.role_from) == ("agg", "engine")
    assert found.identity is not None
    assert (found.identity.source, found.identity.started_at) == ("startup_fingerprint", None)
    assert re.fullmatch(r"sfp-[0-9a-f]{12}", found.identity.engine_id or "")
    assert "(startup_fingerprint). It survives a restart of the sidecar." in said(found, "ok")
    assert any(core.heartbeat for core in found.cores)
    assert "LOG_FILE" in said(found, "ok")


@pytest.mark.parametrize(("role", "is_wrong"), [("agg", True), ("prefill", True), ("decode", False), (None, False)])
async def test_a_role_that_the_engine_contradicts_is_told(serve: Serve, role: Role | None, is_wrong: bool) -> None:
    answers = {
        "/metrics": response((DATA / "sglang-0.5.23-collector-generated.prom").read_bytes()),
        "/server_info": response('{"version": "0.5.23", "disaggregation_mode": "decode"}'),
        "/v1/models": response(json.dumps({"data": [{"id": "tiny", "owned_by": "sglang"}]})),
    }
    engine = Recorder(answers)
    found = await examine(await serve(engine), role=role)
    assert (found.role_told, found.version, found.model) == ("decode", "0.5.23", "tiny")
    assert ("Set ENGINE_ROLE=decode" in said(found, "warning")) == is_wrong
    canaries = [request for request in engine.requests if request.startswith(b"POST /generate ")]
    assert canaries
    assert all(b"bootstrap_host" in canary for canary in canaries), "no other can be answered"


async def test_an_engine_in_no_single_role_is_sent_no_canary_of_one(serve: Serve) -> None:
    page = (DATA / "sglang-0.5.23-collector-generated.prom").read_bytes()
    engine = Recorder({"/metrics": response(page.replace(b'engine_type="unified"', b'engine_type="dynamic"'))})
    found = await examine(await serve(engine))
    assert (found.role, found.role_from, found.role_told) == ("agg", "default", "dynamic")
    assert "no single role" in said(found, "warning")
    assert not [request for request in engine.requests if request.startswith(b"POST ")]


# --- engines that are not -------------------------------------------------------------------------------------------


async def test_a_hung_engine_is_critical(serve: Serve) -> None:
    engine = FakeEngine()
    engine.hung = {"0"}
    found = await examine(await serve(engine), settings=HASTY)
    assert (found.level, found.exit_code) == ("critical", 3)
    assert "no counter moved" in said(found, "critical")


async def test_one_hung_core_among_several_is_named(serve: Serve) -> None:
    engine = FakeEngine(cores=3)
    engine.hung = {"1"}
    found = await examine(await serve(engine), settings=HASTY)
    assert found.level == "critical"
    assert "core 1" in said(found, "critical")
    assert "core 2" not in said(found, "critical")


async def test_a_hung_core_is_found_although_the_version_is_not_told(serve: Serve) -> None:
    engine = FakeEngine(cores=2)
    engine.hung = {"1"}
    del engine.paths["/version"]
    found = await examine(await serve(engine), settings=HASTY)
    assert not found.can_aim
    assert "cannot be aimed" in said(found, "warning")
    assert "core 1" in said(found, "critical")


async def test_a_busy_engine_that_keeps_the_canary_waiting_is_not_called_hung(serve: Serve) -> None:
    engine = FakeEngine()
    engine.hung, engine.busy = {"0"}, {"0"}
    found = await examine(await serve(engine), settings=HASTY)
    assert found.level == "warning"
    assert "busy, not hung" in said(found, "warning")


async def test_a_paused_engine_is_left_alone(serve: Serve) -> None:
    engine = FakeEngine()
    engine.hung = {"0"}
    engine.paths["/is_paused"] = response('{"is_paused": true}')
    found = await examine(await serve(engine))
    assert found.pause == "paused"
    assert found.level == "warning"
    assert engine.canaries == []


async def test_a_sleep_told_by_the_page_is_seen_too(serve: Serve) -> None:
    engine = FakeEngine()
    asleep = engine.own_page() + b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
    engine.page = lambda: response(asleep.partition(b"\r\n\r\n")[2])
    found = await examine(await serve(engine))
    assert found.pause == "sleeping"
    assert engine.canaries == []


async def test_an_older_version_of_several_cores_cannot_be_aimed_at(serve: Serve) -> None:
    engine = FakeEngine(cores=2)
    engine.paths["/version"] = response('{"version": "0.10.2"}')
    found = await examine(await serve(engine))
    assert found.canary is not None
    assert not found.canary.aimed
    assert len(engine.canaries) == 2
    assert "from 0.11.1 on" in said(found, "warning")


async def test_a_page_without_legs_names_the_flag(serve: Serve) -> None:
    engine = FakeEngine()
    engine.page = lambda: response("process_start_time_seconds 1.0\n")
    found = await examine(await serve(engine))
    assert (found.engine, found.engine_from) == ("vllm", "answers")
    assert "no progress legs" in said(found, "warning")
    assert "--disable-log-stats" in said(found, "warning")


async def test_several_api_servers_are_only_observed(serve: Serve) -> None:
    engine = FakeEngine()
    engine.start_time = None
    found = await examine(await serve(engine))
    assert found.identity is not None
    assert (found.identity.source, found.identity.missing) == ("observed", "process_start_time")
    assert found.identity.engine_id is None, "each sidecar makes up its own"
    warned = said(found, "warning")
    assert "a restart of the sidecar renews it" in warned
    assert "--api-server-count 1" in warned
    assert "IDENTITY_KV_BOOTSTRAP_URL" in warned
    assert "process_start_time is not on the page" in render_text(found, width=200)


@pytest.mark.parametrize("anchor", ["absent", "zero"])
async def test_a_sglang_page_without_its_anchor_has_no_identity_yet_and_is_told_what_gives_one(
    serve: Serve, anchor: str
) -> None:
    page = (DATA / "sglang-0.5.23-collector-generated.prom").read_text()
    anchors = [line for line in page.splitlines() if 'phase="load_weight"' in line]
    for line in anchors:
        page = page.replace(line, "" if anchor == "absent" else f"{line.rpartition(' ')[0]} 0.0")
    assert len(anchors) == 1
    found = await examine(await serve(Recorder({"/metrics": response(page)})))
    assert found.identity is not None
    assert (found.identity.source, found.identity.missing) == ("observed", "startup_fingerprint")
    warned = said(found, "warning")
    assert "GET /engine stays 503 until it does" in warned
    assert "Look again in a minute. Run SGLang 0.5.18 or later" in warned
    assert "startup_fingerprint is not on the page" in render_text(found, width=200)


async def test_the_id_that_doctor_names_is_the_one_that_a_sidecar_publishes(serve: Serve) -> None:
    text = (DATA / "sglang-0.5.23-collector-generated.prom").read_text()
    found = await examine(await serve(Recorder({"/metrics": response(text)})))
    watch = Watch(Settings(), now=0.0)
    reader = PageReader(watch.names)
    reader.feed(text.encode())
    watch.handle(Scraped(0.0, reader.finish()), 0.1)
    assert found.identity is not None
    assert watch.identity is not None
    assert (watch.identity.engine_id, watch.identity.source) == (found.identity.engine_id, found.identity.source)


async def test_an_impossible_start_time_is_no_identity(serve: Serve) -> None:
    engine = FakeEngine()
    engine.start_time = 1e300
    found = await examine(await serve(engine))
    assert found.identity is not None
    assert found.identity.source == "observed"


async def test_sglang_without_its_flag_is_recognised_and_told_the_flag(serve: Serve) -> None:
    models = response(json.dumps({"data": [{"id": "tiny", "owned_by": "sglang"}]}))
    found = await examine(await serve(Recorder({"/v1/models": models})))
    assert found.engine == "sglang"
    assert "--enable-metrics" in said(found, "warning")


async def test_a_silent_scheduler_is_told_by_the_version_that_does_not_come(serve: Serve) -> None:
    page = (DATA / "sglang-0.5.23-collector-generated.prom").read_bytes()

    async def hung(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        if b" /metrics " in request:
            writer.write(response(page))
        elif b"server_info" in request or request.startswith(b"POST"):
            await reader.read()
        else:
            writer.write(response("", status="404 Not Found"))

    found = await examine(await serve(hung), settings=HASTY)
    assert found.unanswered == "/server_info"
    assert "/server_info gave no answer" in said(found, "unknown")
    assert "Nothing tells a pause from a hang" not in said(found), "that holds for some versions only"
    assert found.level == "critical"


@pytest.mark.parametrize("given", [None, "wrong"])
async def test_a_sglang_whose_key_is_missing_asks_for_nothing_but_the_key(
    serve: Serve, tmp_path: Path, given: str | None
) -> None:
    """Its page needs none, everything else does."""
    refused = response("", status="401 Unauthorized")
    paths = ("/v1/models", "/v1/completions", "/generate", "/server_info", "/get_server_info")
    page = (DATA / "sglang-0.5.23-collector-generated.prom").read_bytes()
    key = tmp_path / "key"
    key.write_text("wrong")
    url = await serve(Recorder({"/metrics": response(page)} | dict.fromkeys(paths, refused)))
    found = await examine(url, api_key_file=str(key) if given else "")
    assert (found.level, found.exit_code) == ("warning", 1), said(found)
    assert found.guarded == "/server_info"
    assert "the version is not known" in said(found, "warning")
    assert "a pause cannot be told from a hang" in said(found, "warning")
    assert "when the version is told" not in said(found)
    about_it = [finding.fix for finding in found.findings if "/server_info" in finding.what or "401" in finding.what]
    assert len(about_it) == 2
    assert len(set(about_it)) == 1, "one remedy, in the same words"
    assert "ENGINE_API_KEY_FILE" in about_it[0]
    assert about_it[0].startswith("Correct" if given else "Put")


async def test_several_cores_that_cannot_be_aimed_at_for_want_of_a_key_ask_for_the_key(serve: Serve) -> None:
    engine = FakeEngine(cores=2)
    engine.paths["/version"] = response("", status="401 Unauthorized")
    found = await examine(await serve(engine))
    assert "a canary cannot be aimed" in said(found, "warning")
    assert "can be aimed at." not in said(found), "another version is no remedy"
    assert [finding.fix for finding in found.findings if "aimed" in finding.what] == [
        "Put the key into a file and name it in ENGINE_API_KEY_FILE."
    ]


async def test_a_server_that_hides_everything_behind_its_key_is_asked_for_with_it(serve: Serve) -> None:
    found = await examine(await serve(answering(response("", status="401 Unauthorized"))))
    assert (found.level, found.exit_code) == ("unknown", 4), "it may be anybody"
    assert "API key" in said(found, "unknown")
    assert "own address" not in said(found, "unknown")


@pytest.mark.parametrize(
    ("answer", "level", "says"),
    [
        (response("", status="401 Unauthorized"), "warning", "ENGINE_API_KEY_FILE"),
        (response("", status="404 Not Found"), "warning", "active_probe_path"),
        (response("", status="400 Bad Request"), "warning", "ENGINE_ROLE"),
        (response("", status="429 Too Many"), "warning", "queue is full"),
        (response("", status="500 Oops"), "critical", "engine's log"),
        (b"", "critical", "is it exiting"),
    ],
)
async def test_each_canary_that_is_not_answered_has_a_way_on(
    serve: Serve, answer: bytes, level: str, says: str
) -> None:
    engine = FakeEngine()
    engine.canary_answer = answer
    found = await examine(await serve(engine))
    assert found.level == level
    assert says in said(found, level)


@pytest.mark.parametrize(
    ("answer", "with_legs", "without_legs"),
    [
        (response("", status="401 Unauthorized"), "seen only under load", "no hang is seen at all"),
        (None, "no counter moved", "nothing else tells"),
    ],
)
async def test_what_a_lost_canary_means_depends_on_the_page(
    serve: Serve, answer: bytes | None, with_legs: str, without_legs: str
) -> None:
    engine = FakeEngine()
    if answer is None:
        engine.hung = {"0"}
    else:
        engine.canary_answer = answer
    assert with_legs in said(await examine(await serve(engine), settings=HASTY))
    engine.page = lambda: response("process_start_time_seconds 1.0\n")
    found = said(await examine(await serve(engine), settings=HASTY))
    assert without_legs in found
    assert with_legs not in found


async def test_a_canary_that_moves_nothing_is_doubtful(serve: Serve) -> None:
    engine = FakeEngine()
    engine.moves = False
    found = await examine(await serve(engine))
    assert found.level == "warning"
    assert "no leg moved" in said(found, "warning")


@pytest.mark.parametrize(
    ("page", "level", "says"),
    [
        (response("", status="401 Unauthorized"), "warning", "ENGINE_API_KEY_FILE"),
        (response("", status="503 Loading"), "critical", "still loading"),
        (response("", status="302 Found", headers="Location: http://elsewhere.invalid/\r\n"), "warning", "ENGINE_URL"),
        (response("<html></html>"), "warning", "a proxy or another server"),
        (response('[{"iter": 1}]'), "warning", "/prometheus/metrics"),
        (response("hello"), "warning", "METRICS_PATH"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n# cut off", "critical", "proxy in between"),
        (b"", "critical", "TLS port"),
    ],
)
async def test_each_page_that_is_none_has_a_way_on(serve: Serve, page: bytes, level: str, says: str) -> None:
    engine = FakeEngine()
    engine.page = lambda: page
    found = await examine(await serve(engine))
    assert found.level == level
    assert says in said(found, level)


async def test_a_server_that_is_no_engine_is_unknown(serve: Serve) -> None:
    html = response("<html></html>", headers="Content-Type: text/html\r\n")
    found = await examine(await serve(answering(html)))
    assert (found.level, found.exit_code) == ("unknown", 4)
    assert "Nothing tells which engine this is" in said(found, "unknown")


async def test_an_engine_of_no_known_kind_that_answers_its_canary_is_a_warning(serve: Serve) -> None:
    engine = FakeEngine()
    engine.page = lambda: response("", status="404 Not Found")
    engine.paths["/v1/models"] = response(json.dumps({"data": [{"id": "tiny", "owned_by": "somebody"}]}))
    found = await examine(await serve(engine))
    assert (found.level, found.exit_code) == ("warning", 1)


async def test_an_engine_that_echoes_the_key_does_not_get_it_shown(serve: Serve, tmp_path: Path) -> None:
    key = "hunter2-very-secret"
    (tmp_path / "key").write_text(key)
    engine = FakeEngine()
    engine.tokens = {key: 1}
    engine.paths["/version"] = response(json.dumps({"version": f"1.0-{key}"}))
    engine.paths["/v1/models"] = response(json.dumps({"data": [{"id": f"m-{key}", "owned_by": "vllm"}]}))
    engine.paths[f"/{key}"] = engine.own_page()
    engine.page = lambda: response("", status="307 Temporary Redirect", headers=f"Location: /{key}\r\n")
    found = await examine(await serve(engine), api_key_file=str(tmp_path / "key"))
    shown = render_text(found) + to_json(found).decode()
    assert key not in shown
    assert shown.count("<API key>") >= 6, "version, model, core and path, each at least once"


async def test_a_redirected_page_names_the_path_to_set(serve: Serve) -> None:
    engine = FakeEngine()
    engine.paths["/metrics/"] = engine.own_page()
    engine.page = lambda: response("", status="307 Temporary Redirect", headers="Location: /metrics/\r\n")
    assert "METRICS_PATH=/metrics/" in said(await examine(await serve(engine)), "warning")


async def test_an_engine_given_as_another_one_is_told(serve: Serve) -> None:
    found = await examine(await serve(FakeEngine()), kind="sglang")
    assert "ENGINE_KIND=vllm" in said(found, "warning")
    assert "--enable-metrics" not in said(found), "it has its page: what SGLang would need is no remedy"
    assert (found.level, found.exit_code) == ("warning", 1)


@pytest.mark.parametrize("given", ["vllm", "sglang", "llamacpp"])
async def test_an_engine_without_a_page_that_is_given_as_another_one_is_told_by_its_answers(
    serve: Serve, given: str
) -> None:
    found = await examine(await serve(FakeTrtllm()), kind=given)
    assert (found.page_of, found.answers_of) == (None, "trtllm")
    assert f"given as {given}, but its answer to GET /v1/models is that of trtllm" in said(found, "warning")
    assert "ENGINE_KIND=trtllm" in said(found, "warning")
    assert ", as given." not in said(found)
    assert (found.level, found.exit_code) == ("warning", 1)


async def test_what_the_engine_would_need_as_which_it_was_given_is_no_remedy(serve: Serve) -> None:
    found = await examine(await serve(FakeEngine()), kind="trtllm")
    assert "ENGINE_KIND=vllm" in said(found, "warning")
    assert "return_perf_metrics" not in said(found)


async def test_an_answer_that_anybody_could_give_contradicts_nobody(serve: Serve) -> None:
    """A proxy that hides /v1/models leaves /version, which TensorRT-LLM has as well as vLLM."""
    engine = FakeTrtllm()
    del engine.paths["/v1/models"]
    found = await examine(await serve(engine), kind="trtllm")
    assert found.answers_of is None
    assert "ENGINE_KIND=" not in said(found)
    assert "as given" in said(found, "ok")


async def test_a_page_of_the_given_engine_outweighs_what_its_front_says(serve: Serve) -> None:
    engine = FakeEngine()
    engine.paths["/v1/models"] = response(json.dumps({"data": [{"id": "tiny", "owned_by": "sglang"}]}))
    found = await examine(await serve(engine), kind="vllm")
    assert "ENGINE_KIND=" not in said(found)


async def test_a_hang_of_an_engine_given_as_another_one_is_critical_all_the_same(serve: Serve) -> None:
    engine = FakeEngine()
    page = (DATA / "sglang-0.5.23-collector-generated.prom").read_bytes()
    engine.page = lambda: response(page)
    engine.hung = {"0"}
    found = await examine(await serve(engine), kind="vllm", settings=HASTY)
    assert "ENGINE_KIND=sglang" in said(found, "warning")
    assert found.level == "critical"


async def test_an_unreadable_key_file_is_told(serve: Serve, tmp_path: Path) -> None:
    missing = tmp_path / "key"
    found = await examine(await serve(FakeEngine()), api_key_file=str(missing))
    assert found.level == "warning"
    assert str(missing) in said(found, "warning")


async def test_a_frozen_front_end_is_critical(serve: Serve) -> None:
    found = await examine(await serve(wait_for_ever), settings=HASTY)
    assert found.level == "critical"
    assert "metrics_timeout_sec" in said(found, "critical")


async def test_nobody_listening_is_critical(unused_url: str) -> None:
    found = await examine(unused_url)
    assert (found.exit_code, found.cores, found.canary) == (3, (), None)
    assert "ENGINE_URL" in said(found, "critical")


async def test_an_engine_that_could_not_be_asked_is_unknown_not_critical() -> None:
    found = await examine("http://engine.invalid:8000")
    assert (found.level, found.exit_code) == ("unknown", 4)


async def test_an_unknown_engine_is_judged_by_its_canary_alone(serve: Serve) -> None:
    found = await examine(await serve(answering(response("some_metric 1\n"))))
    assert found.engine == "unknown"
    assert "ENGINE_KIND" in said(found, "warning")


async def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no engine kind 'tgi'"):
        await examine("http://127.0.0.1:1", kind="tgi")


async def test_canaries_switched_off_are_not_sent(serve: Serve) -> None:
    engine = FakeEngine()
    settings = replace(PATIENT, active_probe_enabled=False)
    found = await diagnose(Target.parse(await serve(engine)), settings=settings)
    assert found.canary is None
    assert engine.canaries == []


# --- how it is told -------------------------------------------------------------------------------------------------


def test_not_to_know_outranks_a_warning_and_nothing_outranks_critical() -> None:
    levels = [Finding(level, "") for level in ("ok", "warning", "unknown", "critical")]
    assert worst(()) == "ok"
    assert worst(tuple(levels[:2])) == "warning"
    assert worst(tuple(levels[:3])) == "unknown"
    assert worst(tuple(levels)) == "critical"


async def test_the_diagnosis_is_json_and_text(serve: Serve) -> None:
    found = await examine(await serve(FakeEngine(cores=2)))
    as_json = json.loads(to_json(found))
    assert as_json["engine"] == "vllm"
    assert as_json["cores"][1]["legs"][0] == {
        "name": "generation_tokens",
        "kind": "counter",
        "grain": "step",
        "value": 101.0,
        "moved": True,
    }
    assert as_json["findings"][0].keys() == {"level", "what", "fix"}
    assert (as_json["level"], as_json["exit_code"]) == ("ok", 0)
    text = render_text(found, width=80)
    assert "core 1" in text
    assert "ok (exit code 0)" in text
    assert max(len(line) for line in text.splitlines()) <= 80


async def test_every_finding_that_is_not_ok_says_what_to_do(serve: Serve, unused_url: str) -> None:
    hung = FakeEngine(cores=2)
    hung.hung = {"0", "1"}
    paused = FakeEngine()
    paused.paths["/is_paused"] = response('{"is_paused": true}')
    for url in (await serve(hung), await serve(paused), await serve(wait_for_ever), unused_url):
        found = await examine(url, settings=HASTY)
        assert all(finding.fix for finding in found.findings if finding.level != "ok")
        assert render_text(found)


# --- TensorRT-LLM ---------------------------------------------------------------------------------------------------


class FakeTrtllm(FakeEngine):
    """A TensorRT-LLM: a page that moves when a request ends, if it has one, and a list that reading empties."""

    def __init__(self, *, has_page: bool = True, writes_statistics: bool = False) -> None:
        super().__init__()
        self.finished = 0
        self.has_page, self.writes_statistics = has_page, writes_statistics
        self.entries: list[dict[str, int]] = []
        self.reads = 0
        self.page = self.read_list
        self.paths = {
            "/v1/models": response(json.dumps({"data": [{"id": "tiny", "owned_by": "tensorrt_llm"}]})),
            "/version": response('{"version": "1.2.0"}'),
        }
        self._turn(0)

    def read_list(self) -> bytes:
        self.reads += 1
        body, self.entries = json.dumps(self.entries), []
        return response(body, headers="Content-Type: application/json\r\n")

    def _turn(self, finished: int) -> None:
        self.finished = finished
        if self.writes_statistics:
            self.entries.append({"iter": 10 + finished, "numActiveRequests": 0, "numQueuedRequests": 0})
        if self.has_page:
            lines = "".join(
                f'trtllm_{name}{{model_name="tiny"{more}}} {finished * 3}\n'
                for name, more in (("request_success_total", ',finished_reason="length"'), ("prompt_tokens_total", ""))
            )
            self.paths["/prometheus/metrics"] = response(lines if finished else "# nothing yet\n")

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = len(self.canaries)
        await super().__call__(reader, writer)
        if len(self.canaries) > before and b" 200 " in self.canary_answer:
            self._turn(self.finished + 1)


@pytest.mark.parametrize("kind", ["auto", "trtllm"])
async def test_its_page_is_found_and_what_its_grain_means_is_said(serve: Serve, kind: str) -> None:
    engine = FakeTrtllm()
    engine._turn(1)
    found = await examine(await serve(engine), kind=kind)
    assert (found.engine, found.page.path, found.page.failure) == ("trtllm", "/prometheus/metrics", None)
    (core,) = found.cores
    assert {leg.name: (leg.grain, leg.moved) for leg in core.legs} == {
        "requests_finished": ("request", True),
        "prompt_tokens": ("request", True),
    }
    assert "only when a request ends" in said(found, "warning")
    assert "after 120 s at the earliest" in said(found, "warning")
    assert "TRTLLM_JSON_STATS=1" in said(found)
    assert "only where the page is switched off" in said(found)
    assert "loses what the sidecar reads" in said(found)
    assert "nothing makes it" in said(found), "there is no remedy for its identity"
    assert engine.reads == 0
    assert found.level == "warning"


async def test_before_its_first_request_the_canary_brings_the_legs(serve: Serve) -> None:
    found = await examine(await serve(FakeTrtllm()))
    (core,) = found.cores
    assert all(leg.moved for leg in core.legs)
    assert "no leg moved" not in said(found)


async def test_a_page_that_has_no_legs_yet_is_not_called_switched_off(serve: Serve) -> None:
    """The canary of the wrong role is refused, and so brings no legs."""
    engine = FakeTrtllm()
    engine.canary_answer = response("", status="400 Bad Request")
    found = await examine(await serve(engine))
    assert found.page.failure is None
    assert "with the first request that ends" in said(found, "warning")
    assert "return_perf_metrics: true" not in said(found)


async def test_without_a_page_it_is_said_how_to_get_one_and_that_there_is_no_identity(serve: Serve) -> None:
    engine = FakeTrtllm(has_page=False)
    found = await examine(await serve(engine))
    assert (found.page.path, found.page.failure, found.identity) == ("/prometheus/metrics", "http_404", None)
    assert "return_perf_metrics: true" in said(found, "warning")
    assert "No identity" in said(found, "warning")
    assert "enable_iter_perf_stats: true" in said(found, "ok"), "what its statistics want, before anybody tries them"
    assert "as long as this page is not switched on" in said(found, "ok")
    assert found.canary is not None
    assert found.canary.outcome == "ok"
    assert engine.reads == 0, "not even to look what it is"


async def test_a_page_that_dynamo_passes_on_stays_where_it_is(serve: Serve) -> None:
    engine = FakeTrtllm()
    engine.paths["/v1/models"] = response("", status="404 Not Found")
    engine.page = lambda: engine.paths["/prometheus/metrics"]
    engine._turn(1)
    found = await examine(await serve(engine))
    assert (found.engine, found.engine_from, found.page.path) == ("trtllm", "page", "/metrics")
    assert found.cores[0].legs


async def test_asked_for_its_statistics_are_read_and_their_cost_is_said(serve: Serve) -> None:
    engine = FakeTrtllm(has_page=False, writes_statistics=True)
    url = await serve(engine)
    found = await diagnose(Target.parse(url), settings=PATIENT, json_statistics=True)
    assert (found.page.path, found.page.failure) == ("/metrics", None)
    (core,) = found.cores
    assert [(leg.name, leg.grain, leg.moved) for leg in core.legs] == [("iterations", "step", True)]
    assert "is gone" in said(found, "warning")
    assert found.identity is not None
    assert engine.reads > 0


async def test_statistics_beside_a_page_are_no_finer_than_the_page(serve: Serve) -> None:
    url = await serve(FakeTrtllm(writes_statistics=True))
    found = await diagnose(Target.parse(url), settings=PATIENT, json_statistics=True)
    assert found.cores[0].legs[0].grain == "request"
    assert "without return_perf_metrics" in said(found, "warning")


async def test_statistics_that_are_always_empty_are_said_to_be_off(serve: Serve) -> None:
    url = await serve(FakeTrtllm(has_page=False))
    found = await diagnose(Target.parse(url), settings=PATIENT, json_statistics=True)
    assert found.cores == ()
    assert "enable_iter_perf_stats: true" in said(found, "warning")
