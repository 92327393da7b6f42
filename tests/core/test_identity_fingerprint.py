"""Which process answers, told by how long its start took. One rule after the other; histories prove the whole."""

from __future__ import annotations

import re

import pytest
from direct_watch import DirectWatch
from scripted_sglang import ScriptedSGLang
from virtual_shell import VirtualShell

from enginewatch.core.exposition import parse_series
from enginewatch.core.fingerprint import DurationSeries, fingerprint_id
from enginewatch.core.identity import HASTY, PATIENCE_SEC, STRAYS, Change, IdentityTracker
from enginewatch.core.settings import Settings
from enginewatch.engines import PROFILES
from enginewatch.engines.sglang import PROFILE

ANCHOR = 'sglang:startup_time_seconds{phase="load_weight"}'
GRAPHS = 'sglang:startup_cuda_graph_time_seconds{phase="decode"}'
RANK_0 = 'sglang:engine_load_weights_time{dp_rank="0",pp_rank="0",tp_rank="0"}'
RANK_1 = 'sglang:engine_load_weights_time{dp_rank="1",pp_rank="0",tp_rank="1"}'


class Sidecar:
    """A tracker of an SGLang that is polled every second."""

    def __init__(self) -> None:
        self.tracker = IdentityTracker(1)
        self.now = 0.0
        self._series = DurationSeries(PROFILE)

    def sees(
        self,
        samples: dict[str, float] | None = None,
        *,
        fell: bool = False,
        rose: bool = False,
        later: float = 1.0,
        told_elsewhere: bool = False,
    ) -> Change | None:
        """Whether it is another process; None for a page that is set aside."""
        self.now += later
        samples = samples or {}
        for series in samples:
            name, labels = parse_series(series)
            if name in self._series.names:
                self._series.adopt(series, name, labels)
        said = self._series.on(samples)
        if self.tracker.is_stray(None, said):
            return None
        return self.tracker.page(
            None,
            fell=fell,
            rose=rose,
            now=self.now,
            durations=said,
            awaits_durations=True,
            told_elsewhere=told_elsewhere,
        )

    @property
    def engine_id(self) -> str | None:
        identity = self.tracker.identity
        return identity.engine_id if identity is not None else None

    @property
    def restarts(self) -> int:
        return self.tracker.restarts


@pytest.fixture
def sidecar() -> Sidecar:
    return Sidecar()


# --- the id ---------------------------------------------------------------------------------------------------------


def test_the_id_is_made_of_the_anchors_exact_value(sidecar: Sidecar) -> None:
    assert sidecar.sees({ANCHOR: 193.123456789}) is Change.FIRST
    assert sidecar.engine_id is not None
    assert re.fullmatch(r"sfp-[0-9a-f]{12}", sidecar.engine_id)
    assert sidecar.engine_id == fingerprint_id(193.123456789) != fingerprint_id(193.123456788)
    identity = sidecar.tracker.identity
    assert identity is not None
    assert (identity.source, identity.started_at_unix, identity.is_durable) == ("startup_fingerprint", None, True)


@pytest.mark.parametrize("page", [{}, {ANCHOR: 0.0}, {GRAPHS: 4.2}, {RANK_1: 190.0}, {RANK_0: 0.0, RANK_1: 190.0}])
def test_until_the_anchor_of_rank_zero_is_seen_there_is_none(sidecar: Sidecar, page: dict[str, float]) -> None:
    for _ in range(10):
        sidecar.sees(page)
    assert sidecar.engine_id is None
    sidecar.sees({**page, RANK_0: 193.1})
    assert sidecar.engine_id == fingerprint_id(193.1)
    assert sidecar.restarts == 0


def test_a_series_that_joins_vanishes_or_is_zero_is_nothing(sidecar: Sidecar) -> None:
    pages: tuple[dict[str, float], ...] = (
        {ANCHOR: 193.1},
        {ANCHOR: 193.1, GRAPHS: 4.2},
        {GRAPHS: 4.2},
        {},
        {ANCHOR: 0.0},
        {ANCHOR: 193.1},
    )
    assert {sidecar.sees(page, rose=True) for page in pages[1:]} <= {Change.FIRST, Change.SAME}
    for page in pages:
        sidecar.sees(page, rose=True)
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(193.1), 0)


