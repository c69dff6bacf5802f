"""Hit rates of prefix reuse by tier and policy on a trace, beside the best that any policy could do.

The trace goes through octavo's own scheduler in virtual time: arrivals as they are, steps by the roofline, copies on
modelled links. The bound is Belady's (1966): with so many blocks of room, and the future known, keep those that are
wanted soonest and never keep one that is not wanted again. It ignores that only leaves may go and that time passes,
so that no policy reaches it.

    python benchmarks/hit_rates.py TRACE                     # about ten minutes of a processor
    python benchmarks/hit_rates.py TRACE --limit 2000        # its first requests

Prints a table and one JSON line: shares of all prompt tokens that were looked up.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from octavo.memory.values import TIERS
from octavo.planner.asked import Asked
from octavo.policy.bundle import Policies
from octavo.scheduling.events import Admitted
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.deploy import Lower, Replica, replica_of
from octavo.simulate.drive import Happening, Simulation
from octavo.simulate.formats import read_trace
from octavo.simulate.sources import OpenLoop
from octavo.simulate.trace import TraceRequest

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""The shape of Llama 3.1 8B: 131,072 bytes of keys and values a token."""
BLOCK = 512
RUNS = (
    ("none", None, "lru"),
    ("drop", None, "lru"),
    ("drop", None, "cheapest_to_rebuild"),
    ("write_back", "host", "lru"),
    ("write_through", "host", "lru"),
    ("break_even", "host", "lru"),
    ("write_back", "host", "cheapest_to_rebuild"),
    ("write_back", "disk", "lru"),
    ("write_through", "disk", "lru"),
    ("break_even", "disk", "lru"),
    ("write_back", "disk", "cheapest_to_rebuild"),
)
"""Placement, the lowest tier, eviction in every tier."""


class Hits:
    """Tokens that were looked up and found, by tier."""

    def __init__(self) -> None:
        self.looked_up = 0
        self.by_tier: Counter[str] = Counter()

    def observe(self, happenings: Sequence[Happening]) -> None:
        for event in happenings:
            if isinstance(event, Admitted) and not event.resumed:
                self.looked_up += event.looked_up_tokens
                self.by_tier.update(dict(event.cached_by_tier))

    def at_rest(self, now_ns: int, scheduler: Scheduler) -> None:
        pass


def best(wanted: Iterable[tuple[int, ...]], room: int) -> int:
    """Blocks found by the policy that knows the future: Belady's, which may also leave a block out."""
    accesses = [block for blocks in wanted for block in blocks]
    following = [len(accesses)] * len(accesses)
    last: dict[int, int] = {}
    for at in range(len(accesses) - 1, -1, -1):
        following[at] = last.get(accesses[at], len(accesses))
        last[accesses[at]] = at
    kept: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for at, block in enumerate(accesses):
        hits += block in kept
        kept[block] = following[at]
        heapq.heappush(farthest, (-following[at], block))
        while len(kept) > room:
            next_use, candidate = heapq.heappop(farthest)
            if kept.get(candidate) == -next_use:
                del kept[candidate]
    return hits


def run(replica: Replica, requests: Sequence[TraceRequest], placement: str, eviction: str, lower: Lower | None) -> Hits:
    hits = Hits()
    policies = Policies.named(reuse="none" if placement == "none" else "prefix")
    core = replica.core(policies, eviction=eviction, lower=lower)
    Simulation(core, OpenLoop(requests), [hits]).run()
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--device", default="h100-sxm")
    parser.add_argument("--tp", type=int, default=2, help="devices: with one, the trace waits ever longer")
    parser.add_argument("--host-gib", type=float, default=512.0)
    parser.add_argument("--disk-gib", type=float, default=4096.0)
    parser.add_argument("--only", default="", help="rows whose placement and tier contain this text")
    args = parser.parse_args()
    requests = read_trace(args.trace, limit=args.limit).requests
    asked = Asked.of(
        device=args.device, tp=args.tp, block_size=str(BLOCK), max_num_seqs="256", max_num_batched_tokens="8192"
    )
    replica = replica_of(MODEL, asked)
    size = replica.layout.groups[0].block_bytes
    host, disk = (int(gib * 2**30) for gib in (args.host_gib, args.disk_gib))
    room = {"device": replica.slabs}
    room["host"] = room["device"] + host // size
    room["disk"] = room["host"] + disk // size
    total = sum(request.input_tokens for request in requests)
    print(f"{len(requests):,} requests, {total:,} prompt tokens, blocks of {BLOCK}; {replica.device}: ", end="")
    print(", ".join(f"{name} {blocks:,} blocks" for name, blocks in room.items()), "(each with those above it)")
    print("the prefix cache alone is extended: whoever gives way is computed again (preemption recompute)")
    told: dict[str, Any] = {"requests": len(requests), "blocks": room, "bounds": {}, "runs": []}
    wanted = [request.hash_ids for request in requests]
    for name, blocks in (*room.items(), ("boundless", len(requests) * 10**6)):
        share = min(1.0, best(wanted, blocks) * BLOCK / total)
        told["bounds"][name] = share
        print(f"  best possible, {name:<10} {share:6.1%}")
    print(
        f"\n  {'placement':<14}{'to':<8}{'eviction':<22}"
        + "".join(f"{tier:>9}" for tier in TIERS)
        + "      all   CPU s"
    )
    for placement, tier, eviction in RUNS:
        if args.only not in f"{placement} {tier}":
            continue
        lower = None
        if tier is not None:
            lower = Lower(
                host_bytes=host, disk_bytes=disk if tier == "disk" else 0, placement=placement,
                host_eviction=eviction, disk_eviction=eviction,
            )  # fmt: skip
        began = time.process_time()
        hits = run(replica, requests, placement, eviction, lower)
        seconds = time.process_time() - began
        shares = {name: hits.by_tier[name] / max(1, hits.looked_up) for name in TIERS}
        row = {"placement": placement, "tier": tier, "eviction": eviction, "preemption": "recompute", **shares,
               "cpu_s": seconds}  # fmt: skip
        told["runs"].append(row)
        print(f"  {placement:<14}{tier or '-':<8}{eviction:<22}", end="")
        figures = "".join(f"{shares[name]:9.1%}" for name in TIERS)
        print(f"{figures} {sum(shares.values()):8.1%}{seconds:8.0f}", flush=True)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
