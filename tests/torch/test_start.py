"""What a start leaves out, begins early and puts back."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.engine import early
from octavo.engine.start import imports_set_aside
from octavo.models.accounting import blank_model
from octavo.models.files import find_checkpoint
from octavo.models.load import load_checkpoint
from octavo.models.shapes_alone import shapes_alone

LEFT_OUT = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy")
STARTED = """
import json, sys
from octavo.cli.loading import start_engine
from octavo.engine.llm import LLM
from octavo.scheduling.request import SamplingParams
engine = start_engine({"model": sys.argv[1], "max_kv_tokens": 64}, quiet=True)
answers = LLM.from_engine(engine).generate([[1, 5, 6]], SamplingParams(temperature=0.0, max_tokens=4))
told = {"imported": [name for name in json.loads(sys.argv[2]) if name in sys.modules]}
told["tokens"] = list(answers[0].outputs[0].token_ids)
import torch, transformers
import transformers.masking_utils as masks
from transformers.utils.import_utils import create_import_structure_from_path, spread_import_structure
from pathlib import Path
models = str(Path(transformers.__file__).parent / "models")
told["item"] = type(masks.TransformGetItemToIndex()).__module__
told["disable"] = torch._dynamo.disable.__module__
told["real"] = sys.modules["torch._dynamo"].__file__
structure = spread_import_structure(create_import_structure_from_path(models))
whole = {name for names in structure.values() for held in names.values() for name in held}
told["missing"] = sorted(whole - set(dir(transformers.models)))[:9]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    directory = tiny_llama(tmp_path_factory.mktemp("tiny"))
    done = subprocess.run(
        [sys.executable, "-c", STARTED, str(directory), json.dumps(LEFT_OUT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout)


def test_a_command_serves_without_torchs_compiler_and_distributed_tensors(started):
    directory, told = started
    assert told["imported"] == []
    model = LlamaForCausalLM.from_pretrained(directory).eval()
    expected = model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=4, do_sample=False, pad_token_id=2)
    assert told["tokens"] == expected[0, 3:].tolist()


def test_what_was_left_out_is_torchs_own_when_somebody_asks_for_it_afterwards(started):
    _, told = started
    assert told["item"] == "torch._dynamo._trace_wrapped_higher_order_op"
    assert told["disable"].startswith("torch._dynamo")
    assert told["real"].endswith("__init__.py")


def test_transformers_knows_all_its_models_though_it_looked_for_them_once(started):
    assert started[1]["missing"] == []


def test_a_model_without_memory_has_the_shapes_of_the_real_one_and_its_frequencies(tmp_path):
    checkpoint = find_checkpoint(tiny_llama(tmp_path))
    config = LlamaConfig.from_pretrained(tmp_path)
    blank, real = blank_model(checkpoint, config), LlamaForCausalLM(config)
    assert {name: t.shape for name, t in blank.state_dict().items()} == {
        name: t.shape for name, t in real.state_dict().items()
    }
    assert all(parameter.is_meta for parameter in blank.parameters())
    served = load_checkpoint(str(tmp_path)).model
    for (name, own), (_, right) in zip(served.named_buffers(), real.named_buffers(), strict=True):
        assert torch.equal(own, right), name


def test_a_range_is_real_and_what_has_no_memory_is_not_filled():
    with shapes_alone(), torch.device("meta"):
        assert torch.equal(torch.arange(0, 6, 2), torch.tensor([0, 2, 4], device="cpu"))
        assert torch.nn.init.normal_(torch.empty(3)).is_meta
        assert torch.empty(3).is_meta
    with shapes_alone():
        filled = torch.nn.init.constant_(torch.empty(3), 2.0)
    assert filled.tolist() == [2.0, 2.0, 2.0]


def test_collections_during_a_start_pass_over_what_was_there_and_see_it_again_afterwards():
    assert gc.get_freeze_count() == 0
    with imports_set_aside():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_libraries_that_are_not_there_or_cannot_be_loaded_are_left_to_the_import(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    loaded = []
    monkeypatch.setattr(early.ctypes, "CDLL", lambda name, **_: loaded.append(Path(name).name))

    class Found:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(early.importlib.util, "find_spec", lambda _: Found)
    early.load_libraries()
    assert loaded == []
    (tmp_path / "lib").mkdir()
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so"):
        (tmp_path / "lib" / name).touch()
    early.load_libraries()
    assert loaded == (["libtorch_global_deps.so", "libtorch_cpu.so"] if sys.platform == "linux" else [])
    loaded.clear()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    early.load_libraries()
    assert loaded == []

    def broken(name, **_):
        raise OSError(name)

    (tmp_path / "lib" / "libtorch_cuda.so").unlink()
    monkeypatch.setattr(early.ctypes, "CDLL", broken)
    early.load_libraries()
