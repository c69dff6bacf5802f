"""Faults that the memory hierarchies of other engines have had, each named in words, tried on real arenas and threads.

Others of them are elsewhere: stores that failed and stayed visible in test_tiers_faults.py, stale caches after a
restart and salts in test_tiers_restart.py, every hybrid of layers in test_tiers_equality.py.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import tiny_llama
from recurrent_models import recurrent_config
from test_reuse import BLOCK, Engine, bench
from test_tiers_equality import heads, room
from test_tiers_faults import Unsteady
from tier_engines import LONGEST, TieredEngine, converse
from transformers import AutoModelForCausalLM

from octavo import LLM, SamplingParams
from octavo.memory.check import is_empty
from octavo.memory.check_tiers import at_rest
from octavo.models.shrink import enliven
from octavo.scheduling.events import Arrived, Finished, Preempted, Transferred

SESSIONS = int(os.environ.get("OCTAVO_SESSIONS", "4"))
CONTEXT = int(os.environ.get("OCTAVO_SESSION_TOKENS", "2048"))


def words(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 120, size=count).tolist()


def pressed(**options: Any) -> TieredEngine:
    """A pool in which eight sequences have to give way to each other, with nothing kept for reuse."""
    slabs, _, rows = room("llama")
    return TieredEngine(bench("llama"), slabs=slabs, rows=rows, host_slabs=60, preemption="offload", **options)


def used(engine: TieredEngine) -> int:
    """Host slabs that are not free."""
    return engine.tiering.host.pool.slabs - engine.tiering.host.pool.free.count


# -- aborts -------------------------------------------------------------------------------------------


def test_an_abort_after_offload_gives_the_host_memory_back() -> None:
    """Clients left after their state had gone to the host, and it stayed there for ever (faults, 2)."""
    with pressed(reuse=False) as engine:
        size = engine.tiers.host.bytes.numel()
        for cycle in range(5):
            made = [engine.ask(words(20 + i, 10 * cycle + i), 40) for i in range(8)]
            until = time.monotonic() + 30
            while not (engine.cache.suspensions and used(engine)):
                assert time.monotonic() < until
                engine.step()
            for number in made:
                assert engine.core.abort(number, 0.0)
            engine.finish()
            engine.assert_at_rest()
            assert used(engine) == 0
            assert not engine.cache.suspensions
        assert engine.tally()["offload"] >= 5
        assert engine.tiers.host.bytes.numel() == size, "all of it was there from the start"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_aborts_while_copies_are_under_way_free_their_memory_after_them(seed, depth, tmp_path) -> None:
    """An abort between the end of a sequence and the end of its write to the host leaked the slots, the seat and the
    host's memory (faults, 3). Here every copy is slow, and aborts come at random moments of a block's life."""
    random, faults = Random(seed), Unsteady(slow=0.5, delay_s=0.01, seed=seed)
    faults.on = True
    opening = words(17, 99)
    with pressed(path=tmp_path, placement="write_through", faults=faults, depth=depth) as engine:
        live: list[int] = []
        aborted = 0
        for number in range(16):
            live.append(engine.ask(opening[: random.randrange(18)] + words(12, number % 7), 16))
            for _ in range(random.randrange(6)):
                engine.step()
            if random.random() < 0.6:
                victim = live.pop(random.randrange(len(live)))
                under_way = engine.tiering.pending
                aborted += engine.core.abort(victim, 0.0) and under_way
        engine.finish()
        engine.assert_at_rest()
    assert aborted > 2, "some came amid copies"


def test_memory_is_not_free_while_a_copy_touches_it() -> None:
    """Freed while the transfer ran, it was somebody else's when the bytes arrived (faults, 3)."""
    gate, faults = threading.Event(), Unsteady()
    faults.before_batch = lambda order, first: gate.wait(20)  # type: ignore[method-assign]
    with pressed(reuse=False, faults=faults) as engine:
        made = [engine.ask(words(20 + i, i), 40) for i in range(8)]
        while not engine.of(Preempted):
            engine.step()
        assert [event.action for event in engine.of(Preempted)][:1] == ["offload"]
        for _ in range(3):
            engine.step()
        for number in made:
            engine.core.abort(number, 0.0)
        engine.step()
        held = engine.tiering.parking.held()
        assert {tier for tier, _, _ in held} == {0, 1}
        assert not is_empty(engine.cache)
        assert used(engine) == len({slot for tier, _, slot in held if tier == 1})
        gate.set()
        engine.finish()
        engine.assert_at_rest()
        assert used(engine) == 0


