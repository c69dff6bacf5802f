"""Bytes and parameters of a model's weights: by formula from its config, or exactly from its tensors.

The formulas are those of Transformers' classes, written down for every class by
`tools/make_weight_shapes.py`: each parameter as products of config fields. A model type without
such formulas is estimated by the general shape of a decoder, and says so. Weights of a vision or audio
part are not in a language model's formula; a checkpoint's own headers count them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from math import prod
from typing import Any, Protocol

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, Dtype, dtype_named
from octavo.geometry.feed_forward import EXPERTS, feed_forward_kinds
from octavo.geometry.fields import Fields, defaults_table
from octavo.geometry.from_config import geometry_from_config, language_model_of
from octavo.geometry.pattern import CHUNKED, FULL, SLIDING, layer_kinds
from octavo.geometry.quantisation import Quantisation, quantisation_of
from octavo.geometry.sizes import Sizes
from octavo.geometry.state import INDEX, Borrowed, LayerState, Stateless, parts_of
from octavo.geometry.weights_estimate import estimated_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a model weighs. `exact` is False where the figure is an estimate, and `basis` says by what."""

    total_parameters: int
    active_parameters: int
    """Of them, what one token passes: of routed experts only those that it is sent to."""
    total_bytes: int
    basis: str
    exact: bool = True
    replicated_bytes: int = 0
    """Of the bytes, what every tensor rank holds whole: norms, routers and other vectors."""
    by_type: tuple[tuple[str, int], ...] = ()
    """Bytes by element type, largest first."""

    def rank_bytes(self, tensor: int, pipeline: int = 1) -> int:
        """Bytes on one device of the heaviest rank: matrices divided, vectors whole, layers shared out evenly."""
        split = -(-(self.total_bytes - self.replicated_bytes) // (tensor * pipeline))
        return split + -(-self.replicated_bytes // pipeline)


class TensorEntry(Protocol):
    """One tensor as a checkpoint describes it."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter of a class: its name with the layer starred, the layers that have it, its shape."""

    name: str
    layers: tuple[int, ...] | None
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def times(self) -> int:
        return 1 if self.layers is None else len(self.layers)

    @property
    def routed(self) -> bool:
        return ".experts." in self.name and "shared" not in self.name

    @property
    def packable(self) -> bool:
        """Whether it is a matrix of a linear layer: what quantisation packs."""
        name = self.name
        if self.layers is None or len(self.shape) < 2 or min(self.shape[-2:]) < 2:
            return False
        kept = ("norm", "router", "embed", "conv", "bias", "mlp.gate.weight", "A_log", "lora_", "position")
        return not any(part in name for part in kept)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model by formula, and the type of those that are not quantised."""

    rows: tuple[Row, ...]
    share: tuple[int, int]
    """Experts that a token passes, of how many."""
    basis: str
    exact: bool
    model_type: str
    plain: Dtype

    @property
    def total(self) -> int:
        return sum(row.elements * row.times for row in self.rows)

    @property
    def active(self) -> int:
        routed = sum(row.elements * row.times for row in self.rows if row.routed)
        return self.total - routed + -(-routed * self.share[0] // self.share[1])

    def weighing(self, bytes_by_type: Mapping[str, int], replicated_bytes: int, packed: str) -> Weights:
        """What they weigh at these bytes. `packed` goes on after the type of what is plain: how the rest is kept."""
        return Weights(
            total_parameters=self.total,
            active_parameters=self.active,
            total_bytes=sum(bytes_by_type.values()),
            basis=f"{self.basis}, in {self.plain}{packed}",
            exact=self.exact,
            replicated_bytes=replicated_bytes,
            by_type=_largest_first(bytes_by_type),
        )


def parameters_of(config: Mapping[str, Any], dtype: Dtype | None = None) -> Parameters:
    """`dtype` overrides the config's own type; without either it is bf16."""
    raw, model_type, architecture = language_model_of(config)
    plain = dtype or _plain_dtype(config, raw)
    rows, share, basis, exact = _rows(config, raw, model_type, architecture)
    return Parameters(tuple(rows), share, basis, exact, model_type, plain)


def weights_from_config(config: Mapping[str, Any], *, dtype: Dtype | None = None) -> Weights:
    """Weights by formula. `dtype` overrides the type of what is not quantised; else the config's own, else bf16."""
    parameters = parameters_of(config, dtype)
    quantisation = quantisation_of(config)
    bytes_by_type: dict[str, int] = {}
    replicated = 0
    for row in parameters.rows:
        for name, count, size in _bytes_of(row, parameters.plain, quantisation):
            bytes_by_type[name] = bytes_by_type.get(name, 0) + count * size
            if len(row.shape) < 2:
                replicated += count * size
    packed = f", {quantisation.method} as its config says" if quantisation else ""
    return parameters.weighing(bytes_by_type, replicated, packed)


def padding_of_experts(config: Mapping[str, Any], packing: str, hidden_multiple: int, width_multiple: int) -> int:
    """Bytes that experts packed as `packing` grow by where a kernel takes sizes of such multiples only.

    The hidden size is rounded up to `hidden_multiple`, an expert's width to `width_multiple` (twice that where its
    gate and up matrices are one).
    """
    quantisation = quantisation_of(config)
    if quantisation is None:
        return 0
    raw, model_type, architecture = language_model_of(config)
    hidden = Fields(raw, model_type).required("hidden_size")
    more = 0
    for row in _rows(config, raw, model_type, architecture)[0]:
        if not row.routed or not row.packable or hidden not in row.shape[-2:]:
            continue
        width = row.shape[-2] if row.shape[-1] == hidden else row.shape[-1]
        multiple = 2 * width_multiple if "gate_up" in row.name else width_multiple
        padded = prod(row.shape[:-2]) * _rounded(hidden, hidden_multiple) * _rounded(width, multiple)
        for layer in row.layers or ():
            found = quantisation.packing_of(row.name.replace("*", str(layer), 1).removesuffix(".weight"))
            if found is not None and found.name == packing:
                more += found.bytes_for(padded) - found.bytes_for(row.elements)
    return more


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def weights_from_tensors(tensors: Iterable[TensorEntry], config: Mapping[str, Any] | None = None) -> Weights:
    """Weights exactly as the headers of a checkpoint's files describe them.

    Packed tensors count their stored elements. `config` serves to tell how many experts a token passes.
    """
    total = size = routed = replicated = 0
    by_type: dict[str, int] = {}
    for tensor in tensors:
        elements = prod(tensor.shape)
        total, size = total + elements, size + tensor.bytes
        by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.bytes
        if (".experts." in tensor.name and "shared" not in tensor.name) or "_exps." in tensor.name:
            routed += elements
        if len(tensor.shape) < 2:
            replicated += tensor.bytes
    share = (1, 1)
    if config is not None:
        raw, model_type, _ = language_model_of(config)
        share = _routed_share(Fields(raw, model_type))
    return Weights(
        total_parameters=total,
        active_parameters=total - routed + -(-routed * share[0] // share[1]),
        total_bytes=size,
        basis="the headers of the checkpoint's files",
        replicated_bytes=replicated,
        by_type=_largest_first(by_type),
    )


def _largest_first(bytes_by_type: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(bytes_by_type.items(), key=lambda item: (-item[1], item[0])))


def bytes_from_index(index: Mapping[str, Any]) -> int:
    """The total that a `model.safetensors.index.json` states."""
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ConfigError("metadata.total_size", size, "the index states no total; read the headers of its files")
    return size


def _plain_dtype(config: Mapping[str, Any], raw: Mapping[str, Any]) -> Dtype:
    for part in (raw, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str) and part[key] != "auto":
                return dtype_named(part[key], field=key)
    return BF16


def _bytes_of(row: Row, plain: Dtype, quantisation: Quantisation | None) -> list[tuple[str, int, int]]:
    """(type, layers, bytes of one) for every way in which the layers of a row are stored."""
    whole = plain.bytes_for((row.elements,))
    if quantisation is None or not row.packable:
        return [(plain.name, row.times, whole)]
    counts: dict[tuple[str, int], int] = {}
    for layer in row.layers or ():
        packing = quantisation.packing_of(row.name.replace("*", str(layer), 1).removesuffix(".weight"))
        key = (plain.name, whole) if packing is None else (packing.name, packing.bytes_for(row.elements))
        counts[key] = counts.get(key, 0) + 1
    return [(name, count, size) for (name, size), count in counts.items()]


def _routed_share(fields: Fields) -> tuple[int, int]:
    """Experts that a token passes, of how many."""
    count = next((fields.integer(name) for name in EXPERTS if isinstance(fields.get(name), int)), None)
    chosen = next((fields.integer(name) for name in ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_top_k")
                   if isinstance(fields.get(name), int) and fields.get(name)), None)  # fmt: skip
    return (chosen, count) if count and chosen and chosen <= count else (1, 1)


# -- the formulas of the classes ------------------------------------------------------------------


_NARROWED = ("routed_expert_hidden_size", "moe_latent_size")
"""Widths in which experts work, where it is not the hidden size."""


@cache
def shapes_table() -> dict[str, Any]:
    """The package's generated table: see `tools/make_weight_shapes.py`."""
    text = resources.files("octavo.geometry").joinpath("weight_shapes.json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def _rows(
    config: Mapping[str, Any], raw: Mapping[str, Any], model_type: str, architecture: str
) -> tuple[list[Row], tuple[int, int], str, bool]:
    """The parameters, how many of the experts a token passes, on what basis, and whether that is exact."""
    types = shapes_table()["types"]
    for name in (model_type, defaults_table()["architectures"].get(architecture, "")):
        entry = types.get(name)
        if entry is None:
            continue
        if any(raw.get(size) is not None and size not in entry["fields"] for size in _NARROWED):
            continue  # experts of another width than the class gives them
        sizes = Sizes(Fields(raw, model_type), entry, config)
        rows = rows_of_class(config, sizes, entry)
        if rows is not None:
            basis = f"the formula of {name}"
            if sizes.assumed:
                basis += f", whose defaults stand in for {', '.join(sizes.assumed)}"
            return rows, _routed_share(sizes.with_defaults()), basis, True
    fields = Fields(raw, model_type)
    rows = [Row(*row) for row in estimated_rows(config, raw, model_type)]
    basis = f"estimated: there is no formula for these layers of model_type {model_type!r}"
    return rows, _routed_share(fields), basis, False


def rows_of_class(config: Mapping[str, Any], sizes: Sizes, entry: Mapping[str, Any]) -> list[Row] | None:
    """The parameters of a class at this config's sizes; None where its layers are of a kind the formulas lack."""
    layers = _labelled(config, sizes)
    seen = set(entry["seen"])
    known = [_nearest(label, seen) for label in layers]
    if None in known:
        return None
    labels = [label for label in known if label is not None]
    params = _switched(entry, sizes)
    return [
        Row(name, _where(where, labels), tuple(sizes.dimension(text) for text in dims)) for name, where, dims in params
    ]


def _labelled(config: Mapping[str, Any], sizes: Sizes) -> list[str]:
    states = geometry_from_config(config, BF16).layers
    kinds = layer_kinds(sizes.fields)
    feed = feed_forward_kinds(sizes.with_defaults(), len(kinds))
    return [f"{kind}/{ffn}/{keeping(state)}" for kind, ffn, state in zip(kinds, feed, states, strict=True)]


def keeping(state: LayerState) -> str:
    """Whether a layer keeps its own state, besides an index of its own, or reads another's."""
    if isinstance(state, Borrowed):
        return "borrowed"
    names = [c.name for part in parts_of(state) if not isinstance(part, (Borrowed, Stateless)) for c in part.components]
    return "indexed" if any(name.startswith(INDEX) for name in names) else "own"


def _nearest(label: str, seen: set[str]) -> str | None:
    """A label of the formulas that a layer is like: windows and chunks have the weights of full attention."""
    kind, feed, kept = label.split("/")
    kinds = (kind, FULL, SLIDING, CHUNKED) if kind in (FULL, SLIDING, CHUNKED) else (kind,)
    for candidate in kinds:
        if f"{candidate}/{feed}/{kept}" in seen:
            return f"{candidate}/{feed}/{kept}"
    views = [set(view) for view in zip(*(entry.split("/") for entry in seen), strict=True)]
    for candidate in kinds:  # every part was seen, though not in one layer
        if candidate in views[0] and feed in views[1] and kept in views[2]:
            return f"{candidate}/{feed}/{kept}"
    return None


_VIEWS = ("mixer", "feed_forward", "keeping")
"""The parts of a label, in order."""


def _where(where: Mapping[str, Sequence[str]] | None, labels: Sequence[str]) -> tuple[int, ...] | None:
    """The layers that have a parameter: all, or those of which each part of the label that counts is listed."""
    if where is None:
        return None
    if not where:
        return tuple(range(len(labels)))
    chosen = [(_VIEWS.index(view), listed) for view, listed in where.items()]
    split = [label.split("/") for label in labels]
    return tuple(i for i, parts in enumerate(split) if all(parts[view] in listed for view, listed in chosen))


def _switched(entry: Mapping[str, Any], sizes: Sizes) -> list[Any]:
    """The parameters with every switch as the config has it."""
    params = list(entry["params"])
    for name, switch in entry.get("switches", {}).items():
        if sizes.switch(name) == switch["is"]:
            params = [row for row in params if row[0] not in switch["without"]] + list(switch["with"])
    return params
