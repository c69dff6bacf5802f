"""Chooses one token per row of logits, by that row's own parameters.

Owns the rows' sampling parameters, penalty counts and the draw. It does not own the logits (it never
writes to them), nor when a sequence ends. The order of the rules is vLLM's: raw log-probabilities; the
grammar's mask; logit bias; min_tokens, except where the grammar allows nothing but an end; penalties
(repetition, frequency, presence); temperature; min-p; top-k; top-p; then the inverse of the cumulative
distribution, in token-id order, at one uniform per (seed, choice, position). Equal logits are ordered by
token id, the lowest first, everywhere.

Invariant: a row's token depends on its own logits and parameters alone, bit for bit. Floating-point sums
depend on the shape of the batch, so none is taken: single values are computed (a maximum, a difference, an
exponential), scaled to integers, and only integers are added up.

A row in which no token can be chosen (a NaN or +inf among its logits, nothing but -inf, or every token
ruled out) gets `NO_TOKEN`; the caller reports it as a failure of that sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import InvariantViolation
from octavo.memory.values import Int32, Int64
from octavo.runtime.grammar import Follower, Languages
from octavo.runtime.uniform import uniforms
from octavo.scheduling.plan import NO_TOKEN, Admission, TokenLogprobs
from octavo.scheduling.request import Request, SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM."""
LOGPROB_FLOOR = -9999.0
"""Stands for the logarithm of zero, so that every log-probability is finite (OpenAI's value)."""
WEIGHT_BITS = 40
"""A token's weight is its probability over the likeliest one's, in units of 2**-40 (fewer for huge vocabularies)."""
_STAGES = (64, 1024)
"""How many of the likeliest tokens top-k and top-p look at before they sort the whole vocabulary."""
_SLICE_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
_LARGEST = torch.finfo(torch.float32).max

_Rows = npt.NDArray[np.int64]


class _Seen:
    """Tokens that one row's penalties look at, each once, with how often it is in the output."""

    def __init__(self, params: SamplingParams, prompt: Int32, outputs: Int32, vocab_size: int) -> None:
        self.scales = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        prompt = prompt if params.repetition_penalty != 1.0 else prompt[:0]  # only that one looks at the prompt
        known, counts = np.unique(outputs, return_counts=True)
        ids = np.concatenate([known, np.setdiff1d(prompt, known)]).astype(np.int64)
        ids = ids[(ids >= 0) & (ids < vocab_size)]
        self.size = len(ids)
        self._place = {int(token): place for place, token in enumerate(ids)}
        self._ids = np.zeros(max(64, 2 * self.size), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        self._ids[: self.size] = ids
        self._counts[: len(known)] = counts

    @property
    def ids(self) -> Int64:
        return self._ids[: self.size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: self.size]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, self.size)
        if place == self.size:
            if self.size == len(self._ids):
                self._ids, self._counts = np.resize(self._ids, 2 * self.size), np.resize(self._counts, 2 * self.size)
            self._ids[place], self._counts[place] = token, 0
            self.size += 1
        self._counts[place] += 1


