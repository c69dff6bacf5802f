"""`Plan` and its parts: frozen values with units in their names, and nothing that computes.

Figures of one device say so in their name or docstring; all others are of the whole model. `json_form`
writes a plan as JSON, `report` as text, `page` as HTML; none of them adds a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.planner.accelerators import Accelerator
from octavo.planner.ledger import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class StateGroup:
    """Layers that keep the same: one row of the table of state."""

    kind: str
    """growing, window, chunk, constant, entries, borrowed or stateless."""
    layers: int
    says: str
    """Components with shapes and types."""
    bytes_per_token: int
    """All these layers; 0 for constant state."""
    bytes_per_sequence: int
    """Constant state of all these layers; 0 otherwise."""
    window_tokens: int | None
    bytes_at_context: int
    share_at_context: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    bytes_per_token_growing: int
    bytes_per_token_windowed: int
    fixed_bytes_per_sequence: int
    attention_mode: str
    kv_dtype: str
    convention: str
    groups: tuple[StateGroup, ...]
    device_bytes_per_token_growing: int
    """What one device keeps, in the types of the engine asked for."""
    device_bytes_per_token_windowed: int
    device_fixed_bytes_per_sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One device's memory, line by line. The lines and `missing_bytes` (negative) sum to it exactly."""

    total_bytes: int
    weights: Line
    runtime: tuple[Line, ...]
    kv: Line
    headroom: Line
    missing_bytes: int = 0
    """0, or minus what weights, runtime and KV cache ask for beyond the device."""

    @property
    def runtime_bytes(self) -> int:
        return sum(line.predicted_bytes for line in self.runtime)

    @property
    def by_label(self) -> dict[str, int]:
        figures = {
            "weights": self.weights.predicted_bytes,
            "runtime": self.runtime_bytes,
            "kv": self.kv.predicted_bytes,
            "headroom": self.headroom.predicted_bytes,
        }
        return figures | ({"missing": self.missing_bytes} if self.missing_bytes else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one device's KV cache holds (with tensor ranks, all devices hold the same sequences)."""

    kv_bytes: int
    block_bytes: int
    """What the pool is divided into: a block, or a slab that several blocks of one group share."""
    page_bytes: int
    """What a growing sequence takes at a time; `block_tokens` positions."""
    block_tokens: int
    blocks: int
    """Whole blocks (or slabs) in the pool."""
    usable_blocks: int
    tokens: int
    """As the engine counts them; see `tokens_context`."""
    tokens_context: int
    """The length of the sequences for which `tokens` holds; it matters where state is not uniform."""
    sequences: Mapping[int, int]
    """By context: whole sequences of that length at once."""
    concurrency: Mapping[int, float]
    """By context: the same with its fraction, as engines print it."""
    blocks_per_sequence: Mapping[int, int]
    largest_context: int
    """The longest single sequence that fits, in whole blocks. Not bounded by what the model was made for."""
    needed_context: int
    fits: bool
    """Whether one sequence of `needed_context` fits, with a block to spare."""
    margin: str
    """How far from fitting, or from not fitting: never the bare 1.00x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One resource's bound on sequences at once, at the reference context."""

    resource: str
    sequences: int
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    context: int
    binding: str
    """The resource that binds first."""
    all: tuple[Limit, ...]
    memory_from_tokens: int | None
    """Live tokens from which on memory is what limits; None where something else always binds before."""
    memory_from_context: int | None
    """The average length of sequences from which on that is so."""
    step_bound: str | None
    """Arithmetic or bandwidth: what a decode step of that many sequences waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Lower bounds of time per step, from dense peak rates. One device of a replica."""

    context: int
    batch: int
    decode_s: float
    decode_bound: str
    decode_read_bytes: int
    decode_weights_bytes: int
    decode_state_bytes: int
    tokens_per_s: float
    prefill_s: float
    prefill_bound: str
    batch_state_overtakes_weights: int
    """From this batch on a step reads more state than weights."""
    batch_arithmetic_bound: int | None
    """From this batch on arithmetic takes longer than reading; None: never at this context."""
    dollars_per_million_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Bytes set aside that hold nothing, by cause."""

    reserved_bytes: int
    internal_bytes: int
    padding_bytes: int
    external_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.reserved_bytes + self.internal_bytes + self.padding_bytes + self.external_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One way of giving sequences their memory."""

    way: str
    """paged, or contiguous."""
    set_aside_bytes: int
    useful_bytes: int
    waste: Waste
    blocks: int
    partial_blocks: int
    sequences_at_once: int | None
    """Of this distribution, in one device's KV cache; None without a device."""

    @property
    def useful_share(self) -> float:
        return self.useful_bytes / self.set_aside_bytes if self.set_aside_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    source: str
    requests: int
    mean_tokens: float
    max_tokens: int
    declared_max_tokens: int
    live_bytes: int
    """Sum over all these sequences, were they live together, of what they need."""
    paged: Holding
    contiguous: Holding


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What one change would do: bytes of a sequence, sequences at once, seconds where something moves."""

    name: str
    says: str
    sequence_bytes: int | None = None
    sequences: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All bytes of one device; `total` counts of the whole model."""

    device_bytes: int | None
    total_bytes: int | None
    total_parameters: int | None
    active_parameters: int | None
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    model: str
    model_type: str
    engine: str
    device: Accelerator | None
    memory_bytes: int | None
    """Of one device."""
    devices: int
    tp: int
    pp: int
    dp: int
    context: int
    """The reference: as asked, else the model's own."""
    context_length: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    weights: Weights
    state: StateSummary
    sequence_bytes: Mapping[int, int]
    """By context: what one sequence needs, in all devices together were nothing replicated."""
    sequence_bytes_per_device: Mapping[int, int]
    """By context: what one device sets aside for it, in whole blocks and by the engine's rules."""
    curve: tuple[tuple[int, int, int], ...]
    """(tokens, bytes needed, bytes set aside) of one sequence on one device, for drawing."""
    budget: Budget | None
    capacity: Capacity | None
    limits: Limits | None
    roofline: Roofline | None
    workload: Workload | None
    levers: tuple[Lever, ...]
    rules: tuple[str, ...]
    """How the engine charges differently from what is needed."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
