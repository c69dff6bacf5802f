"""Tiny random models with latent attention (MLA), and how to put them through the real engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import transformers
from tiny import COMMON, Bench
from transformers import AutoModelForCausalLM, Mistral4ForCausalLM

from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.memory.cache import KVCache
from octavo.policy.bundle import Policies
from octavo.scheduling.audit import Audit
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Finished, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

RANK, ROPE = 20, 4
ELEMENTS = RANK + ROPE
MLA = {
    "kv_lora_rank": RANK,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
}
MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}

INDEX = {
    "index_topk": 7,  # far shorter than most sequences of the tests
    "index_n_heads": 16,  # with few heads many scores are exactly zero, and ties are broken anyhow
    "index_head_dim": 8,
}
"""A choice among positions by an index (DSA)."""

LATENT = {
    "deepseek_v2": {**MOE, **MLA},
    "deepseek_v2-lite": {**MOE, **MLA, "model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": {**MOE, **MLA, "rope_parameters": YARN},
    "deepseek_v3-plain": {
        **MOE,
        **MLA,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "attention_bias": True,
    },
    "glm4_moe_lite": {**MOE, **MLA},
    "minicpm3": {**MLA},
    "youtu": {**MLA},
    "axk1": {**MOE, **MLA},
    "sarvam_mla": {**MOE, **MLA, "q_lora_rank": None},
    "mistral4": {**MOE, **MLA, "qk_nope_head_dim": 4},
    "longcat_flash": {
        **MLA,
        "num_hidden_layers": 4,
        "head_dim": ROPE,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
    },
    "deepseek_v32": {**MOE, **MLA, **INDEX},
    "axk2": {**MOE, **MLA, **INDEX},
    "glm_moe_dsa": {
        **MOE,
        **MLA,
        **INDEX,
        "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "hy_v4": {**MOE, **MLA, **INDEX, "num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]},
}
SPARSE = ("deepseek_v32", "axk2", "glm_moe_dsa", "hy_v4")


def latent_config(name):
    """None stands for what a model leaves out, except a query that is not compressed, which is said with None."""
    fields = {**COMMON, **LATENT[name]}
    return transformers.AutoConfig.for_model(fields.pop("model_type", name), **fields)


class _Causal:
    """Classes that generate text, with the one that `AutoModelForCausalLM` does not know."""

    @staticmethod
    def from_config(config, **kwargs):
        if config.model_type == "mistral4":
            return Mistral4ForCausalLM._from_config(config, **kwargs)
        return AutoModelForCausalLM.from_config(config, **kwargs)


def latent_bench(name, monkeypatch):
    monkeypatch.setattr("tiny.AutoModelForCausalLM", _Causal)
    return Bench(latent_config(name))


@dataclass
class Ran:
    """What came of a run: tokens per prompt, events, the cache, the executor and how full the pool was at most."""

    outputs: list
    events: list
    cache: KVCache
    executor: object
    most_bytes: int


def run_engine(
    bench, prompts, wanted, *, n_slabs, depth=0, budget=24, block_tokens=4, rows=5, allocation="paged", abort=None
):
    """Greedy tokens through scheduler, core and executor under a full audit after every step.

    `abort` (number, step): that prompt is given up before that step.
    """
    executor, layout = bench.executor(block_tokens=block_tokens, n_slabs=n_slabs, rows=rows)
    policies = Policies.named(allocation=allocation)
    cache = KVCache(layout, n_slabs, rows, contiguous=policies.allocation.contiguous)
    scheduler = Scheduler(cache, Limits(rows, budget, 128, bench.vocab_size), policies)
    core = EngineCore(scheduler, executor, depth=depth, audit=Audit(full_every=1))
    params = SamplingParams(temperature=0.0, max_tokens=wanted, seed=0).with_defaults({})
    made = [
        core.submit(Request(request_id=str(i), prompt_token_ids=np.asarray(p, np.int32), params=params), 0.0)
        for i, p in enumerate(prompts)
    ]
    events, most = [], 0
    for now in range(10_000):
        if not core.has_work:
            break
        if abort is not None and now == abort[1]:
            assert core.abort(made[abort[0]], float(now))
        events.extend(core.step(float(now)))
        most = max(most, (n_slabs - cache.pool.available_slabs) * layout.slab_bytes)
    outputs = {sequence: [] for sequence in made}
    for event in events:
        if isinstance(event, StepTokens):
            for sequence, token in zip(event.sequence_ids.tolist(), event.tokens.tolist(), strict=True):
                outputs[sequence].append(token)
    assert sum(isinstance(event, Finished) for event in events) == len(prompts)
    return Ran([outputs[sequence] for sequence in made], events, cache, executor, most)


def geometry_of(bench):
    return geometry_from_config(bench.config, FP32)
