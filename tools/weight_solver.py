"""Explains a dimension that was seen at several sizes as a sum of products of config fields.

Used by `make_weight_shapes.py`. The shortest explanation that holds at every size wins; a dimension
without one raises `Unexplained`.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

LAYERS = "num_hidden_layers"


class Unexplained(Exception):
    """A class that these formulas cannot describe."""


class Solver:
    """Finds a dimension as a constant, or as a sum of at most four products of config fields."""

    def __init__(self, atoms: list[dict[str, int]]) -> None:
        names = [name for name in atoms[0] if all(name in found for found in atoms)]
        names = [name for name in names if name == LAYERS or len({found[name] for found in atoms}) > 1]
        self.products: dict[tuple[int, ...], str] = {}
        for size in (1, 2, 3):
            for chosen in combinations_with_replacement(sorted(names, key=_rank), size):
                for factor in (1, 2, 3, 4):
                    values = tuple(factor * _product(found, chosen) for found in atoms)
                    if LAYERS in chosen and (size == 1 or factor > 1):
                        continue
                    text = "*".join(chosen) if factor == 1 else f"{factor}*{'*'.join(chosen)}"
                    if size < 3 or factor == 1:
                        self.products.setdefault(values, text)
        for chosen in (name for name in names if name != LAYERS):
            for divisor in (2, 4):
                if all(found[chosen] % divisor == 0 for found in atoms):
                    self.products.setdefault(tuple(found[chosen] // divisor for found in atoms), f"{chosen}/{divisor}")
        self.simple = {v: t for v, t in self.products.items() if t.count("*") <= (2 if t[0].isdigit() else 1)}
        self.known: dict[tuple[int, ...], str] = {}

    def dimension(self, values: tuple[int, ...]) -> str:
        if values not in self.known:
            self.known[values] = self._solve(values)
        return self.known[values]

    def _solve(self, values: tuple[int, ...]) -> str:
        if len(set(values)) == 1 and values not in self.simple:
            return str(values[0])
        if values in self.products:
            return self.products[values]
        best: str | None = None
        for first, text in self.simple.items():
            rest = tuple(v - f for v, f in zip(values, first, strict=True))
            if min(rest) > 0 and rest in self.products:
                best = _shorter(best, f"{text}+{self.products[rest]}")
            elif min(rest) > 0 and len(set(rest)) == 1 and rest[0] <= 8:
                best = _shorter(best, f"{text}+{rest[0]}")
        if best is None:
            best = self._three(values)
        if best is None:
            raise Unexplained(f"a dimension of {values}")
        return best

    def _three(self, values: tuple[int, ...]) -> str | None:
        best: str | None = None
        simple = list(self.simple.items())
        for i, (first, text) in enumerate(simple):
            if any(f >= v for f, v in zip(first, values, strict=True)):
                continue
            for second, other in simple[i:]:
                rest = tuple(v - f - s for v, f, s in zip(values, first, second, strict=True))
                if min(rest) > 0 and rest in self.simple:
                    best = _shorter(best, f"{text}+{other}+{self.simple[rest]}")
        return best


def _rank(name: str) -> tuple[int, str]:
    order = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return (order.index(name) if name in order else len(order), name)


def _product(found: dict[str, int], chosen: tuple[str, ...]) -> int:
    result = 1
    for name in chosen:
        result *= found[name]
    return result


def _shorter(best: str | None, text: str) -> str:
    return text if best is None or (len(text), text) < (len(best), best) else best
