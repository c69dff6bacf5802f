"""Synthetic workloads: when requests arrive, how long they are, what they begin with alike.

Owns the arrival processes (Poisson, gamma, on/off bursts, all at once), prompts that share prefixes as a tree, and
sessions of several turns. Everything is drawn from one seed: the same seed gives the same requests.

    prefix tree, depth 2, fan 3      root ---+--- a ---+--- each prompt: root, then one of 3, then one of 3 of it,
                                             +--- b    |    then tokens of its own
                                             +--- c ---+
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from octavo.errors import ConfigError
from octavo.memory.values import Int64
from octavo.simulate.executors import NANOSECONDS
from octavo.simulate.lengths import Fixed, Lengths
from octavo.simulate.trace import HASH_IDS, MOST_NS, MOST_TOKENS, TraceRequest

LEAST_RATE = 1e-10
"""Below it one request waits a hundred years."""
MOST_VARIATION = 1e6
MOST_REQUESTS = 2**24
"""They are all drawn before the first arrives: gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """A process of arrivals. With a coefficient of variation of 1 the gamma process is the Poisson one."""

    rate: float
    """Requests a second on average; `inf` for all at once."""
    variation: float = 1.0
    """Standard deviation of the gaps over their mean: 0 is a metronome, above 1 comes in bursts."""
    on_s: float | None = None
    """Bursts: arrivals for so long, at `rate`, then none for `off_s`."""
    off_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError("rate", self.rate, "must be above 0 requests a second; inf sends all at once")
        if self.rate < LEAST_RATE:
            raise ConfigError("rate", self.rate, "spreads requests over more than a hundred years; give more")
        if self.variation != 0 and not 1 / MOST_VARIATION <= self.variation <= MOST_VARIATION:
            raise ConfigError("variation", self.variation, f"must be 0, or from {1 / MOST_VARIATION:g} to "
                                                           f"{MOST_VARIATION:g}; 1 is a Poisson process")  # fmt: skip
        if self.on_s is not None and not self.on_s > 0:
            raise ConfigError("on_s", self.on_s, "must be above 0 seconds")
        if not 0 <= self.off_s < float("inf"):
            raise ConfigError("off_s", self.off_s, "must be at least 0 seconds")

    def draw_ns(self, generator: np.random.Generator, count: int) -> Int64:
        if self.rate == float("inf"):
            return np.zeros(count, dtype=np.int64)
        if self.variation == 0:
            gaps = np.full(count, 1 / self.rate)
        else:
            shape = self.variation**-2
            gaps = generator.gamma(shape, 1 / (self.rate * shape), count)
        moments = np.cumsum(gaps)
        if self.on_s is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # what is too long is refused below
                moments = moments + np.floor(moments / self.on_s) * self.off_s
        if not moments[-1] <= MOST_NS / NANOSECONDS:
            raise ConfigError("rate", self.rate, f"spreads {count} requests over more than a hundred years; give more")
        ns: Int64 = np.rint(moments * NANOSECONDS).astype(np.int64)
        return ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """What prompts begin with: a path from the root, one of `fan` branches at each of `depth` levels."""

    block_tokens: int = 512
    root_blocks: int = 1
    depth: int = 0
    fan: int = 2
    level_blocks: int = 1

    def __post_init__(self) -> None:
        for name in ("block_tokens", "fan", "level_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        for name in ("root_blocks", "depth"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be at least 0")
        tokens = (self.root_blocks + self.depth * self.level_blocks) * self.block_tokens
        if tokens > MOST_TOKENS:
            raise ConfigError("prefix", tokens, f"prompts begin alike by at most {MOST_TOKENS} tokens")
        blocks, nodes = self.root_blocks, 1
        for _ in range(self.depth):
            nodes *= self.fan
            blocks += nodes * self.level_blocks
            if blocks > HASH_IDS:
                raise ConfigError("fan", self.fan, f"makes more than {HASH_IDS} blocks of a tree so deep; give less")

    def path(self, generator: np.random.Generator) -> tuple[int, ...]:
        """Hash ids of one prompt's shared start."""
        ids = list(range(self.root_blocks))
        node, base = 0, self.root_blocks
        for level in range(self.depth):
            node = node * self.fan + int(generator.integers(self.fan))
            ids.extend(base + node * self.level_blocks + block for block in range(self.level_blocks))
            base += self.fan ** (level + 1) * self.level_blocks
        return tuple(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    requests: int
    arrivals: Arrivals = field(default_factory=lambda: Arrivals(rate=1.0))
    input_tokens: Lengths = field(default_factory=lambda: Fixed(512))
    """With a prefix tree, of what comes after the shared start."""
    output_tokens: Lengths = field(default_factory=lambda: Fixed(128))
    max_tokens: int | None = None
    """Declared by every request."""
    prefixes: PrefixTree | None = None
    turns: Lengths | None = None
    """Turns of a session; a turn's prompt is all that was said before and `input_tokens` more."""
    think_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise ConfigError("requests", self.requests, f"must be at least 1, and at most {MOST_REQUESTS:,}")
        if not 0 <= self.think_s <= MOST_NS / NANOSECONDS:
            raise ConfigError("think_s", self.think_s, "must be at least 0 seconds, and no hundred years")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MOST_TOKENS:
            raise ConfigError("max_tokens", self.max_tokens, f"must be from 1 to {MOST_TOKENS}")
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "must be at least 0")

    def draw(self) -> tuple[TraceRequest, ...]:
        """The requests, in order of arrival; later turns of a session arrive with it and wait for their turn."""
        generator = np.random.default_rng(self.seed)
        count = self.requests
        turns = np.ones(count, dtype=np.int64) if self.turns is None else self.turns.draw(generator, count)
        sessions = int(np.searchsorted(np.cumsum(turns), count) + 1)
        arrivals = self.arrivals.draw_ns(generator, sessions).tolist()
        inputs = self.input_tokens.draw(generator, count).tolist()
        outputs = self.output_tokens.draw(generator, count).tolist()
        made: list[TraceRequest] = []
        for session in range(sessions):
            shared = () if self.prefixes is None else self.prefixes.path(generator)
            block = 0 if self.prefixes is None else self.prefixes.block_tokens
            said = len(shared) * block
            for turn in range(min(int(turns[session]), count - len(made))):
                number = len(made)
                said += inputs[number]
                entry = TraceRequest(
                    arrival_ns=arrivals[session],
                    input_tokens=said,
                    output_tokens=outputs[number],
                    max_tokens=self.max_tokens,
                    hash_ids=shared,
                    hash_block=block,
                )
                if self.turns is not None:
                    think = round(self.think_s * NANOSECONDS) if turn else 0
                    entry = replace(entry, session=f"s{session}", think_ns=think)
                made.append(entry)
                said += outputs[number]
        return tuple(made)
