"""The worker's role: where it comes from, and that a canary of the wrong one never adds up to a hang.

The SGLang of these tests answers a canary only in the role that it works as; another waits for a partner for ever.
"""

from __future__ import annotations

import pytest
from direct_watch import DirectWatch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import CanaryDone, EngineDescribed, Log, Outcome
from enginewatch.core.role import WorkerRole, role_on_page
from enginewatch.core.settings import Settings
from enginewatch.engines import PROFILES
from enginewatch.engines.profile import ROLES, Role, ToldRole

OWN_BODY = '{"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "bootstrap_host": "2.2.2.2"}'
SGLANG = PROFILES["sglang"]
HONEST: dict[Role, str] = {"agg": "unified", "prefill": "prefill", "decode": "decode"}


def worker(works_as: Role, *, page: str | None = None, says: ToldRole | None = None) -> ScriptedSGLang:
    """An idle worker; `page` is what its series say of its role, `says` what its scheduler does."""
    engine = ScriptedSGLang()
    engine.works_as, engine.engine_type, engine.says_role = works_as, page, says
    return engine


def watch(engine: ScriptedEngine, *, role: Role | None = None, kind: str = "sglang", **changes: object) -> VirtualShell:
    return VirtualShell(engine, Settings(warmup_sec=0, **changes), kind=kind, role=role)  # type: ignore[arg-type]


def _restart(engine: ScriptedEngine, **changes: object) -> None:
    engine.restart()
    for name, value in changes.items():
        setattr(engine, name, value)


def outcomes(shell: VirtualShell) -> set[Outcome]:
    return {outcome for _, _, outcome in shell.results}


def logged(shell: VirtualShell, words: str) -> list[Log]:
    return [line for line in shell.logs if words in line.event]


# --- the engine tells it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["auto", "sglang"])
@pytest.mark.parametrize("works_as", ["prefill", "decode"])
def test_the_first_canary_already_goes_out_in_the_role_that_the_page_tells(works_as: Role, kind: str) -> None:
    shell = watch(worker(works_as, page=works_as), kind=kind).run(300)
    assert (shell.watch.role, shell.watch.canary_role) == (works_as, works_as)
    assert outcomes(shell) == {Outcome.OK}
    assert shell.abandoned == []
    assert [line.level for line in logged(shell, f"its role is {works_as}")] == ["info"]


@pytest.mark.parametrize("works_as", ["prefill", "decode"])
def test_the_scheduler_tells_it_where_the_page_does_not(works_as: Role) -> None:
    shell = watch(worker(works_as, says=works_as)).run(300)
    assert shell.acted() == []
    assert shell.watch.role == works_as
    assert outcomes(shell) == {Outcome.OK}


@pytest.mark.parametrize("page", [None, "unified"])
def test_a_late_answer_of_the_scheduler_costs_no_healthy_worker_its_life(page: str | None) -> None:
    """Releases whose series have no moe_ep_rank call every worker unified."""
    engine = worker("decode", page=page, says="decode")
    engine.has_ep_rank, engine.describe_sec = False, 200.0
    shell = watch(engine).run(190)
    assert outcomes(shell) == {Outcome.TIMEOUT}
    assert (shell.acted(), shell.state) == ([], "idle")
    assert len(logged(shell, "counts for nothing")) == 1
    shell.run(400)
    assert shell.acted() == []
    assert shell.state == "stall-active-ok"


@pytest.mark.parametrize("page", [None, "decode"])
def test_a_worker_whose_role_is_known_is_still_found_when_it_hangs(page: str | None) -> None:
    engine = worker("decode", page=page, says=None if page else "decode")
    engine.at(100, ScriptedEngine.hang)
    assert watch(engine).run(200).state == "stall-hang"


def test_one_that_never_tells_is_found_too_once_it_has_answered_a_canary() -> None:
    engine = worker("agg")
    engine.at(100, ScriptedEngine.hang)
    assert watch(engine).run(200).state == "stall-hang"


def test_a_page_that_says_unified_beside_a_rank_is_believed_and_a_hang_from_the_beginning_is_found() -> None:
    engine = worker("agg", page="unified")
    assert watch(engine.hang()).run(100).state == "stall-hang"


def test_a_hang_under_load_is_found_although_nothing_tells_the_role() -> None:
    """No canary counts, so it takes as long as without canaries: the gauges may be 30 s old."""
    engine = worker("decode")
    engine.busy().hang()
    shell = watch(engine).run(200)
    assert shell.state == "stall-hang"
    assert "no usable canary" in shell.watch.verdict.reason


def test_another_process_may_have_another_role() -> None:
    engine = worker("decode", page="decode")
    engine.at(100, lambda e: e.fail("refused"))
    engine.at(110, lambda e: _restart(e, works_as="prefill", engine_type="prefill"))
    shell = watch(engine).run(300)
    assert shell.watch.role == "prefill"
    assert outcomes(shell) == {Outcome.OK}


