"""The four workloads that engines are compared on, as token ids and exact output lengths.

    W1   1 sequence, 128 tokens in, 128 out             the speed of one stream
    W2  32 at once, 32..1024 in, 16..256 out            mixed lengths: what batching and paging are for
    W3   8 of 4096 in, 64 out                           long prompts
    W4  32 of 1024 shared + 32 own tokens in, 32 out    a common prefix

Reads them from a `workloads.json`, or draws workloads of the same description from a seed and says so.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

NAMES = ("W1", "W2", "W3", "W4")
DEFAULT_FILE = Path("shared/data/workloads/workloads.json")
SEED = 2


@dataclass(frozen=True, slots=True)
class Job:
    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def positions(self) -> int:
        """Positions computed for it: its last token is never computed."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    about: str
    jobs: tuple[Job, ...]

    @property
    def input_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(job.max_tokens for job in self.jobs)

    @property
    def longest(self) -> int:
        return max(len(job.prompt) + job.max_tokens for job in self.jobs)

    def scaled(self, scale: float) -> Workload:
        """Lengths times `scale`. Prompts lose their front, so that what differs between them stays."""
        if scale == 1:
            return self
        jobs = tuple(
            Job(job.prompt[-max(1, round(len(job.prompt) * scale)) :], max(1, round(job.max_tokens * scale)))
            for job in self.jobs
        )
        return Workload(self.name, f"{self.about}; lengths times {scale:g}", jobs)

    def described(self) -> str:
        return f"{self.name}: {self.about} ({self.input_tokens:,} tokens in, {self.output_tokens:,} out)"


def find_file(asked: Path | None, start: Path, default: Path = DEFAULT_FILE) -> Path | None:
    """The file asked for, or the default one beside `start` or above it; None when there is no default one."""
    if asked is not None:
        return asked
    for folder in (start, *start.parents):
        if (folder / default).is_file():
            return folder / default
    return None


def read_workloads(path: Path) -> dict[str, Workload]:
    """Raises `SystemExit` in words when the file is not what it should be."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: Workload(
                name, str(entry["desc"]), tuple(Job(tuple(r["prompt"]), r["max_tokens"]) for r in entry["requests"])
            )
            for name, entry in raw.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path}: not a workloads file ({type(error).__name__}: {error})") from error


def drawn_workloads(vocab_size: int, seed: int = SEED) -> dict[str, Workload]:
    """Workloads of the same description, with random token ids."""
    random = Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(random.randrange(vocab_size) for _ in range(count))

    mixed = tuple(
        Job(ids(round(math.exp(random.uniform(math.log(32), math.log(1024))))), random.randint(16, 256))
        for _ in range(32)
    )
    shared = ids(1024)
    return {
        "W1": Workload("W1", "1 sequence, 128 prompt, 128 output", (Job(ids(128), 128),)),
        "W2": Workload("W2", "32 requests at once, prompt log-uniform 32..1024, output uniform 16..256", mixed),
        "W3": Workload("W3", "8 x 4096 prompt, 64 output", tuple(Job(ids(4096), 64) for _ in range(8))),
        "W4": Workload(
            "W4",
            "32 requests: shared 1024-token prefix + 32 distinct tokens, 32 outputs",
            tuple(Job(shared + ids(32), 32) for _ in range(32)),
        ),
    }
