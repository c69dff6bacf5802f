"""The check that a model will be served exactly, made when it is loaded: `require_served`.

Owns the making of a tiny random model of the same class, the trial it goes through, and the
verdict. The tiny model runs in float32 through the real executor, alone and in a ragged mixed
batch with a pause, over sequences longer than its window, its chunk and its rope's switch, in the
memory that its geometry gives it: what can no longer be read is overwritten at once. Its logits must
equal those of Transformers' own forward. What differs, or cannot be tried, is refused by name.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from octavo.errors import ModelError, OctavoError
from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.kernels.interface import AttentionBackend
from octavo.kernels.reference import ReferenceAttention
from octavo.memory.groups import served_groups
from octavo.memory.layout import BlockOrder, Layout, make_layout
from octavo.memory.values import Int32, Int64
from octavo.models.linear import Packing
from octavo.models.observe import require_geometry
from octavo.models.rope import fix_rope
from octavo.models.shrink import ROPE_SWITCH, TINY_CONTEXT, enliven, shrunk
from octavo.models.table import in_table, refusal
from octavo.models.trial import Subject, Trial, subjects
from octavo.runtime.executor import TorchExecutor
from octavo.scheduling.plan import Admission, TokenLogprobs

TOLERANCE = 1e-4
"""Largest difference of a logit, relative to the largest logit: about a hundred times float32 noise."""
PROMPTS = (29, 1, 37, 8, 17)
WANTED = 8
BLOCK_TOKENS = 4
SLABS = 96
SPOILT = 0xFF
"""Every byte of a free block: not a number in every floating type."""


@dataclass(slots=True, eq=False)
class _Witness:
    """A sampler that keeps the logits it is shown and answers with a script."""

    script: dict[int, list[int]]
    """Per sequence, its tokens from position 0."""
    sequence_in: dict[int, int]
    seen: dict[tuple[int, int], torch.Tensor]
    """(sequence, position) -> logits from which the token of that position is drawn."""

    def admit(self, admission: Admission) -> None:
        self.sequence_in[admission.row] = admission.sequence_id

    def takes_largest(self, rows: Int64) -> bool:
        return False

    def sample(self, logits: torch.Tensor, rows: Int64, positions: Int64) -> tuple[Int32, dict[int, TokenLogprobs]]:
        tokens = np.zeros(len(rows), dtype=np.int32)
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            sequence = self.sequence_in[row]
            self.seen[sequence, position] = logits[i].clone()
            tokens[i] = self.script[sequence][position]
        return tokens, {}


class NotTried(ModelError):
    """No tiny model of this architecture could be built or run by Transformers itself."""


def require_served(
    model: PreTrainedModel, backend: AttentionBackend | None = None, packing: Packing | None = None
) -> str:
    """How it is known that this model is served exactly, in a few words. Raises `ModelError` if it is not.

    The model itself is not run or changed; a tiny one of its class and config is. Types in the
    verified table are tried too, since a config can switch on what their tests did not; the table
    decides alone only where no tiny model can be made. `backend` is the one that will serve; plain torch if not given.
    `packing` is how its linear layers will be replaced: the tiny model's are too.
    """
    name, kind = type(model).__name__, model.config.model_type
    reason = refusal(model.config)
    if reason is not None:
        raise ModelError("architecture", name, reason)
    try:
        # A tie between experts can go either way in the last bit; a mistake shows with every seed.
        worst = tiny_difference(type(model), model.config, seed=0, backend=backend, packing=packing)
        if not worst <= TOLERANCE:
            worst = tiny_difference(type(model), model.config, seed=1, backend=backend, packing=packing)
    except NotTried:
        if not in_table(model.config):
            raise
        return f"{kind}: its tokens equal Transformers' in octavo's tests"
    if not worst <= TOLERANCE:
        remedy = f"a tiny random model of it differs from Transformers through paged attention (by {worst:.1e})"
        raise ModelError("architecture", name, remedy)
    known = " as in octavo's tests" if in_table(model.config) else ""
    return f"{kind}: a tiny random model of it equals Transformers{known} (logits within {worst:.0e})"


def tiny_difference(
    model_class: type[PreTrainedModel],
    config: Any,
    *,
    seed: int = 0,
    backend: AttentionBackend | None = None,
    packing: Packing | None = None,
) -> float:
    """The worst relative difference of a logit over the trials.

    Raises `NotTried` where Transformers itself cannot run a tiny model, `ModelError` where octavo cannot.
    """
    name = model_class.__name__
    try:
        small = shrunk(config)
        reference = _build(model_class, small, "eager", seed)
        served = _build(model_class, small, None, seed)
        served.load_state_dict(reference.state_dict())
        random = np.random.default_rng(seed)
        vocabulary = small.get_text_config().vocab_size
        texts = [random.integers(3, vocabulary, size=n + WANTED).tolist() for n in PROMPTS]
        expected = [_reference_logits(reference, text) for text in texts]
    except Exception as error:
        remedy = f"it could not be checked on a tiny random model: {type(error).__name__}: {error}"
        raise NotTried("architecture", name, remedy) from error
    try:
        kernels = ReferenceAttention() if backend is None else backend
        layout = _layout(served, small, kernels.block_order)
        if packing is not None:
            packing.try_on(served)
        # First alone, then together, in fewer rows than texts.
        several = ((texts[:1], expected[:1]), (texts, expected))
        worst = max(_trial(served, layout, kernels, pair, seed) for pair in several)
    except Exception as error:
        told = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
        raise ModelError("architecture", name, f"a tiny random model of it cannot be served: {told}") from error
    if packing is not None:
        packing.learn(served)
    return worst


def _layout(served: PreTrainedModel, config: Any, order: BlockOrder) -> Layout:
    """Blocks as the tiny model's geometry has them, which must be what its layers keep."""
    raw = {**config.to_dict(), "architectures": [type(served).__name__]}
    layers = geometry_from_config(raw, FP32, model_dtype=FP32).layers
    require_geometry(served, layers)
    return make_layout(served_groups(layers), BLOCK_TOKENS, order)


