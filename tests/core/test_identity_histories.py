"""Generated lives of engines and sidecars: what the sources of an identity promise, and what counters alone miss.

A history is a row of processes behind one address. Each writes its series in an order of its own; pages show what was
written, in part; before that a series is absent, zero, or still has the value of the process before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from enginewatch.core.exposition import parse_series
from enginewatch.core.fingerprint import DurationSeries, fingerprint_id
from enginewatch.core.identity import PATIENCE_SEC, Change, IdentityTracker
from enginewatch.engines.sglang import PROFILE

ONE_SERIES = (
    'sglang:startup_time_seconds{phase="load_weight"}',
    'sglang:startup_time_seconds{phase="scheduler_e2e"}',
    'sglang:startup_cuda_graph_time_seconds{phase="decode"}',
)
PER_RANK = (
    'sglang:engine_load_weights_time{dp_rank="0",tp_rank="0"}',
    'sglang:engine_load_weights_time{dp_rank="1",tp_rank="0"}',
    'sglang:engine_load_weights_time{dp_rank="2",tp_rank="0"}',
    'sglang:engine_startup_time{dp_rank="0",tp_rank="0"}',
)
"""The first of each is the anchor."""


@dataclass(frozen=True)
class Page:
    """One poll: the failures before it, and what the page says."""

    process: int
    samples: Mapping[str, float] = field(default_factory=dict)
    start_time: float | None = None
    fell: bool = False
    rose: bool = False
    refused: int = 0
    timeouts: int = 0
    is_last: bool = False
    """Of its process; it shows everything."""


class Sidecar:
    """One tracker that is handed pages as the judgement does it."""

    def __init__(self, *, awaits: bool = True) -> None:
        self.tracker = IdentityTracker(7)
        self._awaits = awaits
        self._series = DurationSeries(PROFILE)
        self._now = 0.0

    def see(self, page: Page) -> Change:
        """Poll once. The clock runs slowly: no history lasts a minute."""
        self._now += 1.0
        for _ in range(page.refused):
            self.tracker.interrupted()
            self.tracker.refused()
        for _ in range(page.timeouts):
            self.tracker.interrupted()
        for series in page.samples:
            name, labels = parse_series(series)
            self._series.adopt(series, name, labels)
        said = self._series.on(page.samples)
        if self.tracker.is_stray(page.start_time, said):
            return Change.SAME
        return self.tracker.page(
            page.start_time,
            fell=page.fell,
            rose=page.rose,
            now=self._now,
            durations=said,
            awaits_durations=self._awaits,
        )

    @property
    def durable_id(self) -> str | None:
        """What it publishes, if that is to survive it."""
        identity = self.tracker.identity
        return identity.engine_id if identity is not None and identity.is_durable else None


@st.composite
def fingerprinted(draw: st.DrawFn) -> list[Page]:
    """Processes told by startup durations."""
    series = draw(st.sampled_from((ONE_SERIES, PER_RANK)))
    survives = draw(st.booleans())  # what was written survives a restart, in files
    pages: list[Page] = []
    before: dict[str, float] = {}
    for process in range(draw(st.integers(1, 4))):
        # Only the anchor is sure to be one of its own.
        own = {each: draw(st.sampled_from((0.4, 4.2, 100.0 + process))) for each in series}
        own[series[0]] = 190.0 + process / 1000
        number = draw(st.integers(1, 5))
        written_at = {each: draw(st.integers(0, number - 1)) for each in series}
        until_then = {each: draw(st.sampled_from((None, 0.0))) for each in series}
        for page in range(number):
            shown: dict[str, float] = {}
            is_last = page == number - 1
            hidden = set() if is_last else draw(st.sets(st.sampled_from(series)))
            for each in series:
                value = own[each] if page >= written_at[each] else until_then[each]
                if page < written_at[each] and survives and each in before:
                    value = before[each]
                if value is not None and each not in hidden:
                    shown[each] = value
            first = page == 0 and process > 0
            pages.append(
                Page(
                    process,
                    shown,
                    fell=first and draw(st.booleans()),
                    rose=draw(st.booleans()),
                    refused=draw(st.integers(0, 3)) if first else 0,
                    timeouts=draw(st.integers(0, 1)),
                    is_last=is_last,
                )
            )
        before = own
    return pages


@st.composite
def started(draw: st.DrawFn) -> list[Page]:
    """Processes told by a start time. Their registries may be reset, so counters prove nothing."""
    pages: list[Page] = []
    for process in range(draw(st.integers(1, 4))):
        number = draw(st.integers(1, 5))
        for page in range(number):
            # The first page of all tells it: a registry has it from the beginning, or never.
            shows = page == number - 1 or (process == 0 and page == 0) or draw(st.booleans())
            pages.append(
                Page(
                    process,
                    start_time=1000.0 + process / 100 if shows else None,
                    fell=draw(st.booleans()),
                    rose=draw(st.booleans()),
                    refused=draw(st.integers(0, 3)),
                    timeouts=draw(st.integers(0, 1)),
                    is_last=page == number - 1,
                )
            )
    return pages


def shown_id(page: Page) -> str | None:
    """The durable id of the process whose name this page shows."""
    if page.start_time is not None:
        return f"pst-{page.start_time:.2f}"
    anchors = [page.samples.get(series[0], 0.0) for series in (ONE_SERIES, PER_RANK)]
    return next((fingerprint_id(value) for value in anchors if value > 0), None)


def keeps_every_promise(pages: list[Page], *, awaits: bool) -> None:
    sidecar = Sidecar(awaits=awaits)
    restarted: list[Sidecar] = []
    last_shown: str | None = None
    ids: list[str] = []
    for page in pages:
        before = sidecar.tracker.restarts
        change = sidecar.see(page)
        last_shown = shown_id(page) or last_shown
        # (a) It changes with the name that the process shows, and with nothing else.
        assert sidecar.durable_id == last_shown
        # (b) Whenever a sidecar began, what it publishes is that.
        for other in restarted:
            other.see(page)
            assert other.durable_id in (None, last_shown)
        if last_shown is not None and len(restarted) < 6:
            restarted.append(Sidecar(awaits=awaits))
            restarted[-1].see(page)
        # (d) Every replacement is counted when it shows, and once.
        assert sidecar.tracker.restarts - before == (change is Change.REPLACED)
        assert sidecar.tracker.restarts <= page.process
        if page.is_last:
            assert sidecar.tracker.restarts == page.process
            assert sidecar.durable_id is not None
            ids.append(sidecar.durable_id)
            assert all(other.durable_id == sidecar.durable_id for other in restarted)
    # (c) Every replacement changes it.
    assert len(set(ids)) == len(ids) == pages[-1].process + 1


@given(fingerprinted())
@settings(max_examples=150, deadline=None)
def test_a_fingerprint_is_one_id_for_one_process(pages: list[Page]) -> None:
    keeps_every_promise(pages, awaits=True)


@given(started())
@settings(max_examples=100, deadline=None)
def test_a_start_time_is_one_id_for_one_process(pages: list[Page]) -> None:
    keeps_every_promise(pages, awaits=False)


# --- counters alone -------------------------------------------------------------------------------------------------


@st.composite
def unseen_replacements(draw: st.DrawFn) -> list[Page]:
    """Engines that are idle (0 before, 0 after), or fast (more after a poll than before): no counter ever falls."""
    pages = draw(st.one_of(fingerprinted(), started()))
    # Nobody listens on one poll at most where the engine is idle, and on more where it is fast.
    return [replace(page, fell=False, refused=3 if page.rose else draw(st.integers(0, 1))) for page in pages]


@given(unseen_replacements())
@settings(max_examples=100, deadline=None)
def test_counters_alone_miss_every_idle_engine_and_every_fast_one(pages: list[Page]) -> None:
    """The control of (c) and (d): the same pages without what names the process."""
    named, blind = Sidecar(), Sidecar(awaits=False)
    for page in pages:
        named.see(page)
        blind.see(replace(page, samples={}, start_time=None))
    assert named.tracker.restarts == pages[-1].process
    assert (blind.tracker.restarts, blind.durable_id) == (0, None)


# --- observed -------------------------------------------------------------------------------------------------------


@st.composite
def nameless(draw: st.DrawFn) -> list[Page]:
    """Pages that name no process, and failures between them."""
    page = st.builds(
        Page,
        st.just(0),
        fell=st.booleans(),
        rose=st.booleans(),
        refused=st.integers(0, 3),
        timeouts=st.integers(0, 1),
    )
    return draw(st.lists(page, min_size=1, max_size=12))


@given(nameless())
@settings(max_examples=100, deadline=None)
def test_an_observed_id_is_renewed_by_counters_that_fall_and_by_an_outage_after_which_none_is_higher(
    pages: list[Page],
) -> None:
    sidecar = Sidecar(awaits=False)
    ids: list[str] = []
    for number, page in enumerate(pages):
        restarts = sidecar.tracker.restarts
        sidecar.see(page)
        identity = sidecar.tracker.identity
        assert identity is not None
        assert not identity.is_durable
        renewed = number > 0 and (page.fell or (page.refused >= 2 and not page.rose))
        assert sidecar.tracker.restarts - restarts == identity.restarts - restarts == renewed
        assert (identity.engine_id not in ids) == (renewed or number == 0)
        ids.append(identity.engine_id)
    assert len(set(ids)) == sidecar.tracker.restarts + 1, "an id never comes back"


@given(fingerprinted())
@settings(max_examples=30, deadline=None)
def test_an_anchor_that_comes_late_takes_over_for_good(pages: list[Page]) -> None:
    sidecar, life = Sidecar(), [page for page in pages if page.process == 0]
    for _ in range(int(PATIENCE_SEC) + 1):
        sidecar.see(Page(0))
    assert sidecar.tracker.identity is not None
    assert sidecar.durable_id is None
    for page in (*life, *[Page(0)] * (2 * int(PATIENCE_SEC))):
        sidecar.see(page)
    assert sidecar.durable_id == shown_id(life[-1])
    assert sidecar.tracker.restarts == 0
