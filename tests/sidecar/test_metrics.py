"""The sidecar's own metrics: names and labels are public."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.sidecar.fakes import WALL, FakeExplanation, FakeIdentity, FakeJudge, House

from enginewatch.core.events import Outcome
from enginewatch.sidecar.metrics import TASKS

PUBLIC = {
    "enginewatch_verdict_state": {"state"},
    "enginewatch_hung": set(),
    "enginewatch_acting": set(),
    "enginewatch_engine_info": {"engine_id", "source", "kind", "role"},
    "enginewatch_engine_restarts_total": set(),
    "enginewatch_core_stalled_seconds": {"core"},
    "enginewatch_last_progress_timestamp_seconds": {"core"},
    "enginewatch_scrape_duration_seconds_count": set(),
    "enginewatch_scrapes_total": {"outcome"},
    "enginewatch_canary_duration_seconds_count": set(),
    "enginewatch_canaries_total": {"outcome"},
    "enginewatch_verdict_transitions_total": {"from", "to"},
    "enginewatch_suppressed_hangs_total": {"why"},
    "enginewatch_log_hits_total": set(),
    "enginewatch_config_last_reload_successful": set(),
    "enginewatch_config_last_reload_success_timestamp_seconds": set(),
    "enginewatch_config_unknown_keys": set(),
    "enginewatch_loop_age_seconds": set(),
    "enginewatch_internal_errors_total": {"task"},
    "process_resident_memory_bytes": set(),
}


@dataclass
class Leg:
    value: float
    moved_ago_sec: float | None


@dataclass
class CoreView:
    core: str
    stalled_for_sec: float
    running: float | None
    waiting: float | None
    legs: dict[str, Leg]


async def test_every_public_metric_is_there_with_its_labels() -> None:
    core = CoreView("0", 12.5, 1, 0, {"prompt_tokens": Leg(7, 30.0), "kv": Leg(0.5, 10.0), "new": Leg(0, None)})
    judge = FakeJudge(identity=FakeIdentity(), restarts=2, explanation=FakeExplanation((core,)))
    house = House(judge)
    house.metrics.state_changed("growing", "stall-hang")
    seen: dict[str, set[str]] = {}
    values: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(house.metrics.render().decode()):
        for sample in family.samples:
            seen.setdefault(sample.name, set()).update(sample.labels)
            values[sample.name, sample.labels.get("core", "")] = sample.value
    for name, labels in PUBLIC.items():
        assert name in seen, name
        assert seen[name] == labels, name
    assert not [name for name in seen if name.endswith("_created")]
    assert values["enginewatch_engine_restarts_total", ""] == 2
    assert values["enginewatch_core_stalled_seconds", "0"] == 12.5
    assert abs(values["enginewatch_last_progress_timestamp_seconds", "0"] - (WALL - 10)) < 1


async def test_exactly_one_state_holds_and_all_are_there_from_the_start() -> None:
    house = House()
    page = house.metrics.render().decode()
    states = [line for line in page.splitlines() if line.startswith("enginewatch_verdict_state{")]
    assert len([line for line in states if line.endswith(" 1.0")]) == 1
    assert len(states) == 33
    assert house.metric('enginewatch_verdict_state{state="growing"}') == 1
    assert house.metric('enginewatch_verdict_state{state="warmup-stall-hang"}') == 0


async def test_counters_begin_at_zero_so_that_the_first_event_has_a_rate() -> None:
    house = House()
    for outcome in Outcome:
        assert house.metric(f'enginewatch_canaries_total{{outcome="{outcome.value}"}}') == 0
    for outcome_name in ("ok", "refused", "timeout", "reset", "truncated", "malformed"):
        assert house.metric(f'enginewatch_scrapes_total{{outcome="{outcome_name}"}}') == 0
    for task in TASKS:
        assert house.metric(f'enginewatch_internal_errors_total{{task="{task}"}}') == 0
    for why in ("warmup", "shadow"):
        assert house.metric(f'enginewatch_suppressed_hangs_total{{why="{why}"}}') == 0


async def test_who_the_engine_is_stays_absent_until_it_is_known() -> None:
    house = House()
    assert b"enginewatch_engine_info{" not in house.metrics.render()


async def test_a_hostile_engine_cannot_mint_series_without_end() -> None:
    house = House()
    for status in range(100, 1000):
        house.metrics.scraped(f"http_{status}", 0.1)
    page = house.metrics.render().decode()
    assert page.count("enginewatch_scrapes_total{") < 45
    assert (house.metric('enginewatch_scrapes_total{outcome="http_other"}') or 0) > 800


async def test_unknown_keys_are_counted_and_named(tmp_path: Path) -> None:
    house = House(directory=tmp_path, settings='{"stallSec": 1, "colour": 2}')
    assert house.metric("enginewatch_config_unknown_keys") == 2
    assert 'key="stallSec"' in house.metrics.render().decode()
    assert house.metric("enginewatch_config_last_reload_successful") == 1
