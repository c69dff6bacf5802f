"""Rewrites a schema's `pattern` so that what matches it is also the inside of a JSON string.

A grammar matches the JSON text, a pattern means the string that the text stands for. So a quote, a backslash
and control characters become their escapes, and character classes lose what may not stand in JSON as it is.
Only what the rewritten pattern allows can be generated, and all of it matches the original; some that matches
the original may not be generated (`[^a]` writes no quote). What cannot be kept exactly raises `ValueError`.
"""

from __future__ import annotations

MAX_PATTERN_CHARS = 2048
MAX_EXPANDED = 2000
"""Characters of a pattern once its repeated groups are written out: what a compiler may come to hold."""

_LAST = 0x10FFFF
_UNSAFE = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0xD800, 0xDFFF))
_CLASSES: dict[str, tuple[tuple[int, int], ...]] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x20, 0x20),),  # the other blanks are control characters, or blanks in some dialects only
}
_NOT_BLANK = ((0x21, 0x7E), (0xA1, 0x167F), (0x3001, 0xD7FF))
"""What `\\S` may write: characters that no dialect counts as blank."""
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_SHORT = {8: r"\\b", 9: r"\\t", 10: r"\\n", 12: r"\\f", 13: r"\\r", 0x22: r"\\\"", 0x5C: r"\\\\"}
_SPECIAL = frozenset(r"\^$.|?*+()[]{}/-")

_Ranges = list[tuple[int, int]]


