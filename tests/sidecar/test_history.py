"""The recent past, in bounded memory and without what must not be served."""

from __future__ import annotations

import json
from typing import Any

from tests.sidecar.fakes import WALL, FakeStoryEntry, verdict

from enginewatch.core.events import (
    CanaryDone,
    EngineDescribed,
    Flags,
    FlagsRead,
    LogChannelChanged,
    LogHits,
    Outcome,
    Scraped,
    ScrapeFailed,
    SettingsChanged,
    Tick,
    Verdict,
)
from enginewatch.core.settings import Settings
from enginewatch.sidecar.history import EVIDENCE_BYTES, EVIDENCE_COUNT, RING_BYTES, History

HUNG = Verdict("stall-hang", True, True, "core 0: no progress", "0", 0.0)


def history() -> History:
    return History(lambda moment: WALL + moment)


def told(past: History, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in past.lines().splitlines()]
    return [line for line in lines if kind is None or line["kind"] == kind]


def test_a_verdict_is_told_with_its_time() -> None:
    past = history()
    past.note_verdict(HUNG, 2.0)
    assert told(past) == [
        {
            "at": "2026-10-14T02:07:23.29Z",
            "kind": "verdict",
            "state": "stall-hang",
            "hung": True,
            "acting": True,
            "reason": "core 0: no progress",
            "core": "0",
        }
    ]


def test_everyday_states_are_told_once_a_minute_at_most() -> None:
    past = history()
    for now in range(0, 600, 5):
        past.note_verdict(verdict("growing" if now % 10 else "kv-growing"), now)
    assert len(told(past)) == 10


def test_a_change_to_or_from_a_state_that_is_not_everyday_is_always_told() -> None:
    past = history()
    for now, state in enumerate(["growing", "probe-fail-grace", "growing", "paused", "stall-active-ok"]):
        past.note_verdict(verdict(state), now)
    assert [line["state"] for line in told(past)] == [
        *("growing", "probe-fail-grace", "growing", "paused", "stall-active-ok")
    ]


def test_a_hang_is_told_in_detail_for_two_minutes_and_then_once_a_minute() -> None:
    past = history()
    for now in range(0, 600, 5):
        past.note_verdict(Verdict("stall-hang", True, True, f"frozen for {now} s", "0", 0.0), now)
    assert len(told(past)) == 24 + 8


def test_pages_are_told_as_changes_and_only_where_something_is_wrong() -> None:
    past = history()
    past.note_verdict(verdict("growing"), 0)
    past.note_event(Scraped(0, {"a_total": 1.0, "b": 5.0}), 0)
    assert told(past, "scraped") == []
    past.note_verdict(verdict("probe-fail-grace"), 5)
    past.note_event(Scraped(10, {"a_total": 1.0, "c": 2.0}), 10)
    assert told(past, "scraped")[0]["changed"] == {"c": 2.0}
    assert told(past, "scraped")[0]["gone"] == ["b"]


def test_ticks_are_not_told() -> None:
    past = history()
    past.note_event(Tick(), 0)
    assert told(past) == []


def test_an_outage_of_hours_is_told_once_a_minute() -> None:
    past = history()
    past.note_verdict(verdict("restarting"), 0)
    for now in range(0, 3600, 5):
        past.note_event(ScrapeFailed(now, "refused", "nobody listens"), now)
    assert len(told(past, "scrape-failed")) <= 24 + 60


def test_an_hour_of_the_worst_does_not_outgrow_its_bound() -> None:
    past = history()
    for number in range(20_000):
        now = float(number)
        past.note_verdict(Verdict(f"stall-hang-{number % 7}", True, True, "x" * 1000, "0", 0.0), now)
        past.note_event(Scraped(now, {f'a_total{{n="{n}"}}': now for n in range(100)}), now)
        past.note_event(CanaryDone(number, Outcome.TIMEOUT, "no answer"), now)
    assert past.size_bytes <= RING_BYTES
    assert len(past._noted) <= 64
    assert told(past)[-1]["at"] > told(past)[0]["at"], "newest last"


def test_every_kind_of_event_can_be_told() -> None:
    past = history()
    for event in (
        EngineDescribed("vllm", "0.32.0"),
        FlagsRead(Flags.PAUSED),
        LogHits(3, (0, 2)),
        LogChannelChanged("no file"),
        SettingsChanged(Settings(active_probe_body="secret", active_probe_path="/x?key=secret")),
        CanaryDone(1, Outcome.OK),
        ScrapeFailed(0, "http_503"),
    ):
        past.note_event(event, 0)
    assert {line["kind"] for line in told(past)} == {
        *("described", "flags", "log-hits", "log-channel", "settings", "canary", "scrape-failed")
    }
    assert b"secret" not in past.lines()


def test_evidence_tells_the_story_the_samples_and_the_explanation() -> None:
    past = history()
    past.note_event(Scraped(0, {"a_total": 7.0}), 0)
    story = [
        FakeStoryEntry(0, Scraped(0, {"a_total": 7.0}), "growing"),
        FakeStoryEntry(1, Tick(), "growing"),
        FakeStoryEntry(5, Scraped(5, {"a_total": 7.0}), "freeze-grace"),
        FakeStoryEntry(6, CanaryDone(1, Outcome.TIMEOUT), "probe-fail-grace"),
    ]
    past.keep_evidence("core 0: no progress", HUNG, {"would_flip": ["a leg"]}, story, 30)
    (evidence,) = told(past, "evidence")
    assert evidence["reason"] == "core 0: no progress"
    assert evidence["samples"] == {"a_total": 7.0}
    assert evidence["explanation"] == {"would_flip": ["a leg"]}
    assert [entry["kind"] for entry in evidence["story"]] == ["scraped", "scraped", "canary"]
    assert evidence["story"][1]["changed"] == {}


def test_evidence_outlives_what_comes_after_and_the_last_few_are_kept() -> None:
    past = history()
    for number in range(20):
        past.keep_evidence(f"hang {number}", HUNG, {}, [], number)
        for step in range(200):
            past.note_verdict(Verdict(f"s{step % 3}", True, True, "x" * 500, "0", 0.0), 1000 * number + step)
    kept = told(past, "evidence")
    assert [line["reason"] for line in kept] == [f"hang {number}" for number in range(15, 20)]
    assert past.size_bytes <= RING_BYTES + EVIDENCE_COUNT * EVIDENCE_BYTES


def test_monstrous_evidence_is_cut() -> None:
    past = history()
    samples = {f'a_total{{x="{"y" * 2000}{number}"}}': 1.0 for number in range(1000)}
    past.note_event(Scraped(0, samples), 0)
    story = [FakeStoryEntry(n, Scraped(n, {f"s{n}" + "z" * 3000: float(n)}), "growing") for n in range(1000)]
    past.keep_evidence("why", HUNG, {"cores": ["x" * 1_000_000]}, story, 0)
    assert past.size_bytes <= EVIDENCE_BYTES + 200
    assert told(past, "scraped")[0]["too_large_bytes"] > 100_000
    assert told(past, "evidence")[0]["reason"] == "why"
