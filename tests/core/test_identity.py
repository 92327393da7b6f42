"""Which process answers, and is it another one? By its start time, and where nothing names it."""

from __future__ import annotations

import pytest
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Scraped, ScrapeFailed
from enginewatch.core.identity import PATIENCE_SEC, Change, Identity, IdentityTracker, tell_source
from enginewatch.core.settings import Settings
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES


def page(
    tracker: IdentityTracker,
    start_time: float | None = None,
    *,
    fell: bool = False,
    rose: bool = False,
    now: float = 0.0,
) -> Change:
    return tracker.page(start_time, fell=fell, rose=rose, now=now)


def engine_id(tracker: IdentityTracker) -> str:
    assert tracker.identity is not None
    return tracker.identity.engine_id


def restarts(tracker: IdentityTracker) -> int:
    assert tracker.identity is not None
    return tracker.identity.restarts


# --- the engine's own start time ------------------------------------------------------------------------------------


def test_before_the_first_page_there_is_no_identity() -> None:
    assert IdentityTracker(1).identity is None


def test_the_start_time_names_the_process() -> None:
    tracker = IdentityTracker(1)
    assert page(tracker, 1791943641.29, now=7.0) is Change.FIRST
    assert tracker.identity is not None
    assert tracker.identity.engine_id == "pst-1791943641.29"
    assert tracker.identity.source == "process_start_time"
    assert tracker.identity.started_at_unix == 1791943641.29
    assert tracker.identity.first_seen == 7.0


def test_the_id_has_two_decimals_whatever_the_page_says() -> None:
    for value, name in ((1.79597629383e9, "pst-1795976293.83"), (1.8e9, "pst-1800000000.00")):
        tracker = IdentityTracker(1)
        page(tracker, value)
        assert engine_id(tracker) == name


def test_the_same_start_time_is_the_same_process_whatever_its_counters_do() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert page(tracker, 1000.0, fell=True) is Change.SAME
    tracker.refused()
    tracker.refused()
    assert page(tracker, 1000.0) is Change.SAME
    assert restarts(tracker) == 0


def test_another_start_time_is_another_process_whatever_its_counters_do() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert page(tracker, 1000.01, rose=True) is Change.REPLACED
    assert restarts(tracker) == 1
    assert page(tracker, 2000.0) is Change.REPLACED
    assert restarts(tracker) == 2


def test_a_page_without_the_start_time_is_the_same_process() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert page(tracker, None) is Change.SAME
    assert engine_id(tracker) == "pst-1000.00"


def hasty(tracker: IdentityTracker, number: int, *, apart: float = 5.0) -> list[Change]:
    """So many pages, each with a start time of its own."""
    return [page(tracker, 2000.0 + each, now=100.0 + apart * each) for each in range(number)]


def test_replacements_without_end_are_not_believed() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert set(hasty(tracker, 18)) == {Change.REPLACED, Change.SAME}
    assert not tracker.believes_names
    assert engine_id(tracker) == "obs-1-1"
    assert restarts(tracker) == 17


def test_replacements_far_enough_apart_for_an_engine_to_load_are() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert set(hasty(tracker, 40, apart=15.0)) == {Change.REPLACED}
    assert tracker.believes_names


def test_an_unbelieved_process_is_still_replaced_when_its_counters_fall() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    hasty(tracker, 18)
    assert page(tracker, 1.0, fell=True) is Change.REPLACED


# --- observed -------------------------------------------------------------------------------------------------------


def test_without_a_start_time_the_watcher_mints_an_id() -> None:
    tracker = IdentityTracker(1234)
    assert page(tracker, None, now=7.0) is Change.FIRST
    assert tracker.identity is not None
    assert tracker.identity.engine_id == "obs-1234-1"
    assert tracker.identity.source == "observed"
    assert tracker.identity.started_at_unix is None
    assert tracker.identity.first_seen == 7.0


def test_counters_that_fall_renew_it() -> None:
    tracker = IdentityTracker(1234)
    page(tracker)
    assert page(tracker, fell=True) is Change.REPLACED
    assert engine_id(tracker) == "obs-1234-2"
    assert restarts(tracker) == 1


def test_an_outage_after_which_no_counter_is_higher_renews_it() -> None:
    tracker = IdentityTracker(1)
    page(tracker)
    tracker.refused()
    tracker.refused()
    assert page(tracker) is Change.REPLACED


def test_an_outage_after_which_a_counter_is_higher_does_not() -> None:
    tracker = IdentityTracker(1)
    page(tracker)
    tracker.refused()
    tracker.refused()
    assert page(tracker, rose=True) is Change.SAME


