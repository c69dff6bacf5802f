"""Decoder layers as native programs: families give Transformers' tokens, and what is not understood is left alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import FAMILIES
from hard_run import hard_run
from test_native_engine import NativeBench
from tiny import ARCHITECTURES, tiny_config, tiny_prompts
from torch import nn

from octavo.errors import ModelError
from octavo.geometry.dtypes import FP8, FP32, INT8
from octavo.geometry.from_config import geometry_from_config
from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.kernels.layer import Rope
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.models.fused import fuse
from octavo.models.fused_layer import Absorbed
from octavo.models.linear import Packing, packed_matrices
from octavo.models.trial import Trial, subjects
from octavo.models.verify import spoiler
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.sampler import Sampler
from octavo.scheduling.plan import Admission, NewBlocks, StepPlan
from octavo.scheduling.request import Request, SamplingParams

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")

WANTED = 12
TILE = 384
"""Rows that native/layer_program.h runs together."""
SHARED = 2**14
"""Elements from which on native/layer.cpp shares them among threads."""
PRE = """llama mistral qwen2 qwen2-window qwen3 qwen3-window gemma phi3 olmo starcoder2 granite smollm3 stablelm glm
persimmon helium nemotron ministral arcee seed_oss ernie4_5 vaultgemma cwm jais2 glm4_moe olmoe mixtral qwen2_moe
qwen2_moe-window qwen3_moe gpt_oss granitemoe apertus dots1 minimax_m2 granitemoeshared ernie4_5_moe
gpt2 gpt_bigcode opt biogpt"""
WIRED = {
    **dict.fromkeys(PRE.split(), "pre"),
    **dict.fromkeys(("gemma2", "gemma3_text", "glm4"), "sandwich"),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4", "flex_olmo"), "post"),
    **dict.fromkeys(("cohere", "cohere2", "gpt_neox", "phi"), "parallel"),
}
"""Families whose layers must all be recognised, whole model included, and how their parts stand to each other."""
OPTIONS = {
    "biases everywhere": ("pre", {"model_type": "llama", "attention_bias": True, "mlp_bias": True}),
    "halves one after the other": (
        "pre",
        {"model_type": "gpt_neox", "num_key_value_heads": None, "use_parallel_residual": False},
    ),
    "halves side by side": ("parallel", {"model_type": "stablelm", "use_parallel_residual": True}),
    "norms of heads beside": ("parallel", {"model_type": "cohere", "use_qk_norm": True}),
    "norms of heads with biases": ("parallel", {"model_type": "phi", "num_key_value_heads": 4, "qk_layernorm": True}),
    "a norm for each head": ("", {"model_type": "stablelm", "qk_layernorm": True}),
}
"""Options of families that change what a layer is; the last is left alone."""
LEFT_ALONE = ("gptj", "gemma3n_text", "llama4_text", "bitnet")


def fused_bench(name, max_model_len=128):
    bench = NativeBench(tiny_config(name))
    bench.fusion = fuse(bench.served, NativeAttention(), max_model_len)
    return bench


@pytest.mark.parametrize("name", WIRED)
def test_a_family_is_recognised_and_gives_the_tokens_of_generate(name):
    bench = fused_bench(name)
    fusion = bench.fusion
    assert len(fusion.layers) == fusion.count == bench.served.config.get_text_config().num_hidden_layers
    assert fusion.stack is not None, fusion.outside
    assert {layer.wiring.name for layer in fusion.layers.values()} == {WIRED[name]}
    prompts = tiny_prompts()
    served, trial = bench.serve(prompts, WANTED, pause=2)
    _, distinct = bench.compare(prompts, served, FAMILIES[name].tolerance)
    assert distinct > 10
    assert trial.pauses == 1


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_a_family_is_recognised_or_left_alone_and_gives_the_tokens(name, monkeypatch):
    wired, fields = OPTIONS[name]
    monkeypatch.setitem(ARCHITECTURES, name, fields)
    bench = fused_bench(name)
    fusion = bench.fusion
    assert (fusion.stack is not None) == bool(wired), fusion.outside
    assert {layer.wiring.name for layer in fusion.layers.values()} == ({wired} if wired else set())
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED, pause=2)[0], FAMILIES["llama"].tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "mixtral"])
def test_layers_alone_give_the_tokens_too(name):
    """Transformers' own forward around them, as where what surrounds them is not recognised."""
    bench = fused_bench(name)
    bench.fusion.stack = None
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED, pause=2)[0], FAMILIES[name].tolerance)


