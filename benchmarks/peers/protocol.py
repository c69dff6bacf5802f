"""What the comparison and an engine's process say to each other: one JSON object a line, both ways.

Standard library only, since it runs in every peer's own environment. Invariant: an engine's prints can
never be taken for an answer, because answers leave by a descriptor that only `Channel` holds.

    >> {"do": "load", ...Setup}      << {"settings": {...}}
    >> {"do": "prepare", "jobs": …}  << {}                      not timed
    >> {"do": "play", "jobs": …}     << {"seconds": …, ...}     timed by the engine's own process
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """Token ids in, and exactly so many out: greedy, end of sequence ignored."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Setup:
    """How every engine is set, so that they are set alike."""

    checkpoint: str
    dtype: str
    """fp32 or bf16: of weights, activations and KV cache; int8: of weights alone."""
    threads: int
    sequences: int
    longest: int
    """Positions of the longest sequence."""
    kv_tokens: int
    """Positions that all requests of the largest workload need together, in whole blocks."""
    kv_bytes: int
    """The same in larger blocks and in bytes, for engines that are told bytes."""
    batched_tokens: int
    """Tokens of one forward pass at most."""
    options: dict[str, Any]
    """Of this engine alone, as written on the command line."""
    tools: dict[str, str]
    """Paths to programs that the engine's environment holds beside its Python."""


@dataclass(frozen=True, slots=True)
class Played:
    """One workload done. Seconds from the moment the first request was submitted."""

    seconds: float
    outputs: list[list[int]]
    first_s: list[float]
    """When each request's first token was there."""
    last_s: list[float]


def flag(options: dict[str, Any], name: str) -> bool:
    """An option that is off unless it was written."""
    return options.get(name, "off") in ("on", "true", True)


class Channel:
    """The engine's end. Whatever is printed from now on goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._asked = os.fdopen(os.dup(0), encoding="utf-8")

    def commands(self) -> Any:
        for line in self._asked:
            yield json.loads(line)

    def answer(self, value: Any) -> None:
        plain = asdict(value) if isinstance(value, Played) else value
        self._answers.write(json.dumps(plain) + "\n")
        self._answers.flush()
