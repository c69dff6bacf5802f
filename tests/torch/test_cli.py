"""The command line with a real, tiny model: what goes to stdout, what to stderr, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import edit_weights, tiny_llama, tiny_tokenizer

from octavo import LLM, SamplingParams
from octavo.cli.main import run

ROOT = Path(__file__).parents[2]
SMALL = ("--max-kv-tokens", "256")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return LLM(model, max_kv_tokens=256)


def generate(capsys: pytest.CaptureFixture[str], model: str, *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()  # what making a checkpoint prints
    assert run(["generate", "--model", model, *SMALL, *arguments]) == code
    return capsys.readouterr()


def told(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def process(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "octavo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100"},
    )


GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", "9")


def test_stdout_carries_the_text_alone(capsys: pytest.CaptureFixture[str], model: str, llm: LLM) -> None:
    out, err = generate(capsys, model, "hello world", "--raw", *GREEDY)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=9)
    assert out == llm.generate("hello world", params)[0].outputs[0].text + "\n"
    flat = " ".join(err.split())
    assert "bytes per token 128 " in flat
    assert re.search(r"KV cache +32,768 +32,768 ", err)  # predicted, measured
    assert "max_kv_tokens=256" in flat
    assert re.search(
        r"9 tokens, TTFT [\d.]+ m?s, TPOT [\d.]+ m?s, [\d.]+ tokens/s, peak 1 of 16 blocks, 0 preemptions, "
        r"ended by length",
        err,
    )


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str], model: str) -> None:
    out, err = generate(capsys, model, "hello", "-q", *GREEDY)
    assert out.strip()
    assert err == ""


def test_json_has_all_that_python_has(capsys: pytest.CaptureFixture[str], model: str, llm: LLM) -> None:
    asked = ("--raw", "--json", "--logprobs", "2", "--n", "2", "--seed", "5", "--ignore-eos", "--max-tokens", "6")
    out, _ = generate(capsys, model, "hello", "world again", *asked)
    params = SamplingParams(logprobs=2, n=2, seed=5, ignore_eos=True, max_tokens=6)
    for line, output in zip(told(out), llm.generate(["hello", "world again"], params), strict=True):
        assert line["prompt_token_ids"] == list(output.prompt_token_ids)
        for choice, expected in zip(line["outputs"], output.outputs, strict=True):
            assert choice["token_ids"] == list(expected.token_ids)
            assert choice["text"] == expected.text
            assert choice["finish_reason"] == "length"
            assert [item["token_id"] for item in choice["logprobs"]] == choice["token_ids"]
            assert choice["record"]["output_tokens"] == 6
            assert choice["record"]["allocated_blocks"] == {"full": 1}


def test_every_prompt_and_choice_gets_a_block_in_order(
    capsys: pytest.CaptureFixture[str], model: str, llm: LLM, tmp_path: Path
) -> None:
    file = tmp_path / "more.txt"
    file.write_text("world\n\nagain hello\n")
    out, _ = generate(capsys, model, "hello", "--prompts-file", str(file), "--raw", "--n", "2", *GREEDY)
    prompts = ["hello", "world", "again hello"]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=9)
    texts = [output.outputs[0].text for output in llm.generate(prompts, params)]
    blocks = [
        f"== {i + 1}/3 choice {choice}/2: {prompt!r}\n{text}\n"
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        for choice in (1, 2)
    ]
    assert out == "\n".join(blocks)


def test_the_chat_template_is_used_where_there_is_one(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    by_default = told(generate(capsys, model, "hello", "--json", *GREEDY)[0])[0]["prompt_token_ids"]
    chat = told(generate(capsys, model, "hello", "--json", "--chat", *GREEDY)[0])[0]["prompt_token_ids"]
    raw = told(generate(capsys, model, "hello", "--json", "--raw", *GREEDY)[0])[0]["prompt_token_ids"]
    assert by_default == chat == [1, 3, 5, 4]
    assert raw == [1, 5]
    bare = tiny_llama(tmp_path / "bare", tokenizer=False)
    tiny_tokenizer(template=None).save_pretrained(bare)
    out, err = generate(capsys, str(bare), "hello", "--json", *GREEDY)
    assert told(out)[0]["prompt_token_ids"] == raw
    assert "the model has no chat template" in " ".join(err.split())
    assert (
        "error: chat=True: this model has no chat template" in generate(capsys, str(bare), "hello", "--chat", code=2)[1]
    )


def test_what_the_template_refuses_is_the_users_to_know(capsys: pytest.CaptureFixture[str], model: str) -> None:
    _, err = generate(capsys, model, "hello", "--system-prompt", "be kind", "-q", code=2)
    assert "role system is not served" in err


def test_without_a_tokenizer_numbers_go_in_and_out(capsys: pytest.CaptureFixture[str], model: str, llm: LLM) -> None:
    out, _ = generate(capsys, model, "1 5, 6", "--skip-tokenizer-init", *GREEDY)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=9)
    expected = llm.generate({"prompt_token_ids": [1, 5, 6]}, params)[0].outputs[0].token_ids
    assert [int(number) for number in out.split()] == list(expected)
    _, err = generate(capsys, model, "1 five", "--skip-tokenizer-init", code=2)
    assert "error: prompt_token_ids='five': " in err


def test_the_default_length_gives_way_to_the_context(capsys: pytest.CaptureFixture[str], model: str) -> None:
    out, _ = generate(capsys, model, "hello", "--json", "--raw", "--ignore-eos")
    assert len(told(out)[0]["outputs"][0]["token_ids"]) == 64 - 2


def test_nothing_to_generate_is_an_empty_text(capsys: pytest.CaptureFixture[str], model: str) -> None:
    out, err = generate(capsys, model, "hello", "--max-tokens", "0")
    assert out == ""
    assert "0 tokens, TTFT none" in err


@pytest.mark.parametrize(
    ("arguments", "told_by"),
    [
        (("--max-tokens", "100"), "max_tokens=100: "),
        (("--max-model-len", "4096"), "max_model_len=4096: "),
        (("--stop-token-ids", "32"), "stop_token_ids=32: token ids run from 0 to 31"),
        (("--device", "cuda:9"), "device='cuda:9': "),
    ],
)
def test_what_only_the_model_knows_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], model: str, arguments: tuple[str, ...], told_by: str
) -> None:
    if torch.cuda.is_available() and "cuda:9" in arguments:
        pytest.skip("there is a CUDA device here, and its own message")
    out, err = generate(capsys, model, "hello", "-q", *arguments, code=2)
    assert out == ""
    assert err.startswith(f"error: {told_by}")
    assert err.count("\n") == 1


def test_a_damaged_checkpoint_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    damaged = tiny_llama(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    _, err = generate(capsys, str(damaged), "hello", "-q", code=2)
    assert err.startswith("error: model=")
    assert err.count("\n") == 1
    _, err = generate(capsys, str(tmp_path / "nowhere"), "hello", "-q", code=2)
    assert err.startswith("error: model=")


def test_a_sequence_that_fails_fails_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tiny_llama(tmp_path / "broken")
    edit_weights(broken, lambda tensors: tensors["lm_head.weight"].fill_(float("nan")))
    out, err = generate(capsys, str(broken), "hello", "world", "-q", "--raw", code=1)
    assert "== 2/2: 'world'" in out
    assert err == (
        "error: prompt 1: the model's logits are not finite\nerror: prompt 2: the model's logits are not finite\n"
    )


def test_the_ledger_is_printed_again_with_what_was_measured(capsys: pytest.CaptureFixture[str], model: str) -> None:
    out, err = generate(capsys, model, "hello", "-q", "--ledger", *GREEDY)
    assert out.strip()
    if "peaks are not measured" not in err:
        for label in ("temporary buffers", "logits"):
            assert re.search(rf"{label} +[\d,]+ +[\d,]+", err), err
    assert re.search(r"weights +([\d,]+) +\1 ", err)


def test_every_mechanism_is_named_in_the_table_and_changes_no_token(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    prompts = ("hello", "world again", "again again hello")
    plain = generate(capsys, model, *prompts, *GREEDY)[0]
    baseline = ("--allocation", "contiguous", "--batching", "request", "--admission", "guaranteed_no_evict", "--audit")
    out, err = generate(capsys, model, *prompts, *GREEDY, *baseline, "--pipeline-depth", "1")
    assert out == plain
    flat = " ".join(err.split())
    for value in ("allocation contiguous-max", "batching request", "admission guaranteed_no_evict"):
        assert value in flat


# -- inspect tables ---------------------------------------------------------------------------------


def test_tables_show_where_each_logical_block_lies(capsys: pytest.CaptureFixture[str], model: str) -> None:
    arguments = ("--max-kv-tokens", "64", "--block-size", "4", "--steps", "10")
    assert run(["inspect", "tables", "hello world", "again", "--model", model, *arguments]) == 0
    out, _ = capsys.readouterr()
    assert "A: 'hello world'\nB: 'again'\nstep 10: 2 running, none waiting, 6 blocks in use\n" in out
    slots = {}
    for line in out.splitlines()[-2:]:
        for name, index, slot in re.findall(r"([AB])(\d) -> (\d+) \w+", line):
            slots[name, int(index)] = int(slot)
    assert set(slots) == {(name, index) for name in "AB" for index in range(3)}
    assert len(set(slots.values())) == 6
    own = [slots["A", index] for index in range(3)]
    assert own != list(range(own[0], own[0] + 3))  # B's blocks lie between A's


def test_a_slot_is_seen_again_after_its_owner_has_ended(capsys: pytest.CaptureFixture[str], model: str) -> None:
    arguments = (
        "--max-kv-tokens",
        "64",
        "--block-size",
        "4",
        "--max-num-seqs",
        "1",
        "--max-tokens",
        "6",
        "--every-step",
    )
    assert run(["inspect", "tables", "hello", "world", "--model", model, *arguments]) == 0
    out, _ = capsys.readouterr()
    assert "1 running, waiting: B" in out
    assert "step 6: A has ended (length)\n" in out
    first, second = (set(re.findall(rf"{name}\d -> (\d+)", out)) for name in "AB")
    assert first & second
    assert out.endswith("all sequences have ended after 12 steps\n")


def test_tables_show_shared_slots_and_cached_ones(capsys: pytest.CaptureFixture[str], model: str) -> None:
    prompt = " ".join(["hello world again"] * 6)
    arguments = ("--max-kv-tokens", "128", "--block-size", "4", "--steps", "30", "--every-step", "--reuse", "prefix")
    assert run(["inspect", "tables", prompt, prompt, "--model", model, *arguments, "--max-tokens", "12"]) == 0
    out, _ = capsys.readouterr()
    assert re.search(r"A0 -> (\d+) ready x2, .*\n.*B0 -> \1 ready x2", out)
    assert re.search(r"0 running, none waiting, 0 blocks in use, [1-9]\d* cached\n", out)
    assert re.search(r": cached \d+, ", out)


def test_tables_refuse_a_number_of_steps_that_is_none(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert run(["inspect", "tables", "--model", model, "--steps", "0"]) == 2
    assert capsys.readouterr().err == "error: steps=0: must be at least 1\n"


# -- as a program -----------------------------------------------------------------------------------


INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("octavo", run_name="__main__")
"""
"""A shell starts what runs in its background with SIGINT ignored, tests included; people's terminals do not."""


