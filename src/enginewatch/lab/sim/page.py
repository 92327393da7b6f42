"""Metric families as tables, and a registry made of them.

The real engines write their pages with prometheus_client, so the simulated ones do the same: number formats, `_created`
series and escaping are right by construction. Each engine's table is in its own module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, Summary
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram", "summary"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family; `name` is a counter's name without `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Families:
    """The families of one page in one registry."""

    def __init__(self, families: Iterable[Family], registry: CollectorRegistry) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._summaries: dict[str, Summary] = {}
        for family in families:
            name, help_, labels = family.name, family.help, family.labels
            if family.kind == "counter":
                self._counters[name] = Counter(name, help_, labels, registry=registry)
            elif family.kind == "gauge":
                self._gauges[name] = Gauge(name, help_, labels, registry=registry)
            elif family.kind == "histogram":
                self._histograms[name] = Histogram(name, help_, labels, registry=registry, buckets=family.buckets)
            else:
                self._summaries[name] = Summary(name, help_, labels, registry=registry)

    def add(self, name: str, amount: float, **labels: str) -> None:
        """Raise a counter; 0 makes the series exist."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def add_to_gauge(self, name: str, amount: float, **labels: str) -> None:
        """Raise or lower a gauge that counts what is open."""
        self._gauges[name].labels(**labels).inc(amount)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value into a histogram or a summary."""
        if name in self._histograms:
            histogram = self._histograms[name]
            (histogram.labels(**labels) if labels else histogram).observe(value)
        else:
            summary = self._summaries[name]
            (summary.labels(**labels) if labels else summary).observe(value)

    def open(self, name: str, **labels: str) -> None:
        """Make a series exist with its first value, 0."""
        for metrics in (self._counters, self._gauges, self._histograms, self._summaries):
            if name in metrics and labels:
                metrics[name].labels(**labels)


class _InUse(Collector):
    def __init__(self, registry: CollectorRegistry, also: frozenset[str]) -> None:
        self._registry = registry
        self._also = also

    def collect(self) -> Iterable[Metric]:
        return [metric for metric in self._registry.collect() if metric.samples or metric.name in self._also]


def in_use(registry: CollectorRegistry, also: frozenset[str] = frozenset()) -> CollectorRegistry:
    """A view of a registry without families that have no series, but for `also`: what a multiprocess registry shows."""
    view = CollectorRegistry()
    view.register(_InUse(registry, also))
    return view