class Sampler:
    """Sampling state of `rows` rows. `admit` gives a row to a sequence; `sample` chooses tokens."""

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device | str, languages: Languages | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._languages = languages
        self._unit = 2.0 ** min(WEIGHT_BITS, 61 - vocab_size.bit_length())
        self._slice = max(1, _SLICE_ELEMENTS.get(self.device.type, 2**20) // vocab_size)
        self._plain = np.ones(rows, np.bool_)  # greedy without a rule: argmax is all there is to do
        self._random = np.zeros(rows, np.bool_)
        self._temperature = np.ones(rows, np.float32)
        self._top_k = np.full(rows, vocab_size, np.int64)
        self._top_p = np.ones(rows, np.float64)
        self._min_p = np.zeros(rows, np.float32)
        self._seed = np.zeros(rows, np.int64)
        self._choice = np.zeros(rows, np.int64)
        self._logprobs = np.full(rows, -1, np.int64)
        self._ban_until = np.zeros(rows, np.int64)
        self._has_bias = np.zeros(rows, np.bool_)
        self._has_seen = np.zeros(rows, np.bool_)
        self._has_grammar = np.zeros(rows, np.bool_)
        self._followers: dict[int, Follower] = {}
        self._bans: dict[int, Int64] = {}
        self._bias: dict[int, tuple[Int64, npt.NDArray[np.float32]]] = {}
        self._seen: dict[int, _Seen] = {}

    def admit(self, admission: Admission) -> None:
        """Give `admission.row` to its sequence; what the row's previous sequence kept is dropped."""
        row, request = admission.row, admission.request
        params = request.params.with_defaults({})
        temperature, top_k = float(params.temperature or 0.0), int(params.top_k or 0)
        random = temperature >= GREEDY_BELOW and top_k != 1
        if random and params.seed is None:
            raise InvariantViolation("a request that samples carries a seed", f"request {request.request_id!r}")
        self._random[row] = random
        self._temperature[row] = max(temperature, GREEDY_BELOW)
        self._top_k[row] = self.vocab_size if top_k <= 0 else min(top_k, self.vocab_size)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seed[row] = params.seed or 0
        self._choice[row] = request.choice
        self._logprobs[row] = -1 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        for kept in (self._bans, self._bias, self._seen, self._followers):
            kept.pop(row, None)
        self._set_rules(row, request, params, admission.outputs)
        self._set_grammar(row, request, admission.outputs)
        ruled = self._has_grammar[row] or self._has_bias[row] or self._has_seen[row] or self._ban_until[row] > 0
        self._plain[row] = not (random or ruled or self._logprobs[row] >= 0)

    def _set_rules(self, row: int, request: Request, params: SamplingParams, outputs: Int32) -> None:
        stops = np.array([i for i in request.stop_ids if i < self.vocab_size], np.int64)
        banned = params.min_tokens > 0 and len(stops) > 0
        self._ban_until[row] = request.prompt_tokens + params.min_tokens if banned else 0
        if banned:
            self._bans[row] = stops
        self._has_bias[row] = bool(params.logit_bias)
        if params.logit_bias:
            bias = sorted(params.logit_bias.items())
            self._bias[row] = np.array([i for i, _ in bias], np.int64), np.array([b for _, b in bias], np.float32)
        penalties = (params.repetition_penalty != 1.0, params.frequency_penalty != 0, params.presence_penalty != 0)
        self._has_seen[row] = any(penalties)
        if any(penalties):
            self._seen[row] = _Seen(params, request.prompt_token_ids, outputs, self.vocab_size)

    def _set_grammar(self, row: int, request: Request, outputs: Int32) -> None:
        asked = request.params.structured_outputs
        self._has_grammar[row] = asked is not None
        if asked is not None:
            if self._languages is None:
                raise InvariantViolation("structured outputs have grammars", f"request {request.request_id!r}")
            self._followers[row] = self._languages.follow(asked, request.stop_ids, outputs)

    def takes_largest(self, rows: Int64) -> bool:
        """Whether the token of its largest logit, the lowest of equals, is all that is wanted of each of these rows."""
        return bool(self._plain[rows].all())

    def sample(self, logits: Tensor, rows: Int64, positions: Int64) -> tuple[Int32, dict[int, TokenLogprobs]]:
        """One token for each row of `logits` [R, vocab], and the log-probabilities asked for, by index into R.

        `rows[i]` is the seat that logits row i belongs to, each at most once; `positions[i]` is the position
        of the token being chosen: the sequence's tokens so far.
        """
        tokens, peaks = _argmax(logits)
        valid = np.isfinite(peaks)
        tokens[~valid] = NO_TOKEN
        if self._plain[rows].all():
            return tokens, {}
        ruled = self._has_bias[rows] | self._has_seen[rows] | (positions < self._ban_until[rows])
        ruled |= self._has_grammar[rows]
        for part in self._parts((ruled | self._random[rows]) & valid):
            self._choose(logits, part, rows, positions, tokens)
        for i in np.flatnonzero(self._has_seen[rows] & (tokens >= 0)):
            self._seen[int(rows[i])].add(int(tokens[i]))
        for i in np.flatnonzero(self._has_grammar[rows] & (tokens >= 0)):
            self._followers[int(rows[i])].accept(int(tokens[i]))
        logprobs: dict[int, TokenLogprobs] = {}
        for part in self._parts((self._logprobs[rows] >= 0) & (tokens >= 0)):
            self._report(logits, part, rows, tokens, logprobs)
        return tokens, logprobs

    def _parts(self, chosen: npt.NDArray[np.bool_]) -> Iterator[_Rows]:
        """Indices where `chosen`, in pieces small enough for their temporaries."""
        index = np.flatnonzero(chosen)
        for start in range(0, len(index), self._slice):
            yield index[start : start + self._slice]

    def _choose(self, logits: Tensor, part: _Rows, rows: Int64, positions: Int64, tokens: Int32) -> None:
        """Apply the rules to the logits rows in `part`, then choose their tokens into `tokens`."""
        work = logits[self._to_device(part)].float()  # a copy [P, vocab]: indexing never aliases
        seats = rows[part]
        self._apply_grammars(work, seats)
        self._apply_bias(work, seats)
        self._apply_bans(work, seats, positions[part])
        self._apply_penalties(work, seats)
        best, peaks = _argmax(work)
        best[~np.isfinite(peaks)] = NO_TOKEN
        draw = np.flatnonzero(self._random[seats] & (best >= 0))
        if len(draw):
            some = work if len(draw) == len(part) else work[self._to_device(draw)]
            best[draw] = self._draw(some, peaks[draw], seats[draw], positions[part[draw]])
        tokens[part] = best

    def _apply_grammars(self, work: Tensor, seats: Int32) -> None:
        found = np.flatnonzero(self._has_grammar[seats])
        if not len(found):
            return
        words = self._to_device(np.stack([self._followers[int(seats[i])].allowed() for i in found]))
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.device) & 1  # [F, words, 32]
        allowed = bits.bool().flatten(1)[:, : self.vocab_size]
        places = self._to_device(found)
        work[places] = work[places].masked_fill_(~allowed, -math.inf)

    def _apply_bias(self, work: Tensor, seats: Int32) -> None:
        found = [(i, *self._bias[int(seats[i])]) for i in np.flatnonzero(self._has_bias[seats])]
        if found:
            places = np.concatenate([i * self.vocab_size + ids for i, ids, _ in found])
            added = np.concatenate([bias for _, _, bias in found])
            work.view(-1).index_add_(0, self._to_device(places), self._to_device(added))

    def _apply_bans(self, work: Tensor, seats: Int32, positions: Int64) -> None:
        early = np.flatnonzero(positions < self._ban_until[seats])
        banned = [i for i in early if not self._must_end(int(seats[i]))]
        if banned:
            places = np.concatenate([i * self.vocab_size + self._bans[int(seats[i])] for i in banned])
            work.view(-1).index_fill_(0, self._to_device(places), -math.inf)

    def _must_end(self, seat: int) -> bool:
        return bool(self._has_grammar[seat]) and self._followers[seat].must_end

    def _apply_penalties(self, work: Tensor, seats: Int32) -> None:
        found = [(i, self._seen[int(seats[i])]) for i in np.flatnonzero(self._has_seen[seats])]
        if not found:
            return
        sizes = [seen.size for _, seen in found]
        places = self._to_device(np.concatenate([i * self.vocab_size + seen.ids for i, seen in found]))
        counts = self._to_device(np.concatenate([seen.counts for _, seen in found]))
        columns = np.array([seen.scales for _, seen in found], np.float32).repeat(sizes, axis=0)
        repetition, frequency, presence = self._to_device(columns).unbind(1)
        value = work.view(-1)[places]
        value = torch.where(value > 0, value / repetition, value * repetition).clamp_(max=_LARGEST)
        value = value - frequency * counts
        value = value - presence * (counts > 0)
        work.view(-1).index_copy_(0, places, value)

    def _draw(self, work: Tensor, peaks: npt.NDArray[np.float32], seats: Int32, positions: Int64) -> Int64:
        """Random tokens for `work` [P, vocab], whose largest values are `peaks`. Overwrites `work`."""
        draws = uniforms(self._seed[seats], self._choice[seats], positions)
        narrow = (self._top_k[seats] < self.vocab_size) | (self._top_p[seats] < 1.0)
        tokens = np.full(len(seats), NO_TOKEN, np.int64)
        left = np.flatnonzero(narrow)
        for stage in (*_STAGES, self.vocab_size):
            if not len(left):
                break
            width = min(stage, self.vocab_size)
            ready = left[self._may_finish(seats[left], width)]
            if len(ready):
                some = work if len(ready) == len(seats) else work[self._to_device(ready)]
                tokens[ready] = self._draw_narrow(some, width, peaks[ready], seats[ready], draws[ready])
                left = left[tokens[left] == NO_TOKEN]
        wide = np.flatnonzero(~narrow)
        if len(wide):
            some = work if len(wide) == len(seats) else work[self._to_device(wide)]
            weights = self._weights(some, peaks[wide], seats[wide])
            tokens[wide] = _inverse(weights, self._to_device(draws[wide])).cpu().numpy()
        return tokens

    def _may_finish(self, seats: Int32, width: int) -> npt.NDArray[np.bool_]:
        """Whether looking at the `width` likeliest tokens can be enough for these seats."""
        top_k = self._top_k[seats]
        return np.asarray((top_k < width) | (top_k == self.vocab_size) | (width == self.vocab_size))

    def _weights(self, work: Tensor, peaks: npt.NDArray[np.float32], seats: Int32) -> Tensor:
        """Integer weights [P, n] of logits by temperature and min-p; the likeliest token's is `_unit`."""
        temperatures = self._to_device(self._temperature[seats])[:, None]
        ratio = work.sub_(self._to_device(peaks)[:, None]).div_(temperatures).exp_()
        if self._min_p[seats].any():
            ratio.masked_fill_(ratio < self._to_device(self._min_p[seats])[:, None], 0.0)
        return ratio.mul_(self._unit).long()

    def _draw_narrow(
        self, work: Tensor, width: int, peaks: npt.NDArray[np.float32], seats: Int32, draws: npt.NDArray[np.float64]
    ) -> Int64:
        """Draw under top-k and top-p from the `width` likeliest tokens; `NO_TOKEN` where more are needed.

        A row is done when the last token it keeps is strictly likelier than the last one looked at:
        then no token left out could have been kept, whatever the ties.
        """
        values, ids = _likeliest(work, width)
        top_k = self._to_device(self._top_k[seats])[:, None]
        weights = self._weights(values.clone(), peaks, seats)
        weights.masked_fill_(torch.arange(width, device=work.device) >= top_k, 0)
        reached = weights.cumsum(1)
        total = reached[:, -1:]
        whole = np.flatnonzero(self._top_k[seats] == self.vocab_size)
        if width < self.vocab_size and len(whole):
            place = self._to_device(whole)
            total = total.clone()
            total[place] = self._weights(work[place], peaks[whole], seats[whole]).sum(1, keepdim=True)
        top_p = self._to_device(self._top_p[seats])[:, None]
        limit = torch.where(top_p < 1.0, (top_p * total.double()).ceil().long(), total)
        kept = (weights > 0) & (reached - weights < limit)
        last = values.gather(1, kept.sum(1, keepdim=True).sub_(1).clamp_(min=0))
        done = (last > values[:, -1:]).squeeze(1) if width < self.vocab_size else torch.ones_like(kept[:, 0])
        order = ids.masked_fill(~kept, self.vocab_size).sort(1)
        place = _inverse(weights.masked_fill_(~kept, 0).gather(1, order.indices), self._to_device(draws))
        tokens = order.values.gather(1, place[:, None]).squeeze(1)
        return np.asarray(tokens.masked_fill_(~done, NO_TOKEN).cpu())

    def _report(
        self, logits: Tensor, part: _Rows, rows: Int64, tokens: Int32, logprobs: dict[int, TokenLogprobs]
    ) -> None:
        """Log-probabilities of raw logits, for the logits rows in `part`."""
        asked = self._logprobs[rows[part]]
        raw = logits[self._to_device(part)].float()
        top, top_ids = (t.cpu().tolist() for t in _certain_likeliest(raw, int(asked.max())))
        chosen_ids = self._to_device(tokens[part].astype(np.int64))[:, None]
        chosen = raw.gather(1, chosen_ids)
        ids = torch.arange(self.vocab_size, device=raw.device)
        ahead = (raw > chosen) | ((raw == chosen) & (ids < chosen_ids))
        ranks = (ahead.sum(1) + 1).tolist()
        peak = raw.amax(1, keepdim=True)
        totals = (raw - peak).exp_().mul_(self._unit).long().sum(1).tolist()
        chosen_values, peaks = chosen.squeeze(1).tolist(), peak.squeeze(1).tolist()
        for i, index in enumerate(part):
            shift = peaks[i] + math.log(totals[i] / self._unit)
            pairs = zip(top_ids[i][: asked[i]], top[i][: asked[i]], strict=True)
            logprobs[int(index)] = TokenLogprobs(
                token_id=int(tokens[index]),
                logprob=max(chosen_values[i] - shift, LOGPROB_FLOOR),
                rank=ranks[i],
                top=tuple((token, max(value - shift, LOGPROB_FLOOR)) for token, value in pairs),
            )

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _argmax(logits: Tensor) -> tuple[Int32, npt.NDArray[np.float32]]:
    """The lowest id of the largest value of each row, and that value; a NaN counts as the largest."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        table = logits.detach().numpy()
        ids = table.argmax(axis=1)  # several times faster here than torch's
        return ids.astype(np.int32), table[np.arange(len(table)), ids]
    values, places = logits.max(dim=1)
    return places.int().cpu().numpy(), values.float().cpu().numpy()


def _likeliest(work: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row, descending, and their ids; of equal values the lowest id first.

    Where values equal to the last one were left out, which of them are in is not defined.
    """
    if count == work.shape[1]:
        ordered = work.sort(dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    values, ids = work.topk(count, dim=1)
    by_id = ids.sort(1)
    by_value = values.gather(1, by_id.indices).sort(dim=1, descending=True, stable=True)
    return by_value.values, by_id.values.gather(1, by_value.indices)


def _certain_likeliest(work: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `_likeliest`, with the lowest ids in where the last value is shared."""
    if count == work.shape[1]:
        return _likeliest(work, count)
    if count == 0:
        return work[:, :0], work[:, :0].long()
    values, ids = _likeliest(work, count + 1)
    unsure = (values[:, -2] == values[:, -1]).nonzero().squeeze(1)
    if len(unsure):
        full_values, full_ids = _likeliest(work[unsure], work.shape[1])
        values[unsure], ids[unsure] = full_values[:, : count + 1], full_ids[:, : count + 1]
    return values[:, :count], ids[:, :count]


def _inverse(weights: Tensor, draws: Tensor) -> Tensor:
    """The first index whose running sum of integer `weights` [P, n] passes `draws` [P] of the row's total."""
    reached = weights.cumsum(1)
    total = reached[:, -1]
    target = torch.minimum((draws * total.double()).long(), total - 1)
    return torch.searchsorted(reached, target[:, None], right=True).squeeze(1)
