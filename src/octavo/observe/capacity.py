"""The effective capacity gained, as Prometheus' text: what no engine can tell of itself, from two runs of one.

Owns the way from the two figures to the text, for a file that node_exporter's textfile collector reads. Who measured
them is a simulation, or a benchmark of the real engine.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from octavo.observe.names import ABSENT, PREFIX


def capacity_text(model: str, tokens: int, sequences: int) -> bytes:
    """Live tokens and sequences kept in time with tiers below the device, less those without."""
    registry = CollectorRegistry(auto_describe=False)
    for name, figure in zip(ABSENT, (tokens, sequences), strict=True):
        Gauge(PREFIX + name, ABSENT[name], ["model"], registry=registry).labels(model).set(figure)
    return generate_latest(registry)
