"""Finds a checkpoint on disk and checks all of its files before one weight is used.

Owns what a directory or file named as model may hold: config, weights in one file or in shards with an index,
or a GGUF file. The invariant of a `Checkpoint`: every file it names was opened, is whole to the byte, and
each tensor is in exactly one of them. Imports no torch; one file's own format is `weight_files`' subject.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.models.gguf_file import parts_of, refuse_missing_parts
from octavo.models.weight_files import (
    TensorEntry,
    model_error,
    open_for_reading,
    read_bytes,
    read_safetensors,
    refuse_intruder,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_JSON_LIMIT_BYTES = 64 << 20
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SAMPLE_BYTES = 1024

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")

# How configs spell what no decoder can do without; the first is the name shown.
_NEEDED = (
    ("hidden_size", "n_embd", "d_model", "dim"),
    (*_LAYERS, "layers_block_type", "hybrid_override_pattern"),
    ("vocab_size", "padded_vocab_size"),
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was found. `tensors` is empty for a GGUF file, whose table `gguf_file.read_gguf` reads."""

    kind: Literal["safetensors", "gguf"]
    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    notes: tuple[str, ...] = ()

    @property
    def weights_bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors.values())

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files in which the tensors lie, in order of their paths."""
        return tuple(sorted({entry.file for entry in self.tensors.values()}))


def local_path(model: Any) -> Path | None:
    """`model` as a path on this machine, or None if it can only be a hub id. Raises if it is neither."""
    if not isinstance(model, str) or not model.strip():
        raise ModelError("model", model, "name a directory, a hub id (owner/name) or a .gguf file")
    path = Path(model).expanduser()
    try:
        if path.exists() or path.is_symlink():
            return path
    except (OSError, ValueError) as error:
        raise ModelError("model", model, f"that path cannot be looked at ({error})") from None
    if _HUB_NAME.match(model) and not model.endswith((".gguf", ".safetensors", ".json", ".bin")):
        return None
    if hub_gguf(model) is not None:
        return None
    raise ModelError("model", model, "no such file or directory, and it is no hub id (owner/name) either")


def hub_gguf(model: str) -> tuple[str, str] | None:
    """`owner/name/path.gguf` as (hub id, file in it), or None."""
    pieces = model.split("/")
    if len(pieces) < 3 or not model.endswith(".gguf") or not _HUB_NAME.match("/".join(pieces[:2])):
        return None
    return "/".join(pieces[:2]), "/".join(pieces[2:])


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, every file of it checked. Raises `ModelError` on any damage."""
    if not path.is_dir():
        return _single_file(path)
    names = _listing(path)
    if CONFIG not in names:
        return _without_config(path, names)
    if "adapter_config.json" in names:  # Transformers would follow it to another model
        what = "it holds a model and an adapter (adapter_config.json) in one directory"
        raise model_error(path, what, "Remove the adapter's files, or merge it into the model and save the result")
    config = read_json(path / CONFIG)
    check_config(path / CONFIG, config)
    tensors, notes = _weights(path, names, config)
    _check_needed(path / CONFIG, config, tensors)
    check_layers(path / CONFIG, config, len(tensors))
    return Checkpoint("safetensors", path, config, tensors, notes)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file beside the weights."""
    with open_for_reading(path) as file:
        raw = read_bytes(path, file, _JSON_LIMIT_BYTES)
    refuse_intruder(path, raw[:512], len(raw))
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise model_error(path, f"{path.name} is not JSON ({error})", "Fetch it again") from None
    if not isinstance(told, dict):
        raise model_error(path, f"{path.name} is a JSON {type(told).__name__}, not an object", "Fetch it again")
    return told


def check_config(path: Path, config: dict[str, Any]) -> None:
    if not isinstance(config.get("model_type"), str):
        what = f"{path.name} does not say its model_type (found {config.get('model_type')!r})"
        raise model_error(path, what, "Fetch the model's own config.json")


def check_layers(path: Path, config: dict[str, Any], tensors: int, spellings: tuple[str, ...] = _LAYERS) -> None:
    """Every layer has tensors of its own. A damaged count would have a model built until memory ends."""
    for told in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in spellings:
            count = told.get(name)
            if isinstance(count, int | float) and count > tensors:
                what = f"{path.name} says {name}={count}, and there are {tensors} tensors in the weights"
                raise model_error(path, what, f"Correct {name}, or fetch the file again")


def fingerprint(checkpoint: Checkpoint) -> str:
    """Names what the weights are: config, and each tensor's name, type, shape and a kilobyte from its middle.

    Any two trainings of a model differ in it. It is no checksum: a few changed weights can escape it, so that what
    is kept on a disk is named by `weights_digest` too.
    """
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    by_file: dict[Path, list[TensorEntry]] = {}
    for name in sorted(checkpoint.tensors):
        entry = checkpoint.tensors[name]
        by_file.setdefault(entry.file, []).append(entry)
    for path in sorted(by_file):
        with open_for_reading(path) as file:
            for entry in by_file[path]:
                file.seek(entry.start_byte + max(0, entry.bytes - _SAMPLE_BYTES) // 2)
                digest.update(f"{entry.name} {entry.dtype} {entry.shape}".encode())
                digest.update(read_bytes(path, file, min(entry.bytes, _SAMPLE_BYTES)))
    return digest.hexdigest()


def _listing(path: Path) -> set[str]:
    try:
        return {entry.name for entry in path.iterdir()}
    except PermissionError:
        raise model_error(path, "no permission to list this directory", "Give this user access (chmod u+rx)") from None


def _single_file(path: Path) -> Checkpoint:
    with open_for_reading(path):
        pass
    if path.suffix == ".gguf":
        refuse_missing_parts(path)
        return Checkpoint("gguf", path, {}, {})
    if path.suffix == ".safetensors":
        if len(parts_of(path)) > 1:
            refuse_missing_parts(path)
        what = f"{path.name} is weights alone, without the config.json that says what they are"
        raise model_error(path, what, f"Name the directory that holds both ({path.parent})")
    if path.suffix in _PICKLES:
        raise _pickle_refusal(path, [path.name])
    raise model_error(path, f"{path.name} is a file, and neither a .gguf file nor a directory", "Name one of these")


def _without_config(path: Path, names: set[str]) -> Checkpoint:
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    models = sorted({parts_of(path / name)[0].name for name in ggufs})
    if len(models) == 1:
        return _single_file(path / ggufs[0])
    if models:
        raise model_error(path, f"it holds {len(models)} GGUF models: {', '.join(models[:8])}", "Name one of the files")
    if "adapter_config.json" in names:
        what = "it holds an adapter (adapter_config.json), not a model"
        raise model_error(path, what, "Merge the adapter into its base model and save the result")
    held = ", ".join(sorted(names)[:8]) or "nothing"
    raise model_error(path, f"there is no config.json in this directory (it holds {held})",
                      "Name the directory of a model saved by Transformers, or a .gguf file")  # fmt: skip


def _weights(path: Path, names: set[str], config: dict[str, Any]) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """All tensors by name, and notes on what was passed over."""
    chosen = config.get("transformers_weights") or (WEIGHTS if WEIGHTS in names else INDEX)
    if not isinstance(chosen, str) or Path(chosen).name != chosen:
        what = f"config.json says transformers_weights={chosen!r}, which is no file name in this directory"
        raise model_error(path / CONFIG, what, "Remove that line")
    if chosen not in names:
        raise _no_weights(path, names)
    if chosen.endswith(".index.json"):
        return _sharded(path, chosen, names)
    notes = (f"{INDEX} is not used, because {WEIGHTS} is there too",) if chosen == WEIGHTS and INDEX in names else ()
    return {entry.name: entry for entry in read_safetensors(path / chosen)}, notes


def _no_weights(path: Path, names: set[str]) -> ModelError:
    """Why a directory with a config has no weights that can be used."""
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    loose = sorted(name for name in names if name.endswith(".safetensors"))
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if loose:
        refuse_missing_parts(path / loose[0])
        if len(parts_of(path / loose[0])) > 1:
            what = f"all parts of the weights are here, but {INDEX} is missing"
            return model_error(path, what, f"Fetch {INDEX} as well")
        return model_error(path, f"there is no {WEIGHTS}, though there is {', '.join(loose[:8])}",
                           f"Rename the model's weights to {WEIGHTS}")  # fmt: skip
    if pickles:
        return _pickle_refusal(path, pickles)
    if ggufs:
        return model_error(path, f"its weights are GGUF files: {', '.join(ggufs[:8])}", "Name one of the files")
    return model_error(path, f"there are no weights: neither {WEIGHTS} nor {INDEX}", "Fetch the weights as well")


def _pickle_refusal(path: Path, names: list[str]) -> ModelError:
    what = f"its weights are PyTorch pickles ({', '.join(names[:4])}), which can run code when they are read"
    remedy = ("Convert them to safetensors where you trust them: AutoModelForCausalLM.from_pretrained(...)"
              ".save_pretrained(...)")  # fmt: skip
    return model_error(path, what, remedy)


def _sharded(path: Path, index: str, names: set[str]) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    placed = read_json(path / index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
        what = f"{index} has no weight_map from tensor names to file names"
        raise model_error(path / index, what, "Fetch it again")
    shards = sorted(set(placed.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise model_error(path / index, f"{index} names a file outside its directory: {outside[0]!r}", "Fetch it again")
    missing = [shard for shard in shards if shard not in names]
    if missing:
        what = f"{len(missing)} of {len(shards)} weight files that {index} lists are missing: {', '.join(missing[:8])}"
        raise model_error(path, what, "Fetch the missing files")
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for entry in read_safetensors(path / shard):
            other = tensors.setdefault(entry.name, entry)
            if other is not entry:
                what = f"tensor {entry.name!r} is in two files: {other.file.name} and {shard}"
                raise model_error(path, what, "Fetch the model again into an empty directory")
    for name, shard in placed.items():
        if name not in tensors or tensors[name].file.name != shard:
            where = f"{tensors[name].file.name} has it" if name in tensors else "no file has it"
            what = f"{index} says that tensor {name!r} is in {shard}, but {where}"
            raise model_error(path / index, what, f"Fetch {index} and the weights again, from one revision")
    unlisted = sorted(tensors.keys() - placed.keys())
    return tensors, (f"{index} does not list {len(unlisted)} tensors: {', '.join(unlisted[:4])}",) if unlisted else ()


def _check_needed(path: Path, config: dict[str, Any], tensors: dict[str, TensorEntry]) -> None:
    """Transformers would fill these in with the defaults of some other model."""
    if any(isinstance(value, dict) and "model_type" in value for value in config.values()):
        return  # a model made of models: each nested config has its own defaults
    for spellings in _NEEDED:
        if all(config.get(name) is None for name in spellings):
            found = [int(match[1]) for name in tensors if (match := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name))]
            hint = f" (the weights hold {max(found) + 1} layers)" if found and "layers" in spellings[0] else ""
            what = f"{path.name} does not say {spellings[0]}{hint}"
            raise model_error(path, what, "Fetch the model's own config.json")
