"""Flags made from what the options themselves say: the engine's from `Config`, the sampler's from a table here.

Owns the way from a value on the command line to a keyword of `Config` or `SamplingParams`. Checks
nothing: a text that is no number is passed on as it is, so that the one check there is names field,
value and remedy. Imports neither numpy nor torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from octavo.config import Option, options

PANELS = {"model": "Model", "cache": "KV cache", "scheduler": "Scheduling", "engine": "Engine"}
SAMPLING_PANEL = "Sampling"


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """A flag that fills one field of `SamplingParams`. The field is None, or its default, when not given."""

    name: str
    kind: str
    """int, float, ints, texts, bias or flag."""
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


SAMPLING = (
    SamplingOption(
        "max_tokens", "int", "tokens to generate at most; 256 if not given (in a chat 1024), or what the context holds"
    ),
    SamplingOption("min_tokens", "int", "no end before this many tokens"),
    SamplingOption("temperature", "float", "0 is greedy; the checkpoint's own if not given, else 1"),
    SamplingOption("top_p", "float", "smallest set of likeliest tokens whose probability reaches p"),
    SamplingOption("top_k", "int", "only the k likeliest tokens; 0 or -1 for all"),
    SamplingOption("min_p", "float", "only tokens at least min_p times as likely as the likeliest"),
    SamplingOption("seed", "int", "makes every choice a function of (seed, choice, position) alone"),
    SamplingOption("n", "int", "independent choices for each prompt"),
    SamplingOption("stop", "texts", "text that ends the output, not printed; may be repeated"),
    SamplingOption("stop_token_ids", "ints", "token id that ends the output; may be repeated"),
    SamplingOption("include_stop_str_in_output", "flag", "print the stop text too"),
    SamplingOption("ignore_eos", "flag", "go on past the model's end-of-sequence tokens"),
    SamplingOption("repetition_penalty", "float", "above 1 discourages tokens of prompt and output"),
    SamplingOption("presence_penalty", "float", "subtracted once from tokens already in the output"),
    SamplingOption("frequency_penalty", "float", "subtracted as often as a token is in the output"),
    SamplingOption("logit_bias", "bias", "id=number, added to the logit of a token id; may be repeated"),
    SamplingOption("logprobs", "int", "with --json: log-probabilities of this many likeliest tokens beside the chosen"),
    SamplingOption("skip_special_tokens", "flag", "leave special tokens out of the text"),
)
_ON_BY_DEFAULT = ("skip_special_tokens",)

Command = Callable[..., Any]


def with_engine_options(command: Command) -> Command:
    """Give `command` every option of `Config`; it receives those that were given as one mapping, `engine`.

    A name that the command has already is left to it: where there is sampling, `--seed` is the request's.
    """
    taken = inspect.signature(command).parameters
    ours = [option for option in options() if option.name not in taken]
    parameters = [_parameter(o.name, _engine_annotation(o), o.default) for o in ours]
    return _gathering(command, "engine", parameters)


def with_sampling_options(command: Command) -> Command:
    """Give `command` the options of `SamplingParams`; it receives those that were given as `sampling`."""
    parameters = []
    for option in SAMPLING:
        default = option.name in _ON_BY_DEFAULT if option.kind == "flag" else None
        parameters.append(_parameter(option.name, _sampling_annotation(option), default))
    return _gathering(command, "sampling", parameters)


def with_options(name: str, flags: Mapping[str, tuple[Any, Any]]) -> Callable[[Command], Command]:
    """Gives a command flags of its own, (annotation, default) each; it receives those that are not None as `name`."""
    parameters = [_parameter(flag, annotation, default) for flag, (annotation, default) in flags.items()]
    return lambda command: _gathering(command, name, parameters)


def number(kind: str) -> Callable[[Any], Any]:
    """A whole or decimal number from text; anything else stays the text it is, for the field's own check."""
    make: Callable[[str], Any] = int if kind == "int" else float

    def parse(text: Any) -> Any:
        try:
            return make(text) if isinstance(text, str) else text
        except ValueError:
            return text

    return parse


def bias(pairs: list[str] | None) -> Mapping[Any, Any]:
    """`ID=NUMBER` texts as a mapping. What is no such pair stays a key that `SamplingParams` refuses by name."""
    found: dict[Any, Any] = {}
    for pair in pairs or ():
        token, _, value = pair.partition("=")
        found[number("int")(token.strip())] = number("float")(value.strip())
    return found


def _gathering(command: Command, name: str, parameters: list[inspect.Parameter]) -> Command:
    """The same command with `parameters` in place of `name`."""
    known = inspect.signature(command, eval_str=True).parameters
    names = {parameter.name for parameter in parameters}

    @functools.wraps(command)
    def gathered(**given: Any) -> Any:
        asked = dict(_given(names, {key: given.pop(key) for key in list(given) if key in names}))
        return command(**given, **{name: asked})

    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in known.values() if p.name != name]
    signature = inspect.Signature([*kept, *parameters])
    gathered.__dict__.pop("__wrapped__", None)
    gathered.__signature__ = signature  # type: ignore[attr-defined]
    gathered.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return gathered


def _given(names: set[str], values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the user asked for: a list that may be repeated is empty when nothing was."""
    for name, value in values.items():
        if name in names and value is not None and value != []:
            yield name, bias(value) if name == "logit_bias" else value


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _engine_annotation(option: Option) -> Any:
    shared: dict[str, Any] = {"help": option.help, "rich_help_panel": PANELS[option.concern]}
    if option.kind == "flag":
        return _flag(option.flag, option.default, shared)
    if option.choices:
        shared["help"] += f": {', '.join(option.choices)}"
    parser = number(option.kind) if option.kind in ("int", "float") else _as_it_is
    return Annotated[str, typer.Option(option.flag, metavar=f"<{option.kind}>", parser=parser, **shared)]


def _sampling_annotation(option: SamplingOption) -> Any:
    shared: dict[str, Any] = {"help": option.help, "rich_help_panel": SAMPLING_PANEL}
    if option.kind == "flag":
        return _flag(option.flag, option.name in _ON_BY_DEFAULT, shared)
    if option.kind in ("texts", "bias"):
        metavar = "<text>" if option.kind == "texts" else "<id=number>"
        return Annotated[list[str], typer.Option(option.flag, metavar=metavar, show_default=False, **shared)]
    if option.kind == "ints":
        return Annotated[
            list[str], typer.Option(option.flag, metavar="<int>", parser=number("int"), show_default=False, **shared)
        ]
    return Annotated[str, typer.Option(option.flag, metavar=f"<{option.kind}>", parser=number(option.kind), **shared)]


def _flag(flag: str, default: bool, shared: dict[str, Any]) -> Any:
    """On by default: there is a way to say no. Off by default: saying nothing is saying no."""
    names = f"{flag}/--no-{flag[2:]}" if default else flag
    return Annotated[bool, typer.Option(names, show_default=False, **shared)]


def _as_it_is(text: Any) -> Any:
    return text