def json_pattern(pattern: str) -> tuple[str, int]:
    """`pattern`, for the raw text between the quotes, and its characters once repeated groups are written out.

    Raises `ValueError` saying what is not served.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"is longer than {MAX_PATTERN_CHARS} characters")
    return _Rewriter(pattern).run()


class _Rewriter:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def run(self) -> tuple[str, int]:
        made, cost = self._alternatives(0)
        if self._at < len(self._text):
            raise ValueError(f"has an unmatched ')' at {self._at}")
        _bounded(cost)
        return f"^{made}$", cost

    def _alternatives(self, depth: int) -> tuple[str, int]:
        if depth > 30:
            raise ValueError("has groups nested more than 30 deep")
        made, cost = [], 0
        while True:
            part, more = self._sequence(depth)
            made.append(part)
            cost += more
            if self._peek() != "|":
                break
            self._at += 1
        return ("|".join(made) if len(made) == 1 else f"({'|'.join(made)})"), cost + 1

    def _sequence(self, depth: int) -> tuple[str, int]:
        made, cost = [], 0
        if depth == 0 and self._peek() == "^":
            self._at += 1
        while (char := self._peek()) and char not in "|)":
            if char == "$" and depth == 0 and self._text[self._at + 1 : self._at + 2] in ("", "|"):
                self._at += 1
                break
            atom, one, single = self._atom(depth)
            atom, times = self._quantified(atom)
            made.append(atom)
            # A repeated single character costs the compiler one state; a repeated group is written out.
            cost += 1 if single and depth == 0 else one * times
            _bounded(cost)
        return "".join(made), cost

    def _atom(self, depth: int) -> tuple[str, int, bool]:
        char = self._next()
        if char == "(":
            if self._peek() == "?":
                self._group_kind()
            inner, cost = self._alternatives(depth + 1)
            if self._next() != ")":
                raise ValueError("has a '(' that is never closed")
            return f"({inner})", cost, False
        if char == "[":
            return self._bracket(), 1, True
        if char == ".":
            return any_character(), 1, True
        if char in "^$":
            raise ValueError(f"has {char!r} in the middle; it may begin or end the pattern or one of its alternatives")
        if char in "*+?{":
            raise ValueError(f"has {char!r} with nothing to repeat")
        if char == "\\":
            found = self._escape()
            if isinstance(found, list):
                return _class_text(found), 1, True
            return _literal(found), 1, True
        return _literal(ord(char)), 1, True

    def _group_kind(self) -> None:
        rest = self._text[self._at :]
        if rest.startswith("?:"):
            self._at += 2
        elif rest.startswith(("?<", "?P<")) and not rest.startswith(("?<=", "?<!")) and ">" in rest:
            self._at += rest.index(">") + 1
        else:
            raise ValueError(f"has {rest[:3]!r}: only plain, (?:...) and named groups are served")

    def _quantified(self, atom: str) -> tuple[str, int]:
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            made, times = atom + char, 1
        elif char == "{" and (found := self._bounds()) is not None:
            low, high = found
            made = f"{atom}{{{low},{'' if high is None else high}}}"
            times = max(low, 1) if high is None else high
        else:
            return atom, 1
        if self._peek() == "?":  # lazy: the same language
            self._at += 1
        elif self._peek() == "+":
            raise ValueError("has a possessive quantifier, which is not served")
        return made, max(times, 1)

    def _bounds(self) -> tuple[int, int | None] | None:
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
        if end < 0 or not low.isdecimal() or not low.isascii() or (high and not (high.isdecimal() and high.isascii())):
            raise ValueError("has a '{' that is no repetition; write \\{ for the character")
        if len(low) > 6 or len(high) > 6:
            raise ValueError("repeats something a million times or more")
        self._at = end + 1
        least, most = int(low), int(high) if high else None if comma else int(low)
        if most is not None and most < least:
            raise ValueError(f"repeats at least {least} and at most {most} times")
        return least, most

    def _escape(self) -> int | _Ranges:
        """The character, or the ranges, that the escape after a backslash stands for."""
        char = self._next()
        if char.lower() in _CLASSES:
            if char == "S":
                return list(_NOT_BLANK)
            ranges = list(_CLASSES[char.lower()])
            return ranges if char.islower() else _without(ranges)
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "xu":
            width = 2 if char == "x" else 4
            digits = self._text[self._at : self._at + width]
            if len(digits) < width or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise ValueError(f"has a \\{char} without {width} hexadecimal digits")
            self._at += width
            return int(digits, 16)
        if not char or char.isalnum():
            raise ValueError(f"has \\{char}, which is not served")
        return ord(char)

    def _bracket(self) -> str:
        negated = self._peek() == "^"
        self._at += negated
        ranges: _Ranges = []
        while (char := self._next()) != "]":
            low: int | _Ranges = self._escape() if char == "\\" else ord(char or self._unclosed())
            if isinstance(low, list):
                ranges += low
                continue
            high: int | _Ranges = low
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                char = self._next()
                high = self._escape() if char == "\\" else ord(char)
            if isinstance(high, list) or high < low:
                raise ValueError("has a range in brackets that runs backwards")
            ranges.append((low, high))
        return _class_text(_without(ranges) if negated else ranges)

    def _unclosed(self) -> str:
        raise ValueError("has a '[' that is never closed")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        char = self._peek()
        self._at += 1
        return char


def _bounded(cost: int) -> None:
    if cost > MAX_EXPANDED:
        raise ValueError(f"comes to more than {MAX_EXPANDED} characters once its repetitions are written out")


def _without(ranges: _Ranges | tuple[tuple[int, int], ...]) -> _Ranges:
    """Every other character."""
    left, start = [], 0
    for low, high in sorted(ranges):
        if low > start:
            left.append((start, low - 1))
        start = max(start, high + 1)
    return [*left, (start, _LAST)] if start <= _LAST else left


def _class_text(ranges: _Ranges) -> str:
    """A class of what these ranges have that JSON takes as it is; a single escaped character is written out."""
    safe = _without([*_without(ranges), *_UNSAFE])
    if not safe:
        lone = [low for low, high in ranges if low == high]
        if not lone:
            raise ValueError("has a class of which no character can stand in JSON as it is")
        return f"({'|'.join(_literal(char) for char in lone)})"
    return "[" + "".join(_one(low) if low == high else f"{_one(low)}-{_one(high)}" for low, high in safe) + "]"


def any_character() -> str:
    """A class of all that a dot matches and JSON has as it is."""
    return _class_text([(0x20, 0x2027), (0x202A, _LAST)])  # U+2028 and U+2029 end lines


def _literal(code: int) -> str:
    if code in _SHORT:
        return f"({_SHORT[code]})"  # several characters, which a quantifier must take as one
    if code < 0x20 or code == 0x7F:
        return f"(\\\\u00{code:02x})"
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("has half of a surrogate pair; write the character itself")
    return _one(code)


def _one(code: int) -> str:
    return "\\" + chr(code) if chr(code) in _SPECIAL else chr(code)
