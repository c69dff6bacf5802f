"""Each engine's way of charging a sequence: which groups, which pages, which window at full length.

Owns the rules that turn one device's geometry into a `Paging`. They depend on engine, version and
geometry alone. octavo's own: a group for each law, a window charged window - 1 + one step's chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import (
    INDEX,
    Borrowed,
    Chunked,
    Component,
    Compressed,
    Constant,
    Growing,
    Part,
    Stateless,
    Windowed,
    components_bytes,
)
from octavo.memory.slabs import slab_bytes_for
from octavo.planner.engines import Engine
from octavo.planner.paging import Law, PagedGroup, Paging
from octavo.planner.pools import CellPool, TokenPool

LATENT_BLOCK = 64
"""Positions of a block of latents in vLLM: its kernels take no smaller one."""
INDEXED_PAGE = 64
"""Tokens of a page in SGLang where an index chooses what is read; 1 otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargeLimits:
    """What the charge depends on besides geometry and engine. None: the engine's own."""

    block_tokens: int | None = None
    step_tokens: int
    max_num_seqs: int
    speculative_tokens: int = 0
    most_slab_bytes: int = 0
    """octavo's: how large the unit of several groups may become so that each wastes little of it."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one law and one size: what engines call a spec."""

    law: Law
    reach_tokens: int
    bytes_per_token: int
    """Per layer; of constant state the bytes of a sequence, of entries those of a run."""
    components: tuple[Component, ...]
    layers: int
    sink_tokens: int = 0
    run_tokens: int = 1
    once_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        return self.layers * self.bytes_per_token


AnyPaging = Paging | TokenPool | CellPool


def paging_for(engine: Engine, geometry: ModelGeometry, limits: ChargeLimits) -> AnyPaging:
    """How `engine` pages the state of one device's `geometry`, which is in the types it keeps."""
    kinds = _kinds(geometry)
    if not kinds:
        raise ConfigError("model", geometry.model_type, "keeps no state at all; there is nothing to plan")
    if engine.name == "vllm":
        return _vllm(engine, kinds, limits)
    if engine.name == "sglang":
        return _sglang(engine, kinds, limits)
    if engine.name == "trtllm":
        return _trtllm(kinds, limits)
    if engine.name == "llamacpp":
        return _llamacpp(kinds, limits)
    return _octavo(kinds, limits)


def _kinds(geometry: ModelGeometry) -> tuple[_Kind, ...]:
    counted = geometry.counted_parts.items()
    return tuple(_kind(part, layers) for part, layers in counted if not isinstance(part, (Borrowed, Stateless)))


def _kind(part: Part, layers: int) -> _Kind:
    if isinstance(part, Constant):
        return _Kind("constant", 0, part.bytes_per_sequence, part.components, layers)
    if isinstance(part, Compressed):
        # a waiting position and what is carried stay with the sequence: charged as if all of a run waited
        once = part.run_tokens * components_bytes(part.waiting) + components_bytes(part.carried)
        return _Kind("entries", 0, part.bytes_per_entry, part.components, layers, 0, part.run_tokens, once)
    if isinstance(part, Windowed):
        reach, sinks = part.window_tokens, part.sink_tokens
        return _Kind("window", reach, part.bytes_per_token, part.components, layers, sinks)
    if isinstance(part, Chunked):
        return _Kind("chunk", part.chunk_tokens, part.bytes_per_token, part.components, layers)
    if isinstance(part, Growing):
        return _Kind("growing", 0, part.bytes_per_token, part.components, layers)
    raise ConfigError("model", type(part).__name__, "is a kind of state without a way of paging")


def _full_length(kinds: Iterable[_Kind]) -> tuple[_Kind, ...]:
    """The same layers as if windows and chunks kept every position."""
    return tuple(
        _Kind("growing", 0, k.bytes_per_token, k.components, k.layers) if k.law in ("window", "chunk") else k
        for k in kinds
    )


# -- octavo ---------------------------------------------------------------------------------------


def _octavo(kinds: tuple[_Kind, ...], limits: ChargeLimits) -> Paging:
    """A group for each law; a unit is a slab, which holds whole blocks of one group at a time: see `memory.layout`."""
    tokens = limits.block_tokens or 16
    sinks = any(kind.sink_tokens for kind in kinds)
    kinds = tuple(replace(k, law="growing", reach_tokens=0, sink_tokens=0) if k.sink_tokens else k for k in kinds)
    laws: dict[tuple[Law, int, int], tuple[int, int]] = {}

    def add(key: tuple[Law, int, int], layers: int, size: int) -> None:
        before = laws.get(key, (0, 0))
        laws[key] = (before[0] + layers, before[1] + size)

    for kind in kinds:
        add((kind.law, kind.reach_tokens, kind.run_tokens), kind.layers, kind.all_bytes)
        if kind.once_bytes:
            add(("constant", 0, 1), kind.layers, kind.layers * kind.once_bytes)
    sizes = {key: size * (1 if key[0] == "constant" else tokens) for key, (_, size) in laws.items()}
    unit = slab_bytes_for(list(sizes.values()), limits.most_slab_bytes)
    groups = tuple(
        PagedGroup(
            name=_name(law, reach),
            law=law,
            layers=layers,
            block_bytes=sizes[law, reach, run],
            block_tokens=0 if law == "constant" else tokens * run,
            per_unit=unit // sizes[law, reach, run],
            reach_tokens=reach,
            run_tokens=run,
        )
        for (law, reach, run), (layers, _) in laws.items()
    )
    alone = len(groups) == 1 and groups[0].law == "growing"
    notes = ("windows with sinks are kept at full length: their first positions stay readable",) if sinks else ()
    return Paging(groups=groups, unit_bytes=unit, step_tokens=limits.step_tokens,
                  prints="blocks" if alone else "concurrency", notes=notes)  # fmt: skip


