"""What each lever would change: element type, head sharing, windows, admission, prefixes, a host tier.

One line each, in bytes of a sequence, sequences at once, and seconds where something moves. Each is the
same computation with one thing different; a host tier never adds to capacity or to the longest context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import pstdev

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP8
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Component, Growing, LayerState, Windowed
from octavo.planner.accelerators import Accelerator
from octavo.planner.asked import Asked
from octavo.planner.charging import AnyPaging, ChargeLimits, paging_for
from octavo.planner.engines import Engine
from octavo.planner.values import Lever
from octavo.planner.workload import Lengths

LINK_SHARE = 0.8
"""Of a link's theoretical rate that a transfer is taken to reach."""
RISK_DEVIATIONS = 2.33
"""One chance in a hundred of running out, for sums that are about normal."""
_HOST_BYTES = 64 * 2**30
_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Scene:
    """What a lever starts from."""

    engine: Engine
    geometry: ModelGeometry
    device: ModelGeometry
    paging: AnyPaging
    charge: ChargeLimits
    kv_bytes: int | None
    context: int
    lengths: Lengths | None

    def with_layers(self, layers: tuple[LayerState, ...]) -> tuple[int, int | None]:
        """(bytes of a sequence, sequences at once) on a device that kept these layers instead."""
        other = replace(self.device, layers=layers)
        return self._held(paging_for(self.engine, other, self.charge))

    def as_it_is(self) -> tuple[int, int | None]:
        return self._held(self.paging)

    def _held(self, paging: AnyPaging) -> tuple[int, int | None]:
        at_once = None if self.kv_bytes is None else paging.sequences(self.kv_bytes, self.context)
        return paging.bytes_for(self.context), at_once


def levers_of(scene: Scene, asked: Asked, accelerator: Accelerator | None) -> tuple[Lever, ...]:
    now, _ = scene.as_it_is()
    changes = (_heads(scene), _dtype(scene), _windows(scene), _unified(scene))
    changed = [lever for lever in changes if lever is not None]
    found = [lever for lever in changed if lever.sequence_bytes != now]
    return (*found, *_admission(scene), *_prefix(scene, asked), *_host(scene, asked, accelerator))


def _changed(name: str, what: str, held: tuple[int, int | None]) -> Lever:
    return Lever(name=name, says=what, sequence_bytes=held[0], sequences=held[1])


