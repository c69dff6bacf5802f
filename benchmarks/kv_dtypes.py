"""What the element type of keys and values costs and gains: perplexity, the same tokens, room in the same bytes.

One model, loaded once, is run with each type in turn. Text is scored through the engine: a prompt is filled in,
then each next token is that of the text, whatever the model would say, so that all types see the same contexts.
Prompts are then continued greedily, and the pool is filled in fixed bytes. Prints a table, then one JSON line.

    python benchmarks/kv_dtypes.py
    python benchmarks/kv_dtypes.py --model gemma-3-270m.gguf --skip-layers sliding_window --dtypes fp32,int8
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine_facts import described, machine_facts, torch_facts
from workloads import find_file

from octavo.config import QUANTISED, Config, parse_bytes
from octavo.deciding import decide, served_geometry
from octavo.deployment import Deployment
from octavo.geometry.dtypes import dtype_named
from octavo.kernels.reference import ReferenceAttention
from octavo.memory.cache import KVCache
from octavo.models.load import LoadedModel, load_checkpoint
from octavo.models.rope import fix_rope
from octavo.policy.bundle import Policies
from octavo.runtime.device import device_facts, resolve_device
from octavo.runtime.executor import RowSampler, TorchExecutor
from octavo.runtime.sampler import Sampler
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Finished, StepPlanned, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.plan import Admission, TokenLogprobs
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

DEFAULT_TEXT = Path("shared/data/text/shakespeare.txt.gz")
CHARACTERS = 8
"""Of text for each token wanted: more than any tokenizer takes."""
FILL = 32
"""Positions of each sequence with which the pool is filled."""


@dataclass(slots=True, eq=False)
class Scripted:
    """A sampler that answers with the text, and notes what the model thought of it."""

    texts: Sequence[Sequence[int]]
    text_in: dict[int, int] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], float] = field(default_factory=dict)
    likeliest: dict[tuple[int, int], int] = field(default_factory=dict)

    def admit(self, admission: Admission) -> None:
        self.text_in[admission.row] = int(admission.request.request_id)

    def sample(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, dict[int, TokenLogprobs]]:
        places = [(self.text_in[row], place) for row, place in zip(rows.tolist(), positions.tolist(), strict=True)]
        tokens = np.asarray([self.texts[text][place] for text, place in places], np.int32)
        scores = torch.log_softmax(logits.float(), -1)
        found = scores.gather(1, torch.from_numpy(tokens.astype(np.int64))[:, None].to(scores.device))[:, 0]
        self.logprobs.update(zip(places, found.tolist(), strict=True))
        self.likeliest.update(zip(places, scores.argmax(-1).tolist(), strict=True))
        return tokens, {}


class Bench:
    """One model, and an engine around it for each question."""

    def __init__(self, loaded: LoadedModel, device: torch.device, skip_layers: str | None) -> None:
        self.loaded, self.device, self.skip_layers = loaded, device, skip_layers
        self.vocab_size = int(loaded.model.get_output_embeddings().weight.shape[0])
        self.weights = dtype_named(str(loaded.dtype))

    def deployment(self, kind: str, length: int, **asked: Any) -> Deployment:
        skipped = self.skip_layers if kind in QUANTISED else None
        config = Config.from_kwargs(
            kv_cache_dtype=kind, kv_cache_dtype_skip_layers=skipped, max_model_len=length, **asked
        )
        facts = device_facts(
            self.device,
            weights_bytes=self.loaded.weights_bytes,
            weights_dtype=self.weights,
            block_order=ReferenceAttention.block_order,
        )
        return decide(config, served_geometry(config, self.loaded.config_json, self.weights), facts)

    def run(
        self, deployment: Deployment, jobs: Sequence[tuple[Sequence[int], int]], sampler: RowSampler | None = None
    ) -> tuple[list[list[int]], int]:
        """Tokens of each (prompt, tokens wanted), and the most positions held at once."""
        rows = deployment.max_num_seqs
        executor = TorchExecutor(
            self.loaded.model,
            deployment.layout,
            deployment.slabs,
            rows=rows,
            sampler=Sampler(rows, self.vocab_size, self.device) if sampler is None else sampler,
        )
        limits = Limits(rows, deployment.max_num_batched_tokens, deployment.max_model_len, self.vocab_size)
        policies = Policies.named(admission="guaranteed_no_evict")
        core = EngineCore(Scheduler(KVCache(deployment.layout, deployment.slabs, rows), limits, policies), executor)
        ids: dict[int, int] = {}
        for number, (prompt, wanted) in enumerate(jobs):
            params = SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True, seed=0).with_defaults({})
            request = Request(request_id=str(number), prompt_token_ids=np.asarray(prompt, np.int32), params=params)
            ids[core.submit(request, 0.0)] = number
        outputs: list[list[int]] = [[] for _ in jobs]
        held = most = 0
        while core.has_work:
            for event in core.step(0.0):
                if isinstance(event, StepPlanned):
                    held += event.decode_tokens + event.prefill_tokens
                    most = max(most, held)
                elif isinstance(event, Finished):
                    prompt, wanted = jobs[ids[event.sequence_id]]
                    held -= len(prompt) + wanted - 1
                elif isinstance(event, StepTokens):
                    for sequence, token in event.pairs():
                        outputs[ids[sequence]].append(token)
        return outputs, most


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = resolve_device("auto")
    loaded = load_checkpoint(options.model, dtype="float32", device=device)
    bench = Bench(loaded, device, options.skip_layers)
    fix_rope(loaded.model, options.prompt + options.scored)
    texts, source = windows(options, loaded.tokenizer)
    facts = machine_facts() | torch_facts()
    print(f"{loaded.name} in fp32, {source}\n{described(facts)}\n")
    rows: list[dict[str, Any]] = []
    seen: list[tuple[Scripted, list[list[int]]]] = []
    for kind in options.dtypes:
        scripted, greedy, row = measured(bench, kind, texts, options)
        seen.append((scripted, greedy))
        rows.append(row | compared(seen[0], seen[-1]))
    print_table(rows)
    report = {"benchmark": "kv_dtypes", "model": loaded.name, "dtype": "fp32", "source": source, "machine": facts}
    report |= {"skip_layers": options.skip_layers, "kv_bytes": options.kv_bytes, "rows": rows}
    print(json.dumps(report))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", help="directory, hub id or GGUF file; the embedded SmolLM2-135M-Instruct if not given")
    add("--text", type=Path, help="what is scored, plain or .gz; the shared text if not given")
    add("--dtypes", default="fp32,bf16,int8,fp8", help="by commas; the first is what the others are compared with")
    add("--skip-layers", help="layers that int8 and fp8 leave in fp32: kv_cache_dtype_skip_layers")
    add("--windows", type=int, default=16, help="pieces of text, from all over it (default 16)")
    add("--prompt", type=int, default=192, help="tokens of each that are filled in (default 192)")
    add("--scored", type=int, default=128, help="tokens after them that are scored (default 128)")
    add("--greedy", type=int, default=48, help="tokens that each prompt is continued by (default 48)")
    add("--kv-bytes", default="24MiB", help="bytes that are filled to see what they hold (default 24MiB)")
    add("--threads", type=int, help="torch threads; torch's own choice if not given")
    options = parser.parse_args(arguments)
    for name in ("windows", "prompt", "scored", "greedy"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    options.dtypes = options.dtypes.split(",")
    options.kv_bytes = parse_bytes("kv_bytes", options.kv_bytes)
    return options


def windows(options: argparse.Namespace, tokenizer: Any) -> tuple[list[list[int]], str]:
    """Token ids of pieces of the text, each as long as what is filled in and what is scored."""
    path = find_file(options.text, Path(__file__).resolve().parent, DEFAULT_TEXT)
    if path is None:
        raise SystemExit(f"--text: there is no {DEFAULT_TEXT} beside this file or above it; name a text")
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except OSError as error:
        raise SystemExit(f"--text: {path} cannot be read: {error}") from error
    text, length = raw.decode("utf-8", "replace"), options.prompt + options.scored
    if len(text) < length * CHARACTERS * options.windows:
        raise SystemExit(f"--text: {path.name} is too short for {options.windows} windows of {length} tokens")
    found = []
    for number in range(options.windows):
        start = len(text) * number // options.windows
        found.append(tokenizer.encode(text[start : start + length * CHARACTERS])[:length])
    about = f"{options.windows} x {options.scored} tokens of {path.name} scored, each after {options.prompt} of context"
    return found, about


def measured(
    bench: Bench, kind: str, texts: list[list[int]], options: argparse.Namespace
) -> tuple[Scripted, list[list[int]], dict[str, Any]]:
    """One element type: the text scored, the prompts continued, the pool filled.

    Nothing is preempted, so what is planned and not ended is held.
    """
    length, count = options.prompt + options.scored, len(texts)
    prompts = [text[: options.prompt] for text in texts]
    steps = {"max_num_seqs": count, "max_num_batched_tokens": 1024}
    roomy = bench.deployment(kind, length, max_kv_tokens=count * (length + 16), **steps)
    scripted = Scripted(texts)
    bench.run(roomy, [(prompt, options.scored) for prompt in prompts], scripted)
    wide = bench.deployment(kind, options.prompt + options.greedy, max_kv_tokens=count * (length + 16), **steps)
    greedy, _ = bench.run(wide, [(prompt, options.greedy) for prompt in prompts])
    tight = bench.deployment(kind, FILL + 1, kv_cache_memory_bytes=options.kv_bytes, max_num_batched_tokens=8192)
    _, held = bench.run(tight, [(texts[i % count][: FILL - 1], 2) for i in range(tight.kv_tokens // FILL + 4)])
    mean = sum(scripted.logprobs.values()) / len(scripted.logprobs)
    row = {
        "kv_dtype": kind,
        "perplexity": math.exp(-mean),
        "bytes_per_token": roomy.geometry.bytes_per_token,
        "tokens_predicted": options.kv_bytes // roomy.geometry.bytes_per_token,
        "tokens_held": held,
    }
    return scripted, greedy, row


def compared(first: tuple[Scripted, list[list[int]]], this: tuple[Scripted, list[list[int]]]) -> dict[str, float | int]:
    """How far one type's run is from the first one's."""
    places = sorted(first[0].logprobs)
    moved = [abs(first[0].logprobs[place] - this[0].logprobs[place]) for place in places]
    same = sum(first[0].likeliest[place] == this[0].likeliest[place] for place in places)
    until = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(first[1], this[1], strict=True)
    ]
    return {
        "logprob_moved_mean": sum(moved) / len(moved),
        "same_likeliest": same / len(places),
        "greedy_equal": sum(one == other for one, other in zip(first[1], this[1], strict=True)),
        "greedy_texts": len(until),
        "greedy_until_mean": sum(until) / len(until),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(
        f"{'KV':<6}{'perplexity':>12}{'change':>9}{'|log p|':>9}{'same top':>10}{'greedy':>9}{'until':>8}"
        f"{'B/token':>9}{'room':>7}{'held':>7}{'gained':>8}"
    )
    for row in rows:
        print(
            f"{row['kv_dtype']:<6}{row['perplexity']:>12.4f}{row['perplexity'] / first['perplexity'] - 1:>+9.3%}"
            f"{row['logprob_moved_mean']:>9.4f}{row['same_likeliest']:>10.2%}"
            f"{row['greedy_equal']:>6}/{row['greedy_texts']}{row['greedy_until_mean']:>8.1f}"
            f"{row['bytes_per_token']:>9,}{row['tokens_predicted']:>7,}{row['tokens_held']:>7,}"
            f"{row['tokens_held'] / first['tokens_held']:>7.2f}x"
        )


if __name__ == "__main__":
    main()
