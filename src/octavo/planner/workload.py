"""Paged against contiguous: what a distribution of lengths takes either way, and what is wasted by which cause.

Owns the reading of lengths (given, mean and max, or a published trace) and the comparison. Causes are
those of the runtime's ledger: reserved, internal, padding, external.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean

from octavo.errors import ConfigError, shorten
from octavo.geometry.model import ModelGeometry
from octavo.planner.asked import Asked
from octavo.planner.charging import AnyPaging
from octavo.planner.paging import Paging
from octavo.planner.values import Holding, Waste, Workload
from octavo.text_files import read_text

MOST_TOKENS = 2**24
"""Of a request: more than any model takes."""
_INPUT = ("contexttokens", "input_length", "request tokens", "num_prefill_tokens", "prompt_tokens", "input_tokens")
_OUTPUT = (
    "generatedtokens",
    "output_length",
    "response tokens",
    "num_decode_tokens",
    "completion_tokens",
    "output_tokens",
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Final lengths of sequences, prompt and output together, and how many sequences each stands for."""

    source: str
    tokens: tuple[int, ...]
    declared_max: int

    @property
    def mean(self) -> float:
        return fmean(self.tokens)


def lengths_of(asked: Asked, context_length: int | None) -> Lengths | None:
    """The distribution that was asked for, or None."""
    if asked.workload is not None:
        tokens = trace_lengths(asked.workload)
        source = Path(asked.workload).name
    elif asked.lengths:
        tokens, source = asked.lengths, "lengths as given"
    elif asked.mean is not None and asked.max is not None:
        tokens, source = _two_numbers(asked.mean, asked.max), f"mean {asked.mean:,} and max {asked.max:,}"
    else:
        return None
    longest = max(tokens)
    declared = asked.declared_max or asked.context or (asked.max or None) or context_length or longest
    return Lengths(source, tokens, max(declared, longest))


