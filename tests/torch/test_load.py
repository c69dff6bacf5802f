"""Loading: whole checkpoints come back as Transformers loads them, every other one as an error that explains."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_json, edit_weights, tiny_llama
from transformers import AutoModelForCausalLM

from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.models.files import INDEX, WEIGHTS
from octavo.models.load import load_checkpoint

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
LAYER = "model.layers.1.self_attn"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "tiny")


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(OctavoError) as caught:
        load_checkpoint(str(path), **options)
    return str(caught.value)


def test_a_model_loads_with_the_weights_transformers_loads(model: Path) -> None:
    stages: list[tuple[str, float]] = []
    loaded = load_checkpoint(str(model), progress=lambda stage, done: stages.append((stage, done)))
    reference = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.model.state_dict().keys() == reference.state_dict().keys()
    assert all(torch.equal(tensor, loaded.model.state_dict()[name]) for name, tensor in reference.state_dict().items())
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.name == str(model)
    assert loaded.dtype == torch.float32
    assert loaded.max_model_len == 64
    assert loaded.generation.eos_token_ids == (2,)
    assert loaded.notes == ()
    assert loaded.config_json["num_key_value_heads"] == 2
    assert [done for _, done in stages] == sorted(done for _, done in stages)
    assert stages[-1] == ("loaded", 1.0)


def test_bytes_of_weights_are_counted_once_when_tied(tmp_path: Path) -> None:
    tied = load_checkpoint(str(tiny_llama(tmp_path / "tied", tie_word_embeddings=True)))
    untied = load_checkpoint(str(tiny_llama(tmp_path / "untied")))
    assert untied.weights_bytes - tied.weights_bytes == 32 * 16 * 4


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_dtype_is_the_checkpoints_own(tmp_path: Path, kept: torch.dtype) -> None:
    loaded = load_checkpoint(str(tiny_llama(tmp_path, dtype=kept)))
    assert loaded.dtype == kept
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {kept}


def test_auto_dtype_is_read_from_the_weights_when_the_config_says_none(tmp_path: Path) -> None:
    edit_json(tiny_llama(tmp_path, dtype=torch.bfloat16) / "config.json", dtype=None)
    assert load_checkpoint(str(tmp_path)).dtype == torch.bfloat16


@pytest.mark.parametrize("named", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_that_is_named_wins(model: Path, named: Any) -> None:
    loaded = load_checkpoint(str(model), dtype=named)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"device": "gpu please"}, "device"),
        ({"device": 3.5}, "device"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": "64"}, "max_model_len"),
        ({"max_model_len": 65}, "max_model_len"),
        ({"revision": "main"}, "revision"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"tokenizer": "/no/such/place"}, "model"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(model: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(str(model), **options)
    assert caught.value.field == field


def test_cuda_without_a_device_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA device" in refusal(model, device="cuda")


def test_an_unknown_option_is_refused(model: Path) -> None:
    with pytest.raises(TypeError, match="quantization"):
        load_checkpoint(str(model), quantization="awq")


def test_a_tied_model_without_head_tensor_is_tied(tmp_path: Path) -> None:
    loaded = load_checkpoint(str(tiny_llama(tmp_path, tie_word_embeddings=True)))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.notes == ()


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_with_head_tensor_is_tied_and_says_what_it_left(tmp_path: Path, same: bool) -> None:
    tiny_llama(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    if same:
        edit_weights(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()}))
    loaded = load_checkpoint(str(tmp_path))
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert bool(loaded.notes) is not same
    assert same or "lm_head.weight in the files differs" in loaded.notes[0]


def test_an_untied_model_uses_its_own_head(model: Path) -> None:
    loaded = load_checkpoint(str(model))
    assert not torch.equal(loaded.model.lm_head.weight, loaded.model.model.embed_tokens.weight)


def test_an_untied_model_without_head_tensor_is_refused_with_both_facts(model: Path) -> None:
    edit_weights(model, lambda tensors: tensors.pop(HEAD))
    message = refusal(model)
    assert "tie_word_embeddings=false" in message
    assert "no lm_head.weight in the weight files" in message
    assert "set tie_word_embeddings to true" in message


def test_a_config_with_other_kv_heads_than_the_weights_is_refused_before_loading(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_json(model / "config.json", num_key_value_heads=4)
    monkeypatch.setattr("octavo.models.load._from_pretrained", lambda *_: pytest.fail("weights were loaded"))
    message = refusal(model)
    assert "num_key_value_heads=4 x head_dim=4 = 16 rows" in message
    assert "k_proj.weight in model.safetensors has shape [8, 16]" in message
    assert "num_key_value_heads=2 at this head_dim" in message
    assert "the weights are what was trained, so they win" in message.lower()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 40}, "vocab_size=40"),
        ({"intermediate_size": 30}, "intermediate_size=30"),
        ({"num_attention_heads": 8, "head_dim": 4}, "num_attention_heads=8 x head_dim=4 = 32 rows"),
        ({"hidden_size": 32, "head_dim": 4}, "asks for shape"),
        ({"num_hidden_layers": 1}, "no place for: model.layers.1"),
        ({"num_hidden_layers": 3}, "the model needs: model.layers.2"),
        ({"attention_bias": True}, "k_proj.bias"),
        ({"model_type": "llamma"}, "model_type 'llamma'"),
        ({"model_type": "bert"}, "bert"),
        ({"model_type": "llamma", "auto_map": {"AutoConfig": "x.Y"}}, "its own code is never run"),
        ({"num_attention_heads": 3}, "config.json"),
        ({"hidden_act": "no such"}, "config.json"),
        ({"rope_parameters": {"rope_type": "no such", "rope_theta": 1e4}}, "no such"),
    ],
)
def test_a_config_that_contradicts_the_weights_is_explained(model: Path, changes: dict[str, Any], said: str) -> None:
    edit_json(model / "config.json", **changes)
    message = refusal(model)
    assert said in message
    assert str(model) in message


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_quantiser_that_is_not_installed_is_named(model: Path, method: str) -> None:
    edit_json(model / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": 4})
    message = refusal(model)
    assert f"quantised by {method}" in message
    assert "Install what that names, or use an unquantised checkpoint" in message


def test_fp8_weights_are_unpacked_with_their_scales(model: Path) -> None:
    kept: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "_proj." in name]:
            scale = tensors[name].abs().max() / 448
            tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            kept[name] = tensors[name].float() * scale
            tensors[name.replace("weight", "weight_scale_inv")] = scale.reshape(1, 1)

    edit_weights(model, quantise)
    told = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_json(model / "config.json", quantization_config=told)
    loaded = load_checkpoint(str(model)).model.state_dict()
    assert len(kept) == 14
    assert all(torch.allclose(loaded[name], tensor) for name, tensor in kept.items())
    edit_json(model / "config.json", quantization_config=None)
    assert "no place for" in refusal(model)


def test_integers_that_no_quantiser_reads_are_refused(model: Path) -> None:
    name = f"{LAYER}.k_proj.weight"
    edit_weights(model, lambda tensors: tensors.update({name: torch.ones(8, 16, dtype=torch.int8)}))
    assert f"{name} in model.safetensors is quantised (I8)" in refusal(model)


def test_weights_the_model_needs_are_never_started_at_random(model: Path) -> None:
    edit_weights(model, lambda tensors: tensors.pop(f"{LAYER}.k_proj.weight"))
    message = refusal(model)
    assert f"lack 1 weights that the model needs: {LAYER}.k_proj.weight" in message


def test_weights_without_a_place_are_refused(model: Path) -> None:
    edit_weights(model, lambda tensors: tensors.update({f"{LAYER}.k_norm.weight": torch.ones(4)}))
    assert f"no place for: {LAYER}.k_norm.weight" in refusal(model)


def test_what_is_computed_or_generates_no_text_may_be_left_out(model: Path) -> None:
    extra = {f"{LAYER}.rotary_emb.inv_freq": torch.ones(2), "vision_tower.patch.weight": torch.ones(2)}
    edit_weights(model, lambda tensors: tensors.update(extra))
    (note,) = load_checkpoint(str(model)).notes
    assert "vision_tower.patch.weight" in note


def test_damaged_files_are_refused_before_anything_is_built(model: Path) -> None:
    path = model / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4])
    assert "4 bytes are missing" in refusal(model)


def test_shards_load_as_one_file_does(model: Path, tmp_path: Path) -> None:
    whole = load_checkpoint(str(model))
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(sharded, max_shard_size="4KB")
    shutil.copy(model / "tokenizer.json", sharded)
    shutil.copy(model / "tokenizer_config.json", sharded)
    assert (sharded / INDEX).is_file()
    parts = load_checkpoint(str(sharded))
    names = whole.model.state_dict()
    assert all(torch.equal(names[name], tensor) for name, tensor in parts.model.state_dict().items())
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    assert "are missing" in refusal(sharded)


def test_weights_outlive_their_file(model: Path) -> None:
    loaded = load_checkpoint(str(model))
    before = loaded.model.model.embed_tokens.weight.clone()
    with (model / WEIGHTS).open("r+b") as file:
        file.write(b"\xff" * (model / WEIGHTS).stat().st_size)
    assert torch.equal(before, loaded.model.model.embed_tokens.weight)


def weights_in_memory() -> int:
    kept = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum(1 for one in kept if one.shape == (32, 16) and one.device.type == "cpu")


def test_nothing_but_the_model_stays_in_memory(model: Path) -> None:
    gc.collect()
    gc.disable()  # so that only the loader's own collection counts
    try:
        before = weights_in_memory()
        loaded = load_checkpoint(str(model))
        assert weights_in_memory() == before + 2
    finally:
        gc.enable()
    del loaded
    gc.collect()
    edit_weights(model, lambda tensors: tensors.pop(f"{LAYER}.k_proj.weight"))
    refusal(model)
    gc.collect()
    assert weights_in_memory() == before


def test_a_missing_tokenizer_is_refused_unless_it_is_not_wanted(tmp_path: Path) -> None:
    tiny_llama(tmp_path, tokenizer=False)
    message = refusal(tmp_path)
    assert "no tokenizer file" in message
    assert "skip_tokenizer_init=True" in message
    assert load_checkpoint(str(tmp_path), skip_tokenizer_init=True).tokenizer is None


def test_a_tokenizer_can_come_from_elsewhere(model: Path, tmp_path: Path) -> None:
    bare = tiny_llama(tmp_path / "bare", tokenizer=False)
    assert load_checkpoint(str(bare), tokenizer=str(model)).tokenizer.eos_token == "</s>"


def test_a_hub_name_without_network_says_what_can_be_done() -> None:
    with pytest.raises(ModelError) as caught:
        load_checkpoint("nobody/no-such-model")
    assert caught.value.field == "model"
    assert "cannot be reached" in str(caught.value)
    assert "Name a local directory" in str(caught.value)


def test_sampling_defaults_come_from_the_checkpoint(model: Path) -> None:
    told = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True, "eos_token_id": [2, 7]}
    (model / "generation_config.json").write_text(json.dumps(told))
    generation = load_checkpoint(str(model)).generation
    assert generation.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert generation.eos_token_ids == (2, 7)


def test_the_fingerprint_is_that_of_the_weights(model: Path, tmp_path: Path) -> None:
    first = load_checkpoint(str(model)).fingerprint
    shutil.copytree(model, tmp_path / "copy")
    assert load_checkpoint(str(tmp_path / "copy"), dtype="bf16").fingerprint == first
    edit_weights(tmp_path / "copy", lambda tensors: tensors[HEAD].mul_(2))
    assert load_checkpoint(str(tmp_path / "copy")).fingerprint != first
