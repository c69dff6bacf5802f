"""`Deployment`: what was decided from what was asked, each field with its reason.

Pure arithmetic over `Config`, `ModelGeometry` and `Facts` (what the device grants and what is
loaded on it). Nothing is allocated here; whoever builds the engine builds it from this value.
Invariant: the ledger sums exactly to its total, and its KV line is slabs x slab bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.config import Config
from octavo.geometry.dtypes import Dtype
from octavo.geometry.model import ModelGeometry
from octavo.memory.layout import BlockOrder, Layout, largest
from octavo.planner.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is true of the device and the checkpoint before anything is decided."""

    device: str
    """`cpu`, `cuda` or `cuda:N`."""
    total_bytes: int
    """Memory granted: of the GPU, or of the machine or its control group."""
    available_bytes: int
    """Of that, free now."""
    weights_bytes: int
    weights_dtype: Dtype
    """In which the model computes."""
    weights_loaded: bool = False
    """Whether `available_bytes` was read with the weights already in place."""
    process_bytes: int = 0
    """What this process held on the device before the weights."""
    cores: int = 1
    granted_by: str = "the device"
    block_order: BlockOrder = "tokens_heads"
    """What the attention kernels read."""
    attention_backend: str = ""
    """Which they are; empty where no model is loaded."""
    attention_reason: str = ""
    linear_backend: str = ""
    """What multiplies by the weights, likewise."""
    linear_reason: str = ""
    threads: str = ""
    """How many compute on a CPU, likewise."""
    threads_reason: str = ""

    @property
    def free_bytes(self) -> int:
        """Free once the weights are in place."""
        return self.available_bytes - (0 if self.weights_loaded else self.weights_bytes)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the start table."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    config: Config
    geometry: ModelGeometry
    facts: Facts
    layout: Layout
    slabs: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    ledger: Ledger
    host_slabs: int = 0
    """Of the tier below the device; 0: there is none."""
    limit: str
    """Which limit fixed the size of the pool."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(field, why), for every field above that was decided."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def kv_dtype(self) -> Dtype:
        return self.geometry.kv_dtype

    @property
    def block_size(self) -> int:
        return self.config.cache.block_size

    @property
    def kv_bytes(self) -> int:
        return self.slabs * self.layout.slab_bytes

    @property
    def most_blocks(self) -> tuple[tuple[str, int], ...]:
        """(group, its blocks if it had the whole pool). Of a one-group model: all there are."""
        return tuple((group.name, self.slabs * group.blocks_per_slab) for group in self.layout.groups)

    @property
    def kv_tokens(self) -> int:
        """Positions that one sequence alone could hold."""
        return tokens_in(self.layout, self.slabs, self.config)

    @property
    def device(self) -> str:
        return self.facts.device

    def reason(self, name: str) -> str:
        return dict(self.reasons)[name]

    def requests_in_pool(self) -> tuple[tuple[int, int, int], ...]:
        """(length, blocks, sequences that the pool holds) at three lengths: a block, a quarter of the longest sequence,
        and the longest."""
        lengths = sorted({min(self.block_size, self.max_model_len), -(-self.max_model_len // 4), self.max_model_len})
        step = step_tokens(self.config, self.max_num_batched_tokens)
        counts = [self.layout.blocks_for(n, step) for n in lengths]
        return tuple((n, sum(count), self._sequences_of(count)) for n, count in zip(lengths, counts, strict=True))

    def _sequences_of(self, blocks: list[int]) -> int:
        """How many sequences of so many blocks in each group the slabs hold together."""
        per_slab = [group.blocks_per_slab for group in self.layout.groups]

        def fits(sequences: int) -> bool:
            return sum(-(-sequences * n // each) for n, each in zip(blocks, per_slab, strict=True)) <= self.slabs

        return largest(0, self.slabs * max(per_slab), fits)

    def rows(self) -> tuple[Row, ...]:
        """The start table: what was decided and why, then the ledger, then what follows from them."""
        return (*self._decided_rows(), *self._ledger_rows(), *self._pool_rows())

    def _decided_rows(self) -> tuple[Row, ...]:
        g, cache, scheduler = self.geometry, self.config.cache, self.config.scheduler
        backend = self.facts.attention_backend
        values = {
            "device": self.device,
            "geometry": f"{g.num_layers} layers, {g.attention_mode}",
            **({"threads": self.facts.threads} if self.facts.threads else {}),
            **({"attention_backend": backend} if backend else {}),
            **({"linear_backend": self.facts.linear_backend} if self.facts.linear_backend else {}),
            "bytes per token": f"{g.bytes_per_token:,}",
            "kv_cache_dtype": str(self.kv_dtype),
            "block_size": str(self.block_size),
            "KV cache": f"{self.kv_bytes:,} B",
            "blocks": self._blocks_in_words(),
            "max_model_len": f"{self.max_model_len:,}",
            "max_num_seqs": f"{self.max_num_seqs:,}",
            "max_num_batched_tokens": f"{self.max_num_batched_tokens:,}",
            "allocation": cache.allocation,
            "batching": scheduler.batching,
            "admission": scheduler.admission,
            "preemption": scheduler.preemption,
            "reuse": cache.reuse,
            **self._tier_values(),
        }
        why = dict(self.reasons)
        return tuple(Row(name, value, why.get(name, "")) for name, value in values.items())

    def _blocks_in_words(self) -> str:
        counts = {count for _, count in self.most_blocks}
        if len(counts) == 1:
            return f"{counts.pop():,}"
        return " or ".join(f"{count:,} {name}" for name, count in self.most_blocks)

    def _tier_values(self) -> dict[str, str]:
        cache = self.config.cache
        if not self.host_slabs:
            return {}
        values = {"host tier": f"{self.host_slabs * self.layout.slab_bytes:,} B", "placement": cache.placement}
        if cache.disk_path is not None:
            values["disk tier"] = f"{cache.disk_bytes:,} B in {cache.disk_path}"
        return values

    def _ledger_rows(self) -> tuple[Row, ...]:
        rows = []
        for line in self.ledger.lines:
            measured = "" if line.measured_bytes is None else f" (measured {line.measured_bytes:,} B)"
            rows.append(Row(f"ledger: {line.label}", f"{line.predicted_bytes:,} B{measured}", line.basis))
        rows.append(
            Row("ledger: total", f"{self.ledger.total_bytes:,} B", "weights + runtime + KV + headroom, summed exactly")
        )
        return tuple(rows)

    def _pool_rows(self) -> tuple[Row, ...]:
        pool = Row(
            "pool",
            f"{self.kv_bytes:,} B = {self.slabs:,} x {self.layout.slab_bytes:,} B",
            f"one slab holds {self.block_size} positions of {self.geometry.bytes_per_token:,} B",
        )
        if len(self.layout.groups) > 1:
            pool = Row(pool.name, pool.value, "slabs are shared by groups of different block bytes")
        lengths = tuple(
            Row(
                f"blocks of {n:,} tokens",
                f"{blocks:,}",
                f"the pool holds {sequences:,} such sequences" if sequences else "the pool holds one, in smaller steps",
            )
            for n, blocks, sequences in self.requests_in_pool()
        )
        return (pool, *lengths)


def tokens_in(layout: Layout, slabs: int, config: Config) -> int:
    """The most positions of one sequence that `slabs` slabs hold, when nothing else is there."""
    return layout.most_tokens(slabs, step_tokens(config, 1))


def step_tokens(config: Config, tokens: int) -> int | None:
    """`tokens`, or None where nothing is given up while a sequence runs: contiguous runs are kept whole."""
    return tokens if config.cache.allocation == "paged" else None
