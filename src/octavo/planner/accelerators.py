"""Accelerator facts: memory, bandwidth, arithmetic and links of devices, each row with its source.

Owns the shipped table, rows that users add in TOML, and finding a row by name. Rates are dense,
never sparse. A row without a second source is unverified, and whoever shows it says so. A name that
fits several rows is refused with the rows; one that fits none with the nearest.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, shorten

GIB = 2**30
_NUMBERS = ("usable_gib", "mem_bw_gbs")
_SOCKETS = {"sxm": ("sxm2", "sxm4", "sxm5")}


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str
    vendor: str
    kind: str
    """gpu, tpu, asic, apu or cpu."""
    memory_bytes: int
    """What the runtime reports as total, before any context."""
    bandwidth_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Dense arithmetic by element type: bf16, fp8, int8, fp4; absent where there is none."""
    host_link: str
    host_bytes_per_s: float
    device_link_bytes_per_s: float | None
    source: str
    second_source: str | None
    note: str = ""

    @property
    def verified(self) -> bool:
        """Whether a second source agrees with the first."""
        return self.second_source is not None

    def flops(self, bits: int) -> float:
        """Arithmetic at elements of so many bits, or of the next wider type the device computes in."""
        for limit, names in ((4, ("fp4",)), (8, ("fp8", "int8")), (16, ("bf16",))):
            if bits <= limit:
                found = next((self.flops_per_s[name] for name in names if name in self.flops_per_s), None)
                if found is not None:
                    return found
        return self.flops_per_s["bf16"]


@cache
def shipped() -> tuple[Accelerator, ...]:
    text = resources.files("octavo.planner").joinpath("data", "accelerators.json").read_text("utf-8")
    return tuple(_row(row, "accelerators.json") for row in json.loads(text)["accelerators"])


def from_toml(path: str | Path) -> tuple[Accelerator, ...]:
    """Rows a user adds: `[[accelerators]]` tables with the fields of the shipped file."""
    try:
        told = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError("device_file", str(path), f"cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("device_file", str(path), f"is not TOML ({error})") from None
    rows = told.get("accelerators")
    if not isinstance(rows, list) or not rows:
        raise ConfigError("device_file", str(path), "has no [[accelerators]] table")
    return tuple(_row(row, str(path)) for row in rows)


def device_named(name: str, own: tuple[Accelerator, ...] = ()) -> Accelerator:
    """The one row that `name` fits. A user's own row goes before a shipped one of the same name."""
    found = devices_named(name, own)
    if len(found) > 1:
        raise ConfigError("device", name, f"fits several; name one of {', '.join(_slug(row.name) for row in found)}")
    return found[0]


def devices_named(name: str, own: tuple[Accelerator, ...] = ()) -> tuple[Accelerator, ...]:
    """All rows that `name` fits: at least one, or `ConfigError` with those whose names are near."""
    taken = {_plain(row.name) for row in own}
    rows = (*own, *(row for row in shipped() if _plain(row.name) not in taken))
    if not _parts(name):
        raise ConfigError("device", name, "name an accelerator, for example h100-sxm")
    exact = tuple(row for row in rows if _plain(row.name) == _plain(name))
    found = exact or tuple(row for row in rows if _fits(name, row.name))
    if found:
        return found
    near = _nearest(name, rows)
    raise ConfigError(
        "device",
        name,
        f"is not known{f'; did you mean {near}?' if near else ''} "
        "(octavo plan --list-devices prints all; of any other, octavo plan takes the bytes by --memory, or a file "
        "by --device-file)",
    )


def _fits(asked: str, name: str) -> bool:
    """Whether every part of what was asked is a part of the name, in any order."""
    have = _parts(name)
    return all(part in have or any(socket in have for socket in _SOCKETS.get(part, ())) for part in _parts(asked))


def _parts(name: str) -> list[str]:
    """`H100-SXM5-80GB` -> h100, sxm5, 80gb; letters and digits that belong together stay together."""
    return [part for part in re.split(r"[^a-z0-9+]+", name.lower()) if part]


def _plain(name: str) -> str:
    return "".join(_parts(name))


def _slug(name: str) -> str:
    return "-".join(_parts(name))


def _nearest(name: str, rows: tuple[Accelerator, ...]) -> str:
    by_plain = {_plain(row.name): _slug(row.name) for row in rows}
    inside = [slug for plain, slug in by_plain.items() if len(_plain(name)) > 2 and _plain(name) in plain]
    close = get_close_matches(_plain(name), by_plain, n=3, cutoff=0.5)
    starts_with = [slug.split("-")[0] for slug in by_plain.values()]
    first = get_close_matches(_parts(name)[0], starts_with, n=1, cutoff=0.5)
    starts = [slug for slug in by_plain.values() if first and slug.split("-")[0] == first[0]]
    return " or ".join(dict.fromkeys([*inside, *(by_plain[plain] for plain in close), *starts][:3]))


def _row(row: Any, where: str) -> Accelerator:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise ConfigError("device_file", row, f"a row of {where} needs a name")
    rates = row.get("dense_tflops") or {}
    for field in _NUMBERS:
        _positive(row, field, where)
    if not isinstance(rates, dict) or "bf16" not in rates:
        raise ConfigError("device_file", rates, f"{row['name']} in {where}: dense_tflops needs at least bf16")
    link = row.get("gpu_link_gbs_one_way")
    return Accelerator(
        name=row["name"],
        vendor=str(row.get("vendor", "")),
        kind=str(row.get("kind", "gpu")),
        memory_bytes=round(row["usable_gib"] * GIB),
        bandwidth_bytes_per_s=row["mem_bw_gbs"] * 1e9,
        flops_per_s={name: rate * 1e12 for name, rate in rates.items() if rate},
        host_link=str(row.get("host_link") or "host link"),
        host_bytes_per_s=(row.get("host_bw_gbs_one_way") or 0) * 1e9,
        device_link_bytes_per_s=link * 1e9 if link else None,
        source=str(row.get("source", where)),
        second_source=row.get("second_source"),
        note=str(row.get("note", "")),
    )


def _positive(row: dict[str, Any], field: str, where: str) -> None:
    value = row.get(field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError("device_file", shorten(value), f"{row['name']} in {where}: {field} must be a number above 0")
