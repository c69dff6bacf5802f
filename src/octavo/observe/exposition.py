"""Prometheus text from what `Metrics.read` returns. The one module that imports prometheus-client.

Owns a registry of its own for every `Metrics`: two engines in one process do not collide. Families
are built when somebody scrapes; nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from octavo.observe.histogram import Distribution
from octavo.observe.names import NAMES, Name

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Reading = Mapping[str, Mapping[str, float | Distribution]]

_FAMILIES: Mapping[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Exposition:
    """`read` gives the values, `model` and `policies` (by name of the metric) the constant labels."""

    def __init__(self, read: Callable[[], Reading], model: str, policies: Mapping[str, str]) -> None:
        self._read = read
        self._model = model
        self._policies = policies
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client calls on a scrape."""
        reading = self._read()
        for name in NAMES:
            if name.name in reading:  # else this engine has not the tier that it tells of
                yield self._family(name, reading[name.name])

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _family(self, name: Name, values: Mapping[str, float | Distribution]) -> Metric:
        family: Any = _FAMILIES[name.kind](name.full, name.meaning, labels=name.labels)
        for value, figure in values.items():
            labels = [
                self._model,
                *name.label_values(value),
                *([self._policies[name.name]] if name.policy else []),
            ]
            if isinstance(figure, Distribution):
                family.add_metric(labels, _buckets(figure), figure.sum)
            else:
                family.add_metric(labels, figure)
        return cast(Metric, family)


def _buckets(figure: Distribution) -> list[tuple[str, float]]:
    """(upper bound, how many were at most that)."""
    bounds = [*(repr(bound) for bound in figure.bounds), "+Inf"]
    return list(zip(bounds, (float(below) for below in accumulate(figure.counts)), strict=True))
