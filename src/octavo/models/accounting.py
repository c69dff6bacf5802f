"""Accounts for every weight: config against the tensors' shapes before loading, each parameter after it.

Owns the explanations: which config field a shape contradicts, which tensors may be left out and why, and the
four ways in which an output head and tied embeddings can meet. The invariant: a parameter that nothing in
the files filled is an error, never a random initialisation that serves.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from octavo.models.files import Checkpoint
from octavo.models.quiet import quiet_transformers
from octavo.models.shapes_alone import shapes_alone
from octavo.models.weight_files import TensorEntry, model_error, open_for_reading, read_bytes

# Tensors that older exporters saved and that are computed from the config now.
_COMPUTED = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias|\.attention\.rotary_emb\.\w+)$")
# Parts of larger models that generate no text.
_OTHER_PARTS = re.compile(r"(^|\.)(vision\w*|visual|multi_modal\w*|mm_\w+|audio\w*|image\w*|embed_vision|embed_audio"
                          r"|mtp\w*)\.")  # fmt: skip

# How checkpoints call the module of the output head; Transformers renames some of them.
_HEADS = (["lm_head"], ["embed_out"], ["output"], ["head"])

_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")

# Tensor -> (config fields whose product its rows must be).
_ROWS = {
    "k_proj.weight": ("num_key_value_heads", "head_dim"),
    "v_proj.weight": ("num_key_value_heads", "head_dim"),
    "q_proj.weight": ("num_attention_heads", "head_dim"),
    "embed_tokens.weight": ("vocab_size",),
    "lm_head.weight": ("vocab_size",),
    "gate_proj.weight": ("intermediate_size",),
    "up_proj.weight": ("intermediate_size",),
}


def check_shapes(checkpoint: Checkpoint, config: Any, blank: Any) -> None:
    """Refuse a config that contradicts the tensors, before their memory is spent. `blank`: see `blank_model`."""
    if "quantization_config" in checkpoint.config:
        return  # packed weights have shapes of their own, which their quantiser checks
    expected = {name: tuple(tensor.shape) for name, tensor in blank.state_dict().items()}
    wrong = [name for name, entry in checkpoint.tensors.items() if expected.get(name, entry.shape) != entry.shape]
    if wrong:
        # A projection says which field is wrong; a norm or bias only that something is.
        wrong.sort(key=lambda name: (not name.endswith(tuple(_ROWS)), name))
        entry = checkpoint.tensors[wrong[0]]
        what = explain_shape(entry, expected[wrong[0]], config.get_text_config(decoder=True))
        more = f" ({len(wrong)} tensors differ)" if len(wrong) > 1 else ""
        raise model_error(checkpoint.path, f"{what}{more}", "The weights are what was trained, so they win: fetch "
                          "config.json and weights again from one revision, or correct the config")  # fmt: skip


def explain_shape(entry: TensorEntry, expected: tuple[int, ...], config: Any) -> str:
    """One tensor against the config fields that set its rows."""
    found = f"{entry.name} in {entry.file.name} has shape {list(entry.shape)}"
    fields = next((fields for suffix, fields in _ROWS.items() if entry.name.endswith(suffix)), ())
    values: list[Any] = [getattr(config, name, None) for name in fields]
    if "head_dim" in fields and values[-1] is None:
        values[-1] = config.hidden_size // config.num_attention_heads
    if not fields or None in values or entry.shape[0] == expected[0]:
        return f"config.json asks for shape {list(expected)}, but {found}"
    told = " x ".join(f"{name}={value}" for name, value in zip(fields, values, strict=True))
    if len(fields) == 1:
        return f"config.json says {told}, but {found}"
    fitting, rest = divmod(entry.shape[0], values[-1])
    heads = f", which is {fields[0]}={fitting} at this head_dim" if not rest else ""
    return f"config.json says {told} = {expected[0]} rows, but {found}{heads}"


def refuse_missing_head(checkpoint: Checkpoint, blank: Any) -> None:
    """An untied model must bring its output head; Transformers would start one at random."""
    tied_by = dict(getattr(blank, "_tied_weights_keys", None) or {})
    for head in sorted(tied_by):
        if head in blank.all_tied_weights_keys or "quantization_config" in checkpoint.config:
            continue
        held = any(name.split(".")[-2:-1] in _HEADS for name in checkpoint.tensors)
        if not held and head.split(".")[-2:-1] in _HEADS:
            raise _headless(checkpoint, head)


def _headless(checkpoint: Checkpoint, head: str) -> Exception:
    what = (f"config.json says tie_word_embeddings=false, so the model needs an output head of its own, but there is no"
            f" {head} in the weight files")  # fmt: skip
    return model_error(checkpoint.path, what, "If the head shares the embeddings, set tie_word_embeddings to true; "
                                              "otherwise fetch the missing weights")  # fmt: skip


def blank_model(checkpoint: Checkpoint, config: Any) -> Any:
    """The model without memory for its weights: names and shapes only."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with quiet_transformers(), shapes_alone(), torch.device("meta"), no_init_weights():
        try:
            return AutoModelForCausalLM.from_config(config)
        except Exception as error:  # model classes raise whatever their config breaks first
            what = f"Transformers cannot build a model that generates text from config.json: {error}"
            raise model_error(checkpoint.path, what, "Use a causal language model with its own config") from error


