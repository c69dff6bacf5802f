"""From the raw JSON of a Hugging Face `config.json` to a `ModelGeometry`, or a refusal naming why.

Owns the way down to the language model inside a larger config, the refusal of what does not
generate text from its own past, and what is said beside the layers. Which kind a layer is stands in
`pattern`, what it keeps in `layers` and the rules below it; what none understands is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16, FP8, FP16, FP32, Dtype, dtype_named
from octavo.geometry.fields import Fields, defaults_table
from octavo.geometry.layers import states_of_layers
from octavo.geometry.model import ModelGeometry
from octavo.geometry.recurrent import CONVENTIONS, Convention, Kept
from octavo.geometry.state import Borrowed, Compressed, Constant, LayerState, Stateless, parts_of

_NESTED = ("thinker_config", "text_config", "llm_config", "language_config", "llm")
_ENCODER_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

MAX_NAME_CHARS = 200
"""What is wrong with a config is said with the name of its type."""


def geometry_from_config(
    config: Mapping[str, Any], kv_dtype: Dtype, *, convention: Convention = "needed", model_dtype: Dtype | None = None
) -> ModelGeometry:
    """What each layer of the model described by `config` keeps.

    `config` is the parsed `config.json`; `kv_dtype` the element type in which keys and values are kept.
    `convention` says whose count the figures are: what is `needed`, or what `transformers` keeps.
    `model_dtype` is the type of convolution state; without it the config's own. Raises `ConfigError`
    naming the field where the config is incomplete, contradicts itself or describes a kind of state
    for which there is no rule, and where a kind cannot be kept in `kv_dtype`.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("config", config, "config.json must hold one JSON object")
    if convention not in CONVENTIONS:
        raise ConfigError("convention", convention, f"must be one of {', '.join(CONVENTIONS)}")
    architecture = _architecture(config)
    _refuse_encoder_decoder(config, architecture)
    raw, model_type, path = _language_model(config)
    _refuse_no_decoder(raw, model_type, architecture)
    fields = Fields(raw, model_type)
    own_dtype = model_dtype or _model_dtype(config, raw, kv_dtype)
    layers = states_of_layers(fields, Kept(kv_dtype, own_dtype, convention), architecture)
    _require_possible(layers, kv_dtype)
    return ModelGeometry(
        model_type=model_type,
        architecture=architecture,
        layers=layers,
        kv_dtype=kv_dtype,
        hidden_size=fields.required("hidden_size"),
        num_attention_heads=_attention_heads(fields, layers),
        vocab_size=fields.integer("vocab_size"),
        intermediate_size=_intermediate_size(fields),
        context_length=fields.integer("max_position_embeddings"),
        convention=convention,
        notes=_notes(fields, path, layers),
    )


def language_model_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model: the config itself for a plain one."""
    return _language_model(config)[0]


def language_model_of(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, str]:
    """The language model's own part of a config, its model type, and the name of its class."""
    raw, model_type, _ = _language_model(config)
    return raw, model_type, _architecture(raw) or _architecture(config)


def _model_dtype(config: Mapping[str, Any], raw: Mapping[str, Any], kv_dtype: Dtype) -> Dtype:
    """In what the model computes: as the config says, else as keys and values are kept, else bf16."""
    for part in (raw, config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str) and part[key] != "auto":
                return dtype_named(part[key], field=key)
    return BF16 if kv_dtype.quantised else kv_dtype


def _require_possible(layers: tuple[LayerState, ...], kv_dtype: Dtype) -> None:
    """Refuse an element type that some kind of state cannot be kept in."""
    if not kv_dtype.quantised:
        return
    parts = [part for state in layers for part in parts_of(state)]
    growing = [part for part in parts if not isinstance(part, (Borrowed, Constant, Stateless))]
    if not growing:
        raise ConfigError(
            "kv_dtype",
            kv_dtype.name,
            "the model keeps no keys and values, only constant state, which is never quantised; use bf16, fp16 or fp32",
        )
    for part in growing:
        name = part.components[0].name
        if kv_dtype.name != FP8.name and (isinstance(part, Compressed) or name in ("latent", "kv")):
            allowed = ", ".join(dtype.name for dtype in (BF16, FP16, FP32, FP8))
            raise ConfigError(
                "kv_dtype",
                kv_dtype.name,
                f"{'compressed' if name != 'latent' else 'latent'} attention has one array for keys and values, "
                f"which integers cannot hold; use one of {allowed}",
            )


