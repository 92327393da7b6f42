"""How soon, and never too soon: a SIGSTOP-like freeze at every phase of the poll, busy and idle."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from direct_watch import DirectWatch, kinds, vllm_page
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Outcome, Rescrape, Scraped
from enginewatch.core.settings import Settings

USUAL = Settings(warmup_sec=0)
FAST = Settings(warmup_sec=0, poll_interval_sec=1, stall_sec=5, active_probe_timeout_sec=2)
PHASES = [round(0.05 + step * 0.1, 2) for step in range(10)]
"""Where in the poll the engine freezes, as a share of the interval."""


def frozen(settings: Settings, phase: float, work: str, cores: int = 1, canary_after: float = 0.05) -> VirtualShell:
    """Freeze core 0 at `phase` of a poll, two of which in a row are tried by the caller, and run past the bound."""
    at = 20 * settings.poll_interval_sec + phase * settings.poll_interval_sec
    engine = ScriptedEngine(cores)
    for core in engine.cores.values():
        core.canary_after = canary_after
    if work == "busy":
        engine.busy()
    elif work == "prefill":
        engine.prefill()
    elif work == "siblings busy":
        engine.busy(*list(engine.cores)[1:])
    engine.at(at, lambda e: e.hang("0"))
    shell = VirtualShell(engine, settings).run(at + settings.stall_sec + 30)
    shell.frozen_at = at  # type: ignore[attr-defined]
    return shell


def last_proof(shell: VirtualShell, before: float) -> float:
    """When core 0 last proved life before a moment: a leg higher than ever on a page, or a complete canary."""
    proofs = [t for t, canary, outcome in shell.results if outcome is Outcome.OK and canary.core in (None, "0")]
    pages = [(t, event.samples) for t, event in shell.events if isinstance(event, Scraped)]
    for (_, older), (t, newer) in itertools.pairwise(pages):
        legs = [series for series in newer if 'engine="0"' in series and ("tokens" in series or "kv" in series)]
        if any(newer[series] > older[series] for series in legs):
            proofs.append(t)
    return max(t for t in proofs if t <= before)


@pytest.mark.parametrize("parity", [0, 1], ids=["even poll", "odd poll"])
@pytest.mark.parametrize("work", ["busy", "idle", "prefill"])
@pytest.mark.parametrize(("settings", "bound"), [(USUAL, 36.0), (FAST, 9.0)], ids=["usual", "fast"])
def test_a_freeze_is_declared_in_time_at_every_phase_and_never_before_the_threshold(
    settings: Settings, bound: float, work: str, parity: int
) -> None:
    """An idle core is asked on every second poll, since its canary's own token moves a counter: both parities."""
    for phase in PHASES:
        shell = frozen(settings, phase + parity, work)
        declared = shell.first("stall-hang")
        assert declared is not None, f"phase {phase}"
        assert declared - shell.frozen_at <= bound, f"phase {phase}"  # type: ignore[attr-defined]
        assert declared - last_proof(shell, declared) >= settings.stall_sec, f"phase {phase}"


@pytest.mark.parametrize("canary_after", [0.0, 0.5, 1.5, 4.5])
def test_a_slow_canary_does_not_delay_the_verdict(canary_after: float) -> None:
    for phase in PHASES:
        shell = frozen(USUAL, phase, "idle", canary_after=canary_after)
        declared = shell.first("stall-hang")
        assert declared is not None
        assert declared - shell.frozen_at <= 36.0 + canary_after, f"phase {phase}"  # type: ignore[attr-defined]
        assert declared - last_proof(shell, declared) >= 30, f"phase {phase}"


