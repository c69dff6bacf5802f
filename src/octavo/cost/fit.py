"""Seconds of each term from measured steps: non-negative least squares on relative errors, by cross-validation.

Owns the choice of terms. It begins with one of each quantity and, while the error on steps that were left out falls
by enough, lets the price of a further token, or of a further row of logits, change at one more bound. Coefficients
are never negative, so that more tokens or a longer context never make a prediction shorter. Pure numpy; the same
points give the same fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cost.laws import Law
from octavo.cost.step import Float64
from octavo.cost.terms import STEP, Sum, Term, by_law, split
from octavo.errors import ConfigError
from octavo.memory.values import Int64

FOLDS = 5
_WORTH = 0.03
"""A further bound must lower the error on steps left out by this share."""
_MOST_BOUNDS = 6
_SPLIT = ("tokens", "sampled")
LEAST_POINTS = 12
_REWEIGHED = 2
_EDGE = 3.0
"""Times the median error: beyond, a point's pull on the fit grows no more."""


@dataclass(frozen=True, slots=True)
class Fit:
    sum: Sum
    left_out: Float64
    """Of each point: the seconds predicted by a fit that has not seen it, nor any of its scene."""
    error: float
    """Median relative error of those."""


def nnls(matrix: Float64, wanted: Float64) -> Float64:
    """The x >= 0 that brings `matrix @ x` closest to `wanted`: active sets, after Lawson and Hanson."""
    norms = np.sqrt((matrix**2).sum(axis=0))
    norms[norms == 0] = 1.0
    scaled = matrix / norms
    columns = matrix.shape[1]
    x = np.zeros(columns)
    free = np.zeros(columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(scaled.T @ wanted).max(initial=0.0)))
    for _ in range(10 * columns):
        slope = scaled.T @ (wanted - scaled @ x)
        slope[free] = -np.inf
        if free.all() or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while free.any():
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            if trial[free].min() > 0:
                x = trial
                break
            # Go as far as all stay non-negative, and hold what has reached zero.
            falling = free & (trial <= 0)
            share = (x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)).min()
            x = x + share * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
    found: Float64 = x / norms
    return found


def base_terms(laws: Sequence[Law]) -> tuple[Term, ...]:
    """One term of each quantity."""
    kinds = [law for law in laws if law.kind != "constant"]
    terms = [Term(name) for name in (STEP, "tokens", "sampled", "chunks", "long")]
    return (*terms, *(Term(by_law(kind, law)) for law in kinds for kind in ("read", "longest", "gathered", "pairs")))


def fit_seconds(rows: Sequence[Mapping[str, Any]], seconds: Float64, scenes: Int64, laws: Sequence[Law]) -> Fit:
    """The law of `seconds` of steps with these quantities; points of one scene are left out together."""
    require_points(rows, seconds)
    fold = folds(scenes)
    terms = base_terms(laws)
    best = _cross_validated(terms, rows, seconds, fold)
    for _ in range(_MOST_BOUNDS):
        tried = [_cross_validated(other, rows, seconds, fold) for other in _next(terms, rows)]
        if not tried:
            break
        chosen = min(tried, key=lambda one: one[0])
        if chosen[0] > best[0] * (1 - _WORTH):
            break
        best, terms = chosen, chosen[2]
    return _finished(best, rows, seconds)


def fit_plain(rows: Sequence[Mapping[str, Any]], seconds: Float64, scenes: Int64, names: Sequence[str]) -> Fit:
    """The same with one term for each of these quantities and no bounds."""
    require_points(rows, seconds)
    terms = tuple(Term(name) for name in names)
    return _finished(_cross_validated(terms, rows, seconds, folds(scenes)), rows, seconds)


def require_points(rows: Sequence[Mapping[str, Any]], seconds: Float64) -> None:
    if len(rows) < LEAST_POINTS:
        raise ConfigError("points", len(rows), f"a fit needs at least {LEAST_POINTS} measured steps; give it more time")
    if not np.isfinite(seconds).all() or seconds.min() <= 0:
        raise ConfigError("seconds", float(seconds.min()), "every measured step takes more than no time")


