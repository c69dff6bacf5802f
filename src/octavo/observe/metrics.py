"""`Metrics`: everything of design section 12 that this engine can count, for Prometheus and for the page.

    events --observe--> Fold (counters, histograms) --+
                                                      +--read--> render (text), snapshot (JSON)
    scheduler, KV cache --guard--> gauges ------------+

Counters and histograms are a fold over the event stream; gauges are the engine's state at the moment
of reading. Every method may be called from any thread. One object for one engine; the names, and
what they mean, are in `names`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from octavo.observe.fold import Fold
from octavo.observe.gauges import Values, read_gauges, tiers_of, usage
from octavo.observe.histogram import Distribution
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Event


class Metrics:
    """`model` is the label of every series; `clock` is on the engine's time line."""

    def __init__(self, core: EngineCore, model: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._since = clock()
        self._lock = threading.Lock()
        self._fold = Fold(core.scheduler.running.rows, tiers_of(core))
        self._model = model
        self._exposition: Any = None

    def observe(self, events: Iterable[Event]) -> None:
        """Take the events of a step in, in order."""
        with self._lock:
            self._fold.take(events)

    def read(self) -> dict[str, dict[str, float | Distribution]]:
        """Every metric by name without prefix, then by label value ("" where it has none)."""
        with self._lock:
            fold = self._fold
            reading: dict[str, dict[str, float | Distribution]] = {
                name: dict(values) for name, values in fold.counters.items()
            }
            for name, histograms in fold.histograms.items():
                reading[name] = {value: histogram.read() for value, histogram in histograms.items()}
            reading["device_busy_ratio"] = {"": fold.busy_ratio(self._clock(), self._since)}
            bound_by = fold.bound_by
        for name, values in read_gauges(self._core, bound_by, self._clock()).items():
            reading[name] = dict(values)
        return reading

    def render(self) -> bytes:
        """The Prometheus text format. Needs prometheus-client."""
        if self._exposition is None:
            from octavo.observe.exposition import Exposition

            self._exposition = Exposition(self.read, self._model, self._policies())
        text: bytes = self._exposition.text()
        return text

    def snapshot(self) -> dict[str, Any]:
        """The same as plain values: a number, or a number by label value; histograms as count, sum and mean.

        `kv_usage` is beside them: bytes held / bytes of the pool, 0 to 1.
        """
        reading = self.read()
        plain: dict[str, Any] = {"model": self._model, "kv_usage": usage(_numbers(reading))}
        for name, values in reading.items():
            shown = {value: _plain(figure) for value, figure in values.items()}
            plain[name] = shown[""] if list(shown) == [""] else shown
        return plain

    def _policies(self) -> dict[str, str]:
        policies = self._core.scheduler.policies
        return {
            "admissions_total": policies.admission.name,
            "resumes_total": policies.admission.name,
            "preemptions_total": policies.victim.name,
        }


def _plain(figure: float | Distribution) -> Any:
    if isinstance(figure, Distribution):
        return {"count": figure.count, "sum": figure.sum, "mean": figure.mean}
    return figure


def _numbers(reading: dict[str, dict[str, float | Distribution]]) -> Values:
    return {
        name: {value: figure for value, figure in values.items() if not isinstance(figure, Distribution)}
        for name, values in reading.items()
    }
