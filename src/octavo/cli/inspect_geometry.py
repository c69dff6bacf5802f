"""`octavo inspect geometry`: what each layer of a model keeps, from its config alone. No weights, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.writing import write_line
from octavo.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from octavo.geometry.dtypes import Dtype
    from octavo.geometry.model import ModelGeometry
    from octavo.geometry.state import LayerState

LENGTHS = (1024, 8192)
"""At which the bytes of one sequence are printed, besides the model's own context."""

Model = Annotated[
    str | None,
    typer.Argument(help="config.json, a model's directory, or a hub id; the embedded model if not given"),
]
KvDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="element type of keys and values; auto: the config's own")
]
BlockSize = Annotated[int, typer.Option(help="positions per block")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object")]
Revision = Annotated[str | None, typer.Option(help="branch, tag or commit of a hub id")]


def geometry(
    model: Model = None,
    *,
    kv_cache_dtype: KvDtype = "auto",
    block_size: BlockSize = 16,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Print what each layer of a model keeps: kinds of state, bytes per token, bytes per sequence.

    Only the config is read; no weights, no torch.
    """
    if block_size < 1:
        raise ConfigError("block_size", block_size, "must be at least 1")
    from octavo.geometry.from_config import geometry_from_config

    config = _config_of(model, revision)
    dtype, why = _kv_dtype(config, kv_cache_dtype)
    found = geometry_from_config(config, dtype)
    if as_json:
        write_line(json.dumps(_geometry_dict(found, block_size)))
        return
    for line in _geometry_lines(found, block_size, why):
        write_line(line)


def _config_of(model: str | None, revision: str | None) -> dict[str, Any]:
    from octavo.models.files import CONFIG, local_path, read_json

    if model is None:
        from octavo.models.embedded import embedded_checkpoint

        path = embedded_checkpoint()
        return dict(read_json(path / CONFIG))
    path = local_path(model)
    if path is None:
        from octavo.models import hub

        path = hub.fetch(model, revision, (CONFIG,))
    elif revision is not None:
        raise ConfigError(
            "revision", revision, f"{model} is on this machine, where there are no revisions; leave it out"
        )
    if path.suffix == ".gguf":
        raise ModelError(
            "model", model, "is a GGUF file, which has no config.json; octavo generate --model prints its own"
        )
    if path.is_dir() and not (path / CONFIG).exists():
        raise ModelError("model", model, f"has no {CONFIG}; name a model's directory or its config")
    return dict(read_json(path / CONFIG if path.is_dir() else path))


def _kv_dtype(config: dict[str, Any], asked: str) -> tuple[Dtype, str]:
    """The element type, and where it comes from."""
    from octavo.geometry.dtypes import BF16, dtype_named
    from octavo.geometry.from_config import language_model_config

    if asked != "auto":
        return dtype_named(asked, field="kv_cache_dtype"), "as asked"
    for part in (language_model_config(config), config):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part.get(key), str):
                return dtype_named(part[key], field=key), f"the config's {key}"
    return BF16, "the config names none; bf16 is assumed"


def _geometry_lines(found: ModelGeometry, block_size: int, why: str) -> Iterator[str]:
    yield f"model type           {found.model_type}{f' ({found.architecture})' if found.architecture else ''}"
    yield f"layers               {found.num_layers}, {found.attention_mode}"
    for first, last, state in _runs(found.layers):
        yield f"  {f'{first}' if first == last else f'{first}-{last}':<8}  {_described(state)}"
    yield f"element type         {found.kv_dtype} ({why})"
    yield f"bytes per token      {found.bytes_per_token:,}"
    if found.bytes_per_token_windowed:
        yield f"  of them windowed   {found.bytes_per_token_windowed:,}, until the window is full"
    if found.fixed_bytes_per_sequence:
        yield f"bytes per sequence   {found.fixed_bytes_per_sequence:,}, whatever its length"
    yield f"bytes per block      {found.bytes_per_token * block_size:,} of {block_size} positions"
    yield f"context              {f'{found.context_length:,}' if found.context_length else 'not in the config'}"
    for length in _lengths(found):
        yield f"{f'at {length:,} tokens':<20} {found.bytes_kept(length):,} bytes needed by one sequence"
    for note in found.notes:
        yield f"note: {note}"


def _geometry_dict(found: ModelGeometry, block_size: int) -> dict[str, Any]:
    return {
        "model_type": found.model_type,
        "architecture": found.architecture,
        "layers": [
            {"first": first, "last": last, "state": type(state).__name__, "says": _described(state)}
            for first, last, state in _runs(found.layers)
        ],
        "num_layers": found.num_layers,
        "attention_mode": found.attention_mode,
        "kv_dtype": str(found.kv_dtype),
        "bytes_per_token": found.bytes_per_token,
        "bytes_per_token_windowed": found.bytes_per_token_windowed,
        "fixed_bytes_per_sequence": found.fixed_bytes_per_sequence,
        "bytes_per_block": found.bytes_per_token * block_size,
        "context_length": found.context_length,
        "bytes_kept": {str(length): found.bytes_kept(length) for length in _lengths(found)},
        "notes": list(found.notes),
    }


def _lengths(found: ModelGeometry) -> tuple[int, ...]:
    most = found.context_length
    return tuple(sorted({n for n in LENGTHS if most is None or n <= most} | ({most} if most else set())))


def _runs(layers: tuple[LayerState, ...]) -> Iterator[tuple[int, int, LayerState]]:
    """Consecutive layers that keep the same, as (first, last, state)."""
    first = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[first]:
            yield first, index - 1, layers[first]
            first = index


def _described(state: LayerState) -> str:
    from octavo.geometry.state import Borrowed, Chunked, Compound, Compressed, Constant, Stateless, Windowed

    if isinstance(state, Compound):
        return "; and ".join(_described(part) for part in state.parts)
    side_by_side: tuple[LayerState, ...] = getattr(state, "parts", ())
    if side_by_side:
        return " beside ".join(_described(part) for part in side_by_side)
    if isinstance(state, Borrowed):
        return f"reads the state of layer {state.layer}, keeps none"
    if isinstance(state, Stateless):
        return "keeps nothing"
    parts = ", ".join(f"{c.name} {'x'.join(map(str, c.shape))} {c.dtype}" for c in state.components)
    if isinstance(state, Constant):
        return f"constant: {parts}; {state.bytes_per_sequence:,} B per sequence"
    run = getattr(state, "run_tokens", None)
    if run is not None:
        return f"one entry for {run:,} positions: {parts}; {sum(c.bytes for c in state.components):,} B per entry"
    if isinstance(state, Compressed):
        return f"an entry for {state.run_tokens} positions: {parts}; {state.bytes_per_entry:,} B per entry"
    kind = "growing"
    if isinstance(state, Windowed):
        kind = f"window of {state.window_tokens:,}" + (f" and {state.sink_tokens} sinks" if state.sink_tokens else "")
    elif isinstance(state, Chunked):
        kind = f"chunks of {state.chunk_tokens:,}"
    return f"{kind}: {parts}; {state.bytes_kept(1):,} B per token"
