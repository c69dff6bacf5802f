"""Modules that are more than their weights: shards of tensor parallelism, hooks, adapters. They are left as they are.

The fused layers and the packed matrices read weights once and never call the modules again, so whatever a module does
besides multiplying by its weight would be lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES
from test_native_engine import NativeBench
from tiny import tiny_config, tiny_prompts
from torch import nn
from torch.nn.utils import parametrize

from octavo.errors import ConfigError
from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.models.fused import fuse
from octavo.models.linear import NativeLinear, Packing, round_packed
from octavo.models.load import held_bytes

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")

WANTED = 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Adapted(nn.Linear):
    """A low-rank adapter over a linear layer, as those of fine-tuned models."""

    def forward(self, x):
        return super().forward(x) + 0.05 * x.sum(-1, keepdim=True)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def sharded(layer, mesh):
    """Columns of the first matrices and rows of the last, as Megatron and Transformers' plans do."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
    parallelize_module(layer, mesh, plan | {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()})


def summed_elsewhere(module, given, made):
    """What an all-reduce does: parts of other ranks are added."""
    return made + 0.25


def adapt(layer, name):
    parent = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
    plain = getattr(parent, name)
    adapted = Adapted(plain.in_features, plain.out_features, bias=plain.bias is not None)
    adapted.load_state_dict(plain.state_dict())
    setattr(parent, name, adapted)


CHANGES = {
    "an all-reduce behind the attention's output": lambda layer: layer.self_attn.o_proj.register_forward_hook(
        summed_elsewhere
    ),
    "an all-reduce behind the attention": lambda layer: layer.self_attn.register_forward_hook(
        lambda module, given, made: (made[0] + 0.25, *made[1:])
    ),
    "an all-reduce behind the MLP": lambda layer: layer.mlp.register_forward_hook(summed_elsewhere),
    "an all-gather before the MLP": lambda layer: layer.mlp.register_forward_pre_hook(
        lambda module, given: (given[0] * 1.5,)
    ),
    "a hook of a norm": lambda layer: layer.post_attention_layernorm.register_forward_hook(summed_elsewhere),
    "a hook of the layer": lambda layer: layer.register_forward_hook(
        lambda module, given, made: made + 0.25 if isinstance(made, torch.Tensor) else (made[0] + 0.25, *made[1:])
    ),
    "an adapter on q_proj": lambda layer: adapt(layer, "q_proj"),
    "an adapter on down_proj": lambda layer: adapt(layer, "down_proj"),
    "a weight made of others": lambda layer: parametrize.register_parametrization(
        layer.mlp.up_proj, "weight", Doubled()
    ),
}


def bench_of(change, name="llama"):
    """Reference and served model are changed alike."""
    bench = NativeBench(tiny_config(name))
    for model in {id(model): model for model in (bench.reference, bench.served)}.values():
        change(model.model.layers[1])
    return bench


def both_passes(bench):
    fusion = fuse(bench.served, NativeAttention(), 128)
    Packing().apply(bench.served)
    return fusion


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_that_does_more_than_its_weights_say_is_left_alone_and_gives_its_own_tokens(name):
    bench = bench_of(CHANGES[name])
    fusion = both_passes(bench)
    assert 0 in fusion.layers
    assert 1 not in fusion.layers or fusion.layers[1].module is not None, "its MLP runs as it is, if anything"
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED, pause=2)
    bench.compare(prompts, served, FAMILIES["llama"].tolerance)


def test_sharded_layers_are_left_alone_with_a_reason_and_give_their_own_tokens(one_rank):
    bench = bench_of(lambda layer: None)
    for layer in bench.served.model.layers:
        sharded(layer, one_rank)
    fusion = both_passes(bench)
    assert fusion.stack is None
    assert fusion.layers == {}
    assert "layers 0, 1 not: self_attn.q_proj has hooks" in str(fusion)
    layers = bench.served.model.layers
    linear = Packing(tried=True).serve(layers, "asked for")
    with pytest.raises(ConfigError, match=r"q_proj left as it is: it has hooks"):
        round_packed(layers, *linear, "int8")
    assert not any(
        isinstance(module, NativeLinear) for layer in bench.served.model.layers for module in layer.modules()
    )
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED, pause=2)
    bench.compare(prompts, served, FAMILIES["llama"].tolerance)


