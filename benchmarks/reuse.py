"""What keeping state is worth on a real model: TTFT from each tier, and how many conversations keep their promise.

First, one prompt: its TTFT cold, kept on the device, on the host, and on the disk (its blocks are pushed down by other
prompts in between). Then conversations take turns in a device pool that holds a few of them: the largest number whose
second turns meet a TTFT promise, with the tiers off and on, in the same device bytes. Their live tokens, on minus off,
are the effective capacity gained. Extending the cache and suspending sequences are switched apart and both are said.

    python benchmarks/reuse.py                     # about six minutes on two quiet cores, four of them for capacity
    python benchmarks/reuse.py --only ttft         # or capacity: one half alone
    python benchmarks/reuse.py --prompt 1024 --most 8

Conversations are doubled up to `--most`: where that many still kept the promise more might have, and the table says "at
least". Prints tables and one JSON line. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from machine_facts import described, machine_facts, torch_facts

from octavo import LLM, SamplingParams
from octavo.memory.layout import largest
from octavo.observe.capacity import HOST, HOST_AND_DISK, capacity_text

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
ANSWER = 16
"""Tokens of a turn's answer."""
TURN = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
MORE = 16
"""Tokens that a second turn adds."""
UNKNOWN = "no gain to be told: the device alone may keep the promise with more than it was found to"
GAINED = ("effective_capacity_gained_tokens", "effective_capacity_gained_sequences")


def tokens(seed: int, count: int) -> list[int]:
    drawn = Random(seed)
    return [drawn.randrange(100, 40000) for _ in range(count)]


def asked(llm: LLM, prompt: list[int], params: SamplingParams = ONE) -> tuple[float, dict[str, int], list[int]]:
    """(TTFT, prompt tokens that were kept by tier, tokens)."""
    choice = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
    record = choice.record
    assert record is not None
    assert record.first_token_s is not None
    return record.first_token_s - record.arrival_s, record.cached_tokens, list(choice.token_ids)


def engine(args: argparse.Namespace, pool_tokens: int, **options: Any) -> LLM:
    return LLM(
        args.model,
        dtype=args.dtype,
        max_kv_tokens=pool_tokens,
        max_model_len=args.prompt + 64,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        reuse="prefix",
        **options,
    )


