"""`octavo simulate --effective-capacity`: how much more live state tiers below the device keep within the SLOs.

Owns its flags, what it cannot be asked beside, and how it is told. The search is `octavo.simulate.effective`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import with_options
from octavo.cli.writing import write_line
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.cli.simulate_workload import Workload
    from octavo.simulate.deploy import Replica
    from octavo.simulate.effective import Capacity, Gain
    from octavo.simulate.run import Asked

PANEL = "Effective capacity"
USUAL_SHARE = 0.9

_FLAGS = {
    "effective_capacity": (
        Annotated[
            bool,
            typer.Option(
                "--effective-capacity", rich_help_panel=PANEL, show_default=False,
                help="instead: the most live state whose requests meet the SLOs, with the tiers and without",
            ),
        ],
        False,
    ),
    "slo_share": (
        Annotated[float, typer.Option(help="of all requests, so many meet the SLOs", rich_help_panel=PANEL)],
        USUAL_SHARE,
    ),
    "metrics": (
        Annotated[
            str,
            typer.Option(metavar="<file>", rich_help_panel=PANEL, show_default=False,
                         help="also write it as Prometheus' text"),
        ],
        None,
    ),
}  # fmt: skip

with_capacity_options = with_options("capacity", _FLAGS)
"""A command that has these flags and receives those that were given as `capacity`."""

_ONE_RUN = ("html", "chrome_trace", "price")
"""What shows, or prices, a single run."""


def check_capacity(given: Mapping[str, Any], asked: AbstractSet[str]) -> None:
    """Raises `ConfigError` for what does not go together."""
    if not given["effective_capacity"]:
        for name in ("slo_share", "metrics"):
            if name in asked:
                raise ConfigError(name, given[name], "is of a search; give --effective-capacity")
        return
    if given["host_bytes"] is None:
        raise ConfigError("effective_capacity", True, "is what tiers below the device gain; give --host-bytes")
    for name in _ONE_RUN:
        if given[name] is not None:
            raise ConfigError(name, given[name], "is of one run, and --effective-capacity makes many; leave it out")


def tell_capacity(
    replica: Replica, on: Asked, off: Asked, made: Workload, head: list[str], given: Mapping[str, Any]
) -> None:
    """Search, and print what came of it. Raises `ConfigError`."""
    from octavo.observe.capacity import HOST, HOST_AND_DISK, capacity_text
    from octavo.simulate.effective import FURTHEST, Loads, gain_of

    users = made.users
    if users is None and not made.has_arrivals:
        raise ConfigError(
            "effective_capacity", True, "all requests come at once, at any load; give arrivals by --rate, or --users"
        )
    if users is None:
        loads = Loads(made.requests, made.source, made.speed, made.speed * FURTHEST)
    else:
        most = float(len(made.requests))
        loads = Loads(made.requests, made.source, min(float(users), most), most, whole=True)
    gain = gain_of(replica, on, off, loads, given["slo_share"])
    if given["metrics"] is not None:
        tiers = HOST_AND_DISK if on.lower is not None and on.lower.disk_bytes else HOST
        gained = {tiers: (gain.tokens, gain.sequences)} if gain.known else {}
        try:
            Path(given["metrics"]).write_bytes(capacity_text(replica.model, gained))
        except OSError as error:
            raise ConfigError("metrics", given["metrics"], f"cannot be written ({error.strerror or error})") from None
    if given["as_json"]:
        told = {"model": replica.model, "about": head, "slo_share": given["slo_share"]}
        write_line(json.dumps(told | _as_json(gain, users is not None)))
        return
    for line in (*head, "", *_lines(gain, given["slo_share"], users is not None)):
        write_line(line)


def _as_json(gain: Gain, users: bool) -> dict[str, Any]:
    def one(found: Capacity) -> dict[str, Any]:
        best = found.best
        return {
            ("users" if users else "speed"): None if best is None else best.load,
            "live_tokens": found.tokens,
            "live_sequences": found.sequences,
            "share_in_time": None if best is None else best.share,
            "at_least": found.at_least,
            "runs": found.runs,
        }

    return {
        "effective_capacity_gained_tokens": gain.tokens if gain.known else None,
        "effective_capacity_gained_sequences": gain.sequences if gain.known else None,
        "with_tiers": one(gain.on),
        "without_tiers": one(gain.off),
    }


def _lines(gain: Gain, promise: float, users: bool) -> list[str]:
    lines = [
        f"the most that was live at once while {promise:.0%} of all requests met the SLOs",
        f"{'':<16}{'users' if users else 'speed':>10}{'sequences':>14}{'tokens':>18}{'in time':>10}{'runs':>7}",
    ]
    for name, found in (("with tiers", gain.on), ("without", gain.off)):
        if found.best is None:
            lines.append(f"{name:<16}{'none':>10}: not even at the smallest load")
            continue
        load = f"{found.best.load:,.0f}" if users else f"{found.best.load:,.4g}"
        least = "at least " if found.at_least else ""
        cells = (f"{least}{found.sequences:,}", f"{least}{found.tokens:,}")
        lines.append(f"{name:<16}{load:>10}{cells[0]:>14}{cells[1]:>18}{found.best.share:>10.1%}{found.runs:>7}")
    if not gain.known:
        unknown = "not known, since without tiers the largest load was kept as well: give longer conversations, or more"
        return [*lines, f"effective capacity gained: {unknown}"]
    least = "at least " if gain.on.at_least else ""
    lines.append(f"effective capacity gained: {least}{gain.tokens:+,} tokens, {least}{gain.sequences:+,} sequences")
    return lines
