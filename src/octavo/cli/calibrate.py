"""`octavo calibrate`: what steps of a model take on this machine, in a file that `octavo simulate` reads.

Owns the way in and out: the engine's options, the time it may take, the bar, the summary. Measuring and fitting are
`octavo.runtime.calibrate` and `octavo.cost`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import with_engine_options
from octavo.cli.writing import write_line
from octavo.config import Config
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.cost.calibration import Calibration
    from octavo.runtime.calibrate_rounds import Tell

PANEL = "Calibration"


def _text(help_text: str, *flags: str, metavar: str) -> Any:
    return typer.Option(*flags, help=help_text, rich_help_panel=PANEL, metavar=metavar, show_default=False)


Out = Annotated[str, _text("the file to write", "--output", "-o", metavar="<file>")]
Budget = Annotated[float, typer.Option(help="seconds of measuring, of all processes together", rich_help_panel=PANEL)]
Processes = Annotated[
    int,
    typer.Option(
        help="processes that measure in turn: intervals hold what differs between them", rich_help_panel=PANEL
    ),
]
Over = Annotated[
    float,
    typer.Option(
        help="seconds over which processes begin, idle in between: intervals hold what changes in such a time",
        rich_help_panel=PANEL,
    ),
]
Batch = Annotated[int | None, _text("sequences in a step at most; 64 or the engine's own limit", metavar="<int>")]
Context = Annotated[int | None, _text("longest context; 4096 or the engine's own limit", metavar="<int>")]
Temperature = Annotated[float, typer.Option(help="of sampling: 0 is greedy", rich_help_panel=PANEL)]
Disk = Annotated[str | None, _text("also measure a disk: a directory on it", "--measure-disk", metavar="<dir>")]
Seed = Annotated[int, typer.Option("--design-seed", help="of shapes and their order", rich_help_panel=PANEL)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no bar and no summary", rich_help_panel=PANEL)]
Json = Annotated[bool, typer.Option("--json", help="the summary as one JSON object", rich_help_panel=PANEL)]
Given = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="directory, hub id or GGUF file; the embedded one if not given")
]


@with_engine_options
def calibrate(  # noqa: PLR0913 - one for each flag
    given: Given = None,
    *,
    output: Out = "calibration.json",
    budget: Budget = 120.0,
    processes: Processes = 8,
    over: Over = 0.0,
    max_batch: Batch = None,
    max_context: Context = None,
    temperature: Temperature = 0.0,
    measure_disk: Disk = None,
    design_seed: Seed = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    engine: Any = None,
) -> None:
    """Measure what steps, and transfers between tiers, take on this machine; write a file for octavo simulate.

    Runs the real engine over a designed grid of shapes, again and again until the time is over. Keep the machine
    otherwise idle: what disturbs it ends up in the file.
    """
    if given is not None:
        if engine.get("model") not in (None, given):
            raise ConfigError("model", given, f"was given beside --model {engine['model']}; give one")
        engine["model"] = given
    config = Config.from_kwargs(**engine)
    path = Path(output)
    if not path.absolute().parent.is_dir():
        raise ConfigError("output", output, "its directory does not exist")
    from octavo.cli.calibrate_machine import machine_fields
    from octavo.runtime.calibrate_rounds import Rounds, calibrate_rounds

    rounds = Rounds(
        config=config.as_kwargs(),
        seconds=budget,
        processes=processes,
        over_s=over,
        max_batch=64 if max_batch is None else max_batch,
        max_context=4096 if max_context is None else max_context,
        temperature=temperature,
        seed=design_seed,
        disk=measure_disk,
    )
    with _bar(shown=not quiet and sys.stderr.isatty()) as tell:
        done = calibrate_rounds(rounds, machine_fields(), tell)
    from octavo.cost.calibration import written

    try:
        path.write_text(written(done), encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", output, f"cannot be written ({error.strerror or error})") from None
    if as_json:
        write_line(json.dumps({"file": output, "errors": dict(done.errors), "about": dict(done.about)}))
    elif not quiet:
        for line in summary(done, output):
            write_line(line)


def summary(done: Calibration, output: str) -> list[str]:
    """What a person wants to know of a calibration."""
    about, errors = done.about, done.errors
    measured = (
        f"{done.model_name} on {done.machine['cpu']}, {done.machine['cores']} cores: {about['steps']:,} steps of "
        f"{about['scenes']} scenes in {about['seconds']:g} s of {about['processes']} processes, "
        f"up to {about['most_chunks']} sequences, {about['most_tokens']:,} tokens and "
        f"{about['most_context_tokens']:,} positions read in a step"
    )
    fitted = (
        f"error on steps left out: median {errors['together_median']:.1%} of host and device together, device "
        f"{errors['step_median']:.1%} (nine in ten within {errors['step_p90']:.1%}), host "
        f"{errors['host_median']:.1%}; a repetition differs by {errors['noise_median']:.1%}"
    )
    lines = [
        measured,
        fitted,
        *_between(errors),
        *_memory(about),
        "",
        "microseconds of the device in a step",
        *_terms(done.step),
        "of the host",
        *_terms(done.host),
        "",
        "four in five single steps take, times their prediction",
        *(f"  {knot.low:.2f} to {knot.high:.2f}  around {1e3 * knot.seconds:.3g} ms" for knot in done.knots),
    ]
    for route, law in done.transfers.items():
        lines.append(f"{route}: {law.bytes_per_s / 1e9:.2f} GB/s and {1e6 * law.latency_s:.0f} us each time")
    return [*lines, "", f"written: {output}; use it by octavo simulate --cost fitted:{output}"]


def _between(errors: Any) -> list[str]:
    """What differs between processes, and whether intervals hold it."""
    if "processes_apart" not in errors:
        return ["one process: what differs between processes is in no interval"]
    found = f"a process lies {errors['processes_apart']:.1%} from what the others let expect"
    if "inside_elsewhere" in errors:
        found += (
            f"; intervals of the others hold {errors['inside_elsewhere']:.0%} of its steps "
            f"(median width {errors['width_elsewhere']:.0%})"
        )
    return [found]


def _memory(about: Any) -> list[str]:
    """How fast memory was read, and which steps are left out where it has two speeds."""
    if "memory_bytes_per_s" not in about:
        return []
    usual = f"memory is read at {about['memory_bytes_per_s'] / 1e9:.1f} GB/s"
    if "memory_bytes_per_s_other" not in about:
        return [usual]
    other = f"{about['memory_bytes_per_s_other'] / 1e9:.1f} at other times"
    return [f"{usual}, and at {other}: {about['steps_left_out']:,} steps of such times are left out"]


def _terms(total: Any) -> list[str]:
    return [
        f"  {1e6 * seconds:>12,.4f}  {'a step' if term.name == 'step' else f'for each of {term.name}'}"
        for term, seconds in zip(total.terms, total.seconds, strict=True)
        if seconds
    ]


@contextmanager
def _bar(*, shown: bool) -> Iterator[Tell]:
    if not shown:
        yield lambda share, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=1.0)
        yield lambda share, text: bar.update(task, description=text, completed=share)
