"""Modules that are more than their weights: shards of tensor parallelism, hooks, adapters. They are left as they are.

The fused layers and the packed matrices read weights once and never call the modules again, so whatever a module does
besides multiplying by its weight would be lost.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES
from test_native_engine import NativeBench
from tiny import tiny_config, tiny_prompts
from torch import nn
from torch.nn.utils import parametrize

from octavo.kernels.cpu import NativeAttention, instruction_sets
from octavo.models.fused import fuse
from octavo.models.linear import NativeLinear, Packing

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
    assert "no plain linear layer" in str(fusion)
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
