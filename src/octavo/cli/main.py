"""The `octavo` command: what it can do, and what a person sees when something is wrong.

Owns the exit codes and the one line that every error becomes. Commands raise; only here is anything
caught. Nothing here imports numpy, torch or rich, so that `--version` and `--help` answer at once.

    0 done    1 a request or a check failed    2 wrong input    130 interrupted    141 nobody reads
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any

import typer

from octavo import __version__
from octavo.cli.batch import batch
from octavo.cli.calibrate import calibrate
from octavo.cli.chat import chat
from octavo.cli.check import check
from octavo.cli.generate import generate
from octavo.cli.inspect import inspect_app
from octavo.cli.plan import plan
from octavo.cli.serve import serve
from octavo.cli.simulate import simulate
from octavo.config import Config, options
from octavo.errors import ConfigError, InvariantViolation, OctavoError

WRONG_INPUT = 2
INTERRUPTED = 130
TRACEBACK = "OCTAVO_TRACEBACK"

app = typer.Typer(
    name="octavo",
    help="Serve language models: generate text, and see where their attention state lives and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("generate")(generate)
app.command("check")(check)
app.command("serve")(serve)
app.command("chat")(chat)
app.command("batch")(batch)
app.command("plan")(plan)
app.command("calibrate")(calibrate)
app.command("simulate")(simulate)
app.add_typer(inspect_app, name="inspect")

_UsageError: Any = typer.BadParameter.__mro__[1]
"""Typer brings its own copy of click or imports it, depending on its version."""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help=f"Show where an error came from; so does {TRACEBACK}=1.")
    ] = False,
) -> None:
    del version  # its callback has printed it
    if show_traceback:
        os.environ[TRACEBACK] = "1"


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code. What goes wrong becomes one line on stderr."""
    try:
        code = app(list(arguments), prog_name="octavo", standalone_mode=False)
    except OctavoError as error:
        if os.environ.get(TRACEBACK) == "1" or isinstance(error, InvariantViolation):
            traceback.print_exception(error)  # octavo itself is wrong: the dump is what a report needs
        return _say(str(error))
    except _UsageError as error:
        # No arguments at all: the help has been printed, and there is nothing to add.
        return _say(_usage(error)) if error.format_message() else WRONG_INPUT
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        print("interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _say(message: str) -> int:
    typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
    typer.echo(" ".join(message.split()), err=True)
    return WRONG_INPUT


def _usage(error: Any) -> str:
    """What is wrong with the command line itself, and what to type instead."""
    command = error.ctx.command_path if getattr(error, "ctx", None) is not None else "octavo"
    if type(error).__name__ != "NoSuchOption":
        return f"{error.format_message()} (see {command} --help)"
    flag, near = str(error.option_name), error.possibilities
    elsewhere = _elsewhere(flag.lstrip("-").replace("-", "_"))
    if elsewhere is not None:
        return f"{flag}: {elsewhere}"
    nearest = get_close_matches(flag, near or (), n=2, cutoff=0.75) or list(near or ())[:1]
    if nearest:
        return f"{flag}: no such option; did you mean {' or '.join(nearest)}?"
    return f"{flag}: no such option; see {command} --help (put -- before a prompt that starts with a dash)"


def _elsewhere(name: str) -> str | None:
    """What `Config` says of a name that other engines have for an option, and it has not."""
    if name in {option.name for option in options()}:
        return None
    try:
        Config.from_kwargs(**{name: None})
    except ConfigError as error:
        return None if error.remedy.startswith("is no option") else error.remedy
    return None


if __name__ == "__main__":
    main()
