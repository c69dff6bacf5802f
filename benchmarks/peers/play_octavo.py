"""octavo, as a user has it: `LLM.generate` with the options of `Config`, those of the command line included.

Times are the engine's own request records, on the clock that times the whole.
"""

from __future__ import annotations

import time
from typing import Any

from protocol import Job, Played, Setup, flag

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "bfloat16"}
INT8 = ("quantization", "int8")
BLOCK_TOKENS = 16
"""`Config`'s default."""


class Player:
    """One `LLM`. Every option of the command line is one of `Config`'s by name; `reuse` alone means `reuse=prefix`."""

    def __init__(self, setup: Setup) -> None:
        from octavo import LLM, __version__
        from octavo.config import options

        known = {option.name for option in options()}
        asked: dict[str, Any] = {
            "dtype": DTYPES[setup.dtype],
            "skip_tokenizer_init": True,
            "max_model_len": setup.longest,
            "num_gpu_blocks_override": -(-setup.kv_tokens // BLOCK_TOKENS),
            "max_num_seqs": setup.sequences,
            "max_num_batched_tokens": setup.batched_tokens,
            "device": "cpu",
        }
        if setup.dtype == "int8":
            if INT8[0] not in known:
                raise SystemExit("this version has no weights in int8")
            asked[INT8[0]] = INT8[1]
        if "threads" in known:
            asked["threads"] = setup.threads
        else:
            _set_threads(setup.threads)
        asked |= {name: _value(value) for name, value in setup.options.items()}
        if "reuse" in asked:
            asked["reuse"] = "prefix" if flag(setup.options, "reuse") else "none"
        self._llm = LLM(setup.checkpoint, **asked)
        rows = () if self._llm.deployment is None else self._llm.deployment.rows()
        self.settings = {
            "version": __version__,
            **asked,
            "decided": ", ".join(f"{row.name} {row.value}" for row in rows),
        }

    def prepare(self, jobs: list[Job]) -> None:
        """Nothing: the engine was sized for the largest workload."""

    def play(self, jobs: list[Job]) -> Played:
        from octavo import SamplingParams

        params = [SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True) for job in jobs]
        prompts = [{"prompt_token_ids": job.prompt} for job in jobs]
        start = time.perf_counter()
        outputs = [output.outputs[0] for output in self._llm.generate(prompts, params)]
        seconds = time.perf_counter() - start
        wrong = [output for output in outputs if output.error is not None or output.record is None]
        if wrong:
            raise SystemExit(f"a request ended with {wrong[0].finish_reason}: {wrong[0].error}")
        records = [output.record for output in outputs if output.record is not None]
        begin = min(record.arrival_s for record in records)
        return Played(
            seconds=seconds,
            outputs=[list(output.token_ids) for output in outputs],
            first_s=[(record.first_token_s or record.finished_s) - begin for record in records],
            last_s=[record.finished_s - begin for record in records],
        )

    def close(self) -> None:
        self._llm.engine.close()


def _value(text: Any) -> Any:
    """An option as written: a whole number, true or false, or text."""
    if not isinstance(text, str):
        return text
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
