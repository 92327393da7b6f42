"""What the vLLM profile finds on real pages of vLLM 0.32.0, and on lines in the manner of other versions."""

from collections.abc import Callable
from typing import Any

import pytest

from enginewatch.engines.profile import Grain, LegKind, PageFlag
from enginewatch.engines.vllm import PROFILE

Load = Callable[[str], Any]

SINGLE = [
    "vllm-0.32.0-single-idle-fresh",
    "vllm-0.32.0-single-decoding",
    "vllm-0.32.0-single-hung-from-idle",
    "vllm-0.32.0-single-hung-while-decoding",
    "vllm-0.32.0-single-paused-request-pending",
]
KEPT_DIR = ["vllm-0.32.0-api2-kept-dir-before-kill", "vllm-0.32.0-api2-kept-dir-after-kill"]
MULTIPROCESS = ["vllm-0.32.0-api2-after", "vllm-0.32.0-api2-enginecore-stopped", *KEPT_DIR]
TWO_CORES = ["vllm-0.32.0-dp2-api2-idle", "vllm-0.32.0-dp2-api2-decoding", "vllm-0.32.0-dp2-api2-engine0-hung"]
# With several API servers a gauge appears with its core's first step.
GAUGELESS = ["vllm-0.32.0-dp2-api2-idle"]
ALL_LEGS = {"generation_tokens", "prompt_tokens", "iterations", "requests_finished", "kv_cache_usage"}


@pytest.mark.parametrize("name", SINGLE + MULTIPROCESS + TWO_CORES)
def test_every_leg_is_on_every_page_once_per_core(load: Load, name: str) -> None:
    legs = load(name).legs(PROFILE)
    assert set(legs) == (ALL_LEGS - {"kv_cache_usage"} if name in GAUGELESS else ALL_LEGS)
    cores = ["0", "1"] if name in TWO_CORES else ["0"]
    for leg, series in legs.items():
        per_core = 2 if leg == "requests_finished" else 1  # stop and length
        assert sorted(found.labels["engine"] for found in series) == sorted(cores * per_core), leg


@pytest.mark.parametrize("name", GAUGELESS)
def test_before_the_first_step_nothing_says_busy(load: Load, name: str) -> None:
    page = load(name)
    for metric in (PROFILE.running, PROFILE.waiting, PROFILE.deferred):
        assert page.find(PROFILE, metric) == []


def test_kinds_and_grains_of_the_legs() -> None:
    grains = {leg.name: leg.grain for leg in PROFILE.legs}
    assert {name for name, grain in grains.items() if grain is Grain.REQUEST} == {"requests_finished"}
    rising = {leg.name for leg in PROFILE.legs if leg.kind is LegKind.RISING_GAUGE}
    assert rising == {"kv_cache_usage"}


def test_what_proves_no_work_is_not_a_leg(load: Load) -> None:
    page = load("vllm-0.32.0-single-decoding")
    leg_names = {series.name for found in page.legs(PROFILE).values() for series in found}
    near = {name for name in page.names if name.removesuffix("_created") != name or name.endswith("_bucket")}
    near |= {name for name in page.names if name.startswith("vllm:request_") and name != "vllm:request_success_total"}
    near |= {name for name in page.names if name.startswith(("vllm:prefix_cache", "vllm:num_preemptions"))}
    near |= {name for name in page.names if name.startswith("vllm:prompt_tokens_") and name.endswith("source_total")}
    assert len(near) > 20
    assert leg_names.isdisjoint(near)


def test_aborted_and_failed_requests_are_not_progress(load: Load) -> None:
    finished = load("vllm-0.32.0-single-decoding").legs(PROFILE)["requests_finished"]
    assert {series.labels["finished_reason"] for series in finished} == {"stop", "length"}


def test_the_page_of_a_hung_core_still_says_busy(load: Load) -> None:
    page = load("vllm-0.32.0-dp2-api2-engine0-hung")
    assert page.values(PROFILE, PROFILE.running) == {"0": 2, "1": 0}


@pytest.mark.parametrize("name", ["vllm-0.32.0-single-hung-from-idle", "vllm-0.32.0-single-paused-request-pending"])
def test_a_hang_from_idle_and_a_pause_both_look_idle(load: Load, name: str) -> None:
    page = load(name)
    assert page.values(PROFILE, PROFILE.running) == {"0": 0}
    assert page.values(PROFILE, PROFILE.waiting) == {"0": 0}
    assert not any(_holds(page, flag) for flag in PROFILE.page_flags)


def test_sleep_is_read_from_the_page_and_only_when_asleep(load: Load, parse: Load) -> None:
    assert not any(_holds(load("vllm-0.32.0-single-idle-fresh"), flag) for flag in PROFILE.page_flags)
    asleep = parse(
        'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 0.0\n'
        'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 1.0\n'
        'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0\n'
    )
    assert [flag.state for flag in PROFILE.page_flags if _holds(asleep, flag)] == ["sleeping"]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_call_under_way_that_holds_the_cores_is_a_rest(parse: Load, calls: int) -> None:
    """Two of a kind where the caller gave up and tried again: the first stays in flight until the core answers."""
    page = parse(
        'vllm:sleep_mode_operations_in_flight{operation="wake"} 0.0\n'
        f'vllm:rl_weight_update_operations_in_flight{{operation="update"}} {calls}.0\n'
    )
    assert [flag.state for flag in PROFILE.page_flags if _holds(page, flag)] == ["paused"]


