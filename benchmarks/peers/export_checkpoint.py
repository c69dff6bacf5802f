"""Writes the checkpoint that every engine is given: a plain directory of safetensors, config and tokenizer.

The embedded model is loaded once, unpacked, and its state dict copied into a fresh model of the same
config, so that nothing of how octavo keeps it goes along; a directory in the same way. The random model
has Qwen2.5-0.5B's shape and weights from a seed. The tokenizer goes along because exporters ask for one;
no figure needs it.

    python export_checkpoint.py smollm2-135m bf16 DIRECTORY
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SEED = 7

QWEN_0_5B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""The published config of Qwen2.5-0.5B, as far as it fixes shapes."""


def main(name: str, dtype: str, target: Path) -> None:
    logging.set_verbosity_error()
    torch.manual_seed(SEED)
    source = Path(name) if Path(name).is_dir() else _embedded()
    # the config's own spread of weights, so that logits are neither flat nor infinite
    random = name == "random-0.5b"
    model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN_0_5B)) if random else _copied(source)
    target.mkdir(parents=True, exist_ok=True)
    model.to(DTYPES[dtype]).save_pretrained(target)
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, target / file)


def _embedded() -> Path:
    from octavo.models.embedded import embedded_checkpoint

    return embedded_checkpoint()


def _copied(path: Path) -> Any:
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path, local_files_only=True))
    fresh.load_state_dict(source.state_dict())
    fresh.generation_config = source.generation_config
    return fresh


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