def first_tokens(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """TTFT of one prompt from each tier, `args.repeats` prompts each."""
    pool = int(2.5 * args.prompt)
    rows = []
    wanted = {"cold": {}, "device": {}, "host": {"host_bytes": args.host}, "disk": {"host_bytes": args.small_host}}
    for name, options in wanted.items():
        if name == "disk":
            options |= {"disk_path": str(folder / "blocks"), "disk_bytes": args.host, "placement": args.placement}
        elif name == "host":
            options |= {"placement": args.placement}
        llm = engine(args, pool, **options)
        asked(llm, tokens(0, 256))
        times, found = [], []
        for repeat in range(args.repeats):
            prompt = tokens(10 + repeat, args.prompt)
            if name != "cold":
                asked(llm, prompt)
            if name in ("host", "disk"):
                for other in range(4):
                    asked(llm, tokens(1000 + 10 * repeat + other, args.prompt))
            seconds, kept, _ = asked(llm, prompt)
            times.append(seconds)
            found.append(kept)
        llm.engine.close()
        rows.append({"from": name, "ttft_s": statistics.median(times), "min_s": min(times), "max_s": max(times),
                     "cached_tokens": found[-1]})  # fmt: skip
    return rows


def promise_kept(args: argparse.Namespace, llm: LLM, count: int, limit_s: float, base: int) -> tuple[bool, float]:
    """Whether the second turns of `count` conversations, one after the other, begin in time (their median)."""
    talks = [tokens(base + talk, args.talk) for talk in range(count)]
    for talk in talks:
        talk += asked(llm, talk, TURN)[2] + tokens(base + 500, MORE)
    times = [asked(llm, talk, TURN)[0] for talk in talks]
    return statistics.median(times) <= limit_s, statistics.median(times)


def capacity(args: argparse.Namespace, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The model's name, and by ways the most conversations whose second turns meet the promise."""
    pool = args.holds * (args.talk + 64)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("device alone", {}),
        (HOST, {"host_bytes": args.host, "placement": args.placement}),
        (HOST_AND_DISK, {"host_bytes": args.small_host, "disk_path": str(folder / "more"), "disk_bytes": args.host,
                         "placement": args.placement}),
    ]  # fmt: skip
    probe = engine(args, pool)
    asked(probe, tokens(1, 256))
    cold = statistics.median(asked(probe, tokens(2 + i, args.talk))[0] for i in range(args.repeats))
    model = probe.engine.model_name
    probe.engine.close()
    limit_s = cold * args.promise
    rows = []
    for name, options in ways:
        llm = engine(args, pool, **options)
        asked(llm, tokens(1, 256))
        most, at_least, tried = most_held(args, llm, limit_s)
        llm.engine.close()
        tokens_held = live_tokens(args, most)
        rows.append({"tiers": name, "sequences": most, "at_least": at_least, "live_tokens": tokens_held,
                     "ttft_s": tried.get(most, 0.0), "tried_ttft_s": tried, "promise_s": limit_s,
                     "host_bytes": options.get("host_bytes", 0),
                     "disk_bytes": options.get("disk_bytes", 0)})  # fmt: skip
    add_gains(rows)
    return model, rows


def most_held(args: argparse.Namespace, llm: LLM, limit_s: float) -> tuple[int, bool, dict[int, float]]:
    """How many conversations at most, whether more might, and the middle TTFT of each number that was tried."""
    tried: dict[int, float] = {}

    def holds(count: int) -> bool:
        kept, tried[count] = promise_kept(args, llm, count, limit_s, 10_000 * count)
        return kept

    return *most_that_hold(args.most, holds, halve=not args.powers_of_two), tried


def most_that_hold(bound: int, holds: Callable[[int], bool], *, halve: bool = True) -> tuple[int, bool]:
    """The largest count up to `bound` that holds, 0 for none, and whether more might: `bound` did, or, without `halve`,
    those between the last doubling that held and the first that did not were left out."""
    kept, count = 0, 1
    while kept < bound:
        if not holds(count):
            return (largest(kept, count - 1, holds), False) if halve else (kept, count > kept + 1)
        kept, count = count, min(2 * count, bound)
    return kept, True


def live_tokens(args: argparse.Namespace, talks: int) -> int:
    """When all have had their first turn and its answer, and one is at its second."""
    return talks * (args.talk + ANSWER) + MORE + ANSWER if talks else 0


def add_gains(rows: list[dict[str, Any]]) -> None:
    """To all rows but the first, that of the device alone; None where that may have held more."""
    for row in rows[1:]:
        for name, figure in zip(GAINED, ("live_tokens", "sequences"), strict=True):
            row[name] = None if rows[0]["at_least"] else row[figure] - rows[0][figure]


def metrics_text(model: str, rows: list[dict[str, Any]]) -> bytes:
    known = [row for row in rows[1:] if row[GAINED[0]] is not None]
    return capacity_text(model, {row["tiers"]: (row[GAINED[0]], row[GAINED[1]]) for row in known})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--talk", type=int, default=768, help="tokens of a conversation's first turn")
    parser.add_argument("--holds", type=int, default=4, help="conversations that the device pool holds")
    parser.add_argument("--most", type=int, default=32)
    parser.add_argument("--promise", type=float, default=0.4, help="TTFT of second turns, as a share of the cold one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--placement", default="write_back")
    parser.add_argument("--host", default="3GiB")
    parser.add_argument("--small-host", default="320MiB", help="of the host where there is a disk below it")
    parser.add_argument("--only", choices=("ttft", "capacity"), help="one half alone")
    parser.add_argument("--powers-of-two", action="store_true", help="try no numbers of conversations between them")
    parser.add_argument("--metrics", type=Path, metavar="FILE", help="write what was gained for Prometheus")
    args = parser.parse_args()
    if args.metrics is not None and args.only == "ttft":
        parser.error("--metrics writes what capacity measures: leave out --only ttft")
    if args.most < 1:
        parser.error(f"--most {args.most} must be at least 1")
    facts = machine_facts() | torch_facts()
    print(described(facts))
    told: dict[str, Any] = {"machine": facts, "reuse": "prefix", "placement": args.placement, "preemption": "recompute"}
    with tempfile.TemporaryDirectory() as made:
        if args.only != "capacity":
            told["ttft"] = first_tokens(args, Path(made))
            print_first_tokens(args, told["ttft"])
        if args.only != "ttft":
            told["model"], told["capacity"] = capacity(args, Path(made))
            print_capacity(args, told["capacity"])
            if args.metrics is not None:
                args.metrics.write_bytes(metrics_text(told["model"], told["capacity"]))
    print(json.dumps(told))


def print_first_tokens(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    print(f"\nTTFT of {args.prompt} tokens, placement {args.placement}, preemption recompute")
    cold = rows[0]["ttft_s"]
    for row in rows:
        took = row["ttft_s"]
        print(f"  {row['from']:<8}{took * 1e3:10.1f} ms {took / cold:7.1%} of cold  {row['cached_tokens']}")


def print_capacity(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    print(f"\nconversations of {args.talk} tokens, a device pool that holds {args.holds}; second turns within ", end="")
    print(f"{args.promise:.0%} of a cold TTFT, {rows[0]['promise_s'] * 1e3:.0f} ms")
    for row in rows:
        least = "at least " if row["at_least"] else ""
        counts = f"{least}{row['sequences']} conversations {least}{row['live_tokens']:,} live tokens"
        gained = ""
        if row is not rows[0]:
            gained = f"{least}{row[GAINED[0]]:+,} gained" if row[GAINED[0]] is not None else UNKNOWN
        print(f"  {row['tiers']:<15}{counts:<60} TTFT {row['ttft_s'] * 1e3:.0f} ms  {gained}")


if __name__ == "__main__":
    main()
