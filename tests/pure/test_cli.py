"""The command line without a model: flags, refusals, exit codes, and the page made from the help texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.cli import get_docs_for_click

import octavo.simulate.explore
from octavo import __version__
from octavo.cli.main import app, run
from octavo.cli.options import SAMPLING, bias, number
from octavo.config import options
from octavo.errors import InvariantViolation
from octavo.scheduling.request import SamplingParams
from octavo.simulate.explore import Explored

ROOT = Path(__file__).parents[2]
GROUP = typer.main.get_command(app)
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def flags_of(*path: str) -> set[str]:
    command = GROUP
    for name in path:
        command = command.commands[name]
    return {flag for parameter in command.params for flag in parameter.opts}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a wrong command line says: one line on stderr, nothing on stdout, exit code 2."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").strip()


def in_a_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables},
    )


def test_the_version_is_printed_by_the_module_too() -> None:
    done = in_a_process("-m", "octavo", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"octavo {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["generate", "--help"], ["check", "--help"]])
def test_what_needs_no_model_loads_neither_torch_nor_numpy(arguments: list[str]) -> None:
    code = (
        f"import sys; from octavo.cli.main import run; assert run({arguments!r}) == 0; "
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = in_a_process("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]")


@pytest.mark.parametrize("command", [("generate",), ("inspect", "tables")])
def test_every_option_of_the_engine_is_a_flag_by_its_own_name(command: tuple[str, ...]) -> None:
    wanted = {option.flag for option in options()}
    assert wanted - flags_of(*command) == set()


def test_every_sampling_parameter_is_a_flag_but_those_that_no_text_goes_with() -> None:
    """Without detokenising there is nothing to print; a language that outputs belong to is no single value."""
    assert {option.name for option in SAMPLING} == set(SamplingParams.names()) - {"detokenize", "structured_outputs"}
    assert {option.flag for option in SAMPLING} - flags_of("generate") == set()


def test_without_a_command_the_help_is_shown_and_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert "generate" in out + err
    assert "error" not in err


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--blok-size", "--blok-size: no such option; did you mean --block-size?"),
        ("--block_size", "did you mean --block-size?"),
        ("--max-new-tokens", "did you mean --max-tokens"),
        ("--tensor-parallel-size", "is not served: one device per engine"),
        ("--enable-prefix-caching", "is spelled reuse here"),
        ("--zzz", "put -- before a prompt that starts with a dash"),
    ],
)
def test_an_unknown_flag_names_what_was_meant(capsys: pytest.CaptureFixture[str], flag: str, told: str) -> None:
    assert told in refusal(capsys, "generate", flag, "1", "prompt")


def test_an_unknown_command_names_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert "generate" in refusal(capsys, "generat")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--block-size", "0"], "block_size=0: "),
        (["--block-size", "-3"], "block_size=-3: "),
        (["--block-size", "many"], "block_size='many': must be a whole number"),
        (["--gpu-memory-utilization", "2"], "gpu_memory_utilization=2.0: "),
        (["--kv-cache-memory-bytes", "lots"], "kv_cache_memory_bytes='lots': "),
        (["--kv-cache-dtype", "int4"], "kv_cache_dtype='int4': not served yet"),
        (["--kv-cache-dtype-skip-layers", "0"], "kv_cache_dtype_skip_layers='0': kv_cache_dtype='auto' rounds no"),
        (["--dtype", "int3"], "dtype='int3': use one of"),
        (["--allocation", "slabs"], "allocation='slabs': use one of"),
        (["--device", "tpu"], "device='tpu': "),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill=False: "),
        (["--temperature", "-1"], "temperature=-1.0: use 0 for greedy"),
        (["--temperature", "nan"], "temperature=nan: "),
        (["--temperature", "warm"], "temperature='warm': "),
        (["--top-p", "0"], "top_p=0.0: "),
        (["--max-tokens", "-1"], "max_tokens=-1: "),
        (["--max-tokens", "1.5"], "max_tokens='1.5': "),
        (["--n", "0"], "n=0: "),
        (["--stop", ""], "stop='': "),
        (["--stop-token-ids", "x"], "stop_token_ids='x': "),
        (["--logit-bias", "x=1"], "logit_bias='x': every key must be a token id"),
        (["--logit-bias", "5"], "logit_bias='': every bias must be a number"),
        (["--logprobs", "2"], "logprobs=2: is reported in JSON alone; add --json"),
        (["--raw", "--system-prompt", "be kind"], "system_prompt='be kind': "),
        (["--prompts-file", "/nowhere/prompts"], "prompts_file='/nowhere/prompts': cannot be read"),
    ],
)
def test_a_wrong_value_is_refused_by_name_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.setitem(sys.modules, "octavo.engine.build", None)  # importing it would raise
    assert refusal(capsys, "generate", *arguments, "prompt").startswith(told)


@pytest.mark.parametrize("prompt", ["", "\udcff"])
def test_a_prompt_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], prompt: str) -> None:
    assert refusal(capsys, "generate", prompt).startswith("prompt=")


def test_no_prompt_at_all_says_how_to_give_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--prompts-file" in refusal(capsys, "generate")


def test_a_flag_without_its_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-tokens" in refusal(capsys, "generate", "prompt", "--max-tokens")


@pytest.mark.parametrize("form", ["flag", "variable"])
def test_a_traceback_is_shown_only_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("OCTAVO_TRACEBACK", "1" if form == "variable" else "")
    more = ["--traceback"] if form == "flag" else []
    assert run([*more, "generate", "--block-size", "0", "prompt"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: block_size=0")


def test_numbers_that_are_none_stay_text_for_the_check_that_knows_the_field() -> None:
    assert [number("int")(text) for text in ("3", "-1", "3.5", "x", "")] == [3, -1, "3.5", "x", ""]
    assert number("float")("1e-3") == 0.001
    assert bias(["5=1.5", "6=-2", "x=1"]) == {5: 1.5, 6: -2.0, "x": 1.0}


# -- check ------------------------------------------------------------------------------------------


def test_check_runs_every_invariant_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--steps", "240"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["invariant", "result", "states", "visited"]
    rows = [re.fullmatch(r"(\S+) +pass +([\d,]+)", line) for line in lines[1:-1]]
    assert all(rows)
    names = {row[1] for row in rows if row}
    assert {"references-equal-occurrences", "no-writable-alias", "progress", "handover"} <= names
    assert lines[-1].startswith(f"all {len(rows)} pass; ")


def test_check_as_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--steps", "120", "--seed", "7", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["seed"], told["steps"]) == (7, 120)
    assert all(item["passed"] and item["states_visited"] > 0 for item in told["invariants"])


def test_an_invariant_that_does_not_hold_fails_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Explored("sound", True, 12, ""), Explored("broken", False, 3, "two rows share slot 4")]
    monkeypatch.setattr(octavo.simulate.explore, "explore", lambda **_: found)
    assert run(["check"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"broken +FAIL +3\n +two rows share slot 4", out)
    assert "1 of 2 FAIL" in out


def test_the_handover_is_told_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--walk", "handover"]) == 0
    out = capsys.readouterr().out
    assert "A ends, its blocks return" in out
    assert re.search(r"C0 -> \d+", out)


@pytest.mark.parametrize("arguments", [["--walk", "away"], ["--steps", "0"], ["--steps", "x"], ["extra"]])
def test_check_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert refusal(capsys, "check", *arguments)


def test_a_broken_invariant_is_reported_with_its_dump(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise InvariantViolation("slots", "slot 4 is in two tables")

    monkeypatch.setattr(octavo.simulate.explore, "explore", broken)
    assert run(["check"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "error: invariant 'slots' does not hold: slot 4 is in two tables"


# -- inspect geometry -------------------------------------------------------------------------------


def config_file(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in (LLAMA | changes).items() if value is not None}))
    return path


@pytest.mark.parametrize("by", ["file", "directory"])
def test_geometry_prints_the_textbook_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str) -> None:
    path = config_file(tmp_path)
    assert run(["inspect", "geometry", str(path if by == "file" else tmp_path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"layers +32, gqa", out)
    assert re.search(r"0-31 +growing: k 8x128 bf16, v 8x128 bf16; 4,096 B per token", out)
    assert re.search(r"bytes per token +131,072\n", out)
    assert "at 8,192 tokens      1,073,741,824 bytes" in out


def test_geometry_as_json_follows_the_element_type_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, num_key_value_heads=32)
    assert run(["inspect", "geometry", str(path), "--json", "--kv-cache-dtype", "fp32", "--block-size", "32"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kv_dtype"], told["attention_mode"], told["num_layers"]) == ("fp32", "mha", 32)
    assert told["bytes_per_token"] == 32 * 2 * 32 * 128 * 4
    assert told["bytes_per_block"] == 32 * told["bytes_per_token"]


def test_geometry_tells_window_layers_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    path = config_file(tmp_path, model_type="gemma3_text", num_hidden_layers=4, layer_types=kinds, sliding_window=512)
    assert run(["inspect", "geometry", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"0-1 +window of 512: ", out)
    assert re.search(r"\n  2 +growing: ", out)
    assert "of them windowed" in out


def test_a_config_without_an_element_type_is_told_what_is_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", "geometry", str(config_file(tmp_path, torch_dtype=None))]) == 0
    assert "bf16 (the config names none; bf16 is assumed)" in capsys.readouterr().out


def test_geometry_refuses_what_has_no_config_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file" in refusal(capsys, "inspect", "geometry", str(tmp_path / "model.gguf"))
    assert "has no config.json" in refusal(capsys, "inspect", "geometry", str(tmp_path))
    assert "no such file" in refusal(capsys, "inspect", "geometry", str(tmp_path / "nowhere"))
    path = config_file(tmp_path, num_attention_heads="many")
    assert refusal(capsys, "inspect", "geometry", str(path)).startswith("num_attention_heads='many': ")
    assert "revision" in refusal(capsys, "inspect", "geometry", str(path), "--revision", "main")
    path.write_text("{")
    assert "is not JSON" in refusal(capsys, "inspect", "geometry", str(path))


# -- the page ---------------------------------------------------------------------------------------


def test_the_command_reference_is_made_from_the_help_texts() -> None:
    """`make docs` writes it; this is what it would write now."""
    context = SimpleNamespace(obj={typer.core.MARKUP_MODE_KEY: app.rich_markup_mode})
    with GROUP.make_context("octavo", [], resilient_parsing=True) as made:
        made.obj = context.obj
        made.info_name = None
        page = get_docs_for_click(obj=GROUP, ctx=made, name="octavo", title="The octavo command")
    assert (ROOT / "docs" / "cli.md").read_text() == f"{page.strip()}\n", "run make docs"
