"""The workload of `octavo simulate`: a trace, a ServeGen pool, or one that is made; as an open or a closed loop.

Owns reading files and the words of these options. What they mean is `octavo.simulate`'s.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import numpy as np

from octavo.errors import ConfigError
from octavo.simulate.drive import Source
from octavo.simulate.formats import read_trace
from octavo.simulate.inference_perf import is_definition, read_definition
from octavo.simulate.lengths import NAMED, lengths_named
from octavo.simulate.sources import ClosedLoop, OpenLoop
from octavo.simulate.synthetic import Arrivals, PrefixTree, Synthetic
from octavo.simulate.trace import MOST_TOKENS, TraceRequest

_POOLS = (".tar", ".tar.zst", ".tar.gz", ".tgz")
_MOST_FILE = 2**28
_MOST_POOL = 2**31


_OWN_ARRIVALS = "makes arrivals, and a trace has its own: leave it out"
_ARRIVING = ("rate", "variation", "on_s", "off_s")
_MAKING = ("lengths", "input_tokens", "output_tokens", "max_tokens", "turns",
           "shared_prefix", "prefix_tree")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Workload:
    requests: Sequence[TraceRequest]
    notes: list[str]
    """What is to be said of it."""
    users: int | None
    """Of a closed loop."""
    think_s: float
    speed: float
    has_arrivals: bool

    def source(self, load: float | None = None) -> Source:
        """At the load that was asked for, or at another: a number of users, or times the speed."""
        if self.users is not None:
            return ClosedLoop(self.requests, self.users if load is None else round(load), think_s=self.think_s)
        return OpenLoop(self.requests, speed=self.speed if load is None else load)


def workload(given: dict[str, Any], asked: AbstractSet[str]) -> Workload:
    """`asked` are the options that are not as usual."""
    _require_used(given, asked)
    if given["seed"] < 0:
        raise ConfigError("seed", given["seed"], "must be at least 0")
    if given["users"] is not None and given["turns"] is not None:
        raise ConfigError("users", given["users"], "send one request after the other; --turns makes sessions: give one")
    if given["trace"] is not None:
        requests, notes = _from_trace(given, asked)
    else:
        requests, notes = _synthetic(given)

    arrivals = any(entry.arrival_ns != requests[0].arrival_ns for entry in requests)
    made = Workload(requests, notes, given["users"], given["think"], given["speed"], arrivals)
    made.source()  # what is wrong with it is wrong before anything runs
    return made


def _require_used(given: dict[str, Any], asked: AbstractSet[str]) -> None:
    """Nothing that was asked for is dropped without a word. Raises `ConfigError`."""
    trace, pool = given["trace"] is not None, given["trace"] is not None and _is_pool(given["trace"])
    defined = trace and not pool and is_definition(given["trace"])
    read = trace and not pool and not defined
    users, made = given["users"] is not None, not trace
    for fits, why, *names in (
        (made, "makes requests, and a trace has its own: leave it out", *_MAKING),
        (not pool, _OWN_ARRIVALS, *_ARRIVING),
        (pool, "is for a pool of clients of ServeGen; give one by --trace", "from_s", "for_s"),
        (read, "is for the lines of a trace; give one by --trace", "on_bad", "sort"),
        (not users, "cannot speed up users, who wait for their answers; leave it out", "speed"),
        (users or given["turns"] is not None, "is for users or turns; give --users or --turns", "think"),
        (given["on_s"] is not None, "is what comes after a burst; give --on as well", "off_s"),
        (not users, "has no meaning for users, who send when they are answered; leave it out", *_ARRIVING),
        (given["lengths"] is None, "cannot be given beside --lengths", "input_tokens", "output_tokens"),
    ):  # fmt: skip
        for name in names:
            if name in asked and not fits:
                raise ConfigError(name, given[name], why)


def _is_pool(trace: str) -> bool:
    return trace.endswith(_POOLS) or Path(trace).is_dir()


def _from_trace(given: dict[str, Any], asked: AbstractSet[str]) -> tuple[Sequence[TraceRequest], list[str]]:
    if _is_pool(given["trace"]):
        return _from_pool(given)
    if is_definition(given["trace"]):
        return _from_definition(given)
    read = read_trace(given["trace"], on_bad=given["on_bad"], sort=given["sort"], limit=given["requests"])
    notes = [f"workload: {len(read.requests):,} requests of {read.source} ({read.format})"]
    requests = read.requests
    if read.has_arrivals:
        for name in sorted(asked.intersection(_ARRIVING)):
            raise ConfigError(name, given[name], _OWN_ARRIVALS)
    elif asked.isdisjoint(_ARRIVING):
        if given["users"] is None:
            notes.append("the trace has no arrivals: all come at once; --rate makes some, --users a closed loop")
    else:
        moments = _arrivals(given).draw_ns(np.random.default_rng(given["seed"]), len(requests)).tolist()
        requests = tuple(replace(entry, arrival_ns=at) for entry, at in zip(requests, moments, strict=True))
    if read.skipped_lines:
        notes.append(f"skipped {read.skipped_lines:,} lines: {'; '.join(read.skipped)}")
    return requests, notes


def _arrivals(given: dict[str, Any]) -> Arrivals:
    return Arrivals(rate=given["rate"], variation=given["variation"], on_s=given["on_s"], off_s=given["off_s"])


def _from_definition(given: dict[str, Any]) -> tuple[Sequence[TraceRequest], list[str]]:
    definition = read_definition(given["trace"])
    requests = 1000 if given["requests"] is None else given["requests"]
    made = definition.draw(requests, _arrivals(given), given["seed"])
    if given["users"] is not None and any(entry.session is not None for entry in made):
        raise ConfigError(
            "users", given["users"], f"send one request after the other; {definition.source} has sessions"
        )
    notes = [
        f"workload: {len(made):,} requests as {definition.source} defines them (inference-perf), seed {given['seed']}"
    ]
    if definition.objectives:
        asked = ", ".join(f"{name} {most:g}" for name, most in definition.objectives.items())
        notes.append(f"its objectives, which are not applied: {asked}")
    return made, notes


def _synthetic(given: dict[str, Any]) -> tuple[Sequence[TraceRequest], list[str]]:
    name = given["lengths"]
    if name is not None and name not in NAMED:
        raise ConfigError("lengths", name, f"use {' or '.join(NAMED)}, or --input-tokens and --output-tokens")
    inputs, outputs = (
        NAMED[name]
        if name is not None
        else (
            lengths_named("input_tokens", given["input_tokens"]),
            lengths_named("output_tokens", given["output_tokens"]),
        )
    )
    made = Synthetic(
        requests=1000 if given["requests"] is None else given["requests"],
        arrivals=_arrivals(given),
        input_tokens=inputs,
        output_tokens=outputs,
        max_tokens=given["max_tokens"],
        prefixes=_prefixes(given),
        turns=None if given["turns"] is None else lengths_named("turns", given["turns"]),
        think_s=given["think"],
        seed=given["seed"],
    ).draw()
    return made, [f"workload: {len(made):,} synthetic requests, seed {given['seed']}"]


def _prefixes(given: dict[str, Any]) -> PrefixTree | None:
    prefix, tree = given["shared_prefix"], given["prefix_tree"]
    if not 0 <= prefix <= MOST_TOKENS:
        raise ConfigError("shared_prefix", prefix, f"must be from 0 to {MOST_TOKENS:,} tokens")
    if tree is None:
        return PrefixTree(block_tokens=prefix) if prefix else None
    parts = tree.split(",")
    if prefix or len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise ConfigError("prefix_tree", tree, "is depth,fan,tokens of a level, and takes the place of --shared-prefix")
    depth, fan, tokens = (int(part) for part in parts)
    try:
        return PrefixTree(block_tokens=tokens, depth=depth, fan=fan)
    except ConfigError as error:
        raise ConfigError("prefix_tree", tree, f"{error.field}={error.value}: {error.remedy}") from None


def _from_pool(given: dict[str, Any]) -> tuple[Sequence[TraceRequest], list[str]]:
    from octavo.simulate.servegen import clients_of, draw

    path = Path(given["trace"])
    clients = clients_of(dict(_pool_files(path)), path.name)
    made = draw(
        clients, begin_s=given["from_s"], length_s=given["for_s"], limit=given["requests"], seed=given["seed"]
    )  # fmt: skip
    span = f"seconds {given['from_s']:g} to {given['from_s'] + given['for_s']:g}"
    return made, [f"workload: {len(made):,} requests of {len(clients)} clients of {path.name}, {span}"]


def _pool_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files of a pool: a folder or an archive."""
    try:
        if path.is_dir():
            for one in sorted(path.rglob("chunk-*")):
                yield one.name, one.read_bytes()
            return
        left = _MOST_POOL
        with _plain(path) as stream, tarfile.open(fileobj=stream, mode="r|*") as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() and member.size <= _MOST_FILE else None
                if content is not None and Path(member.name).name.startswith("chunk-"):
                    left -= member.size
                    if left < 0:
                        raise ConfigError(
                            "trace", str(path), f"unpacks to over {_MOST_POOL:,} bytes; unpack it yourself"
                        )
                    yield member.name, content.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise ConfigError("trace", str(path), f"cannot be read ({error})") from None


@contextmanager
def _plain(path: Path) -> Iterator[IO[bytes]]:
    """The archive, zstd undone."""
    with path.open("rb") as packed:
        if path.suffix != ".zst":
            yield packed
            return
        try:
            reader, damaged = _zstd(packed)
            with reader as stream:
                try:
                    yield stream
                except damaged as error:
                    raise OSError(str(error)) from None
        except ImportError:
            raise ConfigError(
                "trace",
                str(path),
                "is packed with zstd: pip install 'octavo[traces]', or unpack it and name the folder",
            ) from None


def _zstd(packed: IO[bytes]) -> tuple[Any, type[Exception]]:
    """A reader of it, and what that raises: Python's own from 3.14 on, else the `zstandard` package."""
    try:
        own: Any = import_module("compression.zstd")
        return own.ZstdFile(packed), own.ZstdError
    except ImportError:
        package: Any = import_module("zstandard")
        return package.ZstdDecompressor().stream_reader(packed), package.ZstdError
