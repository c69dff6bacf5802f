"""What a decoder layer of Transformers is made of, read off its modules: `read_layer`.

Owns recognition by structure: which child is a norm and of what kind (asked of the module itself, on random
numbers), where the projections are, which activation the MLP has. Knows no model by name and decides nothing
about how the parts are wired: `fused_wiring` tries that. Whatever is not understood is a `NotRecognised` with
its reason, and the layer keeps Transformers' forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from octavo.kernels.layer import Act, NormWeights
from octavo.models.plain import more_inside, more_than_weights

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_ATTENTION = ("self_attn", "attention", "attn")
_OUTPUT = ("o_proj", "dense", "out_proj", "c_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_PLAIN_MLP = (
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("up_proj", "down_proj"),
)
_OF_THE_LAYER = ("fc1", "activation_fn", "fc2")
_ACTIVATION = ("act_fn", "activation_fn", "act", "activation")
_ACTS: dict[Act, Callable[[torch.Tensor], torch.Tensor]] = {
    Act.SILU: functional.silu,
    Act.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Act.GELU: functional.gelu,
    Act.RELU: functional.relu,
    Act.RELU_SQUARED: lambda x: functional.relu(x).square(),
}


class NotRecognised(Exception):
    """Why a layer keeps Transformers' forward."""


