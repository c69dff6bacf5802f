"""Tiny random models of many architectures, served and as Transformers runs them.

Shared by the tests on CPU and on an accelerator: everything takes the device as an argument.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.memory.cache import KVCache
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.models.shrink import enliven
from octavo.models.trial import Trial, subjects
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.sampler import Sampler
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

NEAR_TIE = 1e-4
"""At a first difference the reference's two likeliest tokens must be closer than this."""

COMMON = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MHA = {"num_key_value_heads": None}
"""These classes know no key-value heads; None drops the field."""
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

ARCHITECTURES = {
    "llama": {"head_dim": 16},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"head_dim": 12},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 12,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "gemma": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_hidden_layers": 3,
        "layer_types": ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 10,
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "phi3": {"sliding_window": 9},
    "phi": {"num_key_value_heads": 4},
    "olmo": {"num_key_value_heads": 4},
    "olmo2": {},
    "olmo3": {"sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "olmoe": {**MOE},
    "starcoder2": {"sliding_window": 7},
    "mixtral": {**MOE, "sliding_window": 6},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24},
    "qwen2_moe-window": {
        **MOE,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3_moe": {**MOE, "head_dim": 12},
    "gpt_neox": {**MHA, "rotary_pct": 0.5},
    "gpt_oss": {**MOE, "head_dim": 16, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "granite": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "granitemoe": {**MOE},
    "cohere": {},
    "cohere2": {"sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "opt": {**MHA, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": MHA,
    "gptj": {**MHA, "rotary_dim": 4},
    "codegen": {**MHA, "rotary_dim": 4},
    "gpt_bigcode": {**MHA, "multi_query": True},
    "exaone4": {
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "persimmon": {"num_key_value_heads": 4},
    "helium": {"head_dim": 8},
    "apertus": {},
    "nemotron": {},
    "ministral": {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "arcee": {},
    "seed_oss": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "bitnet": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "dots1": {
        **MOE,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 3,
    },
    "glm4_moe": {**MOE, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3},
    "minimax_m2": {**MOE, "head_dim": 8},
    "flex_olmo": {**MOE},
    "nanochat": {},
    "vaultgemma": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_hidden_layers": 3,
        "layer_types": ALTERNATING,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 10,
    },
    "cwm": {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3, "layer_types": ALTERNATING},
    "biogpt": MHA,
    "jais2": {"head_dim": 8},
    "granitemoeshared": {**MOE},
    "ernie4_5_moe": {**MOE},
    "hunyuan_v1_moe": {**MOE, "head_dim": 8},
}


def tiny_config(name):
    fields = {key: value for key, value in {**COMMON, **ARCHITECTURES[name]}.items() if value is not None}
    return AutoConfig.for_model(fields.pop("model_type", name), **fields)


def tiny_prompts(seed=5):
    """Seven prompts from 1 to 40 tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(3, 120, size=n).tolist() for n in (19, 1, 40, 7, 33, 12, 26)]


class Bench:
    """A model twice: as Transformers runs it, and through `TorchExecutor`."""

    def __init__(self, config, device="cpu", *, dtype=torch.float32, prepare=None) -> None:
        torch.manual_seed(1234)
        make = AutoModelForCausalLM.from_config
        self.config = copy.deepcopy(config).to_dict()
        self.reference = make(copy.deepcopy(config), dtype=dtype, attn_implementation="eager").to(device).eval()
        enliven(self.reference, seed=7)
        self.served = make(copy.deepcopy(config), dtype=dtype).to(device).eval()
        self.served.load_state_dict(self.reference.state_dict())
        if prepare is not None:
            prepare(self.served)
        self.device = device

    @property
    def vocab_size(self):
        return self.reference.config.get_text_config().vocab_size

    def executor(self, *, block_tokens=4, n_slabs=80, rows=8, backend=None):
        geometry = geometry_from_config(self.config, FP32)
        layout = make_layout(served_groups(geometry.layers), block_tokens, "tokens_heads")
        sampler = Sampler(rows, self.vocab_size, self.device)
        return TorchExecutor(self.served, layout, n_slabs, rows=rows, sampler=sampler, backend=backend), layout

    def run(self, prompts, wanted, *, n_slabs, depth=0, budget=24, block_tokens=4, rows=5):
        """Greedy tokens of every prompt through the engine, and the events on the way."""
        executor, layout = self.executor(block_tokens=block_tokens, n_slabs=n_slabs, rows=rows)
        limits = Limits(rows, budget, 128, self.vocab_size)
        core = EngineCore(Scheduler(KVCache(layout, n_slabs, rows), limits), executor, depth=depth)
        params = SamplingParams(temperature=0.0, max_tokens=wanted, seed=0).with_defaults({})
        made = [
            core.submit(Request(request_id=str(i), prompt_token_ids=np.asarray(p, np.int32), params=params), 0.0)
            for i, p in enumerate(prompts)
        ]
        events = []
        for now in range(10_000):
            if not core.has_work:
                break
            events.extend(core.step(float(now)))
        outputs = {sequence: [] for sequence in made}
        for event in events:
            if isinstance(event, StepTokens):
                for sequence, token in zip(event.sequence_ids.tolist(), event.tokens.tolist(), strict=True):
                    outputs[sequence].append(token)
        return [outputs[sequence] for sequence in made], events

    def serve(self, prompts, wanted, *, pause=None, seed=0, longest_chunk=7, block_tokens=4, n_slabs=80, rows=5):
        """Greedy tokens of every prompt through hand-made ragged plans."""
        executor, layout = self.executor(block_tokens=block_tokens, n_slabs=n_slabs, rows=rows)
        made = subjects(prompts, wanted, pause=pause)
        trial = Trial(executor, layout, n_slabs, rows, seed=seed)
        trial.run(made, longest_chunk=longest_chunk)
        return [subject.outputs for subject in made], trial

    def generate(self, prompt, wanted):
        """Greedy tokens of one prompt by Transformers, and each one's lead over the runner-up."""
        out = self.reference.generate(
            torch.tensor([prompt], device=self.device),
            max_new_tokens=wanted,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        tops = [logits[0].float().topk(2).values for logits in out.logits]
        return out.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in tops]

    def compare(self, prompts, served):
        """Hold `served` against Transformers: near ties met, and distinct tokens. Fails on a difference."""
        wanted = len(served[0])
        near_ties = 0
        seen = set()
        for prompt, mine in zip(prompts, served, strict=True):
            theirs, leads = self.generate(prompt, wanted)
            seen.update(theirs)
            if mine != theirs:
                at = next(i for i in range(wanted) if mine[i] != theirs[i])
                assert leads[at] < NEAR_TIE, f"{len(prompt)} tokens: {mine} is not {theirs}, first at {at}"
                near_ties += 1
        return near_ties, len(seen)