def test_a_lower_rank_that_comes_later_changes_nothing_and_neither_does_a_higher_one_alone(sidecar: Sidecar) -> None:
    for page in ({RANK_1: 188.0}, {RANK_0: 193.1, RANK_1: 188.0}, {RANK_1: 188.0}):
        sidecar.sees(page)
    assert sidecar.engine_id == fingerprint_id(193.1)


def test_counters_that_fall_prove_nothing_beside_it_and_prove_it_without(sidecar: Sidecar) -> None:
    sidecar.sees({ANCHOR: 193.1})
    assert sidecar.sees({ANCHOR: 193.1}, fell=True) is Change.SAME
    unnamed = Sidecar()
    unnamed.sees(later=PATIENCE_SEC)
    unnamed.sees(later=PATIENCE_SEC)
    assert unnamed.sees(fell=True) is Change.REPLACED


# --- another process ------------------------------------------------------------------------------------------------


def test_another_value_is_another_process_however_idle_or_fast(sidecar: Sidecar) -> None:
    sidecar.sees({ANCHOR: 193.1})
    assert sidecar.sees({ANCHOR: 193.2}) is Change.REPLACED, "0 before, 0 after"
    assert sidecar.sees({ANCHOR: 193.3}, rose=True) is Change.REPLACED, "more than before within one poll"
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(193.3), 2)


def test_the_id_of_the_process_before_stands_until_the_new_one_tells(sidecar: Sidecar) -> None:
    sidecar.sees({ANCHOR: 193.1, GRAPHS: 4.2})
    assert sidecar.sees({GRAPHS: 5.0}) is Change.REPLACED
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(193.1), 1)
    assert sidecar.sees({GRAPHS: 5.0, ANCHOR: 194.0}) is Change.SAME, "one replacement counts once"
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(194.0), 1)


def test_a_value_left_in_files_by_a_dead_process_does_not_hide_the_new_one(sidecar: Sidecar) -> None:
    sidecar.sees({ANCHOR: 193.1, GRAPHS: 4.2})
    assert sidecar.sees({ANCHOR: 193.1, GRAPHS: 4.2}, fell=True) is Change.SAME, "nothing of its own is there yet"
    assert sidecar.sees({ANCHOR: 193.1, GRAPHS: 5.0}) is Change.REPLACED
    for _ in range(5):
        sidecar.sees({ANCHOR: 193.1, GRAPHS: 5.0}, later=PATIENCE_SEC)
    assert sidecar.engine_id == fingerprint_id(193.1), "it has an anchor, so no other id is made up for it"
    assert sidecar.sees({ANCHOR: 194.0, GRAPHS: 5.0}) is Change.SAME
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(194.0), 1)


def test_the_values_of_two_processes_side_by_side_are_the_newer_ones(sidecar: Sidecar) -> None:
    old = 'sglang:startup_time_seconds{phase="load_weight",pid="7"}'
    new = 'sglang:startup_time_seconds{phase="load_weight",pid="8"}'
    for old_value, new_value in ((193.1, 12.0), (200.0, 300.0)):
        sidecar = Sidecar()
        sidecar.sees({old: old_value})
        assert sidecar.sees({old: old_value, new: new_value}) is Change.REPLACED
        for _ in range(2 * STRAYS):
            assert sidecar.sees({old: old_value, new: new_value}) is Change.SAME
        assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(new_value), 1)


def test_a_sidecar_that_begins_there_cannot_tell_which_is_newer_and_says_none(sidecar: Sidecar) -> None:
    both = {f'sglang:startup_time_seconds{{phase="load_weight",pid="{pid}"}}': 190.0 + pid for pid in (7, 8)}
    sidecar.sees(both)
    sidecar.sees(both, later=PATIENCE_SEC)
    assert sidecar.engine_id == "obs-1-1"


def test_what_something_else_tells_counts_once_with_what_the_page_tells(sidecar: Sidecar) -> None:
    sidecar.sees({ANCHOR: 193.1})
    assert sidecar.sees({}, told_elsewhere=True) is Change.REPLACED
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(193.1), 1)
    assert sidecar.sees({ANCHOR: 194.0}) is Change.SAME
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(194.0), 1)


