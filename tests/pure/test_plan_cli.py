"""`octavo plan` as a person meets it: what is printed, what wrong input gets, how long it takes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.pure.planner_shapes import DEEPSEEK_V3, GIB, LLAMA_8B, MAMBA_2_8B, QWEN_35_27B

from octavo.cli.main import run

HAND = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--kv-dtype", "bf16", "--context", "8192"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write(tmp_path, "llama", LLAMA_8B)


def write(folder: Path, name: str, told: object) -> str:
    directory = folder / name
    directory.mkdir()
    (directory / "config.json").write_text(told if isinstance(told, str) else json.dumps(told))
    return str(directory)


def test_the_manual_form_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *HAND]) == 0
    out = capsys.readouterr().out
    assert "128 KiB per token" in out
    assert "1 GiB needed" in out


def test_the_textbook_case_is_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *HAND, "--lengths", "1200,7600,2000", "--declared-max", "8192"]) == 0
    out = capsys.readouterr().out
    said = ("3 GiB reserved", "1.318 GiB useful (43.9%)", "675 paged blocks", "none partial", "sum over the sequences")
    for words in said:
        assert words in out


def test_json_is_one_object_with_the_documented_names(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", config, "--device", "h100-sxm", "--contexts", "8192,32768", "--weights-bytes", "15GiB", "--json"]
    assert run(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["sequence_bytes"]["8192"] == GIB
    assert sum(told["ledger"].values()) == told["device"]["memory_bytes"]
    assert told["capacity"]["blocks"] * told["capacity"]["block_bytes"] == told["ledger"]["kv"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("--tp", "--tensor-parallel-size"), ("--context", "--max-model-len"), ("--pp", "--pipeline-parallel-size")],
)
def test_vllms_flags_are_accepted(config: str, ours: str, theirs: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for flag in (ours, theirs):
        assert run(["plan", config, flag, "2", "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def wrong(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that wrong input gets; the exit code is 2 and nothing is printed beside it."""
    assert run(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in wrong(capsys, "./nowhere/config.json")


def test_no_model_at_all_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--layers, --kv-heads and --head-dim" in wrong(capsys)
    assert "--layers, --kv-heads and --head-dim together" in wrong(capsys, "--layers", "3")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"', "\x00\x01", "[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert "config.json" in wrong(capsys, write(tmp_path, "m", text))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": 12}, "decoders"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({**LLAMA_8B, "hidden_size": -4096}, "hidden_size"),
        ({**LLAMA_8B, "num_key_value_heads": 7}, "must divide num_attention_heads=32"),
        ({**LLAMA_8B, "n_layer": 31}, "contradicts"),
        ({**LLAMA_8B, "num_hidden_layers": "32"}, "whole number"),
        ({}, "num_hidden_layers"),
    ],
    ids=["encoder", "encoder-decoder", "negative", "heads", "contradiction", "text", "empty"],
)
def test_a_config_that_cannot_be_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: object, says: str
) -> None:
    assert says in wrong(capsys, write(tmp_path, "m", told))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "-80GiB"], "memory"),
        (["--layers", "-1"], "at least 1"),
        (["--device", "h100"], "fits several"),
        (["--device", "h1oo"], "did you mean"),
        (["--tp", "3"], "must divide"),
        (["--kv-dtype", "fp5"], "use one of"),
        (["--contexts", "1,,2"], "whole number"),
        (["--utilization", "2"], "at most 1"),
        (["--tpp", "2"], "no such option"),
        (["--html", "/nowhere/at/all.html"], "cannot be written"),
        (["--compare", "h100-sxm,nothing-like-it"], "is not known"),
        (["--workload", "nowhere.csv"], "cannot be read"),
        (["--against", "nowhere.log"], "cannot be read"),
        (["--window", "5"], "manual form"),
    ],
)
def test_a_wrong_option_is_refused(
    config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in wrong(capsys, config, *arguments)


def test_a_type_that_a_kind_of_state_cannot_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "integers cannot hold" in wrong(capsys, write(tmp_path, "a", DEEPSEEK_V3), "--kv-dtype", "int8")
    assert "constant state" in wrong(capsys, write(tmp_path, "b", MAMBA_2_8B), "--kv-dtype", "fp8")


def test_several_models_are_planned_and_one_that_cannot_be_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = write(tmp_path, "good", LLAMA_8B), write(tmp_path, "bad", {})
    assert run(["plan", bad, good, good, "--json"]) == 2
    captured = capsys.readouterr()
    assert len([json.loads(line) for line in captured.out.splitlines()]) == 2
    assert captured.err.count("\n") == 1


def test_devices_stand_side_by_side_and_a_name_may_stand_for_several(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", config, "--compare", "a100-80gb,mi300x", "--price", "2", "--weights-bytes", "15GiB"]) == 0
    out = capsys.readouterr().out
    for words in ("A100-SXM4-80GB", "A100-PCIe-80GB", "MI300X", "sequences of 131,072", "dollars per million"):
        assert words in out


def test_the_table_of_devices_marks_what_is_unverified(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--list-devices"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^T4 .*unverified", out, re.MULTILINE)
    assert not re.search(r"^L4 .*unverified", out, re.MULTILINE)


def test_a_trace_is_a_workload(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023,100,28\n2023,1000,24\n")
    assert run(["plan", config, "--workload", str(trace), "--context", "2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["workload"]
    assert (found["requests"], found["mean_tokens"], found["max_tokens"]) == (2, 576, 1024)
    trace.write_text('{"input_length": 100, "output_length": 28}\n')
    assert run(["plan", config, "--workload", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["max_tokens"] == 128


class Tags(HTMLParser):
    """Every tag closed in order, and nothing fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "rect", "line", "polyline", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line", "polyline"):
            assert self.open.pop() == tag


def test_the_page_is_one_file_with_charts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, page = write(tmp_path, "m", {**QWEN_35_27B, "_name_or_path": "x"}), tmp_path / "plan.html"
    assert run(["plan", model, "--device", "h100-sxm", "--weights-bytes", "50GiB", "--lengths", "100,9000",
                "--html", str(page)]) == 0  # fmt: skip
    tags = Tags()
    tags.feed(page.read_text("utf-8"))
    assert tags.open == []
    assert tags.sources == []
    assert tags.seen.count("svg") == 5
    assert "script" not in tags.seen
    assert "ledger" in capsys.readouterr().out.lower()


def test_a_name_from_outside_cannot_become_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, page = write(tmp_path, "<b onload=x>", LLAMA_8B), tmp_path / "plan.html"
    assert run(["plan", model, "--html", str(page)]) == 0
    assert "<b onload" not in page.read_text("utf-8")


def test_a_plan_takes_a_few_times_the_imports_of_its_tables_and_no_torch(config: str) -> None:
    plan = (
        "import sys; from octavo.cli.main import run; "
        f"code = run(['plan', {config!r}, '--device', 'h100-sxm', '--json']); "
        "assert not {'torch', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    # Of the same machine at the same time: seconds would be those of whoever else is on it.
    assert processor_seconds(plan) < 5 * processor_seconds("import numpy, typer, rich.table, rich.console")


def processor_seconds(code: str) -> float:
    """Of a Python that runs it: the least of three."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)
