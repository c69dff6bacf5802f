"""What rounding the weights costs: perplexity on a text, the same likeliest token, the same greedy text, and bytes.

One model is loaded for each form of its weights, packed as the engine packs them (every linear layer, a tied
embedding with its head) and run by Transformers' own forward over windows of a text. `int8` and `int4` are what
`--quantization` gives on this machine; where that rounds rows to eight bits too, `int8-rows` and `int4-rows` show
the weights' part alone, with rows as they are. Prints a table, then one JSON line.

    python benchmarks/weights.py
    python benchmarks/weights.py --model gemma-3-270m.gguf --forms fp32,int8 --windows 4
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent))

from kv_dtypes import windows
from machine_facts import described, machine_facts, torch_facts

from octavo.kernels.linear import linear_instruction_sets
from octavo.models.linear import Packing, round_packed
from octavo.models.load import LoadedModel, held_bytes, load_checkpoint

FORMS = ("fp32", "bf16", "fp16", "int8", "int8-rows", "int4", "int4-rows")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, slots=True)
class Seen:
    """What one form made of the text."""

    logprobs: torch.Tensor
    """[windows, scored tokens]"""
    likeliest: torch.Tensor
    greedy: torch.Tensor
    """[windows, tokens]"""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    facts = machine_facts() | torch_facts() | {"instruction_set": linear_instruction_sets()[0]}
    rows: list[dict[str, Any]] = []
    first: Seen | None = None
    for form in options.forms:
        loaded, about = prepared(options.model, form)
        texts, source = windows(options, loaded.tokenizer)
        if first is None:
            print(f"{loaded.name}, {source}\n{described(facts)}\n")
        begun = time.perf_counter()
        seen = read(loaded.model, torch.tensor(texts), options)
        first = seen if first is None else first
        rows.append(
            {"form": form, "about": about, "weights_bytes": held_bytes(loaded.model)}
            | {"perplexity": math.exp(-float(seen.logprobs.mean())), "seconds": time.perf_counter() - begun}
            | compared(first, seen)
        )
        del loaded
    print_table(rows)
    print(json.dumps({"benchmark": "weights", "source": source, "machine": facts, "rows": rows}))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="directory, hub id or GGUF file; the embedded SmolLM2-135M-Instruct if not given")
    add("--text", type=Path, help="what is scored, plain or .gz; the shared text if not given")
    add("--forms", default=",".join(FORMS), help="by commas; the first is what the others are compared with")
    add("--windows", type=int, default=16, help="pieces of text, from all over it (default 16)")
    add("--prompt", type=int, default=64, help="tokens of each before the first that is scored (default 64)")
    add("--scored", type=int, default=256, help="tokens after them that are scored (default 256)")
    add("--greedy", type=int, default=48, help="tokens that each prompt is continued by (default 48)")
    add("--threads", type=int, help="torch threads; torch's own choice if not given")
    options = parser.parse_args(arguments)
    options.forms = options.forms.split(",")
    if not set(options.forms) <= set(FORMS):
        parser.error(f"--forms: there are {', '.join(FORMS)}")
    return options


def prepared(model: str | None, form: str) -> tuple[LoadedModel, str]:
    """The model with its weights in one form, and what multiplies by them."""
    loaded = load_checkpoint(model, dtype=DTYPES.get(form, "float32"), device="cpu")
    kind, _, kept = form.partition("-")
    plain = next(name for name in linear_instruction_sets() if not name.endswith("dot"))
    Packing(plain if kept else None).apply(loaded.model)
    if not kind.startswith("int"):
        return loaded, "native"
    return loaded, round_packed(loaded.model, "native", "as asked", kind)[1]


def read(model: Any, texts: torch.Tensor, options: argparse.Namespace) -> Seen:
    """Every window scored by one forward, its prompt continued greedily."""
    logprobs, likeliest = [], []
    with torch.inference_mode():
        for text in texts:
            logits = model(input_ids=text[None], use_cache=False).logits[0, options.prompt - 1 : -1].float()
            wanted = text[options.prompt :, None]
            logprobs.append(torch.log_softmax(logits, -1).gather(1, wanted)[:, 0])
            likeliest.append(logits.argmax(-1))
        prompts = texts[:, : options.prompt]
        greedy = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=options.greedy,
            min_new_tokens=options.greedy,
            repetition_penalty=1.0,
            pad_token_id=0,
        )[:, options.prompt :]
    return Seen(torch.stack(logprobs), torch.stack(likeliest), greedy)


def compared(first: Seen, this: Seen) -> dict[str, float | int]:
    until = (first.greedy == this.greedy).to(torch.int64).cumprod(1).sum(1)
    return {
        "logprob_moved_mean": float((first.logprobs - this.logprobs).abs().mean()),
        "same_likeliest": float((first.likeliest == this.likeliest).double().mean()),
        "greedy_equal": int((until == first.greedy.shape[1]).sum()),
        "greedy_texts": len(until),
        "greedy_until_mean": float(until.double().mean()),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"{'weights':<10}{'bytes':>13}{'of fp32':>9}{'perplexity':>12}{'change':>9}{'|log p|':>9}{'same top':>10}"
        f"{'greedy':>9}{'until':>7}"
    )
    for row in rows:
        print(
            f"{row['form']:<10}{row['weights_bytes']:>13,}{row['weights_bytes'] / first['weights_bytes']:>9.2f}"
            f"{row['perplexity']:>12.3f}{row['perplexity'] / first['perplexity'] - 1:>+9.2%}"
            f"{row['logprob_moved_mean']:>9.4f}{row['same_likeliest']:>10.2%}"
            f"{row['greedy_equal']:>6}/{row['greedy_texts']}{row['greedy_until_mean']:>7.1f}"
        )


if __name__ == "__main__":
    main()
