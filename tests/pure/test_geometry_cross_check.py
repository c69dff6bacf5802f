"""The config against the tensors of the checkpoint."""

from __future__ import annotations

import pytest

from octavo.errors import ModelError
from octavo.geometry.cross_check import disagreements, require_agreement
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config

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
    assert [(d.layer, d.rows) for d in found] == [(0, 2048), (0, 2048), (1, 2048)]
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
