"""The config against the tensors of the checkpoint."""

from __future__ import annotations

import pytest

from octavo.errors import ModelError
from octavo.geometry.cross_check import disagreements, require_agreement, require_layers
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Compound

HIDDEN = 16384


def shapes(rows: int) -> dict[str, tuple[int, ...]]:
    return {
        "model.embed_tokens.weight": (128256, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (rows, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (rows, HIDDEN),
        "model.layers.1.self_attn.k_proj.weight": (rows, HIDDEN),
        "model.layers.1.self_attn.k_proj.bias": (3,),
    }


GEOMETRY = geometry_from_config(
    {"model_type": "llama", "hidden_size": HIDDEN, "num_attention_heads": 128, "num_key_value_heads": 8,
     "num_hidden_layers": 2},
    BF16,
)  # fmt: skip


def test_weights_that_agree_with_the_config_pass() -> None:
    assert disagreements(GEOMETRY, shapes(8 * 128)) == ()
    require_agreement(GEOMETRY, shapes(8 * 128))


def test_an_old_config_with_half_the_heads_is_caught_and_the_weights_win() -> None:
    found = disagreements(GEOMETRY, shapes(16 * 128))
    assert [(d.layer, d.shape[0]) for d in found] == [(0, 2048), (0, 2048), (1, 2048)]
    with pytest.raises(ModelError, match=r"the weights win: they hold 16 kv heads.*3 tensors disagree") as caught:
        require_agreement(GEOMETRY, shapes(16 * 128))
    assert caught.value.field == "num_key_value_heads"
    assert caught.value.value == 8


def test_packed_or_foreign_tensors_are_passed_over() -> None:
    odd = {
        "model.layers.0.self_attn.k_proj.weight": (8 * 128 * HIDDEN // 2, 1),
        "model.layers.7.self_attn.k_proj.weight": (5, HIDDEN),
        "vision.layers.0.attn.k_proj_norm.weight": (5, HIDDEN),
    }
    assert disagreements(GEOMETRY, odd) == ()


def test_the_error_names_tensor_shape_and_remedy() -> None:
    with pytest.raises(ModelError) as caught:
        require_agreement(GEOMETRY, shapes(16 * 128))
    said = str(caught.value)
    assert "model.layers.0.self_attn.k_proj.weight has shape [2048, 16384]" in said
    assert "correct num_key_value_heads or head_dim in config.json" in said


def test_attention_beside_a_recurrence_is_checked_too() -> None:
    """Layers that keep both at once, as in hybrids whose heads run in parallel."""
    hybrid = geometry_from_config(
        {"model_type": "falcon_h1", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
         "head_dim": 64, "num_hidden_layers": 2, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
         "mamba_d_state": 128, "mamba_n_groups": 1},
        BF16,
    )  # fmt: skip
    assert isinstance(hybrid.layers[0], Compound)
    name = "model.layers.1.self_attn.v_proj.weight"
    assert disagreements(hybrid, {name: (128, 1024)}) == ()
    assert [d.tensor for d in disagreements(hybrid, {name: (256, 1024)})] == [name]


def test_a_latent_and_its_rotary_key_are_checked_together() -> None:
    latent = geometry_from_config({"model_type": "deepseek_v3", "num_hidden_layers": 4}, BF16)
    name = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    assert disagreements(latent, {name: (576, 7168)}) == ()
    with pytest.raises(ModelError, match=r"512 \+ 64 = 576 rows.*kv_lora_rank or qk_rope_head_dim") as caught:
        require_agreement(latent, {name: (320, 7168)})
    assert caught.value.field == "kv_lora_rank"


def test_layers_of_other_parts_are_not_those_of_the_language_model() -> None:
    assert disagreements(GEOMETRY, {"vision_tower.encoder.layers.0.self_attn.k_proj.weight": (HIDDEN, HIDDEN)}) == ()


def test_a_config_with_more_layers_than_the_weights_is_refused() -> None:
    require_layers(GEOMETRY, ["model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"])
    require_layers(GEOMETRY, ["model.layers.61.mtp.weight", "lm_head.weight"])  # more than the config has: drafts
    require_layers(GEOMETRY, ["lm_head.weight"])  # names that tell nothing
    with pytest.raises(ModelError, match=r"end with layer 0; correct num_hidden_layers in config\.json to 1"):
        require_layers(GEOMETRY, ["model.layers.0.mlp.up_proj.weight"])
