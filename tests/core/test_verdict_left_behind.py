"""A page that goes on where a dead process left it: files of a multiprocess registry that outlive the process.

The two pages are a real vLLM's: the last one before it was killed at work, and the first one of the process in its
place, of which nothing had been asked. By counters the engine has gone on working; by gauges three requests run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from direct_watch import DirectWatch

from enginewatch.core.exposition import PageReader
from enginewatch.core.identity import IdentityTracker
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES

DATA = Path(__file__).parents[1] / "data"
VLLM = PROFILES["vllm"]
NO_CANARY = Settings(warmup_sec=0, active_probe_enabled=False)
RUNNING = 'vllm:num_requests_running{engine="0",model_name="tiny"}'


def page(name: str) -> dict[str, float]:
    reader = PageReader(VLLM.names())
    reader.feed((DATA / f"vllm-0.32.0-api2-kept-dir-{name}.prom").read_bytes())
    return dict(reader.finish())


def watching(*, is_loopback: bool = True) -> DirectWatch:
    direct = DirectWatch()
    direct.watch = Watch(
        NO_CANARY, profile=VLLM, role="agg", identity=IdentityTracker(1, is_loopback=is_loopback), now=0.0
    )
    return direct


def replaced(direct: DirectWatch, *, away_until: float = 100.0) -> DirectWatch:
    """Up to the first page of the second process."""
    direct.page(5.0, page("before-kill"))
    direct.fails(10.0, "refused")
    direct.fails(15.0, "refused")
    direct.fails(away_until - 5, "refused")
    direct.page(away_until, page("after-kill"))
    return direct


def test_the_pages_tell_of_an_engine_that_has_gone_on_working() -> None:
    before, after = page("before-kill"), page("after-kill")
    assert all(after[series] >= value for series, value in before.items() if "_total" in series)
    assert after != before
    assert before[RUNNING] == after[RUNNING] == 3


def test_on_one_host_whoever_refused_has_ended_whatever_the_counters_say() -> None:
    assert replaced(watching()).watch.restarts == 1


def test_elsewhere_something_between_may_have_refused() -> None:
    """The control: a Service whose only endpoint was not ready for a while looks the same."""
    assert replaced(watching(is_loopback=False)).watch.restarts == 0


def test_a_dead_processs_requests_are_no_work_of_the_one_in_its_place() -> None:
    direct = replaced(watching())
    for poll in range(1, 40):
        direct.page(100 + 5.0 * poll, page("after-kill"))
    assert direct.watch.verdict.hung is False, direct.reason
    assert direct.state == "idle"


@pytest.mark.parametrize("sign", ["a request more", "a token"])
def test_requests_of_its_own_are(sign: str) -> None:
    """The control: it has shown a sign of its own, and then stands still with the same requests running."""
    direct, own = replaced(watching()), page("after-kill")
    if sign == "a request more":
        own[RUNNING] += 1
    else:
        own['vllm:generation_tokens_total{engine="0",model_name="tiny"}'] += 1
    for poll in range(1, 20):
        direct.page(100 + 5.0 * poll, own)
    assert (direct.watch.verdict.hung, direct.state) == (True, "stall-hang"), direct.reason


@pytest.mark.parametrize("is_loopback", [True, False])
def test_counters_that_fell_show_that_nothing_was_left_behind(is_loopback: bool) -> None:
    """A registry of its own: the first page's load is this process's, and it hangs at its first requests."""
    direct, own = watching(is_loopback=is_loopback), page("after-kill")
    replaced(direct)
    own = {series: value / 10 if "_total" in series else value for series, value in own.items()}
    direct.fails(105.0, "refused")
    for poll in range(20):
        direct.page(110 + 5.0 * poll, own)
    assert direct.watch.restarts == 1 + is_loopback
    assert (direct.watch.verdict.hung, direct.state) == (True, "stall-hang"), direct.reason


def test_a_watcher_that_came_after_the_process_believes_what_it_says() -> None:
    """The control: nothing was replaced under its eyes."""
    direct = watching()
    for poll in range(1, 20):
        direct.page(5.0 * poll, page("after-kill"))
    assert (direct.watch.verdict.hung, direct.state) == (True, "stall-hang"), direct.reason