@pytest.mark.parametrize("instruction_set", instruction_sets())
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere"])
def test_every_instruction_set_gives_the_tokens(name, instruction_set):
    bench = NativeBench(tiny_config(name))
    bench.instruction_set = instruction_set
    fuse(bench.served, NativeAttention(instruction_set), 128)
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED, pause=2)[0], FAMILIES[name].tolerance)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_engine_under_pressure_gives_the_tokens(name):
    bench = fused_bench(name)
    prompts = tiny_prompts()
    served, _ = bench.run(prompts, WANTED, n_slabs=30)
    bench.compare(prompts, served, FAMILIES[name].tolerance)
    outcome = hard_run(bench, prompts, WANTED, n_slabs=400, rows=7, budget=24)
    bench.compare(prompts, outcome.tokens, FAMILIES[name].tolerance)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_not_understood_keeps_transformers_forward(name):
    if name not in ARCHITECTURES:
        pytest.skip("not in the table of families")
    bench = fused_bench(name)
    assert not bench.fusion.layers
    assert len(bench.fusion.reasons) == bench.fusion.count or bench.fusion.why
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED, pause=2)[0], FAMILIES[name].tolerance)


def test_a_layer_that_does_something_else_is_left_alone():
    bench = NativeBench(tiny_config("llama"))
    reference, served = bench.reference.model.layers[1], bench.served.model.layers[1]

    class Odd(type(served.mlp)):
        def forward(self, x):
            return super().forward(x) * 1.01

    for layer in (reference, served):
        layer.mlp.__class__ = Odd
    fusion = fuse(bench.served, NativeAttention(), 128)
    assert list(fusion.layers) == [0]
    assert "no wiring" in fusion.reasons[1]
    assert fusion.stack is None
    assert type(served.mlp.gate_proj) is nn.Linear, "its weights stay where they were"
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED, pause=2)[0])


def test_a_norm_of_its_own_kind_is_left_alone():
    class Odd(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

        def forward(self, x):
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon)

    bench = NativeBench(tiny_config("llama"))
    for model in (bench.reference, bench.served):
        model.model.layers[0].input_layernorm = Odd(model.model.layers[0].input_layernorm)
    fusion = fuse(bench.served, NativeAttention(), 128)
    assert list(fusion.layers) == [1]
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED)[0])


def test_what_surrounds_the_layers_is_checked_too():
    bench = NativeBench(tiny_config("llama"))
    for model in (bench.reference, bench.served):
        own = model.model.norm.forward
        model.model.norm.forward = lambda x, own=own: own(x).flip(-1)
    fusion = fuse(bench.served, NativeAttention(), 128)
    assert len(fusion.layers) == 2
    assert fusion.stack is None
    assert fusion.outside
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED)[0])


def test_a_hooked_or_quantised_linear_is_left_alone():
    bench = NativeBench(tiny_config("llama"))
    bench.served.model.layers[0].self_attn.o_proj.register_forward_hook(lambda m, a, out: out)
    fusion = fuse(bench.served, NativeAttention(), 128)
    assert list(fusion.layers) == [1]
    assert "hooks" in fusion.reasons[0]


def test_weights_are_held_once():
    bench = fused_bench("llama")
    layers = bench.served.model.layers
    assert not any(isinstance(module, nn.Linear) for module in layers.modules())
    assert any(isinstance(module, Absorbed) for module in layers.modules())
    outputs = sum(packed.out_features * packed.in_features for packed in packed_matrices(layers))
    assert outputs == sum(m.weight.numel() for m in bench.reference.model.layers.modules() if isinstance(m, nn.Linear))


def test_a_fused_model_refuses_other_caches_and_kernels():
    bench = fused_bench("llama")
    with pytest.raises(ModelError, match="load it again"):
        bench.served(input_ids=torch.tensor([[5, 6, 7]]))
    layout = make_layout(served_groups(geometry_from_config(bench.config, FP32).layers), 4, "tokens_heads")
    with pytest.raises(ModelError, match="native"):
        TorchExecutor(bench.served, layout, 8, rows=2, sampler=Sampler(2, 128, "cpu"))
    with pytest.raises(ModelError, match="fused before"):
        fuse(bench.served, NativeAttention(), 128)


