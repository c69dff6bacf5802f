"""Costs from kernel tables: a small set of tables written by a law, read again and put together as one step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cli.main import run
from octavo.cost.roofline import Factor
from octavo.cost.step import StepShape, run_seconds
from octavo.cost.tables import Link, Tables, TablesCost
from octavo.errors import ConfigError

TOKENS = (1, 8, 64, 512)
CHUNKS, CONTEXTS, DECODES = (0, 16, 32, 64), (0, 16, 64, 256), (0, 1, 2, 4)
LAYERS = 3
KERNELS = {"qkv_proj": 10.0, "o_proj": 5.0, "gate_up_proj": 20.0, "down_proj": 10.0, "act_fn": 1.0, "layernorm": 2.0,
           "embedding": 3.0, "final_layernorm": 4.0}  # fmt: skip


def dense_us(name: str, tokens: float) -> float:
    return KERNELS[name] * (1 + tokens / 100)


def attention_us(chunk: float, before: float, decodes: float, context: float) -> float:
    """Linear along every axis, as interpolation is; a mixed step is not its two phases added up."""
    if not chunk and not decodes:
        return 0.0
    phases = chunk * (2 + before / 10) / 10 + decodes * context / 50
    return 5 + phases - (3 if chunk and decodes else 0)


def write(folder: Path, *, lacking: tuple[float, ...] | None = None, zipped: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    rows = [f"{name},{tokens},{dense_us(name, tokens)}" for name in KERNELS for tokens in TOKENS]
    head = [
        f"{name},{count},{each * (10 + count)}"
        for name, each in (("lm_head", 2), ("sampler", 1))
        for count in (1, 4, 32)
    ]
    attention = []
    for chunk in CHUNKS:
        for before in CONTEXTS if chunk else (0,):
            for decodes in DECODES:
                if (not chunk and not decodes) or (chunk and decodes == DECODES[-1]):
                    continue
                for context in CONTEXTS[1:] if decodes else (0,):
                    key = (chunk, before, decodes, context)
                    if key != lacking:
                        attention.append(",".join(map(str, (*key, attention_us(*key)))))
    for name, header, lines in (
        ("dense", "layer,tokens,time_us", rows),
        ("per_sequence", "layer,sequences,time_us", head),
        ("attention", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention),
    ):
        text = "\n".join([header, *lines]) + "\n"
        if zipped:
            (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"{name}.csv").write_text(text)
    return folder


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> TablesCost:
    tables = Tables.read(write(tmp_path_factory.mktemp("tables")))
    return TablesCost(tables=tables, layers=LAYERS, hidden_size=64, host_s=Factor(0.0, "a test"))


def fixed_us(tokens: int, sampled: int) -> float:
    layer = sum(dense_us(name, tokens) for name in KERNELS if name not in ("embedding", "final_layernorm"))
    layer += dense_us("layernorm", tokens)
    once = dense_us("embedding", tokens) + dense_us("final_layernorm", tokens)
    return LAYERS * layer + once + 3 * (10 + sampled)


def test_a_decode_step_is_its_kernels_added_up(cost: TablesCost) -> None:
    shape = StepShape.decode([63, 255])
    expected = fixed_us(2, 2) + LAYERS * attention_us(0, 0, 2, (64 + 256) / 2)
    assert 1e6 * cost.step_seconds(shape) == pytest.approx(expected)


def test_between_what_was_measured_and_beyond_it_times_are_linear(cost: TablesCost) -> None:
    for start, count, decodes in ((0, 40, []), (100, 40, []), (0, 16, [39]), (30, 20, [39, 39]), (600, 100, [])):
        shape = StepShape.from_chunks([*decodes, start], [*(1 for _ in decodes), count], len(decodes) + 1)
        context = float(np.mean([start + 1 for start in decodes])) if decodes else 0.0
        expected = fixed_us(count + len(decodes), len(decodes) + 1)
        expected += LAYERS * attention_us(count, start, len(decodes), context)
        assert 1e6 * cost.step_seconds(shape) == pytest.approx(expected)


def test_a_chunk_beside_single_tokens_is_one_kernel_and_not_two(cost: TablesCost) -> None:
    prompt, decodes = StepShape.from_chunks([0], [32], 1), StepShape.decode([63, 63])
    mixed = StepShape.from_chunks([63, 63, 0], [1, 1, 32], 3)
    apart = cost.step_seconds(prompt) + cost.step_seconds(decodes)
    assert cost.step_seconds(mixed) < apart - LAYERS * 3e-6


def test_further_chunks_add_what_they_take_above_a_smallest_one(cost: TablesCost) -> None:
    shape = StepShape.from_chunks([0, 0], [64, 32], 2)
    extra = attention_us(32, 0, 0, 0) - attention_us(16, 0, 0, 0)
    expected = fixed_us(96, 2) + LAYERS * (attention_us(64, 0, 0, 0) + extra)
    assert 1e6 * cost.step_seconds(shape) == pytest.approx(expected)


def test_a_step_that_samples_nothing_has_no_head(cost: TablesCost) -> None:
    some, none = (StepShape.from_chunks([0], [32], sampled) for sampled in (1, 0))
    assert 1e6 * (cost.step_seconds(some) - cost.step_seconds(none)) == pytest.approx(33)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 400), min_size=1, max_size=9), st.integers(1, 70))
def test_a_run_costs_what_its_steps_cost_bit_for_bit(cost: TablesCost, positions: list[int], steps: int) -> None:
    shape = StepShape.decode(positions)
    singly = [cost.step_seconds(shape.later(step)) for step in range(steps)]
    assert run_seconds(cost, shape, steps).tolist() == singly


def test_ranks_exchange_activations_twice_a_layer(cost: TablesCost) -> None:
    link = Link(1e9, 5e-6)
    two = TablesCost(tables=cost.tables, layers=LAYERS, hidden_size=64, ranks=2, link=link, host_s=cost.host_s)
    shape = StepShape.decode([63, 255])
    exchange = 2 * LAYERS * (2 * 64 * 2 / 1e9 + 5e-6)
    assert two.step_seconds(shape) - cost.step_seconds(shape) == pytest.approx(exchange)
    with pytest.raises(ConfigError, match="link"):
        TablesCost(tables=cost.tables, layers=LAYERS, hidden_size=64, ranks=2)


def test_the_interval_of_a_step_is_around_its_seconds_and_the_hosts(cost: TablesCost) -> None:
    slow = TablesCost(tables=cost.tables, layers=LAYERS, hidden_size=64)
    shape = StepShape.decode([63, 255])
    low, high = slow.step_interval(shape)
    seconds = slow.step_seconds(shape) + slow.host_seconds(shape)
    assert (low / seconds, high / seconds) == pytest.approx(slow.interval)
    assert slow.host_seconds(shape) > 0


def test_plain_files_are_read_like_zipped_ones(cost: TablesCost, tmp_path: Path) -> None:
    tables = Tables.read(write(tmp_path / "plain", zipped=False))
    plain = TablesCost(tables=tables, layers=LAYERS, hidden_size=64, host_s=cost.host_s)
    shape = StepShape.from_chunks([63, 5], [1, 40], 2)
    assert plain.step_seconds(shape) == cost.step_seconds(shape)


def test_tables_that_lack_something_are_refused_by_what_is_lacking(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no dense\.csv"):
        Tables.read(tmp_path)
    with pytest.raises(ConfigError, match="'prefill_chunk': 32"):
        Tables.read(write(tmp_path / "hole", lacking=(32, 16, 1, 64)))
    folder = write(tmp_path / "broken", zipped=False)
    (folder / "dense.csv").write_text("layer,tokens,time_us\nqkv_proj,1,fast\n")
    with pytest.raises(ConfigError, match="row 2 has no number of at least 0 for time_us: 'fast'"):
        Tables.read(folder)
    (folder / "dense.csv").write_text("layer,tokens,time_us\nact_fn,1,1\nact_fn,2,1\n")
    with pytest.raises(ConfigError, match="qkv_proj"):
        Tables.read(folder)
    (folder / "attention.csv").write_text("prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n3,3,3,3,1\n")
    write(tmp_path / "again", zipped=False)
    (folder / "dense.csv").write_text((tmp_path / "again" / "dense.csv").read_text())
    with pytest.raises(ConfigError, match="powers of two"):
        Tables.read(folder)


CONFIG = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 300, "torch_dtype": "bfloat16",
          "max_position_embeddings": 4096}  # fmt: skip


def test_a_simulation_takes_its_steps_from_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "tp1")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    work = ["simulate", str(config), "--device", "rtx-4090", "--requests", "5", "--rate", "0.1", "--json"]
    work += ["--input-tokens", "40", "--output-tokens", "9"]
    found = []
    for cost in (f"tables:{tmp_path}", f"tables:{folder}", "roofline"):
        assert run([*work, "--cost", cost]) == 0
        found.append(json.loads(capsys.readouterr().out)["tpot_s"]["mean"])
    host_s = 1e-3
    steps = [fixed_us(1, 1) + LAYERS * attention_us(0, 0, 1, 41 + step) for step in range(8)]
    assert found[0] == pytest.approx(sum(steps) / 8e6 + host_s, rel=1e-3)
    assert found[1] == found[0] != found[2]
    for wrong in (["--cost", f"tables:{tmp_path / 'none'}"], ["--cost", f"tables:{tmp_path}", "--foreign-calibration"]):
        assert run([*work, *wrong]) == 2
