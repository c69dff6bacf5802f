"""Constant state by slot: Transformers' own mixers, run chunk by chunk over the states that the arena keeps.

A model hands a mixer the whole packed row of a step. A mixer has one state a sequence, so it is run once for all
single tokens that go on (as a batch) and once for each longer chunk, with that chunk's states in place of the
model's cache; what it leaves there goes back to the slots. Mixers are known by what they ask of a cache, not by
their names. Owns the running and the cache object; the bytes are the arena's.

    packed row   d d d | p p p p p | q q          decodes: one batch of 3, states [3, ...]
                 -----   ---------   ---          p, q: alone, states [1, ...]; none where a sequence starts

Invariant: a convolution keeps the inputs that its next output needs (one column less than Transformers keeps) and
a recurrence its state; nothing else of a sequence reaches its next chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from octavo.errors import ModelError
from octavo.geometry.state import Component
from octavo.models.selective_scan import selective_scan

PROTOCOL = frozenset({"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"})
"""What a module asks of its cache when it keeps constant state."""
SCAN = "mamba_selective_scan"
"""The scan of Mamba 1 in Transformers, which goes on from no state."""
SLOTS = "slot_states"
"""The attribute under which a paged cache has the states of a step."""


def numbered_states(
    components: Sequence[Component],
) -> tuple[tuple[tuple[Component, ...], ...], tuple[tuple[Component, ...], ...]]:
    """The components of each convolution and of each recurrence, in the order in which a module numbers them.

    Mamba 2 convolves its inputs and what its groups share in one: two components, one state. Raises `ModelError`
    for a component that is neither: it belongs to a model that asks no cache for its state.
    """
    convolutions: list[tuple[Component, ...]] = []
    recurrences: list[tuple[Component, ...]] = []
    for component in components:
        if component.name == "conv_groups" and convolutions:
            convolutions[-1] = (*convolutions[-1], component)
        elif component.name.startswith("conv"):
            convolutions.append((component,))
        elif component.name.startswith("recurrent"):
            recurrences.append((component,))
        else:
            raise ModelError("model", component.name, "is constant state that no cache in Transformers holds")
    return tuple(convolutions), tuple(recurrences)


def convolution_shape(components: Sequence[Component]) -> tuple[int, int]:
    """[channels, columns] of a convolution that these components make up together."""
    columns = components[0].shape[-1]
    return sum(component.elements for component in components) // columns, columns


class StateWitness:
    """The part of a cache that keeps nothing but the shapes of constant state, as geometry names them."""

    def __init__(self) -> None:
        self.constant: dict[int, dict[str, tuple[int, ...]]] = {}
        """Layer -> its components per sequence."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        kernel = kwargs.get("conv_kernel_size")  # told where one column more is kept than is needed
        columns = conv_states.shape[-1] if kernel is None else kernel - 1
        self._see("conv", layer_idx, state_idx, (*conv_states.shape[1:-1], columns))
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._see("recurrent", layer_idx, state_idx, tuple(recurrent_states.shape[1:]))
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def _see(self, kind: str, layer: int, number: int, shape: tuple[int, ...]) -> None:
        self.constant.setdefault(layer, {})[kind if number == 0 else f"{kind}_{number}"] = shape


def comparable(components: Sequence[Component]) -> dict[str, tuple[int, ...]]:
    """Shapes of constant state by which a config and a model can be compared, however each divides its channels."""
    convolutions, recurrences = numbered_states(components)
    shapes: dict[str, tuple[int, ...]] = {}
    for number, parts in enumerate(convolutions):
        shapes[f"conv_{number}"] = convolution_shape(parts)
    for number, parts in enumerate(recurrences):
        shapes[f"recurrent_{number}"] = (sum(part.elements for part in parts),)
    return shapes


