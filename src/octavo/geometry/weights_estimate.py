"""Weights of a model type without formulas: the matrices that every decoder has, and nothing else.

An estimate: feed-forward networks are taken to be gated, attention to have no biases, and norms are
left out, which together are under 1% of most models. A recurrent layer is taken to have projections of
the hidden size to everything that its state is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.geometry.attention import head_dim
from octavo.geometry.dtypes import BF16
from octavo.geometry.feed_forward import DENSE, EXPERTS, NONE, feed_forward_kinds
from octavo.geometry.fields import Fields
from octavo.geometry.from_config import geometry_from_config
from octavo.geometry.state import Borrowed, Compound, Constant, LayerState, Stateless, parts_of

RowTuple = tuple[str, tuple[int, ...] | None, tuple[int, ...]]


def estimated_rows(config: Mapping[str, Any], raw: Mapping[str, Any], model_type: str) -> list[RowTuple]:
    """(name, layers, shape) of the main matrices."""
    fields = Fields(raw, model_type)
    geometry = geometry_from_config(config, BF16)
    hidden, vocab = geometry.hidden_size, fields.required("vocab_size")
    rows: list[RowTuple] = [("embed_tokens.weight", None, (vocab, hidden))]
    tied = next(
        (p["tie_word_embeddings"] for p in (raw, config) if isinstance(p.get("tie_word_embeddings"), bool)), False
    )
    if not tied:
        rows.append(("lm_head.weight", None, (vocab, hidden)))
    blocks = fields.integer("num_mem_blocks")
    hybrids = [i for i, state in enumerate(geometry.layers) if isinstance(state, Compound)]
    sharing = set(hybrids[blocks:]) if blocks else set()
    for layer, state in enumerate(geometry.layers):
        if layer in sharing and isinstance(state, Compound):  # its attention is that of an earlier layer
            state = Compound(tuple(part for part in state.parts if isinstance(part, Constant)))
        rows.extend(_mixer(fields, layer, state, hidden))
    if blocks:
        return rows + _gated(fields, tuple(hybrids[:blocks]), hidden)
    return rows + _feed_forward(fields, len(geometry.layers), hidden)


def _mixer(fields: Fields, layer: int, state: LayerState, hidden: int) -> list[RowTuple]:
    if isinstance(state, Stateless):
        return []
    heads = fields.integer("num_attention_heads") if isinstance(fields.get("num_attention_heads"), int) else None
    at = (layer,)
    if isinstance(state, Borrowed):
        width = (heads or 1) * head_dim(fields)
        return [(f"layers.*.q_proj.{layer}", at, (width, hidden)), (f"layers.*.o_proj.{layer}", at, (hidden, width))]
    rows: list[RowTuple] = []
    for part in parts_of(state):
        if isinstance(part, (Borrowed, Stateless)):
            continue
        named = {component.name: component for component in part.components}
        if isinstance(part, Constant):
            rows.extend(_recurrent(part, layer, hidden))
        elif "latent" in named and heads:
            rows.extend(_latent(fields, layer, heads, hidden))
        elif "k" in named and heads:
            key, value = named["k"], named["v"]
            rows.append((f"layers.*.q_proj.{layer}", at, (heads * key.shape[1], hidden)))
            rows.append((f"layers.*.kv_proj.{layer}", at, (key.elements + value.elements, hidden)))
            rows.append((f"layers.*.o_proj.{layer}", at, (hidden, heads * value.shape[1])))
        elif "kv" in named and heads:
            width = heads * named["kv"].shape[1]
            low, out = fields.integer("q_lora_rank"), fields.integer("o_lora_rank")
            rows.append((f"layers.*.q_proj.{layer}", at, (low or hidden, hidden + width if low else width)))
            rows.append((f"layers.*.kv_proj.{layer}", at, (named["kv"].elements, hidden)))
            groups = fields.integer("o_groups") or 1
            rows.append((f"layers.*.o_proj.{layer}", at, (out, width + groups * hidden) if out else (hidden, width)))
    return rows


def _gated(fields: Fields, layers: tuple[int, ...], hidden: int) -> list[RowTuple]:
    wide = fields.get("intermediate_size")
    width = wide if isinstance(wide, int) and wide > 0 else 4 * hidden
    return [("layers.*.mlp.weight", layers, (3 * width, hidden))]


def _by_block_configs(fields: Fields, hidden: int) -> list[RowTuple]:
    """One factor per layer: two thirds of it times the hidden size, up to a multiple of 256, or nothing."""
    rows: list[RowTuple] = []
    for layer, block in enumerate(fields.sequence("block_configs") or ()):
        described = block.get("ffn") if isinstance(block, Mapping) else None
        if not isinstance(described, Mapping) or described.get("no_op"):
            continue
        factor = described.get("ffn_mult")
        if isinstance(factor, (int, float)):
            width = -(-int(2 * factor * hidden / 3) // 256) * 256
            rows.append((f"layers.*.mlp.{layer}", (layer,), (3 * width, hidden)))
    return rows


def _recurrent(state: Constant, layer: int, hidden: int) -> list[RowTuple]:
    """Projections into all that the state is made of, and out of what it gives."""
    shapes = {component.name: component.shape for component in state.components}
    inner = shapes["conv"][0] if "conv" in shapes else hidden
    out, into = inner, 2 * inner
    matrix = shapes.get("recurrent", ())
    if "conv_groups" in shapes:
        into += shapes["conv_groups"][0] * shapes["conv_groups"][1]
    elif len(matrix) == 3:  # a delta rule: its convolution spans queries and keys too
        out = matrix[0] * matrix[2]
        into = inner + out
    return [
        (f"layers.*.in_proj.{layer}", (layer,), (into, hidden)),
        (f"layers.*.out_proj.{layer}", (layer,), (hidden, out)),
    ]


def _latent(fields: Fields, layer: int, heads: int, hidden: int) -> list[RowTuple]:
    rank, rope = fields.required("kv_lora_rank"), fields.required("qk_rope_head_dim", low=0)
    nope, value = fields.integer("qk_nope_head_dim", low=0) or 0, fields.integer("v_head_dim") or head_dim(fields)
    low, at = fields.integer("q_lora_rank"), (layer,)
    queries = heads * (nope + rope)
    rows: list[RowTuple] = [
        (f"layers.*.kv_a_proj.{layer}", at, (rank + rope, hidden)),
        (f"layers.*.kv_b_proj.{layer}", at, (heads * (nope + value), rank)),
        (f"layers.*.o_proj.{layer}", at, (hidden, heads * value)),
    ]
    if low is None:
        return [*rows, (f"layers.*.q_proj.{layer}", at, (queries, hidden))]
    return [
        *rows,
        (f"layers.*.q_a_proj.{layer}", at, (low, hidden)),
        (f"layers.*.q_b_proj.{layer}", at, (queries, low)),
    ]


def _feed_forward(fields: Fields, count: int, hidden: int) -> list[RowTuple]:
    if isinstance(fields.raw.get("block_configs"), (list, tuple)):
        return _by_block_configs(fields, hidden)
    kinds = feed_forward_kinds(fields, count)
    dense = tuple(i for i, kind in enumerate(kinds) if kind == DENSE)
    sparse = tuple(i for i, kind in enumerate(kinds) if kind not in (DENSE, NONE))
    wide = fields.get("intermediate_size")
    width = wide if isinstance(wide, int) and wide > 0 else 4 * hidden
    narrow = fields.integer("moe_intermediate_size") or width
    experts = next((fields.integer(name) for name in EXPERTS if isinstance(fields.get(name), int)), None) or 1
    shared = next((fields.integer(name, low=0) for name in ("n_shared_experts", "num_shared_experts")
                   if isinstance(fields.get(name), int)), None) or 0  # fmt: skip
    inner = fields.integer("dense_intermediate_size") or width
    latent = fields.integer("routed_expert_hidden_size") or fields.integer("moe_latent_size") or hidden
    rows: list[RowTuple] = [("layers.*.mlp.weight", dense, (3 * inner, hidden))] if dense else []
    if sparse:
        rows.append(("layers.*.mlp.experts.weight", sparse, (experts, 3 * narrow, latent)))
        rows.append(("layers.*.mlp.router.weight", sparse, (experts, hidden)))
        if shared:
            rows.append(("layers.*.mlp.shared_experts.weight", sparse, (3 * shared * narrow, hidden)))
    return rows
