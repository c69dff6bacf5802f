"""`docs/capacity.md` is what its command writes, and its figures are those that one gets by hand."""

from __future__ import annotations

import pytest
from tools.make_capacity import COMPARED, CONTEXTS, KV_BYTES, MOST_PADDING, OWN, PAGE, compared, configs, padding, page

GIB, MIB = 2**30, 2**20


def row(model: str, context: int) -> tuple[int, int, int, int]:
    """(needed, octavo's, full length, unified pages)."""
    return next(
        found[2:] for found in compared(model, OWN.get(model) or configs()[model]) if found[1] == context
    )  # fmt: skip


def test_the_page_in_the_documents_is_the_one_that_the_command_writes() -> None:
    assert PAGE.read_text("utf-8") == page()


def test_windows_and_full_layers_of_gemma_3_by_hand() -> None:
    """10 full layers of 62; a position of a layer is 2 x 16 x 128 x 2 B = 8 KiB; 3,071 positions touch 193 blocks."""
    needed, octavo, full, _ = row("google/gemma-3-27b-it", 131_072)
    assert needed == (10 * 131_072 + 52 * 1024) * 8_192
    assert octavo == (10 * 131_072 + 52 * 193 * 16) * 8_192
    assert full == 62 * 131_072 * 8_192
    assert round(needed / GIB, 2) == 10.41


def test_chunks_of_llama_4_at_full_length_are_24_gib() -> None:
    needed, octavo, full, unified = row("meta-llama/Llama-4-Scout-17B-16E-Instruct", 131_072)
    layer = 2 * 8 * 128 * 2
    assert needed == (12 * 131_072 + 36 * 8192) * layer
    assert octavo == (12 * 131_072 + 36 * (8191 + 2048 + 17) // 16 * 16) * layer
    assert full == unified == 24 * GIB


def test_a_latent_is_the_same_by_all_rules_and_a_shared_layer_is_free() -> None:
    assert row("deepseek-ai/DeepSeek-V3", 8192) == (8192 * 70_272,) * 4
    needed, *_ = row("google/gemma-3n-E4B-it", 32_768)
    assert needed == (4 * 32_768 + 16 * 512) * 2 * 2 * 256 * 2  # 15 of 35 layers borrow


@pytest.mark.parametrize("model", COMPARED)
def test_octavo_sets_aside_no_more_than_either_other_rule(model: str) -> None:
    for context in CONTEXTS:
        needed, octavo, full, unified = row(model, context)
        assert needed <= octavo <= min(full, unified)


@pytest.mark.parametrize("model", configs())
def test_padding_is_under_three_percent_in_every_group(model: str) -> None:
    slab, groups, _ = padding(configs()[model])
    assert groups
    for _, block, count, lost in groups:
        assert lost == pytest.approx((slab - count * block) / slab)
        assert lost < MOST_PADDING
    assert slab <= max(KV_BYTES // 64, *(block for _, block, _, _ in groups), 0)


def test_the_page_names_every_published_config() -> None:
    written = PAGE.read_text("utf-8")
    assert all(model in written for model in configs())
