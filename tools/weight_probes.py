"""Configs of one class at four sets of sizes whose products and small sums do not coincide.

Used by `make_weight_shapes.py`. Classes with constraints of their own are told what they need in `EXTRA`.
"""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

from weight_solver import Unexplained

from octavo.geometry.fields import ALIASES

CANONICAL = {spelling: name for name, others in ALIASES.items() for spelling in (name, *others)}
SIZES: dict[str, tuple[int, int, int, int]] = {
    "num_attention_heads": (12, 20, 28, 36),
    "num_key_value_heads": (3, 4, 14, 12),
    "head_dim": (24, 40, 56, 16),
    "hidden_size": (336, 880, 1176, 792),
    "intermediate_size": (434, 758, 1006, 614),
    "moe_intermediate_size": (118, 134, 158, 194),
    "vocab_size": (1018, 1202, 1306, 1402),
    "max_position_embeddings": (254, 382, 494, 326),
    "num_experts": (14, 22, 26, 34),
    "num_local_experts": (14, 22, 26, 34),
    "n_routed_experts": (14, 22, 26, 34),
    "moe_num_experts": (14, 22, 26, 34),
    "n_shared_experts": (3, 4, 2, 5),
    "num_shared_experts": (3, 4, 2, 5),
    "moe_num_shared_experts": (3, 4, 2, 5),
    "shared_expert_intermediate_size": (142, 166, 178, 206),
    "shared_intermediate_size": (142, 166, 178, 206),
    "moe_shared_expert_intermediate_size": (142, 166, 178, 206),
    "dense_intermediate_size": (446, 766, 1018, 622),
    "intermediate_size_mlp": (446, 766, 1018, 622),
    "kv_lora_rank": (58, 62, 74, 82),
    "q_lora_rank": (86, 94, 106, 122),
    "qk_nope_head_dim": (34, 38, 46, 10),
    "qk_rope_head_dim": (18, 22, 26, 30),
    "v_head_dim": (42, 50, 54, 66),
    "index_head_dim": (70, 78, 90, 102),
    "index_n_heads": (6, 11, 13, 17),
    "linear_num_key_heads": (4, 8, 10, 6),
    "linear_num_value_heads": (16, 24, 40, 18),
    "linear_key_head_dim": (26, 44, 52, 68),
    "linear_value_head_dim": (76, 92, 104, 116),
    "linear_conv_kernel_dim": (4, 5, 3, 6),
    "linear_num_heads": (16, 24, 40, 18),
    "linear_head_dim": (26, 44, 52, 68),
    "expand": (2, 3, 2, 4),
    "ssm_state_size": (32, 48, 64, 80),
    "n_groups": (2, 4, 8, 3),
    "conv_kernel": (4, 5, 3, 6),
    "mamba_num_heads": (16, 32, 56, 44),
    "mamba_dt_rank": (23, 29, 31, 37),
    "time_step_rank": (23, 29, 31, 37),
    "conv_L_cache": (4, 5, 3, 6),
    "swa_num_attention_heads": (24, 40, 56, 72),
    "swa_num_key_value_heads": (6, 8, 28, 24),
    "hidden_size_per_layer_input": (98, 110, 114, 126),
    "vocab_size_per_layer_input": (1034, 1226, 1322, 1414),
    "laurel_rank": (146, 154, 162, 170),
    "moe_latent_size": (150, 174, 182, 190),
    "router_hidden_size": (146, 154, 162, 170),
}
"""Preferred values, one for each of four probes, by canonical name: their products and small sums are distinct."""
SET = {
    "num_experts_per_tok": 2, "mamba_d_head": "auto", "num_hidden_layers": 8, "pad_token_id": 0, "n_group": 1,
    "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 2, "num_dense_layers": 2,
    "interleave_moe_layer_step": 2, "mlp_only_layers": [0, 1],
}  # fmt: skip
"""Values that every probe has."""
NULLABLE = ("q_lora_rank", "moe_latent_size", "kv_lora_rank")
"""Sizes whose null takes parameters away and puts others in their place."""
EXTRA: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 3, "num_hidden_layers": 10, "activation_sparsity_pattern": [0.0] * 10},
    "gemma4_text": {"global_head_dim": (48, 80, 112, 32), "num_global_key_value_heads": (2, 4, 14, 6),
                    "attention_k_eq_v": False, "num_hidden_layers": 12, "num_kv_shared_layers": 6},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 4},
    "lfm2": {"block_auto_adjust_ff_dim": False, "intermediate_size": (512, 768, 1024, 1280),
             "full_attn_idxs": [1, 3, 6]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "zamba2": {"num_key_value_heads": None, "num_hidden_layers": None},
    "bamba": {"attn_layer_indices": [2, 5]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 4},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 4,
                           "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6},
    "nemotron_h": {"layer_types": ["mamba", "moe", "attention", "mlp"] * 2},
}  # fmt: skip
"""What single classes need besides, one value or four."""


