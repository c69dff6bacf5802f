"""A process that serves with a disk below it, killed at random points, and started again over what it left.

Each life answers prompts from one set in an order of its own, until SIGKILL comes: while it opens the store, computes,
writes or reads. Every token that it told must be right, and so must those of the lives after it, which find what it
left. `OCTAVO_KILLS` is how many lives each form of the store gets; a few if not set.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from checkpoints import tiny_llama

from octavo import LLM, SamplingParams

KILLS = int(os.environ.get("OCTAVO_KILLS", "4"))
OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 36, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

NURSERY = """
import json, os, random, sys
sys.path.insert(0, {src!r})
import torch
torch.set_num_threads(1)
import octavo.engine.build
from octavo import LLM, SamplingParams

def tell(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())  # one call: a line is told whole or not at all

def live(task):
    llm = LLM({model!r}, reuse="prefix", host_bytes="64KiB", placement="write_through", disk_path=task["disk"],
              disk_bytes=task["bytes"], disk_shared=task["shared"], audit=True, **task["options"])
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    stores = llm.engine.core.mover.disk
    tell(ready=True, found=sum(store.stats().found for store in stores))
    order = random.Random(task["seed"])
    while True:
        numbers = order.sample(range(len(task["prompts"])), 3)
        outputs = llm.generate([{{"prompt_token_ids": task["prompts"][number]}} for number in numbers], params)
        for number, output in zip(numbers, outputs):
            tell(number=number, tokens=list(output.outputs[0].token_ids), cached=output.outputs[0].record.cached_tokens)
        if task["last"] and llm.engine.core.scheduler.tiering.pending == 0 and order.random() < 0.05:
            llm.engine.close()
            tell(closed=True)
            return

for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if not child:
        try:
            live(task)
        except BaseException as error:
            tell(failed=repr(error))
        os._exit(0)
    tell(child=child)
    os.waitpid(child, 0)
    tell(gone=child)
"""


@contextmanager
def nursery(model: Path, script: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has everything loaded, so that a life costs little."""
    script.write_text(NURSERY.format(src=str(Path(__file__).parents[2] / "src"), model=str(model)))
    process = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def life(process: subprocess.Popen[str], task: dict[str, Any], random: Random) -> list[dict[str, Any]]:
    """What one life told, from its birth until it was killed, or, if it is the last, ended by itself."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    child = json.loads(process.stdout.readline())["child"]
    told: list[dict[str, Any]] = []
    if not task["last"]:
        if random.random() < 0.8:
            told.append(json.loads(process.stdout.readline()))  # it is ready
            time.sleep(random.uniform(0, 0.3))
        else:
            time.sleep(random.uniform(0, 0.6))
        os.kill(child, signal.SIGKILL)
    for line in process.stdout:
        told.append(json.loads(line))
        if "gone" in told[-1]:
            return told[:-1]
    raise AssertionError("the nursery has ended")


@pytest.mark.timeout(60 + 30 * KILLS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_server_killed_at_random_points_leaves_a_store_that_serves_the_next_one(shared, tmp_path) -> None:
    checkpoint = tiny_llama(tmp_path / "model", initializer_range=0.5, max_position_embeddings=256)
    random = Random(50)
    openings = [[random.randrange(3, 32) for _ in range(12)] for _ in range(3)]
    prompts = [openings[i % 3] + [random.randrange(3, 32) for _ in range(5 + i)] for i in range(12)]
    plain = LLM(str(checkpoint), **OPTIONS)
    want = [
        list(output.outputs[0].token_ids)
        for output in plain.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    ]
    task = {"disk": str(tmp_path / "disk"), "shared": shared, "prompts": prompts, "options": OPTIONS}
    task |= {"bytes": 1 << 15 if shared else 3 << 16}
    answers = killed_serving = found_by_later = from_disk = 0
    with nursery(checkpoint, tmp_path / "nursery.py") as process:
        for number in range(KILLS + 1):
            told = life(process, task | {"seed": number, "last": number == KILLS}, random)
            assert not [line for line in told if "failed" in line]
            for line in told:
                if "number" in line:
                    assert line["tokens"] == want[line["number"]], (number, line)
                    answers += 1
                    from_disk += line["cached"].get("disk", 0)
                found_by_later += line.get("found", 0) if number else 0
            killed_serving += any("ready" in line for line in told) and number < KILLS
        assert told[-1] == {"closed": True}
    assert killed_serving > KILLS // 2
    assert answers > KILLS
    assert found_by_later > KILLS
    assert from_disk > 0
    print(
        f"{KILLS} lives killed, {killed_serving} of them serving; {answers} answers, {from_disk} tokens from the disk"
    )
