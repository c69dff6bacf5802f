"""What a damaged safetensors checkpoint gets: a `ModelError` that names the file, the fault and the remedy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError
from octavo.models.files import INDEX, WEIGHTS, find_checkpoint, fingerprint, hub_gguf, local_path
from octavo.models.weight_files import HEADER_LIMIT_BYTES, read_safetensors

CONFIG = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 6, "num_attention_heads": 1}
TENSORS = {"model.embed_tokens.weight": (6, 4), "model.layers.0.self_attn.k_proj.weight": (2, 4), "norm": (4,)}


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]], **changes: Any) -> None:
    """A whole file of float32 counters; `changes` replaces fields of single tensors' header entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in tensors.items():
        count = 1
        for extent in shape:
            count *= extent
        start = len(data)
        data += struct.pack(f"<{count}f", *range(count))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    for name, fields in changes.get("entries", {}).items():
        header[name] |= fields
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(tmp_path / WEIGHTS, TENSORS)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    placed = {}
    for number, name in enumerate(TENSORS, 1):
        placed[name] = f"model-{number:05d}-of-00003.safetensors"
        write_safetensors(tmp_path / placed[name], {name: TENSORS[name]})
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))
    return tmp_path


def refusal(path: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        find_checkpoint(Path(path))
    assert caught.value.field == "model"
    assert caught.value.remedy.rstrip()[-1] != ":"
    return str(caught.value)


def test_a_whole_checkpoint_is_read_to_the_byte(model: Path) -> None:
    found = find_checkpoint(model)
    assert {name: entry.shape for name, entry in found.tensors.items()} == TENSORS
    assert found.weights_bytes == 4 * (24 + 8 + 4)
    assert found.config == CONFIG
    assert found.notes == ()


def test_a_truncated_file_is_refused_with_the_missing_bytes(model: Path) -> None:
    path = model / WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])
    message = refusal(model)
    assert "model.safetensors is truncated" in message
    assert "10 bytes are missing" in message
    assert "Download the file again" in message


def test_a_file_cut_inside_its_header_is_refused(model: Path) -> None:
    path = model / WEIGHTS
    path.write_bytes(path.read_bytes()[:40])
    assert "its header ends at byte" in refusal(model)
    path.write_bytes(b"\x01\x02\x03")
    assert "truncated: 3 bytes" in refusal(model)


def test_bytes_after_the_last_tensor_are_refused(model: Path) -> None:
    path = model / WEIGHTS
    path.write_bytes(path.read_bytes() + b"\0" * 7)
    message = refusal(model)
    assert "model.safetensors is too long" in message
    assert "7 bytes follow" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 42\n", "git-lfs pointer"),
        (b"\n<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"<html>login</html>", "web page"),
        (b"PK\x03\x04" + b"\0" * 90, "PyTorch pickle"),
        (b"\x80\x02}q\x00." + b"\0" * 90, "PyTorch pickle"),
        (b"GGUF" + b"\0" * 90, "GGUF file"),
        (struct.pack("<Q", HEADER_LIMIT_BYTES + 1) + b"{" * 99, "more than the"),
        (struct.pack("<Q", 2**63) + b"{" * 99, "more than the"),
        (struct.pack("<Q", 9) + b"{not json", "is not JSON"),
        (struct.pack("<Q", 4) + b"null", "not an object"),
        (struct.pack("<Q", 24) + b'{"a": 1, "a": 2, "b": 3}', "names 'a' twice"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "without a sound dtype"),
        (struct.pack("<Q", 60000) + b"[" * 60000, "is not JSON"),
    ],
)
def test_what_stands_where_weights_should_be_is_named(model: Path, content: bytes, said: str) -> None:
    (model / WEIGHTS).write_bytes(content)
    message = refusal(model)
    assert said in message
    assert WEIGHTS in message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dtype": "F33"}, "dtype 'F33'"),
        ({"dtype": ["F32"]}, "the dtype ['F32']"),
        ({"shape": [2, 5]}, "it takes 40"),
        ({"shape": [-2, 4]}, "without a sound dtype, shape and data_offsets"),
        ({"shape": [2.0, 4]}, "without a sound dtype, shape and data_offsets"),
        ({"shape": None}, "without a sound dtype, shape and data_offsets"),
        ({"data_offsets": [96]}, "without a sound dtype, shape and data_offsets"),
        ({"data_offsets": [95, 127]}, "overlaps the tensor before it"),
        ({"data_offsets": [104, 136]}, "leaves a gap before it"),
        ({"data_offsets": [2**60, 2**60 + 32]}, "gap"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(model: Path, fields: dict[str, Any], said: str) -> None:
    write_safetensors(model / WEIGHTS, TENSORS, entries={"model.layers.0.self_attn.k_proj.weight": fields})
    message = refusal(model)
    assert said in message
    assert WEIGHTS in message


def test_a_header_length_that_looks_like_a_pickle_is_no_pickle(tmp_path: Path) -> None:
    raw = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode().ljust(0x280)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 0x280) + raw + b"\0")
    assert path.read_bytes().startswith(b"\x80\x02")
    assert [entry.name for entry in read_safetensors(path)] == ["a"]


