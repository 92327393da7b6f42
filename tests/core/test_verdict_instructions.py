"""Events in, instructions out: what exactly the judgement asks its shell to do at the moments that matter."""

from __future__ import annotations

from direct_watch import DirectWatch, vllm_page

from enginewatch.core.events import (
    AbandonCanary,
    CaptureEvidence,
    DescribeEngine,
    Flags,
    Log,
    Outcome,
    Publish,
    ReadFlags,
    Rescrape,
    StartCanary,
    Verdict,
)
from enginewatch.core.settings import Settings


def test_the_first_page_asks_who_it_is_and_sends_the_arming_canary() -> None:
    watch = DirectWatch()
    baseline = Verdict("baseline", False, False, "core 0: first page of this process", "0", 0.0)
    assert watch.page(1, vllm_page()) == [
        Log(
            "info",
            "the engine's identity is its own start time",
            {"source": "process_start_time", "engine_id": "pst-1000.00"},
        ),
        DescribeEngine(),
        Publish(baseline),
        Log("info", baseline.reason, {"from": "startup", "to": "baseline", "core": "0"}),
        StartCanary(1, None, 5.0),
    ]


def test_a_page_that_shows_work_asks_for_nothing() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100))
    watch.canary(0.1, Outcome.OK)
    growing = Verdict("growing", False, False, "core 0: generation_tokens moves", "0", 0.0)
    assert watch.page(5, vllm_page(200)) == [Publish(growing)]
    assert watch.page(10, vllm_page(300)) == [], "and the next one has nothing new to say"


def test_a_stalled_poll_reads_the_flags_and_sends_a_canary() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.described(0.1)
    watch.canary(0.2, Outcome.OK)
    idle = Verdict("stall-active-ok", False, False, "core 0: idle, the last canary went through", "0", 0.0)
    assert watch.page(5, vllm_page()) == [ReadFlags(), Publish(idle), StartCanary(2, None, 5.0)]


def test_a_failed_canary_asks_for_a_page_and_says_so() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.2, Outcome.OK)
    watch.page(5, vllm_page())
    asked = watch.canary(10, Outcome.TIMEOUT)
    reason = "core 0: 1 canary failed (timeout), frozen for 10 s of 30 s"
    assert asked == [
        Rescrape(0.0),
        Publish(Verdict("probe-fail-grace", False, False, reason, "0", 0.0)),
        Log("info", reason, {"from": "stall-active-ok", "to": "probe-fail-grace", "core": "0"}),
    ]


def test_a_hang_is_published_logged_and_its_evidence_captured_in_that_order() -> None:
    watch = DirectWatch()
    page = vllm_page(running=2, waiting=1)
    watch.page(0, page)
    watch.canary(0, Outcome.OK)
    for t in (5, 10, 15, 20, 25):
        watch.page(t, page)
        watch.canary(t + 4.9, Outcome.TIMEOUT)
        watch.page(t + 4.95, page, recheck=True)
    asked = watch.page(30, page)
    reason = "core 0: no progress for 30 s (limit 30 s), 5 canaries in a row failed (timeout), 2 running, 1 waiting"
    assert asked == [
        Publish(Verdict("stall-hang", True, True, reason, "0", 30)),
        Log("error", reason, {"from": "probe-fail-grace", "to": "stall-hang", "core": "0"}),
        CaptureEvidence(reason),
        StartCanary(7, None, 5.0),
    ]


def test_a_replacement_takes_the_canary_back_before_it_sends_a_new_one() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.2, Outcome.OK)
    watch.page(5, vllm_page())
    reason = "another engine process answers now: everything is learned anew"
    assert watch.page(10, vllm_page(0, start_time=2000.0)) == [
        AbandonCanary(2),
        Log(
            "warning",
            "the engine was replaced by another process",
            {"engine_id": "pst-2000.00", "restarts": 1},
        ),
        DescribeEngine(),
        Publish(Verdict("replaced", False, False, reason, None, 0.0)),
        Log("info", reason, {"from": "stall-active-ok", "to": "replaced"}),
        StartCanary(3, None, 5.0),
    ]


def test_a_pause_takes_the_canary_back_and_sends_none() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.2, Outcome.OK)
    watch.page(5, vllm_page())
    reason = "the engine says it is paused: no canary, no hang"
    assert watch.flags(5.5, Flags.PAUSED) == [
        AbandonCanary(2),
        Publish(Verdict("paused", False, False, reason, None, 0.0)),
        Log("info", reason, {"from": "stall-active-ok", "to": "paused"}),
    ]


def test_a_refused_connection_sends_no_canary_and_leaves_the_one_under_way() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.2, Outcome.OK)
    watch.page(5, vllm_page())
    reason = "nobody listens any more: the engine's process is gone and is being restarted"
    assert watch.fails(10, "refused") == [
        Publish(Verdict("restarting", False, False, reason, None, 0.0)),
        Log("info", reason, {"from": "stall-active-ok", "to": "restarting"}),
    ]


def test_a_failed_scrape_sends_a_canary_of_its_own() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page(100))
    watch.canary(0.2, Outcome.OK)
    reason = "/metrics fails (timeout) for 0 s of 60 s"
    assert watch.fails(5, "timeout") == [
        Publish(Verdict("unreach-grace", False, False, reason, None, 0.0)),
        Log("info", reason, {"from": "baseline", "to": "unreach-grace"}),
        StartCanary(2, None, 5.0),
    ]


def test_the_first_page_after_an_outage_takes_that_canary_back_and_sends_a_new_one() -> None:
    watch = DirectWatch(Settings(warmup_sec=0, active_probe_timeout_sec=30))
    watch.page(0, vllm_page())
    watch.canary(0.2, Outcome.OK)
    watch.fails(5, "timeout")
    watch.fails(10, "timeout")
    asked = watch.page(15, vllm_page())
    assert [each for each in asked if isinstance(each, AbandonCanary | StartCanary)] == [
        AbandonCanary(2),
        StartCanary(3, None, 30.0),
    ]


def test_a_tick_that_changes_nothing_asks_for_nothing() -> None:
    watch = DirectWatch()
    watch.page(0, vllm_page())
    watch.canary(0.2, Outcome.OK)
    watch.page(5, vllm_page(200))
    assert watch.tick(6) == []
