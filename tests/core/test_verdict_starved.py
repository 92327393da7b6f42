"""A watcher that gets no CPU must not take its own lateness for the engine's silence."""

from __future__ import annotations

import pytest
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.canaries import LATE_SEC
from enginewatch.core.events import CanaryDone, Outcome, Scraped, StartCanary
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES

PAGE = {'vllm:generation_tokens_total{engine="0"}': 7.0, 'vllm:num_requests_running{engine="0"}': 0.0}


def run(outcome: Outcome, *, late_sec: float) -> Watch:
    """An idle engine whose every canary ends like this, so much after its deadline."""
    watch = Watch(Settings(warmup_sec=0), profile=PROFILES["vllm"], now=0.0)
    ends: list[tuple[float, int]] = []
    for step in range(1300):
        now = step / 10
        while ends and ends[0][0] <= now:
            ended, token = ends.pop(0)
            for made in watch.handle(CanaryDone(token, outcome), ended):
                if isinstance(made, StartCanary):
                    ends.append((ended + made.deadline_sec + late_sec, made.token))
        if step % 50 == 0:
            for made in watch.handle(Scraped(now, PAGE), now):
                if isinstance(made, StartCanary):
                    ends.append((now + made.deadline_sec + late_sec, made.token))
    return watch


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FROZEN])
def test_a_deadline_that_is_noticed_late_is_no_failure(outcome: Outcome) -> None:
    watch = run(outcome, late_sec=LATE_SEC + 1)
    assert watch.verdict.state == "freeze-grace"


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.FROZEN])
def test_one_that_is_noticed_in_time_is(outcome: Outcome) -> None:
    assert run(outcome, late_sec=LATE_SEC / 2).verdict.state == "stall-hang"


def test_lateness_is_said_once_and_the_canary_is_sent_again_at_once() -> None:
    shell = VirtualShell(ScriptedEngine())
    shell.engine.cores["0"].hung = True
    shell.run(5.5)
    sent = len(shell.canaries)
    shell.freeze(8.0)  # shorter than a gap, longer than the canary's deadline
    shell.run(30)
    late = [log for log in shell.logs if "lacks CPU" in log.event]
    assert len(late) == 1
    assert len(shell.canaries) > sent
    assert shell.run(60).state == "stall-hang"
