"""Public capacity records as inputs of a plan: what a log said of the model, the engine and its options.

Owns the reading of loosely written fields (`"8 (16 in the first upload)"`, `"50 window(1024) x16 kv x256
+ 10 full x4 kv x512"`). A field that is missing stays missing: nothing is filled in from a model's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.planner.accelerators import devices_named
from octavo.planner.engines import Engine, engine_named

GIB = 2**30
RECURRENT_DTYPE = "float32"
"""What the published configs of such models name; records do not repeat it."""


@dataclass(frozen=True)
class Record:
    id: str
    engine: str
    version: str
    arch: Mapping[str, Any]
    inputs: Mapping[str, Any]
    observed: Mapping[str, Any]
    confidence: str
    model: str = ""
    """For the config that was published under this name, where a figure needs all of it; no rule reads it."""

    @property
    def rules(self) -> Engine:
        """The engine whose rules apply; whole blocks of what is needed for one that is not known."""
        name = self.engine.lower().replace("_", "-")
        for known in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "llama-cpp"):
            if known in name:
                version = "" if known.startswith("llama") else f" {self.version}"
                return engine_named(known + (version if re.search(r"\d", version) else ""))
        return engine_named("octavo")


class Insufficient(Exception):
    """A record does not say what a prediction needs."""


def read_records(path: Path) -> list[Record]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    names = ("id", "engine", "version", "arch", "inputs", "observed", "confidence")
    return [Record(*(row[name] for name in names), str(row.get("model", ""))) for row in rows]


def number(value: Any) -> float | None:
    """The number a field begins with; of a list nothing."""
    if isinstance(value, bool) or value is None or isinstance(value, (list, dict)):
        return None
    if isinstance(value, (int, float)):
        return float(value)
    match = re.match(r"~?\s*([\d.]+)\s*([kKmM]?)", str(value))
    return float(match.group(1)) * {"": 1, "k": 1e3, "m": 1e6}[match.group(2).lower()] if match else None


def rounding(value: Any) -> float:
    """Half a unit of the last place as the record writes it."""
    text = re.match(r"~?\s*([\d.]+)\s*([kKmM]?)", str(value))
    if text is None:
        return 0.0
    scale = {"": 1, "k": 1e3, "m": 1e6}[text.group(2).lower()]
    places = len(text.group(1).partition(".")[2])
    step = scale * 10.0**-places
    if str(value).startswith("~"):  # about: the last digit that is not 0 may be off by one
        digits = text.group(1).rstrip("0") or "0"
        return scale * 10.0 ** (len(text.group(1)) - len(digits))
    return step / 2 if places or scale > 1 else 0.0


def whole(record: Record, name: str) -> int | None:
    found = number(record.inputs.get(name))
    return None if found is None else int(found)


def kv_dtype(record: Record) -> str:
    for name in ("kv_dtype", "type_k"):
        value = record.inputs.get(name)
        if isinstance(value, str):
            return re.match(r"[A-Za-z0-9_]+", value).group(0).lower()
    if "f16_kv=false" in record.engine.lower():
        return "f32"
    return "auto"


def device_bytes(record: Record) -> int | None:
    """The memory that the record's text itself states in GiB or MiB."""
    match = re.search(r"\(([\d.]+)\s*(GiB|MiB)\)", str(record.inputs.get("gpu", "")))
    return round(float(match.group(1)) * (GIB if match.group(2) == "GiB" else 2**20)) if match else None


def growing_config_of(record: Record) -> dict[str, Any]:
    """The layers that keep every position alone, where a figure does not depend on the others."""
    arch = record.arch
    if not all(number(arch.get(name)) is not None for name in ("full", "kv_heads", "head_dim")):
        return config_of(record)
    return _plain(int(arch["full"]), int(arch["kv_heads"]), int(arch["head_dim"]))


