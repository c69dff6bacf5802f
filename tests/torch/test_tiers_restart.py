"""What another run left on the disk: found by the same model under the same salt, by nobody else, and never wrongly."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from checkpoints import edit_weights, tiny_llama
from test_reuse import BLOCK, KINDS, Engine, bench
from tier_engines import TieredEngine

from octavo import LLM, SamplingParams
from octavo.memory.check_tiers import at_rest
from octavo.models.files import WEIGHTS, find_checkpoint, fingerprint
from octavo.scheduling.events import Transferred

# -- a restart as users see it --------------------------------------------------------------------

ASKED: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 40,
    "max_num_seqs": 4,
    "reuse": "prefix",
    "host_bytes": "1MiB",
    "disk_bytes": 1 << 20,
    "placement": "write_through",
    "audit": True,
}
PLAIN = {"host_bytes": 0, "disk_bytes": None, "placement": "write_back", "reuse": "none"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.5, max_position_embeddings=256)


def prompts() -> list[Any]:
    random = Random(3)
    return [{"prompt_token_ids": [random.randrange(3, 32) for _ in range(21 + i)]} for i in range(5)]


def answers(llm: LLM) -> tuple[list[tuple[int, ...]], list[dict[str, int]]]:
    """Tokens, and cached tokens by tier."""
    outputs = [output.outputs[0] for output in llm.generate(prompts(), GREEDY)]
    return [output.token_ids for output in outputs], [output.record.cached_tokens for output in outputs]


def served(checkpoint: Path, path: Path, **options: Any) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Cached tokens of each prompt by an engine over what `path` holds, and why the disk served no more."""
    asked = ASKED | options
    llm = LLM(str(checkpoint), disk_path=str(path), **asked)
    told, cached = answers(llm)
    tiering = llm.engine.core.scheduler.tiering
    assert tiering is not None
    while tiering.pending:
        llm.engine.step()
    assert at_rest(tiering)
    left: dict[str, int] = {}
    for store in llm.engine.core.mover.disk:  # type: ignore[union-attr]
        for reason, count in store.stats().left_aside.items():
            left[reason] = left.get(reason, 0) + count
    llm.engine.close()
    plain = LLM(str(checkpoint), **(asked | PLAIN | {"disk_shared": False}))
    assert told == answers(plain)[0]
    return cached, left


