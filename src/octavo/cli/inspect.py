"""`octavo inspect`: the group of commands that look inside and change nothing."""

from __future__ import annotations

import typer

from octavo.cli.inspect_geometry import geometry
from octavo.cli.inspect_tables import tables

inspect_app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
inspect_app.command("tables")(tables)
inspect_app.command("geometry")(geometry)


@inspect_app.callback()
def inspect() -> None:
    """Look inside: the block tables of a live run, the geometry of a model."""
