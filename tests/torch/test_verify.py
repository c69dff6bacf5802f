"""Architectures outside the table: tried on a tiny model, served when equal, refused by name when not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import COMMON, MOE, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.errors import ModelError
from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Borrowed
from octavo.kernels.reference import ReferenceAttention
from octavo.models.observe import require_geometry
from octavo.models.shrink import VOCABULARY, shrunk
from octavo.models.table import REFUSED, VERIFIED, refusal
from octavo.models.trial import Trial
from octavo.models.verify import TOLERANCE, NotTried, require_served, tiny_difference


def build(model_type, **fields):
    config = AutoConfig.for_model(model_type, **{**COMMON, **fields})
    return AutoModelForCausalLM.from_config(config)


def difference(model_type, **fields):
    config = AutoConfig.for_model(model_type, **fields)
    return tiny_difference(AutoModelForCausalLM._model_mapping[type(config)], config)


def test_a_type_in_the_table_is_tried_all_the_same(monkeypatch):
    assert "as in octavo's tests" in require_served(build("llama"))
    monkeypatch.setattr("octavo.models.verify.tiny_difference", lambda *a, **k: 0.3)
    with pytest.raises(ModelError, match="differs from Transformers"):
        require_served(build("llama"))


def test_the_table_decides_only_where_no_tiny_model_can_be_made(monkeypatch):
    def fail(*args, **kwargs):
        raise NotTried("architecture", "X", "too odd to shrink")

    monkeypatch.setattr("octavo.models.verify.tiny_difference", fail)
    assert "octavo's tests" in require_served(build("llama"))
    with pytest.raises(NotTried):
        require_served(build("phimoe", **MOE))


def test_a_near_tie_of_one_seed_does_not_refuse_a_model(monkeypatch):
    answers = iter([0.3, 1e-6])
    monkeypatch.setattr("octavo.models.verify.tiny_difference", lambda *a, **k: next(answers))
    assert "equals Transformers" in require_served(build("llama"))


@pytest.mark.parametrize("name", ["phimoe", "mimo_v2_flash"])
def test_a_type_outside_the_table_that_equals_transformers_is_served(name):
    assert name not in VERIFIED
    fields = {"swa_num_key_value_heads": 4} if name == "mimo_v2_flash" else {}
    assert "equals Transformers" in require_served(build(name, **MOE, sliding_window=9, **fields))


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("gpt_oss", {}),
        ("phi3", {}),
        ("qwen3_moe", {}),
        ("gpt2", {}),
        ("cohere2", {}),
        ("llama4_text", {}),
        ("gemma3n_text", {}),
        ("gemma4_text", {"num_kv_shared_layers": 18}),
        ("gemma4_unified_text", {"num_kv_shared_layers": 18}),
    ],
)
def test_the_trial_passes_full_size_configs_of_known_types(model_type, fields):
    assert difference(model_type, **fields) < TOLERANCE / 5


@pytest.mark.parametrize(
    ("model_type", "dropped"), [("mistral", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks")]
)
def test_the_trial_finds_kernels_that_forget_a_rule(monkeypatch, model_type, dropped):
    attend = ReferenceAttention.attend

    def forgetful(self, q, new, pages, step, rule):
        return attend(self, q, new, pages, step, dataclasses.replace(rule, **{dropped: None}))

    monkeypatch.setattr(ReferenceAttention, "attend", forgetful)
    assert difference(model_type, **({"sliding_window": 4096} if model_type == "mistral" else {})) > 10 * TOLERANCE


def test_the_trial_finds_a_cache_written_in_the_wrong_place(monkeypatch):
    write = ReferenceAttention.write

    def misplaced(self, k, v, pages, step):
        write(self, k, v, pages, dataclasses.replace(step, write_offsets=(step.write_offsets + 1) % step.block_tokens))

    monkeypatch.setattr(ReferenceAttention, "write", misplaced)
    assert difference("llama") > 10 * TOLERANCE


def test_an_architecture_that_differs_is_refused_by_name(monkeypatch):
    monkeypatch.setattr("octavo.models.verify.tiny_difference", lambda *a, **k: 0.3)
    with pytest.raises(ModelError, match=r"architecture='PhimoeForCausalLM'.*differs from Transformers"):
        require_served(build("phimoe", **MOE))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "ALiBi"),
        ("mpt", "ALiBi"),
        ("falcon", "attention cannot be replaced"),
        ("doge", "mask"),
        ("diffllama", "between storing and attending"),
        ("rwkv", "recurrent"),
        ("glm5_next", "index"),
        ("minimax", "recurrent"),
        ("recurrent_gemma", "recurrent"),
        ("bert", "encoder"),
        ("t5", "encoder"),
    ],
)
def test_a_type_known_not_to_be_served_is_refused_with_its_reason(model_type, reason):
    assert reason in (refusal(AutoConfig.for_model(model_type)) or "")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("doge", "a mask of its own"), ("diffllama", "changes keys and values"), ("jetmoe", "changes keys and values"),
     ("xglm", "replaced"), ("bloom", "position_ids")],
)  # fmt: skip
def test_without_the_table_the_trial_refuses_them_too(monkeypatch, model_type, reason):
    """The table only makes the message better: what it lists does not pass by itself."""
    with pytest.raises(ModelError, match=reason):
        difference(model_type)


def test_layers_of_a_kind_not_served_are_refused_by_that_kind():
    config = AutoConfig.for_model("lfm2", **{**COMMON, "layer_types": ["conv", "full_attention"]})
    config.model_type = "a_model_of_tomorrow"
    assert refusal(config) is None
    config.layer_types = ["heavily_compressed_attention", "full_attention"]
    assert "'heavily_compressed_attention'" in refusal(config)


def test_no_type_is_in_both_tables():
    assert not set(VERIFIED) & set(REFUSED)


def test_a_model_that_cannot_be_made_small_is_refused_with_the_cause():
    config = AutoConfig.for_model("ministral", head_dim=None)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    with pytest.raises(ModelError, match=r"could not be checked.*TypeError"):
        tiny_difference(model_class, config)


def test_a_shrunk_config_keeps_its_kinds_of_layers_and_heads():
    config = AutoConfig.for_model("gemma3_text", num_attention_heads=8, num_key_value_heads=4, sliding_window=1024)
    small = shrunk(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers <= 8
    assert 1 < small.num_key_value_heads < small.num_attention_heads
    assert small.sliding_window < 10
    assert small.vocab_size == VOCABULARY
    assert config.sliding_window == 1024, "the config itself is left as it was"


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_a_model_with_parts_that_see_is_tried_with_every_kind_of_its_text_layers(model_type):
    fields = {"num_kv_shared_layers": 12} if model_type == "gemma4" else {}
    config = AutoConfig.for_model(model_type, text_config={"num_hidden_layers": 24, **fields})
    small = shrunk(config)
    assert set(small.text_config.layer_types) == {"full_attention", "sliding_attention"}
    assert small.vision_config is None or small.vision_config.num_hidden_layers == 1
    assert difference(model_type, text_config=config.text_config.to_dict()) < TOLERANCE / 5


def test_a_shrunk_config_keeps_layers_that_borrow_and_what_it_says_of_single_layers():
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=18, num_kv_shared_layers=6, global_head_dim=512)
    small = shrunk(config)
    own = small.num_hidden_layers - small.num_kv_shared_layers
    assert own >= 2
    assert set(small.layer_types[:own]) == set(small.layer_types[own:]) == set(config.layer_types)
    wide = [layer for layer, kind in enumerate(small.layer_types) if kind == "full_attention"]
    assert [small.per_layer_config[layer].head_dim for layer in wide] == [32] * len(wide)
    assert small.per_layer_config[0].head_dim == 16


@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "llama4_text", "gemma3n_text"])
def test_the_trial_gives_up_blocks_while_sequences_run_and_spoils_them(monkeypatch, model_type):
    trials = []
    monkeypatch.setattr(
        "octavo.models.verify.Trial", lambda *a, **k: trials.append(Trial(*a, **k)) or trials[-1]
    )  # fmt: skip
    difference(model_type, **({"sliding_window": 4096} if model_type == "mistral" else {}))
    assert [trial.given_up > 0 for trial in trials] == [True, True]
    assert [trial.pauses for trial in trials] == [1, 1]


@pytest.mark.parametrize("model_type", ["mistral", "llama4_text"])
def test_the_trial_finds_a_kernel_that_reads_what_was_given_up(monkeypatch, model_type):
    attend = ReferenceAttention.attend

    def greedy(self, q, new, pages, step, rule):
        return attend(self, q, new, pages, step, dataclasses.replace(rule, window=None, chunk_tokens=None))

    monkeypatch.setattr(ReferenceAttention, "attend", greedy)
    found = difference(model_type, **({"sliding_window": 4096} if model_type == "mistral" else {}))
    assert found == float("inf"), "what is spoilt is not a number, and spreads"


def test_verifying_leaves_the_random_state_of_torch_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    difference("llama")
    assert torch.equal(before, torch.get_rng_state())


def test_a_config_that_does_not_fit_its_model_is_refused_layer_by_layer():
    config = tiny_config("llama")
    model = AutoModelForCausalLM.from_config(config)
    require_geometry(model, geometry_from_config(config.to_dict(), FP32).layers)
    wrong = {**config.to_dict(), "num_key_value_heads": 4}
    with pytest.raises(ModelError, match="layer 0 stores"):
        require_geometry(model, geometry_from_config(wrong, FP32).layers)


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("mistral", {"sliding_window": 5}, "layer 0 attends over a window of 6 where its config says a window of 5"),
        ("llama4_text", {"attention_chunk_size": 5}, "layer 0 attends over chunks of 7 .* says chunks of 5"),
        ("gemma3n_text", {"num_kv_shared_layers": 1}, "layer 3 stores {} a token"),
    ],
)
def test_a_model_that_reads_other_state_than_its_config_says_is_refused(name, fields, said):
    config = tiny_config(name)
    model = AutoModelForCausalLM.from_config(config)
    require_geometry(model, geometry_from_config(config.to_dict(), FP32).layers)
    with pytest.raises(ModelError, match=said):
        require_geometry(model, geometry_from_config({**config.to_dict(), **fields}, FP32).layers)


def test_a_wider_window_than_a_model_reads_is_no_reason_to_refuse_it():
    config = tiny_config("mistral")
    model = AutoModelForCausalLM.from_config(config)
    require_geometry(model, geometry_from_config({**config.to_dict(), "sliding_window": 8}, FP32).layers)


def test_a_layer_that_borrows_from_another_than_planned_is_refused():
    config = tiny_config("gemma3n_text")
    model = AutoModelForCausalLM.from_config(config)
    layers = list(geometry_from_config(config.to_dict(), FP32).layers)
    assert layers[3] == Borrowed(1)
    layers[3] = Borrowed(0)
    with pytest.raises(
        ModelError, match="layer 3 reads the state of layer 1 where its config says the state of layer 0"
    ):
        require_geometry(model, layers)
