"""The output of a batch: what an earlier run left is found again, and nothing that is not ours is touched."""

from __future__ import annotations

import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.pure.batches import RUN, answers, read_rows, row, text_of

from octavo.cli.batch_output import Earlier, OutputFile, is_error, open_output, survey
from octavo.cli.batch_rows import BadRow, read_lines, run_digest
from octavo.errors import RequestError

INPUT = [row("a"), row("b"), b"{nope", row("c"), row("a")]


def answer(place: int) -> dict[str, Any]:
    found = read_rows(INPUT)[place]
    if isinstance(found, BadRow):
        return found.as_output()
    response = {"status_code": 200, "request_id": "r", "body": {"text": "é\u2028"}}
    return {"id": found.id, "custom_id": found.custom_id, "response": response, "error": None}


def surveyed(output: OutputFile, lines: list[Any] = INPUT, *, ordered: bool = False) -> tuple[int, int]:
    found = survey(read_lines(io.BytesIO(text_of(lines))), RUN, output, ordered=ordered)
    return found.rows, found.left


def opened(path: Path, *, run: str = RUN, overwrite: bool = False) -> OutputFile:
    return open_output(str(path), run, overwrite=overwrite)


def written(path: Path, *places: int) -> Path:
    output = opened(path)
    output.begin()
    for place in places:
        output.write(answer(place))
    output.close()
    return path


def refused(path: Path, told: str, lines: list[Any] = INPUT, *, run: str = RUN, ordered: bool = False) -> None:
    """Refused with these words and the way out, and not a byte of the file was changed."""
    before = path.read_bytes()
    with pytest.raises(RequestError, match=told) as caught, closing(opened(path, run=run)) as output:
        surveyed(output, lines, ordered=ordered)
    assert "--overwrite" in str(caught.value)
    assert path.read_bytes() == before


def test_a_new_file_has_no_rows(tmp_path: Path) -> None:
    output = opened(tmp_path / "out.jsonl")
    assert surveyed(output) == (5, 5)
    output.close()


def test_rows_of_an_earlier_run_are_found_whatever_their_order(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", 3, 0, 2)
    output = opened(path)
    assert surveyed(output) == (5, 2)
    assert output.earlier.errors == 1
    output.begin()
    output.write(answer(1))
    output.write(answer(4))
    output.close()
    assert [found["id"] for found in answers(path)] == [answer(i)["id"] for i in (3, 0, 2, 1, 4)]


@pytest.mark.parametrize("cut", [1, 2, 10, 40, -1])
def test_the_torn_last_line_of_a_killed_run_is_cut_off_and_its_row_done_again(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "out.jsonl", 0, 1)
    kept = path.read_bytes()
    torn = json.dumps(answer(3), ensure_ascii=False).encode()
    path.write_bytes(kept + torn[:cut])
    output = opened(path)
    assert surveyed(output) == (5, 3)
    output.begin()
    output.close()
    assert path.read_bytes() == kept


def test_a_file_whose_only_line_is_torn_is_ours_if_it_begins_as_ours_do(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(json.dumps(answer(0), separators=(",", ":")).encode()[:30])
    output = opened(path)
    assert surveyed(output) == (5, 5)
    output.close()


@pytest.mark.parametrize("text", [b"dear diary", b"dear diary\n", b'{"id": 7}\n', b"\xff\xfe\n", b"[1]\n", b"\n"])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(text)
    refused(path, "line 1 is no row of a batch")


def test_an_output_of_another_input_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "out.jsonl", 0, 1)
    changed = [row("a"), row("b", (9, 9)), *INPUT[2:]]
    refused(path, "1 of its 2 rows answer no row of this input", changed)
    refused(path, "2 of its 2 rows", [row("z"), *INPUT])


def test_an_input_that_has_grown_at_its_end_goes_on(tmp_path: Path) -> None:
    output = opened(written(tmp_path / "out.jsonl", 0, 1, 2, 3, 4))
    assert surveyed(output, [*INPUT, row("new")]) == (6, 1)
    output.close()


def test_an_output_of_another_model_or_seed_is_refused(tmp_path: Path) -> None:
    refused(written(tmp_path / "out.jsonl", 0), "another model, dtype or seed", run=run_digest("another"))


def test_a_row_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    refused(written(tmp_path / "out.jsonl", 0, 1, 0), "line 3 has the id of a line before it")


def test_rows_out_of_order_cannot_go_on_in_order(tmp_path: Path) -> None:
    refused(written(tmp_path / "one.jsonl", 1, 0), "not in the order of the input", ordered=True)
    refused(written(tmp_path / "two.jsonl", 0, 2), "not in the order of the input", ordered=True)
    output = opened(written(tmp_path / "three.jsonl", 0, 1))
    assert surveyed(output, ordered=True) == (5, 3)
    output.close()


def test_overwriting_begins_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"dear diary\n")
    output = opened(path, overwrite=True)
    assert surveyed(output) == (5, 5)
    output.begin()
    output.close()
    assert path.read_bytes() == b""


def test_two_runs_cannot_write_to_one_file(tmp_path: Path) -> None:
    first = opened(tmp_path / "out.jsonl")
    with pytest.raises(RequestError, match="another run is writing to it"):
        opened(tmp_path / "out.jsonl")
    first.close()
    opened(tmp_path / "out.jsonl").close()


@pytest.mark.parametrize("name", ["no/such/folder/out.jsonl", "."])
def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be written"):
        opened(tmp_path / name)


class Full(io.BytesIO):
    """A disk with little room: takes what fits, then fails."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        left = self.room - self.tell()
        if left <= 0:
            raise OSError(28, "No space left on device")
        return super().write(bytes(data)[:left])


def test_a_row_for_which_there_is_no_room_leaves_no_part_of_itself() -> None:
    size = len(json.dumps(answer(0), ensure_ascii=False, separators=(",", ":")).encode()) + 1
    disk = Full(size + 20)
    output = OutputFile("out", disk, Earlier())
    output.write(answer(0))
    with pytest.raises(RequestError, match=r"no space left on device.*same command goes on"):
        output.write(answer(1))
    assert len(disk.getvalue()) == size


def test_a_row_is_written_whole_though_the_system_takes_it_in_pieces() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:7])

    pipe = Slow()
    OutputFile("pipe", pipe, None).write(answer(0))
    assert json.loads(pipe.getvalue()) == answer(0)


def test_a_reader_that_leaves_ends_the_run_quietly() -> None:
    class Closed(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

    with pytest.raises(typer.Exit) as caught:
        OutputFile("pipe", Closed(), None).write(answer(0))
    assert caught.value.exit_code == 141


def test_a_device_is_written_to_and_remembers_nothing() -> None:
    output = open_output("/dev/null", RUN, overwrite=False)
    assert not output.is_file
    output.begin()
    output.write(answer(0))
    output.close()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"response": {"status_code": 200}, "error": None}, False),
        ({"response": {"status_code": 400}, "error": None}, True),
        ({"response": None, "error": {"code": "x"}}, True),
        ({"response": None, "error": None}, True),
    ],
)
def test_an_error_is_a_row_without_an_answer(found: dict[str, Any], expected: bool) -> None:
    assert is_error(found) is expected
