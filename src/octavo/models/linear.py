"""Linear layers of a loaded model in octavo's packed form: `Packing`.

Owns which modules are replaced, the check of each against the one it replaces, and the rounding of what is packed
to eight or four bits. A matrix is packed, checked on random rows and let go, so that weights are held once; an
embedding that is tied to a packed output head looks its rows up there. What a model reads by itself (`module.weight`
in a forward pass) stays as it is: the trial of a tiny model of its class finds out which.

Invariant: after `apply`, each matrix is held in one form, with every bit that it had.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from octavo.errors import ConfigError, ModelError
from octavo.kernels.linear import PackedLinear
from octavo.models.plain import more_than_weights

CHECKED_ROWS = 3
CHECKED_OUTPUTS = 64
"""Of a matrix that was rounded: those that are unpacked again to be compared."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference of an output, relative to the largest output: what the last bit of the type explains."""
ROUNDED_TOLERANCE = 5e-2
"""Likewise where rows are rounded to eight bits before they are multiplied: about a hundredth is usual."""
READ_DIRECTLY = ("kv_b_proj",)
"""Matrices that octavo itself reads: latents are expanded by them."""


class NativeLinear(nn.Module):
    """Stands in for an `nn.Linear`. Its weight can still be read, at the price of unpacking it."""

    def __init__(self, packed: PackedLinear, original: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        self.packed = packed
        self.bias = original.bias
        self.reads = 0
        self._dtype = original.weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        self.reads += 1
        return self.packed.rows(torch.arange(self.out_features), self._dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x)


class NativeEmbedding(nn.Module):
    """Stands in for an `nn.Embedding` whose rows are those of a packed output head."""

    def __init__(self, packed: PackedLinear, original: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim
        self.padding_idx = original.padding_idx
        self.packed = packed
        self.reads = 0
        self._dtype = original.weight.dtype

    @property
    def weight(self) -> torch.Tensor:
        self.reads += 1
        return self.packed.rows(torch.arange(self.num_embeddings), self._dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(ids, self._dtype)


@dataclass(slots=True, eq=False)
class Packing:
    """How the linear layers of one model are packed: in the type that they have."""

    instruction_set: str | None = None
    """Of the kernels; the fastest if not given."""
    tried: bool = False
    """Whether a tiny model of the same class went through its trial with packed layers."""
    leave: tuple[str, ...] = ()
    """Kinds of modules (paths without numbers) that a forward pass reads by itself."""
    left: dict[str, str] = field(default_factory=dict)
    """What is more than its weights, by the kind of module."""

    def try_on(self, tiny: nn.Module) -> None:
        """Pack a tiny model in the type it has; `learn` from it after its trial."""
        Packing(self.instruction_set).apply(tiny)

    def learn(self, tiny: nn.Module) -> None:
        """What the trial read by itself is left alone in the real model."""
        read = (name for name, module in tiny.named_modules() if getattr(module, "reads", 0))
        self.leave = tuple(sorted({kind_of(name) for name in read}))
        self.tried = True

    def serve(self, model: Any, why: str) -> tuple[str, str]:
        """Pack the model that will serve, where a trial said what may be. What its linear layers run on, and why."""
        if not self.tried:
            return "torch", "no tiny model of this architecture could be tried with packed layers"
        self.apply(model)
        count = sum(1 for _ in packed_matrices(model))
        left = "".join(f"; {kind} left as it is: it {more}" for kind, more in self.left.items())
        if not count:
            return "torch", f"this model has no linear layer that can be packed{left}"
        return "native", f"{why}; {count} matrices packed{left}"

    def apply(self, model: Any) -> None:
        """Replace every plain linear layer whose weight no other module holds, the tied embedding's apart."""
        holders = _holders(model)
        for name, module in list(model.named_modules()):
            more = more_than_weights(module) if isinstance(module, (nn.Linear, nn.Embedding)) else None
            if more is not None:
                self.left[kind_of(name)] = more
            if more is not None or type(module) is not nn.Linear or not self._may_pack(name, module):
                continue
            sharing = [other for other in holders[module.weight.data_ptr()] if other != name]
            embedding = self._tied(model, sharing)
            if sharing and embedding is None:
                continue
            packed = self._pack(name, module)
            _replace(model, name, NativeLinear(packed, module))
            if embedding is not None:
                _replace(model, sharing[0], NativeEmbedding(packed, embedding))
        _give_back_memory()

    def _may_pack(self, name: str, module: nn.Linear) -> bool:
        plain = type(module.weight) is nn.Parameter
        plain = plain and module.weight.device.type == "cpu" and module.weight.dtype in TOLERANCE
        own = name.rpartition(".")[2]
        return plain and kind_of(name) not in self.leave and own not in READ_DIRECTLY

    def _tied(self, model: Any, sharing: list[str]) -> nn.Embedding | None:
        """The embedding that alone shares a weight, if it is a plain one that may be replaced."""
        if len(sharing) != 1 or kind_of(sharing[0]) in self.leave:
            return None
        module = model.get_submodule(sharing[0])
        plain = type(module) is nn.Embedding and module.max_norm is None
        return module if plain and more_than_weights(module) is None else None

    def _pack(self, name: str, module: nn.Linear) -> PackedLinear:
        packed = PackedLinear([module.weight], [module.bias], instruction_set=self.instruction_set)
        x = _random_rows(packed, module.weight.dtype)
        with torch.inference_mode():
            worst = _apart(packed(x), linear(x, module.weight, module.bias))
        if not worst <= TOLERANCE[module.weight.dtype]:
            raise ModelError("linear_backend", name, f"its packed form differs from torch's by {worst:.1e}; use torch")
        return packed


def round_packed(model: Any, backend: str, why: str, quantization: str) -> tuple[str, str]:
    """Round every packed matrix to `int8` or `int4`, the output head to int8 either way. The backend's name and why.

    Each is checked against its own rounded weights. Raises `ConfigError` where nothing is packed.
    """
    matrices = list(packed_matrices(model))
    if not matrices:
        remedy = f"weights are rounded where they are packed, but linear layers run on {backend} ({why}); leave it out"
        raise ConfigError("quantization", quantization, remedy)
    head = getattr(model.get_output_embeddings(), "packed", None)
    for packed in matrices:
        packed.repack(torch.int4 if quantization == "int4" and packed is not head else torch.int8)
        x = _random_rows(packed, torch.float32)
        chosen = torch.linspace(0, packed.out_features - 1, CHECKED_OUTPUTS).to(torch.int64)
        with torch.inference_mode():
            bias = packed(torch.zeros_like(x[:1]))
            worst = _apart((packed(x) - bias)[:, chosen], linear(x, packed.rows(chosen, torch.float32)))
        if not worst <= ROUNDED_TOLERANCE:
            what = f"{packed.out_features} x {packed.in_features}"
            raise ModelError("quantization", what, f"its packed form is off by {worst:.1e}; leave quantization out")
    _give_back_memory()
    how = "; rows are rounded to eight bits too" if matrices[0].rounds_inputs else ""
    return f"{backend} {quantization}", f"{why}, rounded to {quantization}{how}"


def _random_rows(packed: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(packed.in_features)
    return torch.randn(CHECKED_ROWS, packed.in_features, generator=generator).to(dtype)


def _apart(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, relative to the largest output."""
    return float((found.float() - right.float()).abs().max() / right.float().abs().max().clamp_min(1e-6))


def usual_shape(model: Any) -> tuple[int, int]:
    """(outputs, inputs) of the largest linear layer besides the output head; (1, 1) where there is none."""
    head = model.get_output_embeddings()
    shapes = [tuple(m.weight.shape) for m in model.modules() if type(m) is nn.Linear and m is not head]
    outputs, inputs = max(shapes, key=lambda shape: shape[0] * shape[1], default=(1, 1))
    return int(outputs), int(inputs)


def kind_of(name: str) -> str:
    """A module's path with its numbers left out: the same for a tiny model and for the real one."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def packed_matrices(model: nn.Module) -> Iterator[PackedLinear]:
    """Every packed matrix that a module of the model holds as `packed`, once."""
    seen: set[int] = set()
    for module in model.modules():
        held = module.__dict__.get("packed", ())
        for one in held if isinstance(held, (list, tuple)) else (held,):
            if isinstance(one, PackedLinear) and id(one) not in seen:
                seen.add(id(one))
                yield one


def _holders(model: Any) -> dict[int, list[str]]:
    """Which modules hold each weight, by address."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter.data_ptr(), []).append(name)
    return holders


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module.eval())


def _give_back_memory() -> None:
    """What was let go lies in pieces between what stays; the C library is asked to return it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
