"""What the decoder layers of a model really do, watched once when it is loaded: `watch`.

Owns two small ragged steps of random tokens through the model as Transformers runs it, over pages of their own,
and what each layer was given, gave back, stored and attended by. Whoever puts something in a layer's place
compares it with this. Pages are in the type of the keys, whatever the engine keeps.

    step 0    one token alone | 5 tokens | 11 tokens              three sequences begin
    step 1    a decode | a decode | 3 tokens                      they go on, turned by far positions

Invariant: the model is left as it was, but for the attention implementation that `Bridge` sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from octavo.kernels.cpu import NativeAttention
from octavo.kernels.interface import AttentionRule, AttentionStep, Pages
from octavo.memory.layout import BlockOrder, GroupLayout
from octavo.models.bridge import Bridge, PagedCache
from octavo.models.fused_parts import attention_of

BLOCK = 4
_CHUNKS = (((0, 0, 1), (1, 0, 5), (2, 0, 11)), ((2, 11, 1), (0, 1, 1), (1, 5, 3)))
"""Per step: (sequence, start, tokens), decodes first and the longest context first."""
_UNITS = 9
FAR = 64
"""Step 1 is turned as if it were this far before the end of the context."""


@dataclass(slots=True, eq=False)
class LayerSeen:
    """What one decoder layer did. Lists have one entry a step."""

    module: nn.Module
    called: list[str] = field(default_factory=list)
    """Its children in the order in which step 0 called them."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    keywords: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    """The layers for which it stored keys and values."""
    rules: list[AttentionRule] = field(default_factory=list)
    q_shape: tuple[int, ...] = ()
    plain: bool = True
    """Whether it was called with rows, and gave back one tensor like them."""

    def tables(self, step: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The cosines and sines that it was given."""
        pair = self.keywords[step].get("position_embeddings")
        whole = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(t, torch.Tensor) for t in pair)
        return pair if whole else None