def _trial(
    served: PreTrainedModel,
    layout: Layout,
    backend: AttentionBackend,
    pair: tuple[list[list[int]], list[torch.Tensor]],
    seed: int,
) -> float:
    """Put texts through the executor together; the last one is paused. `pair`: the texts, and their logits."""
    texts, expected = pair
    witness = _Witness(dict(enumerate(texts)), {}, {})
    rows = min(len(texts), 3)
    executor = TorchExecutor(served, layout, SLABS, rows=rows, sampler=witness, backend=backend)
    made = subjects([text[:-WANTED] for text in texts], WANTED, pause=len(texts) - 1)
    Trial(executor, layout, SLABS, rows, seed=seed, spoil=spoiler(executor)).run(made)
    return _worst(witness, made, expected)


def spoiler(executor: TorchExecutor) -> Callable[[int, int], None]:
    """Overwrites a block that nobody holds, so that whoever still reads it shows."""
    layout = executor.arena.layout

    def spoil(group: int, slot: int) -> None:
        start = layout.address(group, slot)
        executor.arena.bytes[start : start + layout.groups[group].block_bytes].fill_(SPOILT)

    return spoil


def _build(model_class: type[PreTrainedModel], config: Any, attention: str | None, seed: int) -> PreTrainedModel:
    """A tiny model in float32, with weights from `seed`; rope fixed for a context past its switch."""
    config = copy.deepcopy(config)
    if attention is not None:
        config._attn_implementation = attention
    state = torch.get_rng_state()
    disabled = logging.root.manager.disable
    try:
        torch.manual_seed(seed)
        logging.disable(logging.WARNING)
        model = model_class(config).to(torch.float32).eval()
    finally:
        torch.set_rng_state(state)
        logging.disable(disabled)
    enliven(model, seed)
    fix_rope(model, TINY_CONTEXT if _switches(config) else ROPE_SWITCH)
    return model


def _switches(config: Any) -> bool:
    """Whether its rope may be fixed past the switch (longrope), or has to stay below (dynamic)."""
    return "dynamic" not in str(getattr(config.get_text_config(), "rope_parameters", ""))


def _reference_logits(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] by one forward of the whole text, with no cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([text]), use_cache=False, return_dict=True).logits[0]
    return logits.float()


def _worst(witness: _Witness, made: list[Subject], expected: list[torch.Tensor]) -> float:
    worst = 0.0
    for subject, logits in zip(made, expected, strict=True):
        if subject.failure is not None:
            return float("inf")
        for position in range(subject.request.prompt_tokens, subject.request.prompt_tokens + WANTED):
            right = logits[position - 1]
            mine = witness.seen[subject.sequence_id, position]
            difference = float((mine - right).abs().max() / right.abs().max().clamp_min(1e-6))
            worst = max(worst, difference if np.isfinite(difference) else float("inf"))
    return worst
