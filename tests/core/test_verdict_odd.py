"""Things that no rule speaks of: odd numbers, odd orders, odd times. Nothing here may kill, crash or go blind."""

from __future__ import annotations

import itertools
import math

import pytest
from direct_watch import DirectWatch, vllm_page
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Flags, LogChannelChanged, Outcome, Scraped, Tick
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES

CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)


# --- time -----------------------------------------------------------------------------------------------------------


def test_a_clock_that_goes_back_a_bit_does_no_harm() -> None:
    watch = DirectWatch()
    for poll in range(40):
        wobble = (0.0, -0.4, 0.3)[poll % 3]
        watch.page(5.0 * poll + wobble, vllm_page(100 + poll, running=1))
        watch.tick(5.0 * poll + wobble - 0.2)
    assert watch.state == "growing"
    assert all(not published.verdict.hung for published in watch.published)


def test_a_page_that_claims_to_be_begun_in_the_future_does_not_shut_out_the_pages_after_it() -> None:
    watch = DirectWatch(CANARY_OFF)
    watch.page(0, vllm_page(100, running=1))
    watch.page(5, vllm_page(150, running=1), begun=5000)
    for poll in range(2, 40):
        watch.page(5.0 * poll, vllm_page(150 + poll, running=1))
    assert watch.state == "growing"
    assert all(not published.verdict.hung for published in watch.published)


@pytest.mark.parametrize("gap", [100.0, 1e6, 1e9])
def test_a_huge_gap_is_a_gap(gap: float) -> None:
    watch = DirectWatch(CANARY_OFF)
    for t in (0.0, 5.0, 10.0):
        watch.page(t, vllm_page(running=1))
    watch.page(10 + gap, vllm_page(running=1))
    assert watch.state == "observer-gap"
    for poll in range(1, 3):
        watch.page(10 + gap + 5 * poll, vllm_page(running=1))
        assert not watch.watch.verdict.hung
    for poll in range(3, 8):
        watch.page(10 + gap + 5 * poll, vllm_page(running=1))
    assert watch.watch.verdict.hung, "the negative control: the watched time adds up"


def test_two_gaps_in_a_row_are_both_taken_off() -> None:
    watch = DirectWatch(CANARY_OFF)
    t = 0.0
    for _ in range(3):
        watch.page(t, vllm_page(running=1))
        t += 1000
    watch.page(t, vllm_page(running=1))
    assert not watch.watch.verdict.hung


def test_events_at_the_same_instant_are_taken_in_order() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0, Outcome.OK)
    watch.page(0, vllm_page())
    watch.tick(0, 0, 0)
    assert not watch.watch.verdict.hung


def test_a_watcher_that_starts_late_in_the_hosts_life_counts_as_well() -> None:
    """Monotonic clocks begin anywhere; thresholds must not drown in rounding."""
    base = 4.0e8
    watch = Watch(CANARY_OFF, profile=PROFILES["vllm"], now=base)
    for poll in range(9):
        watch.handle(Tick(), base + 5 * poll)
        watch.handle(Scraped(base + 5 * poll, vllm_page(running=1)), base + 5 * poll + 0.01)
    assert watch.verdict.hung


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", [-1.0, -0.0, 0.0])
def test_a_load_gauge_that_is_not_above_zero_is_not_busy(running: float) -> None:
    watch = DirectWatch(CANARY_OFF)
    for poll in range(40):
        watch.page(5.0 * poll, vllm_page(running=running))
    assert watch.state == "idle"


def test_a_negative_usage_gauge_does_no_harm() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(kv=-1.0))
    watch.canary(0.1, Outcome.OK)
    watch.page(5, vllm_page(kv=-1.0))
    watch.canary(5.1, Outcome.OK)
    watch.page(10, vllm_page(kv=-2.0))
    assert watch.state == "stall-active-ok"


def test_counters_beyond_the_precision_of_a_float_are_frozen_only_as_long_as_no_canary_says_otherwise() -> None:
    """Above 2^53 single tokens vanish; the canary still goes through."""
    engine = ScriptedEngine()
    engine.cores["0"].tokens = 2.0**60
    engine.busy()
    assert VirtualShell(engine).run(300).acted() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_sample_that_should_have_been_dropped_does_not_crash(value: float) -> None:
    watch = DirectWatch()
    for poll in range(20):
        watch.page(5.0 * poll, vllm_page(value, kv=value, running=1))
        watch.canary(5.0 * poll + 0.1, Outcome.OK)
    assert not watch.watch.verdict.hung


# --- pages ----------------------------------------------------------------------------------------------------------


