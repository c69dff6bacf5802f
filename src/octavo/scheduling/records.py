"""The record of a request, when it has ended: what it cost, from what its sequence went through.

Owns no state. The names are those of `RequestRecord`; times are differences of the moments that the scheduler noted.
"""

from __future__ import annotations

from octavo.memory.cache import KVCache
from octavo.scheduling.events import RequestRecord
from octavo.scheduling.limits import Limits
from octavo.scheduling.sequence import Sequence


def note_peak(sequence: Sequence, held: list[int]) -> None:
    """It holds so many blocks of each group."""
    peak = sequence.peak_blocks or [0] * len(held)
    sequence.peak_blocks = [max(a, b) for a, b in zip(peak, held, strict=True)]


def record_of(sequence: Sequence, now: float, outputs: int, limits: Limits, cache: KVCache) -> RequestRecord:
    scheduled = now if sequence.first_scheduled_s is None else sequence.first_scheduled_s
    first = sequence.first_token_s
    paused = 0.0 if sequence.paused_at_s is None else now - sequence.paused_at_s
    names = [group.name for group in cache.layout.groups]
    return RequestRecord(
        request_id=sequence.request.request_id,
        choice=sequence.request.choice,
        input_tokens=sequence.request.prompt_tokens,
        cached_tokens={tier: n for tier, n in (sequence.cached_tokens or {}).items() if n},
        output_tokens=outputs,
        allocated_blocks=dict(zip(names, sequence.peak_blocks or [0] * len(names), strict=True)),
        attention_mode=limits.attention_mode,
        cache_dtype=limits.cache_dtype,
        queue_time=scheduled - sequence.arrival_s,
        prefill_time=(now if first is None else first) - scheduled,
        decode_time=0.0 if first is None else now - first,
        preempted_time=sequence.preempted_s + paused,
        preemptions=sequence.preemptions,
        arrival_s=sequence.arrival_s,
        first_token_s=first,
        finished_s=now,
        recomputed_tokens=sequence.recomputed_tokens,
    )
