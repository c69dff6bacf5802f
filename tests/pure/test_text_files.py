"""Files that a person names: whatever they are, every reader refuses by field what it cannot read, in bounded time."""

from __future__ import annotations

import ast
import gzip
import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import run as octavo
from octavo.cost.tables import Tables
from octavo.errors import ConfigError
from octavo.planner.workload import MOST_TOKENS, trace_lengths
from octavo.simulate.formats import read_trace
from octavo.text_files import read_text

SOURCE = Path(__file__).parents[2] / "src" / "octavo"
GOOD = b'{"arrival":0,"input_tokens":10,"output_tokens":5}\n'


def a_trace(folder: Path, name: str) -> Any:
    return read_trace(folder / name)


def lengths(folder: Path, name: str) -> Any:
    return trace_lengths(str(folder / name))


def timings(folder: Path, name: str) -> Any:
    (folder / name).rename(folder / ("dense.csv.gz" if name.endswith(".gz") else "dense.csv"))
    return Tables.read(folder)


READERS = pytest.mark.parametrize(("read", "field"), [(a_trace, "trace"), (lengths, "workload"), (timings, "tables")])


@READERS
@pytest.mark.parametrize(("data", "said"), [
    (gzip.compress(b"\0" * 5_000_000, mtime=0), "holds more than 4,000,000 bytes of text"),
    (gzip.compress(GOOD * 1000, mtime=0)[:60], "is a damaged gzip file"),
    (gzip.compress(GOOD, mtime=0)[:12] + b"\xff" * 20, "is a damaged gzip file"),
    (gzip.compress(GOOD * 1000, mtime=0)[:-6] + b"xxxxxx", "cannot be read"),
    (GOOD, "cannot be read"),
    (gzip.compress(b"\xff\xfe", mtime=0), "is no text"),
])  # fmt: skip
def test_an_archive_that_is_damaged_or_has_no_end_is_refused_by_field(
    read: Callable[[Path, str], Any],
    field: str,
    data: bytes,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.text_files.MOST_BYTES", 4_000_000)
    (tmp_path / "given.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=said) as refusal:
        read(tmp_path, "given.gz")
    assert refusal.value.field == field


@READERS
@pytest.mark.parametrize("data", [b"\xff\xfe", b"a,b\n" + b"9" * 200_000 + b",1\n", b'a,b\n"', b"", b"\0\0\0", b"{}"])
def test_what_is_no_text_or_table_is_refused_by_field(
    read: Callable[[Path, str], Any], field: str, data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "given").write_bytes(data)
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, "given")
    assert refusal.value.field == field


def test_a_device_without_end_a_folder_and_a_name_that_no_file_has_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.text_files.MOST_BYTES", 4_000_000)
    for path in ("/dev/zero", str(tmp_path), str(tmp_path / "none"), "a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match=r"(holds more than|cannot be read)") as refusal:
            read_text(path, "trace")
        assert refusal.value.field == "trace"


def test_a_mark_at_the_beginning_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(b"\xef\xbb\xbfa")
    assert read_text(tmp_path / "given", "trace") == "a"


@pytest.mark.parametrize("row", [
    "[1, 2]", "[" * 100_000, '{"input_tokens": 1e999, "output_tokens": 1}', '{"input_tokens": NaN, "output_tokens": 1}',
    '{"input_tokens": -5, "output_tokens": 6}', '{"input_tokens": 1e300, "output_tokens": 1}', "7", "{",
    f'{{"input_tokens": {MOST_TOKENS + 1}, "output_tokens": 1}}', '{"input_tokens": [1], "output_tokens": 1}',
])  # fmt: skip
def test_a_row_of_lengths_that_nobody_can_have_is_refused_by_its_number(row: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_bytes(GOOD + row.encode())
    with pytest.raises(ConfigError, match=r"(line|row) 2") as refusal:
        trace_lengths(str(tmp_path / "given"))
    assert len(str(refusal.value)) < 600


def packed(name: str, size: int, kind: str) -> bytes:
    """A tar of one file of zeros."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode=kind) as archive:
        member = tarfile.TarInfo(name)
        member.size = size
        archive.addfile(member, io.BytesIO(b"\0" * size))
    return made.getvalue()


WHOLE = packed("pool/chunk-0-trace.csv", 30_000, "w:gz")


@pytest.mark.parametrize(("name", "data", "said"), [
    ("pool.tar", b"garbage", "cannot be read"),
    ("pool.tar.gz", b"garbage", "cannot be read"),
    ("pool.tar.zst", b"garbage", "(cannot be read|is packed with zstd)"),  # with or without the package
    ("pool.tgz", WHOLE[:40], "cannot be read"),
    ("pool.tgz", WHOLE[:40] + b"\xff" * 40 + WHOLE[80:], "cannot be read"),
    ("pool.tar", packed("pool/chunk-0-trace.csv", 30_000, "w:")[:700], "(cannot be read|unpacks to over)"),
    ("pool.tgz", WHOLE, "unpacks to over 20,000 bytes"),
    ("pool.tgz", packed("pool/other", 30_000, "w:gz"), "no ServeGen pool"),
], ids=["garbage", "garbage-gz", "garbage-zst", "cut", "damaged", "cut-plain", "too-much", "other"])  # fmt: skip
def test_a_pool_that_is_damaged_or_unpacks_to_too_much_is_refused(
    name: str,
    data: bytes,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("octavo.cli.simulate_workload._MOST_POOL", 20_000)
    (tmp_path / name).write_bytes(data)
    shape = ("--layers", "2", "--kv-heads", "2", "--head-dim", "16", "--weights-bytes", "1MiB", "--context", "64")
    assert octavo(["simulate", *shape, "--device", "h100-sxm", "--trace", str(tmp_path / name)]) == 2
    assert re.search(said, capsys.readouterr().err)


def parses(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.loads", "json.load", "tomllib.loads")


def test_whoever_expects_damaged_json_expects_lists_inside_each_other_without_end() -> None:
    """Python raises `RecursionError`, which is no `ValueError`, so that every reader has to name it."""
    seen, wrong = 0, []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try) and any(parses(one) for part in node.body for one in ast.walk(part)):
                caught = " ".join(ast.unparse(one.type) for one in node.handlers if one.type is not None)
                if "ValueError" in caught or "Decode" in caught:
                    seen += 1
                    wrong += [] if "RecursionError" in caught else [f"{path.name}:{node.lineno}"]
    assert not wrong
    assert seen > 10