def test_shards_are_read_as_one_model(sharded: Path) -> None:
    assert set(find_checkpoint(sharded).tensors) == set(TENSORS)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    message = refusal(sharded)
    assert "1 of 3 weight files" in message
    assert "model-00002-of-00003.safetensors" in message
    assert "Fetch the missing files" in message


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model-00002-of-00003.safetensors is truncated" in refusal(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    write_safetensors(sharded / "model-00003-of-00003.safetensors", {"norm": (4,), "model.embed_tokens.weight": (6, 4)})
    message = refusal(sharded)
    assert "'model.embed_tokens.weight' is in two files" in message
    assert "model-00001-of-00003.safetensors and model-00003-of-00003.safetensors" in message


def test_an_index_that_names_a_tensor_the_shard_lacks_is_refused(sharded: Path) -> None:
    write_safetensors(sharded / "model-00003-of-00003.safetensors", {"other": (4,)})
    message = refusal(sharded)
    assert "'norm' is in model-00003-of-00003.safetensors, but no file has it" in message
    assert INDEX in message


def test_an_index_that_confuses_two_shards_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["norm"] = "model-00001-of-00003.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    write_safetensors(sharded / "model-00002-of-00003.safetensors", {"model.layers.0.self_attn.k_proj.weight": (2, 4),
                                                                     "norm": (4,)})  # fmt: skip
    assert "but model-00002-of-00003.safetensors has it" in refusal(sharded)


