"""What an engine holds, and the peaks of its steps: counted and measured, never made up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import tiny_llama

from octavo.config import Config
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.kernels.cpu import load_native
from octavo.memory.cache import KVCache
from octavo.models.load import held_bytes
from octavo.planner.ledger import DRAWN_ELEMENTS, QUERY_ROWS, RUNTIME_LINES, TILE_BYTES, Ledger
from octavo.runtime import measure, sampler
from octavo.runtime.measure import PeakMeter, array_bytes, measured_ledger
from octavo.scheduling.request import SamplingParams


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return build_engine(
        Config.from_kwargs(
            model=str(tiny_llama(tmp_path)), max_kv_tokens=256, max_num_seqs=4, attention_backend="reference"
        )
    )


def serve(engine: Engine, *lengths: int, max_tokens: int = 4) -> None:
    for i, length in enumerate(lengths):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        engine.add(f"r{i}", [5 + i % 3] * length, params)
    while engine.has_work:
        for name in engine.step().finished:
            engine.take(name)


def by_label(ledger: Ledger) -> dict[str, int | None]:
    return {line.label: line.measured_bytes for line in ledger.lines}


@dataclass
class Told:
    """Memory that reads what it is told: (now, peak) pairs in the order in which they are asked for."""

    nows: list[int]
    peaks: list[int]
    reason: str | None = None

    def unavailable(self) -> str | None:
        return self.reason

    def begin(self) -> int:
        return self.nows.pop(0)

    def now(self) -> int:
        return self.nows.pop(0)

    def peak(self) -> int:
        return self.peaks.pop(0)


# -- counting ---------------------------------------------------------------------------------------


def test_each_memory_is_counted_once_whatever_its_views() -> None:
    array, tensor = np.zeros(100, np.float32), torch.zeros(10, 10)
    held = [array, array[10:20].reshape(2, 5), {"a": array}, (tensor, tensor[0], tensor.numpy()), deque([tensor])]
    assert array_bytes(held) == 400 + 400


def test_octavos_own_objects_are_entered_and_those_of_others_are_not(engine: Engine) -> None:
    cache = engine.core.scheduler.cache
    tables = cache.tables[0]
    assert array_bytes(tables) == tables.slots.nbytes + tables.counts.nbytes + tables.firsts.nbytes
    assert array_bytes(torch.nn.Linear(4, 4)) == 0
    assert isinstance(cache, KVCache)
    assert array_bytes(cache) > array_bytes(tables) + cache.committed.nbytes


def test_what_was_counted_before_is_not_counted_again() -> None:
    array = np.zeros(8)
    counted: set[int] = set()
    assert [array_bytes([array], counted), array_bytes([array], counted)] == [64, 0]


def test_what_is_held_is_measured_exactly(engine: Engine) -> None:
    found = by_label(measured_ledger(engine))
    model = engine.core.executor.model
    assert found["weights"] == held_bytes(model) > 0
    assert found["KV cache"] == engine.deployment.kv_bytes
    assert found["allocator metadata"] == array_bytes(engine.core.scheduler.cache.pool) > 0
    assert found["block tables and token columns"] >= engine.core.scheduler.running.outputs.nbytes
    assert found["attention workspace"] == 0
    assert found["temporary buffers"] is None
    assert found["other engine state"] > 50 * 2**20  # at least an interpreter with torch in it
    serve(engine, 30, 3)
    assert by_label(measured_ledger(engine))["attention workspace"] > 0


@pytest.mark.skipif(load_native() is None, reason="the native kernels were not built")
def test_scratch_memory_of_the_native_kernels_is_counted(tmp_path: Path) -> None:
    made = build_engine(Config.from_kwargs(model=str(tiny_llama(tmp_path)), max_kv_tokens=256, attention_backend="cpu"))
    serve(made, 30, 3)
    backend = made.core.executor.backend
    assert by_label(measured_ledger(made))["attention workspace"] == backend.scratch_bytes > 4 * 30 * 16


def test_an_engine_without_a_model_has_no_ledger(engine: Engine) -> None:
    engine.deployment = None
    with pytest.raises(ConfigError, match="no deployment"):
        measured_ledger(engine)


# -- peaks ------------------------------------------------------------------------------------------


def test_peaks_are_what_rises_above_what_remains(engine: Engine) -> None:
    # begin of the forward, begin of the head (150 of it stays), end of the step
    meter = PeakMeter(engine, Told(nows=[1000, 1150, 1100], peaks=[1900, 1400]))
    serve(engine, 7, max_tokens=1)
    meter.stop()
    assert (meter.temporary_bytes, meter.logits_bytes) == (1900 - 1150, 1400 - 1150)
    found = by_label(measured_ledger(engine, meter))
    assert (found["temporary buffers"], found["logits"]) == (750, 250)


def test_only_a_step_larger_than_all_before_it_is_looked_at(engine: Engine) -> None:
    memory = Told(nows=[0] * 6, peaks=[10, 20, 30, 40])
    meter = PeakMeter(engine, memory)
    serve(engine, 7, max_tokens=5)  # one prefill, then smaller decodes
    serve(engine, 9, max_tokens=2)
    meter.stop()
    assert memory.peaks == []
    assert (meter.temporary_bytes, meter.logits_bytes) == (30, 40)


def test_a_stopped_meter_sees_nothing_more(engine: Engine) -> None:
    memory = Told(nows=[], peaks=[])
    meter = PeakMeter(engine, memory)
    meter.stop()
    serve(engine, 7)  # would ask the empty lists
    assert meter.temporary_bytes is None


def test_where_peaks_cannot_be_measured_a_note_says_why(engine: Engine) -> None:
    meter = PeakMeter(engine, Told([], [], "nothing can be reset here"))
    serve(engine, 7)
    meter.stop()
    assert meter.notes == ("peaks are not measured: nothing can be reset here",)
    assert by_label(measured_ledger(engine, meter))["logits"] is None


def test_the_kernels_high_water_mark_sees_a_buffer_that_is_gone_again() -> None:
    memory = measure._memory_of(torch.device("cpu"))
    reason = memory.unavailable()
    if reason is not None:
        pytest.skip(reason)
    before = memory.begin()
    buffer = torch.ones(64 << 20, dtype=torch.uint8)
    del buffer
    assert memory.peak() - before > 48 << 20
    assert memory.now() - before < 16 << 20


def test_a_machine_without_these_files_leaves_figures_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "_SELF", tmp_path)
    assert by_label(measured_ledger(engine))["other engine state"] is None
    assert "not measured" in PeakMeter(engine).notes[0]


# -- beside the predictions -------------------------------------------------------------------------


def test_every_line_is_predicted_at_or_above_what_a_full_step_takes(tmp_path: Path) -> None:
    """A step of 512 tokens of a model large enough for pages of memory to tell."""
    path = tiny_llama(tmp_path, hidden_size=256, intermediate_size=768, max_position_embeddings=1024)
    made = build_engine(
        Config.from_kwargs(
            model=str(path),
            max_kv_tokens=1024,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            attention_backend="reference",
        )
    )
    serve(made, 40)  # what libraries set up once is not this step's
    meter = PeakMeter(made)
    serve(made, 600)
    meter.stop()
    if meter.notes:
        pytest.skip(meter.notes[0])
    ledger = measured_ledger(made, meter)
    lines = {line.label: line for line in ledger.lines}
    buffers = lines["temporary buffers"]
    assert buffers.predicted_bytes / 5 < buffers.measured_bytes < buffers.predicted_bytes * 1.5
    workspace = lines["attention workspace"]
    assert 0 < workspace.measured_bytes <= workspace.predicted_bytes
    assert all(lines[label].measured_bytes is not None for label in RUNTIME_LINES)
    assert ledger.measured_total_bytes is not None


def test_the_ledger_counts_with_the_sizes_that_the_runtime_works_with() -> None:
    from octavo.kernels import reference

    assert sampler._SLICE_ELEMENTS == DRAWN_ELEMENTS
    assert (reference.TILE_BYTES, reference.QUERY_ROWS) == (TILE_BYTES, QUERY_ROWS)
