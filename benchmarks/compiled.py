"""Steps of octavo's native layers beside Transformers' model compiled by torch, in one process, interleaved.

Decode steps of several batch sizes at one context, and a prefill of one prompt. `compiled` is the same checkpoint by
Transformers with sdpa, static keys and values of exactly the context's length, one graph for each shape (so that
nothing is padded and no shape is symbolic), logits of the last row alone and the greedy token inside the graph; with
inductor's freezing, which packs weights. It has no pages, no scheduler and no requests: what it leaves out is in its
favour. Compiling is timed with inductor's cache empty, and again in a new process that finds it warm.

    python benchmarks/compiled.py                      # both types: about ten minutes, most of them compiling
    python benchmarks/compiled.py --dtype bfloat16 --batch 1 32 --prefill

Prints a table, then one JSON line. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

CONTEXT = 128
WARM = 3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--prefill", nargs="*", type=int, default=[512, 2048])
    parser.add_argument("--repeat", type=int, default=12, help="steps of each; a third of it of a prefill")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=("passed", "process"), default="passed")
    parser.add_argument("--compile-only", action="store_true", help="how long that takes, with the cache that is there")
    options = parser.parse_args(arguments)
    if options.compile_only:
        print(json.dumps({dtype: compiling(dtype, options) for dtype in options.dtype}))
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        from machine_facts import described, machine_facts, torch_facts

        results = {dtype: rows_of(dtype, options) for dtype in options.dtype}
        again = [*sys.argv, "--compile-only"]
        warm = json.loads(subprocess.run([sys.executable, *again], capture_output=True, text=True, check=True).stdout)
    facts = machine_facts() | torch_facts()
    for dtype in options.dtype:
        cold = sum(row["compile_s"] for row in results[dtype])
        print(f"{dtype}: compiling took {cold:.0f} s, in a new process with a warm cache {warm[dtype]:.0f} s")
    print(described(facts))
    print(json.dumps({"benchmark": "compiled", "context": CONTEXT, "results": results, "warm_compile_s": warm,
                      "clock": options.clock, "machine": facts}))  # fmt: skip


def cases_of(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(name, sequences, tokens of each in the step)."""
    decodes = [(f"decode {batch}", batch, 1) for batch in options.batch]
    return decodes + [(f"prefill {tokens}", 1, tokens) for tokens in options.prefill]


class Compiled:
    def __init__(self, dtype: str, options: argparse.Namespace) -> None:
        import torch
        from torch._inductor import config

        from octavo.models.load import load_checkpoint

        if options.threads is not None:
            torch.set_num_threads(options.threads)
        config.freezing = True
        self.model = load_checkpoint(None, dtype=dtype, skip_tokenizer_init=True).model
        self.model.set_attn_implementation("sdpa")
        self.vocabulary = self.model.config.vocab_size

    def step(self, batch: int, tokens: int) -> Callable[[], Any]:
        """The compiled step, which has not been compiled yet."""
        import torch
        from transformers import StaticCache

        length = CONTEXT if tokens == 1 else tokens
        cache = StaticCache(config=self.model.config, max_cache_len=length)
        at = torch.arange(length - tokens, length)
        positions = at[None, :].expand(batch, -1)
        # The last position sees all that is there; of a prompt each sees those before it.
        mask = torch.ones(1, 1, tokens, length, dtype=torch.bool).tril(length - tokens).expand(batch, 1, -1, -1)
        given = (torch.arange(batch * tokens) * 37 % self.vocabulary).reshape(batch, tokens)

        def forward() -> Any:
            logits = self.model(
                input_ids=given, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True,
                cache_position=at, logits_to_keep=1,
            ).logits  # fmt: skip
            return logits[:, -1].argmax(-1)

        run = torch.compile(forward, dynamic=False)

        def once() -> Any:
            for layer in cache.layers:  # where the next token goes; zeros in the cache would cost more than a step
                if layer.is_initialized:
                    layer.cumulative_length.zero_()
            with torch.no_grad():
                return run()

        return once


def compiling(dtype: str, options: argparse.Namespace) -> float:
    import torch

    made = Compiled(dtype, options)
    took = 0.0
    for _, batch, tokens in cases_of(options):
        torch._dynamo.reset()
        step = made.step(batch, tokens)
        begun = time.perf_counter()
        step()
        took += time.perf_counter() - begun
    return took


def rows_of(dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from layers import Clock, Decoding, Prefilling

    import octavo

    now = time.process_time if options.clock == "process" else time.perf_counter
    made = Compiled(dtype, options)
    most = max([*options.batch, 1])
    llm = octavo.LLM(
        dtype=dtype, max_num_seqs=most, max_num_batched_tokens=max([512, *options.prefill]),
        max_kv_tokens=most * 2 * CONTEXT + 2 * max([0, *options.prefill]),
    )  # fmt: skip
    print(f"\n{dtype}\n{'':16}{'octavo ms':>11}{'compiled ms':>13}{'octavo over it':>16}{'compiling s':>13}")
    rows = []
    for name, batch, tokens in cases_of(options):
        torch._dynamo.reset()
        step = made.step(batch, tokens)
        begun = time.perf_counter()
        step()
        took = time.perf_counter() - begun
        clock = Clock(own=False)
        ours: Any = (
            Decoding(llm, batch, options.repeat, clock, prompt=CONTEXT - 8) if tokens == 1
            else Prefilling(llm, tokens, clock)
        )  # fmt: skip
        pairs = []
        for turn in range(WARM + (options.repeat if tokens == 1 else max(3, options.repeat // 3))):
            moments = [now()]
            for call in (ours.step, step):
                call()
                moments.append(now())
            if turn >= WARM:
                pairs.append((moments[1] - moments[0], moments[2] - moments[1]))
        ours.end()
        row = {"case": name, "compile_s": round(took, 1),
               "octavo_ms": round(1e3 * statistics.median(pair[0] for pair in pairs), 2),
               "compiled_ms": round(1e3 * statistics.median(pair[1] for pair in pairs), 2),
               "ratio": round(statistics.median(pair[1] / pair[0] for pair in pairs), 3)}  # fmt: skip
        rows.append(row)
        print(
            f"{name:16}{row['octavo_ms']:>11}{row['compiled_ms']:>13}{row['ratio']:>16}{row['compile_s']:>13}",
            flush=True,
        )
    llm.engine.close()
    return rows


if __name__ == "__main__":
    main()