@pytest.mark.parametrize("work", ["busy", "idle", "siblings busy"])
@pytest.mark.parametrize(("settings", "bound"), [(USUAL, 36.0), (FAST, 9.0)], ids=["usual", "fast"])
def test_one_frozen_core_of_four_is_declared_in_the_same_time(settings: Settings, bound: float, work: str) -> None:
    for phase in PHASES[::3]:
        shell = frozen(settings, phase, work, cores=4)
        declared = shell.first("stall-hang")
        assert declared is not None, f"phase {phase}"
        assert declared - shell.frozen_at <= bound, f"phase {phase}"  # type: ignore[attr-defined]
        assert declared - last_proof(shell, declared) >= settings.stall_sec, f"phase {phase}"
        assert shell.watch.verdict.core == "0"


def test_cores_that_freeze_one_after_another_do_not_make_one_another_wait_for_a_page() -> None:
    """The recheck that comes first wins: core 1 froze earlier in the poll than core 0."""
    engine = ScriptedEngine(2).busy()
    engine.at(66.0, lambda e: e.hang("1")).at(100.0, lambda e: e.hang("0"))
    shell = VirtualShell(engine).run(200)
    declared = [t for t, verdict in shell.timeline if verdict.state == "stall-hang"]
    assert declared[0] <= 66 + 36
    both = [t for t, verdict in shell.timeline if "and 1 more" in verdict.reason]
    assert both[0] <= 100 + 36


@pytest.mark.parametrize("timeout", [1.0, 5.0, 5.1, 9.9])
@pytest.mark.parametrize("scrape", [0.5, 3.0, 5.0, 6.0, 9.5])
def test_a_slow_metrics_page_delays_the_verdict_by_little_more_than_its_own_time(scrape: float, timeout: float) -> None:
    """However canaries and scrapes interleave, one page begun after a failure comes before the next failure."""
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    engine.scrape_sec = scrape
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_timeout_sec=timeout)).run(180)
    assert shell.acted()[0] <= 62 + 36 + 2 * scrape + timeout
    assert shell.acted()[0] - last_proof(shell, shell.acted()[0]) >= 30


def test_a_poll_is_never_delayed_by_a_canary() -> None:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(200)
    polls = [event.started_at for _, event in shell.events if isinstance(event, Scraped) and not event.recheck]
    assert [later - earlier for earlier, later in itertools.pairwise(polls)] == [5.0] * (len(polls) - 1)


# --- rechecks -------------------------------------------------------------------------------------------------------


def test_a_failed_canary_asks_for_a_page_at_once() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    assert Rescrape(0.0) in watch.canary(10, Outcome.TIMEOUT)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.SATURATED, Outcome.MISCONFIGURED])
def test_any_other_answer_asks_for_none(outcome: Outcome) -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    assert "Rescrape" not in kinds(watch.canary(5.1, outcome))


def test_a_page_is_asked_for_at_the_moment_at_which_only_time_is_missing() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    for t in (10.0, 15.0, 20.0, 25.0):
        watch.canary(t - 0.1, Outcome.TIMEOUT)
        watch.page(t, vllm_page())
    # Ripe at 30.1: proof at 0.1 + 30, first failure begun at 5 + 25.
    watch.canary(29.9, Outcome.TIMEOUT)
    asked = [each for each in watch.page(30, vllm_page()) if isinstance(each, Rescrape)]
    assert len(asked) == 1
    assert asked[0].after_sec == pytest.approx(0.1, abs=0.01)
    watch.page(30 + asked[0].after_sec, vllm_page(), recheck=True)
    assert watch.state == "stall-hang"


def suspected(last_page_begun: float, last_page_read: float, samples: dict[str, float]) -> list[Rescrape]:
    """What a page leads to that is read about when the time is up: at 30.1, proof at 0.1 + 30."""
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page())
    for t in (10.0, 15.0, 20.0, 25.0):
        watch.canary(t - 0.1, Outcome.TIMEOUT)
        watch.page(t, vllm_page())
    watch.canary(29.9, Outcome.TIMEOUT)
    asked = watch.page(last_page_read, samples, begun=last_page_begun)
    return [each for each in asked if isinstance(each, Rescrape)]


