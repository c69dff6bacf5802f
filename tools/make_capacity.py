"""Write `docs/capacity.md`: what a sequence takes by what it needs, by windows at full length, by unified pages.

Run it after a change of the planner's or the layout's rules: `python tools/make_capacity.py`. Configs are
those of tests/pure/published_configs.json; three models that it lacks stand below with the fields that fix
their state. The second table is what octavo's slabs lose to blocks of unequal size, for every published config.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.planner.asked import Asked
from octavo.planner.build import Ground, ground_of
from octavo.planner.charging import paging_for
from octavo.planner.paging import Paging
from octavo.planner.source import says_recurrent_dtype

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "pure" / "published_configs.json"
PAGE = ROOT / "docs" / "capacity.md"
CONTEXTS = (1_024, 8_192, 32_768, 131_072)
STEP_TOKENS = 2048
KV_BYTES = 16 * 2**30
UNIFIED = "vllm-0.11"
MOST_PADDING = 0.03

OWN: dict[str, dict[str, Any]] = {
    "google/gemma-3-27b-it": {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "sliding_window": 1024, "sliding_window_pattern": 6, "hidden_size": 5376, "torch_dtype":
        "bfloat16", "max_position_embeddings": 131072,
    },
    "deepseek-ai/DeepSeek-V3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "hidden_size": 7168, "torch_dtype": "bfloat16", "max_position_embeddings": 163840,
    },
    "google/gemma-3n-E4B-it": {
        "model_type": "gemma3n_text", "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "num_kv_shared_layers": 15, "sliding_window": 512, "hidden_size": 2048,
        "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
    },
}  # fmt: skip
COMPARED = (
    "google/gemma-3-27b-it", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "ai21labs/AI21-Jamba-1.5-Large", "meta-llama/Llama-4-Scout-17B-16E-Instruct", "google/gemma-3n-E4B-it",
)  # fmt: skip
ABOUT = f"""Written by `python tools/make_capacity.py`; do not edit. Bytes of one sequence on one device, keys and
values in bf16, steps of {STEP_TOKENS:,} tokens.

- **needed**: what the layers can still read, and nothing else.
- **octavo**: what it sets aside: whole blocks of 16 positions, and in window and chunk layers room for a step.
- **full length**: windows and chunks charged as if they kept every position; state of recurrent layers as it is.
- **unified pages**: as {UNIFIED.replace("-", " ")} charges: one size of page for all layers, into which a recurrent
  layer's state must fit, whole groups of equally many layers, a window charged with one block more; windows at full
  length where layers differ in size or attend in chunks. Element types are those of the other columns.
"""
PADDING = f"""## Padding of slabs

Groups of layers share one budget in slabs; a slab belongs to one group at a time and holds whole blocks of it. What
is left of a slab is padding. Blocks of 16 positions, bf16, a KV cache of {KV_BYTES // 2**30} GiB; octavo bounds
padding at {MOST_PADDING:.0%} where a slab of a 64th of the KV cache or less can do it.
"""


def configs() -> dict[str, dict[str, Any]]:
    published: dict[str, dict[str, Any]] = json.loads(PUBLISHED.read_text("utf-8"))
    return published


def ground(config: dict[str, Any], engine: str = "octavo") -> Ground:
    asked = Asked.of(engine=engine, kv_dtype="bf16", max_num_batched_tokens=STEP_TOKENS, kv_cache_memory_bytes=KV_BYTES)
    return ground_of(config, asked)


def compared(name: str, config: dict[str, Any]) -> Iterator[tuple[str, int, int, int, int, int]]:
    """(model, context, needed, octavo's, at full length, on unified pages)."""
    # the engine would keep recurrences in the model's type where a config names none: here types are the same
    same = config if says_recurrent_dtype(config) else {**config, "mamba_ssm_dtype": "float32"}
    own, unified = ground(config), ground(same, UNIFIED)
    pages = paging_for(own.engine, own.device, own.charge)
    pages_unified = paging_for(unified.engine, unified.device, unified.charge)
    assert isinstance(pages, Paging)
    for context in CONTEXTS:
        needed = own.geometry.bytes_kept(context)
        full = context * own.geometry.bytes_per_token + own.geometry.fixed_bytes_per_sequence
        aside = pages.bytes_for(context)
        yield name, context, needed, aside, full, pages_unified.bytes_for(context)


def padding(config: dict[str, Any]) -> tuple[int, list[tuple[str, int, int, float]], str]:
    """(slab bytes, rows of a group each, what is not served of it): group, block bytes, blocks in a slab, lost."""
    there = ground(config)
    pages = paging_for(there.engine, there.device, there.charge)
    assert isinstance(pages, Paging)
    try:
        layout = make_layout(served_groups(there.geometry.layers), 16, most_slab_bytes=there.charge.most_slab_bytes)
    except ConfigError as error:
        rows = [
            (g.name, g.block_bytes, g.per_unit, 1 - g.per_unit * g.block_bytes / pages.unit_bytes) for g in pages.groups
        ]
        return pages.unit_bytes, rows, str(error.value)
    rows = [
        (group.name, group.block_bytes, group.blocks_per_slab, share)
        for group, share in zip(layout.groups, layout.padding_share, strict=True)
    ]
    return layout.slab_bytes, rows, ""


def page() -> str:
    known = configs()
    lines = ["# What a sequence takes", "", ABOUT]
    lines += ["| model | context | needed | octavo | full length | unified pages |", "|---|---:|---:|---:|---:|---:|"]
    for name in COMPARED:
        for model, context, needed, aside, full, unified in compared(name, OWN.get(name) or known[name]):
            times = f"{_size(full)} ({full / needed:.1f}x) | {_size(unified)} ({unified / needed:.1f}x)"
            lines.append(f"| {model} | {context:,} | {_size(needed)} | {_size(aside)} | {times} |")
    lines += ["", PADDING, "| model | slab | group | block | in a slab | lost |", "|---|---:|---|---:|---:|---:|"]
    alone, above, unserved = [], [], []
    for name, config in known.items():
        slab, rows, missing = padding(config)
        if missing:
            unserved.append(f"{name} ({missing})")
        if len(rows) == 1:
            alone.append(name)
            continue
        for group, block, count, lost in rows:
            lines.append(f"| {name} | {slab:,} | {group} | {block:,} | {count:,} | {lost:.2%} |")
            if lost >= MOST_PADDING:
                above.append(f"{name}, {group}: {lost:.2%}")
    lines += [
        "",
        f"At {MOST_PADDING:.0%} or above: {'; '.join(above) if above else 'none'}.",
        "",
        f"Planned and not served yet, slabs as they would be: {'; '.join(unserved) if unserved else 'none'}.",
        "",
        f"Layers of one kind only, where a slab is a block and nothing is lost ({len(alone)}): {', '.join(alone)}.",
    ]
    return "\n".join(lines) + "\n"


def _size(number: int) -> str:
    unit, name = (2**30, "GiB") if number >= 2**30 else (2**20, "MiB")
    return f"{number / unit:,.4g} {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.parse_args().output.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
