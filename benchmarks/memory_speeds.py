"""Does this machine's memory have two speeds? Decode steps beside plain reads and matrix products, again and again.

For so many seconds, in turn: memory is read by all threads and by one, a matrix is multiplied by all and by one, and a
few decode steps of one sequence run. If reads by all threads fall into two classes with little between them, while
reads by one thread do not, processors are now behind one link to memory and now behind two: a virtual machine's host
moves them. Prints how each figure differs between the two, how closely steps follow the memory's speed, how often it
changed, and one JSON line. Nothing else should run meanwhile.

    python benchmarks/memory_speeds.py --seconds 90
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from machine_facts import described, machine_facts, torch_facts

COLUMNS = ("decode step, ms", "read by all, GB/s", "read by one, GB/s", "product by all, GFLOP/s",
           "product by one, GFLOP/s")  # fmt: skip
SIDE, PRODUCTS, STEPS = 512, 4, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    from octavo.engine.start import spin_briefly

    spin_briefly()
    facts = machine_facts() | torch_facts()
    print(described(facts))
    turns = np.array(measured(options))

    from octavo.cost.speeds import speed_of

    reads = [float(rate) for rate in turns[:, 1]]
    speed = speed_of(reads)
    assert speed is not None  # one turn at least was measured
    usual = np.array([speed.at(rate) for rate in reads])
    classes = {"usual": usual} if speed.other is None else {"usual": usual, "other": ~usual}
    medians = {name: np.median(turns[chosen], axis=0).tolist() for name, chosen in classes.items() if chosen.any()}
    follows = float(np.corrcoef(turns[:, 0], turns[:, 1])[0, 1])
    changes = int(np.count_nonzero(np.diff(usual.astype(int)))) if speed.other is not None else 0
    print(f"{'':26}" + "".join(f"{name:>10}" for name in medians))
    for place, title in enumerate(COLUMNS):
        print(f"{title:26}" + "".join(f"{row[place]:>10.1f}" for row in medians.values()))
    print(f"{'turns':26}" + "".join(f"{int(classes[name].sum()):>10}" for name in medians))
    print(f"two speeds: {'yes' if speed.other is not None else 'no'}; {changes} changes in {options.seconds:g} s; "
          f"steps and reads by all threads correlate by {follows:+.2f}")  # fmt: skip
    print(json.dumps({"benchmark": "memory_speeds", "machine": facts, "columns": COLUMNS, "medians": medians,
                      "turns": {name: int(chosen.sum()) for name, chosen in classes.items()}, "changes": changes,
                      "correlation": follows, "seconds": options.seconds}))  # fmt: skip


def measured(options: Any) -> list[tuple[float, ...]]:
    """A row of `COLUMNS` a turn, one at least."""
    import torch

    from octavo import LLM, SamplingParams
    from octavo.runtime.memory_rate import MemoryRate

    llm = LLM(None, dtype=options.dtype, max_kv_tokens=4096, max_model_len=1024)
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    threads = torch.get_num_threads()
    memory = MemoryRate()
    matrix = torch.full((SIDE, SIDE), 0.5)

    def product() -> float:
        begun = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        return PRODUCTS * 2 * SIDE**3 / (time.perf_counter() - begun) / 1e9

    def step() -> float:
        record = llm.generate({"prompt_token_ids": list(range(100, 164))}, params)[0].outputs[0].record
        assert record is not None
        assert record.finished_s is not None
        assert record.first_token_s is not None
        return 1e3 * (record.finished_s - record.first_token_s) / (STEPS - 1)

    step()
    turns: list[tuple[float, ...]] = []
    until = time.monotonic() + options.seconds
    while not turns or time.monotonic() < until:
        by_all, product_by_all = memory.read() / 1e9, product()
        torch.set_num_threads(1)
        by_one, product_by_one = memory.read() / 1e9, product()
        torch.set_num_threads(threads)
        turns.append((step(), by_all, by_one, product_by_all, product_by_one))
    llm.engine.close()
    return turns


if __name__ == "__main__":
    main()