COLD: list[dict[str, int]] = [{}] * 5
KEPT = [{"disk": tokens - 1 if tokens % 4 == 0 else tokens // 4 * 4} for tokens in range(21, 26)]
"""All but the last position of a prompt of whole blocks, else the whole blocks."""


def other_weights(checkpoint: Path, made: Path, name: str = "model.layers.0.self_attn.v_proj.weight") -> Path:
    """With one number changed, the first of a tensor."""
    made.mkdir()
    for file in checkpoint.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    assert (made / WEIGHTS).exists()

    def nudge(tensors: dict[str, Any]) -> None:
        tensors[name][0, 0] += 0.5

    edit_weights(made, nudge)
    return made


def sampled(checkpoint: Path) -> str:
    return fingerprint(find_checkpoint(checkpoint))


@pytest.mark.parametrize("shared", [False, True])
def test_only_the_same_model_as_it_was_finds_what_an_earlier_process_left(
    checkpoint, shared, tmp_path, monkeypatch
) -> None:
    """A prompt cached by the process before came back fast, certain, and wrong (faults, 10)."""
    disk = tmp_path / "disk"
    assert served(checkpoint, disk, disk_shared=shared) == (COLD, {})
    rows = other_weights(checkpoint, tmp_path / "rows", "model.embed_tokens.weight")
    assert sampled(rows) == sampled(checkpoint), "a sample of the weights cannot tell the two apart"
    changed: dict[str, tuple[Path, dict[str, Any], str]] = {
        "other revision": (other_weights(checkpoint, tmp_path / "other"), {}, "wrong_fingerprint"),
        "one edited row": (rows, {}, "wrong_fingerprint"),
        "other kv dtype": (checkpoint, {"kv_cache_dtype": "int8"}, "wrong_"),
        "other dtype": (checkpoint, {"dtype": "bfloat16"}, "wrong_"),
        "other block size": (checkpoint, {"block_size": 8}, "wrong_"),
    }
    for name, (model, options, reason) in changed.items():
        beside = tmp_path / name
        shutil.copytree(disk, beside)
        cached, left = served(model, beside, disk_shared=shared, **options)
        assert cached == COLD, name
        assert left, name
        assert all(why.startswith(reason) for why in left), (name, left)
    beside = tmp_path / "other version"
    shutil.copytree(disk, beside)
    with monkeypatch.context() as later:
        later.setattr("octavo.engine.build.__version__", "9.9.9")
        cached, left = served(checkpoint, beside, disk_shared=shared)
    assert cached == COLD
    assert set(left) == {"wrong_fingerprint"}
    assert served(checkpoint, disk, disk_shared=shared) == (KEPT, {}), "the paired test"


# -- bounds of what copies take ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "routes"),
    [("transfer_bytes_per_second", ("demote", "promote")), ("disk_bytes_per_second", ("store", "load"))],
)
def test_copies_keep_the_bound_that_was_asked_for_their_link(option, routes, checkpoint, tmp_path) -> None:
    """Both ways of a link together; what the first process stored, the second one loads and promotes."""

    def moved(path: Path, **more: Any) -> tuple[list[int], float]:
        """Bytes of each order of these routes, by two processes, and the seconds that they took."""
        sizes: list[int] = []
        began = time.monotonic()
        for _ in range(2):
            llm = LLM(str(checkpoint), disk_path=str(path), **(ASKED | more))
            llm.engine.observers.append(
                lambda events: sizes.extend(
                    event.bytes for event in events if isinstance(event, Transferred) and event.route in routes
                )
            )
            for prompt in prompts():
                llm.generate([prompt], GREEDY)
            while llm.engine.core.has_work:
                llm.engine.step()
            llm.engine.close()
        return sizes, time.monotonic() - began

    free, _ = moved(tmp_path / "free")
    bound = sum(free) / 1.5
    kept, took = moved(tmp_path / "bound", **{option: bound, "transfer_timeout": 60.0})
    unawaited = 2 * max(kept)
    """No more than the last order of each process, behind which nobody waits."""
    assert sum(kept) > 2 * unawaited
    assert took >= (sum(kept) - unawaited) / bound


# -- salts, in every tier -------------------------------------------------------------------------


def tenants(engine: TieredEngine, prompt: list[int], salts: str, want: list[int]) -> list[dict[str, int]]:
    """Cached tokens of one prompt asked under each salt in turn."""
    found = []
    for salt in salts:
        number = engine.ask(prompt, len(want), salt=salt)
        first = len(engine.events)
        engine.finish()
        told = [token for event in engine.events[first:] if hasattr(event, "pairs") for _, token in event.pairs()]
        assert told == want
        found.append(engine.cached(number))
    return found


@pytest.mark.parametrize("digest", ["sound", "weak"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_salt_is_kept_apart_on_the_device_on_the_host_and_on_the_disk(name, digest, tmp_path) -> None:
    """A salt that one path honours and another ignores is no salt (faults, 6); nor does a hash of which all values are
    equal serve one tenant's state to another (faults, 4)."""
    made = bench(name)
    weak: dict[str, Callable[[bytes], bytes]] = {} if digest == "sound" else {"digest": lambda data: b"always this"}
    random = np.random.default_rng(4)
    prompt, others = random.integers(3, 120, size=17).tolist(), random.integers(3, 120, size=(3, 40)).tolist()
    want = Engine(made, reuse=False, slabs=100).run([prompt], 3)[0]
    slabs = made.executor(block_tokens=BLOCK)[1].slabs_for(50, 24) + 2
    options: dict[str, Any] = {"slabs": slabs, "path": tmp_path, "placement": "write_through", **weak}
    with TieredEngine(made, **options) as engine:
        first = tenants(engine, prompt, "aabb", want)
        assert first[0] == {}
        assert first[2] == {}
        if digest == "sound":
            assert first == [{}, {"device": 16}, {}, {"device": 16}]
            for other in others:
                engine.run([other], 8)
            assert tenants(engine, prompt, "cac", want) == [{}, {"host": 16}, {"device": 16}]
        engine.assert_at_rest()
    with TieredEngine(made, **options) as engine:
        cached = tenants(engine, prompt, "daeb", want)
        assert cached[0] == {}
        assert cached[2] == {}
        if digest == "sound":
            assert cached == [{}, {"disk": 16}, {}, {"disk": 16}]
        engine.assert_at_rest()


def test_nothing_that_was_reset_is_found_in_any_tier_or_by_a_later_run(tmp_path) -> None:
    made = bench("llama")
    random = np.random.default_rng(4)
    prompt, others = random.integers(3, 120, size=17).tolist(), random.integers(3, 120, size=(3, 40)).tolist()
    want = Engine(made, reuse=False, slabs=100).run([prompt], 3)[0]
    options: dict[str, Any] = {"slabs": 18, "path": tmp_path, "placement": "write_through"}
    with TieredEngine(made, **options) as engine:
        for other in [prompt, *others]:
            engine.run([other], 3)
        engine.core.reset_kept(0.0)
        assert tenants(engine, prompt, "aa", want)[0] == {}
        engine.core.reset_kept(0.0)
        engine.step()
    with TieredEngine(made, **options) as engine:
        assert engine.tiers.stored == ((),)
        assert tenants(engine, prompt, "a", want) == [{}]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_state_is_found_again_by_a_later_run(name, tmp_path) -> None:
    """Hybrid groups with blocks of unlike sizes once broke the hashes of another engine (faults, 12): here each kind
    either keeps what it computed or does not; none gives something else."""
    made = bench(name)
    text = np.random.default_rng(7).integers(3, 120, size=30).tolist()
    want = Engine(made, reuse=False, slabs=100).run([text], 6)
    for depth in (0, 1):
        with TieredEngine(made, slabs=60, path=tmp_path, placement="write_through", depth=depth) as engine:
            assert engine.run([text], 6) == want
            engine.assert_at_rest()
            found = engine.tally()
    assert found["disk tokens"] > 0
    assert found["load"] > 0