@dataclass(slots=True, eq=False)
class LayerSlots:
    """The states of one layer in the arena: views [slots, ...], in the order of the states that a module numbers."""

    convolutions: tuple[torch.Tensor, ...]
    """Each [slots, channels, columns]."""
    recurrences: tuple[torch.Tensor, ...]
    shapes: list[torch.Size] = field(init=False)
    """As the module shapes each recurrence, known once it has handed one over; the bytes are the same."""

    def __post_init__(self) -> None:
        self.shapes = [view.shape[1:] for view in self.recurrences]

    def view(self, kind: str, number: int) -> torch.Tensor:
        views = self.convolutions if kind == "conv" else self.recurrences
        if not 0 <= number < len(views):
            raise ModelError("model", f"{kind} state {number}", "a layer keeps a state that its geometry does not tell")
        return views[number]


@dataclass(frozen=True, slots=True, eq=False)
class StateStep:
    """Where the states of a step's chunks lie, in packed order."""

    decodes: int
    """The first chunks are single tokens of sequences that have a state."""
    offsets: tuple[int, ...]
    """Chunk i covers packed tokens offsets[i] .. offsets[i + 1] - 1."""
    starting: tuple[bool, ...]
    """Whether a chunk starts its sequence, and so has no state to go on from."""
    units: torch.Tensor
    """int64 [chunks], on the device."""

    @property
    def parts(self) -> list[_Part]:
        """What is run at once."""
        made = [_Part(0, self.decodes, self.units[: self.decodes], True, False)] if self.decodes else []
        for i in range(self.decodes, len(self.starting)):
            first, last = self.offsets[i], self.offsets[i + 1]
            made.append(_Part(first, last, self.units[i : i + 1], False, self.starting[i]))
        return made


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Packed tokens first .. last - 1: one token of each of many sequences, or a chunk of one."""

    first: int
    last: int
    units: torch.Tensor
    stacked: bool
    starts: bool

    def cut(self, row: torch.Tensor) -> torch.Tensor:
        """[1, tokens, ...] -> [sequences, tokens of each, ...]"""
        cut = row[:, self.first : self.last]
        return cut.transpose(0, 1) if self.stacked else cut


class SlotStates:
    """The states of a step: what a paged cache has under `slot_states`."""

    def __init__(self, layers: Mapping[int, LayerSlots], step: StateStep) -> None:
        self.parts = step.parts
        """What each mixer runs at once, one after the other."""
        self._layers = layers

    def layer(self, index: int) -> LayerSlots:
        found = self._layers.get(index)
        if found is None:
            raise ModelError("model", f"layer {index}", "it keeps constant state that its geometry does not tell")
        return found


class ChunkCache:
    """The cache that a mixer sees while it runs one part of a step. Its states are copies until `store`."""

    is_compileable = False

    def __init__(self, states: SlotStates, part: _Part) -> None:
        self._states = states
        self._part = part
        self._held: dict[tuple[str, int, int], torch.Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get("recurrent", layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """New inputs [sequences, channels, tokens]: those before them and they themselves, side by side."""
        before = self.get_conv_state(layer_idx, state_idx)
        inputs = conv_states if before is None else torch.cat([before.to(conv_states.dtype), conv_states], dim=-1)
        columns = self._states.layer(layer_idx).view("conv", state_idx).shape[-1]
        kept = inputs[..., max(0, inputs.shape[-1] - columns) :]
        self._held["conv", layer_idx, state_idx] = pad(kept, (columns - kept.shape[-1], 0))
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        layer = self._states.layer(layer_idx)
        layer.view("recurrent", state_idx)
        layer.shapes[state_idx] = recurrent_states.shape[1:]
        self._held["recurrent", layer_idx, state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return not self._part.starts

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def recurrence(self) -> torch.Tensor | None:
        """The one recurrence that the module has asked for; None where its sequence starts."""
        return next((held for (kind, _, _), held in self._held.items() if kind == "recurrent"), None)

    def store(self) -> None:
        """Put what the module has left back into the slots."""
        for (kind, layer, number), held in self._held.items():
            view = self._states.layer(layer).view(kind, number)
            view[self._part.units] = held.reshape(-1, *view.shape[1:]).to(view.dtype)

    def _get(self, kind: str, layer_idx: int, state_idx: int) -> torch.Tensor | None:
        if self._part.starts:
            return None
        key = (kind, layer_idx, state_idx)
        if key not in self._held:
            layer = self._states.layer(layer_idx)
            held = layer.view(kind, state_idx)[self._part.units]
            self._held[key] = held.reshape(-1, *layer.shapes[state_idx]) if kind == "recurrent" else held
        return self._held[key]


class MixerForward:
    """Stands in for a mixer's forward: part by part where the cache has slots, as it came where not."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        innermost = inspect.unwrap(type(module).forward)
        self._scanning = innermost if SCAN in innermost.__code__.co_names else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*args, *kwargs.values()) if hasattr(value, SLOTS)), None)
        if cache is None:
            return self._forward(*args, **kwargs)
        states: SlotStates | None = getattr(cache, SLOTS)
        if states is None:
            raise self._refused("keeps constant state that its geometry does not tell")
        outputs = []
        for part in states.parts:
            own = ChunkCache(states, part)
            outputs.append(self._run(own, part, cache, args, kwargs))
            own.store()
        return _packed(outputs)

    def _run(
        self, own: ChunkCache, part: _Part, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, ...] | torch.Tensor:
        tokens = next(v.shape[1] for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        args = tuple(own if value is cache else self._cut(value, part, tokens) for value in args)
        kwargs = {name: own if value is cache else self._cut(value, part, tokens) for name, value in kwargs.items()}
        forward = self._forward if self._scanning is None else _scanning_from(self._scanning, self._module, own)
        outputs = forward(*args, **kwargs)
        single = isinstance(outputs, torch.Tensor)
        packed = tuple(one.reshape(1, -1, *one.shape[2:]) for one in ((outputs,) if single else outputs))
        return packed[0] if single else packed

    def _cut(self, value: Any, part: _Part, tokens: int) -> Any:
        """What the part needs of an argument: its own tokens of a packed row, everything of anything else."""
        if isinstance(value, tuple):
            return tuple(self._cut(inner, part, tokens) for inner in value)
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        if value.shape[:2] != (1, tokens):
            raise self._refused(f"takes a tensor of shape {list(value.shape)} beside its {tokens} tokens")
        return part.cut(value)

    def _refused(self, why: str) -> ModelError:
        return ModelError("model", type(self._module).__name__, why)


def _packed(outputs: Sequence[Any]) -> Any:
    """The parts' outputs as one packed row again."""
    if isinstance(outputs[0], torch.Tensor):
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=1)
    return tuple(torch.cat(same, dim=1) for same in zip(*outputs, strict=True))


