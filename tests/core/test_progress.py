"""The ledger: what each series of each core did, kept apart."""

from __future__ import annotations

import pytest
from direct_watch import vllm_page

from enginewatch.core.progress import Core, Ledger, PageNews
from enginewatch.engines import PROFILES

TOKENS = 'vllm:generation_tokens_total{engine="0",model_name="m"}'
KV = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"}'
RUNNING = 'vllm:num_requests_running{engine="0",model_name="m"}'
WAITING = 'vllm:num_requests_waiting{engine="0",model_name="m"}'


class Pages:
    """A ledger fed with one page per second, each a poll."""

    def __init__(self, kind: str = "vllm") -> None:
        self.ledger = Ledger(PROFILES[kind])
        self.poll = 0

    def take(self, samples: dict[str, float], *, recheck: bool = False) -> PageNews:
        self.poll += not recheck
        return self.ledger.take(samples, float(self.poll), float(self.poll), self.poll, recheck=recheck)

    def core(self, name: str = "0") -> Core:
        return self.ledger.cores[name]


# --- counters and gauges --------------------------------------------------------------------------------------------


def test_the_first_page_is_a_baseline_however_large_its_numbers() -> None:
    pages = Pages()
    news = pages.take({TOKENS: 1e9, KV: 0.9})
    assert (news.cores_with_legs, news.rose, news.fell) == (1, False, False)
    assert pages.core().counter_poll == pages.core().gauge_poll == -1


def test_a_counter_that_rises_is_progress() -> None:
    pages = Pages()
    pages.take({TOKENS: 1.0})
    assert pages.take({TOKENS: 2.0}).rose
    assert pages.core().counter_poll == 2
    assert pages.core().proof_at == pages.core().counter_proof_at == 2.0
    assert pages.core().moved_leg == "generation_tokens"


def test_a_counter_that_falls_is_a_reset_of_that_series_and_rises_from_there() -> None:
    pages = Pages()
    pages.take({TOKENS: 100.0})
    news = pages.take({TOKENS: 3.0})
    assert news.fell
    assert not news.rose
    assert pages.take({TOKENS: 4.0}).rose


def test_a_gauge_is_progress_only_when_it_rises_and_no_proof_for_the_counters() -> None:
    pages = Pages()
    pages.take({TOKENS: 1.0, KV: 0.5})
    news = pages.take({TOKENS: 1.0, KV: 0.6})
    assert not news.rose
    assert pages.core().gauge_poll == 2
    assert pages.core().proof_at == 2.0
    assert pages.core().counter_proof_at == 1.0
    news = pages.take({TOKENS: 1.0, KV: 0.4})
    assert not news.fell
    assert pages.core().gauge_poll == 2


def test_series_of_one_leg_are_never_summed() -> None:
    pages = Pages()
    stop, length = (
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}"}}' for reason in ("stop", "length")
    )
    pages.take({stop: 10.0, length: 10.0})
    news = pages.take({stop: 11.0, length: 9.0})
    assert news.rose
    assert news.fell


def test_a_series_that_is_absent_keeps_its_value() -> None:
    pages = Pages()
    pages.take({TOKENS: 5.0, KV: 0.1})
    pages.take({KV: 0.1})
    news = pages.take({TOKENS: 5.0, KV: 0.1})
    assert not news.rose
    assert not news.fell
    pages.take({KV: 0.1})
    assert pages.take({TOKENS: 6.0, KV: 0.1}).rose


def test_a_series_born_after_its_cores_first_page_counts_from_zero() -> None:
    pages = Pages()
    pages.take({KV: 0.0})
    assert pages.take({KV: 0.0, TOKENS: 7.0}).rose
    assert not pages.take({KV: 0.0, TOKENS: 7.0}).rose


def test_a_core_born_later_begins_with_a_baseline_of_its_own() -> None:
    pages = Pages()
    pages.take(vllm_page(100, core="0"))
    news = pages.take(vllm_page(100, core="0") | vllm_page(100, core="1"))
    assert not news.rose
    assert pages.core("1").baseline_poll == 2


def test_names_that_are_not_asked_for_are_nothing() -> None:
    pages = Pages()
    news = pages.take({"go_goroutines": 5.0, 'vllm:generation_tokens_created{engine="0"}': 1.0})
    assert news.cores_with_legs == 0
    assert pages.ledger.cores == {}


# --- polls and rechecks ---------------------------------------------------------------------------------------------


def test_what_a_recheck_saw_is_the_movement_of_the_poll_that_follows() -> None:
    pages = Pages()
    pages.take({TOKENS: 1.0})
    pages.take({TOKENS: 2.0}, recheck=True)
    pages.take({TOKENS: 2.0})
    assert pages.core().counter_poll == 2
    pages.take({TOKENS: 2.0})
    assert pages.core().counter_poll == 2, "and of no later one"


def test_a_failure_followed_by_movement_is_told_apart_from_one_before_it() -> None:
    for began, grown in ((1.5, False), (2.5, True)):
        pages = Pages()
        pages.take({TOKENS: 1.0})
        pages.core().run.failed(1.0, 2.0, None)  # type: ignore[arg-type]
        pages.poll += 1
        pages.ledger.take({TOKENS: 2.0}, 3.0, began, pages.poll, recheck=False)
        assert (pages.core().grew_after_failure_poll == 2) is grown


