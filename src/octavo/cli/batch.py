"""`octavo batch`: a file of requests in OpenAI's batch format, answered by one engine, into a file.

Owns the order of things: what is wrong is told before the model is loaded, what is there already is
not done again, and whatever ends the run, every row that was written is whole.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from octavo import __version__
from octavo.cli.options import with_engine_options
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.cli.batch_output import OutputFile, Survey
    from octavo.cli.batch_rows import Row
    from octavo.server.batch import Ended

STDIN = "-"
ROWS = "Input and output"


def _option(*flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=ROWS, **more)


Input = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="A file of requests in OpenAI's batch format, one a line; - for stdin."),
]
Output = Annotated[
    str, _option("--output", "-o", metavar="FILE", help="where the answers go, one a line; - for stdout")
]
Overwrite = Annotated[bool, _option("--overwrite", help="start again, whatever is in the output")]
Ordered = Annotated[
    bool, _option("--ordered", help="write answers in the order of the input; without, as they are finished")
]
Strict = Annotated[bool, _option("--strict", help="exit with 1 when a row is an error")]
ServedModelName = Annotated[
    list[str] | None,
    _option(
        "--served-model-name",
        help="name of the model in rows and answers; may be repeated, the first is that of answers",
        show_default=False,
    ),
]
Quiet = Annotated[bool, _option("--quiet", "-q", help="nothing on stderr but errors")]


@with_engine_options
def batch(  # noqa: PLR0913 - one for each option of the command line
    *,
    engine: dict[str, Any],
    input: Input,  # noqa: A002 - as the help shows it
    output: Output,
    overwrite: Overwrite = False,
    ordered: Ordered = False,
    strict: Strict = False,
    served_model_name: ServedModelName = None,
    quiet: Quiet = False,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Killed half-way and started again with the same command, it goes on where it was: every row is
    answered once. A row that is wrong gets an error of its own, and the others go on.
    """
    from octavo.cli.batch_output import open_output, survey
    from octavo.cli.batch_rows import read_lines, run_digest
    from octavo.config import Config
    from octavo.server.settings import ServerSettings

    config = Config.from_kwargs(**engine)
    names = tuple(served_model_name or ())
    ServerSettings(served_model_names=names)
    kept = (config.cache.kv_cache_dtype, config.cache.kv_cache_dtype_skip_layers)
    run = run_digest(astuple(config.model), kept, names)
    with _open_input(input, output) as rows:
        written = open_output(output, run, overwrite=overwrite)
        try:
            found = survey(read_lines(rows), run, written, ordered=ordered)
            if not found.rows:
                raise RequestError("input", input, "holds no rows; give it one request a line")
            written.begin()
            rows.seek(0)
            work = _Work(rows, written, found, run, config.model.seed, names, ordered, quiet)
            errors = _nothing_left(work) if not found.left else _answer(work, engine)
        finally:
            written.close()
    if strict and errors:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Work:
    rows: BinaryIO
    output: OutputFile
    found: Survey
    run: str
    seed: int
    names: tuple[str, ...]
    ordered: bool
    quiet: bool


def _nothing_left(work: _Work) -> int:
    earlier = work.output.earlier
    if not work.quiet:
        typer.echo(f"{work.output.name} has all {work.found.rows:,} rows, {earlier.errors:,} errors", err=True)
    return earlier.errors


def _answer(work: _Work, engine: dict[str, Any]) -> int:
    """Load the model and answer what is left; returns how many rows are errors."""
    from octavo.cli.batch_progress import Counts, shown
    from octavo.cli.loading import start_engine
    from octavo.cli.start_brief import print_brief
    from octavo.cli.start_table import stderr_console
    from octavo.server.batch import answer_rows
    from octavo.server.host import Host

    earlier = work.output.earlier
    console = stderr_console()
    host = Host()
    built = start_engine(engine, quiet=work.quiet, host=host)
    try:
        if not work.quiet:
            resumed = f", {len(earlier.ids):,} of them are there" if earlier.ids else ""
            title = f"octavo {__version__} answers {work.found.rows:,} rows{resumed}, with "
            print_brief(console, built, title + (built.model_name or "a model"))
        slabs = built.core.scheduler.cache.pool.slabs
        counts = Counts(work.found.rows, len(earlier.ids), earlier.errors, slabs=slabs, free_slabs=slabs)
        with shown(counts, console, quiet=work.quiet) as note:

            def write(row: dict[str, Any]) -> None:
                work.output.write(row)
                note(row)

            ended = answer_rows(
                built,
                _settings(work),
                _left(work),
                write,
                observers=[counts.observe],
                keep_order=work.ordered,
                host=host,
            )
    finally:
        built.close()
    if not work.quiet:
        console.print(counts.closing(len(earlier.ids)), markup=False, soft_wrap=True)
    _require_all(work, counts.written, ended)
    return counts.errors


def _settings(work: _Work) -> Any:
    """No queue of a server, no log of requests: the run bounds itself, and its answers are the record."""
    from octavo.cli.batch_rows import MAX_LINE_BYTES
    from octavo.server.settings import ServerSettings

    return ServerSettings(
        served_model_names=work.names,
        max_waiting_requests=2**31,
        max_waiting_tokens=2**40,
        max_body_bytes=2 * MAX_LINE_BYTES,
        enable_log_requests=False,
    )


def _left(work: _Work) -> Iterator[Row | dict[str, Any]]:
    """The rows that the output has not. Those that it has are read too: their custom ids are taken."""
    from octavo.cli.batch_rows import BadRow, RowReader, read_lines

    reader = RowReader(work.run, work.seed)
    for line in read_lines(work.rows):
        row = reader.read(line)
        if row.id not in work.output.earlier.ids:
            yield row.as_output() if isinstance(row, BadRow) else row


def _require_all(work: _Work, written: int, ended: Ended) -> None:
    """Leaves with the exit code of what ended the run early, if anything did."""
    if ended.signal is None and ended.engine_died is None:
        return
    there = f"{written:,} of {work.found.rows:,} rows are in {work.output.name}"
    again = "; the same command goes on from there" if work.output.is_file else ""
    if ended.engine_died is not None:
        typer.echo(f"error: {ended.engine_died}. {there}{again}", err=True)
        raise typer.Exit(1)
    if not work.quiet:
        typer.echo(f"{there}{again}", err=True)
    raise typer.Exit(128 + (ended.signal or 0))


def _open_input(name: str, output: str) -> BinaryIO:
    """A file that can be read twice. What is none, such as a pipe, is copied to one first."""
    if name == STDIN:
        return _copied(sys.stdin.buffer)
    path = Path(name).expanduser()
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is no file name"
        raise RequestError("input", name, f"cannot be read: {reason.lower()}; name a JSONL file") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        with file:
            return _copied(file)
    out = Path(output).expanduser()
    if out.exists() and out.samefile(path):
        file.close()
        raise RequestError("output", output, "is the input; name another file")
    return file


def _copied(source: BinaryIO) -> BinaryIO:
    copy: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    shutil.copyfileobj(source, copy)
    copy.seek(0)
    return copy
