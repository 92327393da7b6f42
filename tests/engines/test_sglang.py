"""What the SGLang profile finds on pages of its collectors, and on lines in the manner of other set-ups."""

from collections.abc import Callable
from typing import Any

import pytest
import re2

from enginewatch.engines.profile import Grain, LegKind
from enginewatch.engines.sglang import PROFILE

Load = Callable[[str], Any]

PAGES = [f"sglang-{version}-collector-generated" for version in ("0.5.10.post1", "0.5.19", "0.5.23")]


@pytest.mark.parametrize("name", PAGES)
def test_every_leg_is_on_every_page(load: Load, name: str) -> None:
    legs = load(name).legs(PROFILE)
    assert set(legs) == {leg.name for leg in PROFILE.legs}
    modes = {series.labels["mode"] for series in legs["realtime_tokens"]}
    assert modes == {"prefill_compute", "prefill_cache", "decode"}
    assert len(legs["generation_tokens"]) == len(legs["token_usage"]) == 1


def test_kinds_and_grains_of_the_legs() -> None:
    request = {leg.name for leg in PROFILE.legs if leg.grain is Grain.REQUEST}
    assert request == {"generation_tokens", "prompt_tokens"}
    assert {leg.name for leg in PROFILE.legs if leg.kind is LegKind.RISING_GAUGE} == {"token_usage"}


@pytest.mark.parametrize("name", PAGES)
def test_neighbours_of_the_legs_are_not_legs(load: Load, name: str) -> None:
    page = load(name)
    leg_names = {series.name for found in page.legs(PROFILE).values() for series in found}
    assert leg_names == {
        f"sglang:{leg}"
        for leg in (
            "realtime_tokens_total",
            "cuda_graph_passes_total",
            "generation_tokens_total",
            "prompt_tokens_total",
            "token_usage",
        )
    }
    assert {"sglang:full_token_usage", "sglang:is_cuda_graph"} <= page.names - leg_names


@pytest.mark.parametrize("name", PAGES)
def test_busy_gauges_are_found_and_their_near_misses_are_not(load: Load, name: str) -> None:
    page = load(name)
    assert page.values(PROFILE, PROFILE.running) == {"0": 3}
    assert page.values(PROFILE, PROFILE.waiting) == {"0": 1}
    asked = PROFILE.names()
    assert "sglang:num_running_reqs" in asked
    assert not {"sglang:num_running_reqs_offline_batch", "sglang:num_retracted_reqs"} & asked


@pytest.mark.parametrize("name", PAGES)
def test_all_four_queues_are_found_also_under_the_old_name(load: Load, name: str) -> None:
    page = load(name)
    found = {queue.name: [series.name for series in page.find(PROFILE, queue.metric)] for queue in PROFILE.queues}
    assert {queue: len(names) for queue, names in found.items()} == dict.fromkeys(
        ("bootstrap", "inflight", "prealloc", "transfer"), 1
    )
    old = name == PAGES[0]
    assert found["bootstrap"] == [f"sglang:num_prefill_{'prealloc' if old else 'bootstrap'}_queue_reqs"]


def test_the_heartbeat_came_with_0_5_20(load: Load) -> None:
    assert [len(load(name).find(PROFILE, PROFILE.heartbeat)) for name in PAGES] == [0, 0, 2]


def test_a_thread_beside_the_loop_is_no_heartbeat() -> None:
    assert "sglang:process_cpu_seconds_total" not in PROFILE.names()


def test_priorities_are_not_added_to_their_total(parse: Load) -> None:
    page = parse(
        'sglang:num_running_reqs{engine_type="unified",priority="",tp_rank="0"} 5.0\n'
        'sglang:num_running_reqs{engine_type="unified",priority="0",tp_rank="0"} 2.0\n'
        'sglang:num_running_reqs{engine_type="unified",priority="7",tp_rank="0"} 3.0\n'
    )
    assert page.values(PROFILE, PROFILE.running) == {"0": 5}


def test_data_parallel_cores_are_told_apart_and_the_tokenizer_belongs_to_none(parse: Load) -> None:
    page = parse(
        'sglang:cuda_graph_passes_total{dp_rank="0",mode="decode_none",tp_rank="0"} 5.0\n'
        'sglang:cuda_graph_passes_total{dp_rank="1",mode="decode_none",tp_rank="1"} 6.0\n'
        'sglang:generation_tokens_total{engine_type="unified"} 512.0\n'
    )
    legs = page.legs(PROFILE)
    assert [series.labels[PROFILE.core_label] for series in legs["forward_passes"]] == ["0", "1"]
    assert PROFILE.core_label not in legs["generation_tokens"][0].labels