# --- the load -------------------------------------------------------------------------------------------------------


def test_load_gauges_speak_only_for_the_page_they_are_on() -> None:
    pages = Pages()
    pages.take({TOKENS: 1.0, RUNNING: 3.0, WAITING: 1.0})
    page = pages.ledger.page
    assert pages.core().running(page) == 3.0
    assert pages.core().waiting(page, without_deferred=False) == 1.0
    pages.take({TOKENS: 1.0})
    assert pages.core().running(pages.ledger.page) is None


def test_of_duplicate_gauges_the_largest_counts_never_the_sum() -> None:
    pages = Pages()
    pages.take({TOKENS: 1.0, RUNNING: 2.0, 'vllm:num_requests_running{engine="0",model_name="m",pid="7"}': 3.0})
    assert pages.core().running(pages.ledger.page) == 3.0


def test_deferred_requests_are_taken_off_the_waiting_ones_on_request() -> None:
    deferred = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"}'
    pages = Pages()
    pages.take({TOKENS: 1.0, WAITING: 5.0, deferred: 3.0})
    page = pages.ledger.page
    assert pages.core().waiting(page, without_deferred=True) == 2.0
    assert pages.core().waiting(page, without_deferred=False) == 5.0
    pages.take({TOKENS: 1.0, WAITING: 2.0, deferred: 3.0})
    assert pages.core().waiting(pages.ledger.page, without_deferred=True) == 0.0, "gauges of two moments"


# --- cores ----------------------------------------------------------------------------------------------------------


def test_series_without_the_label_belong_to_no_core_once_some_carry_it() -> None:
    ranked = {f'sglang:realtime_tokens_total{{dp_rank="{rank}",mode="decode"}}': 1.0 for rank in (0, 1)}
    for first in (ranked, {"sglang:generation_tokens_total": 5.0}):
        pages = Pages("sglang")
        pages.take(first)
        pages.take(ranked | {"sglang:generation_tokens_total": 6.0})
        assert set(pages.ledger.cores) == {"0", "1"}
        assert all("generation_tokens" not in core.legs for core in pages.ledger.cores.values())


def test_a_core_is_retired_after_three_polls_not_after_three_rechecks() -> None:
    pages = Pages()
    pages.take(vllm_page(core="0") | vllm_page(core="1"))
    for _ in range(5):
        pages.take(vllm_page(core="0"), recheck=True)
    for _ in range(2):
        pages.take(vllm_page(core="0"))
    assert "1" in pages.ledger.cores
    pages.take(vllm_page(core="0"))
    assert "1" not in pages.ledger.cores


def test_a_core_that_shows_up_in_between_is_not_retired() -> None:
    pages = Pages()
    both = vllm_page(core="0") | vllm_page(core="1")
    pages.take(both)
    for _ in range(5):
        pages.take(vllm_page(core="0"))
        pages.take(vllm_page(core="0"))
        pages.take(both)
    assert "1" in pages.ledger.cores


def test_a_retired_core_that_comes_back_begins_anew() -> None:
    pages = Pages()
    both = vllm_page(100, core="0") | vllm_page(100, core="1")
    pages.take(both)
    for _ in range(3):
        pages.take(vllm_page(100, core="0"))
    news = pages.take(both)
    assert not news.rose
    assert pages.core("1").baseline_poll == pages.poll


def test_what_is_forgotten_is_learned_as_if_for_the_first_time() -> None:
    pages = Pages()
    pages.take({TOKENS: 100.0})
    pages.ledger.forget()
    news = pages.take({TOKENS: 5.0})
    assert not news.fell
    assert pages.core().baseline_poll == 2


@pytest.mark.parametrize(
    ("series", "short"),
    [("sglang:generation_tokens_total", False), ("sglang:token_usage", True), ("sglang:cuda_graph_passes_total", True)],
)
def test_the_threshold_follows_the_grain_of_the_legs(series: str, short: bool) -> None:
    pages = Pages("sglang")
    pages.take({series: 1.0})
    assert pages.core().stall_after_sec(30.0) == (30.0 if short else 120.0)
    assert pages.core().stall_after_sec(300.0) == 300.0


# --- what the page says of the engine as a whole --------------------------------------------------------------------


def test_the_start_time_is_told_whether_or_not_there_are_legs() -> None:
    assert Pages().take({"process_start_time_seconds": 1000.5}).start_time == 1000.5
    pages = Pages()
    pages.take(vllm_page(start_time=1000.5))
    assert pages.take(vllm_page(start_time=None)).start_time is None


def test_a_rest_is_told_by_the_page_that_says_so_and_by_no_later_one() -> None:
    awake = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"}'
    offloaded = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"}'
    pages = Pages()
    assert pages.take(vllm_page() | {awake: 1.0, offloaded: 0.0}).resting is None
    assert pages.take(vllm_page() | {awake: 0.0, offloaded: 1.0}).resting == "sleeping"
    assert pages.take(vllm_page()).resting is None
