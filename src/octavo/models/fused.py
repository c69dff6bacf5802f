"""The pass that puts native programs in the place of decoder layers: `fuse`.

Owns the trial of every layer against Transformers' own forward, on real weights and a ragged batch: of the ways
in which its parts could be wired the first that agrees takes its place, and its weights are let go of once they
are packed. What is not recognised, or does not agree, is left alone and told.

Invariant: a fused layer's forward gives what the layer gave, to rounding, over whatever pages the cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from octavo.errors import ConfigError, ModelError
from octavo.kernels.cpu import NativeAttention
from octavo.memory.layout import GroupLayout
from octavo.models.bridge import Bridge, PagedCache, require_kept
from octavo.models.fused_layer import FusedLayer, Packed, Wiring, candidates, pack, take_over
from octavo.models.fused_parts import LayerParts, NotRecognised, read_layer
from octavo.models.fused_run import FusedRun, LayerPrograms
from octavo.models.fused_stack import Stack, difference, read_stack
from octavo.models.fused_watch import LayerSeen, Watched, watch, watched_cache
from octavo.models.plain import more_inside

FUSED = "octavo_fused"
"""The attribute of a model under which its fused layers are kept."""
MOST_TRIED = 16384
"""Positions up to which the tables of the whole are made only to try it."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Of what a layer adds to its rows, the share that may differ; rounding gives about a tenth of it."""

_ALL_LAYERS = 10
"""Times that share may logits differ after all layers: a mistake is off by the whole."""


class KnownDiffers(Exception):
    """A model is not what is known of it. Its weights may be packed by now: load it again."""


@dataclass(slots=True, eq=False)
class Fusion:
    """What became of a model's layers."""

    layers: dict[int, FusedLayer] = field(default_factory=dict)
    """By their place in the decoder."""
    count: int = 0
    reasons: dict[int, str] = field(default_factory=dict)
    """Why a layer was left alone."""
    why: str | None = None
    """Why none was tried, where that is so."""
    stack: Stack | None = None
    """What surrounds the layers, where that is recognised too."""
    outside: str | None = None
    """Why it is not."""

    def __str__(self) -> str:
        if self.why is not None:
            return f"layers run as in Transformers: {self.why}"
        told = f"{len(self.layers)} of {self.count} layers run as native programs, checked against Transformers' own"
        if self.outside is not None:
            told += f"; what surrounds them runs as in Transformers: {self.outside}"
        by_reason: dict[str, list[int]] = {}
        for layer, reason in self.reasons.items():
            by_reason.setdefault(reason, []).append(layer)
        for reason, layers in by_reason.items():
            told += f"; {_span(layers)} not: {reason}"
        return told


def _span(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]} to {layers[-1]}" if len(layers) > 3 else f"layers {', '.join(map(str, layers))}"


def fuse(
    model: PreTrainedModel,
    backend: NativeAttention,
    max_model_len: int,
    known: Sequence[Wiring] | None = None,
) -> Fusion:
    """Put programs in the place of the layers that are recognised. The model keeps them under `FUSED`.

    `known`: the wiring of each layer, where the same model has been tried before by the same code. Layers are not
    tried again then, but the whole is, over one step. Raises `KnownDiffers` where that does not hold.
    """
    if getattr(model, FUSED, None) is not None:
        raise ModelError("model", type(model).__name__, "its layers have been fused before")
    try:
        watched = watch(model, backend, max_model_len, steps=2 if known is None else 1)
    except Exception as error:  # noqa: BLE001 - models raise what they like when something is not as they expect
        return Fusion(why=f"they could not be watched ({type(error).__name__}: {error})"[:200])
    fusion = Fusion(count=len(watched.layers))
    if not watched.layers:
        fusion.why = "no single list of decoder layers was found"
        return fusion
    tables = _Tables(watched)
    if known is not None and len(known) != len(watched.layers):
        raise KnownDiffers(f"{len(watched.layers)} layers are not {len(known)}")
    likely: Wiring | None = None
    for number, seen in enumerate(watched.layers):
        try:
            likely = likely if known is None else known[number]
            made = _fused(seen, watched, backend, tables, likely, tried=known is not None)
        except Exception as why:  # noqa: BLE001 - the layer has not been touched, and runs as it always did
            fusion.reasons[number] = _reason(why)
            continue
        likely = made.wiring
        fusion.layers[number] = made
        take_over(seen.module, made.parts, made.packed)
        seen.module.forward = _forward(number)
    if fusion.layers:
        setattr(model, FUSED, fusion)
    if len(fusion.layers) == fusion.count:
        try:
            fusion.stack = (_stack if known is None else _known_stack)(model, fusion.layers, watched, backend, tables)
        except KnownDiffers:
            raise
        except Exception as why:  # noqa: BLE001 - Transformers' forward still runs around the layers
            fusion.outside = _reason(why)
    if known is not None and fusion.stack is None:
        raise KnownDiffers(str(fusion))
    return fusion