def test_a_sharded_matrix_is_not_packed(one_rank):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    holder = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False))
    holder[0].weight = nn.Parameter(distribute_tensor(holder[0].weight.data, one_rank, [Shard(0)]))
    Packing().apply(holder)
    assert isinstance(holder[0].weight, DTensor)
    assert [type(module) for module in holder] == [nn.Linear, NativeLinear]


def test_a_shard_counts_the_bytes_that_lie_here(one_rank):
    bench = bench_of(lambda layer: None)
    held = held_bytes(bench.served)
    for layer in bench.served.model.layers:
        sharded(layer, one_rank)
    assert held_bytes(bench.served) == held


@pytest.mark.parametrize("where", ["model.norm", "model.layers.1.input_layernorm"])
def test_a_sharded_norm_is_left_alone(one_rank, where):
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    bench = bench_of(lambda layer: None)
    plan = {where: SequenceParallel(sequence_dim=1, use_local_output=True)}
    parallelize_module(bench.served, one_rank, plan)
    fusion = both_passes(bench)
    assert "has hooks" in str(fusion)
    assert fusion.stack is None
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED)[0], FAMILIES["llama"].tolerance)


def other_embedding(model):
    model.model.embed_tokens.register_forward_pre_hook(lambda module, given: ((given[0] + 1) % 120,))


def louder(name):
    """A module with a forward of its own, as tools put there that move weights or add adapters."""

    def change(model):
        module = model.get_submodule(name)
        own = module.forward
        module.forward = lambda x: own(x) * 1.25

    return change


