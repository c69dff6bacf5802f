"""Where a plan's geometry comes from: a config, a file, a directory, or numbers given by hand.

Reads local files and nothing else; what a hub id stands for is the caller's business. A file that is no
config is refused with what to give instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, Dtype, dtype_named
from octavo.geometry.from_config import language_model_config
from octavo.planner.asked import MANUAL, Asked

CONFIG = "config.json"
_RECURRENT_DTYPES = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
_LARGEST = 64 * 2**20
_OTHER_KINDS = {
    ".gguf": "a GGUF file, which has no config.json and is read by `octavo plan FILE`",
    ".safetensors": "a file of weights",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Source:
    """A model as a plan sees it: a name to print, its raw config, and its directory where there is one."""

    name: str
    config: Mapping[str, Any]
    directory: Path | None = None
    tensors: tuple[Tensor, ...] = ()
    """Of a file whose header was read already."""


Model = str | Path | Mapping[str, Any] | Source | None
"""What a plan may be asked for; None: by hand."""


def source_of(model: Model, asked: Asked) -> Source:
    """The config to plan for. Raises `ConfigError` with the remedy where there is none."""
    if model is None:
        if not asked.manual:
            raise ConfigError(
                "model", None, "name a config.json or a model's directory, or give --layers, --kv-heads and --head-dim"
            )
        return Source("by hand", _by_hand(asked))
    given = next((name for name in MANUAL if getattr(asked, name) is not None), None)
    if given is not None:
        raise ConfigError(
            given, getattr(asked, given), "belongs to the manual form; leave it out, or leave the model out"
        )
    if isinstance(model, Source):
        return model
    if isinstance(model, Mapping):
        return Source(str(model.get("_name_or_path") or model.get("model_type") or "config"), model)
    path = Path(model).expanduser()
    name = str(model)
    try:
        is_directory = path.is_dir()
        file = path / CONFIG if is_directory else path
        if not file.exists():
            what = f"has no {CONFIG}" if is_directory else "no such file or directory"
            raise ConfigError(
                "model", name, f"{what}; give a config.json, a model's directory, or --layers and its kin"
            )
        if file.suffix in _OTHER_KINDS:
            raise ConfigError(
                "model", name, f"is {_OTHER_KINDS[file.suffix]}; give the model's config.json or its directory"
            )
        if file.stat().st_size > _LARGEST:
            raise ConfigError("model", name, f"is {file.stat().st_size:,} bytes, which no config.json is")
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError("model", name, f"cannot be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError("model", name, f"is not JSON ({error}); give the model's config.json") from None
    return Source(_short(path, is_directory), _object(text, name), file.parent)


def _short(path: Path, is_directory: bool) -> str:
    folder = path if is_directory else path.parent
    name = folder.resolve().name if path.name == CONFIG or is_directory else path.stem
    return name.replace("__", "/") or str(path)


def _object(text: str, name: str) -> Mapping[str, Any]:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("model", name, f"is not JSON ({error}); give the model's config.json") from None
    if not isinstance(told, dict):
        raise ConfigError(
            "model", name, f"holds a JSON {type(told).__name__}, not an object; give the model's config.json"
        )
    return told


def _by_hand(asked: Asked) -> dict[str, Any]:
    """The smallest config that says what was given. Without --heads there are as few as the ranks need."""
    for name in ("layers", "kv_heads", "head_dim"):
        if getattr(asked, name) is None:
            raise ConfigError(name, None, "the manual form needs --layers, --kv-heads and --head-dim together")
    heads = asked.heads or (asked.kv_heads or 1) * asked.tp
    config: dict[str, Any] = {
        "model_type": "",
        "num_hidden_layers": asked.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": asked.kv_heads,
        "head_dim": asked.head_dim,
        "hidden_size": asked.hidden_size or heads * (asked.head_dim or 1),
    }
    if asked.window is not None:
        config["sliding_window"] = asked.window
    return config


def says_recurrent_dtype(config: Mapping[str, Any]) -> bool:
    """Whether the file names the element type of recurrent state."""
    raw = language_model_config(config)
    return any(isinstance(raw.get(name), str) for name in _RECURRENT_DTYPES)


def own_dtype(config: Mapping[str, Any]) -> tuple[Dtype, str]:
    """In what the model computes, and where that is said."""
    for part in (language_model_config(config), config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str) and part[key] != "auto":
                return dtype_named(part[key], field=key), f"the config's {key}"
    return BF16, "bf16, since the config names none"