def test_a_failed_transfer_is_not_a_transfer(parse: Load) -> None:
    page = parse(
        'sglang:kv_transfer_latency_ms_count{engine_type="prefill"} 4.0\n'
        'sglang:kv_transfer_latency_ms_sum{engine_type="prefill"} 80.0\n'
        'sglang:num_transfer_failed_reqs_total{engine_type="prefill"} 9.0\n'
    )
    assert page.values(PROFILE, PROFILE.transfers) == {"0": 4}


def test_underscored_pages_have_the_same_legs(parse: Load) -> None:
    page = parse('sglang_realtime_tokens_total{mode="decode"} 1.0\nsglang_token_usage 0.5\n')
    assert set(page.legs(PROFILE)) == {"realtime_tokens", "token_usage"}


@pytest.mark.parametrize(
    ("version", "agg", "decode"),
    [
        ("0.5.23", "routed_dp_rank", "routed_dp_rank"),
        ("0.5.10", "routed_dp_rank", "routed_dp_rank"),
        ("0.5.10.post1", "routed_dp_rank", "routed_dp_rank"),
        ("0.5.9", "data_parallel_rank", None),
        ("0.4.8", "data_parallel_rank", None),
        ("0.4.7.post1", None, None),
        (None, None, None),
    ],
)
def test_a_canary_is_aimed_by_the_field_that_the_version_obeys(
    version: str | None, agg: str | None, decode: str | None
) -> None:
    for role, expected in (("agg", agg), ("prefill", agg), ("decode", decode)):
        aim = PROFILE.canaries[role].aim_for(version)  # type: ignore[index]
        assert (aim.body_field if aim else None) == expected


def test_ranks_keep_their_global_numbers() -> None:
    aim = PROFILE.canaries["agg"].aim_for("0.5.23")
    assert aim is not None
    assert aim.value_for("5", ["4", "5"]) == 5


def test_only_the_disaggregated_roles_name_the_fake_partner() -> None:
    agg, prefill, decode = (PROFILE.canaries[role].body for role in ("agg", "prefill", "decode"))
    assert agg is not None
    assert "bootstrap_host" not in agg
    assert prefill == decode == {**agg, "bootstrap_host": "2.2.2.2", "bootstrap_port": 8998, "bootstrap_room": 0}


@pytest.mark.parametrize(("version", "asked"), [("0.5.22", 0), ("0.5.23", 1), (None, 0)])
def test_a_pause_is_told_from_ill_health_only_by_versions_that_can(version: str | None, asked: int) -> None:
    assert len(PROFILE.flags_for(version)) == asked


def test_the_signature_is_the_line_of_a_dead_scheduler_and_no_other() -> None:
    (pattern,) = (re2.compile(text) for text in PROFILE.log_signatures)
    line = "Health check failed. Server couldn't get a response from detokenizer for last {} seconds. tic start time: 1"
    for seconds in ("20", "300"):
        assert pattern.search("[2026-01-02 03:04:05] " + line.format(seconds))
    for other in (
        "Health check request received during shutdown. Returning 503.",
        "No available shared memory broadcast block found in 60 seconds.",
        "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    ):
        assert not pattern.search(other)


@pytest.mark.parametrize("name", PAGES)
def test_every_release_has_one_anchor_that_names_the_process(load: Load, name: str) -> None:
    assert PROFILE.fingerprint is not None
    page = load(name)
    anchors = [one for metric in PROFILE.fingerprint.anchor for one in page.find(PROFILE, metric)]
    assert len(anchors) == 1
    others = [one for metric in PROFILE.fingerprint.others for one in page.find(PROFILE, metric)]
    assert others, "something else that tells a change"
    assert not any(one.labels.get("phase") == "tokenizer_e2e" for one in (*anchors, *others))


def test_the_anchor_is_that_of_rank_zero_with_and_without_a_label_for_each_kind_of_rank() -> None:
    assert PROFILE.fingerprint is not None
    per_rank = PROFILE.fingerprint.anchor[1]
    assert per_rank.accepts({"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"})
    assert per_rank.accepts({"dp_rank": "0", "tp_rank": "0", "pp_rank": "0"})
    for other in ("dp_rank", "tp_rank", "pp_rank", "moe_ep_rank"):
        assert not per_rank.accepts({"tp_rank": "0", "pp_rank": "0", other: "1"})
