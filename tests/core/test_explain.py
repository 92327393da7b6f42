"""The verdict explained: every witness with its age, and what would flip it. True, and fit for JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from direct_watch import DirectWatch, vllm_page
from scenes import CANARY_OFF, SCENES
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Flags, LogChannelChanged, Outcome
from enginewatch.core.explain import Explanation, Witness
from enginewatch.core.settings import Settings


def explained(shell: VirtualShell) -> Explanation:
    return shell.watch.explain(shell.now)


def witness(shell: VirtualShell, name: str) -> Witness:
    return next(witness for witness in explained(shell).witnesses if witness.name == name)


@pytest.mark.parametrize("state", list(SCENES))
def test_every_state_can_be_explained_in_json(state: str) -> None:
    text = json.dumps(asdict(explained(SCENES[state]())), allow_nan=False)
    assert "Infinity" not in text


@pytest.mark.parametrize("state", list(SCENES))
def test_every_state_says_what_would_flip_it(state: str) -> None:
    sentences = explained(SCENES[state]()).would_flip
    assert sentences
    assert all(sentence.strip() and "\n" not in sentence for sentence in sentences)


@pytest.mark.parametrize("state", list(SCENES))
def test_ages_are_never_negative(state: str) -> None:
    found = explained(SCENES[state]())
    ages = [each.age_sec for each in found.witnesses]
    ages += [leg.moved_ago_sec for core in found.cores for leg in core.legs.values()]
    ages += [core.stalled_for_sec for core in found.cores]
    assert all(age is None or (math.isfinite(age) and age >= 0) for age in ages)


def test_explaining_changes_nothing() -> None:
    shell = SCENES["stall-hang"]()
    before = (shell.watch.verdict, shell.watch.story())
    assert explained(shell) == explained(shell)
    assert (shell.watch.verdict, shell.watch.story()) == before


# --- cores ----------------------------------------------------------------------------------------------------------


def test_every_core_is_shown_with_its_own_state_and_numbers() -> None:
    engine = ScriptedEngine(2).busy().at(62, lambda e: e.hang("1"))
    cores = explained(VirtualShell(engine).run(121)).cores
    assert [core.core for core in cores] == ["0", "1"]
    assert [core.state for core in cores] == ["growing", "stall-hang"]
    assert cores[0].stalled_for_sec < 5 < 50 < cores[1].stalled_for_sec < 60
    assert cores[1].running == 1.0
    assert cores[1].legs["generation_tokens"].moved_ago_sec == pytest.approx(121 - 65.01, abs=0.01)
    assert cores[1].legs["kv_cache_usage"].moved_ago_sec is None


def test_a_load_that_the_page_does_not_tell_is_unknown_not_zero() -> None:
    engine = ScriptedEngine()
    engine.hide = lambda series: "num_requests" in series
    core = explained(VirtualShell(engine).run(20)).cores[0]
    assert core.running is None
    assert core.waiting is None


# --- witnesses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "name", "says"),
    [
        ("startup", "reachability", "loading"),
        ("restarting", "reachability", "loading"),
        ("unreach-grace", "reachability", "failing"),
        ("growing", "reachability", "answers"),
        ("growing", "legs", "moving"),
        ("stall-hang", "legs", "frozen"),
        ("stall-hang", "canary", "failed"),
        ("stall-active-ok", "canary", "ok"),
        ("saturated", "canary", "saturated"),
        ("misconfigured", "canary", "misconfigured"),
        ("idle", "canary", "off"),
        ("canary-hang", "canary", "failed"),
        ("stall-hang-log", "log", "signature"),
        ("growing", "log", "quiet"),
        ("paused", "pause", "paused"),
    ],
)
def test_each_witness_says_what_it_saw(state: str, name: str, says: str) -> None:
    assert witness(SCENES[state](), name).says == says


def test_canaries_that_cannot_be_aimed_say_so() -> None:
    assert witness(VirtualShell(ScriptedEngine(2, version="0.10.0")).run(60), "canary").says == "cannot be aimed"


@pytest.mark.parametrize(("turns", "says"), [(True, "turning"), (False, "frozen")])
def test_the_heartbeat_is_a_witness_where_there_is_one(turns: bool, says: str) -> None:
    engine = ScriptedSGLang()
    engine.heartbeat = 0.0
    engine.at(30, lambda e: setattr(e, "loop_turns", turns))
    assert witness(VirtualShell(engine, kind="sglang").run(60), "heartbeat").says == says


def test_a_broken_log_says_how_it_is_broken() -> None:
    shell = VirtualShell(ScriptedEngine()).run(20)
    shell.feed(LogChannelChanged("no file matches"))
    assert (witness(shell, "log").says, witness(shell, "log").detail) == ("broken", "no file matches")


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        pytest.param(ScriptedEngine(), "not asleep", id="vLLM's page tells of sleep, not of a pause"),
        pytest.param(ScriptedSGLang(version="0.5.23"), "cannot tell", id="endpoints absent"),
        pytest.param(ScriptedSGLang(version="0.5.10"), "cannot tell", id="endpoints not to be trusted"),
    ],
)
def test_whether_a_pause_could_be_seen_at_all_is_said(engine: ScriptedEngine, says: str) -> None:
    assert witness(VirtualShell(engine, kind=engine.kind).run(60), "pause").says == says


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (Flags.CLEAR, "awake"),
        (Flags.SILENT, "no answer"),
        (Flags.DOUBTFUL, "cannot tell"),
        (Flags.PAUSED, "paused"),
        (Flags.SLEEPING, "sleeping"),
    ],
)
def test_what_the_pause_endpoints_say_is_said(said: Flags, says: str) -> None:
    engine = ScriptedEngine()
    engine.flags = said
    assert witness(VirtualShell(engine).run(60), "pause").says == says


def test_nobody_calls_an_engine_awake_that_was_not_asked() -> None:
    assert witness(VirtualShell(ScriptedEngine().busy()).run(60), "pause").says == "not asked yet"


def test_a_yes_that_the_pause_endpoints_no_longer_repeat_is_none() -> None:
    engine = ScriptedEngine()
    engine.flags = Flags.PAUSED
    shell = VirtualShell(engine).run(60)
    engine.fail("http_503")
    assert witness(shell.run(100), "pause").says in ("paused", "no answer")


def test_cores_are_shown_in_the_order_of_their_numbers() -> None:
    watch = DirectWatch()
    shuffled: dict[str, float] = {}
    for name in ("10", "2", "0", "1"):
        shuffled |= vllm_page(core=name)
    watch.page(0, shuffled)
    assert [core.core for core in watch.watch.explain(1).cores] == ["0", "1", "2", "10"]


def test_with_several_cores_each_has_its_legs_and_its_canary() -> None:
    found = explained(VirtualShell(ScriptedEngine(3)).run(60)).witnesses
    for core in range(3):
        mine = {each.name for each in found if each.detail.startswith(f"core {core}: ")}
        assert mine >= {"legs", "canary"}


# --- what would flip it ---------------------------------------------------------------------------------------------


def flips(shell: VirtualShell) -> str:
    return "; ".join(explained(shell).would_flip)


def test_a_hang_says_what_ends_it() -> None:
    assert "one complete canary of core 0 ends it" in flips(SCENES["stall-hang"]())
    assert "a counter of core 0 that moves ends it" in flips(SCENES["stall-hang-log"]())
    assert "a page" in flips(SCENES["unreach-hang"]())
    assert "one complete canary ends it" in flips(SCENES["canary-hang"]())


@pytest.mark.parametrize("failure", ["timeout", "http_404"])
def test_a_hang_that_stands_while_nothing_can_be_read_is_not_ended_by_any_page(failure: str) -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(112, lambda e: e.fail(failure))
    shell = VirtualShell(engine).run(117)
    assert shell.state == "stall-hang"
    assert "a page with" not in flips(shell)
    assert "a progress leg of core 0 that moves ends it" in flips(shell)


def test_a_peer_stall_says_what_ends_it() -> None:
    assert "once the queue shrinks or a transfer succeeds" in flips(SCENES["peer-stall"]())


def test_a_suppressed_hang_says_when_it_is_acted_on() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings()).run(200)
    assert "warm-up ends in 400 s" in flips(shell)
    shell.set(mode="shadow")
    assert "mode: enforce" in flips(shell)


def test_a_frozen_core_says_how_long_it_has_left() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang)).run(76)
    assert "another 19 s and 1 more canary fails" in flips(shell)


def test_news_of_a_page_that_takes_longer_than_two_polls_do_not_look_frozen() -> None:
    engine = ScriptedSGLang()
    engine.heartbeat, engine.scrape_sec = 0.0, 12.0
    shell = VirtualShell(engine.busy(), kind="sglang").run(59)
    assert shell.state == "growing"
    assert witness(shell, "legs").age_sec == pytest.approx(11.0)
    assert witness(shell, "legs").says == "moving"
    assert witness(shell, "heartbeat").says == "turning"


@pytest.mark.parametrize("failure", ["timeout", "reset"])
def test_nothing_is_said_to_move_while_no_page_can_be_read(failure: str) -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, lambda e: e.fail(failure))).run(80)
    assert witness(shell, "legs").says == "frozen"


def test_canaries_that_are_still_to_fail_take_their_time() -> None:
    """The first of them must be begun a stall less one poll before the verdict, however long nothing moved before."""
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    for t in (5, 10, 15, 20, 25):
        watch.page(t, vllm_page())
    (sentence,) = watch.watch.explain(27).would_flip
    assert sentence == "core 0: hung if nothing moves for another 25 s and 2 more canaries fail"


def test_an_idle_core_without_a_usable_canary_would_have_to_be_busy_first() -> None:
    shell = VirtualShell(ScriptedEngine().answer(Outcome.SATURATED)).run(120)
    assert shell.state == "saturated"
    assert flips(shell) == "core 0: hung once nothing moved for 30 s in which it was busy"
    shell = VirtualShell(ScriptedEngine().answer(Outcome.SATURATED).at(110, lambda e: e.busy(rate=0))).run(120)
    assert flips(shell) == "core 0: hung if it stays busy and nothing moves for another 20 s"


def test_without_a_usable_canary_the_time_is_that_of_the_passive_rule() -> None:
    engine = ScriptedSGLang()
    engine.busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine, CANARY_OFF, kind="sglang").run(75.1)
    assert "busy" in flips(shell)
    assert "another 50 s" in flips(shell), "30 s of stall and 30 s in which the gauges may be stale, 10 s of it over"
    for unusable in (Outcome.SATURATED, Outcome.MISCONFIGURED):
        engine = ScriptedSGLang()
        engine.busy().answer(unusable).at(62, ScriptedEngine.hang)
        shell = VirtualShell(engine, kind="sglang").run(75.1)
        assert "busy" in flips(shell)
        assert "another 50 s" in flips(shell)


def test_an_outage_says_how_long_it_has_left_by_the_limit_that_holds() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))).run(85.1)
    assert "unreach-hang in 40 s" in flips(shell)
    shell = VirtualShell(ScriptedEngine().busy().at(62, lambda e: e.hang().fail("http_503"))).run(85.1)
    assert "unreach-hang in 280 s" in flips(shell)


def test_loading_says_how_long_it_has_left() -> None:
    shell = VirtualShell(ScriptedEngine().fail("refused"), Settings(startup_budget_sec=600)).run(100)
    assert "startup-hang in 500 s" in flips(shell)


def test_a_process_that_is_gone_has_no_cores_and_nothing_to_say() -> None:
    """Its last page would read as if it ran: 1 running, legs moving, not asleep."""
    told = explained(SCENES["restarting"]())
    assert told.cores == ()
    assert {found.name for found in told.witnesses} == {"reachability", "log"}
    assert witness(SCENES["restarting"](), "reachability").detail == "no page since then, last: refused"
    assert {"legs", "canary", "pause"} <= {found.name for found in explained(SCENES["unreach-grace"]()).witnesses}


def test_a_page_that_is_not_watched_says_that_nothing_would() -> None:
    shell = VirtualShell(ScriptedEngine().fail("http_404"), CANARY_OFF).run(30)
    assert "no hang can be seen" in flips(shell)
