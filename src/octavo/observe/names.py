"""The names on the wire: every metric octavo exposes, with its type, labels, unit and meaning.

One table for the exposition, the page in the docs and their test. Owns no value. `names_of` leaves out
what an engine without tiers below the device cannot count, and `ABSENT` says what no engine can, so
that a zero always means "counted, and there was none".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from octavo.memory.transfers import Route
from octavo.memory.values import DEVICE, DISK, HOST, TIERS
from octavo.scheduling.events import FinishReason, RefusalReason, Resource

PREFIX = "octavo_"
Kind = Literal["gauge", "counter", "histogram"]

CAUSES = ("reserved", "internal", "padding", "external")
KINDS = ("prefill", "decode")
PARTS = ("schedule", "execute", "commit")
ACTIONS = ("recompute", "offload")
BELOW = (HOST, DISK)
ROUTES: tuple[Route, ...] = get_args(Route)
FAILURES = (
    *("timed_out", "lost_completion", "not_begun", "error"),
    *("absent", "wrong_version", "wrong_fingerprint", "wrong_layout", "wrong_key", "wrong_length", "truncated"),
    *("bad_header", "bad_checksum", "io_error", "disk_full", "short_write", "no_room", "busy", "closed"),
)
"""Why a block was not copied: what a mover says, then what a store on disk says."""
MISSES = ("absent", "incomplete", "no_room")
"""Why a position that was looked up is computed all the same, before anything is copied."""
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
    needs: str = DEVICE
    """The tier without which there is nothing to count."""

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
        gauge("kv_metadata_bytes", "host memory of block tables, slot states, owners of slabs and, about, of the "
              "prefix directory", "bytes"),
        gauge("kv_waste_bytes", "bytes that are held, or unusable, and hold no computed position", "bytes", "cause",
              CAUSES),
        gauge("live_cached_tokens", "positions whose state is kept, summed over live sequences, a shared one once for "
              "each", "tokens"),
    )  # fmt: skip


def failure_class(reason: str) -> str:
    """One of `FAILURES`: whatever else a reason says is for a log."""
    return reason if reason in FAILURES else "error"


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
        Name("sequences", "suspended_sequences", "gauge", "of the waiting ones, those whose state is kept as it was",
             "sequences", needs=HOST),
        Name("sequences", "loading_sequences", "gauge", "of the active ones, those that wait for copies to the device",
             "sequences", needs=HOST),
        counter("admissions_total", "sequences seated for the first time", policy=True),
        counter("resumes_total", "times a sequence was seated again", policy=True),
        counter("refusals_total", "requests turned away", "requests", "reason", REFUSAL_REASONS),
        counter("finished_total", "sequences that ended, by how", label="reason", values=FINISH_REASONS),
        counter("aborted_total", "sequences ended by their client: `finished_total` with reason `abort`"),
        counter("preemptions_total", "times a running sequence gave way", "preemptions", "action", ACTIONS, True),
        Name("sequences", "restarts_total", "counter", "times a seated sequence went back to the queue because what it "
             "waited for did not come", "sequences", "reason", FAILURES, needs=HOST),
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
                "tier reason", (*(f"{DEVICE}/{reason}" for reason in MISSES),
                                *(f"{tier}/{reason}" for tier in BELOW for reason in FAILURES))),
        counter("evictions_total", "kept blocks given up: for room, for a later snapshot, or by a reset", "blocks",
                "tier", TIERS),
        Name("reuse", "pinned_tokens", "gauge", "positions of all pins, those of a shared start once", "tokens"),
        counter("broken_pins_total", "pinned blocks given up because nothing else was left to give", "blocks", "tier",
                (DEVICE, HOST)),
    )  # fmt: skip


def _tiers() -> tuple[Name, ...]:
    def gauge(name: str, meaning: str) -> Name:
        return Name("tiers", name, "gauge", meaning, "bytes", "tier", BELOW, needs=HOST)

    def counter(name: str, meaning: str, unit: str, label: str = "", values: tuple[str, ...] = ()) -> Name:
        return Name("tiers", name, "counter", meaning, unit, label, values, needs=HOST)

    def histogram(name: str, meaning: str) -> Name:
        return Name("tiers", name, "histogram", meaning, "seconds", needs=HOST)

    return (
        gauge("tier_capacity_bytes", "size of the tier"),
        gauge("tier_bytes_used", "bytes of blocks that a sequence or a copy needs there"),
        gauge("tier_bytes_cached", "bytes of the other blocks that can be found there"),
        counter("host_offload_bytes_total", "bytes copied from the device to the host", "bytes"),
        counter("host_promotions_total", "blocks copied from the host to the device", "blocks"),
        counter("host_promotion_bytes_total", "bytes of those", "bytes"),
        histogram("promotion_seconds", "a batch of such copies, from its start to its end"),
        histogram("transfer_stall_seconds", "from a sequence's seat until all that it started from had come, or would "
                  "not"),
        counter("transfer_bytes_total", "bytes copied between two tiers, by the way they went", "bytes", "route",
                ROUTES),
        counter("transfer_seconds_total", "time in which copies ran", "seconds", "route", ROUTES),
        counter("transfer_failures_total", "blocks that did not arrive, by why", "blocks", "route reason",
                tuple(f"{route}/{reason}" for route in ROUTES for reason in FAILURES)),
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


NAMES: tuple[Name, ...] = (*_memory(), *_sequences(), *_reuse(), *_tiers(), *_steps(), *_latency())

_NEEDS: Mapping[str, str] = {
    HOST: HOST, DISK: DISK, "offload": HOST, "demote": HOST, "promote": HOST, "store": DISK, "load": DISK,
}  # fmt: skip
"""Values of labels that mean something only where there is this tier."""


def names_of(tiers: Collection[str]) -> tuple[Name, ...]:
    """What an engine with these tiers can count."""
    found = []
    for name in NAMES:
        if name.needs in tiers:
            values = (v for v in name.values if all(_NEEDS.get(part, DEVICE) in tiers for part in v.split("/")))
            found.append(replace(name, values=tuple(values)))
    return tuple(found)


ABSENT: Mapping[str, str] = {
    "effective_capacity_gained_tokens": "most live tokens kept in time, with tiers below the device less without",
    "effective_capacity_gained_sequences": "most live sequences kept in time, with tiers below the device less without",
}
"""Names for what no engine can tell of itself, since it takes two: `observe.capacity` writes them."""


def table(section: str) -> str:
    """The names of a section as a Markdown table: what `docs/metrics.md` prints."""
    lines = ["| name | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    for name in NAMES:
        if name.section == section:
            labels = ", ".join(f"`{label}`" for label in name.labels)
            lines.append(f"| `{name.full}` | {name.kind} | {labels} | {name.unit} | {name.meaning} |")
    return "\n".join(lines)