def test_what_a_process_said_is_not_held_against_the_next_one() -> None:
    engine = worker("decode", says="decode")
    engine.at(100, lambda e: e.fail("refused"))
    engine.at(110, lambda e: _restart(e, works_as="agg", says_role=None))
    assert watch(engine).run(300).acted() == []


def test_canaries_that_failed_before_the_role_was_known_count_for_nothing() -> None:
    """Also where they counted as they failed: the operator's word was all there was."""
    direct = DirectWatch(Settings(warmup_sec=0, stall_sec=20), kind="sglang", role="agg")
    page = {'sglang:realtime_tokens_total{mode="decode"}': 5.0, "sglang:num_running_reqs": 0.0}
    for t in range(0, 60, 5):
        direct.page(float(t), page)
        if direct.watch._desk.in_flight is not None:
            direct.canary(t + 4.9, Outcome.TIMEOUT)
        direct.page(t + 4.95, page, recheck=True)
    assert direct.state == "stall-hang"
    direct._take(EngineDescribed("sglang", "0.5.23", role="decode"), 60.0)
    assert not direct.acting
    assert direct.watch.canary_role == "decode"


def test_a_canary_under_way_is_taken_back_when_the_role_turns_out_to_be_another() -> None:
    engine = worker("decode", says="decode")
    engine.describe_sec = 2.0
    shell = watch(engine).run(30)
    assert len(shell.abandoned) == 1
    assert outcomes(shell) == {Outcome.OK}
    assert not any(isinstance(event, CanaryDone) and event.outcome is not Outcome.OK for _, event in shell.events)


@pytest.mark.parametrize(("failure", "hang"), [("http_404", "canary-hang"), ("timeout", "unreach-hang")])
@pytest.mark.parametrize(("said", "ends"), [("decode", True), ("agg", False)])
def test_nor_do_those_that_failed_without_a_page(failure: str, hang: str, said: ToldRole, ends: bool) -> None:
    direct = DirectWatch(Settings(warmup_sec=0, stall_sec=20), kind="sglang", role="agg")
    direct.page(0.0, {'sglang:realtime_tokens_total{mode="decode"}': 5.0})
    _fail_canaries(direct, failure)
    assert direct.state == hang
    direct._take(EngineDescribed("sglang", "0.5.23", role=said), 200.0)
    assert direct.acting is not ends


@pytest.mark.parametrize(("kind", "ends"), [("sglang", True), ("vllm", False)])
def test_nor_do_those_sent_before_it_was_known_that_the_engine_has_roles(kind: str, ends: bool) -> None:
    direct = DirectWatch(Settings(warmup_sec=0, stall_sec=20), kind="auto", role=None)
    _fail_canaries(direct, "http_404")
    assert direct.state == "canary-hang"
    direct._take(EngineDescribed(kind), 200.0)
    assert direct.acting is not ends


def _fail_canaries(direct: DirectWatch, failure: str) -> None:
    for t in range(1, 200, 5):
        direct.fails(float(t), failure)
        if direct.watch._desk.in_flight is not None:
            direct.canary(t + 4.0, Outcome.TIMEOUT)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ROLES),
    st.sampled_from(["honest", "unified", None]),
    st.sampled_from(["at once", "late", "never"]),
    st.sampled_from(["auto", "sglang"]),
    st.sampled_from([None, *ROLES]),
    st.lists(st.tuples(st.floats(1, 250), st.sampled_from(["busy", "idle", "restart"])), max_size=4),
)
def test_no_healthy_worker_is_ever_declared_hung(
    works_as: Role, page: str | None, says: str, kind: str, role: Role | None, life: list[tuple[float, str]]
) -> None:
    # A wrong ENGINE_ROLE that nothing contradicts in time is all there is to go by.
    assume(role in (None, works_as) or page == "honest" or says == "at once")
    engine = worker(works_as, page=HONEST[works_as] if page == "honest" else page)
    engine.has_ep_rank = page == "honest"
    engine.says_role = None if says == "never" else works_as
    engine.describe_sec = 100.0 if says == "late" else 0.01
    for t, what in life:
        engine.at(t, getattr(ScriptedEngine, what))
    assert watch(engine, role=role, kind=kind).run(300).acted() == []


def test_peer_stall_exists_in_a_role_that_the_engine_told() -> None:
    engine = worker("decode", page="decode")
    engine.queues["num_decode_transfer_queue_reqs"] = 2.0
    assert watch(engine).run(100).state == "peer-stall"


def test_without_a_page_an_sglang_is_recognised_late_and_what_failed_before_that_is_forgotten() -> None:
    engine = worker("decode", says="decode")
    engine.fail("http_404")
    engine.describe_sec = 3.0
    shell = watch(engine, kind="auto", stall_sec=4, active_probe_timeout_sec=2).run(300)
    assert shell.acted() == []
    assert shell.results[-1][2] is Outcome.OK


