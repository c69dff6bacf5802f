"""Prefix reuse on models: the same greedy tokens as without it, for every kind of state.

Eight conversations of three turns share a pool that holds about two of them, so that what is kept is hit, evicted
and computed again. On any state that is shared wrongly, copied too late or read after it was given up, tokens differ.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from latent_models import LATENT, latent_config
from tiny import COMMON, Bench, tiny_config
from transformers import AutoConfig

from octavo import LLM, SamplingParams
from octavo.memory.cache import KVCache
from octavo.memory.check import check, is_empty
from octavo.memory.keys import KeySpace
from octavo.policy.bundle import Policies
from octavo.policy.eviction import eviction_named
from octavo.policy.reuse import NoReuse, PrefixReuse
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import Admitted, Preempted, StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request
from octavo.scheduling.request import SamplingParams as Params
from octavo.scheduling.scheduler import Scheduler

BLOCK = 4
KINDS = {
    "llama": "full",
    "gemma3_text": "window beside full",
    "mistral": "window",
    "llama4_text": "chunk beside full",
    "deepseek_v3": "latent",
    "mamba2": "recurrent",
    "bamba": "recurrent beside full",
    "lfm2": "convolution beside full",
    "gemma3n_text": "borrowed",
}


RECURRENT = {
    "mamba2": {
        "hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "num_hidden_layers": 3,
        "vocab_size": 128, "expand": 2, "chunk_size": 8,
    },
    "bamba": {
        **COMMON, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
        "mamba_chunk_size": 8, "attn_layer_indices": [1], "num_hidden_layers": 3,
    },
    "lfm2": {**COMMON, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_L_cache": 3},
}  # fmt: skip


@functools.cache
def bench(name: str) -> Bench:
    if name in LATENT:
        return Bench(latent_config(name))
    if name in RECURRENT:
        return Bench(AutoConfig.for_model(name, **{k: v for k, v in RECURRENT[name].items() if v is not None}))
    return Bench(tiny_config(name))


class Engine:
    def __init__(self, made: Bench, *, reuse: bool, slabs: int, depth: int = 0, eviction: str = "lru") -> None:
        executor, layout = made.executor(block_tokens=BLOCK, n_slabs=slabs, rows=4)
        keys = KeySpace("tiny", BLOCK) if reuse else None
        self.cache = KVCache(layout, slabs, 4, keys=keys, eviction=eviction_named(eviction))
        policies = Policies(reuse=PrefixReuse(2) if reuse else NoReuse())
        scheduler = Scheduler(self.cache, Limits(4, 24, 256, made.vocab_size), policies)
        self.core = EngineCore(scheduler, executor, depth=depth)
        self.events: list[object] = []

    def run(self, prompts: list[list[int]], wanted: int) -> list[list[int]]:
        params = Params(temperature=0.0, max_tokens=wanted, seed=0).with_defaults({})
        made = [
            self.core.submit(Request(request_id="r", prompt_token_ids=np.asarray(p, np.int32), params=params), 0.0)
            for p in prompts
        ]
        tokens: dict[int, list[int]] = {number: [] for number in made}
        while self.core.has_work:
            for event in self.core.step(0.0):
                self.events.append(event)
                if isinstance(event, StepTokens):
                    for number, token in event.pairs():
                        tokens[number].append(token)
            check(self.cache)
        return [tokens[number] for number in made]

    def converse(self, turns: int = 3) -> list[list[int]]:
        """Eight conversations, turn by turn; each has facts of its own and an opening that all share."""
        random = np.random.default_rng(11)
        opening = random.integers(3, 120, size=9).tolist()
        texts = [opening + random.integers(3, 120, size=5 + i).tolist() for i in range(8)]
        for turn in range(turns):
            # Back and forth, so that some come again before they had to go.
            order = texts if turn % 2 == 0 else texts[::-1]
            for text, answer in zip(order, self.run(order, 6), strict=True):
                text += answer + random.integers(3, 120, size=3).tolist()
        assert is_empty(self.cache)
        return texts

    @property
    def hits(self) -> int:
        return sum(isinstance(event, Admitted) and event.cached_tokens > 0 for event in self.events)


@functools.cache
def expected(name: str) -> list[list[int]]:
    return Engine(bench(name), reuse=False, slabs=600).converse()


def room_for_two(name: str) -> int:
    """Slabs that hold about two of the conversations at their longest."""
    _, layout = bench(name).executor(block_tokens=BLOCK)
    return 2 * layout.slabs_for(48, 24) + 6


@pytest.mark.parametrize("eviction", ["lru", "cheapest_to_rebuild"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_conversations_in_a_pool_that_holds_two_answer_as_without_reuse(name: str, depth: int, eviction: str) -> None:
    engine = Engine(bench(name), reuse=True, slabs=room_for_two(name), depth=depth, eviction=eviction)
    assert engine.converse() == expected(name)
    assert engine.hits > 1
    assert engine.cache.sharing is not None
    assert engine.cache.sharing.shelf.evicted_blocks > 0


@pytest.mark.parametrize("shared", range(8, 8 + BLOCK))
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_a_hit_ends_anywhere_in_a_block_whatever_the_number_of_heads(shared: int, kv_heads: int) -> None:
    made = _heads(kv_heads)
    text = np.random.default_rng(kv_heads).integers(3, 60, size=40).tolist()
    asked = [*text[:shared], 119 - text[shared] + 3, *text[20:29]]
    engine = Engine(made, reuse=True, slabs=80)
    engine.run([text[:20]], 3)
    assert engine.run([asked], 8) == Engine(made, reuse=False, slabs=80).run([asked], 8)
    assert [event.cached_tokens for event in engine.events if isinstance(event, Admitted)] == [0, shared]


@functools.cache
def _heads(kv_heads: int) -> Bench:
    config = tiny_config("llama")
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 6, kv_heads, 8
    return Bench(config)


def test_a_preempted_sequence_goes_on_from_what_is_left_of_its_blocks() -> None:
    made = bench("llama")
    engine = Engine(made, reuse=True, slabs=16)
    prompts = [np.random.default_rng(seed).integers(3, 120, size=10).tolist() for seed in range(4)]
    assert engine.run(prompts, 20) == Engine(made, reuse=False, slabs=200).run(prompts, 20)
    assert any(isinstance(event, Preempted) for event in engine.events)


def test_the_default_model_answers_the_same_with_reuse_on() -> None:
    story = "The lighthouse keeper wrote down the weather every morning. " * 6
    prompts = [story + end for end in ("Today it was", "Yesterday it", "He said", "Today it was")]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=1)
    plain = LLM(dtype="float32", max_kv_tokens=2048)
    reusing = LLM(dtype="float32", max_kv_tokens=2048, reuse="prefix", audit=True)
    want = [list(o.outputs[0].token_ids) for o in plain.generate(prompts, params)]
    for _ in range(2):
        outputs = reusing.generate(prompts, params)
        assert [list(o.outputs[0].token_ids) for o in outputs] == want
    cached = [sum(o.outputs[0].record.cached_tokens.values()) for o in outputs]
    assert cached == [len(o.prompt_token_ids) - 1 for o in outputs], "all but what logits need"
    assert [sum(o.outputs[0].record.cached_tokens.values()) for o in plain.generate(prompts, params)] == [0] * 4


def test_the_choices_of_one_prompt_share_its_blocks() -> None:
    llm = LLM(dtype="float32", max_kv_tokens=2048, reuse="prefix")
    prompt = "Once upon a time, in a village by the sea, there lived an old clockmaker who never slept. " * 3
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=8, n=4)
    output = llm.generate(prompt, params)[0]
    alone = LLM(dtype="float32", max_kv_tokens=2048).generate(prompt, params)[0]
    assert [o.token_ids for o in output.outputs] == [o.token_ids for o in alone.outputs]
    cached = [sum(o.record.cached_tokens.values()) for o in output.outputs]
    assert cached[0] == 0
    assert min(cached[1:]) >= len(output.prompt_token_ids) // 16 * 16 - 16
