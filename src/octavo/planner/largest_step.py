"""What the largest step of another engine needs besides weights and KV cache: the higher of two moments.

    layer       residual, attention or feed-forward of all tokens of the step; freed layer by layer
    sampling    logits of the rows that are sampled, not of all tokens; the layers' temporaries are gone by then

They never stand in memory together, so the step needs the larger one. Both are whole on every tensor
rank: the residual and the logits are replicated, and the share of a feed-forward network that a rank
computes is taken whole too, which is an upper bound. octavo's own runtime is predicted in `ledger`.
"""

from __future__ import annotations

from octavo.geometry.model import ModelGeometry
from octavo.planner.engines import Engine
from octavo.planner.ledger import Line, StepLimits, attention_widths

LARGEST_STEP = "largest step"
_FLOAT32, _INT64 = 4, 8
_SEGMENTED_FROM = 128
"""Rows from which on a sort of whole rows takes one pass; below, an index and a segment are sorted with each value."""


def largest_step(engine: Engine, geometry: ModelGeometry, limits: StepLimits) -> Line:
    """The estimate, with the moment that decides and its formula. `geometry` is the whole model's."""
    layer, layer_says = _layer(engine, geometry, limits)
    sampling, sampling_says = _sampling(engine, geometry, limits)
    if sampling > layer:
        return Line(LARGEST_STEP, sampling, f"sampling, more than a layer's {layer:,} B: {sampling_says}")
    return Line(LARGEST_STEP, layer, f"a layer, more than sampling's {sampling:,} B: {layer_says}")


def _layer(engine: Engine, geometry: ModelGeometry, limits: StepLimits) -> tuple[int, str]:
    """Input, residual and output of a block, and its wider half: gate, up and their product, or queries twice."""
    hidden = geometry.hidden_size
    queries, keys = attention_widths(geometry)
    feed_forward = geometry.intermediate_size if geometry.intermediate_size is not None else 4 * hidden
    widest = max(2 * queries + keys, 3 * feed_forward)
    each = _FLOAT32 if engine.name == "llamacpp" else limits.compute_dtype.bits // 8
    says = (
        f"{limits.max_num_batched_tokens:,} tokens x (3 x hidden {hidden:,} + the wider of attention "
        f"{2 * queries + keys:,} and MLP 3 x {feed_forward:,}) x {each} B"
    )
    return limits.max_num_batched_tokens * (3 * hidden + widest) * each, says


def _sampling(engine: Engine, geometry: ModelGeometry, limits: StepLimits) -> tuple[int, str]:
    vocab, hidden, tokens = geometry.vocab_size or 0, geometry.hidden_size, limits.max_num_batched_tokens
    own = limits.compute_dtype.bits // 8
    if engine.name == "llamacpp":
        # its worst graph asks for logits of every token of a micro-batch
        says = f"{tokens:,} tokens of a micro-batch x (vocabulary {vocab:,} + hidden {hidden:,}) x {_FLOAT32} B"
        return tokens * (vocab + hidden) * _FLOAT32, says
    rows = min(limits.max_num_seqs, tokens)
    if engine.name == "vllm":
        each, why = _sorted_bytes(own, rows)
    else:
        each, why = own + 2 * _FLOAT32, "logits in the model's type and in float32, and probabilities"
    says = f"{rows:,} rows x vocabulary {vocab:,} x {each} B ({why}) + {tokens:,} tokens x hidden {hidden:,} x {own} B"
    return rows * vocab * each + tokens * hidden * own, says


def _sorted_bytes(own: int, rows: int) -> tuple[int, str]:
    """vLLM profiles a sample with top-p of every row: bytes of one logit at the height of the sort.

    Logits in the model's type and in float32; sorted values and their int64 indices; and what the sort holds
    besides: indices to begin with, and a second copy of values and indices to sort between. Fewer rows than
    `_SEGMENTED_FROM` are sorted all together, by value and then by row, which takes indices and values once more.
    """
    logits = own + _FLOAT32
    result = between = _FLOAT32 + _INT64
    once_more = _INT64 + _FLOAT32 if rows < _SEGMENTED_FROM else 0
    each = logits + result + _INT64 + between + once_more
    return each, f"logits {logits}, sorted {result}, sorting {each - logits - result}"


def first_rank_samples(
    engine: Engine, ranks: int, geometry: ModelGeometry, limits: StepLimits, stated_bytes: float
) -> int:
    """Bytes by which the rank that samples has less for KV than one that states a peak of `stated_bytes`.

    vLLM's first engine samples on the first of several tensor ranks alone. A peak below what sampling takes is
    that of another rank, and the rank with the least decides how many blocks all of them have.
    """
    if engine.name != "vllm" or engine.since(0, 8) or ranks < 2 or not geometry.vocab_size:
        return 0
    sampling, _ = _sampling(engine, geometry, limits)
    return max(0, sampling - round(stated_bytes))
