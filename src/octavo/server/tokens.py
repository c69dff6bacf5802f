"""The tokenizer as the server uses it: text and chats into ids, ids into text, ids into bytes.

Owns what runs off the event loop because it is long, and `bytes_of`: the bytes of the text that one
token stands for, such that those of a whole answer, joined, are its UTF-8, characters split over
tokens included. Decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from octavo.engine.intake import Intake
from octavo.errors import RequestError, shorten
from octavo.server.errors import ApiError, wrong

T = TypeVar("T")

OFF_LOOP_CHARS = 8192
"""Text beyond this is encoded in a thread: the event loop has streams to serve."""
LONG = 2**18
"""Characters, tokens or bytes beyond which work waits in a line of its own: what is short never waits behind it."""
MAX_OPTIONS = 64
TEMPLATE_S = 30.0
"""Seconds in which a chat must be rendered and encoded, those before it included."""


class Tokens:
    """Around the tokenizer of an engine's intake, or none where the engine has none."""

    def __init__(self, intake: Intake, *, template: str | None = None) -> None:
        tokenizer = intake.tokenizer
        self.tokenizer = tokenizer
        self._intake = intake
        self._template = template
        # A thread for each line, and the event loop beside them: nobody changes the settings of the tokenizer.
        self._short = ThreadPoolExecutor(1, thread_name_prefix="octavo-tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="octavo-long-texts")
        self._added, self._special = _added_tokens(tokenizer)
        self._piece_bytes = _piece_bytes(tokenizer) if tokenizer is not None else None
        if tokenizer is not None:
            tokenizer("a")  # the first call sets the tokenizer up

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None or bool(getattr(self.tokenizer, "chat_template", None))

    def close(self) -> None:
        for line in (self._short, self._long):
            line.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        from octavo.models.tokenizer import encode_prompt

        tokenizer = self._required("prompt", text, "send token ids")

        def work() -> list[int]:
            return encode_prompt(tokenizer, text, add_special_tokens=add_special_tokens)

        return await self.run(work, len(text))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None, size: int = 0
    ) -> list[int]:
        """`size`: the bytes in which they came. Raises `ApiError` or `RequestError` naming the field that is wrong."""
        self._required("messages", f"{len(messages)} messages", "use /v1/completions with token ids")
        _check_options(options or {})

        def work() -> list[int]:
            return self._intake.encode_chat(messages, template=self._template, options=options)

        # A template is a program that came with the model: it never runs on the event loop, nor for ever.
        running = asyncio.get_running_loop().run_in_executor(self._line(size), work)
        try:
            async with asyncio.timeout(TEMPLATE_S):
                return await running
        except TimeoutError:
            remedy = f"the model's chat template did not finish within {TEMPLATE_S:g} s; use /v1/completions"
            raise RequestError("messages", f"{len(messages)} messages", remedy) from None

    async def decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._required("tokens", token_ids, "start the server without --skip-tokenizer-init")
        return await self.run(lambda: str(tokenizer.decode(list(token_ids))), len(token_ids))

    def starts_twice(self, token_ids: Sequence[int]) -> bool:
        """Whether the prompt begins with two beginnings: its text had one, and the tokenizer added another."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return bos is not None and len(token_ids) > 1 and token_ids[0] == token_ids[1] == bos

    def name_of(self, token_id: int) -> str:
        """The vocabulary's own spelling."""
        return str(self.tokenizer.convert_ids_to_tokens(token_id)) if self.tokenizer is not None else str(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of its text; an added token, special ones included, is spelled as it is."""
        if self._piece_bytes is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self.tokenizer.convert_ids_to_tokens(token_id)  # type: ignore[union-attr]
        return b"" if piece is None else self._piece_bytes(token_id, str(piece))

    def _required(self, field: str, value: Any, remedy: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(field, value, f"this server has no tokenizer (--skip-tokenizer-init); {remedy}")
        return self.tokenizer

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Do `work` that goes over so many characters or tokens: here where they are few."""
        if size <= OFF_LOOP_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._line(size), work)

    def _line(self, size: int) -> ThreadPoolExecutor:
        return self._long if size > LONG else self._short


_RESERVED = frozenset({
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding",
    "truncation", "max_length", "tokenizer_kwargs", "template", "options", "bos_token", "eos_token",
})  # fmt: skip


def _check_options(options: Mapping[str, Any]) -> None:
    if len(options) > MAX_OPTIONS:
        raise wrong("chat_template_kwargs", f"{len(options)} options", f"send at most {MAX_OPTIONS}")
    for name in options:
        if not name.isidentifier() or name.startswith("_") or name in _RESERVED:
            param = "chat_template_kwargs"
            raise ApiError(400, f"{param}={shorten(name)}: is no option of a template; leave it out",
                           param=param, code="invalid_value")  # fmt: skip


def _added_tokens(tokenizer: Any) -> tuple[Mapping[int, str], frozenset[int]]:
    """Tokens added beside the vocabulary, and those that decoding leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    names = {int(token_id): str(token) for token_id, token in added.items()}
    special = {int(token_id) for token_id, token in added.items() if token.special}
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        special |= set(getattr(tokenizer, "all_special_ids", ()) or ())
    return names, frozenset(special)


def _piece_bytes(tokenizer: Any) -> Callable[[int, str], bytes]:
    """How the vocabulary's spelling of a token becomes bytes, by the decoder that the tokenizer has."""
    kinds = _decoder_kinds(tokenizer)
    if "ByteLevel" in kinds:
        return lambda _, piece: _from_byte_letters(piece)
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return lambda _, piece: _from_visible_space(piece)
    # Any other decoder: what the token adds after itself, so that no rule for the start of a text applies.
    decode = tokenizer.decode

    def added(token_id: int, _: str) -> bytes:
        alone = str(decode([token_id]))
        return str(decode([token_id, token_id])).removeprefix(alone).encode()

    return added


def _decoder_kinds(tokenizer: Any) -> frozenset[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return frozenset()
    decoder = json.loads(bytes(backend.decoder.__getstate__())) if backend.decoder is not None else {}
    return frozenset(part["type"] for part in (decoder, *decoder.get("decoders", ())) if "type" in part)


def _byte_letters() -> Mapping[str, int]:
    """How a byte-level vocabulary spells each byte: by itself where it can be printed, else by a letter above 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _from_byte_letters(piece: str) -> bytes:
    return bytes(_LETTERS[letter] for letter in piece if letter in _LETTERS)


def _from_visible_space(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace("▁", " ").encode()
