"""What the command line reads and writes: prompts, blocks of text, the start table, the closing line."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console

from octavo.cli import start_table
from octavo.cli.closing import Ended, RunWatch, closing_line
from octavo.cli.prompts import read_prompts
from octavo.cli.start_table import ledger_table, print_start, stderr_console
from octavo.cli.writing import Blocks, json_line, tpot_s, ttft_s, write
from octavo.config import Config
from octavo.deciding import decide
from octavo.deployment import Deployment, Facts, Row
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import RequestError
from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.planner.ledger import RUNTIME_LINES
from octavo.scheduling.events import RequestRecord, StepPlanned

RECORD = RequestRecord(
    request_id="r", choice=0, input_tokens=5, cached_tokens={}, output_tokens=11, allocated_blocks={"full": 3},
    attention_mode="gqa/reference", cache_dtype="fp32", queue_time=0.25, prefill_time=0.5, decode_time=2.0,
    preempted_time=0.0, preemptions=2, arrival_s=10.0, first_token_s=10.75, finished_s=12.75,
)  # fmt: skip


def stdin_of(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))


# -- prompts ----------------------------------------------------------------------------------------


def test_prompts_of_a_file_follow_those_given_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\r\n\n  two  \n\u2028three".encode())
    assert read_prompts(["zero"], str(path)) == ["zero", "one", "  two  ", "\u2028three"]


def test_a_dash_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin_of(monkeypatch, b"first\nsecond\n")
    assert read_prompts([], "-") == ["first", "second"]


@pytest.mark.parametrize("raw", [b"", b"\n \n\t\n"])
def test_a_source_without_a_prompt_is_named(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    stdin_of(monkeypatch, raw)
    with pytest.raises(RequestError, match="standard input holds none"):
        read_prompts([], "-")


@pytest.mark.parametrize("name", ["", "folder", "missing", "nul\0byte", "latin1"])
def test_a_file_that_cannot_be_read_as_text_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin1").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(RequestError, match=r"^prompts_file="):
        read_prompts([], str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_read_permission_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(RequestError, match=r"^prompts_file=.*permission denied"):
        read_prompts([], str(path))


# -- blocks -----------------------------------------------------------------------------------------


def test_one_output_is_its_text_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = Blocks(["Why?"], 1)
    for text in (" Because", "", " it", " is."):
        blocks.add(0, 0, text)
    blocks.end(0, 0)
    blocks.close()
    assert capsys.readouterr().out == " Because it is.\n"


def test_text_that_ends_its_own_line_gets_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = Blocks(["Why?"], 1)
    blocks.add(0, 0, "So.\n")
    blocks.end(0, 0)
    blocks.close()
    assert capsys.readouterr().out == "So.\n"


def test_the_first_unfinished_output_is_live_and_those_behind_it_wait(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = Blocks(["one", "two", "three"], 1)
    assert capsys.readouterr().out == "== 1/3: 'one'\n"
    blocks.add(1, 0, "B")
    blocks.add(2, 0, "C")
    blocks.end(2, 0)
    assert capsys.readouterr().out == ""
    blocks.add(0, 0, "A")
    assert capsys.readouterr().out == "A"
    blocks.end(0, 0)
    assert capsys.readouterr().out == "\n\n== 2/3: 'two'\nB"
    blocks.add(1, 0, "b")
    blocks.end(1, 0)
    blocks.close()
    assert capsys.readouterr().out == "b\n\n== 3/3: 'three'\nC\n"


def test_choices_are_named_and_long_prompts_cut(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = Blocks(["x" * 200], 2)
    blocks.end(0, 0)
    blocks.end(0, 1)
    out = capsys.readouterr().out
    assert out == f"== 1/1 choice 1/2: '{'x' * 60}...'\n\n== 1/1 choice 2/2: '{'x' * 60}...'\n"


def test_a_reader_that_leaves_ends_the_program_as_a_filter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:  # noqa: PTH123 - a descriptor, not a path
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(typer.Exit) as left:
            write("text")
    assert left.value.exit_code == 141


def test_a_character_that_the_terminal_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    write("caf\xe9 \U0001f642")
    assert raw.getvalue() == b"caf\\xe9 \\U0001f642"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_json_in_any_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    choice = CompletionOutput(0, "\U0001f642", (7, 8), "length", record=RECORD)
    write(json_line(RequestOutput("r", "caf\xe9", (1, 2), (choice,)), "caf\xe9"))
    told = json.loads(raw.getvalue().decode())
    assert (told["prompt"], told["prompt_token_ids"]) == ("caf\xe9", [1, 2])
    assert told["outputs"][0]["text"] == "\U0001f642"
    assert told["outputs"][0]["record"]["ttft"] == 0.75
    assert told["outputs"][0]["record"]["tpot"] == 0.2
    assert "logprobs" not in told["outputs"][0]


# -- the closing line -------------------------------------------------------------------------------


class Watch(RunWatch):
    def __init__(self) -> None:
        self._slabs, self._blocks_per_slab, self._what, self._least_free = 64, 1, "blocks", 64


def planned(free: int) -> StepPlanned:
    return StepPlanned(0.0, 0, 1, 0, 1, 0, free, "compute")


def test_the_closing_line_of_one_output_is_its_record() -> None:
    watch = Watch()
    watch._fold([planned(61), planned(60), planned(63)])
    line = closing_line([Ended(0, 0, "length", RECORD, None)], watch)
    assert line == (
        "11 tokens, TTFT 750.0 ms, TPOT 200.0 ms, 4.0 tokens/s, peak 4 of 64 blocks, 2 preemptions, ended by length"
    )


def test_the_closing_line_of_several_outputs_has_medians_and_sums() -> None:
    late = replace(RECORD, first_token_s=13.0, finished_s=14.0, decode_time=1.0, preemptions=0)
    line = closing_line([Ended(0, 0, "length", RECORD, None), Ended(1, 0, "stop", late, None)], Watch())
    assert line == (
        "2 outputs, 22 tokens, TTFT 1.88 s (median), TPOT 150.0 ms (median), 5.5 tokens/s, peak 0 of 64 blocks, "
        "2 preemptions, ended by length (1), stop (1)"
    )


def test_figures_that_do_not_exist_are_not_made_up() -> None:
    empty = replace(RECORD, output_tokens=0, first_token_s=None, finished_s=10.0, decode_time=0.0)
    assert (ttft_s(empty), tpot_s(empty), tpot_s(replace(RECORD, output_tokens=1))) == (None, None, None)
    assert "TTFT none, TPOT none, 0 tokens/s" in closing_line([Ended(0, 0, "length", empty, None)], Watch())


# -- the start table --------------------------------------------------------------------------------


def deployment(**asked: object) -> Deployment:
    geometry = geometry_from_config(
        {
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
        },
        FP32,
    )  # fmt: skip
    facts = Facts(
        device="cpu", total_bytes=25 << 30, available_bytes=20 << 30, weights_bytes=538_060_288, weights_dtype=FP32,
        weights_loaded=True, process_bytes=390_000_000, cores=2, granted_by="physical memory",
    )  # fmt: skip
    return decide(Config.from_kwargs(**asked), geometry, facts)


def shown(width: int, made: Deployment) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    more = (Row("prompt", "raw", "[bold] is no markup here"),)
    print_start(console, made, made.ledger, title="octavo serves [a] model", more=more, notes=("read [this]",))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_start_table_fits_and_leaves_nothing_out(width: int) -> None:
    made = deployment(kv_cache_memory_bytes="256MiB")
    text = shown(width, made)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    flat = " ".join(text.split())
    for row in made.rows():
        if not row.name.startswith("ledger: "):
            assert row.name in flat
    for label in ("weights", "runtime", *RUNTIME_LINES, "KV cache", "headroom", "total"):
        assert set(label.split()) <= set(flat.split())
    for line in made.ledger.lines:
        assert f"{line.predicted_bytes:,}" in flat
    for literal in (
        "46,080",
        f"{made.ledger.total_bytes:,}",
        "warning: the context limit of 8,192",
        "kv_cache_memory_bytes=",
    ):
        assert literal in flat
    assert "[bold] is no markup here" in flat or width < 100
    assert "octavo serves [a] model" in flat
    assert "note: read [this]" in flat


def test_a_sum_counts_as_measured_only_when_all_of_it_was() -> None:
    ledger = deployment().ledger
    everything = {line.label: 1000 for line in (ledger.weights, *ledger.runtime, ledger.kv)}
    partly = {label: size for label, size in everything.items() if label != "logits"}

    def row(found: dict[str, int], name: str) -> list[str]:
        out = io.StringIO()
        Console(file=out, width=100).print(ledger_table(ledger.measured(found), why=False))
        return next(line.split()[1:] for line in out.getvalue().splitlines() if line.startswith(name))

    assert row(everything, "total") == [f"{ledger.total_bytes:,}", "10,000"]
    assert row(everything, "runtime") == [f"{ledger.runtime_bytes:,}", "8,000"]
    assert row(partly, "total") == [f"{ledger.total_bytes:,}"]
    assert row(partly, "runtime") == [f"{ledger.runtime_bytes:,}"]


def test_a_width_is_chosen_where_nobody_says_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert stderr_console().width == start_table.WIDTH
    monkeypatch.setenv("COLUMNS", "72")
    assert stderr_console().width == 72
