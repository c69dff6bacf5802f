"""What the checks of a model found when it was loaded, kept for the next start: `Verdicts`.

Owns the key of a verdict, its file, and how little is taken on trust. The key names everything that the checks
depend on: the weights to their last bit, the config, octavo's own code and kernels, the versions of torch and
Transformers, the processor, and what was asked. The file holds the key in full and a checksum over all of it, and
appears whole or not at all. Whatever is not exactly that is as if nothing were kept.

Invariant: a verdict is read back as it was written, for the key under which it was written, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.models.cache_directory import cache_directory

SWITCH = "OCTAVO_VERDICTS"
"""An environment variable: `off` keeps nothing and trusts nothing kept."""
MOST_KEPT = 64
PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, in words and numbers."""

    linear: tuple[str, str]
    """What runs linear layers, and why."""
    served: str
    tried: bool
    """Whether a tiny model was tried with packed layers."""
    leave: tuple[str, ...]
    """Kinds of modules whose weights are not packed."""
    wirings: tuple[tuple[str, int, int, float], ...] | None
    """Of each layer: name, rope, rotary elements, scale. None unless all of them and what surrounds them are fused."""
    made: str
    """The day."""


class Verdicts:
    """The verdict of one key, in octavo's cache directory."""

    def __init__(self, key: Mapping[str, Any]) -> None:
        self._key = json.loads(json.dumps(dict(key)))
        name = hashlib.sha256(_canonical(self._key)).hexdigest()
        self.path = cache_directory() / "verdicts" / f"{name}.json"

    def read(self) -> Verdict | None:
        """What is kept; None where nothing is, or where it is damaged, or another's."""
        try:
            told = json.loads(self.path.read_bytes())
            whole = told["sha256"] == _checksum(told["key"], told["verdict"])
            return _verdict(told["verdict"]) if whole and told["key"] == self._key else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def keep(self, verdict: Verdict) -> None:
        """Write it. Whoever cannot write there checks again at the next start."""
        found = json.loads(json.dumps(asdict(verdict)))
        text = json.dumps({"key": self._key, "verdict": found, "sha256": _checksum(self._key, found)}, indent=1)
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=f"{self.path.stem}.", dir=self.path.parent)
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                Path(name).replace(self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise
            self._forget_oldest()

    def forget(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _forget_oldest(self) -> None:
        kept = sorted((entry.stat().st_mtime_ns, entry.name) for entry in self.path.parent.iterdir())
        for _, name in kept[:-MOST_KEPT]:
            (self.path.parent / name).unlink(missing_ok=True)


def wanted() -> bool:
    """Whether verdicts are kept at all."""
    return os.environ.get(SWITCH, "").lower() != "off"


def today() -> str:
    return time.strftime("%Y-%m-%d")


def code_digest() -> str:
    """Of every module and every compiled kernel of this package."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".so", ".pyd", ".dylib")):
        digest.update(f"{path.relative_to(PACKAGE)} ".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def processor() -> str:
    """The first processor's name and what it can do, as the system tells; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    told = [line for line in lines if line.split(":")[0].strip() in ("model name", "stepping", "flags", "Features")]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _verdict(told: Mapping[str, Any]) -> Verdict:
    """Raises `TypeError`, `KeyError` or `ValueError` for what is none."""
    backend, why = told["linear"]
    wirings = told["wirings"]
    if wirings is not None:
        wirings = tuple((str(name), int(rope), int(rotary), float(scale)) for name, rope, rotary, scale in wirings)
    words = (backend, why, told["served"], told["made"], *told["leave"])
    if not all(isinstance(word, str) for word in words) or not isinstance(told["tried"], bool):
        raise TypeError("words are wanted")
    return Verdict((backend, why), told["served"], told["tried"], tuple(told["leave"]), wirings, told["made"])


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _checksum(key: Any, verdict: Any) -> str:
    return hashlib.sha256(_canonical([key, verdict])).hexdigest()
