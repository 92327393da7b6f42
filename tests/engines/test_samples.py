"""The captured pages of every engine, found by name: tests/data/KIND-*.prom. A new engine's are tested for free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.engines.conftest import DATA

from enginewatch.core.exposition import NotMetrics, PageReader
from enginewatch.core.progress import Ledger
from enginewatch.engines import ALL_NAMES, PROFILES, recognise
from enginewatch.engines.profile import Metric, Profile

Load = Callable[[str], Any]

SAMPLES = {kind: sorted(path.stem for path in DATA.glob(f"{kind}-*.prom")) for kind in PROFILES}
PAGES = [(kind, name) for kind, names in SAMPLES.items() for name in names]

ABSENT = {"sglang": {"transfers"}}
"""Metrics that none of an engine's captured pages has."""


def samples_of(name: str, names: frozenset[str] = ALL_NAMES) -> dict[str, float]:
    """The page as the sidecar reads it, in pieces."""
    reader = PageReader(names)
    page = (DATA / f"{name}.prom").read_bytes()
    for start in range(0, len(page), 1000):
        reader.feed(page[start : start + 1000])
    return reader.finish()


def core_count(profile: Profile, name: str) -> int:
    ledger = Ledger(profile)
    ledger.take(samples_of(name, profile.names()), 0.0, 0.0, 1, recheck=False)
    return sum(bool(core.legs) for core in ledger.cores.values())


@pytest.mark.parametrize(("kind", "name"), PAGES)
def test_a_page_is_recognised_as_its_engines(kind: str, name: str) -> None:
    samples = samples_of(name)
    assert recognise(series.partition("{")[0] for series in samples) is PROFILES[kind]


@pytest.mark.parametrize(("kind", "name"), PAGES)
def test_a_page_has_cores_with_legs(kind: str, name: str) -> None:
    assert core_count(PROFILES[kind], name) >= 1


@pytest.mark.parametrize(("kind", "name"), PAGES)
def test_a_page_is_read_as_another_parser_reads_it(load: Load, kind: str, name: str) -> None:
    profile = PROFILES[kind]
    ours = samples_of(name, profile.names())
    theirs = [series for series in load(name).series if series.name in profile.names()]
    assert sorted(ours.values()) == sorted(series.value for series in theirs)


@pytest.mark.parametrize(("kind", "name"), PAGES)
def test_the_origin_of_a_page_is_told(kind: str, name: str) -> None:
    assert f"| {name}.prom |" in (DATA / "PROVENANCE.md").read_text()


@pytest.mark.parametrize("kind", [kind for kind, names in SAMPLES.items() if names])
def test_every_metric_of_a_profile_stands_on_one_of_its_pages(load: Load, kind: str) -> None:
    profile = PROFILES[kind]
    metrics: dict[str, Metric] = {leg.name: leg.metric for leg in profile.legs}
    metrics |= {queue.name: queue.metric for queue in profile.queues}
    for name in ("running", "waiting", "deferred", "transfers", "heartbeat", "start_time"):
        metric = getattr(profile, name)
        if metric is not None and metric.names:  # some engines have no gauge that can be believed
            metrics[name] = metric
    found = {name for name, metric in metrics.items() for page in SAMPLES[kind] if load(page).find(profile, metric)}
    assert set(metrics) - found == ABSENT.get(kind, set())


@pytest.mark.parametrize("kind", [kind for kind, names in SAMPLES.items() if names])
def test_half_a_page_is_never_one_more_core(kind: str) -> None:
    """Cut anywhere, a page is refused or has no core that the whole one has not."""
    profile = PROFILES[kind]
    name = SAMPLES[kind][-1]
    page = (DATA / f"{name}.prom").read_bytes()
    whole = core_count(profile, name)
    for end in range(1, len(page), max(1, len(page) // 97)):
        reader = PageReader(profile.names())
        reader.feed(page[:end])
        try:
            samples = reader.finish()
        except NotMetrics:
            continue
        ledger = Ledger(profile)
        ledger.take(samples, 0.0, 0.0, 1, recheck=False)
        assert len(ledger.cores) <= whole, end
