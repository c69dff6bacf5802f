"""Keeps what people write text: no message opens or closes a turn, whatever it contains.

A chat template writes control tokens (`<|im_start|>`); a message may contain the same characters. Owns telling
the two apart, and encoding a rendered chat in which only the template's own are control tokens. Decides nothing
about messages that contain nothing of the kind: those never come here.

    message    "hi <|im_end|>"    marks, which no text has, go into whatever could be or become a control token
    template   "<|im_start|>user\\n" + "hi <|i#m_end|>" + "<|im_end|>\\n"
    encoded    [1] + text(...)      + text(...)        + [2] + text(...)

A control token is found only where no mark lies in it: also one of which a message holds a part and the template
the rest, or two messages a half each. Text between them is encoded by a copy of the tokenizer that knows no
control tokens at all, so that no normalisation of look-alikes brings one back.

Control tokens are the tokenizer's special tokens, and the other added tokens that the template itself writes.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from octavo.errors import RequestError

ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython", "model"})
"""Templates may build control tokens around these (`<|` + role + `|>`), and around no other role."""
_PRIVATE = range(0xE000, 0xF8FF)


class ControlText:
    """The control tokens of one tokenizer under one template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        found = {index: token for index, token in added.items() if _controls(token, template)}
        self._tokens = {token.content: (index, token) for index, token in found.items()}
        self._any = _alternatives(self._tokens)
        self._any_case = re.compile(f"(?=({self._any.pattern}))", re.IGNORECASE)  # overlapping ones as well
        self._heads = {text[:length].lower() for text in self._tokens for length in range(1, len(text))}
        self._tails = {text[length:].lower() for text in self._tokens for length in range(1, len(text))}
        self._longest = max(map(len, self._tokens), default=0)
        self._taken = template + "".join(token.content for token in added.values())
        self._plain: Tokenizer | None = None

    def suspects(self, value: Any) -> bool:
        """Whether any string in `value`, at any depth, holds a control token or a part that could become one."""
        return any(self._suspect(text, is_role=is_role) for text, is_role in _strings(value))

    def _suspect(self, text: str, *, is_role: bool) -> bool:
        if is_role and text in ROLES:
            return False
        return any(self._any_case.search(one) or self._edges(one) for one in {text, self._normalised(text)})

    def _normalised(self, text: str) -> str:
        normaliser = self._backend.normalizer
        return str(normaliser.normalize_str(text)) if normaliser is not None else text

    def _edges(self, text: str) -> tuple[bool, bool] | None:
        """Whether the text might complete a control token to its left, and to its right."""
        core = text.strip().lower()
        if not core:
            return None
        left = any(core[:length] in self._tails for length in range(1, min(self._longest, len(core) + 1)))
        right = any(core[-length:] in self._heads for length in range(1, min(self._longest, len(core) + 1)))
        inside = len(core) < self._longest and any(core in text.lower() for text in self._tokens)
        return (left or inside, right or inside) if left or right or inside else None

    # -- marking --------------------------------------------------------------------------------

    def marks(self, *values: Any) -> Marks:
        """Three characters that occur in nothing of this: a break, and an opening and a closing one."""
        used = {char for text, _ in _strings(list(values)) for char in text if ord(char) in _PRIVATE}
        free = [chr(code) for code in _PRIVATE if chr(code) not in used and chr(code) not in self._taken]
        if len(free) < 3:
            raise RequestError("messages", "texts", "use every private character there is; leave some out")
        return Marks(free[0], free[1], free[2])

    def marked(self, value: Any, marks: Marks, *, is_role: bool = False) -> Any:
        """`value` with marks in its strings, at any depth."""
        if isinstance(value, str):
            return value if is_role and value in ROLES else self._marked_text(value, marks)
        if isinstance(value, Mapping):
            return {self._marked_key(key, marks): self.marked(one, marks, is_role=key == "role")
                    for key, one in value.items()}  # fmt: skip
        if isinstance(value, (list, tuple)):
            return [self.marked(one, marks) for one in value]
        return value

    def _marked_key(self, key: Any, marks: Marks) -> Any:
        # The names that templates look up are identifiers; anything else is somebody's text.
        return key if not isinstance(key, str) or key.isidentifier() else self._marked_text(key, marks)

    def _marked_text(self, text: str, marks: Marks) -> str:
        edges = self._edges(text)
        if edges is not None:
            core = text.strip()
            start = text.index(core)
            text = (text[:start] + (marks.cut if edges[0] else "") + core + (marks.cut if edges[1] else "")
                    + text[start + len(core) :])  # fmt: skip
        return self._with_tokens_marked(text, marks)

    def _with_tokens_marked(self, text: str, marks: Marks) -> str:
        """Every control token in `text` broken, those that overlap others too."""
        made: dict[int, str] = {}
        for found in self._any_case.finditer(text):
            start, token = found.start(), found.group(1)
            known = self._tokens.get(token)
            if len(token) == 1 or (known is not None and not known[1].special):
                # Templates take such text apart by it, as `content.split('</think>')`: it must stay whole.
                made[start] = made.get(start, "") + marks.open
                made[start + len(token)] = marks.close + made.get(start + len(token), "")
            else:
                made[start + 1] = made.get(start + 1, "") + marks.cut
        pieces, at = [], 0
        for place in sorted(made):
            pieces.append(text[at:place] + made[place])
            at = place
        return "".join((*pieces, text[at:]))

    # -- encoding -------------------------------------------------------------------------------

    def encode(self, rendered: str, marks: Marks) -> list[int]:
        """Ids of a rendered chat. Raises `RequestError` if the tokenizer makes one of them of plain text."""
        ids: list[int] = []
        start, strip_left = 0, False
        for found in self._any.finditer(rendered):
            index, token = self._tokens[found.group()]
            if not _is_templates(rendered, found, marks, token):
                continue
            self._extend(ids, _stripped(rendered[start : found.start()], strip_left, token.lstrip), marks, start == 0)
            ids.append(index)
            start, strip_left = found.end(), token.rstrip
        self._extend(ids, _stripped(rendered[start:], strip_left, False), marks, start == 0)
        return ids

    def _extend(self, ids: list[int], text: str, marks: Marks, first: bool) -> None:
        text = marks.removed(text)
        if not text:
            return
        if self._plain is None:
            self._plain = _without_control_tokens(self._backend, self._tokens)
        # What follows a token is encoded behind one: some tokenizers put a space before a text's beginning only.
        found = self._plain.encode(text if first else _ANCHOR + text, add_special_tokens=False).ids
        made = found if first else found[1:]
        for index, _ in self._tokens.values():
            if index in made and index != self._unknown():
                name = self._backend.id_to_token(index)
                raise RequestError("messages", name, "this tokenizer makes a control token of that text; leave it out")
        ids.extend(made)

    def _unknown(self) -> int | None:
        name = getattr(self._backend.model, "unk_token", None)
        return (
            self._backend.token_to_id(name) if isinstance(name, str) else getattr(self._backend.model, "unk_id", None)
        )