def test_a_time_that_runs_out_while_a_page_is_read_does_not_cost_a_poll() -> None:
    """Seen on a real vLLM: the page took 20 ms, the time was up in those, and the 503 came 39.8 s after the freeze."""
    [asked] = suspected(30.09, 30.12, vllm_page())
    assert asked.after_sec == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("samples", [vllm_page(), vllm_page(core="1"), {"vllm:num_requests_running": 0.0}])
def test_a_page_begun_after_the_time_was_up_asks_for_no_other(samples: dict[str, float]) -> None:
    """Whatever it lacks: a page that proves nothing must not be followed by another at once, and another."""
    assert suspected(30.11, 30.12, samples) == []


def slow_pages(tokens: Callable[[float], float], until: float) -> DirectWatch:
    """Pages that take as long as the canaries, and of which none begins between the end of one canary and the next."""
    watch = DirectWatch(FAST)
    watch.page(0, vllm_page(tokens(0)))
    watch.canary(0.1, Outcome.OK)
    watch.page(1, vllm_page(tokens(0)))
    answered = 1
    for begun in itertools.takewhile(lambda t: t < until, itertools.count(2.0, 2.0)):
        if len(watch.canaries) > answered:
            answered = len(watch.canaries)
            watch.canary(begun + 1.5, Outcome.TIMEOUT)
        watch.page(begun + 2, vllm_page(tokens(begun)), begun=begun)
    return watch


def test_a_page_that_takes_as_long_as_a_canary_still_confirms_a_hang() -> None:
    """TensorRT-LLM's statistics wait for news for two seconds: each page was begun before the last canary failed."""
    assert slow_pages(lambda t: 100.0, until=20).state == "stall-hang"


def test_a_slow_page_on_which_something_moves_does_not() -> None:
    assert not slow_pages(lambda t: 100.0 + t, until=20).watch.verdict.hung


def test_with_canaries_off_polls_are_all_there_is() -> None:
    settings = Settings(warmup_sec=0, active_probe_enabled=False)
    shell = VirtualShell(ScriptedEngine(4).busy().at(62, lambda e: e.hang("2")), settings).run(200)
    assert shell.acted()
    assert not any(isinstance(instruction, Rescrape) for instruction in shell.instructions)


def test_rechecks_never_pile_up_while_a_core_is_frozen() -> None:
    engine = ScriptedEngine(8).busy().at(62, ScriptedEngine.hang)
    shell = VirtualShell(engine).run(400)
    rechecks = [t for t, event in shell.events if isinstance(event, Scraped) and event.recheck]
    assert len(rechecks) <= 3 * (400 - 62) / 5


def test_a_declared_core_is_asked_on_but_needs_no_further_pages() -> None:
    """64 dead cores that refuse at once must not mean 64 pages per poll."""
    engine = ScriptedEngine(8).busy().at(62, ScriptedEngine.hang).at(62, lambda e: e.answer(Outcome.REFUSED))
    shell = VirtualShell(engine).run(400)
    late = [event for t, event in shell.events if t > 300 and isinstance(event, Scraped)]
    assert len([t for t, _ in shell.canaries if t > 300]) == 8 * 20
    assert not any(event.recheck for event in late)


def test_a_page_overtaken_by_a_recheck_does_not_bring_back_the_past() -> None:
    """The recheck began later and was read first; the poll's older page must not look like a counter that fell."""
    watch = DirectWatch()
    watch.page(0, vllm_page(100, start_time=None))
    watch.page(5, vllm_page(200, start_time=None), begun=5)
    watch.page(10.5, vllm_page(300, start_time=None), begun=10.4, recheck=True)
    watch.page(11, vllm_page(250, start_time=None), begun=10)
    assert watch.watch.restarts == 0
    assert watch.state == "growing"


def test_a_page_begun_later_that_is_lower_is_another_process() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100, start_time=None))
    watch.page(5, vllm_page(300, start_time=None))
    watch.page(10, vllm_page(250, start_time=None))
    assert watch.watch.restarts == 1
    assert watch.state == "replaced"
