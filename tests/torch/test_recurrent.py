"""Models with recurrent and convolution layers, family by family: the tokens of Transformers, the bytes of geometry.

The reference of every family, Mamba 1 included, is `generate`: one-chunk prefill, then decode.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hard_run import hard_run
from recurrent_models import RECURRENT, recurrent_config
from tiny import Bench, tiny_prompts
from transformers import AutoModelForCausalLM, DynamicCache

from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Constant, parts_of
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.models.observe import require_geometry
from octavo.models.recurrent import MixerForward, run_by_slot
from octavo.models.table import VERIFIED_RECURRENT, refusal
from octavo.models.trial import Trial, subjects
from octavo.models.verify import TOLERANCE, tiny_difference
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.sampler import Sampler

WANTED = 12
CONSTANT_ALONE = ("mamba2", "mamba", "falcon_mamba")
"""Nothing grows in these, so nobody is ever preempted for want of blocks."""


@functools.cache
def bench(name: str) -> Bench:
    return Bench(recurrent_config(name))


def distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.flatten() - theirs.flatten()).norm() / theirs.norm())


families = pytest.mark.parametrize("name", RECURRENT)


@families
def test_ragged_chunks_with_a_pause_give_the_tokens_of_generate(name: str) -> None:
    prompts = tiny_prompts()
    served, trial = bench(name).serve(prompts, WANTED, pause=2)
    assert trial.pauses == 1
    chunked = [plan for plan in trial.plans if ((plan.counts > 1) & (plan.starts > 0)).any()]
    stacked = [plan for plan in trial.plans if ((plan.counts == 1) & (plan.starts > 0)).sum() > 1]
    assert len(chunked) > 3
    assert len(stacked) > 3
    _, distinct = bench(name).compare(prompts, served)
    assert distinct > 5, "a model that hardly varies its tokens proves nothing"


@families
@pytest.mark.parametrize("depth", [0, 1])
def test_the_engine_in_a_pool_for_one_gives_the_tokens_of_generate_and_holds_the_bytes_of_geometry(
    name: str, depth: int
) -> None:
    prompts = tiny_prompts()
    slabs = 3 if name in (*CONSTANT_ALONE, "jamba") else None
    outcome = hard_run(bench(name), prompts, WANTED, depth=depth, n_slabs=slabs)
    assert outcome.weighed > 50
    assert (outcome.preemptions > 0) == (name not in CONSTANT_ALONE)
    assert outcome.empty
    bench(name).compare(prompts, outcome.tokens)


@families
def test_batch_mates_do_not_change_a_sequence(name: str) -> None:
    prompts = tiny_prompts()
    together, _ = bench(name).serve(prompts, 8, rows=7, n_slabs=160)
    alone = [bench(name).serve([prompt], 8, rows=1)[0][0] for prompt in prompts]
    assert together == alone


@families
def test_the_model_keeps_what_geometry_reads_from_its_config(name: str) -> None:
    layers = geometry_from_config(bench(name).config, FP32, model_dtype=FP32).layers
    require_geometry(bench(name).reference, layers)
    assert any(isinstance(part, Constant) for state in layers for part in parts_of(state))


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_hold_what_the_cache_of_transformers_holds_less_one_column(name: str, dtype: torch.dtype) -> None:
    """After a prompt in one chunk, in the same types."""
    near = 1e-4 if dtype == torch.float32 else 0.1  # of the whole; layers round on the way
    made = Bench(recurrent_config(name), dtype=dtype)
    geometry = geometry_from_config({**made.config, "dtype": str(dtype).removeprefix("torch.")}, FP32)
    layout = make_layout(served_groups(geometry.layers), 4, "tokens_heads")
    executor = TorchExecutor(made.served, layout, 40, rows=1, sampler=Sampler(1, made.vocab_size, "cpu"))
    prompt = tiny_prompts()[0]
    trial = Trial(executor, layout, 40, 1)
    trial.run(subjects([prompt], 1), longest_chunk=10**6)
    if int(trial.plans[0].counts[0]) < len(prompt):
        pytest.fail("the prompt was not computed in one chunk")
    cache = DynamicCache(config=made.reference.config)
    with torch.inference_mode():
        made.reference(input_ids=torch.tensor([prompt]), cache=cache, use_cache=True)
    group = next(group for group in layout.groups if not group.block_tokens)
    slot = next(int(new.slots[0]) for new in trial.plans[0].new_blocks if layout.groups[new.group] is group)
    unit = int(executor.arena.units(layout.groups.index(group), torch.tensor([slot], dtype=torch.int32).numpy())[0])
    for layer in group.layers:
        slots, theirs = executor.arena.slots(layer), cache.layers[layer]
        for number, view in enumerate(slots.convolutions):
            kept = theirs.conv_states[number][0]
            assert kept.dtype == view.dtype
            assert distance(view[unit], kept[..., kept.shape[-1] - view.shape[-1] :]) < near
        for number, view in enumerate(slots.recurrences):
            kept = theirs.recurrent_states[number][0]
            assert kept.dtype == view.dtype
            assert distance(view[unit], kept) < near


def test_many_decodes_are_one_call_of_a_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    run = MixerForward._run

    def counting(self, own, part, *rest):
        sizes.append((part.stacked, part.last - part.first))
        return run(self, own, part, *rest)

    monkeypatch.setattr(MixerForward, "_run", counting)
    bench("mamba2").serve([[5, 6, 7]] * 6, 6, rows=6, longest_chunk=3)
    assert max(size for stacked, size in sizes if stacked) >= 5
    assert {stacked for stacked, size in sizes if size == 1} <= {True, False}


@families
def test_mixers_are_found_by_what_they_ask_of_a_cache_and_bound_once(name: str) -> None:
    made = AutoModelForCausalLM.from_config(recurrent_config(name))
    geometry = geometry_from_config(bench(name).config, FP32).layers
    keeping = [state for state in geometry if any(isinstance(part, Constant) for part in parts_of(state))]
    assert run_by_slot(made) == len(keeping)
    bound = [module.forward for module in made.modules() if isinstance(vars(module).get("forward"), MixerForward)]
    assert run_by_slot(made) == len(bound)
    again = [module.forward for module in made.modules() if isinstance(vars(module).get("forward"), MixerForward)]
    assert all(one is two for one, two in zip(bound, again, strict=True))


def test_a_bound_model_still_runs_as_transformers_runs_it() -> None:
    made = Bench(recurrent_config("bamba"))
    prompt = tiny_prompts()[0]
    right, _ = made.generate(prompt, 6)
    made.executor()
    made.reference = made.served
    made.served.set_attn_implementation("eager")
    made._generated = {}
    assert made.generate(prompt, 6)[0] == right


# -- the check at load -----------------------------------------------------------------------------

DEFAULTS = {
    "bamba": {"attn_layer_indices": [2, 5]},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
}
"""Where a class's own sizes have no layer of one kind."""


@families
def test_the_check_at_load_accepts_the_class_at_its_own_sizes(name: str) -> None:
    config = recurrent_config(name).__class__(**DEFAULTS.get(name, {}))
    assert refusal(config) is None
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    assert min(tiny_difference(model_class, config, seed=seed) for seed in (0, 1)) < TOLERANCE


@pytest.mark.parametrize("name", ["mamba2", "mamba", "qwen3_next", "lfm2", "zamba2"])
def test_the_check_at_load_notices_a_state_that_is_not_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("octavo.models.recurrent.ChunkCache.store", lambda self: None)
    config = recurrent_config(name)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    assert not tiny_difference(model_class, config) < 10 * TOLERANCE


def test_the_check_at_load_notices_a_scan_that_starts_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Transformers' own scan of Mamba 1 does with a state."""
    monkeypatch.setattr("octavo.models.recurrent.SCAN", "no_such_scan")
    config = recurrent_config("mamba")
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    assert not tiny_difference(model_class, config) < 10 * TOLERANCE


def test_every_type_in_the_verified_table_is_compared_here() -> None:
    assert set(VERIFIED_RECURRENT) == {recurrent_config(name).model_type for name in RECURRENT}