def _heads(scene: Scene) -> Lever | None:
    """Without sharing of key heads, or with it where there is none."""
    heads = scene.device.num_attention_heads
    kv_heads = {c.shape[0] for part in scene.device.parts for c in getattr(part, "components", ()) if c.name == "k"}
    if len(kv_heads) != 1 or heads < 2:
        return None
    have = kv_heads.pop()
    if have < heads:
        layers = _with_heads(scene.device.layers, heads)
        return _changed(
            "GQA", f"without it, {heads} key heads instead of {have} on a device", scene.with_layers(layers)
        )
    fewer = max(1, heads // 8)
    return _changed(
        "GQA",
        f"with {fewer} key heads instead of {have} on a device",
        scene.with_layers(_with_heads(scene.device.layers, fewer)),
    )


def _with_heads(layers: tuple[LayerState, ...], heads: int) -> tuple[LayerState, ...]:
    return tuple(
        replace(
            s,
            components=tuple(
                replace(c, shape=(heads, *c.shape[1:])) if c.name in ("k", "v") else c for c in s.components
            ),
        )
        if isinstance(s, (Growing, Windowed))
        else s
        for s in layers
    )


def _dtype(scene: Scene) -> Lever | None:
    other = BF16 if scene.device.kv_dtype.quantised else FP8
    other = other if scene.engine.name == "octavo" or other is BF16 else FP8.with_scales(0)
    kept = scene.device.kv_dtype

    def changed(component: Component) -> Component:
        return replace(component, dtype=other) if component.dtype.bits == kept.bits else component

    layers = tuple(
        replace(s, components=tuple(changed(c) for c in s.components)) if isinstance(s, (Growing, Windowed)) else s
        for s in scene.device.layers
    )
    return _changed("KV type", f"keys and values in {other.name} instead of {kept.name}", scene.with_layers(layers))


def _windows(scene: Scene) -> Lever | None:
    layers = scene.device.layers
    if any(isinstance(s, Windowed) for s in layers):
        full = tuple(Growing(s.components) if isinstance(s, Windowed) else s for s in layers)
        return _changed("windows", "with every window layer kept at full length", scene.with_layers(full))
    growing = [i for i, s in enumerate(layers) if isinstance(s, Growing) and s.components[0].name == "k"]
    if not growing or scene.context <= _WINDOW:
        return None
    local = set(growing) - set(growing[3::4])
    if not local or len(local) == len(growing):
        return None
    windowed = tuple(
        Windowed(s.components, _WINDOW) if i in local and isinstance(s, Growing) else s for i, s in enumerate(layers)
    )
    try:
        return _changed(
            "windows", f"were 3 of 4 layers trained with a window of {_WINDOW:,}", scene.with_layers(windowed)
        )
    except ConfigError:
        return None


def _unified(scene: Scene) -> Lever | None:
    """Every attention layer at full length in pages of the largest one's size."""
    layers = scene.device.layers
    kept = [s for s in layers if isinstance(s, (Growing, Windowed))]
    if len({s.bytes_per_token for s in kept}) < 2:
        return None
    largest = Growing(max(kept, key=lambda s: s.bytes_per_token).components)
    same = tuple(largest if isinstance(s, (Growing, Windowed)) else s for s in layers)
    return _changed("unified pages", "with every layer at full length in pages of the largest", scene.with_layers(same))


def _admission(scene: Scene) -> Iterator[Lever]:
    """Who is let in: by the declared maximum, by what they take on average, or by what they likely take."""
    if scene.kv_bytes is None:
        return
    context = scene.context
    assumed = "" if scene.lengths else " (lengths assumed even up to the context)"
    lengths = scene.lengths or Lengths("even", tuple(max(1, context * i // 64) for i in range(1, 65)), context)
    declared, mean = lengths.declared_max, max(1, round(lengths.mean))
    certain = scene.paging.sequences(scene.kv_bytes, declared)
    average = scene.paging.sequences(scene.kv_bytes, mean)
    yield Lever(
        name="guaranteed_no_evict", sequences=certain, says=f"admitted for {declared:,} tokens each, none ever paused"
    )
    says = f"admitted while they fit; {mean:,} tokens each on average{assumed}"
    yield Lever(name="max_utilization", sequences=average, says=says)
    if len(lengths.tokens) > 1:
        spread = pstdev(lengths.tokens)
        total = average * mean
        likely = next((n for n in range(average, 0, -1) if n * mean + RISK_DEVIATIONS * spread * n**0.5 <= total), 0)
        says = f"not served yet: one chance in a hundred that somebody is paused{assumed}"
        yield Lever(name="future_bounded", sequences=max(certain, likely), says=says)


def _prefix(scene: Scene, asked: Asked) -> Iterator[Lever]:
    """A beginning that all sequences share is kept once."""
    shared = asked.shared_prefix if asked.shared_prefix is not None else min(2048, scene.context // 4)
    shared -= shared % max(1, scene.paging.block_tokens)
    growing = scene.device.bytes_per_token_growing
    if not 0 < shared < scene.context or not growing:
        return
    saved = shared * growing
    each = scene.paging.bytes_for(scene.context) - saved
    at_once = None if scene.kv_bytes is None or each <= 0 else max(0, scene.kv_bytes - saved) // each
    yield Lever(
        name="prefix sharing",
        sequence_bytes=each,
        sequences=at_once,
        says=f"with the first {shared:,} tokens in common, kept once",
    )


def _host(scene: Scene, asked: Asked, accelerator: Accelerator | None) -> Iterator[Lever]:
    """Sequences parked in host memory instead of lost; what runs needs the device as before."""
    size = asked.host_memory_bytes if asked.host_memory_bytes is not None else _HOST_BYTES
    each = scene.paging.bytes_for(scene.context)
    if not size or not each:
        return
    seconds = None
    link = ""
    if accelerator is not None and accelerator.host_bytes_per_s:
        seconds = each / (accelerator.host_bytes_per_s * LINK_SHARE)
        link = f" over {accelerator.host_link} at {LINK_SHARE:.0%} of {accelerator.host_bytes_per_s / 1e9:g} GB/s"
    yield Lever(
        name="host tier",
        sequences=size // each,
        seconds=seconds,
        says=f"parked in {size / 2**30:g} GiB a device, promoted{link}; adds nothing to what runs or to the longest",
    )
