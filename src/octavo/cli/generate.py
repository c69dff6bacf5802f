"""`octavo generate`: prompts in, text out, with the decisions of the engine told beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo import __version__
from octavo.cli.options import number, with_engine_options, with_sampling_options
from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.cli.closing import Ended
    from octavo.deployment import Row
    from octavo.engine.engine import Engine
    from octavo.engine.llm import LLM
    from octavo.scheduling.request import SamplingParams

    Prompt = dict[str, Any]

DEFAULT_MAX_TOKENS = 256
INPUT = "Input and output"

Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="One prompt or several.")]
PromptsFile = Annotated[
    str | None,
    typer.Option(
        metavar="<file>", help="more prompts, one a line (blank lines do not count); - for stdin", rich_help_panel=INPUT
    ),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="put each prompt through the model's chat template, or complete it as it is; "
        "if neither is given, the template where the model has one",
        show_default=False,
        rich_help_panel=INPUT,
    ),
]
SystemPrompt = Annotated[str | None, typer.Option(help="with --chat: the system message", rich_help_panel=INPUT)]
Json = Annotated[
    bool,
    typer.Option("--json", help="one JSON object for each prompt, on a line, when all are done", rich_help_panel=INPUT),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="no progress, table or closing line on stderr", rich_help_panel=INPUT)
]
LedgerAgain = Annotated[
    bool,
    typer.Option(
        "--ledger", help="measure peaks while running and print the ledger again at the end", rich_help_panel=INPUT
    ),
]


@with_engine_options
@with_sampling_options
def generate(  # noqa: PLR0913 - one for each option of the command line
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    prompt: Prompts = None,
    prompts_file: PromptsFile = None,
    chat: Chat = None,
    system_prompt: SystemPrompt = None,
    as_json: Json = False,
    quiet: Quiet = False,
    ledger: LedgerAgain = False,
) -> None:
    """Generate text from one prompt or several.

    Only the text (or JSON) goes to stdout; what was decided, and what it cost, goes to stderr.
    """
    from octavo.cli.prompts import read_prompts

    params = _checked(sampling, as_json=as_json)
    if system_prompt is not None and chat is False:
        raise RequestError("system_prompt", system_prompt, "needs a chat template; leave out --raw")
    texts = read_prompts(prompt or [], prompts_file)

    from octavo.cli.loading import start_engine

    built = start_engine(engine, quiet=quiet)
    try:
        _serve(built, texts, params, _Asked(chat, system_prompt, as_json, quiet, ledger))
    finally:
        built.close()


@dataclass(frozen=True, slots=True)
class _Asked:
    """How the prompts are taken and how the answers are shown."""

    chat: bool | None
    system_prompt: str | None
    as_json: bool
    quiet: bool
    ledger: bool


def _checked(sampling: dict[str, Any], *, as_json: bool) -> SamplingParams:
    """The sampling parameters, refused before anything is loaded when they are wrong."""
    from octavo.scheduling.request import SamplingParams

    params = SamplingParams(**sampling)
    if params.logprobs is not None and not as_json:
        raise RequestError("logprobs", params.logprobs, "is reported in JSON alone; add --json")
    return params


def _serve(engine: Engine, texts: list[str], params: SamplingParams, asked: _Asked) -> None:
    from octavo.cli.closing import RunWatch, closing_line
    from octavo.cli.start_table import ledger_table, print_start, stderr_console
    from octavo.engine.llm import LLM
    from octavo.runtime.measure import PeakMeter, measured_ledger

    form = _prompt_form(engine, asked)
    prompts = [_encoded(engine, text, form, asked.system_prompt) for text in texts]
    each = [_with_room(engine, prompt, params) for prompt in prompts]
    console = stderr_console()
    if not asked.quiet and engine.deployment is not None:
        title = f"octavo {__version__} serves {engine.model_name or 'a model'}"
        more = (form, _sampling_row(engine, params))
        print_start(console, engine.deployment, measured_ledger(engine), title=title, more=more, notes=engine.notes)
    watch = RunWatch(engine)
    meter = PeakMeter(engine) if asked.ledger else None
    llm = LLM.from_engine(engine)
    try:
        show = _show_json if asked.as_json else _show_text
        ended = show(llm, texts, prompts, each)
    finally:
        if meter is not None:
            meter.stop()
    if not asked.quiet:
        console.print(closing_line(ended, watch), markup=False, soft_wrap=True)
    if meter is not None:
        console.print(ledger_table(measured_ledger(engine, meter), why=asked.quiet))
        for note in meter.notes:
            console.print(f"note: {note}", markup=False)
    failed = [item for item in ended if item.error is not None]
    for item in failed:
        typer.echo(f"error: prompt {item.prompt + 1}: {item.error}", err=True)
    if failed:
        raise typer.Exit(1)


def _show_text(llm: LLM, texts: list[str], prompts: list[Prompt], params: list[SamplingParams]) -> list[Ended]:
    """Stream to stdout. Returns how every output ended, in the order of prompts and choices."""
    from octavo.cli.closing import Ended
    from octavo.cli.writing import Blocks

    plain_ids = llm.get_tokenizer() is None
    blocks = Blocks(texts, params[0].n)
    ended: list[Ended] = []
    try:
        for delta in llm.stream(prompts, params):
            prompt = int(delta.request_id)
            text = "".join(f"{token} " for token in delta.token_ids) if plain_ids else delta.text
            blocks.add(prompt, delta.index, text)
            if delta.finish_reason is not None:
                blocks.end(prompt, delta.index)
                ended.append(Ended(prompt, delta.index, delta.finish_reason, delta.record, delta.error))
    finally:
        blocks.close()
    return sorted(ended, key=lambda item: (item.prompt, item.choice))


def _show_json(llm: LLM, texts: list[str], prompts: list[Prompt], params: list[SamplingParams]) -> list[Ended]:
    from octavo.cli.closing import Ended
    from octavo.cli.writing import json_line, write

    ended: list[Ended] = []
    for place, (output, text) in enumerate(zip(llm.generate(prompts, params), texts, strict=True)):
        write(json_line(output, text))
        ended.extend(
            Ended(place, choice.index, choice.finish_reason, choice.record, choice.error) for choice in output.outputs
        )
    return ended


def _prompt_form(engine: Engine, asked: _Asked) -> Row:
    """How prompts become tokens, with the reason. Raises `RequestError` for what the model cannot do."""
    from octavo.deployment import Row

    tokenizer = engine.intake.tokenizer
    if tokenizer is None:
        if asked.chat or asked.system_prompt is not None:
            raise RequestError("chat", True, "there is no tokenizer (--skip-tokenizer-init); prompts are token ids")
        return Row("prompt", "token ids", "--skip-tokenizer-init: numbers in, numbers out")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if asked.chat is False:
        return Row("prompt", "raw", "--raw: completed as it is")
    if not has_template:
        if asked.chat or asked.system_prompt is not None:
            raise RequestError("chat", True, "this model has no chat template; use --raw")
        return Row("prompt", "raw", "the model has no chat template")
    return Row("prompt", "chat", "--chat" if asked.chat else "the model has a chat template; --raw completes instead")


def _encoded(engine: Engine, text: str, form: Row, system_prompt: str | None) -> Prompt:
    from octavo.models.tokenizer import encode_prompt

    tokenizer = engine.intake.tokenizer
    if form.value == "token ids":
        return {"prompt_token_ids": [number("int")(part) for part in text.replace(",", " ").split()]}
    if form.value == "raw":
        return {"prompt": text, "prompt_token_ids": encode_prompt(tokenizer, text)}
    messages = [{"role": "user", "content": text}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return {"prompt": text, "prompt_token_ids": engine.intake.encode_chat(messages)}


def _with_room(engine: Engine, prompt: Prompt, params: SamplingParams) -> SamplingParams:
    """The default length, unless another was asked or the context ends before it."""
    limits = engine.core.scheduler.limits
    pool = engine.core.scheduler.cache.max_tokens_per_sequence()
    room = min(limits.max_model_len, pool + 1) - len(prompt["prompt_token_ids"])
    if params.max_tokens is not None or room < max(DEFAULT_MAX_TOKENS, params.min_tokens):
        return params
    return replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))


def _sampling_row(engine: Engine, params: SamplingParams) -> Row:
    from octavo.deployment import Row

    final = params.with_defaults(engine.intake.defaults)
    own = [name for name in engine.intake.defaults if getattr(params, name, 0) is None]
    value = "greedy" if final.greedy else f"temperature {final.temperature:g}, top_p {final.top_p:g}"
    if not final.greedy and final.top_k and final.top_k > 0:
        value += f", top_k {final.top_k}"
    asked = [name for name in ("temperature", "top_p", "top_k") if getattr(params, name) is not None]
    reason = f"{', '.join(own)} from the checkpoint" if own else "the defaults; --temperature 0 is greedy"
    reason = "as asked" if asked and not own else reason
    return Row("sampling", value, reason)
