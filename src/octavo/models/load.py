"""Loads a model to serve: finds and checks its files, builds it through Transformers, gives back one value.

Owns the order of events: find, check, compare config and tensors, load, account, and read what goes with the
weights. Whether the loaded model is served exactly is not this module's question. The invariant of a
`LoadedModel`: each parameter came from the files exactly once, or is tied to one that did, or `notes` says why not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from octavo.errors import ConfigError, ModelError
from octavo.models import hub
from octavo.models.accounting import account_for_weights, blank_model, check_shapes, refuse_missing_head
from octavo.models.embedded import NAME as EMBEDDED_NAME
from octavo.models.embedded import embedded_checkpoint
from octavo.models.files import Checkpoint, find_checkpoint, fingerprint, local_path
from octavo.models.generation_defaults import GenerationDefaults, read_generation_defaults
from octavo.models.gguf import (
    check_gguf,
    end_ids,
    gguf_checkpoint,
    load_gguf_config,
    load_gguf_model,
    load_gguf_tokenizer,
)
from octavo.models.linear import packed_matrices
from octavo.models.mapped import leave_files
from octavo.models.quiet import quiet_transformers
from octavo.models.shapes_alone import shapes_alone
from octavo.models.tokenizer import load_tokenizer
from octavo.models.weight_files import model_error

Progress = Callable[[str, float], None]

WEIGHT_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}
_TENSOR_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be served. `config_json` is the raw config, from which geometry is read."""

    name: str
    path: Path
    model: Any
    config: Any
    config_json: dict[str, Any]
    tokenizer: Any | None
    generation: GenerationDefaults
    fingerprint: str
    """Of config and a sample of each tensor: see `weights_digest` for what outlives this process."""
    weight_files: tuple[Path, ...]
    dtype: torch.dtype
    weights_bytes: int
    max_model_len: int | None
    notes: tuple[str, ...] = ()


class LoadOptions(TypedDict, total=False):
    """How to load; all optional. The names are those vLLM's users know."""

    revision: str | None
    dtype: str | torch.dtype
    device: str | torch.device
    max_model_len: int | None
    tokenizer: str | None
    skip_tokenizer_init: bool
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options with their defaults."""

    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "cpu"
    max_model_len: int | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False

    def checked(self) -> _Asked:
        """The same with device and dtype as torch's. Raises `ConfigError` for what cannot be."""
        if self.trust_remote_code:
            raise ConfigError("trust_remote_code", True, "code that comes with a model is never run; leave it False")
        length = self.max_model_len
        if length is not None and (type(length) is not int or length < 1):
            raise ConfigError("max_model_len", length, "give a whole number of tokens, at least 1")
        return replace(self, device=_device_named(self.device), dtype=_dtype_named(self.dtype))

    def dtype_or(self, own: Callable[[], torch.dtype]) -> torch.dtype:
        return own() if isinstance(self.dtype, str) else self.dtype

    @property
    def place(self) -> torch.device:
        return torch.device(self.device)


def load_checkpoint(
    model: str | None = None,
    *,
    progress: Progress | None = None,
    embedded_whole: Callable[[], bool] | None = None,
    **options: Unpack[LoadOptions],
) -> LoadedModel:
    """Load `model`: a directory, a hub id (at `revision`), a .gguf file, or None for the default model.

    `progress(stage, fraction)` is told what happens. `embedded_whole` answers whether the default model lies whole in
    the cache, where somebody has begun to look already. Raises `ModelError` for anything wrong with the files, and
    `ConfigError` for anything wrong with the other arguments.
    """
    asked = _Asked(**options).checked()
    tell = progress or (lambda stage, fraction: None)
    path = embedded_checkpoint(progress, embedded_whole) if model is None else _located(model, asked.revision, tell)
    tell("checking files", 0.35)
    checkpoint = find_checkpoint(path)
    try:
        load = _load_gguf if checkpoint.kind == "gguf" else _load_safetensors
        loaded = load(checkpoint, asked, tell)
    finally:
        gc.collect()  # what the loader let go of must not count as used when memory is measured next
        if asked.place.type == "cuda":
            torch.cuda.empty_cache()
    tell("loaded", 1.0)
    return replace(loaded, name=EMBEDDED_NAME if model is None else model)