# --- observed, for want of an anchor --------------------------------------------------------------------------------


def test_after_a_minute_of_pages_without_the_anchor_an_id_is_minted(sidecar: Sidecar) -> None:
    for _ in range(int(PATIENCE_SEC)):
        sidecar.sees({ANCHOR: 0.0})
    assert sidecar.engine_id is None
    sidecar.sees({ANCHOR: 0.0})
    assert sidecar.engine_id == "obs-1-1"


def test_a_failed_scrape_starts_the_minute_again(sidecar: Sidecar) -> None:
    sidecar.sees()
    sidecar.tracker.interrupted()
    sidecar.sees(later=PATIENCE_SEC)
    assert sidecar.engine_id is None
    sidecar.sees(later=PATIENCE_SEC)
    assert sidecar.engine_id == "obs-1-1"


def test_an_anchor_that_comes_later_takes_over_once_and_is_no_replacement(sidecar: Sidecar) -> None:
    sidecar.sees()
    sidecar.sees(later=PATIENCE_SEC)
    assert sidecar.sees({ANCHOR: 193.1}) is Change.SAME
    for _ in range(3):
        sidecar.sees(later=PATIENCE_SEC)
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(193.1), 0)


def test_a_new_process_that_tells_no_anchor_for_a_minute_is_observed(sidecar: Sidecar) -> None:
    sidecar.sees({ANCHOR: 193.1, GRAPHS: 4.2})
    sidecar.sees({GRAPHS: 5.0})
    sidecar.sees({GRAPHS: 5.0}, later=PATIENCE_SEC)
    assert (sidecar.engine_id, sidecar.restarts) == ("obs-1-1", 1)


def test_so_is_one_that_shows_in_its_counters_alone(sidecar: Sidecar) -> None:
    sidecar.sees({ANCHOR: 193.1})
    assert sidecar.sees({}, fell=True) is Change.SAME
    assert sidecar.sees({}, later=PATIENCE_SEC) is Change.REPLACED
    assert (sidecar.engine_id, sidecar.restarts) == ("obs-1-1", 1)


def test_but_not_one_that_tells_within_that_time_who_it_is(sidecar: Sidecar) -> None:
    for anchor, restarts in ((193.1, 0), (194.0, 1)):
        sidecar = Sidecar()
        sidecar.sees({ANCHOR: 193.1})
        sidecar.sees({}, fell=True)
        sidecar.sees({ANCHOR: anchor})
        sidecar.sees({}, later=PATIENCE_SEC)
        sidecar.sees({}, later=PATIENCE_SEC)
        assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(anchor), restarts)


# --- several engines behind one address -----------------------------------------------------------------------------


def test_a_process_that_comes_back_is_no_replacement(sidecar: Sidecar) -> None:
    first, second = {ANCHOR: 193.1, GRAPHS: 4.2}, {ANCHOR: 200.0, GRAPHS: 5.0}
    for _ in range(20):
        sidecar.sees(first)
        sidecar.sees(second)
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(200.0), 1)
    assert sidecar.sees({GRAPHS: 4.2}) is None, "also by what is left of its page"
    assert sidecar.sees({GRAPHS: 5.0}) is Change.SAME


def test_one_that_alone_goes_on_answering_is_the_engine_again(sidecar: Sidecar) -> None:
    first, second = {ANCHOR: 193.1, GRAPHS: 4.2}, {ANCHOR: 200.0, GRAPHS: 5.0}
    for page in (first, second, *[first] * STRAYS):
        sidecar.sees(page)
    assert (sidecar.engine_id, sidecar.restarts) == (fingerprint_id(193.1), 2)


def test_values_that_are_others_on_every_page_are_not_believed_and_steady_ones_are_again(sidecar: Sidecar) -> None:
    for page in range(HASTY + 2):
        sidecar.sees({ANCHOR: 190.0 + page})
    assert not sidecar.tracker.believes_names
    assert (sidecar.engine_id, sidecar.restarts) == ("obs-1-1", HASTY)
    for _ in range(10):
        sidecar.sees({ANCHOR: 500.0})
    assert sidecar.engine_id == fingerprint_id(500.0)