def test_an_engine_that_never_tells_a_role_is_judged_as_aggregated() -> None:
    engine = ScriptedEngine().hang()
    shell = VirtualShell(engine, role=None).run(100)
    assert (shell.watch.role, shell.state) == ("agg", "stall-hang")
    assert logged(shell, "role") == []


# --- the operator tells it, and is wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["decode", None])
@pytest.mark.parametrize("named", ["agg", "prefill"])
def test_a_wrong_engine_role_kills_no_healthy_worker(named: Role, page: str | None) -> None:
    shell = watch(worker("decode", page=page, says="decode"), role=named).run(300)
    assert shell.acted() == []
    assert outcomes(shell) == {Outcome.OK}
    warned = logged(shell, f"ENGINE_ROLE is {named}")
    assert [line.level for line in warned] == ["warning"]
    assert "set ENGINE_ROLE=decode" in warned[0].event


def test_the_operators_word_still_decides_whether_there_are_partners() -> None:
    engine = worker("decode", page="decode")
    engine.queues["num_decode_transfer_queue_reqs"] = 2.0
    shell = watch(engine, role="agg").run(300)
    assert shell.watch.role == "agg"
    assert "peer-stall" not in shell.states


def test_a_worker_with_a_wrong_engine_role_is_found_when_it_hangs() -> None:
    engine = worker("decode", page="decode")
    engine.at(100, ScriptedEngine.hang)
    assert watch(engine, role="agg").run(200).state == "stall-hang"


@pytest.mark.parametrize(("named", "page"), [("decode", "decode"), ("agg", "unified"), ("decode", None)])
def test_a_right_or_untold_role_is_not_warned_of(named: Role, page: str | None) -> None:
    shell = watch(worker(named, page=page), role=named).run(60)
    assert logged(shell, "ENGINE_ROLE") == []


def test_a_role_that_is_given_lets_failures_count_where_the_engine_says_nothing() -> None:
    assert watch(worker("decode").hang(), role="decode").run(100).state == "stall-hang"


def test_an_old_release_that_calls_itself_unified_contradicts_nobody() -> None:
    engine = worker("decode", page="unified")
    engine.has_ep_rank = False
    shell = watch(engine, role="decode").run(200)
    assert outcomes(shell) == {Outcome.OK}
    assert logged(shell, "ENGINE_ROLE") == []


# --- no single role -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, "agg", "decode"])
def test_an_engine_that_switches_its_role_is_sent_no_canary_of_a_role(named: Role | None) -> None:
    shell = watch(worker("decode", page="dynamic"), role=named).run(300)
    assert shell.canaries == []
    assert shell.acted() == []
    assert len(logged(shell, "no single role")) == 1


def test_it_is_found_when_it_hangs_under_load() -> None:
    engine = worker("decode", page="dynamic")
    engine.busy().at(100, ScriptedEngine.hang)
    assert watch(engine).run(250).state == "stall-hang"


def test_a_canary_of_the_operators_own_is_sent_in_any_role() -> None:
    engine = worker("agg", page="dynamic")
    engine.works_as = None
    assert watch(engine, active_probe_body=OWN_BODY).run(60).canaries
    assert watch(engine, active_probe_path="/health_generate").run(60).canaries


# --- what a page says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        (['engine_type="decode"'], "decode"),
        (['engine_type="decode",tp_rank="0"', 'engine_type="unified"'], "decode"),
        (['engine_type="unified",moe_ep_rank="0"'], "agg"),
        (['engine_type="unified",tp_rank="0"'], None),
        (['a="x,engine_type=\\"decode\\"",tp_rank="0"'], None),
        (['my_engine_type="decode"'], None),
        (['engine_type="prefill"', 'engine_type="decode"'], "dynamic"),
        (['engine_type="pytorch"'], None),
    ],
)
def test_the_role_stands_in_a_label_of_sglangs_series(labels: list[str], role: ToldRole | None) -> None:
    page = {f"sglang:token_usage{{{one}}}": 0.1 for one in labels}
    assert role_on_page(page, SGLANG) == role
    assert role_on_page(page, PROFILES["vllm"]) is None


def test_a_page_with_another_series_is_looked_at_anew() -> None:
    worker = WorkerRole(None)
    page = {'sglang:token_usage{engine_type="decode"}': 0.1}
    assert worker.on_page(page, SGLANG) == worker.on_page(page | {next(iter(page)): 0.2}, SGLANG) == "decode"
    page['sglang:token_usage{engine_type="prefill"}'] = 0.1
    assert worker.on_page(page, SGLANG) == "dynamic"
    assert worker.on_page(page, PROFILES["vllm"]) is None
    assert worker.on_page({}, SGLANG) is None