def probes(cls: type, own_heads: bool) -> tuple[list[dict[str, Any]], list[Any]]:
    """Four configs of one class with sizes of their own, and the options that made them."""
    names = {f.name: f for f in fields_of(cls)}
    options = []
    for probe in range(4):
        chosen: dict[str, Any] = {}
        for name in names:
            canonical = CANONICAL.get(name, name)
            if canonical in SIZES and name != "num_heads":
                chosen[name] = SIZES[canonical][probe]
            elif canonical in SET:
                chosen[name] = SET[canonical]
        told = any(CANONICAL.get(name, name) == "head_dim" for name in names)
        if own_heads and not told and "num_attention_heads" in {CANONICAL.get(name, name) for name in names}:
            chosen["head_dim"] = SIZES["head_dim"][probe]
        elif not told:
            hidden = next((name for name in names if CANONICAL.get(name, name) == "hidden_size"), None)
            if hidden and "num_attention_heads" in {CANONICAL.get(name, name) for name in names}:
                chosen[hidden] = SIZES["num_attention_heads"][probe] * SIZES["head_dim"][probe]
        repair(chosen, names, probe)
        for name, value in EXTRA.get(cls.model_type, {}).items():
            chosen[name] = value[probe] if isinstance(value, tuple) else value
        chosen = {name: value for name, value in chosen.items() if value is not None}
        options.append(chosen)
    for dropped in ((), ("num_hidden_layers",), ("num_hidden_layers", "num_layers", "n_layer")):
        kept = [{k: v for k, v in chosen.items() if k not in dropped} for chosen in options]
        try:
            configs = [cls(**chosen) for chosen in kept]
        except Exception:  # noqa: BLE001 - lists of its own may not fit the layers
            continue
        return kept, configs
    raise Unexplained("cannot be configured with sizes of its own")


def repair(chosen: dict[str, Any], names: Any, probe: int) -> None:
    """Sizes that must fit together in one class or another."""
    if "num_heads" in names and "state_size" in names:  # a pure state-space model
        width = (42, 55, 42, 44)[probe]
        inner = SIZES["expand"][probe] * SIZES["hidden_size"][probe]
        chosen.update(num_heads=inner // width, head_dim=width, hidden_size=SIZES["hidden_size"][probe])
    if "mamba_d_ssm" in names:
        chosen["mamba_d_ssm"] = SIZES["mamba_num_heads"][probe] * (42, 54, 46, 34)[probe]
    if "mamba_head_dim" in names:
        chosen["mamba_head_dim"] = (42, 54, 46, 34)[probe]
    if "n_mamba_heads" in names:
        chosen["n_mamba_heads"] = 2 * (1 + probe % 2)
    heads = {"mamba_n_heads", "mamba_expand"} <= set(names) and "mamba_d_ssm" not in names
    if heads:
        hidden = chosen.get("hidden_size", SIZES["hidden_size"][probe])
        inner = SIZES["expand"][probe] * hidden
        wanted = ((16, 32), (24, 48, 20), (56, 28), (36, 12))[probe]
        chosen["mamba_n_heads"] = next(n for n in (*wanted, 8) if inner % n == 0)
