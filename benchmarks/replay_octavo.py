"""One workload through octavo: all requests submitted at once, run to their exact lengths.

Every figure is a fold over the engine's own events and request records; waste is sampled from the KV
cache after each step. Building the engine is not timed, sampling the waste is (microseconds a step).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace

import torch
from measures import Iteration, Replay
from shared_weights import sharing_weights
from workloads import Workload

from octavo.config import Config
from octavo.engine.build import engine_for
from octavo.engine.engine import Engine
from octavo.memory.cache import KVCache
from octavo.memory.waste import waste
from octavo.models.load import LoadedModel
from octavo.scheduling.events import Event, Preempted, StepEnded, StepPlanned
from octavo.scheduling.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Settings:
    kv_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class OctavoReplay:
    """octavo with one choice of allocation, batching and reuse."""

    def __init__(
        self, loaded: LoadedModel, allocation: str = "paged", batching: str = "iteration", reuse: str = "none"
    ) -> None:
        chosen = (allocation, batching) if reuse == "none" else (allocation, batching, reuse)
        self.name = "octavo" if chosen == ("paged", "iteration") else f"octavo {'/'.join(chosen)}"
        self._loaded = loaded
        self._policies = {"allocation": allocation, "batching": batching, "reuse": reuse}

    def run(self, workload: Workload, settings: Settings) -> Replay:
        engine = self._engine(settings)
        try:
            return self._replay(engine, workload)
        finally:
            engine.close()

    def _engine(self, settings: Settings) -> Engine:
        config = Config.from_kwargs(
            skip_tokenizer_init=True,
            max_model_len=settings.max_model_len,
            block_size=settings.block_tokens,
            num_gpu_blocks_override=settings.kv_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            device=str(self._loaded.model.device),
            **self._policies,
        )
        loaded = replace(self._loaded, model=sharing_weights(self._loaded.model))
        return engine_for(config, loaded, torch.device(loaded.model.device))

    def _replay(self, engine: Engine, workload: Workload) -> Replay:
        events: list[Event] = []
        engine.observers.append(events.extend)
        cache = engine.core.scheduler.cache
        names = [f"r{i}" for i in range(len(workload.jobs))]
        iterations: list[Iteration] = []
        seen = 0
        start, cpu_start = time.perf_counter(), time.process_time()
        for name, job in zip(names, workload.jobs, strict=True):
            params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
            engine.add(name, {"prompt_token_ids": list(job.prompt)}, params)
        while engine.core.has_work:
            engine.step()
            wasted = _wasted(cache)
            planned = [event for event in events[seen:] if isinstance(event, StepPlanned)]
            iterations += [_iteration(event, cache, wasted) for event in planned]
            seen = len(events)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        outputs = [engine.take(name).outputs[0] for name in names]
        for output in outputs:
            if output.error is not None or output.record is None:
                raise SystemExit(f"{self.name}: a request ended with {output.finish_reason}: {output.error}")
        records = [output.record for output in outputs if output.record is not None]
        return Replay(
            engine=self.name,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            outputs=[output.token_ids for output in outputs],
            ttft_s=[r.first_token_s - r.arrival_s for r in records if r.first_token_s is not None],
            tpot_s=[r.decode_time / (r.output_tokens - 1) for r in records if r.output_tokens > 1],
            iterations=iterations,
            policies={
                **self._policies,
                "admission": engine.core.scheduler.policies.admission.name,
                "preemption": "recompute",
                "tiering": "no lower tier",
            },
            preemptions=sum(isinstance(event, Preempted) for event in events),
            recomputed_tokens=sum(r.recomputed_tokens for r in records),
            parts_s={part: _total(events, part) for part in ("schedule", "execute", "commit")},
        )


def _total(events: list[Event], part: str) -> float:
    return sum(getattr(event, f"{part}_s") or 0.0 for event in events if isinstance(event, StepEnded))


def _wasted(cache: KVCache) -> dict[str, float]:
    """Shares of the pool's bytes, by cause."""
    now, pool_bytes = waste(cache), cache.pool.slabs * cache.layout.slab_bytes
    return {field.name.removesuffix("_bytes"): getattr(now, field.name) / pool_bytes for field in fields(now)}


def _iteration(event: StepPlanned, cache: KVCache, wasted: dict[str, float]) -> Iteration:
    return Iteration(
        running=event.running,
        kv_used=1 - event.free_slabs / cache.pool.slabs,
        tokens=event.decode_tokens + event.prefill_tokens,
        waste=wasted,
        bound_by=event.resource,
    )