@pytest.mark.parametrize("name", SINGLE)
def test_one_api_server_tells_its_start(load: Load, name: str) -> None:
    (series,) = load(name).find(PROFILE, PROFILE.start_time)
    assert series.value == pytest.approx(1795976293.83)


@pytest.mark.parametrize("name", MULTIPROCESS + TWO_CORES)
def test_several_api_servers_tell_no_start(load: Load, name: str) -> None:
    assert load(name).find(PROFILE, PROFILE.start_time) == []


def test_a_directory_that_outlives_the_process_shows_the_dead_ones_values(load: Load) -> None:
    """As sum of the old process's files and the new one's; by counters alone the old one has gone on working."""
    before, after = (load(name) for name in KEPT_DIR)
    [last], [first] = (page.legs(PROFILE)["generation_tokens"] for page in (before, after))
    assert (last.value, first.value) == (366, 375)
    assert before.values(PROFILE, PROFILE.running) == after.values(PROFILE, PROFILE.running) == {"0": 3}


def test_requests_deferred_for_a_partner_are_told_apart(load: Load) -> None:
    (series,) = load("vllm-0.32.0-single-idle-fresh").find(PROFILE, PROFILE.deferred)
    assert series.labels["reason"] == "deferred"
    assert [queue.metric for queue in PROFILE.queues] == [PROFILE.deferred]


def test_only_successful_transfers_count_as_such(load: Load, parse: Load) -> None:
    (series,) = load("vllm-0.32.0-single-decoding").find(PROFILE, PROFILE.transfers)
    assert series.labels["source"] == "external_kv_transfer"
    nixl = parse(
        'vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 4096.0\n'
        'vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 1.0\n'
        'vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 7.0\n'
    )
    assert nixl.values(PROFILE, PROFILE.transfers) == {"0": 4096}


def test_a_v0_page_is_one_core_without_a_label(parse: Load) -> None:
    page = parse(
        'vllm:num_requests_running{model_name="m"} 2.0\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
        'vllm:generation_tokens_total{model_name="m"} 17.0\n'
        'vllm:request_success_total{finished_reason="abort",model_name="m"} 3.0\n'
    )
    assert set(page.legs(PROFILE)) == {"generation_tokens", "kv_cache_usage"}
    assert page.values(PROFILE, PROFILE.running) == {"0": 2}


@pytest.mark.parametrize("prefix", ["vllm_", "ray_vllm:", "ray_vllm_"])
def test_pages_that_went_through_others_have_the_same_legs(parse: Load, prefix: str) -> None:
    page = parse(
        f'{prefix}generation_tokens_total{{engine="0",ReplicaId="r"}} 1.0\n'
        f'{prefix}iteration_tokens_total_count{{engine="0",ReplicaId="r"}} 1.0\n'
        f'{prefix}request_generation_tokens_count{{engine="0",ReplicaId="r"}} 1.0\n'
    )
    assert set(page.legs(PROFILE)) == {"generation_tokens", "iterations"}


def test_a_dynamo_mocker_passes_on_the_kv_usage_under_both_names(load: Load) -> None:
    legs = load("dynamo-mocker-1.6.1-system").legs(PROFILE)
    assert {name: len(series) for name, series in legs.items()} == {"kv_cache_usage": 2}


@pytest.mark.parametrize(
    ("version", "header"),
    [
        ("0.11.0", None),
        ("0.11.1", "X-data-parallel-rank"),
        ("0.32.0+cpu", "X-data-parallel-rank"),
        ("0.1.dev1", None),
        (None, None),
    ],
)
def test_a_canary_is_aimed_only_where_completions_read_the_header(version: str | None, header: str | None) -> None:
    aim = PROFILE.canaries["agg"].aim_for(version)
    assert (aim.header if aim else None) == header


def test_the_ranks_of_a_second_node_are_counted_from_its_own_first(load: Load) -> None:
    aim = PROFILE.canaries["agg"].aim_for("0.32.0")
    assert aim is not None
    assert aim.value_for("5", ["4", "5"]) == 1


def test_no_role_names_a_transfer_partner() -> None:
    for canary in PROFILE.canaries.values():
        assert canary.body is not None
        assert "kv_transfer_params" not in canary.body


def test_a_pause_is_asked_for_before_a_sleep() -> None:
    assert [flag.state for flag in PROFILE.flags_for(None)] == ["paused", "sleeping"]


def _holds(page: Any, flag: PageFlag) -> bool:
    return any(flag.holds(series.value) for series in page.find(PROFILE, flag.metric))
