"""Two engines that keep no table of blocks for each group: SGLang's token pools, llama.cpp's cells.

`TokenPool`: one pool of tokens for what grows, one for windows, one of slots for recurrent state, sized
from the same bytes at start. `CellPool`: everything is reserved up front for the declared context. Both
answer what `paging.Paging` answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.planner.paging import MOST_TOKENS, largest

WINDOW_SHARE = (4, 5)
"""SGLang: tokens of the window pool for each of the full one."""
STATE_SHARE = (9, 19)
"""SGLang: recurrent state has 0.9 of what keys and values have."""
CELL_ALIGN = 256
"""llama.cpp: cells are reserved in multiples of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPool:
    """SGLang. A request's window layers take tokens of the window pool: its own, or a window and one step's."""

    cell_bytes: int
    window_cell_bytes: int
    state_bytes: int
    page_tokens: int
    max_num_seqs: int
    reach_tokens: int = 0
    """Of the widest window."""
    step_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def unit_bytes(self) -> int:
        """A page of tokens; of a model without any, a slot."""
        return self._token_bytes(self.page_tokens) or self.state_bytes

    @property
    def page_bytes(self) -> int:
        return self.unit_bytes

    @property
    def block_tokens(self) -> int:
        return self.page_tokens if self._token_bytes(1) else 0

    def _token_bytes(self, tokens: int) -> int:
        part, whole = WINDOW_SHARE
        return tokens * self.cell_bytes + -(-tokens * part * self.window_cell_bytes // whole)

    def slots(self, kv_bytes: int) -> int:
        """Sequences whose recurrent state is held; 0 where there is none to hold."""
        if not self.state_bytes:
            return 0
        part, whole = STATE_SHARE if self._token_bytes(1) else (1, 1)
        # one slot more is allocated, for rows that are padding
        return max(0, min(kv_bytes * part // whole // self.state_bytes - 1, self.max_num_seqs))

    def pool_tokens(self, kv_bytes: int) -> int:
        """Tokens in the pool of what grows. One page more is allocated, for rows that are padding."""
        one = self._token_bytes(1)
        if not one:
            return 0
        states = (self.slots(kv_bytes) + 1) * self.state_bytes if self.state_bytes else 0
        tokens = max(0, kv_bytes - states) // one
        return tokens - tokens % self.page_tokens

    def pool_bytes(self, tokens: int) -> int:
        """Bytes that are allocated for a pool of so many tokens."""
        return self._token_bytes(tokens + self.page_tokens)

    def units(self, kv_bytes: int) -> int:
        return self.pool_tokens(kv_bytes) // self.page_tokens if self._token_bytes(1) else self.slots(kv_bytes)

    def usable_units(self, kv_bytes: int) -> int:
        return self.units(kv_bytes)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def units_for(self, tokens: int, sequences: int = 1) -> int:
        return sequences * (self._pages(tokens) if self._token_bytes(1) else 1)

    def window_tokens(self, tokens: int) -> int:
        """Tokens of the window pool that one sequence holds at most, in whole pages."""
        return self._pages(min(tokens, self.reach_tokens - 1 + self.step_tokens)) * self.page_tokens

    def bytes_for(self, tokens: int, sequences: int = 1) -> int:
        full = self._pages(tokens) * self.page_tokens * self.cell_bytes
        windows = self.window_tokens(tokens) * self.window_cell_bytes if self.window_cell_bytes else 0
        return sequences * (full + windows + self.state_bytes)

    def concurrency(self, kv_bytes: int, tokens: int) -> float:
        """By whichever pool runs out first."""
        bounds = [self.units(kv_bytes) / self.units_for(tokens)]
        if self.window_cell_bytes:
            part, whole = WINDOW_SHARE
            bounds.append(self.pool_tokens(kv_bytes) * part // whole / self.window_tokens(tokens))
        if self.state_bytes:
            bounds.append(float(self.slots(kv_bytes)))
        return min(bounds)

    def sequences(self, kv_bytes: int, tokens: int) -> int:
        return int(self.concurrency(kv_bytes, tokens))

    def largest_context(self, kv_bytes: int, sequences: int = 1) -> int:
        if self.state_bytes and self.slots(kv_bytes) < sequences:
            return 0
        if not self._token_bytes(1):
            return MOST_TOKENS
        return self.units(kv_bytes) // sequences * self.page_tokens

    def tokens(self, kv_bytes: int, context: int) -> int:
        return self.pool_tokens(kv_bytes) if self._token_bytes(1) else self.slots(kv_bytes) * context


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPool:
    """llama.cpp. A context is declared for all sequences together; windows have cells of their own."""

    cell_bytes: int
    window_cell_bytes: int
    window_tokens: int
    state_bytes: int
    sequences_at_once: int
    step_tokens: int
    notes: tuple[str, ...] = ()

    @property
    def unit_bytes(self) -> int:
        return CELL_ALIGN * (self.cell_bytes or self.window_cell_bytes) or self.state_bytes

    @property
    def page_bytes(self) -> int:
        return self.unit_bytes

    @property
    def block_tokens(self) -> int:
        return CELL_ALIGN if self.cell_bytes or self.window_cell_bytes else 0

    def cells(self, tokens: int) -> int:
        return _aligned(tokens)

    def window_cells(self, tokens: int, sequences: int = 1) -> int:
        """Cells of window layers: every sequence's window and one micro-batch, never more than the context."""
        return min(_aligned(tokens), _aligned(self.window_tokens * sequences + self.step_tokens))

    def bytes_for(self, tokens: int, sequences: int = 1) -> int:
        """What is reserved for `sequences` of `tokens` positions each."""
        total = tokens * sequences
        return self.reserved_bytes(total, sequences)

    def reserved_bytes(self, n_ctx: int, sequences: int) -> int:
        cells, window = self.cells(n_ctx), self.window_cells(n_ctx, sequences)
        return cells * self.cell_bytes + window * self.window_cell_bytes + sequences * self.state_bytes

    def units(self, kv_bytes: int) -> int:
        return kv_bytes // self.unit_bytes

    def usable_units(self, kv_bytes: int) -> int:
        return self.units(kv_bytes)

    def units_for(self, tokens: int, sequences: int = 1) -> int:
        return -(-self.bytes_for(tokens, sequences) // self.unit_bytes)

    def sequences(self, kv_bytes: int, tokens: int) -> int:
        most = kv_bytes // max(1, self.bytes_for(tokens)) * 4 + 4
        return largest(lambda n: self.bytes_for(tokens, n) <= kv_bytes if n else True, most)

    def concurrency(self, kv_bytes: int, tokens: int) -> float:
        return float(self.sequences(kv_bytes, tokens))

    def largest_context(self, kv_bytes: int, sequences: int = 1) -> int:
        if self.bytes_for(MOST_TOKENS, sequences) <= kv_bytes:
            return MOST_TOKENS
        return largest(lambda n: self.bytes_for(n, sequences) <= kv_bytes if n else True, MOST_TOKENS)

    def tokens(self, kv_bytes: int, context: int) -> int:
        return self.sequences_at_once * self.largest_context(kv_bytes, self.sequences_at_once)


def _aligned(cells: int) -> int:
    return -(-cells // CELL_ALIGN) * CELL_ALIGN
