"""`octavo serve --executor sim` as a process: the same API, nothing computed, the cost model's pace."""

from __future__ import annotations

import time
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.server.test_serve_command import refused, started
from tests.torch.checkpoints import tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=2048, hidden_size=64)


def test_it_answers_like_the_real_server_at_the_pace_of_another_machine(model: Path) -> None:
    with started(str(model), "--executor", "sim", "--sim-device", "h100-sxm", "--max-num-seqs", "8") as server:
        assert "nothing is computed" in server.text
        asked = {"prompt": "hello world", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        begun = time.monotonic()
        answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        took = time.monotonic() - begun
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 60
        assert answer["choices"][0]["text"].split()[:2] == ["hello", "world"]
        assert took > 60 * 1e-3  # the host's millisecond a step, beside which a tiny model is nothing
        again = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        assert again["choices"] == answer["choices"]
        assert "octavo_" in httpx.get(f"{server.url}/metrics").text


def test_what_it_cannot_fake_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "executor='x'" in refused(capsys, str(model), "--executor", "x", "--port", "0")
    assert "dtype='bfloat16'" in refused(capsys, str(model), "--executor", "sim", "--dtype", "bfloat16", "--port", "0")
    assert "device=None" in refused(capsys, str(model), "--executor", "sim", "--port", "0")
