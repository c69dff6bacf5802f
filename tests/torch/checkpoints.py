"""Tiny checkpoints on disk, for the tests that load them whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from octavo.models.files import WEIGHTS

WORDS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "hello", "world", "again"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('role ' + m.role + ' is not served') }}{% endif %}"
    "<|{{ m.role }}|> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words by spaces, `<s>` put before every text, as Llama's does."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   additional_special_tokens=["<|user|>", "<|assistant|>"])  # fmt: skip
    made.chat_template = template
    return made


def tiny_llama(directory: Path, *, dtype: torch.dtype = torch.float32, tokenizer: bool = True, **config: object) -> Path:
    """A random Llama of two layers, saved as Transformers saves it."""
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
             "eos_token_id": 2, "tie_word_embeddings": False}  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**(shape | config))).to(dtype).save_pretrained(directory)
    if tokenizer:
        tiny_tokenizer().save_pretrained(directory)
    return directory


def edit_json(path: Path, **changes: object) -> None:
    """Set the given keys; a value of None removes one."""
    told = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / WEIGHTS).items()}
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
