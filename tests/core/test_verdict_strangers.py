"""Engines without a profile, TGI and LMDeploy among them: `no-legs`, where the canary alone decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scripted_strangers import ScriptedStranger, lmdeploy, tgi
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome
from enginewatch.core.settings import Settings

SETTINGS = Settings(warmup_sec=0)
Render = Callable[[ScriptedEngine], dict[str, float]]

pytestmark = pytest.mark.parametrize("render", [tgi, lmdeploy])


def watch(engine: ScriptedEngine, until: float, settings: Settings = SETTINGS) -> VirtualShell:
    return VirtualShell(engine, settings, kind="auto").run(until)


def test_idle_it_is_healthy_and_says_that_the_canary_alone_decides(render: Render) -> None:
    shell = watch(ScriptedStranger(render), 600)
    assert shell.acted() == []
    assert shell.state == "no-legs"
    assert "canaries alone decide" in shell.watch.verdict.reason


def test_busy_it_is_healthy_while_canaries_are_slow(render: Render) -> None:
    engine = ScriptedStranger(render).busy()
    for core in engine.cores.values():
        core.canary_after = 20.0
    assert watch(engine, 600).acted() == []


@pytest.mark.parametrize("load", ["busy", "idle"])
def test_a_hang_is_told_by_canaries_and_forgiven_by_one(render: Render, load: str) -> None:
    engine = ScriptedStranger(render)
    if load == "busy":
        engine.busy()
    shell = watch(engine.at(302, ScriptedEngine.hang).at(500, ScriptedEngine.resume), 600)
    hung_at = shell.first("canary-hang")
    assert hung_at is not None
    # Two canaries in a row, each of which is given stall_sec.
    assert 302 + 60 <= hung_at <= 302 + 60 + 3 * SETTINGS.poll_interval_sec
    assert not shell.watch.verdict.acting


def test_moving_counters_of_a_page_that_nobody_described_acquit_nothing(render: Render) -> None:
    engine = ScriptedStranger(render).busy().at(302, lambda engine: engine.answer(Outcome.TIMEOUT))
    assert watch(engine, 600).first("canary-hang") is not None


def test_a_full_queue_is_no_hang(render: Render) -> None:
    """503 and 429 that say so; huggingface/text-generation-inference#3241 is about those who took it for one."""
    shell = watch(ScriptedStranger(render).busy().at(302, lambda engine: engine.answer(Outcome.SATURATED)), 3000)
    assert shell.acted() == []
    assert "saturated" in shell.watch.verdict.reason


def test_one_failure_before_a_full_queue_is_no_hang(render: Render) -> None:
    engine = ScriptedStranger(render).busy()
    engine.at(302, ScriptedEngine.hang).at(334, ScriptedEngine.resume)
    engine.at(334, lambda engine: engine.answer(Outcome.SATURATED))
    assert watch(engine, 3000).acted() == []


@pytest.mark.parametrize("outcome", [Outcome.MISCONFIGURED, Outcome.ERROR_ANSWER])
def test_a_canary_that_never_fitted_ends_nothing(render: Render, outcome: Outcome) -> None:
    """A path it does not have (404), or a request that it answers with 500 from the start."""
    shell = watch(ScriptedStranger(render).answer(outcome), 3000)
    assert shell.acted() == []
    assert shell.state == "no-legs"
    assert "misconfigured" in shell.watch.verdict.reason


def test_errors_after_a_canary_has_once_succeeded_are_a_hang(render: Render) -> None:
    engine = ScriptedStranger(render).at(302, lambda engine: engine.answer(Outcome.ERROR_ANSWER))
    assert watch(engine, 600).first("canary-hang") is not None


def test_without_canaries_nothing_is_seen_and_that_is_said(render: Render) -> None:
    engine = ScriptedStranger(render).at(302, ScriptedEngine.hang)
    shell = watch(engine, 3000, Settings(warmup_sec=0, active_probe_enabled=False))
    assert shell.acted() == []
    assert "not watched" in shell.watch.verdict.reason