def test_one_refusal_does_not() -> None:
    tracker = IdentityTracker(1)
    page(tracker)
    tracker.refused()
    assert page(tracker) is Change.SAME
    tracker.refused()
    assert page(tracker) is Change.SAME, "they must come in a row"


def test_an_observed_process_that_gets_a_name_is_the_same_process() -> None:
    tracker = IdentityTracker(1)
    page(tracker)
    assert page(tracker, 1000.0) is Change.SAME
    assert engine_id(tracker) == "pst-1000.00"
    assert restarts(tracker) == 0


def test_unless_there_is_a_sign_of_a_replacement() -> None:
    for sign in ("fell", "gone"):
        tracker = IdentityTracker(1)
        page(tracker)
        if sign == "gone":
            tracker.refused()
            tracker.refused()
        assert page(tracker, 1000.0, fell=sign == "fell") is Change.REPLACED
        assert restarts(tracker) == 1


def test_an_answer_that_is_no_page_makes_up_no_identity() -> None:
    watch = Watch(Settings(), profile=PROFILES["vllm"], now=0.0)
    watch.handle(ScrapeFailed(0.0, "http_404"), 0.1)
    assert watch.identity is None
    watch.handle(Scraped(5.0, {"process_start_time_seconds": 7.0}), 5.1)
    assert watch.identity is not None
    assert (watch.identity.engine_id, watch.identity.restarts) == ("pst-7.00", 0)


# --- what is told beside the page -----------------------------------------------------------------------------------


def test_a_replacement_told_elsewhere_and_by_the_page_counts_once() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert tracker.page(2000.0, fell=False, rose=False, now=0.0, told_elsewhere=True) is Change.REPLACED
    assert (engine_id(tracker), restarts(tracker)) == ("pst-2000.00", 1)


def test_a_replacement_that_only_something_else_tells_counts_and_leaves_a_name_taken_from_the_page() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert tracker.page(1000.0, fell=False, rose=False, now=0.0, told_elsewhere=True) is Change.REPLACED
    assert (engine_id(tracker), restarts(tracker)) == ("pst-1000.00", 1)


def test_it_renews_an_observed_id_of_an_idle_engine() -> None:
    tracker = IdentityTracker(1)
    page(tracker)
    assert tracker.page(None, fell=False, rose=False, now=0.0, told_elsewhere=True) is Change.REPLACED
    assert (engine_id(tracker), restarts(tracker)) == ("obs-1-2", 1)


# --- what the log says of the source --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start_time", "level", "says"),
    [(None, "warning", "--api-server-count 1"), (1000.0, "info", "its own start time")],
)
def test_the_first_source_is_logged_and_observed_warns_and_names_the_remedy(
    start_time: float | None, level: str, says: str
) -> None:
    shell = VirtualShell(ScriptedEngine(start_time=start_time).busy()).run(60)
    told = [log for log in shell.logs if "source" in log.fields]
    assert [log.level for log in told] == [level], "once"
    assert says in told[0].event


def test_a_source_that_changes_is_logged_again() -> None:
    engine = ScriptedEngine(start_time=None).busy().at(42, lambda e: setattr(e, "start_time", 1000.0))
    shell = VirtualShell(engine).run(100)
    assert [log.fields["source"] for log in shell.logs if "source" in log.fields] == ["observed", "process_start_time"]
    assert shell.watch.restarts == 0


def test_no_engine_is_observed_without_a_word_on_what_would_help() -> None:
    for profile in PROFILES.values():
        level, sentence = tell_source(Identity("obs-1-1", "observed", None, 0.0, 0), profile.how_to_be_named)
        assert level == "warning"
        assert sentence.endswith(profile.how_to_be_named or "Nothing makes this engine's page name its process.")


# --- a page that does not name the process --------------------------------------------------------------------------


def test_a_name_stands_where_counters_fall_on_a_page_without_it() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    assert page(tracker, None, fell=True, now=1.0) is Change.SAME
    assert page(tracker, 1000.0, now=2.0) is Change.SAME
    assert page(tracker, None, now=2.0 + 2 * PATIENCE_SEC) is Change.SAME
    assert engine_id(tracker) == "pst-1000.00"


def test_until_no_page_has_named_it_for_a_minute() -> None:
    tracker = IdentityTracker(1)
    page(tracker, 1000.0)
    page(tracker, None, fell=True, now=1.0)
    assert page(tracker, None, now=1.0 + PATIENCE_SEC) is Change.REPLACED
    assert (engine_id(tracker), restarts(tracker)) == ("obs-1-1", 1)
