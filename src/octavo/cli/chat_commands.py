"""What a line that starts with a slash does. Each command is a function of the session and of the rest of the line.

Invariant: a command that is refused (`RequestError`) has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from statistics import median

from octavo.cli.chat_answer import pace, seconds
from octavo.cli.chat_history import History, load, save
from octavo.cli.chat_sampling import KINDS, checked, parse_setting, shown
from octavo.cli.chat_session import Session
from octavo.cli.writing import ttft_s
from octavo.errors import RequestError
from octavo.observe.request_record import record_fields


class Leave(Exception):
    """The chat is over."""


def run_command(session: Session, line: str) -> None:
    """Raises `RequestError` for what cannot be done, `Leave` at the end."""
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        raise RequestError("command", name, f'is none; {hint} (a message that starts with a slash: put """ around it)')
    command.run(session, rest.strip())


def _help(session: Session, _rest: str) -> None:
    width = max(len(f"{name} {command.takes}") for name, command in COMMANDS.items())
    for name, command in COMMANDS.items():
        session.say(f"{f'{name} {command.takes}':{width}}  {command.help}")
    session.say('A line that ends in \\ goes on in the next; """ begins and ends a message of several lines.')
    session.say("Ctrl-C stops an answer and keeps what was said; Ctrl-D leaves.")


def _clear(session: Session, _rest: str) -> None:
    session.history = History(session.history.system)
    session.last = None
    session.tell("a new chat" + (", with the same system message" if session.history.system else ""))


def _system(session: Session, rest: str) -> None:
    if rest == "none":
        session.set_system(None)
        session.tell("no system message of yours")
    elif rest:
        session.set_system(rest)
        session.tell("the system message holds from the next answer on")
    else:
        session.say(session.history.system or "there is none of yours; /system TEXT sets one")


def _undo(session: Session, _rest: str) -> None:
    text = session.history.undo()
    if text is None:
        raise RequestError("undo", None, "nothing has been said")
    left = len(session.history.turns)
    session.tell(f"taken back: {text if len(text) <= 60 else text[:60] + '...'} ({left} messages are left)")


def _retry(session: Session, _rest: str) -> None:
    defaults = session.answering.engine.intake.defaults
    if checked(session.sampling).with_defaults(defaults).greedy or session.sampling.get("seed") is not None:
        session.tell("the same answer is to be expected: temperature is 0 or there is a seed (/set)")
    session.retry()


def _save(session: Session, rest: str) -> None:
    path = _path("save", rest)
    if path.exists() and path not in session.files:
        raise RequestError("save", str(path), "exists; name another file, or /load it first")
    save(path, session.history, session.answering.engine.model_name)
    session.files.add(path)
    session.tell(f"{len(session.history.messages)} messages saved to {path}")


def _load(session: Session, rest: str) -> None:
    path = _path("load", rest)
    loaded = load(path)
    tokens = len(session.answering.tokens_of(loaded.messages)) if loaded.turns else 0
    session.history, session.last = loaded, None
    session.files.add(path)
    system = ", with a system message" if loaded.system else ""
    session.tell(f"{len(loaded.turns)} messages loaded{system}: {tokens:,} of {session.answering.context:,} tokens")


def _path(name: str, rest: str) -> Path:
    if not rest:
        raise RequestError(name, None, f"needs a file: /{name} FILE")
    try:
        return Path(rest).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):
        raise RequestError(name, rest, "is no file name; name a file") from None


def _set(session: Session, rest: str) -> None:
    names = list(KINDS)
    if rest:
        name, value, given = parse_setting(rest)
        if given:
            session.set(name, value)
        names = [name]
    for name in names:
        session.say(shown(name, session.sampling, session.answering.engine.intake.defaults))


def _stats(session: Session, _rest: str) -> None:
    records, answering, cache = session.records, session.answering, session.answering.engine.core.scheduler.cache
    session.say(f"model            {answering.engine.model_name or 'unnamed'}")
    session.say(f"messages         {len(session.history.messages)}")
    if session.history.messages:
        tokens = len(answering.tokens_of(session.history.messages))
        session.say(
            f"context          {tokens:,} of {answering.context:,} tokens, the next answer's beginning included"
        )
    session.say(f"KV cache         {answering.used(cache.pool.free.count)} in use; an answer's are freed when it ends")
    if not records:
        session.say("answers          none yet")
        return
    first = [value for record in records if (value := ttft_s(record)) is not None]
    session.say(f"answers          {len(records)}, {sum(r.output_tokens for r in records):,} tokens")
    session.say(f"TTFT             {seconds(median(first)) if first else 'none'} (median)")
    session.say(f"pace             {pace(records[-1])} (last answer)")
    session.say("the last answer:")
    for name, value in record_fields(records[-1]).items():
        session.say(f"  {name:17}{f'{value:.6f}' if isinstance(value, float) else value}")


def _tables(session: Session, _rest: str) -> None:
    if session.last is None or not session.last.table:
        raise RequestError("tables", None, "there is no sequence to show; write a message first")
    session.say("the last answer, A, when it was last seen alive; its blocks have been freed since")
    for line in session.last.table:
        session.say(f"  {line}")


def _quit(_session: Session, _rest: str) -> None:
    raise Leave


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Session, str], None]
    takes: str
    help: str


COMMANDS = {
    "/help": _Command(_help, "", "this list"),
    "/clear": _Command(_clear, "", "begin a new chat; the system message stays"),
    "/new": _Command(_clear, "", "the same as /clear"),
    "/system": _Command(_system, "[TEXT]", "set the system message, or show it; /system none for none"),
    "/undo": _Command(_undo, "", "take back the last message and its answer"),
    "/retry": _Command(_retry, "", "answer the last message once more"),
    "/save": _Command(_save, "FILE", "write the chat to a file"),
    "/load": _Command(_load, "FILE", "go on with a chat that was saved"),
    "/set": _Command(_set, "[NAME [VALUE]]", "show or change how answers are drawn; default for the default"),
    "/stats": _Command(_stats, "", "tokens, times and KV cache so far"),
    "/tables": _Command(_tables, "", "the block table of the last answer's sequence"),
    "/quit": _Command(_quit, "", "leave (so does Ctrl-D)"),
}
