"""Settings that change while the judgement runs: judged by from now on."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings


def hung(**settings: Any) -> VirtualShell:
    """A busy engine that froze at 62 and was declared before 120."""
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), Settings(warmup_sec=0, **settings))
    shell.run(120)
    assert shell.state == "stall-hang"
    return shell


def test_a_longer_stall_setting_takes_a_verdict_back_until_it_holds_again() -> None:
    """The operator sees a false kill coming and raises the number: that must help at once."""
    shell = hung()
    shell.set(stall_sec=200)
    assert not shell.watch.verdict.acting
    assert shell.run(400).acted()[-1] >= 65 + 200


def test_a_shorter_one_declares_sooner() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), Settings(warmup_sec=0, stall_sec=600))
    shell.run(120)
    assert shell.acted() == []
    shell.set(stall_sec=30)
    assert shell.run(126).acted()


def test_more_failures_asked_for_take_a_verdict_back_until_there_are_as_many() -> None:
    shell = hung()
    shell.set(active_probe_min_failures=20)
    assert not shell.watch.verdict.acting
    assert shell.run(400).watch.verdict.acting


def test_a_change_that_does_not_concern_it_leaves_a_verdict_alone() -> None:
    shell = hung()
    shell.set(peer_stall_sec=90)
    assert shell.watch.verdict.acting
    assert all(verdict.acting for t, verdict in shell.run(200).timeline if t >= 120)


def test_settings_that_say_the_same_change_nothing() -> None:
    shell = hung()
    before = shell.watch.verdict
    shell.set()
    assert shell.watch.verdict == before


def test_switching_canaries_off_leaves_a_busy_frozen_engine_hung() -> None:
    shell = hung()
    shell.set(active_probe_enabled=False)
    assert shell.run(130).watch.verdict.acting
    asked = len(shell.canaries)
    assert len(shell.run(300).canaries) == asked


def test_switching_canaries_on_lets_them_clear_a_passive_verdict() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.idle)
    engine.at(62, lambda e: setattr(e.cores["0"], "running", 2.0))
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_enabled=False)).run(120)
    assert shell.watch.verdict.acting, "a gauge that stays stale for ever looks like this"
    shell.set(active_probe_enabled=True)
    assert not shell.run(131).watch.verdict.hung


def test_a_shorter_warm_up_acts_on_the_hang_that_stands() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang)).run(10)
    shell.set(warmup_sec=600)
    shell.run(300)
    assert shell.state == "warmup-stall-hang"
    shell.set(warmup_sec=100)
    assert shell.state == "stall-hang"


def test_another_poll_interval_counts_from_the_next_poll() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(300, ScriptedEngine.hang)).run(102)
    shell.set(poll_interval_sec=1, stall_sec=5, active_probe_timeout_sec=2)
    shell.run(330)
    assert "observer-gap" not in shell.states
    assert 303 <= shell.acted()[0] <= 309


@pytest.mark.parametrize(
    "change",
    [
        {"stall_sec": 0.001},
        {"poll_interval_sec": 0.05},
        {"metrics_timeout_sec": 0.001},
        {"active_probe_timeout_sec": 0.001},
        {"active_probe_min_failures": 1},
        {"unreach_sec": 0.001, "startup_budget_sec": 0.001, "log_stall_sec": 0.001, "log_window_sec": 0.001},
        {"stall_sec": 1e9, "unreach_sec": 1e9, "startup_budget_sec": 1e9, "warmup_sec": 1e9},
        {"poll_interval_sec": 3600.0, "stall_sec": 1.0},
    ],
    ids=str,
)
def test_no_number_makes_an_engine_at_work_hung(change: dict[str, float]) -> None:
    shell = VirtualShell(ScriptedEngine().busy(), Settings(warmup_sec=0)).run(102)
    shell.set(**change)
    shell.run(102 + 20 * shell.watch.settings.poll_interval_sec)
    assert shell.acted() == []


@pytest.mark.parametrize("change", [{"stall_sec": 0.001}, {"active_probe_min_failures": 1}, {"poll_interval_sec": 0.5}])
def test_nor_an_idle_one(change: dict[str, float]) -> None:
    shell = VirtualShell(ScriptedEngine(), Settings(warmup_sec=0)).run(102)
    shell.set(**change)
    assert shell.run(300).acted() == []


def test_a_huge_threshold_is_never_reached() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), Settings(warmup_sec=0, stall_sec=1e9))
    assert shell.run(2000).acted() == []


def test_a_new_canary_request_is_used_from_the_next_canary_on() -> None:
    shell = VirtualShell(ScriptedEngine()).run(102)
    shell.set(active_probe_path="/health_generate")
    assert shell.watch.canary is not None
    assert shell.watch.canary.path == "/health_generate"


def test_a_path_of_the_operators_own_cannot_be_aimed() -> None:
    settings = Settings(warmup_sec=0, active_probe_path="/health_generate")
    assert VirtualShell(ScriptedEngine(4), settings).run(100).canaries == []
    assert VirtualShell(ScriptedEngine(1), settings).run(100).canaries


def test_one_answer_that_arrives_after_canaries_were_switched_off_still_counts() -> None:
    engine = ScriptedEngine()
    engine.cores["0"].canary_after = 3.0
    shell = VirtualShell(engine, Settings(warmup_sec=0)).run(11)
    shell.set(active_probe_enabled=False)
    shell.run(20)
    assert shell.results[-1][2] is Outcome.OK
