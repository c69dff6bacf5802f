"""Loads a GGUF file through Transformers, after `gguf_file` has found the file whole.

Weights are unpacked to plain tensors at load. What Transformers' reader would leave out without a word
(rope factors, a pre-tokenizer it does not know) is refused here, or set right where the rule is known.
The invariant: every tensor of the file went into the model, and every parameter came from the file.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.utils.quantization_config import GgufConfig

from octavo.errors import ModelError
from octavo.models.cache_directory import cache_directory
from octavo.models.files import Checkpoint, check_layers
from octavo.models.gguf_file import GgufHeader, parts_of, read_gguf, refuse_missing_parts
from octavo.models.gguf_parts import joined
from octavo.models.quiet import quiet_transformers
from octavo.models.weight_files import TensorEntry, model_error

# Tensors that change the positions' rotation, and that Transformers' reader drops.
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# How GGUF files name the byte-level pre-tokenizers that split as GPT-2 does, without and with single digits.
_PLAIN_BYTE_LEVEL = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")

_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

_CONVERT = "Use the original safetensors checkpoint instead"


def check_gguf(path: Path) -> GgufHeader:
    """The header of a whole GGUF that can be served exactly, a split one joined. Raises `ModelError` otherwise."""
    refuse_missing_parts(path)
    parts = parts_of(path)
    if len(parts) > 1:
        path = joined(parts, cache_directory())
    header = read_gguf(path)
    check_layers(path, header.metadata, len(header.tensors), (f"{header.architecture}.block_count",))
    for tensor in header.tensors:
        if tensor.name in _ROPE_FACTORS:
            what = f"{path.name} keeps its rope scaling in the tensor {tensor.name}, which Transformers does not read"
            raise model_error(path, what, _CONVERT)
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" and header.architecture not in ("gpt-oss", "gpt_oss"):
        what = f"{path.name} asks for rope scaling of type {scaling!r}, which Transformers does not read from GGUF"
        raise model_error(path, what, _CONVERT)
    return header


def gguf_checkpoint(header: GgufHeader) -> Checkpoint:
    """The header in the form in which all checkpoints are described."""
    config = {key: value for key, value in header.metadata.items() if not key.startswith("tokenizer.")}
    tensors = {
        tensor.name: TensorEntry(
            tensor.name, tensor.type_name, tensor.shape, header.path, tensor.start_byte, tensor.bytes
        )
        for tensor in header.tensors
    }
    return Checkpoint("gguf", header.path, config, tensors)


def end_ids(header: GgufHeader) -> set[int]:
    """The ids that the file says end a text."""
    found: set[int] = set()
    for name in _ENDS:
        value = header.metadata.get(name)
        if value is None or value in (-1, 2**32 - 1):  # how llama.cpp writes that there is none
            continue
        if type(value) is not int or not 0 <= value < 2**31:
            raise model_error(header.path, f"{header.path.name} says {name}={value!r}, which is no token id", _CONVERT)
        found.add(value)
    return found


def load_gguf_config(path: Path) -> Any:
    """The Transformers config that the file's metadata amount to."""
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(str(path.parent), gguf_file=str(path.absolute()), local_files_only=True)
        except Exception as error:  # a reader that fails on a file found whole: an architecture it lacks
            what = f"Transformers cannot build a config from {path.name} ({error})"
            raise model_error(path, what, _CONVERT) from error
    return config


def load_gguf_model(path: Path, header: GgufHeader, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with all weights unpacked to `dtype`, in eval mode on `device`."""
    with quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                str(path.parent),
                config=config,
                gguf_file=str(path.absolute()),
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                quantization_config=GgufConfig(gguf_file=str(path.absolute()), dequantize=True),
            )
        except Exception as error:
            what = f"Transformers cannot load {path.name} ({type(error).__name__}: {error})"
            raise model_error(path, what, _CONVERT) from error
    _check_all_used(path, header, model, info)
    return model.eval().to(device)


def _check_all_used(path: Path, header: GgufHeader, model: Any, info: dict[str, Any]) -> None:
    """Every parameter came from the file, and (counting elements) every tensor went into the model."""
    missing = sorted(info["missing_keys"])
    if missing:
        what = f"{path.name} lacks {len(missing)} weights of a {header.architecture} model: {', '.join(missing[:8])}"
        raise model_error(path, what, "Download a complete GGUF of this model")
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        what = f"{path.name} holds {name} as {list(found)}, and its metadata asks for {list(expected)}"
        raise model_error(path, what, "Download the file again, or convert the model again")
    held = sum(prod(tensor.shape) for tensor in header.tensors)
    loaded = sum(parameter.numel() for parameter in model.parameters())
    if held > loaded:
        builds = f"the {header.architecture} model that Transformers builds from it takes {loaded}"
        what = f"{path.name} holds {held} weights, and {builds}: {held - loaded} would be left out"
        raise model_error(path, what, _CONVERT)


def load_gguf_tokenizer(path: Path, header: GgufHeader) -> Any:
    """The tokenizer that the file's metadata describe, splitting text as the file asks."""
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise ModelError("tokenizer", str(path), f"{path.name} holds no tokenizer. Name one with tokenizer=, or pass "
                                                 "skip_tokenizer_init=True and prompts of token ids")  # fmt: skip
    with quiet_transformers():
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                str(path.parent), gguf_file=str(path.absolute()), local_files_only=True
            )
        except Exception as error:
            remedy = f"Transformers cannot build the tokenizer of {path.name} ({error}). Name one with tokenizer="
            raise ModelError("tokenizer", str(path), remedy) from error
    _set_splitting(path, header, tokenizer)
    return tokenizer


def _set_splitting(path: Path, header: GgufHeader, tokenizer: Any) -> None:
    """Byte-level vocabularies differ in how text is cut first; a rule not known here is refused, not guessed."""
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    rule = str(header.metadata.get("tokenizer.ggml.pre"))
    if rule in GGUF_PRE_TOKENIZER_SPLITS or rule in _PLAIN_BYTE_LEVEL:
        return
    if rule in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return
    raise ModelError("tokenizer", str(path), f"{path.name} splits text by the rule {rule!r}, which is not known, so "
                                             "its tokens could differ from the model's. Name a tokenizer directory "
                                             "or hub id with tokenizer=")  # fmt: skip
