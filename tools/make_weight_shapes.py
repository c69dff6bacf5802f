"""Write `src/octavo/geometry/weight_shapes.json`: the parameters of every model class as formulas of its config.

Each class is built without memory at several sets of sizes whose products do not coincide; every
dimension of every parameter is then explained as a sum of products of config fields that holds at all
of them. Switches (a bias, tied embeddings, a rank that may be null) are turned one by one, and what
they add or take away is written down beside them. A class in which something stays unexplained is
left out, and planned by an estimate. Run it after a change of the Transformers pin.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields as fields_of
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from weight_probes import CANONICAL, NULLABLE, probes
from weight_solver import Solver, Unexplained

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.feed_forward import FIELDS, feed_forward_kinds
from octavo.geometry.fields import Fields, defaults_table
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.pattern import layer_kinds
from octavo.geometry.sizes import Sizes
from octavo.geometry.weights import keeping, rows_of_class

TARGET = Path(__file__).parents[1] / "src" / "octavo" / "geometry" / "weight_shapes.json"

IGNORED_FLAGS = ("use_cache", "output_", "return_dict", "is_decoder", "is_encoder", "torchscript", "use_mamba_kernels",
                 "add_cross", "norm_topk", "residual_in", "scale_", "prefix_lm")  # fmt: skip
EXPERT = re.compile(r"\.experts\.(\d+)\.")
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")

Shapes = dict[str, dict[int, tuple[int, ...]]]
"""Parameter name with its layer starred -> shape by layer; -1 for what is in no layer."""


def main() -> None:
    logging.disable(logging.WARNING)
    wanted = sys.argv[1:] or sorted(defaults_table()["types"])
    table = build_table(wanted, verbose=True)
    if sys.argv[1:]:
        return
    lines = [f"{json.dumps(name)}: {json.dumps(entry, separators=(',', ':'))}" for name, entry in table.items()]
    head = json.dumps(f"transformers {transformers.__version__}")
    TARGET.write_text(f'{{"made_from": {head}, "types": {{\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
    print(f"{TARGET}: {len(table)} types")


def build_table(types: Sequence[str], verbose: bool = False) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for model_type in types:
        if model_type in defaults_table()["not_decoders"]:
            continue
        try:
            table[model_type] = entry_of(model_type)
        except Unexplained as error:
            if verbose:
                print(f"left out {model_type}: {error}")
        except Exception as error:  # noqa: BLE001 - a class that cannot be built is left out as well
            if verbose:
                print(f"left out {model_type}: {type(error).__name__} {str(error)[:120]!r}")
    return table


def entry_of(model_type: str) -> dict[str, Any]:
    cls = CONFIG_MAPPING[model_type]
    try:
        entry = learned(cls, own_heads=True)
    except Exception:  # noqa: BLE001 - a class that takes no width of a head derives it
        entry = learned(cls, own_heads=False)
    require_right(cls, entry)
    return entry


def require_right(cls: type, entry: dict[str, Any]) -> None:
    """Raise unless the formulas give the parameters of the class at sizes that they were not learned from."""
    for options in ({"num_hidden_layers": 4}, {}):
        try:
            config = cls(**options)
            built = shapes_of(config)
        except Exception:  # noqa: BLE001 - not to be built at its own sizes
            continue
        raw = {**json.loads(json.dumps(config.to_dict(), default=str)), "model_type": config.model_type}
        total = sum(prod(shape) for by_layer in built.values() for shape in by_layer.values())
        try:
            rows = rows_of_class(raw, Sizes(Fields(raw, config.model_type), entry, raw), entry)
        except ConfigError:  # sizes of its own that contradict each other
            continue
        if rows is None or sum(row.elements * row.times for row in rows) != total:
            raise Unexplained("the formulas do not hold at the class's own sizes")
        return


def learned(cls: type, own_heads: bool) -> dict[str, Any]:
    """The formulas of one class, where it may be told the width of a head or derives it."""
    options, configs = probes(cls, own_heads)
    shapes = [shapes_of(config) for config in configs]
    solver = Solver([atoms_of(cls, config, chosen) for config, chosen in zip(configs, options, strict=True)])
    labels = [labels_of(config) for config in configs]
    entry: dict[str, Any] = {"params": explained(shapes, labels, solver)}
    switches = {}
    base = {(name, layer): shape for name, by_layer in shapes[0].items() for layer, shape in by_layer.items()}
    for name, value in turned(cls, configs[0], options[0]):
        found = switched(cls, options, (name, value), base)
        if found is not None:
            switches[name] = {"is": value, **found(solver)}
    seen = {*labels[0], *(label for switch in switches.values() for label in switch.pop("seen"))}
    entry["seen"] = sorted(seen)
    if switches:
        entry["switches"] = switches
    if synonyms := {old: new for old, new in (getattr(cls, "attribute_map", None) or {}).items() if old != new}:
        entry["synonyms"] = synonyms
    entry["fields"] = defaults_used(cls, entry)
    return entry


# -- building -------------------------------------------------------------------------------------


def shapes_of(config: Any) -> Shapes:
    found: Shapes = {}
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        except ValueError:  # a text part: its wrapper adds the head
            model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
            if not getattr(config, "tie_word_embeddings", False):
                found["lm_head.weight"] = {-1: (config.vocab_size, config.hidden_size)}
    experts: dict[tuple[str, int], int] = {}
    for name, parameter in model.named_parameters():
        match = LAYER.search(name)
        layer = int(match[1]) if match else -1
        starred = name if match is None else f"{name[: match.start(1)]}*{name[match.end(1) :]}"
        shape = tuple(parameter.shape)
        if EXPERT.search(starred):
            starred = EXPERT.sub(".experts.", starred)
            experts[starred, layer] = experts.get((starred, layer), 0) + 1
            shape = (experts[starred, layer], *shape)
        found.setdefault(starred, {})[layer] = shape
    return found


def labels_of(config: Any) -> list[str]:
    """What sets layers apart: the kind of attention, of feed-forward, and whether state is borrowed or indexed."""
    raw = {**json.loads(json.dumps(config.to_dict(), default=str)), "model_type": config.model_type}
    try:
        states = geometry_from_config(raw, BF16).layers
        fields = Fields(raw, config.model_type)
        kinds = layer_kinds(fields)
    except ConfigError as error:
        raise Unexplained(str(error)[:100]) from None
    feed = feed_forward_kinds(fields, len(kinds))
    return [f"{kind}/{ffn}/{keeping(state)}" for kind, ffn, state in zip(kinds, feed, states, strict=True)]


def attribute(config: Any, name: str) -> Any:
    """An attribute that may differ from layer to layer, as the config was given it."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - ambiguous: it was overridden for some layers
        return config.to_dict().get(name)


