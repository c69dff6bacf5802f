"""`octavo check`: every invariant by name on the real cache and scheduler, without a model or an accelerator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.writing import write_line
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.simulate.explore import Explored

WALKS = ("handover",)

Seed = Annotated[int, typer.Option(help="the same seed visits the same states")]
Steps = Annotated[int, typer.Option(help="operations in all, spread over every combination of policies")]
Walk = Annotated[
    str | None,
    typer.Option(help="tell one story step by step instead: handover (a short request gives way to the next)"),
]
Depth = Annotated[int, typer.Option("--pipeline-depth", help="with --walk: steps in flight, 0 or 1")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object")]


def check(
    *, seed: Seed = 0, steps: Steps = 4_800, walk: Walk = None, pipeline_depth: Depth = 0, as_json: Json = False
) -> None:
    """Check every invariant by name in seeded random worlds; print pass and states visited.

    Exits with 1 when one does not hold.
    """
    if walk is not None:
        _tell(walk, pipeline_depth, as_json=as_json)
        return
    if steps < 1:
        raise ConfigError("steps", steps, "must be at least 1")
    from octavo.simulate.explore import explore

    found = explore(seed=seed, steps=steps)
    if as_json:
        write_line(json.dumps({"seed": seed, "steps": steps, "invariants": [_as_dict(item) for item in found]}))
    else:
        for line in _lines(found, seed):
            write_line(line)
    if not all(item.passed for item in found):
        raise typer.Exit(1)


def _tell(walk: str, depth: int, *, as_json: bool) -> None:
    if walk not in WALKS:
        raise ConfigError("walk", walk, f"there is no such story; use {' or '.join(WALKS)}")
    from octavo.simulate.handover import walk_through

    lines = walk_through(depth)
    write_line(json.dumps({"walk": walk, "lines": lines}) if as_json else "\n".join(lines))


def _lines(found: Sequence[Explored], seed: int) -> list[str]:
    width = max(len(item.name) for item in found)
    lines = [f"{'invariant':{width}}  result  states visited"]
    for item in found:
        lines.append(f"{item.name:{width}}  {'pass' if item.passed else 'FAIL':6}  {item.states_visited:14,}")
        if not item.passed:
            lines.append(f"    {item.detail or 'no state was visited; take more steps'}")
    failed = sum(not item.passed for item in found)
    states = sum(item.states_visited for item in found)
    verdict = f"{failed} of {len(found)} FAIL" if failed else f"all {len(found)} pass"
    size = next((item.detail for item in found if item.passed), "")
    lines.append(f"{verdict}; {states:,} states visited; seed {seed}{f', {size}' if size else ''}")
    return lines


def _as_dict(item: Explored) -> dict[str, object]:
    return {"name": item.name, "passed": item.passed, "states_visited": item.states_visited, "detail": item.detail}
