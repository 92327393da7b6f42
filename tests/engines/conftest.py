"""Reading the captured pages, by a parser that is not ours."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginewatch.engines.profile import Metric, Profile

DATA = Path(__file__).parents[1] / "data"


class Series(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


class Page:
    """The samples of one page, and what a profile finds among them."""

    def __init__(self, text: str) -> None:
        self.series = [
            Series(sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
        self.names = {series.name for series in self.series}

    def find(self, profile: Profile, metric: Metric | None) -> list[Series]:
        """The series of the page that belong to the metric."""
        assert metric is not None
        names = metric.full_names(profile.prefixes)
        return [series for series in self.series if series.name in names and metric.accepts(series.labels)]

    def legs(self, profile: Profile) -> dict[str, list[Series]]:
        """Leg name -> its series, legs without any left out."""
        found = {leg.name: self.find(profile, leg.metric) for leg in profile.legs}
        return {name: series for name, series in found.items() if series}

    def values(self, profile: Profile, metric: Metric | None) -> dict[str, float]:
        """Core -> sum over the metric's series of that core."""
        total: dict[str, float] = defaultdict(float)
        for series in self.find(profile, metric):
            total[series.labels.get(profile.core_label, "0")] += series.value
        return dict(total)


@pytest.fixture(scope="session")
def load() -> Callable[[str], Page]:
    """Page by file name."""
    pages: dict[str, Page] = {}

    def load(name: str) -> Page:
        if name not in pages:
            pages[name] = Page((DATA / f"{name}.prom").read_text())
        return pages[name]

    return load


@pytest.fixture(scope="session")
def parse() -> Callable[[str], Page]:
    """Page by text."""
    return Page
