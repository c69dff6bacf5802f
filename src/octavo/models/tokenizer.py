"""Loads a checkpoint's tokenizer and turns text and messages into token ids.

Owns the calls into Transformers' tokenizers; templates are rendered by it, with their own special tokens and no
second BOS. What is wrong with the files is a `ModelError` naming `tokenizer`; what is wrong with a request,
a template that refuses it included, is a `RequestError` naming `messages` or `prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from octavo.errors import ModelError, RequestError
from octavo.models.quiet import quiet_transformers

# Any of these makes a directory hold a tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json",
                    "tokenizer_config.json")  # fmt: skip

_WITHOUT = "Name one with tokenizer=, or pass skip_tokenizer_init=True and prompts of token ids"


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in `directory`. Raises `ModelError` if there is none or it is damaged."""
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise ModelError("tokenizer", str(directory), f"no tokenizer file there ({', '.join(VOCABULARY_FILES[:3])}, "
                                                      f"...). {_WITHOUT}")  # fmt: skip
    for path in sorted(directory.glob("*token*.json")):
        _refuse_pointer(path)
    with quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception on a damaged file
            raise ModelError("tokenizer", str(directory), f"its tokenizer files cannot be read ({_brief(error)}). "
                                                          f"Fetch them again. {_WITHOUT}") from error  # fmt: skip


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a plain prompt, with the special tokens that this tokenizer adds by default."""
    return list(tokenizer(text).input_ids)


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat, up to where the assistant's answer begins. `options` go to the template."""
    if not messages:
        raise RequestError("messages", [], "a chat needs at least one message")
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages", f"{len(messages)} messages", "this model has no chat template. Use a plain "
                                                                    "prompt, or name a template")  # fmt: skip
    given = dict(options or {})
    if tools is not None:
        given["tools"] = list(tools)
    try:
        found = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **given,
        )
    except Exception as error:  # a template is a program by the model's authors: it may raise anything
        raise RequestError("messages", [message.get("role") for message in messages],
                           f"the model's chat template refused them: {_brief(error)}") from error  # fmt: skip
    return list(found)


def _refuse_pointer(path: Path) -> None:
    from octavo.models.weight_files import open_for_reading, read_bytes, refuse_intruder

    with open_for_reading(path) as file:
        head = read_bytes(path, file, 512)
    refuse_intruder(path, head, len(head))


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
