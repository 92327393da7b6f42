"""The gauges that a drain reads: the same as the profiles name, and no others make an engine look empty."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewatch.engines import PROFILES
from enginewatch.guard.gauges import GAUGES, TRTLLM_OWNER, Gauges, Load, read_load

DATA = Path(__file__).parents[1] / "data"
BY_TITLE = {gauges.title: gauges for gauges in GAUGES}
ONLY_HERE = {"num_grammar_queue_reqs"}
"""No sign of a hang, so no profile counts it; but a request that must not be cut off."""
WITHIN_WAITING = {"num_requests_waiting_by_reason"}
"""Parts of a gauge that is read already."""


def page(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def by_reference(text: str) -> Load | None:
    """What the reference parser finds, added up over everything."""
    sums: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for gauges in GAUGES:
                for prefix in gauges.prefixes:
                    for meaning in ("running", "waiting", "queues"):
                        if sample.name in {prefix + name for name in getattr(gauges, meaning)}:
                            key = (gauges.title, meaning)
                            sums[key] = sums.get(key, 0.0) + sample.value
    titles = {title for title, _ in sums}
    loads = [[sums.get((title, meaning), 0.0) for meaning in ("running", "waiting", "queues")] for title in titles]
    return Load(*map(sum, zip(*loads, strict=True))) if loads else None


def test_the_table_names_what_the_profiles_name() -> None:
    countable = {profile.title: profile for profile in PROFILES.values() if profile.running.names}
    assert set(BY_TITLE) == set(countable)
    for title, profile in countable.items():
        gauges = BY_TITLE[title]
        queues = {name for queue in profile.queues for name in queue.metric.names}
        assert set(gauges.prefixes) == set(profile.prefixes)
        assert set(gauges.running) == set(profile.running.names)
        assert set(gauges.waiting) - ONLY_HERE == set(profile.waiting.names)
        assert set(gauges.queues) == queues - WITHIN_WAITING


def test_tensorrt_llm_has_no_gauge_that_a_profile_believes_and_says_who_it_is() -> None:
    profile = PROFILES["trtllm"]
    assert not profile.running.names
    assert profile.owners == (TRTLLM_OWNER,)


NO_STEP_YET = DATA / "vllm-0.32.0-dp2-api2-idle.prom"
PAGES = sorted({*DATA.glob("[vsl]*.prom")} - {NO_STEP_YET})


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_captured_page_reads_as_with_the_reference_parser(path: Path) -> None:
    load = read_load(path.read_bytes())
    assert load is not None
    assert load == by_reference(path.read_text())


def test_an_engine_that_has_not_made_a_step_yet_is_not_taken_for_empty() -> None:
    text = NO_STEP_YET.read_text()
    assert "vllm:" in text
    assert "vllm:num_requests_running{" not in text  # several API servers: the gauges come with the first step
    assert read_load(text.encode()) is None


def test_cores_and_ranks_are_added_up() -> None:
    assert read_load((DATA / "vllm-0.32.0-dp2-api2-decoding.prom").read_bytes()) == Load(4, 0)
    assert read_load((DATA / "sglang-0.5.23-collector-generated.prom").read_bytes()) == Load(3, 1)


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_both_spellings_of_sglang_are_read(prefix: str) -> None:
    lines = [f"{prefix}num_running_reqs 0.0", f"{prefix}num_queue_reqs 0.0"]
    assert read_load(page(*lines)) == Load(0, 0)
    for queue in BY_TITLE["SGLang"].queues:
        assert read_load(page(*lines, f'{prefix}{queue}{{tp_rank="0"}} 2.0')) == Load(0, 0, 2)


def test_requests_of_one_priority_are_not_counted_twice() -> None:
    lines = [
        'sglang:num_running_reqs{priority="",tp_rank="0"} 3.0',
        'sglang:num_running_reqs{priority="5",tp_rank="0"} 2.0',
        'sglang:num_running_reqs{tp_rank="0",priority="1"} 1.0',
        'sglang:num_queue_reqs{priority="",tp_rank="0"} 0.0',
    ]
    assert read_load(page(*lines)) == Load(3, 0)


@pytest.mark.parametrize("gauges", GAUGES, ids=lambda gauges: gauges.title)
def test_an_engine_that_says_only_half_is_not_taken_for_empty(gauges: Gauges) -> None:
    running, waiting = (f"{gauges.prefixes[0]}{names[0]} 0.0" for names in (gauges.running, gauges.waiting))
    assert read_load(page(running, waiting)) == Load(0, 0)
    assert read_load(page(running)) is None
    assert read_load(page(waiting)) is None


@pytest.mark.parametrize(
    "unknown",
    [
        b"",
        b"[]",
        b"\x00\xff" * 1000,
        page("trtllm_num_requests_running 0.0", "trtllm_num_requests_waiting 0.0"),
        page("lmdeploy:num_requests_running 0.0", "lmdeploy:num_requests_waiting 0.0"),
        page("my_vllm:num_requests_running 0.0", "my_vllm:num_requests_waiting 0.0"),
        page("vllm:num_requests_running_max 0.0", "vllm:num_requests_waiting_max 0.0"),
        page("# vllm:num_requests_running 0.0", "# vllm:num_requests_waiting 0.0"),
        page("vllm:num_requests_running NaN", "vllm:num_requests_waiting NaN"),
        page("vllm:num_requests_running none", "vllm:num_requests_waiting none"),
        page("vllm:num_requests_running 0.0", "sglang:num_queue_reqs 0.0"),
        page('vllm:num_requests_running{model_name="a\n"} 0.0', "vllm:num_requests_waiting 0.0"),
    ],
)
def test_a_page_without_the_gauges_of_one_engine_is_not_read_as_empty(unknown: bytes) -> None:
    assert read_load(unknown) is None


@pytest.mark.parametrize(
    "label", ['model_name="a}b{c"', 'model_name="a \\" } 7"', 'model_name="a\\\\"', 'a="1", model_name="x y" ,', ""]
)
def test_whatever_stands_in_a_label_is_no_value(label: str) -> None:
    lines = [f"vllm:num_requests_running{{{label}}} 2.0 1791943641290", f"vllm:num_requests_waiting{{{label}}} 1e0"]
    assert read_load(page(*lines)) == Load(2, 1)


def test_the_last_line_needs_no_line_end_and_windows_ones_are_read() -> None:
    assert read_load(b"vllm:num_requests_running 1\r\nvllm:num_requests_waiting 2") == Load(1, 2)


def test_a_hostile_page_takes_no_more_time_than_its_size_asks_for() -> None:
    opening = b"vllm:num_requests_running{" + b'a="b\\"' * 100_000
    quotes = b'vllm:num_requests_running{a="' * 20_000
    began = time.process_time()
    for hostile in (opening, quotes, opening + b"\n" + quotes, b"vllm:num_requests_running{" * 20_000):
        assert read_load(hostile) is None
    assert time.process_time() - began < 10  # quadratic: minutes