@dataclass(frozen=True, slots=True, eq=False)
class RotaryCall:
    """One call of a module that makes cosines and sines."""

    module: nn.Module
    given: tuple[Any, ...]
    keywords: dict[str, Any]
    made: tuple[torch.Tensor, torch.Tensor]

    def again(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for other positions [1, n]."""

        def asked(value: Any) -> Any:
            whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
            return positions if whole else value

        keywords = {name: asked(value) for name, value in self.keywords.items()}
        with torch.inference_mode():
            cos, sin = self.module(*map(asked, self.given), **keywords)
        return cos, sin


@dataclass(slots=True, eq=False)
class Watched:
    """The layers, the steps, and the pages in which step after step is stored."""

    layers: list[LayerSeen]
    steps: list[AttentionStep]
    pages: dict[int, Pages]
    """By the number that attention gives its layer."""
    logits: list[torch.Tensor]
    token_ids: list[torch.Tensor]
    positions: list[torch.Tensor]
    rotary: list[RotaryCall]
    """Both steps' calls."""
    stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Keys and values of each layer in its pages, after both steps."""


class _Recorder:
    """Attention kernels that tell the layer in whose forward they are called."""

    def __init__(self, inner: NativeAttention) -> None:
        self._inner = inner
        self.name = inner.name
        self.block_order: BlockOrder = inner.block_order
        self.reads_whole_blocks = inner.reads_whole_blocks
        self.current: LayerSeen | None = None

    def write(self, k: torch.Tensor, v: torch.Tensor, pages: Pages, step: AttentionStep) -> None:
        self._inner.write(k, v, pages, step)

    def attend(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        pages: Pages,
        step: AttentionStep,
        rule: AttentionRule,
    ) -> torch.Tensor:
        if self.current is not None:
            self.current.rules.append(rule)
            self.current.q_shape = tuple(q.shape)
        return self._inner.attend(q, new, pages, step, rule)


_GROUP = GroupLayout("watched", (), BLOCK, (), 1, 1)
_ONE_GROUP = dict.fromkeys(range(4096), 0)


def watched_cache(backend: NativeAttention, pages: dict[int, Pages], step: AttentionStep) -> PagedCache:
    """A cache over the pages of what was watched."""
    return PagedCache(backend, pages, _ONE_GROUP, (step,), (_GROUP,))


class _WatchedCache(PagedCache):
    """Makes a layer's pages when it first stores something."""

    def __init__(self, recorder: _Recorder, pages: dict[int, Pages], step: AttentionStep) -> None:
        self._made = pages
        self._recorder = recorder
        super().__init__(recorder, pages, _ONE_GROUP, (step,), (_GROUP,))

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._recorder.current is not None:
            self._recorder.current.stored.append(layer_idx)
        if layer_idx not in self._made:
            k, v = (torch.zeros(_UNITS, t.shape[1], BLOCK, t.shape[3], dtype=t.dtype) for t in (key, value))
            self._made[layer_idx] = Pages(k, v, 1)
        return super().update(key, value, layer_idx, kwargs)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The list of layers that attend; None where there is none, or several."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module))
    found = [layers for layers in lists if all(attention_of(layer) is not None for layer in layers)]
    return found[0] if len(found) == 1 else None


def watch(model: PreTrainedModel, backend: NativeAttention, max_model_len: int, steps: int = 2) -> Watched:
    """Run the two steps, or the first alone. Raises whatever the model raises."""
    layers = decoder_layers(model)
    seen = [LayerSeen(layer) for layer in layers or ()]
    recorder = _Recorder(backend)
    bridge = Bridge(model)
    watched = Watched(seen, [_step(chunks) for chunks in _CHUNKS[:steps]], {}, [], [], [], [])
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    random = np.random.default_rng(11)
    with torch.inference_mode(), _listening(seen, recorder), _rope_kept(model, watched.rotary):
        for number, step in enumerate(watched.steps):
            tokens = int(step.offsets[-1])
            ids = torch.from_numpy(random.integers(min(3, vocabulary - 1), vocabulary, size=(1, tokens)))
            positions = np.concatenate([np.arange(a, b) for a, b in zip(step.starts, step.contexts, strict=True)])
            far = max(0, max_model_len - FAR) if number else 0
            place = torch.from_numpy(positions + far)[None]
            cache = _WatchedCache(recorder, watched.pages, step)
            watched.logits.append(bridge.logits(ids, place, torch.arange(tokens), cache))
            watched.token_ids.append(ids)
            watched.positions.append(place)
    watched.stored = {layer: (pages.k.clone(), pages.v.clone()) for layer, pages in watched.pages.items()}
    return watched


@contextmanager
def _rope_kept(model: PreTrainedModel, calls: list[RotaryCall]) -> Iterator[None]:
    """Rotary modules are listened to; those that change with the positions they see are as they were afterwards."""

    def called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> None:
        if isinstance(made, tuple) and len(made) == 2:
            calls.append(RotaryCall(module, args, kwargs, made))

    rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
    kept = [(dict(module._buffers), getattr(module, "max_seq_len_cached", None)) for module in rotary]
    handles = [module.register_forward_hook(called, with_kwargs=True) for module in rotary]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, (buffers, longest) in zip(rotary, kept, strict=True):
            module._buffers.update(buffers)
            if longest is not None:
                module.max_seq_len_cached = longest


@contextmanager
def _listening(seen: list[LayerSeen], recorder: _Recorder) -> Iterator[None]:
    handles = []
    for one in seen:
        handles += _listen(one, recorder)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _listen(seen: LayerSeen, recorder: _Recorder) -> list[Any]:
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder.current = seen
        given = args[0] if args else kwargs.get("hidden_states")
        seen.plain = seen.plain and isinstance(given, torch.Tensor)
        if isinstance(given, torch.Tensor):
            seen.inputs.append(given.clone())
        seen.keywords.append({name: value for name, value in kwargs.items() if name != "hidden_states"})

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        recorder.current = None
        seen.outputs.append(output)
        alike = isinstance(output, torch.Tensor) and bool(seen.inputs) and output.shape == seen.inputs[-1].shape
        seen.plain = seen.plain and alike

    def child(name: str) -> Any:
        def called(_: nn.Module, __: tuple[Any, ...]) -> None:
            if len(seen.outputs) == 0:
                seen.called.append(name)

        return called

    handles = [
        seen.module.register_forward_pre_hook(before, with_kwargs=True),
        seen.module.register_forward_hook(after),
    ]
    return handles + [part.register_forward_pre_hook(child(name)) for name, part in seen.module.named_children()]


def _step(chunks: tuple[tuple[int, int, int], ...]) -> AttentionStep:
    tables = np.full((3, 4), 0, np.int32)
    units = iter(np.random.default_rng(3).permutation(_UNITS).tolist())
    for row, tokens in ((2, 12), (1, 8), (0, 2)):
        for block in range(-(-tokens // BLOCK)):
            tables[row, block] = next(units)
    rows = np.array([row for row, _, _ in chunks], np.int64)
    starts = np.array([start for _, start, _ in chunks], np.int64)
    counts = np.array([count for _, _, count in chunks], np.int64)
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    token_rows = np.repeat(rows, counts)
    return AttentionStep(
        block_tokens=BLOCK,
        decodes=int((counts == 1).sum()),
        rows=rows,
        offsets=np.concatenate(([0], np.cumsum(counts))),
        starts=starts,
        contexts=starts + counts,
        tables=tables,
        write_blocks=torch.from_numpy(tables[token_rows, positions // BLOCK].astype(np.int64)),
        write_offsets=torch.from_numpy(positions % BLOCK),
    )