def atoms_of(cls: type, config: Any, chosen: dict[str, Any]) -> dict[str, int]:
    atoms: dict[str, int] = {}
    for f in fields_of(cls):
        value = attribute(config, f.name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 1 and "token_id" not in f.name:
            atoms[CANONICAL.get(f.name, f.name)] = value
    if "head_dim" not in atoms and "num_attention_heads" in atoms and "hidden_size" in atoms:
        atoms["head_dim"] = chosen.get("head_dim") or atoms["hidden_size"] // atoms["num_attention_heads"]
    if "kv_lora_rank" in atoms:
        atoms.pop("head_dim", None)  # another name of the rotary part there
    for name in ("global_head_dim", "num_global_key_value_heads", "swa_num_key_value_heads"):
        if name not in atoms and isinstance(chosen.get(name), int):
            atoms[name] = chosen[name]
    for name in ("mamba_head_dim", "mamba_d_head", "mamba_headdim"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            atoms["mamba_head_dim"] = value
    if "num_key_value_heads" not in atoms and "num_attention_heads" in atoms:
        atoms["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or atoms["num_attention_heads"]
    atoms.pop("num_experts_per_tok", None)
    return atoms


# -- explaining -----------------------------------------------------------------------------------


def explained(shapes: list[Shapes], labels: list[list[str]], solver: Solver) -> list[list[Any]]:
    """[name, which layers have it or null for none, dimensions] for every parameter."""
    if len({frozenset(found) for found in shapes}) > 1:
        raise Unexplained("parameters differ from size to size")
    rows: list[list[Any]] = []
    for name in shapes[0]:
        by_shape: dict[tuple[str, ...], list[int]] = {}
        for layer in shapes[0][name]:
            found = [probe[name].get(layer) for probe in shapes]
            if None in found:
                raise Unexplained(f"{name} is not in the same layers of every size")
            dims = tuple(solver.dimension(values) for values in zip(*found, strict=True))  # type: ignore[arg-type]
            by_shape.setdefault(dims, []).append(layer)
        for dims, layers in by_shape.items():
            rows.append([name, None if layers == [-1] else labels_where(layers, labels[0], name), list(dims)])
    return rows


def labels_where(layers: list[int], labels: list[str], name: str) -> dict[str, list[str]]:
    """What the layers with a parameter have in common and the others do not: nothing, one of three things, or all."""
    if max(layers) >= len(labels):
        raise Unexplained(f"{name} is in more layers than keep state")
    if len(layers) == len(labels):
        return {}
    split = [label.split("/") for label in labels]
    views = {
        "feed_forward": [parts[1] for parts in split],
        "mixer": [parts[0] for parts in split],
        "keeping": [parts[2] for parts in split],
    }
    for chosen in (*((view,) for view in views), *combinations(views, 2), tuple(views)):
        there = {view: {views[view][layer] for layer in layers} for view in chosen}
        alike = [i for i in range(len(labels)) if all(views[view][i] in there[view] for view in chosen)]
        if alike == sorted(layers):
            return {view: sorted(values) for view, values in there.items()}
    raise Unexplained(f"nothing here tells the layers with {name} apart")


# -- switches -------------------------------------------------------------------------------------


def turned(cls: type, config: Any, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every switch of a class and the value that it does not have by itself."""
    for f in fields_of(cls):
        value = attribute(config, f.name)
        if isinstance(value, bool) and not f.name.startswith(IGNORED_FLAGS):
            yield f.name, not value
        elif f.name in NULLABLE and options.get(f.name) is not None:
            yield f.name, None
        elif f.name == "hidden_size_per_layer_input" and options.get(f.name):
            yield f.name, 0


def switched(cls: type, options: list[dict[str, Any]], turn: tuple[str, Any], base: Any) -> Any:
    """What a switch adds and takes away, as a function of the solver; None where it does neither."""
    try:
        configs = [cls(**{**chosen, turn[0]: turn[1]}) for chosen in options]
        shapes = [shapes_of(config) for config in configs]
        labels = [labels_of(config) for config in configs]
    except Exception:  # noqa: BLE001 - a value that the class refuses
        return None
    now = {(name, layer): shape for name, by_layer in shapes[0].items() for layer, shape in by_layer.items()}
    if now == base:
        return None
    changed = {key[0] for key in now.keys() ^ base.keys()} | {
        k[0] for k in now.keys() & base.keys() if now[k] != base[k]
    }

    def found(solver: Solver) -> dict[str, Any]:
        added = [{name: found for name, found in probe.items() if name in changed} for probe in shapes]
        return {"without": sorted(changed), "with": explained(added, labels, solver), "seen": sorted(set(labels[0]))}

    return found


def defaults_used(cls: type, entry: dict[str, Any]) -> dict[str, Any]:
    """The class's defaults of every field that the formulas name, and of what tells layers apart."""
    text = json.dumps(entry)
    used: dict[str, Any] = {}
    for f in fields_of(cls):
        name = CANONICAL.get(f.name, f.name)
        value = f.default if isinstance(f.default, (int, bool, str, list)) else None
        if f.name in NULLABLE:
            used[f.name] = value
        if (
            name in FIELDS
            or f.name.startswith("block_")
            or f.name in entry.get("switches", {})
            or re.search(rf"\b{name}\b", text)
        ):
            used.update({f.name: value} if value is not None else {})
    if "first_k_dense_replace" not in used and (dense := leading_dense(cls)):
        used["first_k_dense_replace"] = dense
    return used


def leading_dense(cls: type) -> int:
    """Layers without experts with which the class begins when its file says nothing."""
    try:
        kinds = list(cls(num_hidden_layers=8).mlp_layer_types)
    except Exception:  # noqa: BLE001 - most classes have no such list
        return 0
    count = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    return count if 0 < count < len(kinds) and "dense" not in kinds[count:] else 0


if __name__ == "__main__":
    main()
