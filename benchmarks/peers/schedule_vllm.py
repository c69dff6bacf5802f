"""vLLM's own scheduler without a model, for `scheduler.py`: run by the Python of an environment that has vLLM.

Answers one JSON line on standard output for each on standard input: so many sequences decode for so many
steps, `Scheduler.schedule` and `Scheduler.update_from_output` timed in processor time of the thread. What a
model runner would answer is made outside the clock. Log statistics are off, the defaults of a
scheduler that is built by hand; what each step must have done is counted and told, so that the asker can
check that both sides did the same.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from time import thread_time_ns
from typing import Any

BLOCK_TOKENS = 16
VOCAB = 32_000
SHAPE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
         "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": VOCAB,
         "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1,
         "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True}  # fmt: skip


class Scheduling:
    """A scheduler with `running` sequences that have their first token."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        prompts: list[list[int]] = asked["prompts"]
        self.running = asked["running"]
        self.scheduler, params, sha = _scheduler(folder, asked)
        init_none_hash(sha)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha) if asked["reuse"] else None
        for i, prompt in enumerate(prompts):
            self.scheduler.add_request(Request(f"r{i}", prompt, params, None, block_hasher=hasher))
        plan = self.scheduler.schedule()
        if len(plan.num_scheduled_tokens) != self.running:
            raise SystemExit(f"vLLM seated {len(plan.num_scheduled_tokens)} of {self.running} sequences")
        self.scheduler.update_from_output(plan, _answer(plan, [3] * self.running))
        gc.collect()
        gc.freeze()

    def play(self, answers: list[list[int]]) -> dict[str, Any]:
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        times, handed, scheduled = [], 0, 0
        before = pool.get_num_free_blocks()
        for tokens in answers:
            start = thread_time_ns()
            plan = scheduler.schedule()
            decided = thread_time_ns()
            answer = _answer(plan, tokens)
            returned = thread_time_ns()
            outputs = scheduler.update_from_output(plan, answer)
            learnt = thread_time_ns()
            times.append((decided - start, learnt - returned))
            scheduled += plan.total_num_scheduled_tokens
            handed += sum(len(one.new_token_ids) for each in outputs.values() for one in each.outputs)
        taken = before - pool.get_num_free_blocks()
        gc.unfreeze()
        return {"times": times, "handed_over": handed, "computed": scheduled, "blocks_taken": taken}


def _scheduler(folder: Path, asked: dict[str, Any]) -> tuple[Any, Any, Any]:
    import torch
    from vllm import SamplingParams
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    prompts, longest = asked["prompts"], asked["longest"]
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest),
        scheduler_config=SchedulerConfig(
            max_num_seqs=asked["running"],
            max_num_batched_tokens=max(sum(map(len, prompts)), longest),
            max_model_len=longest,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=asked["reuse"]),
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    blocks = asked["blocks"] + 1  # one that vLLM keeps for itself
    config.cache_config.num_gpu_blocks = blocks
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a", "b"], spec)])
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK_TOKENS, log_stats=False)
    params = SamplingParams(max_tokens=len(asked["answers"]) + 2, temperature=0.0)
    params.update_from_generation_config({}, 2)
    return scheduler, params, get_hash_fn_by_name("sha256")


def _answer(plan: Any, tokens: list[int]) -> Any:
    """What a model runner hands back: each scheduled sequence's next token."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(plan.num_scheduled_tokens)
    places = {name: place for place, name in enumerate(names)}
    return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=[[token] for token in tokens])


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever vLLM prints is no answer
    import vllm

    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        for line in sys.stdin:
            asked = json.loads(line)
            told = Scheduling(folder, asked).play(asked["answers"])
            print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