class Marks:
    """Characters that stand in no text, put into texts and taken out again."""

    def __init__(self, cut: str, open_: str, close: str) -> None:
        self.cut, self.open, self.close = cut, open_, close
        escaped = "|".join(f"\\\\u{ord(mark):04x}" for mark in (cut, open_, close))  # as a JSON filter may write them
        self._all = re.compile(f"[{cut}{open_}{close}]|{escaped}")

    def removed(self, text: str) -> str:
        return self._all.sub("", text)


_SECRET = secrets.token_hex(16)
"""In the names that only the copy of a tokenizer knows: nobody can write them, for nobody can guess it."""
_ANCHOR = f"\uf8ff{_SECRET}\uf8ff"


def _controls(token: AddedToken, template: str) -> bool:
    return bool(token.content.strip()) and (token.special or token.content in template)


def _alternatives(tokens: Mapping[str, Any]) -> re.Pattern[str]:
    """The longest token first, as tokenizers match."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=lambda text: (-len(text), text)))) or "(?!)")


def _strings(value: Any, *, is_role: bool = False) -> Iterator[tuple[str, bool]]:
    if isinstance(value, str):
        yield value, is_role
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if isinstance(key, str) and not key.isidentifier():
                yield key, False
            yield from _strings(one, is_role=key == "role")
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _strings(one)


def _is_templates(rendered: str, found: re.Match[str], marks: Marks, token: AddedToken) -> bool:
    before, after = rendered[: found.start()][-1:], rendered[found.end() : found.end() + 1]
    if before == marks.open and after == marks.close:
        return False
    return not (token.single_word and (_is_word(before) or _is_word(after)))


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _stripped(text: str, left: bool, right: bool) -> str:
    text = text.lstrip() if left else text
    return text.rstrip() if right else text


def _without_control_tokens(backend: Tokenizer, tokens: Mapping[str, tuple[int, AddedToken]]) -> Tokenizer:
    """A copy that encodes text only: control tokens keep their ids under names that no text has."""
    told = json.loads(backend.to_str())
    renamed = {text: f"\uf8ff{_SECRET}.{index}\uf8ff" for text, (index, _) in tokens.items()}
    for one in told["added_tokens"]:  # dropping one would move the ids of others
        one["content"] = renamed.get(one["content"], one["content"])
    told["post_processor"] = None
    model = told["model"]
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed.get(text, text): index for text, index in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[renamed.get(text, text), score] for text, score in vocabulary]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in renamed]
    made = Tokenizer.from_str(json.dumps(told))
    made.add_special_tokens([AddedToken(_ANCHOR, normalized=False)])
    made.no_padding()
    made.no_truncation()
    return made


def _merged(pair: Sequence[str] | str) -> str:
    return pair.replace(" ", "", 1) if isinstance(pair, str) else "".join(pair)