def test_interrupting_it_ends_it_with_130_and_no_traceback(model: str) -> None:
    endless = ("--model", model, "--ignore-eos", "--raw", "--prompts-file", "-", "-q", "--max-tokens", "60")
    started = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "generate", *endless],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    started.stdin.write(b"hello\n" * 3000)
    started.stdin.close()
    started.stdin = None
    first = started.stdout.read(4)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert first == b"== 1"
    assert started.returncode == 130
    assert err.decode().splitlines() == ["interrupted"]


def test_a_pipe_that_closes_early_ends_it_quietly(model: str) -> None:
    started = process("generate", "hello", "--model", model, "--ignore-eos", "--raw", "-q", *SMALL)
    started.stdout.close()
    started.stdout = None
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (141, b"")


def test_text_read_from_a_pipe_goes_through_to_a_pipe(model: str, llm: LLM) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "generate", "--model", model, *SMALL, "--raw", "--prompts-file", "-", *GREEDY],
        input=b"hello again\n",
        capture_output=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=9)
    assert done.stdout.decode() == llm.generate("hello again", params)[0].outputs[0].text + "\n"
    assert max(map(len, done.stderr.decode().splitlines())) <= 120
    assert b"\x1b" not in done.stderr  # no progress, no colours where nobody looks
