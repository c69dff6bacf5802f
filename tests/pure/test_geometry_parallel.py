"""What one device keeps of a model that several share. Every figure is written out by hand, in bf16."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.geometry.dtypes import BF16
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.model import ModelGeometry
from octavo.geometry.parallel import Parallelism, device_geometries, stages

LLAMA = {"model_type": "llama", "num_hidden_layers": 10, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8}  # fmt: skip


def geometry(**config: Any) -> ModelGeometry:
    return geometry_from_config(config, BF16)


def rank(config: dict[str, Any], tensor: int) -> ModelGeometry:
    return device_geometries(geometry(**config), Parallelism(tensor=tensor))[0]


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_split_down_to_one_and_then_replicated(ranks: int, kv_heads: int) -> None:
    device = rank(LLAMA, ranks)
    assert device.bytes_per_token == 10 * 2 * kv_heads * 128 * 2
    assert device.num_attention_heads == 32 // ranks
    assert any("replicated" in note for note in device.notes) == (ranks > 8)


def test_a_latent_is_whole_on_every_rank() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61}
    assert rank(config, 8).bytes_per_token == 70_272
    sparse = {"model_type": "deepseek_v32", "num_hidden_layers": 61}
    assert rank(sparse, 8).bytes_per_token == geometry(**sparse).bytes_per_token


def test_recurrences_are_split_by_heads_and_their_convolutions_by_channels() -> None:
    config = {"model_type": "qwen3_next", "num_hidden_layers": 4}
    half = rank(config, 2)
    # three recurrent layers: 16 of 32 value heads, 8 of 16 key heads
    assert half.fixed_bytes_per_sequence == 3 * ((2 * 8 * 128 + 16 * 128) * 3 * 2 + 16 * 128 * 128 * 4)
    assert half.bytes_per_token == 2 * 1 * 256 * 2


def test_groups_that_state_space_heads_share_are_replicated_when_they_are_fewer_than_ranks() -> None:
    config = {"model_type": "mamba2", "num_hidden_layers": 1, "n_groups": 1, "hidden_size": 4096, "expand": 2}
    assert rank(config, 4).fixed_bytes_per_sequence == (2048 + 2 * 1 * 128) * 3 * 2 + 32 * 64 * 128 * 4


def test_both_halves_of_a_hybrid_layer_are_split() -> None:
    config = {"model_type": "falcon_h1", "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
              "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_state": 128}  # fmt: skip
    half = rank(config, 2)
    assert half.bytes_per_token == 2 * 1 * 64 * 2
    assert half.fixed_bytes_per_sequence == (768 + 2 * 1 * 128) * 3 * 2 + 12 * 64 * 128 * 4


def test_a_stage_is_charged_its_own_layers() -> None:
    whole = geometry(model_type="gpt_oss", num_hidden_layers=6)
    parts = device_geometries(whole, Parallelism(pipeline=4))
    assert [part.num_layers for part in parts] == [2, 2, 1, 1]
    assert sum(part.bytes_kept(1000) for part in parts) == whole.bytes_kept(1000)
    assert [part.bytes_per_token_growing for part in parts] == [2048, 2048, 0, 2048]
    assert stages(whole, Parallelism(pipeline=2), [1, 5]) == ((0, 1), (1, 6))


def test_replicas_keep_everything() -> None:
    parallelism = Parallelism(tensor=2, pipeline=2, data=3)
    assert parallelism.devices == 12
    parts = device_geometries(geometry(**LLAMA), parallelism)
    assert [part.bytes_per_token for part in parts] == [5 * 2 * 4 * 128 * 2] * 2


def test_borrowed_state_is_read_on_its_own_stage_only() -> None:
    config = {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 4, "num_attention_heads": 8,
              "num_key_value_heads": 4}  # fmt: skip
    with pytest.raises(ConfigError, match="another stage"):
        device_geometries(geometry(**config), Parallelism(pipeline=3))
    last = device_geometries(geometry(**config), Parallelism(pipeline=2), [4, 8])[1]
    assert last.layers[-1] == geometry(**config).layers[-1].__class__(1)


@pytest.mark.parametrize(
    ("config", "parallelism", "field"),
    [
        (LLAMA, {"tensor": 3}, "tp"),
        ({**LLAMA, "num_key_value_heads": 4, "num_attention_heads": 24, "head_dim": 64}, {"tensor": 6}, "tp"),
        ({"model_type": "qwen3_next", "num_attention_heads": 96, "num_key_value_heads": 96}, {"tensor": 96}, "tp"),
        (LLAMA, {"pipeline": 11}, "pp"),
        (LLAMA, {"tensor": 0}, "tp"),
        (LLAMA, {"data": -1}, "dp"),
        (LLAMA, {"pipeline": True}, "pp"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(config: dict[str, Any], parallelism: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_geometries(geometry(**config), Parallelism(**parallelism))
    assert caught.value.field == field


def test_stages_that_do_not_share_out_the_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="share out 10 layers"):
        device_geometries(geometry(**LLAMA), Parallelism(pipeline=2), [4, 5])
