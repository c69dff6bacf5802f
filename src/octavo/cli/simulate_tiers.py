"""The flags of `octavo simulate` for tiers below the device. Owns their words; what they do is `octavo.simulate`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import with_options
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.simulate.deploy import Lower, Replica

PANEL = "Tiers"


def _size(help_text: str) -> Any:
    return Annotated[str, typer.Option(help=help_text, metavar="<bytes>", rich_help_panel=PANEL, show_default=False)]


def _name(help_text: str) -> Any:
    return Annotated[str, typer.Option(help=help_text, metavar="<name>", rich_help_panel=PANEL)]


FLAGS = {
    "host_bytes": (_size("a host tier of so much, of one device"), None),
    "disk_bytes": (_size("a disk tier below it"), None),
    "placement": (_name("drop, write_back, write_through, break_even"), "write_back"),
    "host_eviction": (_name("lru or cheapest_to_rebuild, of the host"), "lru"),
    "transfer_bytes_per_second": (_size("that copies between device and host may take a second; no bound"), None),
    "disk_eviction": (_name("lru or cheapest_to_rebuild, of the disk"), "lru"),
    "disk_bytes_per_second": (_size("that copies to and from the disk may take a second; no bound"), None),
}

with_tier_options = with_options("tiers", FLAGS)
"""A command that has these flags and receives those that were given as `tiers`."""


def lower_of(given: Mapping[str, Any]) -> Lower | None:
    """Raises `ConfigError`, also for what means nothing without the tier that it is of."""
    from octavo.config import parse_bytes
    from octavo.config_used import refuse_unused
    from octavo.simulate.deploy import Lower

    refuse_unused(given, typed=True)
    if given["host_bytes"] is None:
        for name in ("disk_bytes", "preemption"):
            if given[name] not in (None, "recompute"):
                raise ConfigError(name, given[name], "needs a host tier; give --host-bytes")
        return None
    disk = 0 if given["disk_bytes"] is None else parse_bytes("disk_bytes", given["disk_bytes"])
    host = parse_bytes("host_bytes", given["host_bytes"])
    return Lower(
        host_bytes=host, disk_bytes=disk, placement=given["placement"],
        host_eviction=given["host_eviction"], disk_eviction=given["disk_eviction"],
    )  # fmt: skip


def bounded(replica: Replica, given: Mapping[str, Any]) -> Replica:
    """The replica, whose links are no faster than what was asked for."""
    from octavo.config import parse_bytes

    bounds = {}
    for name, own in (("transfer_bytes_per_second", "bytes_per_second"), ("disk_bytes_per_second",) * 2):
        if given[name] is not None:
            bounds[own] = float(parse_bytes(name, given[name]))
            if not bounds[own]:
                raise ConfigError(name, given[name], "must be above 0 bytes a second")
    return replace(replica, links=replace(replica.links, **bounds)) if bounds else replica