def _attention_heads(fields: Fields, layers: tuple[LayerState, ...]) -> int:
    """Query heads, the most that a layer has; 0 where no layer attends."""
    if all(isinstance(part, (Constant, Stateless)) for state in layers for part in parts_of(state)):
        return 0
    value = fields.get("num_attention_heads")
    if isinstance(value, (list, tuple)):
        return max((entry for entry in value if isinstance(entry, int)), default=0)
    return fields.required("num_attention_heads")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if names is None:
        return ""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError("architectures", names, "must be a list of class names")
    return names[0] if names else ""


def _language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str, str]:
    """The innermost language-model config, its model type, and the path taken, for example `text_config`."""
    raw, path = config, ""
    model_type = _model_type(config, defaults_table()["architectures"].get(_architecture(config), ""))
    while True:
        name = next((n for n in _NESTED if isinstance(raw.get(n), Mapping) and raw[n]), None)
        wrapper = defaults_table()["wrappers"].get(model_type)
        if name is None:
            # a wrapper without the nested part: its fields stand beside it, in the older flat form
            if wrapper and not Fields(raw, wrapper).says("num_hidden_layers"):
                raise ConfigError(
                    "text_config", None, f"model_type={model_type!r} needs one: its language model is there"
                )
            return raw, (wrapper or model_type), path
        raw = raw[name]
        path = f"{path}.{name}" if path else name
        model_type = _model_type(raw, wrapper or "")


def _model_type(raw: Mapping[str, Any], default: str) -> str:
    value = raw.get("model_type")
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
        raise ConfigError("model_type", value, f"must be a string of at most {MAX_NAME_CHARS} characters")
    return value


def _refuse_encoder_decoder(config: Mapping[str, Any], architecture: str) -> None:
    if config.get("is_encoder_decoder") is True:
        raise ConfigError(
            "is_encoder_decoder", True, f"{architecture or 'this model'} has an encoder; only decoders are served"
        )


def _refuse_no_decoder(raw: Mapping[str, Any], model_type: str, architecture: str) -> None:
    """Encoders, encoder-decoders and what makes no text at all, refused by name."""
    not_decoders: Mapping[str, str] = defaults_table()["not_decoders"]
    if model_type in not_decoders and raw.get("is_decoder") is not True:
        raise ConfigError(
            "model_type", model_type, f"is {not_decoders[model_type]}; only decoders that generate text are served"
        )
    if architecture.endswith(_ENCODER_HEADS):
        raise ConfigError("architectures", architecture, "does not generate text; use a ...ForCausalLM checkpoint")
    if raw.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError(
            "use_bidirectional_attention",
            raw["use_bidirectional_attention"],
            "every token reads later ones too: an encoder, which is not served",
        )


def _intermediate_size(fields: Fields) -> int | None:
    """Feed-forward width per token: the dense one, or all experts of a token together, whichever is wider."""
    dense = fields.get("intermediate_size")
    widths = [dense] if isinstance(dense, int) and not isinstance(dense, bool) and dense > 0 else []
    if isinstance(fields.get("num_experts_per_tok"), (list, tuple)):
        return max(widths, default=None)
    experts = fields.integer("num_experts_per_tok", low=0) or 0
    expert_width = fields.integer("moe_intermediate_size") or (widths[0] if widths else None)
    if experts and expert_width:
        widths.append(experts * expert_width)
    return max(widths, default=None)


def _notes(fields: Fields, path: str, layers: tuple[LayerState, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    if path:
        notes.append(f"geometry read from {path} (model_type {fields.model_type or 'not given'})")
    if raw_type := fields.model_type if fields.raw.get("model_type") is None and not path else "":
        notes.append(f"the config names no model_type; taken as {raw_type!r} from its architecture")
    if not fields.known:
        notes.append(
            f"model_type {fields.model_type!r} is not in the table of defaults: the figures are the file's own"
        )
    borrowed = sum(isinstance(state, Borrowed) for state in layers)
    if borrowed:
        notes.append(f"{borrowed} layers read another layer's state and keep none of their own")
    constant = {c.dtype.name for s in layers for part in parts_of(s) if isinstance(part, Constant)
                for c in part.components if c.name == "recurrent"}  # fmt: skip
    if constant:
        notes.append(f"recurrences are kept in {', '.join(sorted(constant))}, convolutions in the model's own type")
    if fields.flag("new_decoder_architecture"):
        notes.append("Transformers keeps these keys once per query head; the figure is what is needed")
    return tuple(notes)
