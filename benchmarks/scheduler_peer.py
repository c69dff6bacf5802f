"""The steps that both schedulers make, and vLLM's side of them in a process of its own.

Owns what is drawn (prompts, answers, room) and the conversation with `peers/schedule_vllm.py`, one JSON line
each way. Measures nothing itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from environments import peer_variables

BLOCK_TOKENS = 16
PROMPT_TOKENS = 128
VOCAB = 32_000
EOS = 2
LARGEST = 1024
"""Sequences with which vLLM's scheduler makes a repetition in seconds."""
SCRIPT = Path(__file__).resolve().parent / "peers" / "schedule_vllm.py"


@dataclass(frozen=True, slots=True)
class Steps:
    """What is asked of a scheduler: all sequences decode, one in sixteen crosses a block boundary in every step."""

    running: int
    prompts: list[np.ndarray]
    """Of who runs, then of who waits."""
    answers: np.ndarray
    """[steps, running]"""
    blocks: int
    longest: int
    reuse: bool

    @classmethod
    def drawn(cls, running: int, steps: int, *, waiting: int = 0, reuse: bool = False) -> Self:
        longest = PROMPT_TOKENS + BLOCK_TOKENS + steps + 3
        draw = np.random.default_rng(0)
        lengths = [PROMPT_TOKENS + i % BLOCK_TOKENS for i in range(running + waiting)]
        prompts = [draw.integers(EOS + 1, VOCAB, length, dtype=np.int32) for length in lengths]
        answers = np.random.default_rng(1).integers(EOS + 1, VOCAB, (steps, running), dtype=np.int32)
        blocks = running * (-(-longest // BLOCK_TOKENS) + 1)
        return cls(running, prompts, answers, blocks, longest, reuse)


@dataclass(frozen=True, slots=True)
class Played:
    """What was done in all steps of one repetition; both sides must tell the same."""

    computed: int
    """Positions."""
    handed_over: int
    """Tokens."""
    blocks_taken: int


class Vllm:
    """vLLM's scheduler, in the Python given. Raises `SystemExit` in words when it cannot be had."""

    def __init__(self, python: Path) -> None:
        if not python.exists():
            raise SystemExit(f"--vllm {python}: there is no such file; name the Python of an environment with vLLM")
        variables = peer_variables() | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        self._process = subprocess.Popen(
            [python, SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
        )
        self.version: str = self._answer()["version"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def play(self, steps: Steps) -> tuple[Played, np.ndarray]:
        """One repetition: what was done, and nanoseconds of `schedule` and `update` in each step."""
        asked = {
            "running": steps.running,
            "prompts": [prompt.tolist() for prompt in steps.prompts],
            "answers": steps.answers.tolist(),
            "blocks": steps.blocks,
            "longest": steps.longest,
            "reuse": steps.reuse,
        }
        stdin = self._process.stdin
        if stdin is None:
            raise SystemExit("vLLM's process has no standard input")
        try:
            print(json.dumps(asked), file=stdin, flush=True)
        except BrokenPipeError:
            self._answer()
        told = self._answer()
        done = Played(told["computed"], told["handed_over"], told["blocks_taken"])
        return done, np.array(told["times"], dtype=np.int64)

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            told = self._process.communicate()[1].strip().splitlines()
            raise SystemExit(f"--vllm: its scheduler ended: {told[-1] if told else 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer
