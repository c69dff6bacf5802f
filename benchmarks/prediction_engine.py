"""The engine that predictions are held against, in this process or in one of its own for each workload.

Owns how it is built, and the way into another process and back: one JSON object on its standard input, one line of
JSON on its standard output. A process of its own is what a prediction is of: what differs between processes is in its
interval, so that many processes must be asked whether it holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prediction_runs import OwnClock, Ran, Timed, WallClock, run_really
from workloads import Job

from octavo.cost.speeds import Speed

BLOCK_TOKENS = 16
MOST_RUNS = 5
ENOUGH = 0.9
"""The share of a run at the calibration's speed of memory, below which it is run again."""
_PAUSE_S = 0.25


def at_speed(ran: list[Ran], speed: Speed | None) -> list[Ran]:
    """The runs to compare: all that were at this speed, or the one that was nearest to it."""
    shares = [one.share_at(speed) for one in ran]
    enough = [one for one, share in zip(ran, shares, strict=True) if share >= ENOUGH]
    return enough or [ran[shares.index(max(shares))]]


def engine_options(asked: dict[str, Any], blocks: int, **more: Any) -> dict[str, Any]:
    """Options of octavo's engine, flat."""
    return {
        "model": asked["model"],
        "dtype": asked["dtype"],
        "skip_tokenizer_init": True,
        "max_model_len": asked["max_model_len"],
        "num_gpu_blocks_override": blocks,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": asked["max_num_seqs"],
        "max_num_batched_tokens": asked["max_num_batched_tokens"],
        "reuse": "none",
        "device": "cpu",
        "linear_backend": asked.get("linear") or "auto",
        **more,
    }


def engine_of(asked: dict[str, Any], blocks: int, **more: Any) -> Any:
    """An engine and the model that was loaded for it: layers may be fused for one engine only."""
    from octavo.engine.start import spin_briefly

    spin_briefly()
    import torch
    from transformers.utils import logging

    from octavo.config import Config
    from octavo.engine.build import engine_for
    from octavo.models.load import load_checkpoint

    logging.set_verbosity_error()
    if asked["threads"] is not None:
        torch.set_num_threads(asked["threads"])
    loaded = load_checkpoint(asked["model"], dtype=asked["dtype"], skip_tokenizer_init=True)
    config = Config.from_kwargs(**engine_options(asked, blocks, **more))
    return engine_for(config, loaded, torch.device("cpu")), loaded


def run_apart(asked: dict[str, Any], timed: Timed, repeat: int, blocks: int, **more: Any) -> list[Ran]:
    """The same runs by an engine in a process of its own."""
    told = {"asked": asked, "blocks": blocks, "more": more, "repeat": repeat, "name": timed.name,
            "jobs": [[job.prompt, job.max_tokens] for job in timed.jobs], "arrivals": timed.arrivals}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        input=json.dumps(told), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{timed.name}: its process ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return [Ran.of(one) for one in json.loads(done.stdout.splitlines()[-1])]


def warm_up(asked: dict[str, Any], engine: Any, timed: Timed) -> None:
    """As a server that has been in use: memory is there behind as many blocks as the workload may take, in both tiers,
    and a step of each kind has run. What a first touch costs is the machine's affair: 0.2 or 4.5 ms for 2 MB.
    """
    needed = sum(-(-job.positions // BLOCK_TOKENS) for job in timed.jobs) * engine.deployment.layout.slab_bytes
    for tier in arenas_of(engine):
        tier[: min(len(tier), needed)].zero_()
    half = engine.core.executor.arena.n_slabs * BLOCK_TOKENS // 2
    longest = max(1, min(asked["max_num_batched_tokens"], asked["max_model_len"] - 8, half))
    jobs = (Job(tuple(3 + token % 24 for token in range(longest)), 4), Job(tuple(range(3, 30)), 4))
    run_really(engine, Timed("warm-up", jobs, (0.0, 0.0)), WallClock())


def arenas_of(engine: Any) -> list[Any]:
    """The bytes of the device's tier, and of the host's where there is one."""
    mover = engine.core.mover
    return [engine.core.executor.arena.bytes, *([] if mover is None else [mover.copier.host.bytes])]


def run_here(asked: dict[str, Any], engine: Any, timed: Timed, repeat: int) -> list[Ran]:
    """So many runs at the calibration's speed of memory, more of a short one, and those that were at another speed.

    Once patience is over, runs count at whatever speed.
    """
    from octavo.runtime.memory_rate import MemoryRate

    speed = None if asked.get("speed") is None else Speed(*asked["speed"])
    rate = None if speed is None else MemoryRate().read
    clock = OwnClock() if asked["own_time"] else WallClock(rate)
    until = time.monotonic() + asked["patience"]
    ran: list[Ran] = []
    counted = 0
    while counted < repeat or (counted < MOST_RUNS and sum(one.span_s for one in ran) < asked["least_s"]):
        wait_for(speed, rate, until)
        ran.append(run_really(engine, timed, clock))
        counted += ran[-1].share_at(speed) >= ENOUGH or time.monotonic() >= until
    return ran


def wait_for(speed: Speed | None, rate: Callable[[], float] | None, until: float) -> None:
    """Until memory is read at this speed, or the time is over."""
    while speed is not None and rate is not None and time.monotonic() < until and not speed.at(rate()):
        time.sleep(_PAUSE_S)


def main() -> None:
    told = json.loads(sys.stdin.read())
    # Whatever libraries print does not come before the answer.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    jobs = tuple(Job(tuple(prompt), tokens) for prompt, tokens in told["jobs"])
    engine, _ = engine_of(told["asked"], told["blocks"], **told["more"])
    timed = Timed(told["name"], jobs, tuple(told["arrivals"]))
    warm_up(told["asked"], engine, timed)
    ran = run_here(told["asked"], engine, timed, told["repeat"])
    engine.close()
    answer.write(json.dumps([one.told() for one in ran]) + "\n")
    answer.flush()


if __name__ == "__main__":
    main()