@dataclass(slots=True, eq=False)
class Matrix:
    """Rows of one or several linear modules that are to be one matrix. Once packed, the modules are let go of."""

    modules: tuple[nn.Linear | Conv1D, ...]
    order: torch.Tensor | None = None
    """Of its one module: the rows in the order in which they are wanted."""

    @property
    def outputs(self) -> int:
        return sum(int(_weight(module).shape[0]) for module in self.modules)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self._ordered(_weight(module)) for module in self.modules]

    @property
    def biases(self) -> list[torch.Tensor | None]:
        return [None if module.bias is None else self._ordered(module.bias) for module in self.modules]

    def _ordered(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() if self.order is None else tensor.detach()[self.order]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParts:
    """Projections of attention; `qkv` gives all query heads, then all key heads, then all value heads."""

    module: nn.Module
    qkv: Matrix
    output: Matrix
    q_norm: NormWeights | None
    k_norm: NormWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class MlpParts:
    """`inner` gives gate and up side by side, or the one that is activated."""

    inner: Matrix
    down: Matrix
    act: Act
    gated: bool


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """The parts in the order in which the layer calls them: N a norm, A attention, M the MLP."""

    order: str
    norms: tuple[NormWeights, ...]
    attention: AttentionParts
    mlp: MlpParts | None
    """None: the module runs as it is."""
    mlp_module: nn.Module
    multiplier: float


def attention_of(layer: nn.Module) -> nn.Module | None:
    """The child that attends."""
    return next((child for name in _ATTENTION if (child := getattr(layer, name, None)) is not None), None)


def read_layer(layer: nn.Module, called: Sequence[str], heads: tuple[int, int, int], hidden: int) -> LayerParts:
    """`called`: the children in the order of their calls. `heads`: query heads, key heads, dim of each."""
    attention = attention_of(layer)
    if attention is None:
        raise NotRecognised("it has no attention of a known name")
    order, norms, inner = "", [], None
    for name in called:
        child = getattr(layer, name)
        if isinstance(child, (nn.Dropout, nn.Identity)):
            continue
        if child is attention:
            order += "A"
        elif (norm := read_norm(child, hidden)) is not None:
            order += "N"
            norms.append(norm)
        elif name in _OF_THE_LAYER:  # an MLP without a module of its own
            order += "" if inner is layer else "M"
            inner = layer
        else:
            order += "M"
            inner = child
    if order.count("A") != 1 or order.count("M") != 1 or inner is None:
        raise NotRecognised(f"its parts are called as {order or 'none'}")
    mlp = _read_mlp(inner)
    if mlp is None and inner is layer:
        raise NotRecognised("its MLP has no module of its own and is not understood")
    return LayerParts(
        order,
        tuple(norms),
        _read_attention(attention, heads),
        mlp,
        inner,
        float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _weight(module: nn.Linear | Conv1D) -> torch.Tensor:
    """[outputs, inputs]; a Conv1D keeps it the other way round."""
    return module.weight if isinstance(module, nn.Linear) else module.weight.t()


def _require_plain(module: Any, name: str) -> nn.Linear | Conv1D:
    linear = getattr(module, name, None)
    if isinstance(linear, nn.Module) and (more := more_than_weights(linear)) is not None:
        raise NotRecognised(f"{name} {more}")
    if type(linear) not in (nn.Linear, Conv1D) or type(linear.weight) is not nn.Parameter:
        raise NotRecognised(f"{name} is no plain linear layer")
    if linear.weight.device.type != "cpu" or linear.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotRecognised(f"{name} is {linear.weight.dtype} on {linear.weight.device}")
    return linear


def _matrix(*modules: nn.Linear | Conv1D) -> Matrix:
    return Matrix(modules)


def _read_attention(module: nn.Module, heads: tuple[int, int, int]) -> AttentionParts:
    q_heads, kv_heads, dim = heads
    output = next((name for name in _OUTPUT if hasattr(module, name)), None)
    if output is None:
        raise NotRecognised("its attention has no output projection of a known name")
    if hasattr(module, "q_proj"):
        qkv = _matrix(*(_require_plain(module, name) for name in ("q_proj", "k_proj", "v_proj")))
    elif hasattr(module, "qkv_proj"):
        qkv = _matrix(_require_plain(module, "qkv_proj"))
    elif hasattr(module, "c_attn"):
        qkv = _matrix(_require_plain(module, "c_attn"))
    elif hasattr(module, "query_key_value"):
        qkv = _by_kind(_require_plain(module, "query_key_value"), q_heads, kv_heads, dim)
    else:
        raise NotRecognised("its attention has no projections of known names")
    if qkv.outputs < (q_heads + kv_heads) * dim:
        raise NotRecognised(f"its projections give {qkv.outputs} numbers where heads need more")
    norms: list[NormWeights | None] = [None, None]
    for names in _HEAD_NORMS:
        found = [getattr(module, name, None) for name in names]
        if any(norm is not None for norm in found):
            norms = [_head_norm(norm, count, dim) for norm, count in zip(found, (q_heads, kv_heads), strict=True)]
    return AttentionParts(module, qkv, _matrix(_require_plain(module, output)), norms[0], norms[1])


def _by_kind(linear: nn.Linear | Conv1D, q_heads: int, kv_heads: int, dim: int) -> Matrix:
    """A matrix that gives query, key and value head by head, as one that gives all queries first."""
    outputs = Matrix((linear,)).outputs
    if q_heads != kv_heads or outputs != 3 * q_heads * dim:
        raise NotRecognised("its joined projection has heads in an order that is not known")
    order = torch.arange(outputs).view(q_heads, 3, dim).transpose(0, 1).reshape(-1)
    return Matrix((linear,), order)


def _head_norm(module: nn.Module | None, heads: int, dim: int) -> NormWeights:
    if module is None:
        raise NotRecognised("queries and keys are not normalised alike")
    width = int(module.weight.shape[-1]) if isinstance(getattr(module, "weight", None), torch.Tensor) else dim
    norm = read_norm(module, width)
    if norm is None or (norm.width != dim and norm.width != heads * dim):
        raise NotRecognised("a norm of its heads is of no known kind")
    if norm.weight.dim() == 2 and norm.weight.shape[0] != heads:
        raise NotRecognised("a norm of its heads has weights for other heads")
    return norm


def _read_mlp(module: nn.Module) -> MlpParts | None:
    act = _activation(module)
    try:
        if act is None or more_inside(module) is not None:
            return None
        if hasattr(module, "gate_proj"):
            inner = _matrix(_require_plain(module, "gate_proj"), _require_plain(module, "up_proj"))
            return MlpParts(inner, _matrix(_require_plain(module, "down_proj")), act, gated=True)
        if hasattr(module, "gate_up_proj"):
            inner = _matrix(_require_plain(module, "gate_up_proj"))
            return MlpParts(inner, _matrix(_require_plain(module, "down_proj")), act, gated=True)
        for first, second in _PLAIN_MLP:
            if hasattr(module, first) and hasattr(module, second):
                inner = _matrix(_require_plain(module, first))
                return MlpParts(inner, _matrix(_require_plain(module, second)), act, gated=False)
    except NotRecognised:
        return None  # quantised, or experts: it runs as it is
    return None


def _activation(module: nn.Module) -> Act | None:
    function = next((f for name in _ACTIVATION if callable(f := getattr(module, name, None))), None)
    if function is None:
        return None
    x = torch.linspace(-9, 9, 181)
    with torch.inference_mode():
        try:
            seen = function(x)
        except Exception:  # noqa: BLE001 - whatever it is, it is no function of one number
            return None
        if not isinstance(seen, torch.Tensor) or seen.shape != x.shape:
            return None
        return next((act for act, known in _ACTS.items() if float((known(x) - seen).abs().max()) < 2e-6), None)


def read_norm(module: nn.Module, width: int | None = None) -> NormWeights | None:
    """The module as a norm, if that is what it computes: it is asked on random numbers. None for anything else."""
    told = next((float(e) for name in _EPS if isinstance(e := getattr(module, name, None), (int, float))), None)
    if told is None and (list(module.children()) or list(module.parameters())):
        return None
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if weight is None:
        weight = None if width is None else torch.ones(width)
    if not isinstance(weight, torch.Tensor) or weight.dim() not in (1, 2) or not weight.is_floating_point():
        return None
    if more_than_weights(module) is not None:
        return None
    dtype = weight.dtype if isinstance(getattr(module, "weight", None), torch.Tensor) else torch.get_default_dtype()
    generator = torch.Generator().manual_seed(7)
    x = (torch.randn((5, *weight.shape), generator=generator) * 2 + 0.5).to(dtype)
    with torch.inference_mode():
        try:
            seen = module(x)
        except Exception:  # noqa: BLE001 - whatever it is, it is no norm
            return None
    if not isinstance(seen, torch.Tensor) or seen.shape != x.shape:
        return None
    wide = weight.detach().float()
    bias = bias.detach().float().contiguous() if isinstance(bias, torch.Tensor) else None
    candidates = [
        NormWeights((wide + offset).contiguous(), bias, eps, centred, rounds)
        for eps in ((1e-5, 1e-6) if told is None else (told,))
        for centred in (False, True)
        for offset in (0.0, 1.0)
        for rounds in (True, False)
    ]
    apart = [float((_normalised(x, norm) - seen.float()).abs().max()) for norm in candidates]
    best = min(range(len(candidates)), key=lambda i: apart[i])
    close = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}.get(dtype, 0.0)
    return candidates[best] if apart[best] <= close * max(1.0, float(seen.float().abs().max())) else None


def _normalised(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    wide = x.float()
    if norm.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounds:
        wide = wide.to(x.dtype).float()
    made = wide * norm.weight
    return (made if norm.bias is None else made + norm.bias).to(x.dtype).float()
