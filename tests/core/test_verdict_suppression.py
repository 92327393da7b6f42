"""A hang that is shown and not acted on: warm-up and shadow mode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings
from enginewatch.core.states import HUNG, all_names


def test_a_hang_inside_warm_up_is_shown_and_not_acted_on() -> None:
    """A kill 3m40s after the first scrape cost 27 minutes of reload."""
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), Settings()).run(300)
    assert shell.acted() == []
    assert shell.state == "warmup-stall-hang"
    assert shell.watch.verdict.hung
    assert "warm-up" in shell.watch.verdict.reason


def test_it_is_acted_on_when_warm_up_ends() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), Settings()).run(700)
    assert 600 <= shell.acted()[0] <= 606
    assert shell.state == "stall-hang"


def test_a_first_request_that_compiles_inside_warm_up_is_not_acted_on() -> None:
    """108 s without an answer (rllm#926)."""
    engine = ScriptedEngine().at(62, ScriptedEngine.hang).at(170, ScriptedEngine.resume)
    shell = VirtualShell(engine, Settings()).run(700)
    assert shell.acted() == []
    assert "warmup-stall-hang" in shell.states


def test_no_warm_up_is_no_warm_up() -> None:
    shell = VirtualShell(ScriptedEngine().hang(), Settings(warmup_sec=0)).run(100)
    assert shell.acted()[0] <= 41


def test_warm_up_begins_with_the_first_good_scrape_not_with_the_watcher() -> None:
    engine = ScriptedEngine().fail("refused").at(1000, lambda e: e.fail(None)).at(1100, ScriptedEngine.hang)
    shell = VirtualShell(engine, Settings()).run(1700)
    assert 1600 <= shell.acted()[0] <= 1606


def test_an_unreachable_engine_inside_warm_up_is_not_acted_on() -> None:
    engine = ScriptedEngine().busy().at(62, lambda e: e.hang().fail("timeout"))
    shell = VirtualShell(engine, Settings()).run(300)
    assert shell.acted() == []
    assert shell.state == "warmup-unreach-hang"


@pytest.mark.parametrize("warmup_sec", [0.0, 600.0])
def test_shadow_mode_shows_and_does_not_act(warmup_sec: float) -> None:
    settings = Settings(warmup_sec=warmup_sec, mode="shadow")
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), settings).run(300)
    assert shell.acted() == []
    assert shell.state == "shadow-stall-hang", "shadow wins over warm-up"
    assert shell.watch.verdict.hung
    assert shell.evidence, "it is captured all the same"
    assert shell.watch.verdict.reason.endswith("; not acted on in shadow mode"), "/healthz says ok: before it"


def test_shadow_mode_covers_a_startup_hang() -> None:
    settings = Settings(startup_budget_sec=60, mode="shadow")
    shell = VirtualShell(ScriptedEngine().fail("refused"), settings).run(100)
    assert shell.acted() == []
    assert shell.state == "shadow-startup-hang"


def test_leaving_shadow_mode_acts_on_the_hang_that_stands() -> None:
    settings = Settings(warmup_sec=0, mode="shadow")
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), settings).run(300)
    shell.set(mode="enforce")
    assert shell.watch.verdict.acting
    shell.set(mode="shadow")
    assert not shell.watch.verdict.acting
    assert shell.watch.verdict.hung


@pytest.mark.parametrize("mode", ["enforce", "shadow"])
def test_healthy_states_have_no_prefix(mode: str) -> None:
    settings = replace(Settings(), mode=mode)  # type: ignore[arg-type]
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.idle), settings).run(300)
    assert not any(state.startswith(("warmup-", "shadow-")) for state in shell.states)


def test_hung_since_is_when_the_hang_began_not_when_it_was_acted_on() -> None:
    shell = VirtualShell(ScriptedEngine().busy().at(62, ScriptedEngine.hang), Settings()).run(700)
    assert shell.watch.verdict.acting
    first = next(t for t, verdict in shell.timeline if verdict.hung)
    assert shell.watch.verdict.hung_changed_at == first


def test_every_state_that_can_be_published_has_its_name_on_the_list() -> None:
    names = all_names()
    assert len(names) == len(set(names))
    assert {f"warmup-{name}" for name in HUNG if name != "startup-hang"} <= set(names)
    assert {f"shadow-{name}" for name in HUNG} <= set(names)
    assert "warmup-startup-hang" not in names


def test_one_lost_canary_inside_warm_up_is_not_shown_as_a_hang_either() -> None:
    engine = ScriptedEngine().at(62, lambda e: e.answer(Outcome.TIMEOUT)).at(74, lambda e: e.answer(None))
    assert not any(verdict.hung for _, verdict in VirtualShell(engine, Settings()).run(300).timeline)
