"""Checkpoints of models with constant state through `LLM`: loaded, checked, decided and served as a user would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recurrent_models import recurrent_config
from transformers import AutoConfig, AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.memory.check import is_empty
from octavo.models.shrink import enliven


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("allocation", ["paged", "contiguous-max"])
@pytest.mark.parametrize("name", ["mamba2", "jamba", "qwen3_next", "falcon_h1", "lfm2"])
def test_a_checkpoint_is_served_with_the_tokens_of_transformers(
    tmp_path: Path, name: str, allocation: str, depth: int
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(recurrent_config(name)).eval()
    enliven(model, seed=7)
    model.to(torch.bfloat16).save_pretrained(tmp_path)  # kept in one type, served in another
    model.float()
    llm = LLM(
        str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=80, block_size=4,
        max_num_seqs=4, max_num_batched_tokens=16, allocation=allocation, pipeline_depth=depth, audit=True,
    )  # fmt: skip
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 120, size=n).tolist() for n in (21, 1, 9, 30, 5, 14)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        right = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert list(output.outputs[0].token_ids) == right[0, len(prompt) :].tolist()
    assert is_empty(llm.engine.core.scheduler.cache)
    told = {row.name: row.value for row in llm.engine.deployment.rows()}
    assert told["KV cache"]


def test_a_model_whose_recurrent_layers_keep_their_own_state_is_refused_by_name(tmp_path: Path) -> None:

    config = AutoConfig.for_model("rwkv", hidden_size=32, num_hidden_layers=2, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="a cache of their own kind"):
        LLM(str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=8)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["bamba", "qwen3_next", "zaya"])
def test_in_bfloat16_with_reuse_and_eight_bits_the_second_answer_is_the_first(
    tmp_path: Path, name: str, kv_cache_dtype: str
) -> None:
    """Keys and values are quantised, states never; the second time both are found."""
    model = AutoModelForCausalLM.from_config(recurrent_config(name)).eval()
    enliven(model, seed=7)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    llm = LLM(
        str(tmp_path), skip_tokenizer_init=True, num_gpu_blocks_override=80, block_size=4, max_num_seqs=4,
        max_num_batched_tokens=16, kv_cache_dtype=kv_cache_dtype, reuse="prefix", audit=True,
    )  # fmt: skip
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 120, size=n).tolist() for n in (21, 1, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = [[output.outputs[0].token_ids for output in llm.generate(prompts, params)] for _ in range(2)]
    assert answers[0] == answers[1]
    assert llm.engine.deployment.kv_dtype.name == ("bf16" if kv_cache_dtype == "auto" else "int8")