def test_tensors_the_index_does_not_list_are_told(sharded: Path) -> None:
    write_safetensors(sharded / "model-00003-of-00003.safetensors", {"norm": (4,), "extra": (1,)})
    assert "does not list 1 tensors: extra" in find_checkpoint(sharded).notes[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{not json", "is not JSON"),
        ("[]", "not an object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "outside its directory"),
        ("version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    ],
)
def test_a_damaged_index_is_refused(sharded: Path, content: str, said: str) -> None:
    (sharded / INDEX).write_text(content)
    message = refusal(sharded)
    assert said in message
    assert INDEX in message


def test_one_shard_alone_says_which_parts_are_missing(sharded: Path) -> None:
    for number in (2, 3):
        (sharded / f"model-{number:05d}-of-00003.safetensors").unlink()
    message = refusal(sharded / "model-00001-of-00003.safetensors")
    assert "2 of 3 parts are missing: model-00002-of-00003.safetensors, model-00003-of-00003.safetensors" in message
    (sharded / INDEX).unlink()
    assert "2 of 3 parts are missing" in refusal(sharded)


def test_all_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert f"{INDEX} is missing" in refusal(sharded)


def test_weights_alone_are_refused_with_the_directory_to_name(model: Path) -> None:
    message = refusal(model / WEIGHTS)
    assert "weights alone" in message
    assert str(model) in message


def test_pickled_weights_are_refused_with_the_remedy(model: Path) -> None:
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    for path in (model, model / "pytorch_model.bin"):
        message = refusal(path)
        assert "pytorch_model.bin" in message
        assert "Convert them to safetensors" in message


def test_a_directory_without_config_says_what_it_holds(model: Path) -> None:
    (model / "config.json").unlink()
    message = refusal(model)
    assert "no config.json" in message
    assert WEIGHTS in message


def test_an_empty_directory_and_one_without_weights_are_refused(model: Path, tmp_path: Path) -> None:
    (model / WEIGHTS).unlink()
    assert "there are no weights" in refusal(model)
    (tmp_path / "empty").mkdir()
    assert "it holds nothing" in refusal(tmp_path / "empty")


def test_an_adapter_beside_a_model_is_refused(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")
    assert "a model and an adapter" in refusal(model)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    message = refusal(tmp_path)
    assert "adapter" in message
    assert "Merge" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "config.json is not JSON"),
        ("", "config.json is empty"),
        ("3", "config.json is a JSON int"),
        ("\x00\x01", "config.json is not JSON"),
        ("{}", "model_type (found None)"),
        ('{"model_type": 3}', "model_type (found 3)"),
        (json.dumps(CONFIG | {"hidden_size": None}), "does not say hidden_size"),
        (json.dumps(CONFIG | {"num_hidden_layers": None}), "num_hidden_layers (the weights hold 1 layers)"),
        (json.dumps(CONFIG | {"vocab_size": None}), "does not say vocab_size"),
        (json.dumps(CONFIG | {"transformers_weights": "../x.safetensors"}), "transformers_weights"),
    ],
)
def test_a_damaged_config_is_refused(model: Path, content: str, said: str) -> None:
    (model / "config.json").write_text(content)
    message = refusal(model)
    assert said in message
    assert "config.json" in message


def test_a_file_where_a_directory_is_expected_is_refused(model: Path) -> None:
    assert "neither a .gguf file nor a directory" in refusal(model / "config.json")


def test_no_permission_is_said_with_the_remedy(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path.open

    def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == WEIGHTS:
            raise PermissionError(13, "Permission denied", str(self))
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)
    message = refusal(model)
    assert f"no permission to read {WEIGHTS}" in message
    assert "chmod u+r" in message


def test_a_directory_that_may_not_be_listed_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    assert "no permission to list" in refusal(model)


def test_a_failing_disk_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path.open

    def failing(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == WEIGHTS:
            raise OSError(5, "Input/output error")
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    assert "Input/output error" in refusal(model)


def test_a_link_to_nothing_is_said(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to(model / "gone")
    assert "which does not exist" in refusal(model)


def test_a_name_is_a_path_a_hub_id_or_an_error(model: Path) -> None:
    assert local_path(str(model)) == model
    assert local_path("HuggingFaceTB/SmolLM2-135M") is None
    assert local_path("gpt2") is None
    assert local_path("owner/name/file.gguf") is None
    assert hub_gguf("owner/name/deep/file.gguf") == ("owner/name", "deep/file.gguf")
    for wrong in ("/no/such/place", "./nothing", "a/b/c", "model.gguf", "", "  ", None, 3, "a b", "x\0y", "x" * 5000):
        with pytest.raises(ModelError) as caught:
            local_path(wrong)
        assert caught.value.field == "model"


def test_a_fingerprint_follows_the_weights_and_not_the_place(model: Path, tmp_path: Path) -> None:
    first = fingerprint(find_checkpoint(model))
    raw = (model / WEIGHTS).read_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", WEIGHTS):
        (copy / name).write_bytes((model / name).read_bytes())
    assert fingerprint(find_checkpoint(copy)) == first
    (copy / WEIGHTS).write_bytes(raw[:-1] + b"\x7f")
    assert fingerprint(find_checkpoint(copy)) != first


def test_a_long_path_is_shown_whole(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    assert str(deep) in refusal(deep)
