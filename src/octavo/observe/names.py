"""The names on the wire: every metric octavo exposes, with its type, labels, unit and meaning.

One table for the exposition, the page in the docs and their test. Owns no value. A name is here
when this engine can count it; what belongs to parts that it does not have yet is in `ABSENT`, so
that a zero always means "counted, and there was none".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from octavo.memory.values import DEVICE
from octavo.scheduling.events import FinishReason, RefusalReason, Resource

PREFIX = "octavo_"
Kind = Literal["gauge", "counter", "histogram"]

CAUSES = ("reserved", "internal", "padding", "external")
KINDS = ("prefill", "decode")
PARTS = ("schedule", "execute", "commit")
ACTIONS = ("recompute",)
TIERS = (DEVICE,)
MISSES = ("absent", "incomplete", "no_room")
"""Why a position that was looked up is computed all the same."""
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)
REFUSAL_REASONS: tuple[str, ...] = get_args(RefusalReason)
RESOURCES: tuple[str, ...] = get_args(Resource)
BLOCKED_BY = ("kv_blocks", "token_budget", "sequence_limit", "none")
"""What can keep a waiting sequence out; `none`: nothing that the last step knew of."""


@dataclass(frozen=True, slots=True)
class Name:
    section: str
    name: str
    """Without the prefix."""
    kind: Kind
    meaning: str
    unit: str = ""
    label: str = ""
    """Besides `model`, which every series has; of two labels, both, with a space between."""
    values: tuple[str, ...] = ()
    """Of the label, where they are known beforehand: all of them are exposed from the start. Of two, `one/other`."""
    policy: bool = False
    """Whether the series also says which policy decided (label `policy`)."""

    @property
    def full(self) -> str:
        return PREFIX + self.name

    @property
    def labels(self) -> tuple[str, ...]:
        return ("model", *self.label.split(), *(("policy",) if self.policy else ()))

    def label_values(self, value: str) -> list[str]:
        """What a value says of each label besides `model` and `policy`."""
        return value.split("/") if " " in self.label else [value] if self.label else []


def _memory() -> tuple[Name, ...]:
    def gauge(name: str, meaning: str, unit: str, label: str = "", values: tuple[str, ...] = ()) -> Name:
        return Name("memory", name, "gauge", meaning, unit, label, values)

    return (
        gauge("kv_capacity_bytes", "size of the pool, which all groups share: slabs x bytes of a slab", "bytes"),
        gauge("kv_bytes_used", "bytes of held blocks: referenced by a sequence, or touched by a step in flight",
              "bytes", "group"),
        gauge("kv_bytes_shared", "bytes saved by sharing: (sequences that have it - 1) x bytes of each block", "bytes",
              "group"),
        gauge("kv_blocks_total", "blocks of this group that the pool holds if no other group takes a slab", "blocks",
              "group"),
        gauge("kv_blocks_free", "blocks of this group that can be taken now: unreferenced, cached ones included",
              "blocks", "group"),
        gauge("kv_blocks_cached", "of the free blocks, those whose content can still be found", "blocks", "group"),
        gauge("kv_metadata_bytes", "host memory of block tables, slot states and the owners of slabs", "bytes"),
        gauge("kv_waste_bytes", "bytes that are held, or unusable, and hold no computed position", "bytes", "cause",
              CAUSES),
        gauge("live_cached_tokens", "positions whose state is kept, summed over live sequences, a shared one once for "
              "each", "tokens"),
    )  # fmt: skip


def _sequences() -> tuple[Name, ...]:
    def counter(
        name: str, meaning: str, unit: str = "sequences", label: str = "", values: tuple[str, ...] = (),
        policy: bool = False,
    ) -> Name:  # fmt: skip
        return Name("sequences", name, "counter", meaning, unit, label, values, policy)

    return (
        Name("sequences", "active_sequences", "gauge", "sequences that are seated and have not ended", "sequences"),
        Name("sequences", "waiting_sequences", "gauge", "sequences that wait for a seat, by what kept the first of "
             "them out of the last step", "sequences", "reason", BLOCKED_BY),
        counter("admissions_total", "sequences seated for the first time", policy=True),
        counter("resumes_total", "times a preempted sequence was seated again", policy=True),
        counter("refusals_total", "requests turned away", "requests", "reason", REFUSAL_REASONS),
        counter("finished_total", "sequences that ended, by how", label="reason", values=FINISH_REASONS),
        counter("aborted_total", "sequences ended by their client: `finished_total` with reason `abort`"),
        counter("preemptions_total", "times a running sequence gave way", "preemptions", "action", ACTIONS, True),
        counter("recomputed_tokens_total", "positions that resumed sequences have to compute again", "tokens"),
        counter("admission_blocked_seconds_total", "time in which something waited and could not be admitted, by what "
                "kept it out", "seconds", "reason", BLOCKED_BY),
    )  # fmt: skip


def _reuse() -> tuple[Name, ...]:
    def counter(name: str, meaning: str, unit: str, label: str = "", values: tuple[str, ...] = ()) -> Name:
        return Name("reuse", name, "counter", meaning, unit, label, values)

    return (
        counter("prefix_cache_queries_total", "positions looked up by sequences that were seated", "tokens"),
        counter("prefix_cache_hits_total", "of those, positions that were not computed because their state was kept",
                "tokens", "tier", TIERS),
        counter("prefix_cache_misses_total", "of those, positions that had to be computed, by why", "tokens",
                "tier reason", tuple(f"{tier}/{reason}" for tier in TIERS for reason in MISSES)),
        counter("evictions_total", "kept blocks given up: for room, for a later snapshot, or by a reset", "blocks",
                "tier", TIERS),
    )  # fmt: skip


def _steps() -> tuple[Name, ...]:
    def histogram(name: str, meaning: str, unit: str, label: str = "", values: tuple[str, ...] = ()) -> Name:
        return Name("steps", name, "histogram", meaning, unit, label, values)

    return (
        histogram("batch_size_by_iteration", "sequences in a step", "sequences"),
        histogram("batch_tokens_by_iteration", "positions computed in a step; decode: one position past the prompt",
                  "tokens", "kind", KINDS),
        histogram("step_seconds", "where a step's time went: deciding it, in the executor, learning of it", "seconds",
                  "part", PARTS),
        Name("steps", "device_busy_ratio", "gauge", "share of the last 30 seconds in which the executor computed",
             "0 to 1"),
        Name("steps", "limiting_resource_steps_total", "counter", "steps, by what bound them; compute: nothing waited",
             "steps", "resource", RESOURCES),
    )  # fmt: skip


def _latency() -> tuple[Name, ...]:
    return tuple(
        Name("latency", name, "histogram", meaning, "seconds")
        for name, meaning in (
            ("time_to_first_token_seconds", "arrival to first token (TTFT)"),
            (
                "time_per_output_token_seconds",
                "(last token - first token) / (tokens - 1) of a finished sequence (TPOT)",
            ),
            ("inter_token_latency_seconds", "between two tokens of a sequence that follow each other (ITL)"),
            ("e2e_request_latency_seconds", "arrival to the end of a finished sequence"),
            ("queue_seconds", "arrival to first scheduling"),
            ("prefill_seconds", "first scheduling to first token"),
            ("decode_seconds", "first token to the end of a finished sequence"),
        )
    )


NAMES: tuple[Name, ...] = (*_memory(), *_sequences(), *_reuse(), *_steps(), *_latency())

ABSENT: Mapping[str, str] = {
    "host_offload_bytes_total": "tiers",
    "host_promotions_total": "tiers",
    "host_promotion_bytes_total": "tiers",
    "promotion_seconds": "tiers",
    "transfer_stall_seconds": "tiers",
    "effective_capacity_gained_tokens": "tiers",
}
"""Names kept for parts that do not exist yet, with the part."""


def table(section: str) -> str:
    """The names of a section as a Markdown table: what `docs/metrics.md` prints."""
    lines = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for name in NAMES:
        if name.section == section:
            labels = ", ".join(f"`{label}`" for label in name.labels)
            lines.append(f"| `{name.full}` | {name.kind} | {labels} | {name.unit} | {name.meaning} |")
    return "\n".join(lines)