def _reason(why: Exception) -> str:
    return str(why) if isinstance(why, NotRecognised) else f"it could not be read ({type(why).__name__}: {why})"[:200]


def _stack(
    model: PreTrainedModel,
    layers: dict[int, FusedLayer],
    watched: Watched,
    backend: NativeAttention,
    tables: _Tables,
) -> Stack:
    """What surrounds the layers, checked against Transformers' forward over the same fused layers."""
    stack = read_stack(model, watched, tables.cosines())
    programs = LayerPrograms(layers, backend, watched.pages, {layer.kv_layer: 0 for layer in layers.values()}, stack)
    bridge = Bridge(model)
    found, right = [], []
    with torch.inference_mode():
        for number, step in enumerate(watched.steps):
            positions = watched.positions[number]
            if number and int(positions.max()) > MOST_TRIED:
                continue
            keep = torch.arange(positions.shape[1]).flip(0)
            given = watched.token_ids[number]
            found.append(programs.logits(given, positions, keep, (step,)).clone())
            ends = torch.from_numpy(step.offsets[1:] - 1)
            few = ends[:-1] if number else ends[-1:]  # the last layer goes on with these alone
            found.append(programs.logits(given, positions, few, (step,)).clone())
            cache = watched_cache(backend, watched.pages, step)
            cache.layers = programs.begin((step,), positions.shape[1])
            right.append(bridge.logits(given, positions, keep, cache))
            right.append(right[-1].flip(0)[few])
    for table in stack.tables.values():
        table.forget()
    apart = difference(found, right)
    if not apart <= _TOLERANCE[layers[0].dtype]:
        raise NotRecognised(f"its logits differ by {apart:.1g}")
    return stack


def _known_stack(
    model: PreTrainedModel,
    layers: dict[int, FusedLayer],
    watched: Watched,
    backend: NativeAttention,
    tables: _Tables,
) -> Stack:
    """What surrounds layers of known wirings, the whole compared with what Transformers gave for the first step."""
    stack = read_stack(model, watched, tables.cosines())
    programs = LayerPrograms(layers, backend, watched.pages, {layer.kv_layer: 0 for layer in layers.values()}, stack)
    step, positions = watched.steps[0], watched.positions[0]
    ends = torch.from_numpy(step.offsets[1:] - 1)
    with torch.inference_mode():
        found = programs.logits(watched.token_ids[0], positions, ends, (step,))
    apart = difference([found], [watched.logits[0].reshape(positions.shape[1], -1)[ends]])
    stored = max(_stored_apart(watched, layer.kv_layer) for layer in layers.values())
    for table in stack.tables.values():
        table.forget()
    if not max(apart, stored) <= _ALL_LAYERS * _TOLERANCE[layers[0].dtype]:
        raise KnownDiffers(f"its logits differ by {apart:.1g} from Transformers' own, what is stored by {stored:.1g}")
    return stack


def _stored_apart(watched: Watched, layer: int) -> float:
    """How far the keys and values in a layer's pages are from those that were seen, as a share of each vector."""
    worst = 0.0
    pages = watched.pages[layer]
    for found, right in zip((pages.k, pages.v), watched.stored[layer], strict=True):
        apart = torch.linalg.vector_norm(found.float() - right.float(), dim=-1)
        share = float((apart / torch.linalg.vector_norm(right.float(), dim=-1).clamp_min(1e-6)).amax())
        worst = max(worst, share) if math.isfinite(share) else float("inf")
    return worst


class _Tables:
    """Which layers are given the same cosines and sines."""

    def cosines(self) -> dict[int, torch.Tensor]:
        return dict(enumerate(self._seen))

    def __init__(self, watched: Watched) -> None:
        self._seen: list[torch.Tensor] = []
        self._watched = watched

    def number(self, seen: LayerSeen) -> int:
        pair = seen.tables(0)
        if pair is None:
            return 0
        for number, known in enumerate(self._seen):
            if known is pair[0]:
                return number
        self._seen.append(pair[0])
        return len(self._seen) - 1


