"""vLLM's CPU build, through `LLM.generate`, its engine core in a process of its own as it is by default.

First tokens are placed by vLLM's own statistics, which are switched on for it.
"""

from __future__ import annotations

import os
import time

from protocol import Job, Played, Setup, flag

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
GIB = 2**30


class Player:
    """Options: `reuse` (prefix caching), `eager` (no compiling), `batched` (tokens a step, if not everybody's)."""

    def __init__(self, setup: Setup) -> None:
        cores = sorted(os.sched_getaffinity(0))[: setup.threads]
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": str(-(-setup.kv_bytes // GIB)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": setup.tools["cache"],
        }
        os.environ.update(variables)
        # it binds its own threads, and warns that it serves more slowly where this is set
        os.environ.pop("OMP_NUM_THREADS", None)
        import torch
        import vllm

        asked = {
            "dtype": DTYPES[setup.dtype],
            "max_model_len": setup.longest,
            "max_num_seqs": setup.sequences,
            "max_num_batched_tokens": max(int(setup.options.get("batched", setup.batched_tokens)), setup.sequences),
            "enable_prefix_caching": flag(setup.options, "reuse"),
            "enforce_eager": flag(setup.options, "eager"),
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
        }
        self._llm = vllm.LLM(setup.checkpoint, seed=0, **asked)
        self.settings = {"version": vllm.__version__, "torch": torch.__version__, **asked, **variables}

    def prepare(self, jobs: list[Job]) -> None:
        """Nothing: the engine was sized for the largest workload."""

    def play(self, jobs: list[Job]) -> Played:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False)
            for job in jobs
        ]
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        arrived = time.time()
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        first_s, last_s = [], []
        for output in outputs:
            stats = output.metrics
            first = stats.arrival_time - arrived + stats.first_token_latency
            first_s.append(first)
            last_s.append(first + stats.last_token_ts - stats.first_token_ts)
        return Played(seconds, [list(output.outputs[0].token_ids) for output in outputs], first_s, last_s)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
