"""Models by hub id: the files that are fetched, and what each refusal of the hub becomes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny_llama
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from octavo.errors import ModelError
from octavo.models import hub
from octavo.models.load import load_checkpoint


def answer(monkeypatch: pytest.MonkeyPatch, found: Any) -> list[tuple[str, dict[str, Any]]]:
    """Let the hub give `found`, a path or an error, and keep what it was asked."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options))
        if isinstance(found, BaseException):
            raise found
        return str(found)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return asked


def test_a_hub_model_is_fetched_at_its_revision_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path)
    asked = answer(monkeypatch, tmp_path)
    loaded = load_checkpoint("owner/name", revision="v2")
    assert loaded.name == "owner/name"
    ((name, options),) = asked
    assert (name, options["revision"]) == ("owner/name", "v2")
    assert "*.safetensors" in options["allow_patterns"]
    assert not [pattern for pattern in options["allow_patterns"] if pattern.endswith((".bin", ".pt", ".py"))]
    (tmp_path / "model.safetensors").write_bytes(b"<html>")
    with pytest.raises(ModelError, match="web page"):
        load_checkpoint("owner/name")


def test_a_tokenizer_alone_is_fetched_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare, full = tiny_llama(tmp_path / "bare", tokenizer=False), tiny_llama(tmp_path / "full")
    asked = answer(monkeypatch, full)
    assert load_checkpoint(str(bare), tokenizer="owner/words").tokenizer.eos_token == "</s>"
    assert "*.safetensors" not in asked[0][1]["allow_patterns"]


def test_a_gguf_on_the_hub_is_fetched_with_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, inside: str, **_: Any) -> str:
        asked.append(inside)
        return str(tmp_path / inside)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert hub.fetch("owner/name/q4/a-00002-of-00002.gguf", None) == tmp_path / "q4/a-00002-of-00002.gguf"
    assert asked == ["q4/a-00001-of-00002.gguf", "q4/a-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("kind", "field", "said"),
    [
        (GatedRepoError, "model", "Accept them on its page, then `hf auth login`"),
        (RepositoryNotFoundError, "model", "no such model on the hub"),
        (RevisionNotFoundError, "revision", "owner/name has no such revision"),
        (LocalEntryNotFoundError, "model", "Name a local directory"),
        (ConnectionResetError, "model", "Try again, or name a local directory"),
    ],
)
def test_what_the_hub_refuses_is_explained(monkeypatch: pytest.MonkeyPatch, kind: Any, field: str, said: str) -> None:
    answer(monkeypatch, kind.__new__(kind))
    with pytest.raises(ModelError) as caught:
        load_checkpoint("owner/name", revision="main")
    assert caught.value.field == field
    assert said in str(caught.value)


def test_a_directory_here_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_llama(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    asked = answer(monkeypatch, OSError("the hub was asked"))
    assert load_checkpoint("gpt2").path == Path("gpt2")
    assert asked == []
    shutil.rmtree("gpt2")
    with pytest.raises(ModelError, match="the hub was asked"):
        load_checkpoint("gpt2")
