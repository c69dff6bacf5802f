"""Weights leave the file that they are mapped from, whatever has become of it, and keep their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import ModelError
from octavo.models import mapped
from octavo.models.mapped import leave_files, read_mappings

NUMBERS = {
    "large": torch.arange(300_000, dtype=torch.float32).view(500, 600),
    "narrow": torch.linspace(-3, 3, 999).to(torch.bfloat16),
    "bits": torch.tensor([True, False, True]),
    "one": torch.tensor(7.5, dtype=torch.float64),
}


class Model(torch.nn.Module):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(NUMBERS, tmp_path / "with a space.safetensors")
    return tmp_path / "with a space.safetensors"


def is_mapped(tensor: torch.Tensor, path: Path) -> bool:
    at, inode = tensor.data_ptr(), path.stat().st_ino
    return any(one.start <= at < one.end and one.inode == inode for one in read_mappings() or ())


def unchanged(model: Model) -> bool:
    return all(torch.equal(getattr(model, name), tensor) for name, tensor in NUMBERS.items())


def test_values_survive_whatever_is_written_to_the_file_later(path: Path) -> None:
    model = Model(load_file(path))
    assert is_mapped(model.large, path)
    leave_files(model)
    assert not any(is_mapped(tensor, path) for tensor in model.buffers())
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert unchanged(model)


def test_another_file_under_the_same_name_is_not_read(path: Path, tmp_path: Path) -> None:
    model = Model(load_file(path))
    save_file({name: torch.zeros_like(tensor) for name, tensor in NUMBERS.items()}, tmp_path / "other")
    (tmp_path / "other").rename(path)
    leave_files(model)
    assert unchanged(model)


def test_a_file_that_is_gone_is_copied_from_memory(path: Path) -> None:
    model = Model(load_file(path))
    path.unlink()
    leave_files(model)
    assert unchanged(model)


def test_a_file_that_became_shorter_is_told(path: Path) -> None:
    model = Model(load_file(path))
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ModelError, match="became shorter"):
        leave_files(model)


def test_parts_of_a_larger_tensor_and_transposed_ones_keep_their_values(path: Path) -> None:
    large = load_file(path)["large"]
    model = Model({"part": large[10:20], "turned": large.t()})
    leave_files(model)
    assert torch.equal(model.part, NUMBERS["large"][10:20])
    assert torch.equal(model.turned, NUMBERS["large"].t())
    assert not is_mapped(model.part, path)
    assert not is_mapped(model.turned, path)


def test_where_the_system_does_not_tell_all_are_copied(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(load_file(path))
    monkeypatch.setattr(mapped, "MAPS", tmp_path / "none")
    leave_files(model)
    monkeypatch.undo()
    assert not is_mapped(model.large, path)
    assert unchanged(model)