def device_name(record: Record) -> str | None:
    """The record's accelerator, if it fits one row of the table, or several that have the same memory."""
    text = re.split(r"[,(]", str(record.inputs.get("gpu", "")))[0].strip()
    for name in (text, text.split(" ")[0]):
        try:
            rows = devices_named(name) if name else ()
        except ConfigError:
            continue
        if len({row.memory_bytes for row in rows}) == 1:
            return rows[0].name
    return None


def config_of(record: Record) -> dict[str, Any]:
    """A config with the fields that fix the state, from what the record says of the architecture."""
    widths = {"hidden_size": "hidden", "intermediate_size": "intermediate", "vocab_size": "vocab"}
    if "vocab" not in record.arch:
        return _state_of(record)
    return _state_of(record) | {ours: record.arch[theirs] for ours, theirs in widths.items()}


def indexed_config_of(record: Record) -> dict[str, Any]:
    """Attention with heads and an index of its own in every layer, as `indexer: heads x width` says it."""
    index = re.match(r"(\d+) x (\d+)", str(record.arch.get("indexer", "")))
    if index is None or "full" not in record.arch:
        raise Insufficient("the width of the index")
    layers = int(record.arch["full"])
    return growing_config_of(record) | {
        "index_head_dim": int(index[1]) * int(index[2]),
        "index_topk": 2048,
        "layer_types": ["indexed_attention"] * layers,
    }


def _state_of(record: Record) -> dict[str, Any]:
    arch = record.arch
    text = str(arch.get("attn", ""))
    if "compressed" in text:
        raise Insufficient("compressed attention whose sizes the record does not state")
    layers = number(arch.get("layers"))
    if "kv_lora" in arch or text.startswith("MLA"):
        return _latent(record, layers)
    if "mamba_heads" in arch:
        return _state_space(arch, text)
    if "lin_v_heads" in arch:
        return _gated_delta(record, layers)
    if re.search(r"gated-delta|linear|mamba|hybrid", text, re.IGNORECASE):
        raise Insufficient("the sizes of the recurrent layers")
    mixed = _mixed(arch, text)
    if mixed is not None:
        return mixed
    if layers is None and "full" in arch and "hd_swa" not in arch:
        layers = number(arch["full"])
    if layers is None:
        raise Insufficient("the model's geometry")
    if "hidden" in arch and "kv_heads" not in arch:
        return _plain(int(layers), 1, int(arch["hidden"]))
    kv_heads, head_dim = number(arch.get("kv_heads")), number(arch.get("head_dim"))
    if kv_heads is None or head_dim is None:
        raise Insufficient("heads and their width")
    return _plain(int(layers), int(kv_heads), int(head_dim))


