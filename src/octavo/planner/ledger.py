"""The ledger: where the memory goes. `total = weights + runtime + KV + headroom`, exact in bytes.

Owns the sum, its lines, and the prediction of what running needs besides weights and KV
(`predict_runtime`). Every predicted line carries the formula it came from and has room for what
was measured. Bytes of attention state come from the geometry; there is no formula for them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.errors import ConfigError
from octavo.geometry.dtypes import Dtype
from octavo.geometry.model import ModelGeometry
from octavo.geometry.state import Growing, Windowed

LOGIT_BYTES = 4
"""Logits are sampled from in float32."""
CUDA_CONTEXT_BYTES = 512 * 2**20
"""What a CUDA context, its libraries' kernels and a matmul workspace are taken to need, until measured."""
QUERY_ROWS = 256
"""Queries that the reference attention masks together."""
TILE_BYTES = 3 << 20
"""Keys and values that the reference attention gathers for several short sequences together."""
DRAWN_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Logits that the sampler works on together."""
DRAW_BYTES = 68
"""Bytes that it needs for each of them where top-p makes it sort a whole vocabulary (measured)."""
CPU_ALLOCATOR_SLACK = 2
"""Resident over live bytes of a step's activations on CPU: 1.8 to 2.1 times, measured at 128 to 512 tokens."""

TEMPORARY = "temporary buffers"
LOGITS = "logits"
WORKSPACE = "attention workspace"
TABLES = "block tables and token columns"
KERNELS = "kernels"
GRAPHS = "graph captures"
ALLOCATOR = "allocator metadata"
OTHER = "other engine state"
RUNTIME_LINES = (TEMPORARY, LOGITS, WORKSPACE, TABLES, KERNELS, GRAPHS, ALLOCATOR, OTHER)


@dataclass(frozen=True, slots=True)
class Line:
    """One item of the ledger: predicted bytes, the formula, and the measured bytes where there are any."""

    label: str
    predicted_bytes: int
    basis: str
    measured_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("predicted_bytes", self.predicted_bytes), ("measured_bytes", self.measured_bytes)):
            if value is not None and value < 0:
                raise ConfigError(name, value, f"ledger line {self.label!r} must be 0 bytes or more")


