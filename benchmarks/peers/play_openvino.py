"""OpenVINO GenAI's continuous batching pipeline, stepped by hand so that first tokens can be placed.

Token ids in and out; the exported model has no tokenizer and needs none.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from protocol import Job, Played, Setup, flag

PRECISIONS = {"fp32": ("f32", "f32"), "bf16": ("bf16", "bf16"), "int8": ("f32", "u8")}
"""Of arithmetic and of the KV cache; with int8 weights OpenVINO's own defaults."""
GIB = 2**30


class Player:
    """Options: `reuse` (prefix caching), `batched` (tokens a step, if not everybody's)."""

    def __init__(self, setup: Setup) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = int(setup.options.get("batched", setup.batched_tokens))
        scheduler.max_num_seqs = setup.sequences
        scheduler.cache_size = -(-setup.kv_bytes // GIB)
        scheduler.enable_prefix_caching = flag(setup.options, "reuse")
        scheduler.dynamic_split_fuse = True
        precision, kept = PRECISIONS[setup.dtype]
        properties: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": setup.threads,
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": kept,
            "NUM_STREAMS": 1,
        }
        self._pipeline = genai.ContinuousBatchingPipeline(setup.checkpoint, scheduler, "CPU", properties)
        names = ("max_num_batched_tokens", "max_num_seqs", "cache_size", "enable_prefix_caching", "dynamic_split_fuse")
        self.settings = {"version": genai.__version__, "openvino": openvino.__version__, **properties}
        self.settings |= {name: getattr(scheduler, name) for name in names}
        self._count = 0

    def prepare(self, jobs: list[Job]) -> None:
        """Nothing: the cache was sized for the largest workload."""

    def play(self, jobs: list[Job]) -> Played:
        handles: list[Any] = []
        outputs: list[list[int]] = [[] for _ in jobs]
        first_s, last_s = [0.0] * len(jobs), [0.0] * len(jobs)
        start = time.perf_counter()
        for job in jobs:
            ids = openvino.Tensor(np.array([job.prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._count, ids, _greedy(job.max_tokens)))
            self._count += 1
        waiting = list(range(len(jobs)))
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for i in waiting:
                while handles[i].can_read():
                    for made in handles[i].read().values():
                        first_s[i] = first_s[i] or now
                        last_s[i] = now
                        outputs[i] += made.generated_ids
            waiting = [i for i in waiting if len(outputs[i]) < jobs[i].max_tokens]
        seconds = time.perf_counter() - start
        return Played(seconds, outputs, first_s, last_s)

    def close(self) -> None:
        del self._pipeline


def _greedy(tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.do_sample = False
    config.max_new_tokens = tokens
    config.ignore_eos = True
    return config
