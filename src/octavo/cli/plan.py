"""`octavo plan`: how much attention state a model keeps and what fits where, before anything is loaded.

Owns the ways in (one model, several, by hand, a log of another engine) and out (text, JSON, a page). All
figures come from `octavo.planner`; no torch is imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.plan_options import with_plan_options
from octavo.cli.writing import write_line
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.planner.asked import Asked
    from octavo.planner.source import Source
    from octavo.planner.values import Plan

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL",
        help="config.json, a model's directory, a .gguf file, or a hub id; none with --layers and its kin",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object; of several models one a line")]
Html = Annotated[
    str | None, typer.Option("--html", metavar="<file>", help="also write a page with charts, in one file")
]
Compare = Annotated[
    str | None,
    typer.Option("--compare", metavar="<names>", help="several devices side by side: a100-80gb,h100-sxm,mi300x"),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="<log>", help="explain what vLLM, SGLang, TensorRT-LLM or llama.cpp printed at start"
    ),
]
ListDevices = Annotated[bool, typer.Option("--list-devices", help="print the table of accelerators and leave")]
Revision = Annotated[str | None, typer.Option("--revision", help="branch, tag or commit of a hub id")]


@with_plan_options
def plan(  # noqa: PLR0913 - one for each flag
    models: Models = None,
    *,
    as_json: Json = False,
    html: Html = None,
    compare: Compare = None,
    against: Against = None,
    list_devices: ListDevices = False,
    revision: Revision = None,
    asked: Any = None,
) -> None:
    """Plan capacity: state, ledger, what fits, what limits, and what could be changed.

    Reads a config and nothing else: no weights, no torch, no accelerator.
    """
    from octavo.planner.asked import Asked

    checked = Asked.of(**asked)
    models = models or []
    if list_devices:
        _print_devices(checked, as_json=as_json)
        return
    if len(models) > 1:
        if html is not None or compare is not None or against is not None:
            raise ConfigError("model", models, "--html, --compare and --against are for one model")
        _print_several(models, checked, revision, as_json=as_json)
        return
    model = _located(models[0], revision) if models else None
    if against is not None:
        _print_against(model, checked, against, as_json=as_json)
    elif compare is not None:
        _print_comparison(model, checked, compare, as_json=as_json)
    else:
        _print_one(_planned(model, checked), as_json=as_json, html=html)


def _planned(model: str | Source | None, asked: Asked) -> Plan:
    from octavo.planner.build import plan_for

    return plan_for(model, asked)


def _located(model: str, revision: str | None) -> str | Source:
    """A local path as it is, of a GGUF file what its header says; what a hub id stands for is fetched, its config."""
    from octavo.planner.source import CONFIG

    if Path(model).expanduser().exists() or model.count("/") != 1 or model.endswith((".json", ".gguf", ".safetensors")):
        if revision is not None:
            raise ConfigError(
                "revision", revision, f"{model} is a local file, where there are no revisions; leave it out"
            )
        file = Path(model).expanduser()
        if file.suffix == ".gguf" and file.is_file():
            from octavo.cli.plan_gguf import source_of_gguf

            return source_of_gguf(file)
        return model
    from octavo.models import hub

    return str(hub.fetch(model, revision, (CONFIG,)))


def _print_one(plan: Plan, *, as_json: bool, html: str | None) -> None:
    if html is not None:
        _write_page(plan, html)
    if as_json:
        from octavo.planner.json_form import as_json as json_form

        write_line(json.dumps(json_form(plan)))
        return
    from octavo.planner.report import report

    for line in report(plan):
        write_line(line)


def _print_several(models: list[str], asked: Asked, revision: str | None, *, as_json: bool) -> None:
    """One after the other; a model that cannot be planned is said and does not stop the others."""
    failed = 0
    for number, model in enumerate(models):
        try:
            one = _planned(_located(model, revision), asked)
        except OctavoError as error:
            failed += 1
            typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
            typer.echo(" ".join(f"{model}: {error}".split()), err=True)
            continue
        if number and not as_json:
            write_line("")
        _print_one(one, as_json=as_json, html=None)
    if failed:
        raise typer.Exit(2)


def _write_page(plan: Plan, file: str) -> None:
    from octavo.planner.page import page

    try:
        Path(file).write_text(page(plan), "utf-8")
    except OSError as error:
        raise ConfigError("html", file, f"cannot be written ({error.strerror or error})") from None


def _print_devices(asked: Asked, *, as_json: bool) -> None:
    from octavo.planner.accelerators import from_toml, shipped
    from octavo.planner.tables import device_rows, device_table

    rows = (*(from_toml(asked.device_file) if asked.device_file else ()), *shipped())
    if as_json:
        write_line(json.dumps(device_rows(rows)))
        return
    for line in device_table(rows):
        write_line(line)


def _print_comparison(model: str | Source | None, asked: Asked, names: str, *, as_json: bool) -> None:
    from octavo.planner.build import plan_for
    from octavo.planner.compare import compared, comparison_table
    from octavo.planner.json_form import as_json as json_form

    plans = [plan_for(model, one) for one in compared(asked, names)]
    if as_json:
        write_line(json.dumps([json_form(one) for one in plans]))
        return
    for line in comparison_table(plans):
        write_line(line)


def _print_against(model: str | Source | None, asked: Asked, log: str, *, as_json: bool) -> None:
    from octavo.planner.against import explain, explanation_lines

    found = explain(model, asked, log)
    if as_json:
        write_line(json.dumps(found))
        return
    for line in explanation_lines(found):
        write_line(line)
