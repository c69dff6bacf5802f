"""The effective capacity gained, as Prometheus' text: what no engine can tell of itself, from two runs of one.

Owns the way from the figures to the text, for a file that node_exporter's textfile collector reads, and the words for
which tiers were on. Who measured them is a simulation, or a benchmark of the real engine.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from octavo.observe.names import ABSENT, PREFIX

HOST, HOST_AND_DISK = "host", "host+disk"


def capacity_text(model: str, gained: Mapping[str, tuple[int, int]]) -> bytes:
    """By the tiers that were on: live tokens and sequences kept in time with them, less those without. What is not
    known is left out: a zero would say that nothing was gained."""
    registry = CollectorRegistry(auto_describe=False)
    for at, name in enumerate(ABSENT):
        gauge = Gauge(PREFIX + name, ABSENT[name], ["model", "tiers"], registry=registry)
        for tiers, figures in gained.items():
            gauge.labels(model, tiers).set(figures[at])
    return generate_latest(registry)
