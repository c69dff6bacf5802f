"""Models that keep keys and values in eight bits, through the real engine.

In float64, so that no noise tips a number over the edge of its rounding: what is compared must be
equal almost to the last bit. The reference is Transformers' own forward over the whole text at once,
with a cache that rounds each key and value before it is read.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import tiny_llama
from tiny import Bench, tiny_config, tiny_prompts
from transformers import DynamicCache

from octavo import LLM, SamplingParams
from octavo.geometry.dtypes import BF16, FP8, FP32, INT8
from octavo.geometry.exceptions import with_layers_unquantised
from octavo.geometry.from_config import geometry_from_config
from octavo.kernels.cpu import instruction_sets
from octavo.kernels.quantise import dequantise, quantise
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.models.bridge import cache_name
from octavo.models.trial import Trial, subjects
from octavo.runtime.arena import QUANTISED
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.sampler import Sampler
from octavo.scheduling.events import Preempted

WANTED = 12
NOISE = 1e-5
"""Of a logit, absolute: float32 norms and softmaxes inside the models. One value rounded otherwise moves more."""
SPOILT = 0xFF


class Listening(Sampler):
    """Keeps the logits that it chose from."""

    def __init__(self, *args):
        super().__init__(*args)
        self.sequence_in = {}
        self.seen = {}

    def admit(self, admission):
        self.sequence_in[admission.row] = admission.sequence_id
        super().admit(admission)

    def takes_largest(self, rows):
        return False

    def sample(self, logits, rows, positions):
        for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            self.seen[self.sequence_in[row], position] = logits[i].clone()
        return super().sample(logits, rows, positions)


class RoundingCache(DynamicCache):
    """Transformers' cache, but a key or value is read as eight bits would have kept it."""

    def __init__(self, dtype, skipped=()):
        super().__init__()
        self.dtype, self.skipped = dtype, skipped

    def update(self, key, value, layer, *args, **kwargs):
        if layer not in self.skipped:
            key, value = (dequantise(*quantise(x, self.dtype)).to(x.dtype) for x in (key, value))
        return super().update(key, value, layer, *args, **kwargs)


class QuantisedBench(Bench):
    """The tiny models of the equality tests in float64, their keys and values in `kind`."""

    def __init__(self, name, kind, skipped=()):
        super().__init__(tiny_config(name), dtype=torch.float64)
        for model in (self.reference, self.served):
            model.set_experts_implementation("eager")  # the others have no float64
        if name in ("llama", "gemma3_text"):
            self.reference.set_attn_implementation("sdpa")  # the plain one has a softmax in float32
        self.kind, self.skipped = kind, skipped

    def executor(self, *, block_tokens=4, n_slabs=160, rows=8, backend=None):
        geometry = geometry_from_config(self.config, self.kind)
        geometry = with_layers_unquantised(geometry, list(map(str, self.skipped)), FP32)
        layout = make_layout(served_groups(geometry.layers), block_tokens, "tokens_heads")
        self.sampler = Listening(rows, self.vocab_size, self.device)
        made = TorchExecutor(self.served, layout, n_slabs, rows=rows, sampler=self.sampler, backend=backend)
        made.arena.bytes.fill_(SPOILT)
        return made, layout

    def trial(self, prompts, *, seed=0, longest_chunk=7, pause=None, n_slabs=160):
        """Tokens and logits of ragged plans in which every free block is spoilt at once."""
        executor, layout = self.executor(n_slabs=n_slabs)

        def spoil(group, slot):
            start = layout.address(group, slot)
            executor.arena.bytes[start : start + layout.groups[group].block_bytes].fill_(SPOILT)

        made = subjects(prompts, WANTED, pause=pause)
        trial = Trial(executor, layout, n_slabs, 8, seed=seed, spoil=spoil)
        trial.run(made, longest_chunk=longest_chunk)
        return [subject.outputs for subject in made], self.sampler.seen, trial

    def expected(self, text):
        """Transformers' logits after each position of `text`."""
        cache = RoundingCache(QUANTISED[self.kind.name], self.skipped)
        with torch.inference_mode():
            return self.reference(torch.tensor([text]), use_cache=True, **{cache_name(self.reference): cache}).logits[0]


@pytest.fixture(scope="module", params=[INT8, FP8], ids=str)
def kind(request):
    return request.param


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "gpt_oss", "gemma2"])
def bench(request, kind):
    return QuantisedBench(request.param, kind)


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


def test_ragged_chunks_equal_transformers_with_a_cache_that_rounds(bench):
    prompts = tiny_prompts()
    outputs, seen, _ = bench.trial(prompts, pause=2)
    rounding, worst = 0.0, 0.0
    for number, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        expected = bench.expected(prompt + tokens)
        with torch.inference_mode():
            plain = bench.reference(torch.tensor([prompt + tokens])).logits[0]
        for place in range(len(prompt), len(prompt) + WANTED):
            worst = max(worst, float((seen[number, place] - expected[place - 1]).abs().max()))
            rounding = max(rounding, float((plain[place - 1] - expected[place - 1]).abs().max()))
    assert worst < NOISE
    assert rounding > 100 * NOISE, "eight bits that change nothing prove nothing"


