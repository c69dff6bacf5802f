"""The same workload through Transformers: `generate` on padded batches, and its continuous batching.

`generate` takes requests in batches of similar prompt length, padded on the left; a batch runs until
its longest answer is complete, and what the others made beyond their own length is cut off. Continuous
batching is the manager behind `generate_batch`, given one length per request, which `generate_batch`
itself cannot be; its number of blocks and tokens a step are set by hand.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from measures import Iteration, Replay
from replay_octavo import Settings
from shared_weights import PAD
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from workloads import Workload

READY_TIMEOUT_S = 60.0


class PaddedReplay:
    """`generate`, a batch at a time."""

    name = "hf-padded"

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        self._model = model
        self._batch_size = batch_size

    def run(self, workload: Workload, settings: Settings) -> Replay:
        jobs = workload.jobs
        order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].prompt))
        outputs: dict[int, tuple[int, ...]] = {}
        ttft: list[float] = []
        tpot: list[float] = []
        iterations: list[Iteration] = []
        start, cpu_start = time.perf_counter(), time.process_time()
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            watch = _Watch()
            made = self._generate([jobs[i].prompt for i in batch], max(jobs[i].max_tokens for i in batch), watch)
            for i, tokens in zip(batch, made, strict=True):
                count = jobs[i].max_tokens
                outputs[i] = tuple(tokens[:count])
                ttft.append(watch.times[0] - start)
                if count > 1:
                    tpot.append((watch.times[count - 1] - watch.times[0]) / (count - 1))
            iterations += _padded_iterations([jobs[i] for i in batch])
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        policies = {
            "allocation": "padded to the longest of a batch",
            "batching": f"request, {self._batch_size} a batch",
        }
        policies |= {"admission": "sorted by prompt length", "preemption": "none", "reuse": "none"}
        return Replay(
            engine=self.name,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            outputs=[outputs[i] for i in range(len(jobs))],
            ttft_s=ttft,
            tpot_s=tpot,
            iterations=iterations,
            policies={**policies, "tiering": "no lower tier"},
        )

    def _generate(self, prompts: list[tuple[int, ...]], new_tokens: int, watch: _Watch) -> list[list[int]]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), width), PAD, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            made = self._model.generate(
                input_ids=ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=new_tokens,
                stopping_criteria=[watch],
            )
        return [row.tolist() for row in made[:, width:]]


class _Watch(StoppingCriteria):
    """Stops nothing; notes when each token of a batch was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _padded_iterations(jobs: list[Any]) -> list[Iteration]:
    """One iteration a step: how many rows still want tokens, and which share of the padded cells holds one."""
    width, longest = max(len(job.prompt) for job in jobs), max(job.max_tokens for job in jobs)
    steps = []
    for step in range(longest):
        wanting = sum(step < job.max_tokens for job in jobs)
        held = sum(len(job.prompt) + min(step, job.max_tokens - 1) for job in jobs)
        steps.append(Iteration(wanting, held / (len(jobs) * (width + step)), len(jobs) * (width if step == 0 else 1)))
    return steps


class ContinuousReplay:
    """The continuous batching manager."""

    name = "hf-continuous"

    def __init__(self, model: PreTrainedModel, page_tokens: int, *, share_blocks: bool) -> None:
        self._model = model
        self._page_tokens = page_tokens
        self._share_blocks = share_blocks

    def run(self, workload: Workload, settings: Settings) -> Replay:
        kv_tokens = settings.kv_blocks * settings.block_tokens
        # Rounded up for every request, so that larger pages cost it no room.
        blocks = -(-kv_tokens // self._page_tokens) + len(workload.jobs)
        config = ContinuousBatchingConfig(
            page_size=self._page_tokens,
            num_blocks=blocks,
            max_batch_tokens=settings.max_num_batched_tokens,
            max_requests_per_batch=settings.max_num_seqs,
            allow_block_sharing=self._share_blocks,
            auto_switch_to_flash=False,
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
        with (
            torch.inference_mode(),
            self._model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=config, warmup=False, timeout=READY_TIMEOUT_S
            ) as manager,
        ):
            return self._replay(manager, workload)

    def _replay(self, manager: Any, workload: Workload) -> Replay:
        _wait_until_ready(manager)
        iterations = _watch_steps(manager)
        start, cpu_start = time.perf_counter(), time.process_time()
        for i, job in enumerate(workload.jobs):
            manager.add_request(
                list(job.prompt), f"r{i}", max_new_tokens=job.max_tokens, record_timestamps=True, eos_token_id=-1
            )
        results: dict[str, Any] = {}
        while len(results) < len(workload.jobs):
            result = manager.get_result(timeout=1.0)
            if result is not None and result.is_finished():
                results[result.request_id] = result
            elif result is None and not manager.is_running():
                raise SystemExit(f"{self.name}: the generation thread has ended")
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        ordered = [results[f"r{i}"] for i in range(len(workload.jobs))]
        failed = [result.error for result in ordered if result.error is not None]
        if failed:
            raise SystemExit(f"{self.name}: {len(failed)} requests failed: {failed[0]}")
        return Replay(
            engine=self.name,
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            outputs=[tuple(result.generated_tokens) for result in ordered],
            ttft_s=[result.timestamps[0] - result.created_time for result in ordered],
            tpot_s=[
                (result.timestamps[-1] - result.timestamps[0]) / (len(result.timestamps) - 1)
                for result in ordered
                if len(result.timestamps) > 1
            ],
            iterations=iterations,
            policies={
                "allocation": f"paged, {self._page_tokens} tokens a block",
                "batching": "iteration",
                "admission": "first come, first served",
                "preemption": "recompute",
                "reuse": "shared prefix blocks" if self._share_blocks else "none",
                "tiering": "no lower tier",
            },
        )


def _wait_until_ready(manager: Any) -> None:
    """The manager's thread allocates the cache; that is not timed."""
    deadline = time.perf_counter() + READY_TIMEOUT_S
    while manager.batch_processor is None:
        if time.perf_counter() > deadline or not manager.is_running():
            raise SystemExit("hf-continuous: its generation thread did not start")
        time.sleep(0.01)


def _watch_steps(manager: Any) -> list[Iteration]:
    """Notes the batch and the cache of every step of the manager; the list fills as it runs."""
    processor, step = manager.batch_processor, manager._generation_step
    iterations: list[Iteration] = []

    def noted() -> None:
        batch = processor.inputs_and_outputs.requests_in_batch
        used = 1 - processor.cache.compute_free_capacity()
        iterations.append(Iteration(len(batch), used, sum(state.query_length for state in batch)))
        step()

    manager._generation_step = noted
    return iterations
