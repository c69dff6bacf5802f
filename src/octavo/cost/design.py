"""The shapes of steps that a calibration measures: a designed grid, and steps drawn between its points.

    decodes   1, 2, 3, 4, 6, 8, ... sequences, all at one context and at contexts of many lengths
    chunks    2, 4, 8, ... tokens of a prompt, at its beginning and far into it
    prompts   several short prompts in one step
    mixed     a chunk beside sequences that decode

Owns what is measured, not how. Nothing here depends on how a machine computes: the fit finds out where prices change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from octavo.errors import ConfigError

_LEAST_CONTEXT = 16
_MIXED = 24


@dataclass(frozen=True, slots=True)
class Scene:
    """A step to bring about: sequences that decode, and chunks of others that are in their prompts."""

    decodes: tuple[int, ...] = ()
    """Context of each."""
    chunks: tuple[int, ...] = ()
    """Tokens of each."""
    start: int = 0
    """Where the first chunk begins; the others begin at 0."""
    ends: bool = True
    """Whether the chunks end their prompts, and yield a token each."""

    @property
    def tokens(self) -> int:
        """Positions that its sequences hold once it is over."""
        return sum(self.decodes) + len(self.decodes) + self.start + sum(self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """How far to measure."""

    max_batch: int
    max_context: int
    max_step_tokens: int
    pool_tokens: int
    """Positions that all sequences together may hold."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        for name in ("max_context", "pool_tokens"):
            if getattr(self, name) < 2 * _LEAST_CONTEXT:
                raise ConfigError(name, getattr(self, name), f"must be at least {2 * _LEAST_CONTEXT} tokens")


def design(within: Range, seed: int = 0) -> list[Scene]:
    """Every scene to measure, in no particular order. The same range and seed give the same scenes."""
    generator = np.random.default_rng(seed)
    scenes = [
        *_decodes(within, generator),
        *_chunks(within, generator),
        *_prompts(within, generator),
        *_mixed(within, generator),
    ]
    fitting = [_fitted(scene, within) for scene in scenes]
    return list(dict.fromkeys(scene for scene in fitting if scene is not None))


def ladder(most: int, *, first: int = 1) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `most`, which is one of them."""
    steps = sorted({round(first * 2**power) for power in range(24)} | {3 * first * 2**power for power in range(24)})
    return [step for step in steps if step < most] + [most]


def _decodes(within: Range, generator: np.random.Generator) -> Iterator[Scene]:
    sizes = ladder(within.max_batch)
    # Contexts in strata, dealt out at random: no size sees only short ones.
    for shares in (_strata(len(sizes), generator), _strata(len(sizes), generator)):
        for size, share in zip(sizes, shares, strict=True):
            yield Scene(decodes=(_context(within, share),) * size)
    for size in sizes:
        yield Scene(decodes=tuple(_context(within, share) for share in generator.random(size)))


def _chunks(within: Range, generator: np.random.Generator) -> Iterator[Scene]:
    sizes = [size for size in ladder(within.max_step_tokens, first=2) if size > 1]
    for size, share in zip(sizes, _strata(len(sizes), generator), strict=True):
        yield Scene(chunks=(size,), ends=bool(generator.random() < 0.5))
        yield Scene(chunks=(size,), start=_context(within, share), ends=bool(generator.random() < 0.5))


def _prompts(within: Range, generator: np.random.Generator) -> Iterator[Scene]:
    for total in ladder(within.max_step_tokens, first=16):
        many = int(generator.integers(2, max(3, min(within.max_batch, total // 4) + 1)))
        if total < 2 * many or many > within.max_batch:
            continue
        cuts = np.sort(generator.choice(np.arange(1, total // 2), many - 1, replace=False)) * 2
        sizes = np.diff(np.concatenate([[0], cuts, [total]]))
        yield Scene(chunks=tuple(int(size) for size in sizes))


def _mixed(within: Range, generator: np.random.Generator) -> Iterator[Scene]:
    if within.max_batch < 2 or within.max_step_tokens < 4:
        return
    batches, sizes = _strata(_MIXED, generator), _strata(_MIXED, generator)
    for batch, size in zip(batches, sizes, strict=True):
        rows = max(1, round((within.max_batch - 1) ** float(batch)))
        chunk = max(2, round((within.max_step_tokens - rows) ** float(size)) if within.max_step_tokens > rows else 2)
        yield Scene(
            decodes=tuple(_context(within, share) for share in generator.random(rows)),
            chunks=(chunk,),
            start=0 if generator.random() < 0.5 else _context(within, float(generator.random())),
            ends=bool(generator.random() < 0.5),
        )


def _strata(count: int, generator: np.random.Generator) -> list[float]:
    """`count` numbers below 1, one in each of as many equal parts, in random order."""
    return [float(share) for share in (generator.permutation(count) + generator.random(count)) / count]


def _context(within: Range, share: float) -> int:
    """Between the least context and the most, even in its logarithm."""
    grown: float = _LEAST_CONTEXT * (within.max_context / _LEAST_CONTEXT) ** share
    return round(grown)


def _fitted(scene: Scene, within: Range) -> Scene | None:
    """The same with contexts cut to what a sequence and the pool hold; None where that leaves nothing."""
    if len(scene.decodes) + len(scene.chunks) > within.max_batch + 1:
        return None
    start = max(0, min(scene.start, within.max_context - max(scene.chunks, default=0)))
    scene = replace(scene, start=start)
    if max(scene.chunks, default=0) > within.max_context:
        return None
    if scene.tokens <= within.pool_tokens:
        return scene
    room = within.pool_tokens - len(scene.decodes) - sum(scene.chunks)
    held = scene.tokens - len(scene.decodes) - sum(scene.chunks)
    if room < _LEAST_CONTEXT * (len(scene.decodes) + 1):
        return None
    share = room / held
    decodes = tuple(max(_LEAST_CONTEXT, int(context * share)) for context in scene.decodes)
    cut = replace(scene, decodes=decodes, start=int(start * share))
    return cut if cut.tokens <= within.pool_tokens else None
