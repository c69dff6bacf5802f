"""Tiny checkpoints on disk, for the tests that load them whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from gguf import GGUFWriter
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


def tiny_tokenizer(template: str | None = TEMPLATE, vocab_size: int = len(WORDS)) -> PreTrainedTokenizerFast:
    """Words by spaces, `<s>` put before every text, as Llama's does."""
    vocabulary = [*WORDS, *(f"w{index}" for index in range(len(WORDS), vocab_size))]
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   additional_special_tokens=["<|user|>", "<|assistant|>"])  # fmt: skip
    made.chat_template = template
    return made


def tiny_llama(
    directory: Path, *, dtype: torch.dtype = torch.float32, tokenizer: bool = True, **config: object
) -> Path:
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


def write_llama_gguf(path: Path, model: LlamaForCausalLM, **metadata: object) -> None:
    """The model as llama.cpp's converter writes it: q and k rows interleaved, a byte-level vocabulary."""
    config, tensors = model.config, model.state_dict()
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_name("tiny")
    letters = [*(chr(97 + index) for index in range(config.vocab_size - 4)), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(metadata.get("pre", "gpt-2")))
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
    writer.add_token_types([3, 3, 3] + [1] * len(letters))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for key, value in metadata.get("strings", {}).items():  # type: ignore[attr-defined]
        writer.add_string(key, value)
    extra = metadata.get("extra", {})
    for name, tensor in (_gguf_tensors(tensors, config) | extra).items():  # type: ignore[operator]
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def _gguf_tensors(tensors: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    named = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        named["output.weight"] = tensors["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for own, gguf_name in GGUF_NAMES.items():
            tensor = tensors[f"model.layers.{layer}.{own}.weight"]
            if own in heads:
                rows, columns = tensor.shape
                split = tensor.reshape(heads[own], 2, rows // heads[own] // 2, columns)
                tensor = split.transpose(1, 2).reshape(rows, columns).contiguous()
            named[f"blk.{layer}.{gguf_name}.weight"] = tensor
    return named