@dataclass(frozen=True, slots=True)
class Ledger:
    """Predicted beside measured. All sums are over predictions; `measured_total` uses what was measured."""

    weights: Line
    runtime: tuple[Line, ...]
    kv: Line
    headroom: Line

    @property
    def runtime_bytes(self) -> int:
        return sum(line.predicted_bytes for line in self.runtime)

    @property
    def total_bytes(self) -> int:
        return sum(line.predicted_bytes for line in self.lines)

    @property
    def measured_total_bytes(self) -> int | None:
        """Measured bytes, predictions standing in for lines not measured; None where nothing was measured."""
        if all(line.measured_bytes is None for line in self.lines):
            return None
        return sum(line.predicted_bytes if line.measured_bytes is None else line.measured_bytes for line in self.lines)

    @property
    def lines(self) -> tuple[Line, ...]:
        return (self.weights, *self.runtime, self.kv, self.headroom)

    def measured(self, found: Mapping[str, int]) -> Ledger:
        """The same ledger with measured bytes by label. A label that is no line raises `ConfigError`."""
        labels = [line.label for line in self.lines]
        for label in found:
            if label not in labels:
                raise ConfigError("ledger", label, f"is no line of the ledger; there are {', '.join(labels)}")

        def with_measured(line: Line) -> Line:
            return replace(line, measured_bytes=found.get(line.label, line.measured_bytes))

        return Ledger(
            with_measured(self.weights),
            tuple(with_measured(line) for line in self.runtime),
            with_measured(self.kv),
            with_measured(self.headroom),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step and the largest running set: what the runtime's buffers are sized by."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_tokens: int
    kv_blocks: int
    compute_dtype: Dtype
    device: str
    process_bytes: int = 0
    """What the process held before any of this: interpreter and libraries."""


def make_ledger(
    geometry: ModelGeometry,
    *,
    weights_bytes: int,
    runtime: tuple[Line, ...],
    kv_bytes: int,
    headroom_bytes: int,
) -> Ledger:
    return Ledger(
        weights=Line("weights", weights_bytes, "the checkpoint's tensors as they are loaded"),
        runtime=runtime,
        kv=Line("KV cache", kv_bytes, kv_basis(geometry)),
        headroom=Line("headroom", headroom_bytes, "left unallocated on purpose (--headroom-bytes)"),
    )


def kv_basis(geometry: ModelGeometry) -> str:
    """What the KV line stands for and what it does not."""
    text = f"{geometry.bytes_per_token:,} B per token"
    if geometry.fixed_bytes_per_sequence:
        text += f" and {geometry.fixed_bytes_per_sequence:,} B per sequence"
    text += "; excludes weights, runtime and headroom"
    if geometry.bytes_per_token_windowed:
        text += (
            f"; {geometry.bytes_per_token_windowed:,} B of a token are in window or chunk layers, "
            "whose blocks are given up once nothing can read them (paged allocation)"
        )
    return text


def predict_runtime(geometry: ModelGeometry, limits: StepLimits) -> tuple[Line, ...]:
    """What running takes besides weights, KV and headroom, one line each, in the order of `RUNTIME_LINES`.

    Upper bounds of the largest step: every formula is in its line's `basis`.
    """
    return (
        _temporary(geometry, limits),
        _logits(geometry, limits),
        _workspace(geometry, limits),
        _tables(limits),
        _kernels(limits),
        Line(GRAPHS, 0, "predicted: none are captured"),
        _allocator(limits),
        Line(OTHER, limits.process_bytes, "measured at start: interpreter, libraries and all loaded code"),
    )


def _temporary(geometry: ModelGeometry, limits: StepLimits) -> Line:
    """The widest moment of a layer: four of the residual's width, the rotation's tables, and the wider half."""
    hidden = geometry.hidden_size
    q_width, kv_width = attention_widths(geometry)
    rotation = 2 * q_width // geometry.num_attention_heads if geometry.num_attention_heads else 0
    mlp = geometry.intermediate_size if geometry.intermediate_size is not None else 4 * hidden
    widest = max(2 * q_width + kv_width, 3 * mlp)
    per_token = limits.compute_dtype.bytes_for((4 * hidden + rotation + widest,))
    basis = (
        f"predicted: {limits.max_num_batched_tokens:,} tokens x (4 x hidden {hidden:,} + {rotation:,} of rotation "
        f"+ the wider of attention {2 * q_width + kv_width:,} and MLP 3 x {mlp:,}) x {limits.compute_dtype}"
    )
    if limits.device == "cpu":
        per_token *= CPU_ALLOCATOR_SLACK
        basis += f" x {CPU_ALLOCATOR_SLACK} for what the C allocator keeps between pieces of different size"
    return Line(TEMPORARY, limits.max_num_batched_tokens * per_token, basis)


def attention_widths(geometry: ModelGeometry) -> tuple[int, int]:
    """(query width, key plus value width) of the widest layer of plain attention."""
    q_width = kv_width = 0
    for state in geometry.layers:
        if isinstance(state, (Growing, Windowed)):
            kv_width = max(kv_width, sum(component.elements for component in state.components))
            q_width = max(q_width, geometry.num_attention_heads * state.components[0].shape[-1])
    return q_width, kv_width


def _logits(geometry: ModelGeometry, limits: StepLimits) -> Line:
    """All rows' logits, and the sampler's temporaries for the rows that it draws from together, each fully sorted."""
    vocab = geometry.vocab_size or 0
    if not vocab:
        return Line(LOGITS, 0, "predicted: 0, since the config names no vocabulary size")
    each = LOGIT_BYTES if limits.compute_dtype.bits == 8 * LOGIT_BYTES else LOGIT_BYTES + limits.compute_dtype.bits // 8
    drawn = min(limits.max_num_seqs, max(1, DRAWN_ELEMENTS.get(limits.device, DRAWN_ELEMENTS["cpu"]) // vocab))
    basis = (
        f"predicted: vocabulary {vocab:,} x ({limits.max_num_seqs:,} sequences x {each} B + {drawn:,} sorted at a time "
        f"x {DRAW_BYTES} B)"
    )
    return Line(LOGITS, vocab * (limits.max_num_seqs * each + drawn * DRAW_BYTES), basis)


def _workspace(geometry: ModelGeometry, limits: StepLimits) -> Line:
    """Keys and values gathered for one layer (kept, a quarter over): the longest sequence or a tile; and one mask."""
    gathered = max((_gather_bytes(state) for state in geometry.layers), default=0)
    queries = min(QUERY_ROWS, limits.max_num_batched_tokens)
    mask = queries * limits.compute_dtype.bytes_for((limits.max_model_len,))
    longest = limits.max_model_len * gathered
    kept = max(longest, min(TILE_BYTES, limits.max_num_seqs * longest))
    what = f"{limits.max_model_len:,} positions x {gathered:,} B" if kept == longest else f"a tile of {kept:,} B"
    basis = (
        f"predicted: {what} of one layer's gathered keys and values x 5/4 "
        f"+ a mask of {queries} x {limits.max_model_len:,}"
    )
    return Line(WORKSPACE, kept * 5 // 4 + mask, basis)


def _gather_bytes(state: object) -> int:
    """Of one position; what is kept in eight bits is gathered as it lies, then read as float32."""
    if not isinstance(state, (Growing, Windowed)):
        return 0
    return state.bytes_per_token + sum(4 * c.elements for c in state.components if c.dtype.quantised)


def _tables(limits: StepLimits) -> Line:
    """A table of int32 on both sides of the executor seam, and token ids of every running sequence."""
    blocks = -(-limits.max_model_len // limits.block_tokens)
    entries = min(2 * limits.max_num_seqs * blocks, 2 * limits.max_num_seqs * max(16, limits.kv_blocks))
    held = min(limits.max_num_seqs * limits.max_model_len, limits.kv_blocks * limits.block_tokens)
    size = 4 * entries + 4 * held + limits.max_num_seqs * 256
    basis = (
        f"predicted: 2 tables x {limits.max_num_seqs:,} rows x {entries // (2 * limits.max_num_seqs):,} blocks x 4 B "
        f"+ {held:,} token ids x 4 B + 256 B of columns a row"
    )
    return Line(TABLES, size, basis)


def _kernels(limits: StepLimits) -> Line:
    if limits.device == "cpu":
        return Line(KERNELS, 0, "predicted: 0 on CPU, where they are part of the process")
    return Line(KERNELS, CUDA_CONTEXT_BYTES, "assumed until measured: CUDA context, loaded kernels, matmul workspace")


def _allocator(limits: StepLimits) -> Line:
    size = limits.kv_blocks * 32
    return Line(ALLOCATOR, size, f"predicted: {limits.kv_blocks:,} slots x 32 B of states, references and free lists")