def account_for_weights(checkpoint: Checkpoint, model: Any, info: dict[str, Any]) -> tuple[str, ...]:
    """Every parameter loaded, every tensor used or explained; the explanations come back as notes."""
    _refuse_raw_integers(checkpoint, model)
    notes = _tie(checkpoint, model)
    tied = set(model.all_tied_weights_keys)
    missing = sorted(set(info["missing_keys"]) - tied)
    if info["mismatched_keys"]:
        listed = "; ".join(f"{name}: {list(found)} in the files, {list(asked)} by the config"
                           for name, found, asked in sorted(info["mismatched_keys"])[:6])  # fmt: skip
        what = f"{len(info['mismatched_keys'])} tensors have other shapes than config.json asks for: {listed}"
        raise model_error(checkpoint.path, what, "Fetch config.json and weights again from one revision")
    heads = [name for name in missing if name in (getattr(model, "_tied_weights_keys", None) or {})]
    if heads and len(heads) == len(missing):
        raise _headless(checkpoint, heads[0])
    if missing:
        what = f"the files lack {len(missing)} weights that the model needs: {_some(missing)}"
        raise model_error(checkpoint.path, what, "Fetch the model again, or correct its config.json")
    unexpected = sorted(name for name in set(info["unexpected_keys"]) - tied if not _COMPUTED.search(name))
    others = [name for name in unexpected if _OTHER_PARTS.search(name)]
    strange = [name for name in unexpected if not _OTHER_PARTS.search(name)]
    if strange:
        what = f"the files hold {len(strange)} weights that this model has no place for: {_some(strange)}"
        raise model_error(checkpoint.path, what, "Correct its config.json, or use a checkpoint that Transformers knows")
    if others:
        notes += (f"{len(others)} tensors that generate no text are not used: {_some(others, 3)}",)
    return notes


def _refuse_raw_integers(checkpoint: Checkpoint, model: Any) -> None:
    """Whole numbers in the files for a weight that is none mean a quantiser was needed and did not run."""
    for name, parameter in model.named_parameters():
        entry = checkpoint.tensors.get(name)
        if entry is not None and entry.dtype in _INTEGERS and parameter.is_floating_point():
            what = f"{name} in {entry.file.name} is quantised ({entry.dtype}), and nothing here knows how to read it"
            raise model_error(checkpoint.path, what, "Use an unquantised checkpoint")


def _tie(checkpoint: Checkpoint, model: Any) -> tuple[str, ...]:
    """Tie what the config ties. A separate tensor for it in the files is not used, and a note says so."""
    declared = dict(getattr(model, "_tied_weights_keys", None) or {})
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return ()
    notes: tuple[str, ...] = ()
    both = [(head, source) for head, source in sorted(declared.items())
            if head in checkpoint.tensors and source in checkpoint.tensors]  # fmt: skip
    for head, source in both:
        if not _same_bytes(checkpoint.tensors[head], checkpoint.tensors[source]):
            why = "config.json says tie_word_embeddings=true"
            notes += (f"{head} in the files differs from {source} and is not used, because {why}",)
    if both:
        model.tie_weights()
    return notes


def _same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open_for_reading(one.file) as first, open_for_reading(other.file) as second:
        first.seek(one.start_byte)
        second.seek(other.start_byte)
        for done in range(0, one.bytes, 1 << 22):
            step = min(1 << 22, one.bytes - done)
            if read_bytes(one.file, first, step) != read_bytes(other.file, second, step):
                return False
    return True


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
