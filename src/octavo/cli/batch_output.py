"""The output of a batch: one line for each row, appended whole, and found again when a run goes on.

Owns the file: its lock, what an earlier run left in it, the torn last line of one that was killed.

Invariant: what is before `good_bytes` are whole rows of this input, each once. Nothing is changed in a
file before it is known to belong to the input, and a line reaches it in one piece or is cut off again.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import typer

from octavo.cli.batch_rows import ID_PREFIX, Line, row_id
from octavo.cli.writing import READER_LEFT
from octavo.errors import RequestError

STDOUT = "-"
_ID = re.compile(rf"{ID_PREFIX}([0-9a-f]{{24}})([0-9a-f]{{8}})")
_BEGINNING = f'{{"id":"{ID_PREFIX}'.encode()
_AGAIN = "name another file, or start it again with --overwrite"


def is_error(row: dict[str, Any]) -> bool:
    response = row.get("response")
    return row.get("error") is not None or not isinstance(response, dict) or response.get("status_code") != 200


@dataclass(slots=True)
class Earlier:
    """What an earlier run has written: the ids of its rows, in their order."""

    ids: dict[str, int] = field(default_factory=dict)
    errors: int = 0
    good_bytes: int = 0
    torn_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Survey:
    """The input beside what there is of the output."""

    rows: int
    left: int


class OutputFile:
    """A file, or stdout for `-`. Open it with `open_output`."""

    def __init__(self, name: str, file: BinaryIO, earlier: Earlier | None) -> None:
        self.name = name
        self.earlier = earlier or Earlier()
        self.is_file = earlier is not None
        """What is written stays, and a run can go on from it."""
        self._file = file
        self._at = self.earlier.good_bytes

    def begin(self) -> None:
        """The rows that are there belong to this input: cut off what is torn, and append from here on."""
        if self.is_file:
            self._file.truncate(self._at)
            self._file.seek(self._at)

    def write(self, row: dict[str, Any]) -> None:
        """One row, at once. Raises `RequestError` when it cannot be written; the file then ends with the row before."""
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
            self._at += len(line)
        except BrokenPipeError:
            raise typer.Exit(READER_LEFT) from None
        except OSError as error:
            if self.is_file:
                self._file.truncate(self._at)
            reason = (error.strerror or type(error).__name__).lower()
            raise RequestError(
                "output", self.name, f"cannot be written ({reason}); make room, and the same command goes on from there"
            ) from None

    def close(self) -> None:
        self._file.close()


def open_output(name: str, run: str, *, overwrite: bool) -> OutputFile:
    """Lock it and read what is there. Changes nothing but makes a file that is not there yet."""
    if name == STDOUT:
        sys.stdout.flush()
        stdout = open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
        return OutputFile("standard output", stdout, None)
    path = Path(name).expanduser()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise RequestError(
            "output", name, f"cannot be written: {reason}; name a file in a folder that is there"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # a pipe or a device remembers nothing
        return OutputFile(name, os.fdopen(descriptor, "wb", buffering=0), None)
    file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        _lock(file, name)
        earlier = Earlier() if overwrite else read_earlier(file, name, run)
    except BaseException:
        file.close()
        raise
    return OutputFile(name, file, earlier)


def _lock(file: BinaryIO, name: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RequestError("output", name, "another run is writing to it; wait for it, or name another file") from None


def read_earlier(file: BinaryIO, name: str, run: str) -> Earlier:
    """Raises `RequestError` for a file that is no output of this run."""
    earlier = Earlier()
    with open(file.fileno(), "rb", closefd=False) as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                earlier.errors += _known(earlier, line, number, name, run)
                earlier.good_bytes += len(line)
            elif number > 1 or line.startswith(_BEGINNING[: len(line)]):
                earlier.torn_bytes = len(line)
            else:
                raise RequestError("output", name, f"line 1 is no row of a batch; {_AGAIN}")
    return earlier


def _known(earlier: Earlier, line: bytes, number: int, name: str, run: str) -> bool:
    """Take note of one row; returns whether it is an error."""
    row = _row(line)
    found = _ID.fullmatch(str(row.get("id")))
    if found is None:
        raise RequestError("output", name, f"line {number} is no row of a batch; {_AGAIN}")
    if found[2] != run:
        raise RequestError(
            "output", name, f"was written with another model, dtype or seed; give those of that run, {_AGAIN}"
        )
    if found[0] in earlier.ids:
        raise RequestError("output", name, f"line {number} has the id of a line before it; {_AGAIN}")
    earlier.ids[found[0]] = len(earlier.ids)
    return is_error(row)


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def survey(lines: Iterable[Line], run: str, output: OutputFile, *, ordered: bool) -> Survey:
    """Count the rows. Raises `RequestError` when the output has a row that the input has not."""
    ids = output.earlier.ids
    rows = found = 0
    in_order = True
    for line in lines:
        place = ids.get(row_id(line, run))
        if place is not None:
            in_order = in_order and place == rows == found
            found += 1
        rows += 1
    if found < len(ids):
        raise RequestError(
            "output",
            output.name,
            f"{len(ids) - found:,} of its {len(ids):,} rows answer no row of this input; {_AGAIN}",
        )
    if ordered and not in_order:
        raise RequestError(
            "ordered", True, f"the rows in {output.name} are not in the order of the input; leave it out, or {_AGAIN}"
        )
    return Survey(rows, rows - found)