def _scanning_from(forward: FunctionType, module: nn.Module, cache: ChunkCache) -> Callable[..., Any]:
    """The module's own forward with a scan that goes on from the state in the cache.

    Transformers' mixers call the scan by its name in their file and hand it no state; so the name is bound anew,
    for this call alone. A mixer of several heads calls it once for each.
    """
    heads = iter(range(2**31))

    def scan(*args: Any, return_last_state: bool = False, **kwargs: Any) -> Any:
        head, state = next(heads), cache.recurrence()
        if state is not None and state.dim() == 4:  # [sequences, heads, channels, states]
            state = state[:, head]
        outputs, last = selective_scan(*args, initial_state=state, **kwargs)
        return (outputs, last) if return_last_state else outputs

    bound = FunctionType(
        forward.__code__,
        {**forward.__globals__, SCAN: scan},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    bound.__kwdefaults__ = forward.__kwdefaults__
    return bound.__get__(module)


def keeps_constant_state(module: nn.Module) -> bool:
    """Whether the module's class asks a cache for convolution or recurrent state."""
    return any(PROTOCOL & _names(inspect.unwrap(method)) for method in vars(type(module)).values() if callable(method))


def _names(method: Any) -> frozenset[str]:
    code: CodeType | None = getattr(method, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def run_by_slot(model: nn.Module) -> int:
    """Let every mixer of the model run by slots where its cache has them; returns how many there are."""
    mixers = [module for module in model.modules() if keeps_constant_state(module)]
    for module in mixers:
        if not isinstance(vars(module).get("forward"), MixerForward):
            module.forward = MixerForward(module)
    return len(mixers)