def _two_numbers(mean: int, most: int) -> tuple[int, ...]:
    """Lengths with this mean and this maximum: one of the maximum, the others even around what is left."""
    if most == mean:
        return (mean,)
    count = max(64, 2 * -(-most // mean))
    left = (count * mean - most) // (count - 1)
    spread = min(left - 1, most - left)
    others = [left - spread + 2 * spread * i // (count - 2) for i in range(count - 1)]
    short = mean * count - most - sum(others)  # what rounding took, given back one by one
    return (*(length + (i < short) for i, length in enumerate(others)), most)


def trace_lengths(path: str) -> tuple[int, ...]:
    """Input plus output tokens of every request of a published trace: CSV or JSON lines, gzip or not."""
    text = read_text(path, "workload", "; name a trace's file")
    rows = _json_rows(text, path) if text.lstrip().startswith("{") else _csv_rows(text, path)
    found = tuple(total for total in _totals(rows, path) if total > 0)
    if not found:
        raise ConfigError("workload", path, "has no request with tokens in it")
    return found


def _json_rows(text: str, path: str) -> Iterator[Mapping[str, object]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise ConfigError("workload", path, f"line {number} is not JSON") from None
            if not isinstance(row, dict):
                raise ConfigError("workload", path, f"line {number} is no JSON object")
            yield row


def _csv_rows(text: str, path: str) -> Iterator[Mapping[str, object]]:
    try:
        yield from csv.DictReader(StringIO(text))
    except csv.Error as error:
        raise ConfigError("workload", path, f"is no CSV ({error})") from None


def _totals(rows: Iterable[Mapping[str, object]], path: str) -> Iterator[int]:
    for number, row in enumerate(rows, 1):
        plain = {str(name).strip().lower(): value for name, value in row.items()}
        values = [next((plain[name] for name in names if name in plain), None) for names in (_INPUT, _OUTPUT)]
        if values[0] is None or values[1] is None:
            raise ConfigError("workload", path, f"row {number} has no columns of input and output tokens")
        try:
            tokens = [int(float(str(value))) for value in values]
        except (ValueError, OverflowError):
            tokens = [-1]
        if not 0 <= min(tokens) <= max(tokens) <= MOST_TOKENS:
            raise ConfigError("workload", path, f"row {number}: {shorten(values)} are no numbers of tokens from 0 to "
                                                f"{MOST_TOKENS:,}")  # fmt: skip
        yield sum(tokens)


def compare(lengths: Lengths, geometry: ModelGeometry, paging: AnyPaging, kv_bytes: int | None) -> Workload:
    """What these sequences take on one device, paged by `paging` and as reservations of the declared maximum."""
    useful = sum(geometry.bytes_kept(tokens) for tokens in lengths.tokens)
    return Workload(
        source=lengths.source,
        requests=len(lengths.tokens),
        mean_tokens=lengths.mean,
        max_tokens=max(lengths.tokens),
        declared_max_tokens=lengths.declared_max,
        live_bytes=useful,
        paged=_paged(lengths, paging, useful, kv_bytes),
        contiguous=_contiguous(lengths, geometry, useful, kv_bytes),
    )


def _contiguous(lengths: Lengths, geometry: ModelGeometry, useful: int, kv_bytes: int | None) -> Holding:
    """A run of the declared maximum for each. Windows have no shorter run: a run holds every position."""
    each = geometry.fixed_bytes_per_sequence + lengths.declared_max * geometry.bytes_per_token
    aside = each * len(lengths.tokens)
    at_once = None if kv_bytes is None else kv_bytes // each
    external = 0 if kv_bytes is None else kv_bytes % each
    return Holding(
        way="contiguous",
        set_aside_bytes=aside,
        useful_bytes=useful,
        waste=Waste(reserved_bytes=aside - useful, internal_bytes=0, padding_bytes=0, external_bytes=external),
        blocks=len(lengths.tokens),
        partial_blocks=0,
        sequences_at_once=at_once,
    )


def _paged(lengths: Lengths, paging: AnyPaging, useful: int, kv_bytes: int | None) -> Holding:
    """What they hold while each takes one token a step; how many get in goes by the charge of a whole step."""
    if not isinstance(paging, Paging):
        aside = sum(paging.bytes_for(tokens) for tokens in lengths.tokens)
        blocks = sum(paging.units_for(tokens) for tokens in lengths.tokens)
        partial = sum(tokens % paging.block_tokens != 0 for tokens in lengths.tokens) if paging.block_tokens else 0
        waste = Waste(reserved_bytes=0, internal_bytes=max(0, aside - useful), padding_bytes=0, external_bytes=0)
    else:
        held = [(group, sum(group.blocks(tokens, 1) for tokens in lengths.tokens)) for group in paging.groups]
        units = sum(-(-count // group.per_unit) for group, count in held)
        aside = units * paging.unit_bytes
        inside = sum(count * group.block_bytes for group, count in held)
        blocks = sum(count for _, count in held)
        partial = sum(
            tokens % group.block_tokens != 0
            for group in paging.groups
            if group.law == "growing"
            for tokens in lengths.tokens
        )
        waste = Waste(
            reserved_bytes=0,
            internal_bytes=max(0, inside - useful),
            padding_bytes=aside - inside,
            external_bytes=0,
        )
    at_once = None if kv_bytes is None else _at_once(lengths, paging, kv_bytes)
    return Holding(way="paged", set_aside_bytes=aside, useful_bytes=useful, waste=waste, blocks=blocks,
                   partial_blocks=partial, sequences_at_once=at_once)  # fmt: skip


def _at_once(lengths: Lengths, paging: AnyPaging, kv_bytes: int) -> int:
    """Sequences at once when each takes what the average of the distribution takes at its full length."""
    if not isinstance(paging, Paging):
        average = sum(paging.bytes_for(tokens) for tokens in lengths.tokens) / len(lengths.tokens)
        return int(kv_bytes / average)
    average = sum(
        sum(group.blocks(tokens, paging.step_tokens) for tokens in lengths.tokens)
        / len(lengths.tokens)
        / group.per_unit
        for group in paging.groups
    )
    return int(paging.usable_units(kv_bytes) / average)
