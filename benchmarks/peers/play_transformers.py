"""Transformers: its continuous batching, and `generate` on padded batches as a floor.

Continuous batching is the manager behind `generate_batch`, given one length per request, which
`generate_batch` itself cannot be; its blocks and tokens a step are set by hand. `generate` takes
requests in batches of similar prompt length, padded on the left; a batch runs until its longest
answer is complete, and what the others made beyond their own length is cut off.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from protocol import Job, Played, Setup, flag
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAD = 0
READY_TIMEOUT_S = 120.0


class Player:
    """Options: `batching` (continuous or padded), `reuse`, `page` (tokens a block) or `batch` (requests, padded)."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        options = setup.options
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            setup.checkpoint, dtype=DTYPES[setup.dtype], attn_implementation="sdpa", local_files_only=True
        ).eval()
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=PAD)
        self._padded = options.get("batching") == "padded"
        self._batch = int(options.get("batch", 16))
        page = int(options.get("page", 256))
        self._config = ContinuousBatchingConfig(
            page_size=page,
            # rounded up for every request, so that larger pages cost it no room
            num_blocks=-(-setup.kv_tokens // page) + setup.sequences,
            max_batch_tokens=setup.batched_tokens,
            max_requests_per_batch=setup.sequences,
            allow_block_sharing=flag(options, "reuse"),
            auto_switch_to_flash=False,
        )
        self.settings = {"version": transformers.__version__, "torch": torch.__version__, "attention": "sdpa"}
        self.settings |= {"threads": torch.get_num_threads()}
        if self._padded:
            self.settings |= {"batch": self._batch}
        else:
            names = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch", "allow_block_sharing")
            self.settings |= {name: getattr(self._config, name) for name in names}

    def prepare(self, jobs: list[Job]) -> None:
        """Nothing here: the manager is made anew for every workload, before the time starts."""

    def play(self, jobs: list[Job]) -> Played:
        with torch.inference_mode():
            return self._play_padded(jobs) if self._padded else self._play_continuous(jobs)

    def close(self) -> None:
        """Nothing is left running."""

    def _play_continuous(self, jobs: list[Job]) -> Played:
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
        with self._model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=self._config, warmup=False, timeout=READY_TIMEOUT_S
        ) as manager:
            deadline = time.perf_counter() + READY_TIMEOUT_S
            while manager.batch_processor is None:
                if time.perf_counter() > deadline or not manager.is_running():
                    raise SystemExit("the generation thread did not start")
                time.sleep(0.01)
            return _run_manager(manager, jobs)

    def _play_padded(self, jobs: list[Job]) -> Played:
        order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].prompt))
        outputs: dict[int, list[int]] = {}
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        start = time.perf_counter()
        for begin in range(0, len(order), self._batch):
            batch = order[begin : begin + self._batch]
            watch = _Watch(start)
            made = self._generate([jobs[i].prompt for i in batch], max(jobs[i].max_tokens for i in batch), watch)
            for i, tokens in zip(batch, made, strict=True):
                count = jobs[i].max_tokens
                outputs[i], first[i], last[i] = tokens[:count], watch.times[0], watch.times[count - 1]
        seconds = time.perf_counter() - start
        each = range(len(jobs))
        return Played(seconds, [outputs[i] for i in each], [first[i] for i in each], [last[i] for i in each])

    def _generate(self, prompts: list[list[int]], new_tokens: int, watch: _Watch) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), PAD, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        made = self._model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, stopping_criteria=[watch]
        )
        return [row.tolist() for row in made[:, width:]]


class _Watch(StoppingCriteria):
    """Stops nothing; notes when each token of a batch was there."""

    def __init__(self, start: float) -> None:
        self._start = start
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter() - self._start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def _run_manager(manager: Any, jobs: list[Job]) -> Played:
    start = time.perf_counter()
    for i, job in enumerate(jobs):
        manager.add_request(job.prompt, f"r{i}", max_new_tokens=job.max_tokens, record_timestamps=True, eos_token_id=-1)
    results: dict[str, Any] = {}
    while len(results) < len(jobs):
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished():
            results[result.request_id] = result
        elif result is None and not manager.is_running():
            raise SystemExit("the generation thread has ended")
    seconds = time.perf_counter() - start
    ordered = [results[f"r{i}"] for i in range(len(jobs))]
    failed = [result.error for result in ordered if result.error is not None]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    begin = min(result.created_time for result in ordered)
    return Played(
        seconds=seconds,
        outputs=[list(result.generated_tokens) for result in ordered],
        first_s=[result.timestamps[0] - begin for result in ordered],
        last_s=[result.timestamps[-1] - begin for result in ordered],
    )
