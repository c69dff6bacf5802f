"""Loads a checkpoint's tokenizer and turns text and messages into token ids.

Owns the calls into Transformers' tokenizers; templates are rendered by it, in a sandbox, with their own special
tokens and no second BOS. What keeps messages from writing control tokens is `chat_text`. What is wrong with the
files is a `ModelError` naming `tokenizer`; what is wrong with a request, a template that refuses it included, is
a `RequestError` naming `messages` or `prompt`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from transformers import AutoTokenizer

from octavo.errors import ModelError, RequestError
from octavo.models.quiet import quiet_transformers

# Any of these makes a directory hold a tokenizer.
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json",
                    "tokenizer_config.json")  # fmt: skip

_MAX_TEMPLATES = 8
_log = logging.getLogger(__name__)
_WARNED: WeakSet[Any] = WeakSet()
"""Tokenizers whose second beginning has been logged."""
_CONTROLS: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""The control tokens of a tokenizer, by template: what follows from the two alone."""
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


def encode_prompt(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a plain prompt, with the special tokens that this tokenizer adds by default.

    A text that begins with the beginning-of-sequence token gets a second one from a tokenizer that adds it,
    as in Transformers and vLLM; that is logged once. `add_special_tokens=False` adds nothing.
    """
    ids = list(tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and ids[:2] == [bos, bos] and tokenizer not in _WARNED:
        _WARNED.add(tokenizer)
        _log.warning("a prompt begins with %s, and the tokenizer puts another before it; leave it out of the text, "
                     "or set add_special_tokens=False", tokenizer.bos_token)  # fmt: skip
    return ids


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    options: Mapping[str, Any] | None = None,
    sanitize_control_tokens: bool = True,
) -> list[int]:
    """Token ids of a chat, up to where the assistant's answer begins. `options` go to the template.

    What looks like a control token in messages, tools or options is text, unless `sanitize_control_tokens` is
    False. Text parts are joined by newlines, an absent content is empty.
    """
    if not messages:
        raise RequestError("messages", [], "a chat needs at least one message")
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError("messages", f"{len(messages)} messages", "this model has no chat template. Use a plain "
                                                                    "prompt, or name a template")  # fmt: skip
    plain = [_plain_message(index, message) for index, message in enumerate(messages)]
    given = dict(options or {})
    if tools is not None:
        given["tools"] = list(tools)
    try:
        return _encode_chat(tokenizer, plain, given, template, sanitize_control_tokens=sanitize_control_tokens)
    except RequestError:
        raise
    except Exception as error:  # a template is a program by the model's authors: it may raise anything
        raise RequestError("messages", [message.get("role") for message in messages],
                           f"the model's chat template refused them: {_brief(error)}") from error  # fmt: skip


def _encode_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    given: dict[str, Any],
    template: str | None,
    *,
    sanitize_control_tokens: bool,
) -> list[int]:
    from octavo.models.chat_text import ControlText

    common = {"chat_template": template, "add_generation_prompt": True}
    if not sanitize_control_tokens:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **common, **given))
    if getattr(tokenizer, "backend_tokenizer", None) is None:  # the few that Transformers runs in Python
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False,
                                                  sanitize_control_tokens=True, **common, **given))  # fmt: skip
    program = tokenizer.get_chat_template(template, given.get("tools"))
    known = _CONTROLS.setdefault(tokenizer, {})
    if program not in known:
        if len(known) >= _MAX_TEMPLATES:
            known.clear()
        known[program] = ControlText(tokenizer, program)
    control = known[program]
    if not control.suspects([messages, given]):
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **common, **given))
    marks = control.marks(messages, given)
    rendered = tokenizer.apply_chat_template(
        control.marked(messages, marks), tokenize=False, **common, **control.marked(given, marks)
    )
    return control.encode(rendered, marks)


def _plain_message(index: int, message: Any) -> dict[str, Any]:
    """A message as every template takes it: content is text."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}]", message, 'must be {"role": ..., "content": ...}')
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}].role", message.get("role"), "must be a string, such as user")
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(f"messages[{index}].content[{at}]", part) for at, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(f"messages[{index}].content", content, "must be a string or a list of text parts")
    return {**message, "content": content}


def _part_text(path: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(path, kind or part, 'only text parts are served: {"type": "text", "text": ...}')
    return str(part["text"])


def _refuse_pointer(path: Path) -> None:
    from octavo.models.weight_files import open_for_reading, read_bytes, refuse_intruder

    with open_for_reading(path) as file:
        head = read_bytes(path, file, 512)
    refuse_intruder(path, head, len(head))


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
