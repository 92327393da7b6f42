"""A bootstrap server tells other KV engine ids: a replacement that neither counters nor a start time show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.identity import Identity
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES

OBSERVED = None
START_TIME = 1000.0


def tells(ids: dict[str, str]) -> Callable[[ScriptedEngine], None]:
    return lambda engine: setattr(engine, "kv_ids", ids)


def starts_at(start_time: float) -> Callable[[ScriptedEngine], None]:
    return lambda engine: setattr(engine, "start_time", start_time)


def prefill(*, start_time: float | None, ids: dict[str, str] | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(start_time=start_time)
    engine.kv_ids = {"0": "a"} if ids is None else ids
    return engine


def identity(shell: VirtualShell) -> Identity:
    known = shell.watch.identity
    assert known is not None
    return known


def witness(shell: VirtualShell, name: str) -> tuple[str, float | None, str]:
    (found,) = [one for one in shell.watch.explain(shell.now).witnesses if one.name == name]
    return found.says, found.age_sec, found.detail


def idle_and_restarted_between_two_polls() -> ScriptedEngine:
    """Zero before, zero after, and nobody ever found it away."""
    engine = prefill(start_time=OBSERVED)
    engine.cores["0"].tokens = 0.0
    return engine.at(58, ScriptedEngine.restart).at(58, tells({"0": "b"}))


WITHOUT_CANARIES = Settings(active_probe_enabled=False)


def test_an_idle_engine_that_restarts_between_two_polls_was_replaced_once() -> None:
    shell = VirtualShell(idle_and_restarted_between_two_polls(), WITHOUT_CANARIES).run(50)
    before = identity(shell)
    shell.run(200)
    after = identity(shell)
    assert (before.restarts, after.restarts) == (0, 1)
    assert before.engine_id != after.engine_id
    assert shell.states.count("replaced") == 1
    assert [log.fields["restarts"] for log in shell.logs if "replaced by another" in log.event] == [1]
    assert after.first_seen == pytest.approx(60, abs=1), "no later than the poll that told it"


def test_control_without_the_ids_it_is_missed() -> None:
    engine = idle_and_restarted_between_two_polls()
    shell = VirtualShell(engine, WITHOUT_CANARIES)
    engine.kv_ids = None
    engine.at(59, lambda engine: setattr(engine, "kv_ids", None))
    assert identity(shell.run(200)).restarts == 0


@pytest.mark.parametrize(
    "then",
    [{"0": "a", "1": "b"}, {"1": "b"}, {}, {"0": "a"}],
    ids=["a rank joins", "a rank is missing", "silence", "nothing changes"],
)
@pytest.mark.parametrize("start_time", [OBSERVED, START_TIME])
def test_control_a_rank_that_joins_one_that_is_missing_and_silence_are_no_replacement(
    then: dict[str, str], start_time: float | None
) -> None:
    engine = prefill(start_time=start_time).at(58, tells(then)).at(120, tells({"0": "a"}))
    shell = VirtualShell(engine).run(50)
    before = identity(shell)
    assert identity(shell.run(200)) == before
    assert "replaced" not in shell.states


@pytest.mark.parametrize("start_time", [OBSERVED, START_TIME])
def test_it_resets_the_verdict(start_time: float | None) -> None:
    engine = prefill(start_time=start_time).busy().at(100, ScriptedEngine.hang).at(158, tells({"0": "b"}))
    shell = VirtualShell(engine, Settings(warmup_sec=40)).run(158)
    assert shell.watch.verdict.acting
    shell.run(166)
    assert not shell.watch.verdict.hung
    shell.run(198)
    assert shell.state == "warmup-stall-hang"
    shell.run(260)
    assert shell.watch.verdict.acting, "and the hang of the new process is found as well"


def test_control_a_rank_that_joins_does_not_end_a_hang() -> None:
    engine = prefill(start_time=OBSERVED).busy().at(100, ScriptedEngine.hang).at(158, tells({"0": "a", "1": "b"}))
    shell = VirtualShell(engine, Settings(warmup_sec=40)).run(158)
    assert shell.watch.verdict.acting
    assert shell.run(200).watch.verdict.acting


@pytest.mark.parametrize("start_time", [OBSERVED, START_TIME])
@pytest.mark.parametrize("kv_first_by", [-20.0, -3.0, 0.0, 3.0, 20.0])
def test_what_the_page_and_the_ids_both_tell_is_one_replacement(start_time: float | None, kv_first_by: float) -> None:
    """Restarted in place: refused from 58 to 118, with a page again at 118."""
    engine = prefill(start_time=start_time).busy()
    engine.at(58, lambda e: e.fail("refused")).at(58, tells({}))
    engine.at(118, ScriptedEngine.restart).at(118 - kv_first_by, tells({"0": "b"}))
    shell = VirtualShell(engine).run(57)
    before = identity(shell)
    shell.run(117)
    assert identity(shell) == before, "while it loads, the previous id stands, whatever its bootstrap server says"
    shell.run(300)
    assert identity(shell).restarts == 1
    assert identity(shell).engine_id != before.engine_id
    assert shell.states.count("replaced") == 1


def test_a_start_time_on_the_page_stays_the_id_because_a_restarted_sidecar_could_know_no_other() -> None:
    shell = VirtualShell(prefill(start_time=START_TIME).at(58, tells({"0": "b"}))).run(50)
    before = identity(shell)
    after = identity(shell.run(200))
    assert (after.engine_id, after.started_at_unix, after.restarts) == (before.engine_id, START_TIME, 1)


def test_two_ranks_that_change_on_two_polls_are_one_replacement() -> None:
    engine = prefill(start_time=OBSERVED, ids={"0": "a", "1": "b"})
    engine.at(58, tells({"0": "A", "1": "b"})).at(63, tells({"0": "A", "1": "B"}))
    assert identity(VirtualShell(engine).run(200)).restarts == 1


@pytest.mark.parametrize("every_sec", [5, 10, 35])
def test_two_servers_behind_one_address_are_one_replacement_one_complaint_and_hide_no_hang(every_sec: int) -> None:
    engine = prefill(start_time=OBSERVED).busy().at(300, ScriptedEngine.hang)
    for number, second in enumerate(range(58, 600, every_sec)):
        engine.at(second, tells({"0": "ab"[number % 2]}))
    shell = VirtualShell(engine).run(500)
    assert identity(shell).restarts == 1
    assert len([log for log in shell.logs if "again and again" in log.event]) == 1
    assert shell.state == "stall-hang"


@pytest.mark.parametrize("every_sec", [5, 35])
def test_ids_made_up_without_end_hide_no_hang_for_ever(every_sec: int) -> None:
    engine = prefill(start_time=OBSERVED).busy().at(300, ScriptedEngine.hang)
    for number, second in enumerate(range(58, 600, every_sec)):
        engine.at(second, tells({"0": f"made-up-{number}"}))
    shell = VirtualShell(engine).run(500)
    assert identity(shell).restarts == 3
    assert len([log for log in shell.logs if "again and again" in log.event]) == 1
    assert shell.state == "stall-hang"


def test_restarts_between_two_polls_that_the_page_tells_as_well_are_no_reason_to_disbelieve() -> None:
    engine = prefill(start_time=START_TIME).busy()
    for number in range(1, 8):
        engine.at(40 * number + 18, ScriptedEngine.restart).at(40 * number + 18, tells({"0": f"start-{number}"}))
    shell = VirtualShell(engine).run(400)
    assert identity(shell).restarts == 7
    assert not [log for log in shell.logs if "again and again" in log.event]


def test_a_change_before_the_first_page_is_no_replacement_because_nothing_was_published() -> None:
    engine = prefill(start_time=OBSERVED).fail("refused").at(20, tells({"0": "b"})).at(40, lambda e: e.fail(None))
    assert identity(VirtualShell(engine).run(100)).restarts == 0


def test_the_verdict_names_it_as_a_witness_with_its_age() -> None:
    engine = prefill(start_time=OBSERVED, ids={"0": "a", "1": "b"})
    engine.at(58, tells({})).at(58, lambda e: e.fail("refused"))
    engine.at(78, tells({"0": "c"})).at(98, ScriptedEngine.restart)
    shell = VirtualShell(engine).run(57)
    says, age_sec, detail = witness(shell, "kv_bootstrap")
    assert (says, detail) == ("same", "KV engine ids of 2 ranks")
    assert age_sec == pytest.approx(2, abs=0.1)
    says, age_sec, detail = witness(shell.run(77), "kv_bootstrap")
    assert says == "silent"
    assert age_sec == pytest.approx(22, abs=0.1)
    assert "nobody listens" in detail
    assert witness(shell.run(91), "kv_bootstrap")[0] == "changed", "it listens, and has no page yet"
    assert witness(shell.run(110), "kv_bootstrap")[0] == "same"


def test_control_where_no_bootstrap_server_is_asked_there_is_no_such_witness() -> None:
    shell = VirtualShell(ScriptedEngine()).run(60)
    assert "kv_bootstrap" not in [one.name for one in shell.watch.explain(60).witnesses]


def test_a_replayed_story_tells_the_same_replacements() -> None:
    engine = prefill(start_time=OBSERVED).busy()
    for second, ids in [(38, {"0": "b"}), (58, {"0": "a"}), (78, {"0": "c", "1": "d"}), (98, {})]:
        engine.at(second, tells(ids))
    shell = VirtualShell(engine).run(150)
    again = Watch(shell.settings, profile=PROFILES["vllm"], role="agg", log_channel=True, now=0.0)
    for t, event in shell.events:
        again.handle(event, t)
    assert (again.story(), again.identity, again.verdict) == (shell.watch.story(), identity(shell), shell.watch.verdict)
    assert identity(shell).restarts == 2


def test_why_there_is_no_identity_yet_is_said() -> None:
    engine = ScriptedEngine().fail("refused").at(20, lambda e: e.fail("timeout")).at(40, lambda e: e.fail("http_404"))
    shell = VirtualShell(engine)
    assert shell.watch.why_unidentified == "the engine has not been asked yet"
    assert "nobody listens" in shell.run(10).watch.why_unidentified
    assert "no page from the engine yet (timeout)" in shell.run(30).watch.why_unidentified
    assert "only a page names the process" in shell.run(50).watch.why_unidentified
    assert shell.watch.identity is None


def silent_logs(shell: VirtualShell) -> list[str]:
    return [log.event for log in shell.logs if "has told no engine ids so far" in log.event]


def test_a_bootstrap_server_that_was_never_heard_is_told_of_once() -> None:
    shell = VirtualShell(prefill(start_time=START_TIME, ids={}), WITHOUT_CANARIES).run(40)
    assert silent_logs(shell) == []
    shell.run(600)
    (said,) = silent_logs(shell)
    assert "IDENTITY_KV_BOOTSTRAP_URL must name that of this engine" in said


def test_control_one_that_was_heard_may_be_silent_for_hours() -> None:
    engine = prefill(start_time=START_TIME).at(58, tells({}))
    shell = VirtualShell(engine, WITHOUT_CANARIES).run(7200)
    assert silent_logs(shell) == []
