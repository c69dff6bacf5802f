"""Options that say how something is done, asked for where nothing does it: refused, by name and with the remedy.

Owns what each of them belongs to, for `Config` and for `octavo simulate` alike. Knows no other option's limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError

_OF_THE_HOST = ("placement", "host_eviction", "transfer_bytes_per_second", "transfer_timeout")
_OF_THE_DISK = ("disk_eviction", "disk_bytes_per_second")
_OF_REUSE = ("eviction", "prefix_wait_tokens", "placement", "host_eviction")
USUAL: Mapping[str, Any] = {
    "reuse": "none",
    "host_bytes": 0,
    "disk_bytes": None,
    "eviction": "lru",
    "prefix_wait_tokens": None,
    "placement": "write_back",
    "host_eviction": "lru",
    "transfer_bytes_per_second": None,
    "transfer_timeout": 10.0,
    "disk_eviction": "lru",
    "disk_bytes_per_second": None,
}
"""What is looked at, and the value by which nothing is asked for."""


def refuse_unused(given: Mapping[str, Any], *, typed: bool = False) -> None:
    """Raises `ConfigError` for what means nothing beside the others. `typed`: remedies as on a command line."""
    reuse, host = ("--reuse prefix", "--host-bytes") if typed else ("reuse=prefix", "host_bytes")
    disk = "--disk-bytes" if typed else "disk_path and disk_bytes"
    lacks_host = given.get("host_bytes") in (0, None)
    for lacking, why, names in (
        (lacks_host, f"is of a tier below the device; give {host}", _OF_THE_HOST),
        (lacks_host and typed, f"is of a tier below the device; give {host}", _OF_THE_DISK),
        (given.get("disk_bytes") is None, f"is of a disk; give {disk}", _OF_THE_DISK),
        (given["reuse"] == "none", f"is of blocks that are kept; give {reuse}", _OF_REUSE),
    ):  # fmt: skip
        for name in names:
            value = given.get(name, USUAL[name])
            if lacking and value != USUAL[name]:
                raise ConfigError(name, value, why)