def trial_tokens(model, config, kept, prompts, seed=0):
    """Greedy tokens by hand-made ragged plans, with keys and values in `kept`."""
    backend = NativeAttention()
    geometry = geometry_from_config(config, kept, model_dtype=FP32)
    layout = make_layout(served_groups(geometry.layers), 4, backend.block_order)
    vocabulary = model.config.get_text_config().vocab_size
    executor = TorchExecutor(model, layout, 80, rows=5, sampler=Sampler(5, vocabulary, "cpu"), backend=backend)
    made = subjects(prompts, WANTED)
    Trial(executor, layout, 80, 5, seed=seed, spoil=spoiler(executor)).run(made, longest_chunk=7)
    return [subject.outputs for subject in made]


@pytest.mark.parametrize("kept", [INT8, FP8])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_quantised_pages_give_what_they_give_unfused(name, kept):
    prompts = tiny_prompts()
    plain, fused = NativeBench(tiny_config(name)), fused_bench(name)
    right = trial_tokens(plain.served, plain.config, kept, prompts)
    found = trial_tokens(fused.served, fused.config, kept, prompts)
    same = sum(a == b for a, b in zip(found, right, strict=True))
    assert same >= len(prompts) - 1, "one near tie of rounded keys may go the other way"


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2"])
def test_a_batch_mate_never_changes_a_bit(name):
    bench = fused_bench(name)
    Packing().apply(bench.served)  # the output head: torch's own gives other bits for other numbers of rows
    prompts = tiny_prompts()
    executor, _ = bench.executor()
    stack = executor._layers
    seen = []
    own = stack.logits

    def kept(*args):
        logits = own(*args)
        seen.append(logits.clone())
        return logits

    stack.logits = kept
    executor._sampler.takes_largest = lambda rows: False
    assert executor._layers.whole is not None
    steps = _alone_and_together(executor, prompts)
    alone, together = (seen[i] for i in steps)
    assert torch.equal(alone[0], together[0])


@pytest.mark.parametrize("name", ["llama", "cohere"])
def test_how_many_threads_stand_by_never_changes_a_bit(name, monkeypatch):
    config = tiny_config(name)
    config.max_position_embeddings = 1024
    bench = NativeBench(config)
    assert fuse(bench.served, NativeAttention(), 1024).stack is not None
    Packing().apply(bench.served)
    prompts, seen = [tiny_prompts()[2] * 15, *tiny_prompts()[1:]], {}
    for threads in (1, 2, 5):
        monkeypatch.setattr(NativeAttention, "threads", threads)
        executor, _ = bench.executor(n_slabs=600)
        assert executor._layers.hidden * len(prompts[0]) >= SHARED
        own = executor._layers.logits
        seen[threads] = []

        def kept(*args, own=own, logits=seen[threads]):
            logits.append(own(*args).clone())
            return logits[-1]

        executor._layers.logits = kept
        executor._sampler.takes_largest = lambda rows: False
        _alone_and_together(executor, prompts)
    for threads in (2, 5):
        assert all(torch.equal(one, other) for one, other in zip(seen[1], seen[threads], strict=True))


def test_what_a_program_refuses_is_raised_though_threads_stand_by():
    bench = fused_bench("llama")
    executor, _ = bench.executor()
    stack, native = executor._layers.stack, executor._layers.native
    rows = torch.zeros(1, 4, executor._layers.hidden)
    for threads in (1, 2):
        with pytest.raises(ValueError, match="the step was made for other layers"):
            stack.run(0, 2, native.LayerStep(4, threads), rows.data_ptr(), rows.data_ptr(), 0, 0, 0)


def test_kinds_of_operations_are_timed_while_somebody_asks():
    bench = fused_bench("llama")
    executor, _ = bench.executor()
    stack = executor._layers.stack
    stack.time(2)
    _alone_and_together(executor, tiny_prompts())
    found = {name: (seconds, calls) for name, seconds, calls in stack.times()}
    assert set(found) >= {"qkv", "output", "inner", "down", "attention", "activation"}
    assert all(seconds > 0 and calls >= 4 for seconds, calls in found.values())
    stack.time(0)
    _alone_and_together(executor, tiny_prompts())
    assert all(calls == 0 for _, _, calls in stack.times())


