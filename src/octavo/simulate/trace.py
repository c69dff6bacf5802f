"""One request of a workload, and the tokens that stand for its prompt.

A trace knows lengths and which prompts begin alike, not texts. `TraceRequest` says the lengths; `prompt_of` makes
tokens of it: the same hash ids give the same tokens, anything else differs from everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from octavo.memory.values import Int32
from octavo.scheduling.request import Request, SamplingParams

VOCABULARY = 2**31 - 1
STOP = 0
"""Ends a request at its true length."""
_FIRST_SHARED = 2
_FIRST_OF_SESSIONS = 2**29
HASH_IDS = 2**29 - 2
"""Below this, so that no two kinds of tokens meet."""
MOST_TOKENS = 2**24
"""Of a prompt or an output: more than any context, and yet no prompt that memory would not hold."""
MOST_NS = 2**62
"""Moments and pauses are whole nanoseconds of 64 bits: a hundred years, and room to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    arrival_ns: int
    input_tokens: int
    output_tokens: int
    """What it will generate."""
    max_tokens: int | None = None
    """What it declares, where that is more."""
    hash_ids: tuple[int, ...] = ()
    """One for each `hash_block` tokens of the prompt, from the start: equal ones mean equal tokens up to there."""
    hash_block: int = 0
    session: str | None = None
    """Requests of one session come one after the other: none before the one before has ended."""
    think_ns: int = 0
    """After the end of the one before, of its session or its user, before this one is sent."""
    priority: int = 0
    salt: str = ""


def prompt_of(entry: TraceRequest, index: int) -> Int32:
    """Token ids of request number `index`. Prompts of one session begin alike: the shorter is a start of the longer."""
    own = VOCABULARY - 1 - index
    if entry.session is not None:
        own = _FIRST_OF_SESSIONS + crc32(entry.session.encode()) % 2**30
    prompt = np.empty(entry.input_tokens, dtype=np.int32)
    known = min(entry.input_tokens, len(entry.hash_ids) * entry.hash_block)
    if known:
        ids = np.array(entry.hash_ids, dtype=np.int32) + np.int32(_FIRST_SHARED)
        prompt[:known] = ids.repeat(entry.hash_block)[:known]
    prompt[known:] = own
    return prompt


_PARAMS: dict[int, SamplingParams] = {}


def request_of(entry: TraceRequest, index: int) -> Request:
    most = max(entry.output_tokens, entry.max_tokens or 0)
    if most not in _PARAMS:  # making one checks twenty fields; there are few lengths
        # All that `with_defaults` would fill in is said: it would make another one.
        _PARAMS[most] = SamplingParams(
            max_tokens=most, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=0
        )
    return Request(
        request_id=str(index),
        prompt_token_ids=prompt_of(entry, index),
        params=_PARAMS[most],
        eos_token_ids=(STOP,) if most > entry.output_tokens else (),
        priority=entry.priority,
        true_output_tokens=entry.output_tokens,
        cache_salt=entry.salt,
    )
