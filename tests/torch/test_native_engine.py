"""The engine over the native kernels: greedy tokens equal Transformers', and how the kernels are chosen and built."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_llama
from families import FAMILIES
from tiny import Bench, tiny_config, tiny_prompts

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.kernels import choose
from octavo.kernels.choose import choose_attention
from octavo.kernels.cpu import NativeAttention, instruction_sets, load_native
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.sampler import Sampler

WANTED = 12
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
built = pytest.mark.skipif(not instruction_sets(), reason="the native kernels were not built")

MODELS = [
    "llama",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "gpt_bigcode",
    "qwen3_moe",
    "gemma3n_text",
    "lfm2",
]


class NativeBench(Bench):
    """The same model served over native kernels."""

    instruction_set = None

    def executor(self, *, block_tokens=4, n_slabs=80, rows=8):
        backend = NativeAttention(self.instruction_set)
        layout = make_layout(
            served_groups(geometry_from_config(self.config, FP32).layers), block_tokens, backend.block_order
        )
        sampler = Sampler(rows, self.vocab_size, self.device)
        return TorchExecutor(self.served, layout, n_slabs, rows=rows, sampler=sampler, backend=backend), layout


@built
@pytest.mark.parametrize("name", [name for name in MODELS if name in FAMILIES])
@pytest.mark.parametrize("instruction_set", instruction_sets())
def test_tiny_models_give_the_tokens_of_generate(name, instruction_set):
    bench = NativeBench(tiny_config(name))
    bench.instruction_set = instruction_set
    prompts = tiny_prompts()
    served, _ = bench.serve(prompts, WANTED, pause=2)
    _, distinct = bench.compare(prompts, served, FAMILIES[name].tolerance)
    assert distinct > 10
    served, _ = bench.run(prompts, WANTED, n_slabs=30)
    bench.compare(prompts, served, FAMILIES[name].tolerance)


@built
def test_the_embedded_model_says_the_same_with_native_and_reference_kernels():
    prompts = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time " * 60]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    made = {}
    for backend in ("cpu", "reference"):
        llm = LLM(dtype="float32", attention_backend=backend, num_gpu_blocks_override=64, max_num_batched_tokens=128)
        outputs = llm.generate(prompts, params)
        assert {output.outputs[0].record.attention_mode for output in outputs} == {f"gqa/{backend}"}
        made[backend] = [output.outputs[0].token_ids for output in outputs]
    assert made["cpu"] == made["reference"]


@built
def test_the_start_table_names_the_kernels_and_why(tmp_path):
    model = str(tiny_llama(tmp_path))
    asked = LLM(model, attention_backend="reference", num_gpu_blocks_override=20)
    chosen = LLM(model, num_gpu_blocks_override=20)
    assert _row(asked).value == "reference"
    assert _row(chosen).value == "cpu"
    assert instruction_sets()[0] in _row(chosen).reason


def _row(llm):
    return next(row for row in llm.deployment.rows() if row.name == "attention_backend")


def test_without_the_extension_auto_runs_the_reference_and_says_so(monkeypatch):
    monkeypatch.setattr(choose, "load_native", lambda: None)
    backend, why = choose_attention("auto", CPU)
    assert backend.name == "reference"
    assert "not built" in why
    with pytest.raises(ConfigError, match="not built"):
        choose_attention("cpu", CPU)


def test_native_kernels_are_not_for_other_devices():
    assert choose_attention("auto", torch.device("cuda"))[0].name == "reference"
    with pytest.raises(ConfigError, match="cuda"):
        choose_attention("cpu", torch.device("cuda"))


@built
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the process's mappings are read from /proc")
def test_no_second_openmp_runtime_comes_into_the_process():
    script = (
        "import torch, pathlib\n"
        "from octavo.kernels.cpu import NativeAttention, load_native\n"
        "NativeAttention()\n"
        "print(load_native().thread_runtime())\n"
        "print(pathlib.Path('/proc/self/maps').read_text())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    runtime, _, maps = done.stdout.partition("\n")
    mapped = set(re.findall(r"\S*/lib\w*omp\w*[-.]\S*", maps))
    assert mapped == {runtime}


def _compile_kernels():
    spec = importlib.util.spec_from_file_location("compile_kernels", ROOT / "native" / "compile_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_compiler_that_is_not_there_is_named(monkeypatch):
    compile_kernels = _compile_kernels()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(compile_kernels.CannotBuild, match="no-such-compiler"):
        compile_kernels.build()


def test_the_portable_kernels_compile_without_anything_of_one_processor(tmp_path):
    compile_kernels = _compile_kernels()
    try:
        command = compile_kernels.compiler()
    except compile_kernels.CannotBuild as why:
        pytest.skip(str(why))
    piece = next(piece for piece in compile_kernels.kernel_pieces() if piece.name == "kernels_portable")
    flags = [*compile_kernels.COMMON, *piece.flags, "-O0", "-Wno-psabi"]
    text = subprocess.run(
        [*command, *flags, "-E", str(piece.source)], capture_output=True, text=True, check=True
    ).stdout
    assert "immintrin" not in text
    assert not re.search(r"\b_mm\d*_", text)
    subprocess.run([*command, *flags, "-c", str(piece.source), "-o", str(tmp_path / "kernels.o")], check=True)


@built
def test_the_extension_that_is_loaded_is_beside_the_kernels_it_was_made_for():
    assert Path(load_native().__file__).parent == Path(choose.__file__).parent