def _alone_and_together(executor, prompts):
    """The first prompt in a step of its own, and again (other slots, another row) beside two others."""
    params = SamplingParams(temperature=0.0, max_tokens=4, seed=0).with_defaults({})
    groups = len(executor.arena.layout.groups)
    slot, plans = 0, []
    for number, rows in enumerate(([0], [1, 2, 3])):
        chosen = [prompts[0], prompts[3], prompts[5]][: len(rows)]
        requests = [Request(request_id=f"{number}-{r}", prompt_token_ids=np.asarray(p, np.int32), params=params)
                    for r, p in zip(rows, chosen, strict=True)]  # fmt: skip
        blocks = []
        for group in range(groups):
            held = [(row, i) for row, p in zip(rows, chosen, strict=True) for i in range(-(-len(p) // 4))]
            at = np.arange(slot, slot + len(held), dtype=np.int32)
            columns = np.asarray(held, np.int32).T
            blocks.append(NewBlocks(group, columns[0].copy(), columns[1].copy(), at))
            slot += len(held)
        counts = np.asarray([len(p) for p in chosen], np.int32)
        plans.append(
            StepPlan(
                number=number + 1,
                planned_s=0.0,
                sequence_ids=np.asarray(rows, np.int64),
                rows=np.asarray(rows, np.int32),
                starts=np.zeros(len(rows), np.int32),
                counts=counts,
                samples=np.ones(len(rows), np.bool_),
                token_ids=np.concatenate([np.asarray(p, np.int32) for p in chosen]),
                admissions=tuple(
                    Admission(row, row, request, np.zeros(0, np.int32))
                    for row, request in zip(rows, requests, strict=True)
                ),
                new_blocks=tuple(blocks),
            )
        )
    for plan in plans:
        executor.submit(plan)
        executor.collect()
    return 0, 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "phi", "qwen3", "gpt2", "opt", "biogpt"])
def test_half_precision_layers_are_recognised(name, dtype):
    bench = NativeBench(tiny_config(name), dtype=dtype)
    fusion = fuse(bench.served, NativeAttention(), 128)
    assert len(fusion.layers) == fusion.count, fusion.reasons
    assert fusion.stack is not None, fusion.outside


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "mixtral", "olmo2", "flex_olmo"])
def test_a_long_chunk_goes_through_tile_by_tile(name):
    config = tiny_config(name)
    config.max_position_embeddings = 1024
    bench = NativeBench(config)
    assert fuse(bench.served, NativeAttention(), 1024).stack is not None
    random = np.random.default_rng(8)
    prompts = [random.integers(3, 120, size=n).tolist() for n in (900, 5, 30)]
    served, trial = bench.serve(prompts, 3, longest_chunk=2000, n_slabs=600)
    assert max(int(plan.counts.max()) for plan in trial.plans) > TILE
    bench.compare(prompts, served, FAMILIES[name].tolerance)


def test_tables_follow_a_rope_that_is_fixed_after_the_trial():
    bench = fused_bench("llama")
    for model in (bench.reference, bench.served):
        model.model.rotary_emb.inv_freq.mul_(0.37)
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED)[0])


def test_a_window_that_reaches_past_what_is_kept_is_refused():
    bench = fused_bench("mistral")
    bench.config["sliding_window"] = 4
    with pytest.raises(ModelError, match="a window of 6 where its geometry keeps a window of 4"):
        bench.serve(tiny_prompts(), 2)


def test_heads_turned_in_pairs_are_told_from_halves():
    fusions = {name: fused_bench(name).fusion for name in ("llama", "cohere", "glm", "gpt_oss", "smollm3")}
    ropes = {name: {layer.wiring.rope for layer in fusion.layers.values()} for name, fusion in fusions.items()}
    assert ropes["llama"] == {Rope.HALVES}
    assert ropes["cohere"] == {Rope.PAIRS}
    assert ropes["glm"] == {Rope.PAIRS_PACKED}
    assert ropes["gpt_oss"] == {Rope.HALVES_PACKED}
    assert ropes["smollm3"] == {Rope.HALVES, Rope.NONE}


def test_the_start_tells_what_was_fused_and_why_not():
    assert str(fused_bench("llama").fusion).startswith("2 of 2 layers run as native programs")
    told = str(fused_bench("bitnet").fusion)
    assert told.startswith("0 of 2 layers")
    assert "layer 0 not: no wiring of its parts gives what it gives" in told