def _name(law: Law, reach: int) -> str:
    names = {"growing": "full", "constant": "state", "entries": "entries"}
    return names.get(law) or f"{law} {reach:,}"


# -- vLLM -----------------------------------------------------------------------------------------


def _vllm(engine: Engine, kinds: tuple[_Kind, ...], limits: ChargeLimits) -> Paging:
    notes: list[str] = []
    kinds, why = _vllm_windows(engine, kinds)
    if why:
        notes.append(why)
    attention = tuple(k for k in kinds if k.law != "constant")
    states = tuple(k for k in kinds if k.law == "constant")
    if any(k.law == "entries" for k in kinds):
        notes.append("vLLM's pages for compressed attention have no rule here: whole blocks of what is needed instead")
        own = _octavo(kinds, limits)
        return Paging(groups=own.groups, unit_bytes=own.unit_bytes, step_tokens=limits.step_tokens,
                      reserved_units=1, prints="concurrency", notes=tuple(notes))  # fmt: skip
    latent = any(k.components[0].name == "latent" for k in attention)
    tokens = limits.block_tokens or (LATENT_BLOCK if latent else 16)
    if not attention:
        return _vllm_states_alone(states, limits)
    if states:
        page = max(k.bytes_per_token + _more_columns(k, limits.speculative_tokens) for k in states)
        widest = max(k.bytes_per_token for k in attention)
        align = LATENT_BLOCK if latent else 16
        tokens = max(tokens, -(-page // (align * widest)) * align)
        pad = tokens * widest - page
        notes.append(
            f"attention blocks of {tokens:,} positions, so that a page holds a layer's recurrent state "
            f"({page:,} B, padded by {100 * pad / page:.2f}%)"
        )
    laws = sorted({(k.law, k.reach_tokens, k.sink_tokens) for k in attention})
    prints: str = "concurrency" if engine.since(0, 21) else "groups"
    if len(laws) == 1 and not states:
        law, reach, sinks = laws[0]
        group = PagedGroup(name=_name(law, reach), law=law, layers=sum(k.layers for k in kinds),
                           block_bytes=sum(k.all_bytes for k in kinds) * tokens, block_tokens=tokens,
                           reach_tokens=reach, sink_tokens=sinks, exact=False)  # fmt: skip
        return Paging(groups=(group,), unit_bytes=group.block_bytes, step_tokens=limits.step_tokens, reserved_units=1,
                      prints="concurrency" if law == "window" and engine.since(0, 21) else "blocks",
                      notes=tuple(notes))  # fmt: skip
    return _vllm_hybrid(engine, (*attention, *states), tokens, limits, prints, notes)


def _vllm_windows(engine: Engine, kinds: tuple[_Kind, ...]) -> tuple[tuple[_Kind, ...], str]:
    """Which versions keep windows and chunks at full length, and why."""
    limited = [k for k in kinds if k.law in ("window", "chunk")]
    if not limited:
        return kinds, ""
    growing = [k for k in kinds if k.law == "growing"]
    sizes = {k.bytes_per_token for k in (*limited, *growing)}
    if not engine.since(0, 9, 1):
        why = "this version has one kind of block for all layers"
    elif not engine.since(0, 12) and any(k.law == "chunk" for k in limited):
        why = "this version turns its hybrid manager off where layers attend in chunks"
    elif not engine.since(0, 21) and growing and len(sizes) > 1:
        why = "this version cannot page window and full layers of different size together"
    else:
        return kinds, ""
    return _full_length(kinds), f"windows and chunks are charged at full length: {why}"


def _vllm_states_alone(states: tuple[_Kind, ...], limits: ChargeLimits) -> Paging:
    size = sum(k.layers * (k.bytes_per_token + _more_columns(k, limits.speculative_tokens)) for k in states)
    group = PagedGroup(name="state", law="constant", layers=sum(k.layers for k in states), block_bytes=size,
                       block_tokens=0, extra_blocks=limits.speculative_tokens)  # fmt: skip
    return Paging(
        groups=(group,), unit_bytes=size, step_tokens=limits.step_tokens, reserved_units=1, prints="concurrency"
    )


def _more_columns(kind: _Kind, speculative: int) -> int:
    """Bytes of a convolution's inputs for the positions that are drafted ahead."""
    convolutions = [c for c in kind.components if c.name.startswith("conv")]
    return speculative * sum(c.dtype.bytes_for(c.shape[:1]) for c in convolutions)


def _vllm_hybrid(
    engine: Engine, kinds: tuple[_Kind, ...], tokens: int, limits: ChargeLimits, prints: str, notes: list[str]
) -> Paging:
    """Groups of equally many layers over pages of one size; a layer with a smaller page gets longer blocks."""
    page = max(k.bytes_per_token * tokens for k in kinds if k.law != "constant")
    counts = [k.layers for k in kinds]
    near = 1.5 if engine.since(0, 21) else 1.25
    size = max(counts) if max(counts) < min(counts) * near else min(counts)
    # a state that is being written stays beside the one before it where whole blocks are cached
    aligned = 1 if engine.since(0, 16) else 0
    groups: list[PagedGroup] = []
    for kind in kinds:
        positions = 0 if kind.law == "constant" else page // kind.bytes_per_token
        extra = limits.speculative_tokens + aligned if kind.law == "constant" else 0
        groups += [
            PagedGroup(name=_name(kind.law, kind.reach_tokens), law=kind.law, layers=size, block_bytes=page * size,
                       block_tokens=positions, reach_tokens=kind.reach_tokens, sink_tokens=kind.sink_tokens,
                       exact=False, extra_blocks=extra)
        ] * -(-kind.layers // size)  # fmt: skip
    notes.append(
        f"{len(groups)} groups of {size} layers over pages of {page:,} B a layer; a request takes a block of each"
    )
    return Paging(groups=tuple(groups), unit_bytes=page * size, step_tokens=limits.step_tokens, reserved_units=1,
                  prints="concurrency" if prints == "concurrency" else "groups", notes=tuple(notes))  # fmt: skip


# -- SGLang, TensorRT-LLM, llama.cpp --------------------------------------------------------------


def _sglang(engine: Engine, kinds: tuple[_Kind, ...], limits: ChargeLimits) -> TokenPool:
    growing = sum(k.all_bytes for k in kinds if k.law == "growing")
    limited = sum(k.all_bytes for k in kinds if k.law in ("window", "chunk"))
    entries = sum(-(-k.all_bytes // k.run_tokens) for k in kinds if k.law == "entries")
    fixed = sum(k.layers * (k.bytes_per_token if k.law == "constant" else k.once_bytes) for k in kinds)
    hybrid = bool(limited and growing and engine.since(0, 4, 9))
    indexed = any(c.name.startswith(INDEX) for k in kinds for c in k.components)
    windows = [k.reach_tokens for k in kinds if k.law in ("window", "chunk")]
    return TokenPool(
        reach_tokens=max(windows, default=0),
        step_tokens=limits.step_tokens,
        cell_bytes=growing + entries + (0 if hybrid else limited),
        window_cell_bytes=limited if hybrid else 0,
        state_bytes=fixed,
        page_tokens=limits.block_tokens or (INDEXED_PAGE if indexed else 1),
        max_num_seqs=limits.max_num_seqs,
    )


def _trtllm(kinds: tuple[_Kind, ...], limits: ChargeLimits) -> Paging:
    """One pool of blocks with every layer at full length, unless a request's window is set by hand."""
    tokens = limits.block_tokens or 32
    full = _full_length(kinds)
    size = sum(-(-k.all_bytes // k.run_tokens) for k in full if k.law != "constant")
    fixed = sum(k.layers * (k.bytes_per_token if k.law == "constant" else k.once_bytes) for k in full)
    if not size:
        state = PagedGroup(name="state", law="constant", layers=len(full), block_bytes=fixed, block_tokens=0)
        return Paging(groups=(state,), unit_bytes=fixed, step_tokens=limits.step_tokens, prints="concurrency")
    groups = [PagedGroup(name="full", law="growing", layers=sum(k.layers for k in full if k.law != "constant"),
                         block_bytes=size * tokens, block_tokens=tokens)]  # fmt: skip
    notes = ("windows are charged at full length: max_attention_window is not set",) if full != kinds else ()
    if fixed:
        blocks = -(-fixed // (size * tokens))
        layers = sum(k.layers for k in full if k.law == "constant")
        groups.append(PagedGroup(name="state", law="constant", layers=layers,
                                 block_bytes=size * tokens, block_tokens=0, extra_blocks=blocks - 1))  # fmt: skip
    return Paging(groups=tuple(groups), unit_bytes=size * tokens, step_tokens=limits.step_tokens,
                  prints="concurrency" if fixed else "blocks", notes=notes)  # fmt: skip


def _llamacpp(kinds: tuple[_Kind, ...], limits: ChargeLimits) -> CellPool:
    windows = {k.reach_tokens for k in kinds if k.law in ("window", "chunk")}
    return CellPool(
        cell_bytes=sum(-(-k.all_bytes // k.run_tokens) for k in kinds if k.law in ("growing", "entries")),
        window_cell_bytes=sum(k.all_bytes for k in kinds if k.law in ("window", "chunk")),
        window_tokens=max(windows, default=0),
        state_bytes=sum(k.layers * (k.bytes_per_token if k.law == "constant" else k.once_bytes) for k in kinds),
        sequences_at_once=limits.max_num_seqs,
        step_tokens=limits.step_tokens,
    )
