"""Every architecture that is served loads from what Transformers saves of it, tied or not, without a word left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import ARCHITECTURES, tiny_config
from transformers import AutoModelForCausalLM

from octavo.models.load import load_checkpoint


@pytest.mark.parametrize(("name", "tied"), [(name, bool(index % 2)) for index, name in enumerate(ARCHITECTURES)])
def test_what_transformers_saves_is_loaded_whole(tmp_path: Path, name: str, tied: bool) -> None:
    config = tiny_config(name)
    config.tie_word_embeddings = tied
    torch.manual_seed(3)
    original = AutoModelForCausalLM.from_config(config)
    original.save_pretrained(tmp_path)
    loaded = load_checkpoint(str(tmp_path), skip_tokenizer_init=True)
    kept = original.state_dict()
    assert kept.keys() == loaded.model.state_dict().keys()
    assert all(torch.equal(tensor, kept[key]) for key, tensor in loaded.model.state_dict().items())
    assert loaded.notes == ()
    assert loaded.max_model_len == 128


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_the_files_call_otherwise_is_found(tmp_path: Path, tied: bool) -> None:
    config = tiny_config("gpt_neox")
    config.tie_word_embeddings = tied
    original = AutoModelForCausalLM.from_config(config)
    original.save_pretrained(tmp_path)
    loaded = load_checkpoint(str(tmp_path), skip_tokenizer_init=True)
    assert torch.equal(loaded.model.lm_head.weight, original.lm_head.weight)
