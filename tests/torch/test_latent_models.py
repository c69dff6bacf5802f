"""Models with latent attention, served with nothing kept but latents and rotary keys, equal Transformers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hard_run import hard_run
from latent_models import (
    ELEMENTS,
    INDEX,
    LATENT,
    RANK,
    ROPE,
    SPARSE,
    geometry_of,
    latent_bench,
    latent_config,
    run_engine,
)
from test_quantised_engine import NOISE, QuantisedBench
from tiny import Bench, tiny_prompts
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError
from octavo.geometry.dtypes import BF16, FP8, FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Growing
from octavo.memory.check import is_empty
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.memory.served import SERVED
from octavo.models.observe import observed_layers, require_geometry
from octavo.models.table import VERIFIED_LATENT, refusal
from octavo.models.verify import TOLERANCE, require_served, tiny_difference

WANTED = 12
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


@pytest.fixture(scope="module", params=LATENT)
def bench(request):
    with pytest.MonkeyPatch.context() as patch:
        yield latent_bench(request.param, patch)


@pytest.fixture(scope="module")
def v3():
    with pytest.MonkeyPatch.context() as patch:
        yield latent_bench("deepseek_v3", patch)


def test_ragged_chunks_with_a_pause_give_the_tokens_of_generate(bench):
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED, pause=2)
    _, distinct = bench.compare(prompts, served)
    assert distinct > 10, "a model that hardly varies its tokens proves nothing"


@pytest.mark.parametrize("depth", [0, 1])
def test_the_engine_under_pressure_gives_the_tokens_of_generate_and_gives_everything_back(bench, depth):
    """Free memory is overwritten before every step, and what each sequence holds is weighed."""
    prompts = tiny_prompts()
    outcome = hard_run(bench, prompts, WANTED, depth=depth)
    assert outcome.preemptions > 0
    assert outcome.weighed > len(prompts)
    bench.compare(prompts, outcome.tokens)
    assert outcome.empty


def test_the_bytes_kept_are_what_geometry_says(bench):
    """One sequence alone: every element of its positions is written, and nothing else is."""
    prompt = tiny_prompts()[0]
    ran = run_engine(bench, [prompt], WANTED, n_slabs=20)
    positions = len(prompt) + WANTED - 1  # the last token is not computed
    geometry = geometry_of(bench)
    written = torch.count_nonzero(ran.executor.arena.bytes.view(torch.float32))
    chooses = sum("index_k" in {c.name for c in state.components} for state in geometry.layers)
    assert geometry.bytes_per_token == (len(geometry.layers) * ELEMENTS + chooses * INDEX["index_head_dim"]) * 4
    assert int(written) * 4 == positions * geometry.bytes_per_token
    assert ran.most_bytes == -(-positions // 4) * 4 * geometry.bytes_per_token


def test_the_geometry_read_from_the_config_is_what_the_layers_store(bench):
    told = geometry_of(bench).layers
    assert [s.components for s in observed_layers(bench.reference, FP32)] == [s.components for s in told]
    bench.executor()
    require_geometry(bench.served, told)  # also while it is being served
    for state in told:
        assert isinstance(state, Growing)
        shapes = {c.name: c.shape for c in state.components if c.name != "index_k"}
        assert shapes == {"latent": (RANK,), "rope_k": (ROPE,)}


def test_a_model_like_it_is_accepted_when_it_is_loaded(bench):
    assert refusal(bench.served.config) is None
    assert "equals Transformers" in require_served(bench.reference)


def test_alone_and_in_a_mixed_batch_a_sequence_gets_the_same_tokens(bench):
    prompts = tiny_prompts(11)
    together = run_engine(bench, prompts, WANTED, n_slabs=80, budget=17, rows=7).outputs
    alone = [run_engine(bench, [prompt], WANTED, n_slabs=80).outputs[0] for prompt in prompts]
    assert together == alone


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize("allocation", ["paged", "contiguous"])
def test_block_size_and_allocation_do_not_change_tokens(v3, block_tokens, allocation):
    prompts = tiny_prompts(9)
    slabs = -(-60 // block_tokens) * 3
    ran = run_engine(v3, prompts, WANTED, n_slabs=slabs, depth=1, block_tokens=block_tokens, allocation=allocation)
    v3.compare(prompts, ran.outputs)
    assert is_empty(ran.cache)


def test_a_sequence_that_is_given_up_leaves_its_neighbours_their_tokens(v3):
    prompts = tiny_prompts(4)
    ran = run_engine(v3, prompts, WANTED, n_slabs=22, depth=1, abort=(2, 5))
    others = [i for i in range(len(prompts)) if i != 2]
    v3.compare([prompts[i] for i in others], [ran.outputs[i] for i in others])
    assert is_empty(ran.cache)


class Rounding(QuantisedBench):
    """A model with latents in float64, what it keeps in eight bits."""

    def __init__(self, name, kind):
        Bench.__init__(self, latent_config(name), dtype=torch.float64)
        for model in (self.reference, self.served):
            model.set_experts_implementation("eager")
        self.reference.set_attn_implementation("sdpa")  # the plain one has a softmax in float32
        self.kind, self.skipped = kind, ()


def test_latents_in_eight_bits_equal_transformers_with_a_cache_that_rounds():
    rounding = Rounding("deepseek_v3", FP8)
    prompts = tiny_prompts()
    outputs, seen, _ = rounding.trial(prompts, pause=2)
    worst = 0.0
    for number, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        expected = rounding.expected(prompt + tokens)
        for place in range(len(prompt), len(prompt) + WANTED):
            worst = max(worst, float((seen[number, place] - expected[place - 1]).abs().max()))
    assert worst < NOISE


@pytest.mark.parametrize("absorbed", [True, False])
def test_both_ways_of_attending_a_chunk_give_the_tokens_of_generate(v3, monkeypatch, absorbed):
    monkeypatch.setattr("octavo.kernels.latent.expands", lambda *_: not absorbed)
    prompts = tiny_prompts(6)
    served, _ = v3.serve(prompts, WANTED, pause=1, longest_chunk=9)
    v3.compare(prompts, served)


def test_a_layer_expands_nothing_that_lies_in_pages(v3, monkeypatch):
    calls = []
    for module in v3.served.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    v3.serve(tiny_prompts(2)[:2], 2)
    assert not calls


def test_what_is_not_in_pages_is_expanded_as_before(v3):
    """A model that octavo has taken hold of is still what Transformers runs when it runs it itself."""
    served, ids = v3.served, torch.tensor([tiny_prompts()[0]])
    v3.executor()
    served.set_attn_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(served(input_ids=ids).logits, v3.reference(input_ids=ids).logits)


def test_a_latent_changed_after_it_was_stored_is_refused(v3, monkeypatch):
    attention = next(module for module in v3.served.modules() if hasattr(module, "expand_kv"))
    monkeypatch.setattr(attention, "expand_kv", partial(lambda latent, rope_k: (latent * 1, rope_k)))
    with pytest.raises(ModelError, match="between storing and attending"):
        v3.serve([[5, 6, 7]], 2)


@pytest.mark.parametrize(("name", "mode"), [("deepseek_v3", "mla"), ("deepseek_v32", "mla+sparse")])
def test_a_checkpoint_is_served_from_its_files(name, mode, tmp_path):
    bench = Bench(latent_config(name))
    bench.reference.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=12, block_size=8)
    prompts = tiny_prompts()
    params = SamplingParams(temperature=0.0, max_tokens=WANTED, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    bench.compare(prompts, [list(output.outputs[0].token_ids) for output in outputs])
    assert {output.outputs[0].record.attention_mode for output in outputs} == {f"{mode}/latent"}


def test_index_keys_of_a_kept_prefix_serve_another_sequence(tmp_path):
    bench = Bench(latent_config("glm_moe_dsa"))
    bench.reference.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_kv_tokens=200, block_size=4, reuse="prefix")
    opening = tiny_prompts()[5] * 2
    prompts = [opening + rest[:9] for rest in tiny_prompts(3)]
    params = SamplingParams(temperature=0.0, max_tokens=WANTED, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    bench.compare(prompts, [list(output.outputs[0].token_ids) for output in outputs])
    hits = [output.outputs[0].record.cached_tokens.get("device", 0) for output in outputs]
    assert sum(hit >= len(opening) for hit in hits) >= 4


def test_native_kernels_for_latents_are_refused_when_asked_for(tmp_path):
    Bench(latent_config("youtu")).reference.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="latents"):
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_kv_tokens=256, attention_backend="cpu")


def test_the_layout_of_deepseek_v3_keeps_576_elements_per_token_and_layer():
    geometry = geometry_from_config(DEEPSEEK_V3, BF16)
    layout = make_layout(served_groups(geometry.layers), 16, "tokens_heads")
    (group,) = layout.groups
    assert len(group.layers) == 61
    assert group.block_bytes == 61 * 16 * 576 * 2
    assert layout.slab_bytes == group.block_bytes
    assert geometry.bytes_per_token == 61 * 576 * 2 == 70272
    assert {tuple(c.name for c in state.components) for state in geometry.layers} <= set(SERVED)


def test_the_published_shape_of_deepseek_v3_passes_the_check_at_load():
    config = CONFIG_MAPPING["deepseek_v3"](**{k: v for k, v in DEEPSEEK_V3.items() if k != "model_type"})
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    assert tiny_difference(model_class, config) < TOLERANCE / 10


HYBRIDS = {"kimi_linear", "bailing_hybrid"}
"""Latents beside recurrent layers: tested with those."""


@pytest.mark.parametrize("model_type", ["dots3_note", "glm5_next", "mistral_large4"])
def test_an_index_that_chooses_otherwise_is_refused_by_name(model_type):
    assert "an index chooses" in refusal(CONFIG_MAPPING[model_type]())


def test_every_model_with_latents_in_transformers_is_served_here_or_refused_by_name():
    served = {latent_config(name).model_type for name in LATENT}
    known = {
        name for name, config in CONFIG_MAPPING.items() if "kv_lora_rank" in getattr(config, "__annotations__", {})
    }
    assert served == set(VERIFIED_LATENT)
    assert served <= known
    for name in sorted(known - served - HYBRIDS):
        assert refusal(CONFIG_MAPPING[name]()), name


@pytest.mark.parametrize("change", ["bias", "quantised"])
def test_a_layer_whose_weight_cannot_be_moved_is_refused(monkeypatch, change):
    bench = latent_bench("youtu", monkeypatch)
    attention = next(module for module in bench.served.modules() if hasattr(module, "expand_kv"))
    plain = attention.kv_b_proj
    if change == "bias":
        attention.kv_b_proj = torch.nn.Linear(plain.in_features, plain.out_features, bias=True)
    else:
        attention.kv_b_proj = torch.nn.Sequential(plain)
    with pytest.raises(ModelError, match={"bias": "bias", "quantised": "plain linear"}[change]):
        bench.executor()


def test_an_indexer_of_another_kind_is_refused(monkeypatch):
    bench = latent_bench("youtu", monkeypatch)
    next(module for module in bench.served.modules() if hasattr(module, "expand_kv")).indexer = torch.nn.Identity()
    with pytest.raises(ModelError, match="its index chooses by"):
        bench.executor()


@pytest.mark.parametrize("name", SPARSE)
def test_the_index_decides_what_is_read(name, monkeypatch):
    """Without it the tokens are others: the comparisons above would notice a choice that is not heeded."""
    bench = latent_bench(name, monkeypatch)
    for module in bench.served.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 1000
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED)
    assert served != [bench.generate(prompt, WANTED)[0] for prompt in prompts]


def test_a_long_chunk_is_looked_through_run_by_run(monkeypatch):
    bench = latent_bench("deepseek_v32", monkeypatch)
    monkeypatch.setattr("octavo.models.latent_index.WORK_ELEMENTS", 16 * 40 * 3)
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED, longest_chunk=40)
    bench.compare(prompts, served)


def test_a_choice_that_does_not_arrive_is_noticed(monkeypatch):
    bench = latent_bench("glm_moe_dsa", monkeypatch)
    bench.executor()
    for module in bench.served.modules():
        if hasattr(module, "index_topk"):
            forward = module.forward
            monkeypatch.setattr(module, "forward", partial(lambda f, *a, **k: f(*a, **k) and None, forward))
    with pytest.raises((ModelError, ValueError), match="index"):
        bench.serve([[5, 6, 7]], 2)


def test_latents_with_a_window_are_refused(monkeypatch):
    bench = latent_bench("youtu", monkeypatch)
    for module in bench.served.modules():
        if hasattr(module, "expand_kv"):
            module.sliding_window = 4
    with pytest.raises(ModelError, match="window"):
        bench.serve([[5, 6, 7]], 2)