def _plain(layers: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    heads = kv_heads * 8  # so that any usual number of ranks divides them; state does not depend on it
    return {"model_type": "", "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": heads * head_dim, **more}  # fmt: skip


def _latent(record: Record, layers: float | None) -> dict[str, Any]:
    arch, text = record.arch, str(record.arch.get("attn", ""))
    if layers is None or "decompressed" in text:
        raise Insufficient("layers and heads of latent attention")
    index = arch.get("index_head_dim") or (128 if "indexer" in text else None)
    lora, rope = arch.get("kv_lora", 512), arch.get("rope", 64)
    more = {"index_head_dim": index, "index_topk": 2048, "index_n_heads": 64} if index else {}
    return _plain(int(layers), 16, 128, kv_lora_rank=lora, qk_rope_head_dim=rope, **more)


def _state_space(arch: Mapping[str, Any], text: str) -> dict[str, Any]:
    counts = re.match(r"(\d+) attn \+ (\d+) mamba", text)
    if counts is None:
        raise Insufficient("how many layers attend")
    attend, recur = int(counts.group(1)), int(counts.group(2))
    kinds = ["attention"] * attend + ["mamba"] * recur
    return _plain(attend + recur, arch["kv_heads"], arch["head_dim"], layers_block_type=kinds,
                  mamba_num_heads=arch["mamba_heads"], mamba_head_dim=arch["mamba_hd"], ssm_state_size=arch["d_state"],
                  n_groups=arch["n_groups"], conv_kernel=arch["conv"],
                  mamba_ssm_cache_dtype=RECURRENT_DTYPE)  # fmt: skip


def _gated_delta(record: Record, layers: float | None) -> dict[str, Any]:
    arch = record.arch
    full, linear = number(arch.get("full")), number(arch.get("lin"))
    needed = ("lin_k_heads", "lin_v_heads", "lin_dim", "kv_heads", "head_dim", "conv")
    if full is None or any(name not in arch for name in needed):
        raise Insufficient("all sizes of the recurrent layers")
    total = int(layers if layers is not None else full + (linear or 0))
    kinds = ["full_attention"] * int(full) + ["linear_attention"] * (total - int(full))
    return _plain(total, arch["kv_heads"], arch["head_dim"], layer_types=kinds,
                  linear_num_key_heads=arch["lin_k_heads"],
                  linear_num_value_heads=arch["lin_v_heads"], linear_key_head_dim=arch["lin_dim"],
                  linear_value_head_dim=arch["lin_dim"], linear_conv_kernel_dim=arch["conv"],
                  mamba_ssm_dtype=RECURRENT_DTYPE)  # fmt: skip


def _mixed(arch: Mapping[str, Any], text: str) -> dict[str, Any] | None:
    """Window or chunk layers beside full ones, in any of the ways in which records describe them."""
    spelled = re.search(r"(\d+) window\s*(?:\((\d+)\))? x(\d+) kv x(\d+) \+ (\d+) full x(\d+) kv x(\d+)", text)
    if spelled:
        local, window, kv, width, full, kv_full, width_full = (int(group or 1024) for group in spelled.groups())
        return _two_sizes(full, local, window, (kv_full, width_full), (kv, width))
    if "hd_swa" in arch:
        full, local = int(arch["full"]), int(arch["swa"])
        large = (int(arch.get("kv_full", arch.get("kv_heads", 0))), int(arch["hd_full"]))
        small = (int(arch.get("kv_swa", arch.get("kv_heads", 0))), int(arch["hd_swa"]))
        return _two_sizes(full, local, int(arch["window"]), large, small)
    if "swa" in arch:
        raise Insufficient("heads and their width")
    if "window" in arch and "full_layers" in arch:
        full, total = int(arch["full_layers"]), int(arch["layers"])
        kinds = ["full_attention"] * full + ["sliding_attention"] * (total - full)
        return _plain(total, arch["kv_heads"], arch["head_dim"], layer_types=kinds, sliding_window=int(arch["window"]))
    chunk = re.search(r"chunked local \((\d+)\) on (\d+) of (\d+) layers", text)
    if chunk:
        size, part, whole_ = (int(group) for group in chunk.groups())
        total = int(arch["layers"])
        local = total * part // whole_
        kinds = ["full_attention"] * (total - local) + ["chunked_attention"] * local
        return _plain(total, arch["kv_heads"], arch["head_dim"], layer_types=kinds, attention_chunk_size=size)
    if re.search(r"window\(\d+\)\+", text):
        raise Insufficient("heads and widths of window and full layers")
    return None


def _two_sizes(full: int, local: int, window: int, large: tuple[int, int], small: tuple[int, int]) -> dict[str, Any]:
    kinds = ["full_attention"] * full + ["sliding_attention"] * local
    config = _plain(full + local, small[0], small[1], layer_types=kinds, sliding_window=window,
                    global_head_dim=large[1], attention_k_eq_v=True, num_global_key_value_heads=large[0])  # fmt: skip
    config["num_attention_heads"] = 8 * max(small[0], large[0])
    return config


def require(found: Any, what: str) -> Any:
    if found is None:
        raise Insufficient(what)
    return found