def test_a_page_that_loses_the_core_label_is_learned_anew() -> None:
    watch = DirectWatch()
    t = 0.0
    for poll in range(4):
        watch.page(t := 5.0 * poll, vllm_page(100 + poll, core="0") | vllm_page(100 + poll, core="1"))
    for poll in range(4, 4 + 3 + 17):  # until canaries had the time to decide instead
        watch.page(t := 5.0 * poll, vllm_page(200 + poll, core=None))
        assert not watch.watch.verdict.hung
    assert [core.core for core in watch.watch.explain(t).cores] == ["0"]
    assert watch.state == "growing"


def test_a_page_that_flaps_between_labelled_and_not_is_never_hung_while_it_moves() -> None:
    watch = DirectWatch()
    for poll in range(100):
        watch.page(5.0 * poll, vllm_page(100 + poll, running=1, core="0" if poll % 2 else None))
        watch.canary(5.0 * poll + 1, Outcome.TIMEOUT)
        assert not watch.watch.verdict.hung


def test_an_empty_page_at_first_then_a_real_one() -> None:
    watch = DirectWatch()
    watch.page(0, {})
    assert watch.state == "no-legs"
    watch.page(5, vllm_page())
    assert watch.state != "no-legs"
    assert watch.watch.restarts == 0


def test_an_engine_that_invents_series_for_ever_is_bounded_and_not_hung() -> None:
    watch = DirectWatch(CANARY_OFF)
    fresh = itertools.count()
    for poll in range(30):
        page = vllm_page(100 + poll, running=1)
        page |= {f'vllm:prompt_tokens_total{{engine="0",model_name="lora-{next(fresh)}"}}': 1.0 for _ in range(1000)}
        watch.page(5.0 * poll, page)
        assert not watch.watch.verdict.hung
    assert len(watch.watch._ledger._slots) <= 10_000


def test_duplicate_spellings_of_one_series_are_all_looked_at() -> None:
    """Several registries in one page (gonka#1421): the one that moves counts."""
    engine = ScriptedEngine().busy()
    engine.extra['ray_vllm:generation_tokens_total{engine="0",model_name="m"}'] = 5.0
    assert VirtualShell(engine).run(300).acted() == []


def test_two_processes_behind_one_address_are_never_hung_for_that() -> None:
    """Each page looks like a replacement; that is noise, but it must not kill."""
    watch = DirectWatch()
    for poll in range(100):
        watch.page(5.0 * poll, vllm_page(100, running=1, start_time=1000.0 + poll % 2))
        assert not watch.watch.verdict.hung


# --- orders ---------------------------------------------------------------------------------------------------------


def test_everything_may_come_before_the_first_page() -> None:
    watch = DirectWatch()
    watch.log(1)
    watch.flags(1, Flags.PAUSED)
    watch.described(1)
    watch.set(1, Settings(warmup_sec=0))
    watch.canary(1, Outcome.OK, token=1)
    watch.tick(2)
    watch.watch.handle(LogChannelChanged("gone"), 2)
    watch.watch.explain(2)
    assert watch.state == "startup"


def test_a_pause_told_while_the_engine_loads_does_not_hide_that_it_loads() -> None:
    watch = DirectWatch(Settings(startup_budget_sec=20))
    watch.fails(0, "refused")
    watch.flags(1, Flags.PAUSED)
    for t in (5, 10, 15, 20, 25):
        watch.fails(t, "refused")
    assert watch.state == "startup-hang"


def test_a_recheck_that_nobody_asked_for_is_a_page_like_any_other() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(), recheck=True)
    watch.page(5, vllm_page())
    assert not watch.watch.verdict.hung


def test_rechecks_alone_never_make_polls() -> None:
    """A core is retired, and a page is legless, by polls."""
    watch = DirectWatch()
    watch.page(0, vllm_page(core="0") | vllm_page(core="1"))
    for t in range(1, 10):
        watch.page(t, vllm_page(core="0"), recheck=True)
    for t in range(10, 18):
        watch.page(t, {}, recheck=True)
    assert {core.core for core in watch.watch.explain(18).cores} == {"0", "1"}
    assert watch.state != "no-legs"


# --- the story ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "auto"])
def test_a_story_told_to_a_new_judgement_gives_the_same_verdicts(kind: str) -> None:
    engine = ScriptedEngine(2).busy().at(42, lambda e: e.hang("1")).at(122, ScriptedEngine.resume)
    engine.at(142, lambda e: e.fail("timeout")).at(162, ScriptedEngine.restart)
    shell = VirtualShell(engine, kind=kind).run(300)
    again = Watch(shell.settings, profile=PROFILES.get(kind), now=0.0, log_channel=True)
    for entry in shell.watch.story():
        again.handle(entry.event, entry.now)
        assert again.verdict.state == entry.state
    assert again.verdict == shell.watch.verdict


def test_a_story_is_bounded() -> None:
    shell = VirtualShell(ScriptedEngine(8).busy()).run(10_000)
    story = shell.watch.story()
    assert len(story) <= 400
    assert sum(len(entry.event.samples) for entry in story if isinstance(entry.event, Scraped)) <= 20_000
