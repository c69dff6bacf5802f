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
from pathlib import Path
from random import Random
from typing import Any

from machine_facts import described, machine_facts, torch_facts

from octavo import LLM, SamplingParams
from octavo.observe.capacity import capacity_text

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
TURN = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
MORE = 16
"""Tokens that a second turn adds."""


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


def capacity(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The most conversations, by powers of two, whose second turns meet the promise."""
    pool = args.holds * (args.talk + 64)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("device alone", {}),
        ("host", {"host_bytes": args.host, "placement": args.placement}),
        ("host and disk", {"host_bytes": args.small_host, "disk_path": str(folder / "more"), "disk_bytes": args.host,
                           "placement": args.placement}),
    ]  # fmt: skip
    probe = engine(args, pool)
    asked(probe, tokens(1, 256))
    cold = statistics.median(asked(probe, tokens(2 + i, args.talk))[0] for i in range(args.repeats))
    probe.engine.close()
    limit_s = cold * args.promise
    rows = []
    for name, options in ways:
        llm = engine(args, pool, **options)
        asked(llm, tokens(1, 256))
        most, median, count = 0, 0.0, 2
        while count <= args.most:
            kept, took = promise_kept(args, llm, count, limit_s, 10_000 * count)
            if not kept:
                break
            most, median, count = count, took, 2 * count
        llm.engine.close()
        rows.append({"tiers": name, "conversations": most, "at_least": 2 * most > args.most,
                     "live_tokens": most * (args.talk + 16 + MORE), "ttft_s": median,
                     "promise_s": limit_s, "host_bytes": options.get("host_bytes", 0),
                     "disk_bytes": options.get("disk_bytes", 0)})  # fmt: skip
    for row in rows:
        row["gained_conversations"] = row["conversations"] - rows[0]["conversations"]
        row["gained_tokens"] = row["live_tokens"] - rows[0]["live_tokens"]
    return rows


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
    parser.add_argument("--metrics", type=Path, help="also write the capacity gained as Prometheus' text here")
    parser.add_argument("--only", choices=("ttft", "capacity"), help="one half alone")
    args = parser.parse_args()
    facts = machine_facts() | torch_facts()
    print(described(facts))
    told: dict[str, Any] = {"machine": facts, "reuse": "prefix", "placement": args.placement, "preemption": "recompute"}
    with tempfile.TemporaryDirectory() as made:
        if args.only != "capacity":
            told["ttft"] = first_tokens(args, Path(made))
            print_first_tokens(args, told["ttft"])
        if args.only != "ttft":
            told["capacity"] = capacity(args, Path(made))
            print_capacity(args, told["capacity"])
            best = max(told["capacity"], key=lambda row: row["gained_tokens"])
            told["effective_capacity_gained_tokens"] = best["gained_tokens"]
            told["effective_capacity_gained_sequences"] = best["gained_conversations"]
            if args.metrics is not None:
                name = args.model or "SmolLM2-135M-Instruct"
                args.metrics.write_bytes(capacity_text(name, best["gained_tokens"], best["gained_conversations"]))
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
        counts = f"{least}{row['conversations']} conversations {least}{row['live_tokens']:,} live tokens"
        gained = "" if row is rows[0] else f"{least}{row['gained_tokens']:+,} gained"
        if gained and rows[0]["at_least"]:
            gained = "no gain to be seen: the device alone kept the promise with as many as were tried"
        print(f"  {row['tiers']:<15}{counts:<60} TTFT {row['ttft_s'] * 1e3:.0f} ms  {gained}")


if __name__ == "__main__":
    main()