def test_a_batch_mate_never_changes_a_sequence(bench):
    prompts = tiny_prompts()
    together, logits, _ = bench.trial(prompts)
    for number in (1, 2, 5):
        alone, own, _ = bench.trial([prompts[number]])
        assert alone == [together[number]]
        mine = {place: value for (sequence, place), value in logits.items() if sequence == number}
        assert difference({place: value for (_, place), value in own.items()}, mine) < NOISE


def test_how_a_prompt_is_cut_changes_nothing(bench):
    prompts = tiny_prompts(3)
    _, whole, _ = bench.trial(prompts, longest_chunk=50)
    _, cut, _ = bench.trial(prompts, longest_chunk=3, seed=1)
    assert difference(whole, cut) < NOISE


def test_a_sequence_that_was_paused_goes_on_as_if_it_had_not_been(bench):
    prompts = tiny_prompts(4)
    _, straight, _ = bench.trial(prompts)
    _, paused, trial = bench.trial(prompts, pause=2, seed=2)
    assert trial.pauses == 1
    assert difference(straight, paused) < NOISE


def test_preemption_in_a_small_pool_gives_the_tokens_of_a_large_one(bench):
    prompts = tiny_prompts()
    roomy, events = bench.run(prompts, WANTED, n_slabs=200)
    assert not any(isinstance(event, Preempted) for event in events)
    scarce, events = bench.run(prompts, WANTED, n_slabs=18)
    assert any(isinstance(event, Preempted) for event in events)
    assert scarce == roomy


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_layers_that_are_left_out_are_not_rounded(name, kind):
    bench = QuantisedBench(name, kind, skipped=(1,))
    prompts = tiny_prompts(6)
    outputs, seen, _ = bench.trial(prompts, pause=1)
    for number, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        expected = bench.expected(prompt + tokens)
        for place in range(len(prompt), len(prompt) + WANTED):
            assert (seen[number, place] - expected[place - 1]).abs().max() < 100 * NOISE
    everywhere = QuantisedBench(name, kind).trial(prompts, pause=1)[1]
    assert difference(everywhere, seen) > 100 * NOISE


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_blocks_take_the_bytes_that_geometry_counts(name, kind):
    geometry = geometry_from_config(tiny_config(name).to_dict(), kind)
    layout = make_layout(served_groups(geometry.layers), 4, "tokens_heads")
    assert sum(group.block_bytes for group in layout.groups) == 4 * geometry.bytes_per_token
    head = 16
    half = geometry_from_config(tiny_config(name).to_dict(), BF16)
    assert geometry.bytes_per_token * 2 * head == half.bytes_per_token * (head + 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("llama"), initializer_range=0.5, max_position_embeddings=256, vocab_size=128,
        hidden_size=64, intermediate_size=64,
    )  # fmt: skip


def generated(checkpoint: Path, **asked: object) -> tuple[LLM, list[tuple[int, ...]]]:
    llm = LLM(str(checkpoint), block_size=4, audit=True, **asked)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, 128, size=n).tolist() for n in (30, 3, 61, 17, 44, 8)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    return llm, [output.outputs[0].token_ids for output in outputs]


def test_the_same_bytes_hold_as_many_more_tokens_as_the_element_types_say(checkpoint):
    sizes = {}
    for name in ("fp32", "bf16", "int8", "fp8"):
        llm, _ = generated(checkpoint, kv_cache_dtype=name, kv_cache_memory_bytes="1MiB")
        sizes[name] = llm.engine.deployment.kv_tokens
    assert sizes == {"fp32": 2048, "bf16": 4096, "int8": 6552, "fp8": 6552}  # heads of 16: 16 + 4 bytes to 32


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_scarce_pool_serves_what_a_roomy_one_does(checkpoint, name, backend):
    if backend == "cpu" and not instruction_sets():
        pytest.skip("the native kernels were not built")
    asked = {"kv_cache_dtype": name, "attention_backend": backend}
    _, roomy = generated(checkpoint, num_gpu_blocks_override=100, **asked)
    _, scarce = generated(checkpoint, num_gpu_blocks_override=25, **asked)
    assert scarce == roomy
    assert len({token for tokens in roomy for token in tokens}) > 20


def test_the_first_layer_is_left_out_when_asked(checkpoint):
    llm, _ = generated(checkpoint, kv_cache_dtype="int8", kv_cache_dtype_skip_layers=[0], max_kv_tokens=512)
    (group,) = llm.engine.deployment.layout.groups
    assert [field.dtype.name for field in group.fields] == ["fp32", "fp32", "int8", "int8"]
    assert group.block_bytes == 4 * 2 * 2 * (16 * 4 + 16 + 4)


def test_the_start_table_says_what_is_rounded(checkpoint):
    llm, _ = generated(checkpoint, kv_cache_dtype="fp8_e4m3", kv_cache_dtype_skip_layers="1", max_kv_tokens=512)
    told = json.dumps([(row.name, row.value, row.reason) for row in llm.engine.deployment.rows()])
    assert '"kv_cache_dtype", "fp8", "as asked, with a scale of 4 B' in told
    assert "layer 1 in fp32" in told