# -- layouts ------------------------------------------------------------------------------------------


@functools.cache
def expected_of_heads(count: int) -> list[list[int]]:
    return converse(Engine(heads(count), reuse=False, slabs=900).run)


@pytest.mark.parametrize("block_tokens", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_heads_are_not_taken_for_keys_and_values(count, block_tokens, tmp_path) -> None:
    """A layout with two KV heads, or two positions a block, was read as keys and values (faults, 9): shapes were equal,
    and nothing else was looked at."""
    slabs = 2 * heads(count).executor(block_tokens=block_tokens)[1].slabs_for(LONGEST, 24) - 24 // block_tokens
    options: dict[str, Any] = {"preemption": "offload", "placement": "write_through", "block_tokens": block_tokens}
    host = slabs + slabs // 2  # so many of the conversations that hits there do not hang on when copies end
    with TieredEngine(heads(count), slabs=slabs, host_slabs=host, path=tmp_path, **options) as engine:
        assert converse(engine.run) == expected_of_heads(count)
        engine.assert_at_rest()
        found = engine.tally()
    assert min(found[what] for what in ("offload", "resumed", "host tokens", "disk tokens")) > 0


def test_the_hosts_bytes_are_a_total_whatever_kinds_of_state_a_model_keeps(tmp_path) -> None:
    """One engine allocated the size that was asked for keys and values, and the same again for states (faults, 13)."""
    model = AutoModelForCausalLM.from_config(recurrent_config("bamba")).eval()
    enliven(model, seed=7)
    model.save_pretrained(tmp_path)
    asked = 1 << 20
    llm = LLM(
        str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=60, block_size=4,
        max_num_seqs=4, max_num_batched_tokens=16, reuse="prefix", host_bytes=asked, preemption="offload", audit=True,
    )  # fmt: skip
    mover, deployment = llm.engine.core.mover, llm.deployment
    assert mover is not None
    assert deployment is not None
    assert len(deployment.layout.groups) == 2
    host = mover.copier.host.bytes.numel()  # type: ignore[attr-defined]
    assert asked - deployment.layout.slab_bytes < host <= asked
    assert host == deployment.host_slabs * deployment.layout.slab_bytes
    llm.engine.close()


# -- long sessions ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long")
    return tiny_llama(path, initializer_range=0.3, max_position_embeddings=CONTEXT, vocab_size=256)


@pytest.mark.timeout(120 + 60 * SESSIONS)
def test_long_sessions_in_lower_tiers_equal_cold_ones(long_model, tmp_path) -> None:
    """Past nine thousand positions, with some of the state off the device, answers became salad, and others each time
    (faults, 11). `OCTAVO_SESSIONS` and `OCTAVO_SESSION_TOKENS` make it as long as there is patience."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 512}
    blocks = 9 * CONTEXT // 128
    tiered = LLM(
        str(long_model), num_gpu_blocks_override=blocks, reuse="prefix", host_bytes=blocks * 3072,
        placement="write_through", preemption="offload", disk_path=str(tmp_path), disk_bytes=1 << 30, audit=True,
        **options,
    )  # fmt: skip
    cold = LLM(str(long_model), num_gpu_blocks_override=5 * CONTEXT // 16, **options)
    random = Random(11)
    sessions = [[random.randrange(3, 256) for _ in range(CONTEXT // 2 + 17 * i)] for i in range(SESSIONS)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    cached: dict[str, int] = {}
    for _ in range(3):
        asked = [{"prompt_token_ids": session} for session in sessions]
        want, told = cold.generate(asked, params), tiered.generate(asked, params)
        for session, right, output in zip(sessions, want, told, strict=True):
            assert output.outputs[0].token_ids == right.outputs[0].token_ids
            for tier, tokens in output.outputs[0].record.cached_tokens.items():
                cached[tier] = cached.get(tier, 0) + tokens
            session += [*output.outputs[0].token_ids, *(random.randrange(3, 256) for _ in range(CONTEXT // 16))]
    assert cached.get("host", 0) + cached.get("disk", 0) > CONTEXT
    while tiered.engine.core.has_work:
        tiered.engine.step()
    assert at_rest(tiered.engine.core.scheduler.tiering)  # type: ignore[arg-type]
    tiered.engine.close()
    print(f"{SESSIONS} sessions of up to {max(map(len, sessions))} tokens; cached by tier: {cached}")


# -- others of the kind ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_a_batch_of_one_hit_on_each_tier_and_a_miss_answers_as_each_alone(depth, tmp_path) -> None:
    made = bench("llama")
    texts = [words(18, 40 + i) for i in range(4)]
    asked = [text + words(3, 50 + i) for i, text in enumerate(texts)]
    want = [Engine(made, reuse=False, slabs=200).run([text], 6)[0] for text in asked]
    with TieredEngine(made, slabs=100, host_slabs=100, path=tmp_path, placement="write_through") as engine:
        engine.run([texts[0]], 2)
    with TieredEngine(made, slabs=22, host_slabs=60, path=tmp_path, placement="write_through", depth=depth) as engine:
        engine.run([texts[1]], 2)
        engine.run([words(60, 60)], 2)
        engine.run([texts[2]], 2)
        assert engine.run(asked, 6) == want
        last = [event.record.cached_tokens for event in sorted(engine.of(Finished)[-4:], key=lambda e: e.sequence_id)]
        assert [sorted(found) for found in last] == [["disk"], ["host"], ["device"], []]
        engine.assert_at_rest()


def test_who_waits_for_state_does_not_hold_up_who_computes(tmp_path) -> None:
    gate, faults = threading.Event(), Unsteady()
    gate.set()
    faults.before_batch = lambda order, first: gate.wait(20)  # type: ignore[method-assign]
    made = bench("llama")
    text = words(20, 1)
    want = [Engine(made, reuse=False, slabs=200).run([prompt], 9)[0] for prompt in (text, words(9, 3))]
    with TieredEngine(made, slabs=17, path=tmp_path, placement="write_through", faults=faults) as engine:
        engine.run([text], 2)
        engine.run([words(60, 2)], 2)
        gate.clear()
        first, other = engine.ask(text, 9), engine.ask(words(9, 3), 9)
        while other not in {event.sequence_id for event in engine.of(Finished)}:
            engine.step()
        assert not engine.of(Arrived)
        assert first not in {event.sequence_id for event in engine.of(Finished)}
        gate.set()
        engine.finish()
        assert [event.sequence_id for event in engine.of(Arrived)] == [first]
        told: dict[int, list[int]] = {first: [], other: []}
        for event in engine.events:
            for number, token in event.pairs() if hasattr(event, "pairs") else ():
                if number in told:
                    told[number].append(token)
        assert [told[first], told[other]] == want
        assert any(event.route == "promote" and event.seconds > 0 for event in engine.of(Transferred))
        engine.assert_at_rest()


def test_a_prompt_kept_whole_below_is_sent_again_without_an_empty_query(tmp_path) -> None:
    """Exactly as many blocks as are kept, and nothing left to compute: another engine died (faults, 41)."""
    made = bench("llama")
    for length in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
        text, path = words(length, length), tmp_path / str(length)
        want = Engine(made, reuse=False, slabs=50).run([text], 3)
        for _ in range(2):
            with TieredEngine(made, slabs=20, path=path, placement="write_through") as engine:
                assert engine.run([text], 3) == want
                assert engine.run([text] * 3, 1) == [want[0][:1]] * 3
                engine.assert_at_rest()