def folds(scenes: Int64) -> Int64:
    """A fold for each point: scenes are dealt out in turn, whatever their numbers are."""
    _, places = np.unique(scenes, return_inverse=True)
    return fold_of(np.asarray(places, dtype=np.int64))


def fold_of(scenes: Int64) -> Int64:
    """By number alone: the same scene is in the same fold, whatever else was measured beside it."""
    return scenes * 7919 % 104_729 % FOLDS


_Tried = tuple[float, Float64, tuple[Term, ...]]


def _cross_validated(
    terms: tuple[Term, ...], rows: Sequence[Mapping[str, Any]], seconds: Float64, fold: Int64
) -> _Tried:
    matrix = Sum(terms, (0.0,) * len(terms)).matrix(rows)
    left_out = np.empty(len(rows))
    for one in np.unique(fold):
        out = fold == one
        kept = ~out if (~out).any() else out
        left_out[out] = matrix[out] @ _relative(matrix[kept], seconds[kept])
    left_out = np.maximum(left_out, 1e-3 * seconds)
    # The logarithm counts twice too long and half as long alike.
    return float(np.abs(np.log(left_out / seconds)).mean()), left_out, terms


_Rows = Sequence[Mapping[str, Any]]


def predicted(terms: Sequence[Term], seen: tuple[_Rows, Float64, Int64], asked: tuple[_Rows, Int64]) -> Float64:
    """Seconds of the rows `asked`, by laws with these terms of what was `seen`, each without the scenes of its fold."""
    total = Sum(tuple(terms), (0.0,) * len(terms))
    rows, seconds, scenes = seen
    known, wanted = total.matrix(rows), total.matrix(asked[0])
    known_fold, wanted_fold = fold_of(scenes), fold_of(asked[1])
    found = np.empty(len(wanted))
    for one in np.unique(wanted_fold):
        kept = known_fold != one if (known_fold != one).any() else known_fold == one
        found[wanted_fold == one] = wanted[wanted_fold == one] @ _relative(known[kept], seconds[kept])
    return found


def _relative(matrix: Float64, seconds: Float64) -> Float64:
    """Least squares of relative errors, in which what lies far outside weighs as if it were at the edge."""
    rows, wanted = matrix / seconds[:, None], np.ones(len(seconds))
    found = nnls(rows, wanted)
    for _ in range(_REWEIGHED):
        off = np.abs(rows @ found - 1)
        edge = max(_EDGE * float(np.median(off)), 1e-6)
        weights = np.sqrt(np.minimum(1.0, edge / np.maximum(off, 1e-12)))
        found = nnls(rows * weights[:, None], wanted * weights)
    return found


def _next(terms: tuple[Term, ...], rows: Sequence[Mapping[str, Any]]) -> list[tuple[Term, ...]]:
    """All ways to let one price change at one more bound: a bend, or a jump."""
    found = []
    for place, term in enumerate(terms):
        if term.quantity not in _SPLIT or term.jump:
            continue
        present = np.array([row[term.quantity] for row in rows])
        for power in range(15):
            at = 1 << power
            inside = at > term.low and (term.high is None or at < term.high)
            if not inside or not (present < at).any() or not (present > at).any():
                continue
            below, above = split(term, at)
            found.append((*terms[:place], below, above, *terms[place + 1 :]))
            jump = Term(term.quantity, at, jump=True)
            if jump not in terms:
                found.append((*terms, jump))
    return found


def _finished(best: _Tried, rows: Sequence[Mapping[str, Any]], seconds: Float64) -> Fit:
    _, left_out, terms = best
    each = _relative(Sum(terms, (0.0,) * len(terms)).matrix(rows), seconds)
    return Fit(Sum(terms, tuple(each.tolist())), left_out, float(np.median(np.abs(left_out / seconds - 1))))