def _fused(
    seen: LayerSeen,
    watched: Watched,
    backend: NativeAttention,
    tables: _Tables,
    likely: Wiring | None,
    *,
    tried: bool = False,
) -> FusedLayer:
    """The layer in the first wiring that agrees, or in the likely one where it has been `tried` before.

    Raises `NotRecognised` where there is none.
    """
    steps = len(watched.steps)
    if not seen.plain or len(seen.inputs) != steps:
        raise NotRecognised("it is not called with rows and gives rows")
    if len(seen.rules) != steps or len(seen.stored) != steps or len(set(seen.stored)) != 1:
        raise NotRecognised("it does not store and attend once a step")
    pages = watched.pages[seen.stored[0]]
    heads = (seen.q_shape[1], int(pages.k.shape[1]), int(pages.k.shape[3]))
    dtype = seen.inputs[0].dtype
    if dtype not in _TOLERANCE or pages.k.dtype is not dtype:
        raise NotRecognised(f"its rows are {dtype}")
    try:
        parts = read_layer(seen.module, seen.called, heads, int(seen.inputs[0].shape[-1]))
    except NotRecognised as why:  # what is put on a module hides what it is
        raise NotRecognised(more_inside(seen.module) or str(why)) from why
    if (more := more_inside(seen.module, but=parts.mlp_module if parts.mlp is None else None)) is not None:
        raise NotRecognised(more)
    tables_given = seen.tables(0)
    wirings = list(candidates(parts, heads[2], 0 if tables_given is None else int(tables_given[0].shape[-1])))
    if not wirings:
        raise NotRecognised(f"its parts are called in the order {parts.order}")
    if likely in wirings:
        wirings.insert(0, wirings.pop(wirings.index(likely)))
    try:
        packed = pack(parts)
    except ConfigError as why:
        raise NotRecognised(f"its matrices cannot be packed: {why}") from why
    if tried and wirings[0] == likely:
        return _layer(seen, parts, packed, wirings[0], tables)
    apart: list[float] = []
    for wiring in wirings:
        made = _layer(seen, parts, packed, wiring, tables)
        try:
            apart.append(_difference(made, seen, watched, backend))
        except ValueError:  # sizes that do not fit each other
            continue
        if apart[-1] <= _TOLERANCE[dtype]:
            return made
    raise NotRecognised(f"no wiring of its parts gives what it gives (off by {min(apart, default=1.0):.1g})")


def _layer(seen: LayerSeen, parts: LayerParts, packed: Packed, wiring: Wiring, tables: _Tables) -> FusedLayer:
    return FusedLayer(
        kv_layer=seen.stored[0],
        dtype=seen.inputs[0].dtype,
        parts=parts,
        packed=packed,
        wiring=wiring,
        rule=seen.rules[0],
        q_heads=seen.q_shape[1],
        table=tables.number(seen),
    )


def _difference(made: FusedLayer, seen: LayerSeen, watched: Watched, backend: NativeAttention) -> float:
    """How far the program is from the layer, as a share of what the layer adds and of the keys and values it stores.

    The worst of both steps. Keys tell how heads are turned, even where attention adds little.
    """
    programs = LayerPrograms({0: made}, backend, watched.pages, {made.kv_layer: 0})
    worst = 0.0
    for number, step in enumerate(watched.steps):
        given, right = seen.inputs[number], seen.outputs[number]
        run = programs.begin((step,), given.shape[1])
        out = run.layer(0, given, seen.tables(number)).float()
        added = torch.linalg.vector_norm(right.float() - given.float(), dim=-1)
        noise = torch.finfo(given.dtype).eps * torch.linalg.vector_norm(right.float(), dim=-1)
        apart = torch.linalg.vector_norm(out - right.float(), dim=-1)
        share = float(((apart - noise).clamp_min(0) / added.clamp_min(1e-30)).amax())
        worst = max(worst, share) if math.isfinite(share) else float("inf")
    return max(worst, _stored_apart(watched, made.kv_layer))


def _forward(number: int) -> Any:
    """The forward of a fused layer: what runs it comes with the cache."""

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        run = next((value.layers for value in (*args, *kwargs.values()) if isinstance(value, PagedCache)), None)
        if not isinstance(run, FusedRun):
            raise ModelError("model", "layers", "are fused for octavo's cache; load it again to run it otherwise")
        return run.layer(number, hidden_states, kwargs.get("position_embeddings"))

    return forward


def programs_of(
    model: nn.Module,
    backend: Any,
    pages: dict[int, Any],
    group_of: dict[int, int],
    groups: tuple[GroupLayout, ...],
) -> LayerPrograms | None:
    """The model's fused layers over these pages; None where it has none."""
    fusion: Fusion | None = getattr(model, FUSED, None)
    if fusion is None:
        return None
    if not isinstance(backend, NativeAttention):
        raise ModelError("model", type(model).__name__, f"its layers were fused for native kernels, not {backend.name}")
    for layer in fusion.layers.values():
        require_kept(layer.parts.attention.module, layer.rule, groups[group_of[layer.kv_layer]])
    return LayerPrograms(fusion.layers, backend, pages, group_of, fusion.stack)
