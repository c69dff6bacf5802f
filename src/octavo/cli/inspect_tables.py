"""`octavo inspect tables`: a live run, stopped to see where each block of each sequence lies."""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import with_engine_options
from octavo.cli.writing import write_line
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

DEFAULT_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a narrow street behind the old printing works, there lived a bookbinder who",
    "1, 2, 3,",
)
Prompts = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT...", help="What the sequences start with; three examples if none.")
]
Steps = Annotated[int, typer.Option(help="steps to run before the tables are printed")]
Every = Annotated[
    bool, typer.Option("--every-step", help="print them after each step, so that blocks are seen to move")
]
MaxTokens = Annotated[int | None, typer.Option(help="end each sequence after this many tokens; without, none ends")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress on stderr")]


@with_engine_options
def tables(
    *,
    engine: dict[str, Any],
    prompt: Prompts = None,
    steps: Steps = 24,
    every_step: Every = False,
    max_tokens: MaxTokens = None,
    quiet: Quiet = False,
) -> None:
    """Run a model for some steps, then print each live sequence's logical to physical blocks: A0 -> 7, A1 -> 2.

    With --reuse prefix, x2 is a block that two sequences have, and cached ones are those that nobody has.
    """
    if steps < 1:
        raise ConfigError("steps", steps, "must be at least 1")
    from octavo.cli.loading import start_engine
    from octavo.cli.prompts import read_prompts
    from octavo.scheduling.request import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    texts = read_prompts(prompt or list(DEFAULT_PROMPTS), None)
    built = start_engine(engine, quiet=quiet)
    try:
        named = {}
        for name, text in zip(_names(), texts, strict=False):
            built.add(name, text, params)
            named[name] = text
        for name, text in named.items():
            write_line(f"{name}: {text!r}")
        done = 0
        while done < steps and built.has_work:
            finished = built.step().finished
            done += 1
            for name in finished:
                ended = built.take(name).outputs[0]
                write_line(f"step {done}: {name} has ended ({ended.error or ended.finish_reason})")
            if every_step or done == steps or not built.has_work:
                write_line("\n".join(_moment(built, done)))
        if not built.has_work:
            write_line(f"all sequences have ended after {done} steps")
    finally:
        built.close()


def _moment(engine: Engine, step: int) -> Iterator[str]:
    """Who lives, and where each of its blocks lies."""
    from octavo.memory.inspect import cached_lines, table_lines
    from octavo.memory.slots import SlotState

    scheduler = engine.core.scheduler
    running, cache = scheduler.running, scheduler.cache
    names = {row: running.sequence(row).request.request_id for row in sorted(running.order.tolist())}
    waiting = ", ".join(sequence.request.request_id for sequence in scheduler.waiting)
    used = sum(int((pool.state != SlotState.EMPTY).sum()) for pool in cache.pool.slots) - sum(cache.pool.cached)
    kept = f", {sum(cache.pool.cached):,} cached" if cache.sharing is not None else ""
    yield (
        f"step {step}: {len(names)} running, {f'waiting: {waiting}' if waiting else 'none waiting'}, "
        f"{used:,} blocks in use{kept}"
    )
    yield from (f"  {line}" for line in (*table_lines(cache, names), *cached_lines(cache)))


def _names() -> Iterator[str]:
    """A, B, ... Z, AA, AB, ..."""
    yield from string.ascii_uppercase
    for first in _names():
        yield from (first + second for second in string.ascii_uppercase)
