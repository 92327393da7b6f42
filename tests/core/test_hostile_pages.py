"""What pages may make the judgement hold, however they are filled."""

from __future__ import annotations

import sys

import pytest
from direct_watch import DirectWatch, vllm_page

from enginewatch.core.events import Scraped
from enginewatch.core.exposition import MAX_LINE_BYTES, PageReader
from enginewatch.core.progress import Ledger
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES

VLLM = PROFILES["vllm"]
LINES = 3900
MOST_CORES = 512


def new_cores(number: int) -> dict[str, float]:
    return {
        f'vllm:generation_tokens_total{{engine="{number * LINES + line + 1}",model_name="m"}}': 1.0
        for line in range(LINES)
    }


def new_series(number: int, length: int, lines: int, filler: str = "x") -> dict[str, float]:
    return {
        f'vllm:num_requests_running{{engine="0",model_name="{number}-{line}-{filler * length}"}}': 1.0
        for line in range(lines)
    }


def held_bytes(watch: Watch) -> int:
    """Of the series that the story holds, each once."""
    pages = [entry.event.samples for entry in watch.story() if isinstance(entry.event, Scraped)]
    return sum(sys.getsizeof(series) for series in {series for samples in pages for series in samples})


def test_a_page_full_of_cores_leaves_a_core_that_was_there_before_in_its_place() -> None:
    ledger = Ledger(VLLM)
    for number in range(20):
        page = {**vllm_page(100.0 + number), **new_cores(number)}
        ledger.take(page, float(number), float(number), number, recheck=False)
        assert len(ledger.cores) <= MOST_CORES
        assert "0" in ledger.cores
    # So that its verdict cannot be drowned: what it did is still seen.
    assert ledger.cores["0"].counter_poll == 19


def test_cores_that_went_make_room_for_new_ones() -> None:
    ledger = Ledger(VLLM)
    for number in range(4):
        ledger.take({**vllm_page(1.0), **new_cores(0)}, float(number), float(number), number, recheck=False)
    for number in range(4, 10):
        ledger.take(
            {**vllm_page(1.0), **vllm_page(1.0, core="9999")}, float(number), float(number), number, recheck=False
        )
    assert set(ledger.cores) == {"0", "9999"}


def test_a_core_with_a_name_that_no_rank_has_is_none() -> None:
    # 130 names of 4 kB each made 6 MB of /verdict, and 87 MiB of the sidecar.
    ledger = Ledger(VLLM)
    for number in range(20):
        long = {f'vllm:generation_tokens_total{{engine="{number}-{n}-{"x" * 3000}"}}': 1.0 for n in range(130)}
        news = ledger.take({**vllm_page(1.0), **long}, float(number), float(number), number, recheck=False)
        assert set(ledger.cores) == {"0"}
    assert news.cores_with_legs == 1
    for control in ("\x1b[2J", "\r", "\u202e"):
        ledger.take({**vllm_page(1.0), **vllm_page(1.0, core=control)}, 20.0, 20.0, 20, recheck=False)
    assert set(ledger.cores) == {"0"}
    ledger.take(vllm_page(1.0, core="x" * 64), 20.0, 20.0, 20, recheck=False)
    assert set(ledger.cores) == {"0", "x" * 64}


@pytest.mark.parametrize(("filler", "length"), [("x", 3000), ("\U0001f600", 900)])
def test_series_invented_for_ever_are_not_held_for_ever(filler: str, length: int) -> None:
    watch = DirectWatch().watch
    for number in range(200):
        page = {**vllm_page(100.0 + number), **new_series(number, length, 32, filler)}
        watch.handle(Scraped(float(number), page), float(number))
    assert held_bytes(watch) < 4 * 1024 * 1024
    assert len(watch._ledger._slots) < 1000


@pytest.mark.parametrize("filler", ["x", "\U0001f600"])
def test_neither_are_startup_durations_however_long_their_names(filler: str) -> None:
    ledger = Ledger(PROFILES["sglang"])
    for number in range(20):
        page = {
            f'sglang:startup_time_seconds{{phase="load_weight",pid="{number}-{line}",z="{filler}{"x" * 3900}"}}': 1.0
            for line in range(120)
        }
        ledger.durations.on(page)
        ledger.take(page, float(number), float(number), number, recheck=False)
        held = {*ledger.durations._keys, *ledger.durations._keys.values()}
        assert 0 < sum(map(sys.getsizeof, held)) < 1024 * 1024


def test_the_story_of_an_ordinary_engine_is_told_in_full() -> None:
    watch = DirectWatch().watch
    for number in range(400):
        watch.handle(Scraped(float(number), vllm_page(100.0 + number)), float(number))
    assert len(watch.story()) == 400


def test_a_series_longer_than_any_engine_has_is_not_kept() -> None:
    def kept(length: int) -> int:
        reader = PageReader(VLLM.names())
        reader.feed(b'# HELP x x\nvllm:num_requests_running{a="%s"} 1\n' % (b"x" * length))
        return len(reader.finish())

    assert kept(1000) == 1
    assert kept(MAX_LINE_BYTES) == 0
