"""`octavo chat`: talk with a model in the terminal. The engine is in this process.

Owns the loop over messages. On a terminal lines can be edited; from a pipe each line is a message, and
answers are all that stdout gets.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import __version__
from octavo.cli.options import with_engine_options, with_sampling_options
from octavo.errors import ConfigError, EngineDeadError, RequestError

if TYPE_CHECKING:
    from octavo.cli.chat_input import Lines
    from octavo.cli.chat_session import Session
    from octavo.engine.engine import Engine

INPUT = "Input and output"
INTERRUPTED = 130

SystemMessage = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="the system message", rich_help_panel=INPUT)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="nothing on stderr but errors and the prompt", rich_help_panel=INPUT)
]


@with_engine_options
@with_sampling_options
def chat(
    *, engine: dict[str, Any], sampling: dict[str, Any], system: SystemMessage = None, quiet: Quiet = False
) -> None:
    """Talk with a model in the terminal.

    /help lists what else can be typed there. From a pipe, each line is a message.
    """
    from octavo.cli.chat_sampling import checked

    checked(sampling)
    if engine.get("skip_tokenizer_init"):
        raise ConfigError("skip_tokenizer_init", True, "a chat needs a tokenizer; leave it out")

    from octavo.cli.loading import start_engine

    built = start_engine(engine, quiet=quiet)
    try:
        session = _session(built, sampling, system, quiet=quiet)
        code = _talk(session, _lines())
    finally:
        built.close()
    if code:
        raise typer.Exit(code)


def _session(built: Engine, sampling: dict[str, Any], system: str | None, *, quiet: bool) -> Session:
    from octavo.cli.chat_answer import Answering
    from octavo.cli.chat_session import Session
    from octavo.cli.start_brief import print_brief
    from octavo.cli.start_table import stderr_console

    if not getattr(built.intake.tokenizer, "chat_template", None):
        raise RequestError("chat", built.model_name, "this model has no chat template; use octavo generate")
    console = stderr_console()
    session = Session(Answering(built), console, sampling, system=system, quiet=quiet)
    if not quiet:
        print_brief(console, built, f"octavo {__version__} chats with {built.model_name or 'a model'}")
        if sys.stdin.isatty():
            session.tell("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves")
    return session


def _lines() -> Lines:
    from octavo.cli.chat_commands import COMMANDS
    from octavo.cli.chat_input import PipedLines, TerminalLines

    return TerminalLines(tuple(COMMANDS)) if sys.stdin.isatty() else PipedLines()


def _talk(session: Session, lines: Lines) -> int:
    """Until there are no more messages; returns the exit code. At a terminal an error is told, and that is all."""
    from octavo.cli.chat_commands import Leave, run_command
    from octavo.cli.chat_input import read_message

    at_terminal = sys.stdin.isatty()
    while True:
        try:
            typed = read_message(lines)
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            session.tell("\nCtrl-D or /quit leaves")
            continue
        except RequestError as error:
            session.fail(error)
            continue
        if typed is None:
            break
        try:
            if typed.may_be_command and typed.text.startswith("/"):
                run_command(session, typed.text)
            else:
                session.ask(typed.text)
        except RequestError as error:
            session.fail(error)
        except EngineDeadError as error:
            session.say(f"error: {error}", "red")
            return 1
        except Leave:
            break
        if session.last is not None and session.last.stopped and not at_terminal:
            return INTERRUPTED
    return 1 if session.failures and not at_terminal else 0
