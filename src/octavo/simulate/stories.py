"""Named workloads that print their steps and check their outcome: `chat`, `handover`, `reservation`.

Each runs the real scheduler in virtual time in a small world and raises `InvariantViolation` when what it tells did
not happen. Owns no mechanism; `handover` is told by its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from octavo.cost.step import LinearCost
from octavo.errors import InvariantViolation
from octavo.geometry.dtypes import BF16
from octavo.geometry.state import Component
from octavo.memory.cache import KVCache
from octavo.memory.check import is_empty
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.memory.tiering import Below, tiered_cache
from octavo.memory.waste import useful_bytes
from octavo.policy.bundle import Policies
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Admitted, Arrived, Finished, Preempted
from octavo.scheduling.limits import Limits
from octavo.scheduling.scheduler import Scheduler
from octavo.simulate.drive import Happening, Simulation
from octavo.simulate.executors import NANOSECONDS, SimExecutor, seconds
from octavo.simulate.handover import walk_through
from octavo.simulate.links import SimMover
from octavo.simulate.sources import OpenLoop
from octavo.simulate.trace import VOCABULARY, TraceRequest

BLOCK_TOKENS = 16
_COST = LinearCost(step_s=5e-3, token_s=1e-5, context_token_s=1e-8)


@dataclass(slots=True)
class _Told:
    """Watches a run: when each request entered, paused and ended, and how full the pool was."""

    names: tuple[str, ...]
    lines: list[str] = field(default_factory=list)
    entered: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    paused: list[str] = field(default_factory=list)
    recomputed: dict[str, int] = field(default_factory=dict)
    """Positions that each had to compute again."""
    moved: int = 0
    most_used: int = 0
    most_useless: int = 0
    """Blocks held that hold no computed position, at most."""
    _pending: list[str] = field(default_factory=list)

    def observe(self, happenings: Sequence[Happening]) -> None:
        for one in happenings:
            if isinstance(one, Admitted):
                name = self.names[one.sequence_id]
                self.entered.setdefault(name, one.now)
                self._pending.append(f"{name} {'comes back' if one.resumed else 'enters'}")
            elif isinstance(one, Preempted):
                name = self.names[one.sequence_id]
                self.paused.append(name)
                self.moved += one.action == "offload"
                what = "go to the host" if one.action == "offload" else "will be computed again"
                self._pending.append(f"{name} gives way: {one.blocks} blocks, {one.computed_tokens} positions {what}")
            elif isinstance(one, Arrived):
                name = self.names[one.sequence_id]
                self._pending.append(f"{name} has its state back after {one.waited_s:.4f} s of copies")
            elif isinstance(one, Finished):
                name = self.names[one.sequence_id]
                self.ended[name] = one.now
                self.recomputed[name] = one.record.recomputed_tokens
                if one.record.first_token_s is not None:
                    self.first[name] = one.record.first_token_s
                self._pending.append(f"{name} ends after {one.record.output_tokens} tokens, its blocks return")

    def at_rest(self, now_ns: int, scheduler: Scheduler) -> None:
        cache = scheduler.cache
        used = cache.pool.slabs - cache.pool.available_slabs
        useless = used - -(-useful_bytes(cache) // cache.layout.slab_bytes)
        self.most_used, self.most_useless = max(self.most_used, used), max(self.most_useless, useless)
        if not self._pending:
            return
        running = scheduler.running
        held = ", ".join(
            f"{self.names[int(running.sequence_id[row])]} {int(cache.tables[0].held[row])}"
            for row in running.order.tolist()
        )
        waiting = [self.names[sequence.sequence_id] for sequence in scheduler.waiting]
        state = f"blocks: {held or 'nobody'}; {cache.pool.slabs - used} of {cache.pool.slabs} free"
        queue = f"; {', '.join(waiting)} {'wait' if len(waiting) > 1 else 'waits'}" if waiting else ""
        self.lines.append(f"{seconds(now_ns):9.3f} s  {'; '.join(self._pending)} ({state}{queue})")
        self._pending = []


@dataclass(frozen=True, slots=True)
class _Role:
    """One request of a story: what it brings, gets, declares, and when it comes."""

    name: str
    prompt: int
    output: int
    declares: int | None = None
    arrival_s: float = 0.0


def _play(
    cast: tuple[_Role, ...], tokens: int, policies: Policies, *, seats: int = 8, host_tokens: int = 0
) -> tuple[_Told, KVCache]:
    """Run these requests through a pool of `tokens` positions, with a host tier of `host_tokens` below it."""
    part = (Component("k", (8, 128), BF16), Component("v", (8, 128), BF16))
    layout = make_layout([StateGroup("full", (0,), (part,))], BLOCK_TOKENS)
    slabs, tiering, mover = tokens // BLOCK_TOKENS, None, None
    if host_tokens:
        cache, tiering = tiered_cache(layout, slabs, seats, Below(host_tokens // BLOCK_TOKENS))
        mover = SimMover([group.block_bytes for group in layout.groups])
    else:
        cache = KVCache(layout, slabs, seats, contiguous=policies.allocation.contiguous)
    limits = Limits(seats, 2048, 32_768, VOCABULARY)
    core = EngineCore(Scheduler(cache, limits, policies, tiering), SimExecutor(_COST), mover=mover)
    requests = tuple(
        TraceRequest(
            arrival_ns=round(one.arrival_s * NANOSECONDS),
            input_tokens=one.prompt,
            output_tokens=one.output,
            max_tokens=one.declares,
        )
        for one in cast
    )
    told = _Told(tuple(one.name for one in cast))
    Simulation(core, OpenLoop(requests), [told], leap=False).run()
    _require(is_empty(cache), f"{cache.pool.free.count} of {cache.pool.slabs} blocks are free at the end")
    _require(len(told.ended) == len(cast), f"only {', '.join(told.ended)} ended")
    return told, cache


CHAT = (_Role("A", 1024, 100), _Role("B", 8192, 800), _Role("C", 2048, 50), _Role("D", 16_384, 200))


def chat() -> list[str]:
    """Four chats of unequal length and a fifth that comes later; then the same with too little room."""
    late = _Role("E", 4096, 120, arrival_s=0.2)
    told, _ = _play((*CHAT, late), 28_800, Policies())
    short = sorted(("A", "C"), key=lambda name: told.ended[name])
    text = ["chat: blocks grow with state; short ones end and leave", *told.lines]
    _require(max(told.ended[name] for name in short) < min(told.ended["B"], told.ended["D"]), "the short ones waited")
    _require(told.entered["E"] > late.arrival_s, "E found room at once; it was to wait for blocks")
    freed = min(told.ended.values())
    _require(told.entered["E"] >= freed, f"E entered at {told.entered['E']} before anything was freed, at {freed}")
    _require(told.entered["E"] < told.ended["B"], "E waited for the longest")
    text.append(f"{' and '.join(short)} ended while B and D went on; E entered in the blocks that they gave back")

    cramped = (_Role("A", 6000, 900), _Role("B", 6000, 900), _Role("C", 3000, 200))
    room = 12_800
    guarded, _ = _play(cramped, room, Policies.named(admission="guaranteed_no_evict"))
    text += ["", "under pressure, stopping admission (guaranteed_no_evict): nobody who started is paused",
             *guarded.lines]  # fmt: skip
    _require(not guarded.paused, f"{guarded.paused} were paused")
    _require(guarded.entered["B"] >= guarded.ended["A"], "B entered although A and B together do not fit")
    packed, _ = _play(cramped, room, Policies())
    text += ["", "under pressure, preempting (max_utilization): who came last gives way, and computes again",
             *packed.lines]  # fmt: skip
    _require(bool(packed.paused), "nobody was paused")
    _require("A" not in packed.paused, "the oldest was paused")
    again = sum(packed.recomputed.values())
    _require(again > 0, "nothing was computed again")
    moved, _ = _play(cramped, room, Policies.named(preemption="offload"), host_tokens=room)
    text += ["", "under pressure, moving (offload): who gives way keeps its state on the host", *moved.lines]
    _require(moved.moved == len(moved.paused) > 0, f"{moved.moved} of {len(moved.paused)} were moved")
    _require("A" not in moved.paused, "the oldest was moved")
    _require(not any(moved.recomputed.values()), "positions were computed again although their state was kept")
    text.append(f"preempting computed {again} positions again, moving none")
    return text


def reservation() -> list[str]:
    """Three requests declare 8k and end at 1.2k, 7.6k and 2.0k: a run of the declared maximum, and pages."""
    ends = {"A": 1200, "B": 7600, "C": 2000}
    declared = 8192
    cast = tuple(_Role(name, 512, end - 512, declared - 512) for name, end in ends.items())
    room = 2 * declared + 512  # the packing policy keeps one in a hundred blocks back
    reserved, cache = _play(cast, room, Policies.named(allocation="contiguous-max"))
    paged, _ = _play(cast, room, Policies())
    block = BLOCK_TOKENS
    text = [f"reservation: runs of the declared {declared} tokens in a pool of {cache.pool.slabs} blocks",
            *reserved.lines, "", "the same, paged", *paged.lines]  # fmt: skip
    _require(reserved.entered["C"] >= min(reserved.ended.values()), "three runs of the maximum fitted")
    _require(max(paged.entered.values()) < min(paged.ended.values()), "pages did not let all three in")
    _require(reserved.most_useless * block > declared, "reservations wasted less than one whole maximum")
    _require(paged.most_useless <= 2 * len(ends), f"pages wasted {paged.most_useless} blocks")
    text.append(
        f"reserved: up to {reserved.most_useless} blocks hold nothing, and C waits {reserved.entered['C']:.3f} s; "
        f"paged: up to {paged.most_useless}, and all three run at once"
    )
    return text


STORIES: Mapping[str, Callable[[], list[str]]] = {"chat": chat, "handover": walk_through, "reservation": reservation}


def _require(holds: bool, detail: str) -> None:
    if not holds:
        raise InvariantViolation("story", detail)
