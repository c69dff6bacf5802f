"""The last layer goes on with the rows that need logits alone: they keep every bit, and all rows' keys are stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_native_engine import NativeBench
from tiny import tiny_config, tiny_prompts

from octavo.kernels.cpu import NativeAttention, instruction_sets, load_native
from octavo.kernels.interface import AttentionRule, AttentionStep
from octavo.models.fused import fuse
from octavo.models.fused_run import LayerPrograms
from octavo.models.linear import Packing
from octavo.runtime.sampler import Sampler

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")

NOWHERE = torch.zeros(1, dtype=torch.int64)
TILE = 384
"""Rows that native/layer_program.h runs together."""


def tell_nothing(self, told, steps, keep, rows):
    return rows


def fused_bench(name, dtype=torch.float32, instruction_set=None, n_slabs=120):
    config = tiny_config(name)
    config.max_position_embeddings = 1024
    bench = NativeBench(config, dtype=dtype)
    bench.instruction_set = instruction_set
    assert fuse(bench.served, NativeAttention(instruction_set), 1024).stack is not None
    Packing().apply(bench.served)  # the output head: torch's own gives other bits for other numbers of rows
    return bench, n_slabs


def require_every_choice_alike(bench, prompts, n_slabs, longest_chunk, monkeypatch):
    """Serve, and run each step again with other rows kept; returns how many rows went on, by step and choice."""
    random = np.random.default_rng(5)
    own, asked, went_on = LayerPrograms.logits, LayerPrograms.tell_kept, []

    def told(*args):
        attend = asked(*args)
        went_on.append((args[4], len(args[3]), attend < args[4]))
        return attend

    def tried(self, ids, positions, keep, steps):
        tokens = ids.shape[1]
        monkeypatch.setattr(LayerPrograms, "tell_kept", tell_nothing)
        whole = own(self, ids, positions, torch.arange(tokens), steps).clone()
        monkeypatch.setattr(LayerPrograms, "tell_kept", told)
        some = torch.from_numpy(random.permutation(tokens)[: int(random.integers(0, tokens + 1))])
        for few in (some, keep[:1], keep[:0]):
            assert torch.equal(own(self, ids, positions, few, steps), whole[few])
        found = own(self, ids, positions, keep, steps)
        assert torch.equal(found, whole[keep])
        return found

    monkeypatch.setattr(LayerPrograms, "logits", tried)
    monkeypatch.setattr(Sampler, "takes_largest", lambda self, rows: False)
    bench.serve(prompts, 3, n_slabs=n_slabs, longest_chunk=longest_chunk)
    return went_on


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("qwen3", torch.float16),
        ("gemma2", torch.float32),
        ("gemma3_text", torch.bfloat16),
        ("olmo2", torch.float32),
        ("cohere2", torch.bfloat16),
        ("gpt_neox", torch.float32),
        ("gpt2", torch.float32),
    ],
)
def test_rows_that_are_kept_have_the_bits_of_a_step_that_keeps_all(name, dtype, monkeypatch):
    bench, n_slabs = fused_bench(name, dtype)
    went_on = require_every_choice_alike(bench, tiny_prompts(), n_slabs, 9, monkeypatch)
    assert sum(few for *_, few in went_on) > 10
    assert any(few and kept > 1 for _, kept, few in went_on)
    assert not all(few for *_, few in went_on), "where most rows are kept the layer runs as the others"


@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_chunks_of_several_tiles_do_on_every_instruction_set(instruction_set, monkeypatch):
    bench, _ = fused_bench("llama", torch.bfloat16, instruction_set)
    random = np.random.default_rng(8)
    prompts = [random.integers(3, 120, size=n).tolist() for n in (900, 5, 430)]
    went_on = require_every_choice_alike(bench, prompts, 600, 2000, monkeypatch)
    assert any(few and rows > TILE for rows, _, few in went_on)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_what_is_stored_serves_later_steps(name, monkeypatch):
    """With chunks that keep nothing, what the last layer stored is all that is left of them."""
    served = {}
    for few in (True, False):
        bench, n_slabs = fused_bench(name)
        if not few:
            monkeypatch.setattr(LayerPrograms, "tell_kept", tell_nothing)
        served[few], _ = bench.serve(tiny_prompts(), 8, n_slabs=n_slabs, longest_chunk=5)
    assert served[True] == served[False]


@pytest.mark.parametrize(("group", "expected"), [(1, 9), (3, 3), (8, 2), (9, 1)])
def test_a_long_chunks_last_row_attends_with_as_few_rows_as_give_its_bits(group, expected):
    """More rows than are read in place, so that the kernels for many rows take them."""
    backend = NativeAttention()
    step = AttentionStep(
        block_tokens=4,
        decodes=1,
        rows=np.array([1, 0]),
        offsets=np.array([0, 1, 171]),
        starts=np.array([7, 0]),
        contexts=np.array([8, 170]),
        tables=np.arange(100, dtype=np.int32).reshape(2, 50),
        write_blocks=torch.zeros(171, dtype=torch.int64),
        write_offsets=torch.zeros(171, dtype=torch.int64),
    )
    plan, native = backend.plan(step, AttentionRule(1.0), group, 2), load_native()
    for kept, attend in (([170, 0], 1 + expected), ([0], 1), ([], 0), (range(171), 171)):
        keep = torch.tensor(kept, dtype=torch.int64)
        assert native.LayerStep(171, 1).last(plan, keep.data_ptr() or NOWHERE.data_ptr(), len(keep)) == attend
    with pytest.raises(ValueError, match="a token that is kept is not there"):
        native.LayerStep(171, 1).last(plan, torch.tensor([171]).data_ptr(), 1)
