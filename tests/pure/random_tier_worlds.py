"""Whole worlds with tiers from a seed: `random_world` draws one, runs it dry, and holds it against what must be."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from tests.pure.tier_worlds import TierWorld, text
from tests.pure.worlds import endings

from octavo.errors import RequestError
from octavo.policy.chaos import Chaos
from octavo.policy.eviction import EVICTIONS
from octavo.policy.placement import PLACEMENTS
from octavo.policy.preemption import PREEMPTIONS
from octavo.scheduling.events import Admitted, Arrived, Finished, Preempted, Restarted, Transferred
from octavo.simulate.toy_laws import toy_layout
from octavo.simulate.toy_mover import ToyFaults

LAWS = ("full", "full", "full", "window_4", "window_6", "chunk_8", "constant")
FAULTS = (
    ToyFaults(),
    ToyFaults(most_polls=1),
    ToyFaults(most_polls=8),
    ToyFaults(fails=0.2),
    ToyFaults(times_out=0.2, most_polls=2),
    ToyFaults(0.1, 0.1, 6, 20),
)


def drawn(rng: Random, fixed: dict[str, Any]) -> dict[str, Any]:
    """What `TierWorld` takes; `fixed` stands whatever is drawn."""
    groups = rng.choice((1, 1, 2, 3))
    laws = [rng.choice(LAWS) for _ in range(groups)]
    sizes = (1, 4) if any(law != "constant" for law in laws) else (4,)
    given: dict[str, Any] = {
        "heads": [rng.randint(1, 6) for _ in range(groups)],
        "laws": laws,
        "block_tokens": rng.choice((*sizes, 4, 4)) if len(sizes) > 1 else 4,
        "slab_bytes": rng.choice((0, 0, 300, 1500)),
        "rows": rng.choice((3, 4, 6)),
        "budget": rng.choice((6, 12, 64)),
        "context": 40,
        "depth": rng.choice((0, 1)),
        "reuse": rng.random() < 0.85,
        "placement": rng.choice((*PLACEMENTS, "chaos")),
        "preemption": rng.choice((*PREEMPTIONS, "chaos")),
        "eviction": rng.choice((*EVICTIONS, "chaos")),
        "host_eviction": rng.choice((*EVICTIONS, "chaos")),
        "admission": rng.choice(("max_utilization", "max_utilization", "guaranteed_no_evict")),
        "faults": rng.choice(FAULTS),
        "seed": rng.randrange(10**6),
        "ends_every": rng.choice((0, 20)),
        "fails_every": rng.choice((0, 0, 0, 300)),
    }
    given |= fixed
    layout = toy_layout(given["heads"], given["block_tokens"], given["laws"], most_slab_bytes=given["slab_bytes"])
    step = 12 if any(group.slides for group in layout.groups) else None
    one = layout.slabs_for(given["context"], step)
    given.setdefault("slabs", one + rng.randint(0, 1 + one // 2))
    given.setdefault("host_slabs", rng.choice((1, one, 3 * one, 8 * one)))
    given.setdefault("disk_slots", [rng.choice((1, 12, 60)) for _ in layout.groups] if rng.random() < 0.6 else 0)
    for seam in ("placement", "preemption", "eviction", "host_eviction"):
        if given[seam] == "chaos":
            given[seam] = Chaos(rng.randrange(10**6))
    if "disk_eviction" not in given:
        name = Random(given["seed"]).choice((*EVICTIONS, "chaos"))
        given["disk_eviction"] = Chaos(given["seed"]) if name == "chaos" else name
    return given


def random_world(
    seed: int, *, requests: int = 14, aborts: float = 0.0, resets: float = 0.005, **fixed: Any
) -> tuple[TierWorld, Counter[str]]:
    """Run a whole world, and what happened in it, counted. Conversations go on, prompts begin alike, salts differ."""
    rng = Random(f"world {seed}")
    world = TierWorld(**drawn(rng, fixed))
    openings = [text(rng.randint(1, 17), rng.randrange(10**6)) for _ in range(3)]
    left = requests
    for _ in range(6_000):
        if left and len(world.scheduler.waiting) < 8 and rng.random() < 0.5:
            left -= 1
            _ask_something(world, rng, openings)
        if aborts and world.asked and rng.random() < aborts:
            world.core.abort(rng.choice(list(world.asked)), world.time)
        if rng.random() < resets:
            world.core.reset_kept(world.time)
        world.step()
        if not left and not world.core.has_work:
            break
    world.finish()
    world.assert_right()
    counted = tally(world)
    world.assert_all_can_be_had()
    return world, counted


def _ask_something(world: TierWorld, rng: Random, openings: list[list[int]]) -> None:
    salt = rng.choice(("", "", "", "another"))
    prompt = rng.choice(openings)[:] + text(rng.randint(0, 5), rng.randrange(10**6))
    ends = endings(world.events)
    if ends and rng.random() < 0.6:  # the next turn of a conversation
        number = rng.choice(list(ends))
        before = world.asked[number]
        if before.prompt_tokens + len(world.tokens(number)) <= world.limits.max_model_len - 6:
            prompt = (
                before.prompt_token_ids.tolist() + world.tokens(number) + text(rng.randint(0, 3), rng.randrange(10**6))
            )
            salt = before.cache_salt if rng.random() < 0.9 else salt
    room = world.limits.max_model_len - len(prompt)
    try:
        world.ask(prompt, min(room, rng.choice((1, 3, 8, 16, 24))), salt)
    except RequestError:
        return  # refused with a reason: that is an answer


def tally(world: TierWorld) -> Counter[str]:
    """How often each thing happened."""
    found: Counter[str] = Counter()
    for event in world.events:
        found[type(event).__name__] += 1
        match event:
            case Preempted():
                found[event.action] += 1
            case Transferred():
                found[event.route] += event.blocks
                found[f"{event.route} failed"] += len(event.reasons)
            case Admitted():
                for tier, tokens in event.cached_by_tier:
                    found[f"{tier} tokens"] += tokens
                found["restored tokens"] += event.restored_tokens
            case Restarted():
                found[f"restarted: {event.reason}"] += 1
            case Finished():
                found[event.reason] += 1
            case Arrived():
                found["waited for"] += event.waited_s > 0
    host, disk = world.tiering.evicted_blocks
    found["evicted from the host"] += host
    found["evicted from the disk"] += disk
    return found