# --- in the judgement -----------------------------------------------------------------------------------------------


def with_durations(engine: ScriptedSGLang, load_weight: float) -> ScriptedSGLang:
    engine.extra = {ANCHOR: load_weight, GRAPHS: load_weight / 10}
    return engine


def test_a_replacement_of_an_idle_engine_resets_the_verdict() -> None:
    engine = with_durations(ScriptedSGLang(), 193.1)
    engine.at(62, lambda e: with_durations(e, 194.0))
    shell = VirtualShell(engine, kind="sglang").run(120)
    assert "replaced" in shell.states
    identity = shell.watch.identity
    assert identity is not None
    assert (identity.engine_id, identity.restarts) == (fingerprint_id(194.0), 1)
    control = VirtualShell(ScriptedSGLang(), kind="sglang").run(120)
    assert "replaced" not in control.states, "all else on its pages stays as it was"


@pytest.mark.parametrize("tells", [False, True])
def test_after_an_outage_a_process_that_does_not_tell_who_it_is_has_its_warm_up(tells: bool) -> None:
    engine = with_durations(ScriptedSGLang(), 193.1)
    engine.at(801, lambda e: e.fail("refused"))
    engine.at(816, lambda e: setattr(e.restart().hang(), "extra", e.extra if tells else {}))
    shell = VirtualShell(engine, Settings(stall_sec=30, warmup_sec=600), kind="sglang").run(870)
    assert shell.watch.restarts == 0
    assert shell.watch.identity is not None
    assert shell.watch.identity.engine_id == fingerprint_id(193.1)
    assert bool(shell.acted()) == tells, "the control: the same process has had its warm-up"
    assert shell.state.startswith("warmup-") != tells


@pytest.mark.parametrize("kind", ["sglang", "auto"])
def test_it_is_not_identified_before_its_anchor_comes_and_says_what_it_waits_for(kind: str) -> None:
    engine = ScriptedSGLang().busy()
    engine.at(42, lambda e: with_durations(e, 193.1))
    shell = VirtualShell(engine, kind=kind).run(40)
    assert shell.watch.identity is None
    assert "how long its weights took to load" in shell.watch.why_unidentified
    assert shell.state == "growing", "it is judged all the same"
    identity = shell.run(60).watch.identity
    assert identity is not None
    assert identity.engine_id == fingerprint_id(193.1)
    assert shell.watch.restarts == 0


def test_the_pids_of_dead_processes_leave_room_for_those_that_come() -> None:
    """A sidecar outlives many engines, and each names its series anew, now and then as one long before it did."""
    direct = DirectWatch(kind="sglang", settings=Settings(active_probe_enabled=False))
    t = 0.0
    for process in range(80):
        pids = (process % 60) * 64
        page = {
            f'sglang:{name}{{dp_rank="{rank}",pid="{pids + rank}",tp_rank="0"}}': 10 + process / 100 + rank
            for name in ("engine_load_weights_time", "engine_startup_time")
            for rank in range(16)
        }
        for _ in range(4):
            t += 5.0
            direct.page(t, {'sglang:gen_throughput{dp_rank="0",tp_rank="0"}': 0.0, **page})
        assert direct.watch.restarts == process
        assert direct.watch.identity is not None
        assert direct.watch.identity.engine_id == fingerprint_id(10 + process / 100)


def test_the_source_is_logged_when_it_changes_and_observed_warns_and_names_the_remedy() -> None:
    engine = ScriptedSGLang().busy()
    engine.at(100, lambda e: with_durations(e, 193.1))
    shell = VirtualShell(engine, kind="sglang").run(200)
    told = [(log.level, log.fields["source"], log.event) for log in shell.logs if "source" in log.fields]
    assert [(level, source) for level, source, _ in told] == [("warning", "observed"), ("info", "startup_fingerprint")]
    assert told[0][2].endswith(PROFILES["sglang"].how_to_be_named)
    assert PROFILES["sglang"].how_to_be_named


def test_no_engine_has_two_names() -> None:
    assert not [kind for kind, profile in PROFILES.items() if profile.start_time and profile.fingerprint]
