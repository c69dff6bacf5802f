"""What a checkpoint asks of generation: sampling defaults and the ids that end a text.

Sampling values come from `generation_config.json` whether or not it says `do_sample`, as vLLM takes them;
where it says `do_sample: false`, only `repetition_penalty` is taken, because the others do nothing there.
End ids are those of `generation_config.json`, or of `config.json` if it names none, and the tokenizer's own.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.models.weight_files import model_error, open_for_reading, read_bytes

FILE_NAME = "generation_config.json"
_LIMIT_BYTES = 1 << 20

# Name -> lowest and highest value that `SamplingParams` takes; integers only for top_k, where 0 and -1 mean "all".
_RANGES = {
    "temperature": (0.0, 1e4),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 1e4),
}
_MOST_IDS = 2**31


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """`sampling` holds only what the checkpoint states; `eos_token_ids` is sorted."""

    sampling: dict[str, float] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()


def read_generation_defaults(
    directory: Path, config: Mapping[str, Any], tokenizer_eos: int | None = None
) -> GenerationDefaults:
    """The defaults of the checkpoint in `directory`; without a generation_config.json, its config's end ids."""
    path = directory / FILE_NAME
    told = _read(path) if path.exists() or path.is_symlink() else {}
    sampling = {name: _number(path, name, told[name]) for name in _RANGES if told.get(name) is not None}
    if told.get("do_sample") is False:
        sampling = {name: value for name, value in sampling.items() if name == "repetition_penalty"}
    ends = _ids(path, told.get("eos_token_id")) or _ids(directory / "config.json", config_eos(config))
    if tokenizer_eos is not None:
        ends |= {tokenizer_eos}
    return GenerationDefaults(sampling, tuple(sorted(ends)))


def config_eos(config: Mapping[str, Any]) -> Any:
    """`eos_token_id` of a config, or of its nested text config."""
    nested = config.get("text_config")
    found = config.get("eos_token_id")
    return nested.get("eos_token_id") if found is None and isinstance(nested, Mapping) else found


def _read(path: Path) -> dict[str, Any]:
    with open_for_reading(path) as file:
        raw = read_bytes(path, file, _LIMIT_BYTES)
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        what = f"{FILE_NAME} is not JSON ({error})"
        raise model_error(path, what, "Fetch it again, or delete it to use no defaults") from None
    if not isinstance(told, dict):
        what = f"{FILE_NAME} is a JSON {type(told).__name__}, not an object"
        raise model_error(path, what, "Fetch it again, or delete it to use no defaults")
    return told


def _number(path: Path, name: str, value: Any) -> float:
    low, high = _RANGES[name]
    sound = type(value) in ((int,) if name == "top_k" else (int, float)) and low <= value <= high
    if not sound or (name in ("top_p", "repetition_penalty") and value == 0):
        what = f"{FILE_NAME} says {name}={value!r}, which is no {'whole ' if name == 'top_k' else ''}number in range"
        raise model_error(path, what, f"Correct {name} in it, or delete that line")
    return int(value) if name == "top_k" else float(value)


def _ids(path: Path, value: Any) -> set[int]:
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(one) is not int or not 0 <= one < _MOST_IDS for one in listed):
        what = f"{path.name} says eos_token_id={value!r}, which is neither a token id nor a list of them"
        raise model_error(path, what, "Correct eos_token_id in it")
    return set(listed)
