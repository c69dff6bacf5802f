"""Compressed attention: a window of positions as they are, and one entry for each run of earlier ones.

Keys and values are one array here. A run that is not full waits as its projections and gates; where
runs overlap, half of the last full one is carried over to the next entry. The waiting and carried
parts follow the reference implementation; nothing smaller was found to suffice.
"""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.geometry.dtypes import FP32
from octavo.geometry.fields import Fields, checked_integer
from octavo.geometry.pattern import COMPRESSED_HEAVY, COMPRESSED_SPARSE, window_of
from octavo.geometry.recurrent import Kept
from octavo.geometry.state import Component, Compound, Compressed, Windowed

_DEFAULT_RUNS = {COMPRESSED_SPARSE: 4, COMPRESSED_HEAVY: 128}


def is_compressing(fields: Fields) -> bool:
    """Whether the config's layers keep keys and values as one array and compress what leaves the window."""
    return (
        bool(fields.sequence("compress_ratios"))
        or bool(fields.mapping("compress_rates"))
        or ("compress_rates" in fields.defaults)
    )


def compressed_state(fields: Fields, kind: str, kept: Kept) -> Windowed | Compound:
    """The window alone, or with the entries of one of the two ways of compressing."""
    width = fields.required("head_dim")
    window = Windowed(
        (Component("kv", (fields.integer("num_key_value_heads") or 1, width), kept.kv),), window_of(fields)
    )
    if kind not in _DEFAULT_RUNS:
        return window
    run = _run_tokens(fields, kind)
    if kind == COMPRESSED_HEAVY:
        waiting = (Component("waiting", (2, width), kept.model),)
        return Compound((window, Compressed((Component("compressed_kv", (width,), kept.kv),), run, waiting)))
    index = fields.required("index_head_dim")
    entries = Compressed(
        components=(Component("compressed_kv", (width,), kept.kv), Component("index_k", (index,), kept.kv)),
        run_tokens=run,
        waiting=(Component("waiting", (4, width), kept.model), Component("index_waiting", (4, index), kept.model)),
        carried=(
            Component("carried", (run, width), kept.model),
            Component("carried_gate", (run, width), FP32),
            Component("index_carried", (run, index), kept.model),
            Component("index_carried_gate", (run, index), FP32),
        ),
        read_entries=fields.integer("index_topk"),
    )
    return Compound((window, entries))


def _run_tokens(fields: Fields, kind: str) -> int:
    rates = fields.mapping("compress_rates")
    flat = {COMPRESSED_SPARSE: "compress_rate_csa", COMPRESSED_HEAVY: "compress_rate_hca"}[kind]
    for name, value in ((f"compress_rates.{kind}", rates.get(kind)), (flat, fields.get(flat))):
        if value is not None:
            return checked_integer(name, value)
    if not fields.known and fields.get("compress_ratios") is None:
        raise ConfigError("compress_rates", None, f"nothing says how many positions an entry of {kind} stands for")
    return _DEFAULT_RUNS[kind]