@pytest.mark.parametrize(
    "change", [other_embedding, louder("model.embed_tokens"), louder("lm_head"), louder("model.layers.1.mlp.down_proj")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_with_a_forward_or_hooks_of_its_own_is_not_packed(change, tied):
    config = tiny_config("llama")
    config.tie_word_embeddings = tied
    bench = NativeBench(config)
    for model in (bench.reference, bench.served):
        change(model)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        right = bench.reference(ids).logits
        packing = Packing(tried=True)
        _, why = packing.serve(bench.served, "asked for")
        apart = (bench.served(ids).logits - right).abs().max()
    assert apart < 1e-4 * right.abs().max()
    assert "left as it is: it has" in why
    both = NativeBench(config)
    change(both.served)
    change(both.reference)
    both_passes(both)
    prompts = tiny_prompts()
    both.compare(prompts, both.serve(prompts, WANTED)[0], FAMILIES["llama"].tolerance)


NEUTRAL = {
    "model": "LlamaModel has hooks",
    "model.norm": "LlamaRMSNorm has hooks",
    "model.rotary_emb": "LlamaRotaryEmbedding has hooks",
    "model.layers.1.self_attn": "layer 1 not: self_attn has hooks",
    "model.layers.1.input_layernorm": "layer 1 not: input_layernorm has hooks",
    "model.layers.1.mlp": "2 of 2 layers",
    "model.layers.1.mlp.act_fn": "2 of 2 layers",
    "model.layers.1.mlp.down_proj": "2 of 2 layers",
    "model.embed_tokens": "2 of 2 layers",
    "lm_head": "2 of 2 layers",
}
"""Where a hook is that changes nothing, as an all-reduce in a world of one rank; and what is told of it."""


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_hook_that_changes_nothing_today_is_still_called_once_a_step(name):
    bench = bench_of(lambda layer: None)
    calls = []
    bench.served.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    fusion = both_passes(bench)
    assert NEUTRAL[name] in str(fusion)
    calls.clear()
    prompts = tiny_prompts()
    served, trial = bench.serve(prompts, WANTED)
    assert len(calls) == len(trial.plans)
    bench.compare(prompts, served, FAMILIES["llama"].tolerance)


class LowRank(nn.Module):
    """What a tool for adapters puts around a linear layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        torch.manual_seed(9)
        self.a = nn.Linear(base_layer.in_features, 4, bias=False)
        self.b = nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


def wrap(layer, name):
    parent = layer.self_attn if hasattr(layer.self_attn, name) else layer.mlp
    setattr(parent, name, LowRank(getattr(parent, name)))


@pytest.mark.parametrize("name", ["q_proj", "o_proj", "down_proj"])
def test_a_linear_layer_wrapped_in_an_adapter_keeps_it(name):
    bench = bench_of(lambda layer: wrap(layer, name))
    fusion = both_passes(bench)
    assert 1 not in fusion.layers or fusion.layers[1].module is not None
    wrapped = next(module for module in bench.served.modules() if isinstance(module, LowRank))
    assert isinstance(wrapped.base_layer, NativeLinear), "it is called, so it may be packed"
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED)[0], FAMILIES["llama"].tolerance)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_a_weight_that_is_made_anew_for_each_call_is_left_alone(normed):
    bench = bench_of(lambda layer: normed(layer.self_attn.q_proj))
    fusion = both_passes(bench)
    assert list(fusion.layers) == [0]
    assert "q_proj" in fusion.reasons[1]
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED)[0], FAMILIES["llama"].tolerance)


def test_two_layers_that_share_a_matrix_keep_it():
    def share(layer):
        layer.self_attn.v_proj.weight = layer.self_attn.k_proj.weight

    bench = bench_of(share)
    both_passes(bench)
    prompts = tiny_prompts()
    bench.compare(prompts, bench.serve(prompts, WANTED)[0], FAMILIES["llama"].tolerance)


TWO_RANKS = """
import sys
import torch, torch.distributed as dist
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tiny import tiny_config
from test_native_engine import NativeBench
from octavo.kernels.cpu import NativeAttention
from octavo.models.fused import fuse
from octavo.models.bridge import Bridge
from octavo.models.fused_run import LayerPrograms
from octavo.models.fused_watch import watch, watched_cache
from octavo.models.linear import Packing

torch.set_num_threads(1)
what, place, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
model = NativeBench(tiny_config("llama")).served
whole = watch(model, NativeAttention(), 128).logits
column = [f"{part}.{name}" for part, name in (
    ("self_attn", "q_proj"), ("self_attn", "k_proj"), ("self_attn", "v_proj"),
    ("mlp", "gate_proj"), ("mlp", "up_proj"))]
row = ["self_attn.o_proj", "mlp.down_proj"]
if what == "mlp":
    column, row = column[3:], row[1:]
if what == "ends":
    column, row = [], []
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, ends)
for layer in model.model.layers:
    if what == "plain":  # matrices cut by hand, summed by hooks
        for name in column + row:
            module = layer.get_submodule(name)
            cut = module.weight.data.chunk(2, dim=0 if name in column else 1)[rank]
            module.weight = torch.nn.Parameter(cut.contiguous(), requires_grad=False)
        def summed(module, given, made):
            dist.all_reduce(made)
            return made
        for name in row:
            layer.get_submodule(name).register_forward_hook(summed)
    else:
        plan = {name: ColwiseParallel() for name in column} | {name: RowwiseParallel() for name in row}
        parallelize_module(layer, mesh, plan)
backend = NativeAttention()
seen = watch(model, backend, 128)

def fused_logits():
    # Both steps again, by what has become of the layers.
    if not fusion.layers:
        return watch(model, backend, 128).logits
    programs = LayerPrograms(fusion.layers, backend, seen.pages, dict.fromkeys(seen.pages, 0), fusion.stack)
    found = []
    for step, ids, positions in zip(seen.steps, seen.token_ids, seen.positions):
        keep = torch.arange(ids.shape[1])
        cache = watched_cache(backend, seen.pages, step)
        cache.layers = programs.begin((step,), len(keep))
        with torch.inference_mode():
            given = programs.logits(ids, positions, keep, (step,)) if fusion.stack else Bridge(model).logits(
                ids, positions, keep, cache)
        found.append(given.clone())
    return found

def apart(found):
    return max(float((a - b.view_as(a)).abs().max() / b.abs().max()) for a, b in zip(found, whole))

fusion = fuse(model, backend, 128)
_, told = Packing(tried=True).serve(model, "asked for")
print(f"{apart(seen.logits):.1e} {apart(fused_logits()):.1e} {fusion}; {told}")
dist.destroy_process_group()
"""


TOLD = {
    "all": ("0 of 2 layers", "q_proj has hooks", "o_proj left as it is: it has hooks"),
    "mlp": ("2 of 2 layers", "down_proj left as it is: it has hooks"),
    "ends": ("2 of 2 layers", "lm_head left as it is: it has hooks"),
    "plain": ("0 of 2 layers", "o_proj has hooks", "down_proj left as it is: it has hooks"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", TOLD)
def test_two_ranks_of_a_sharded_model_give_together_what_it_gave(tmp_path, what):
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", TWO_RANKS, what, str(tmp_path / "ranks")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([here, *sys.path]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*arguments, str(rank)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for out, wrong in said:
        assert out, wrong
        before, after, told = out.strip().split(" ", 2)
        assert float(before) < 1e-5
        assert float(after) < 1e-5
        assert all(words in told for words in TOLD[what]), told