def _located(model: str, revision: str | None, tell: Progress) -> Path:
    path = local_path(model)
    if path is None:
        tell(f"fetching {model}", 0.0)
        return hub.fetch(model, revision)
    if revision is not None:
        raise ConfigError(
            "revision", revision, f"{model} is on this machine, where there are no revisions; leave it out"
        )
    return path


def _dtype_named(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto":
        return "auto"
    found = WEIGHT_DTYPES.get(str(dtype).removeprefix("torch.").lower())
    if found is None:
        raise ConfigError("dtype", str(dtype), f"weights are held as one of: auto, {', '.join(WEIGHT_DTYPES)}")
    return found


def _device_named(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("device", str(device), "use cpu, cuda or cuda:N") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", str(device), "torch sees no CUDA device here; use cpu")
    return found


def _load_safetensors(checkpoint: Checkpoint, asked: _Asked, tell: Progress) -> LoadedModel:
    config = _read_config(checkpoint)
    limit = _context_length(config, asked.max_model_len)
    tokenizer = _tokenizer(checkpoint, asked)
    generation = read_generation_defaults(checkpoint.path, checkpoint.config, getattr(tokenizer, "eos_token_id", None))
    blank = blank_model(checkpoint, config)
    check_shapes(checkpoint, config, blank)
    refuse_missing_head(checkpoint, blank)
    dtype = asked.dtype_or(lambda: _own_dtype(checkpoint, asked.place))
    tell(f"loading {checkpoint.weights_bytes / 1e6:.0f} MB of weights", 0.4)
    model, info = _from_pretrained(checkpoint, config, dtype, asked.place)
    notes = account_for_weights(checkpoint, model, info)
    if asked.place.type == "cpu":
        leave_files(model)
    return LoadedModel(
        name="",
        path=checkpoint.path,
        model=model.eval().requires_grad_(False),
        config=model.config,
        config_json=checkpoint.config,
        tokenizer=tokenizer,
        generation=generation,
        fingerprint=fingerprint(checkpoint),
        weight_files=checkpoint.weight_files,
        dtype=dtype,
        weights_bytes=held_bytes(model),
        max_model_len=limit,
        notes=checkpoint.notes + notes,
    )


def _load_gguf(checkpoint: Checkpoint, asked: _Asked, tell: Progress) -> LoadedModel:
    header = check_gguf(checkpoint.path)
    path = header.path
    checkpoint = gguf_checkpoint(header)
    config = load_gguf_config(path)
    limit = _context_length(config, asked.max_model_len)
    own = not asked.skip_tokenizer_init and asked.tokenizer is None
    tokenizer = load_gguf_tokenizer(path, header) if own else _tokenizer(checkpoint, asked)
    own_end = getattr(tokenizer, "eos_token_id", None)
    ends = end_ids(header) | (set() if own_end is None else {int(own_end)})
    dtype = asked.dtype_or(lambda: _TENSOR_DTYPES.get(_common_type(checkpoint)) or _device_dtype(asked.place))
    tell(f"unpacking {header.weights_bytes / 1e6:.0f} MB of weights", 0.4)
    model = load_gguf_model(path, header, config, dtype, asked.place)
    return LoadedModel(
        name="",
        path=path,
        model=model.requires_grad_(False),
        config=model.config,
        config_json=config.to_dict(),
        tokenizer=tokenizer,
        generation=GenerationDefaults({}, tuple(sorted(ends))),
        fingerprint=fingerprint(checkpoint),
        weight_files=checkpoint.weight_files,
        dtype=dtype,
        weights_bytes=held_bytes(model),
        max_model_len=limit,
        notes=(f"weights of {path.name} are unpacked from {_common_type(checkpoint)} to {dtype}",),
    )


def held_bytes(model: Any) -> int:
    """Bytes of all parameters, buffers and packed matrices, a tied one counted once."""
    held = (_on_this_rank(tensor) for tensor in (*model.parameters(), *model.buffers()))
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in held}
    return sum(kept.values()) + sum(packed.nbytes for packed in packed_matrices(model))


def _on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """What lies here of a shard, which has no address of its own."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


def _tokenizer(checkpoint: Checkpoint, asked: _Asked) -> Any | None:
    if asked.skip_tokenizer_init:
        return None
    if asked.tokenizer is None:
        return load_tokenizer(checkpoint.path)
    return load_tokenizer(local_path(asked.tokenizer) or hub.fetch_tokenizer(asked.tokenizer))


def _read_config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    with quiet_transformers():
        try:
            return AutoConfig.from_pretrained(str(checkpoint.path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # config classes raise whatever their checks raise
            own = " and its own code is never run" if "auto_map" in checkpoint.config else ""
            what = (
                f"Transformers cannot use config.json, of model_type {checkpoint.config['model_type']!r}{own}: {error}"
            )
            raise model_error(
                checkpoint.path, what, "Use a model that Transformers knows, or correct that field"
            ) from error


def _context_length(config: Any, asked: int | None) -> int | None:
    """Positions that may be used: what was asked, or the model's own limit."""
    text = config.get_text_config(decoder=True)
    limit = next((value for name in _LENGTHS if type(value := getattr(text, name, None)) is int and value > 0), None)
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError("max_model_len", asked, f"this model was made for {limit} positions; ask for at most that")
    return asked or limit


def _own_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype: its config's, or that of most of its weights; for unpacked GGUF, the device's."""
    nested = [value for value in checkpoint.config.values() if isinstance(value, dict) and "model_type" in value]
    for config in (checkpoint.config, *nested):
        told = config.get("dtype") or config.get("torch_dtype")
        if (checkpoint.path / "octavo.json").is_file():
            break  # float32 there only holds what was unpacked
        if isinstance(told, str) and told.removeprefix("torch.") in WEIGHT_DTYPES:
            return WEIGHT_DTYPES[told.removeprefix("torch.")]
    else:
        return _TENSOR_DTYPES.get(_common_type(checkpoint)) or _device_dtype(device)
    return _device_dtype(device)


def _common_type(checkpoint: Checkpoint) -> str:
    """The element type that takes most bytes."""
    held: dict[str, int] = {}
    for name in sorted(checkpoint.tensors):
        entry = checkpoint.tensors[name]
        held[entry.dtype] = held.get(entry.dtype, 0) + entry.bytes
    return max(held, key=lambda kind: held[kind])


def _device_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _from_pretrained(
    checkpoint: Checkpoint, config: Any, dtype: torch.dtype, device: torch.device
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), shapes_alone() if device.type == "cpu" else nullcontext():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                str(checkpoint.path),
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that all are reported, as an error of ours
                device_map=None if device.type == "cpu" else {"": device},
            )
        except torch.OutOfMemoryError as error:
            remedy = f"its weights do not fit on {device}: {error}. Use a smaller model or dtype"
            raise ModelError("model", str(checkpoint.path), remedy) from error
        except Exception as error:  # quantisers and model classes raise their own kinds
            quantised = checkpoint.config.get("quantization_config")
            method = quantised.get("quant_method") if isinstance(quantised, dict) else None
            what = f"Transformers cannot load it{f' (quantised by {method})' if method else ''}: {error}"
            remedy = "Install what that names, or use an unquantised checkpoint" if method else "Use another checkpoint"
            raise model_error(checkpoint.path, what, remedy) from error
    return model, info
