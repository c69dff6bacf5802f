"""A host and a disk below the device as clients see them: salts in every tier, and clients that leave amid a load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest
from tests.server.serving import PATIENCE_S, Running, served_engine
from tests.torch.checkpoints import tiny_llama

from octavo.config import Config
from octavo.engine.build import build_engine
from octavo.memory.check_tiers import at_rest
from octavo.memory.transfers import Order

PROMPT = [3 + (7 * i) % 29 for i in range(33)]
"""33 tokens: 8 blocks of 4 and the last one, which is always computed."""
FILLERS = [[Random(i).randrange(3, 32) for _ in range(60)] for i in range(3)]
"""More than the device holds."""


class Gate:
    """Copies of `routes` stand still while it is shut."""

    def __init__(self) -> None:
        self.routes: tuple[str, ...] = ()
        self.open = threading.Event()
        self.reached = threading.Event()

    def shut(self, *routes: str) -> None:
        self.routes = routes
        self.open.clear()
        self.reached.clear()

    def before_batch(self, order: Order, first_block: int) -> None:
        if order.route in self.routes:
            self.reached.set()
            assert self.open.wait(PATIENCE_S)

    def loses(self, order: Order) -> bool:
        return False


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"), initializer_range=0.5, max_position_embeddings=256)


@contextmanager
def tiered(checkpoint: Path, disk: Path, *, gate: Gate | None = None, **settings: Any) -> Iterator[Running]:
    asked: dict[str, Any] = {
        "dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 18, "max_num_seqs": 4, "reuse": "prefix",
        "host_bytes": 1 << 20, "placement": "write_through", "disk_path": str(disk), "disk_bytes": 1 << 22,
        "transfer_timeout": 60.0, "audit": True,
    }  # fmt: skip
    engine = build_engine(Config.from_kwargs(model=str(checkpoint), **asked))
    mover: Any = engine.core.mover
    mover._faults = gate
    try:
        with served_engine(engine, **settings) as running:
            yield running
            if gate is not None:
                gate.open.set()
            running.until_empty()
            tiering = engine.core.scheduler.tiering
            assert tiering is not None
            running.until(lambda: at_rest(tiering), "nothing is held below")
    finally:
        if gate is not None:
            gate.open.set()
        engine.close()


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def cached(client: openai.OpenAI, prompt: list[int] = PROMPT, **extra: Any) -> dict[str, int]:
    """Cached tokens by tier; the usage tells their sum."""
    model = client.models.list().data[0].id
    answer: Any = client.completions.create(model=model, prompt=prompt, max_tokens=2, extra_body=extra)
    found: dict[str, int] = answer.usage.model_extra["octavo"][0]["cached_tokens"]
    assert answer.usage.prompt_tokens_details.cached_tokens == sum(found.values())
    return found


def crowd_out(client: openai.OpenAI) -> None:
    for filler in FILLERS:
        cached(client, filler)


def test_a_salt_is_honoured_on_the_device_the_host_and_the_disk(checkpoint: Path, tmp_path: Path) -> None:
    with tiered(checkpoint, tmp_path) as server, client_of(server) as client:
        assert cached(client, cache_salt="a") == {}
        assert cached(client, cache_salt="b") == {}
        assert cached(client, cache_salt="a") == {"device": 32}
        crowd_out(client)
        assert cached(client, cache_salt="c") == {}
        assert cached(client, cache_salt="a") == {"host": 32}
    with tiered(checkpoint, tmp_path) as server, client_of(server) as client:
        assert cached(client, cache_salt="d") == {}
        assert cached(client) == {}
        assert cached(client, cache_salt="a") == {"disk": 32}
        assert cached(client, cache_salt="b") == {"disk": 32}


def test_keys_are_kept_apart_in_every_tier_whatever_salt_a_caller_sends(checkpoint: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"api_keys": ("key of a", "key of b"), "isolate_api_keys": True}
    with tiered(checkpoint, tmp_path, **settings) as server:
        a, b = client_of(server, "key of a"), client_of(server, "key of b")
        assert cached(a) == {}
        crowd_out(a)
        assert cached(b) == {}, "on the host for the other key"
        assert cached(a) == {"host": 32}
        assert cached(a, cache_salt="mine") == {}
        assert cached(b, cache_salt="mine") == {}
    with tiered(checkpoint, tmp_path, **settings) as server:
        b, a = client_of(server, "key of b"), client_of(server, "key of a")
        assert cached(b) == {"disk": 32}, "its own"
        assert cached(a) == {"disk": 32}
    with tiered(checkpoint, tmp_path, api_keys=("key of c",), isolate_api_keys=True) as server:
        assert cached(client_of(server, "key of c")) == {}


def test_a_reset_forgets_every_tier_and_later_runs_find_nothing(checkpoint: Path, tmp_path: Path) -> None:
    with tiered(checkpoint, tmp_path) as server, client_of(server) as client:
        assert cached(client) == {}
        crowd_out(client)
        assert server.post("/v1/cache/reset", {}).status_code == 200
        assert cached(client) == {}
        assert server.post("/v1/cache/reset", {}).status_code == 200
    with tiered(checkpoint, tmp_path) as server, client_of(server) as client:
        assert cached(client) == {}


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_clients_that_leave_while_their_state_is_loaded_leave_nothing_behind(
    checkpoint: Path, tmp_path: Path, tier: str
) -> None:
    """Their slots are the copy's until it has ended, and free afterwards; others are served meanwhile."""
    gate = Gate()
    gate.open.set()
    if tier == "disk":
        with tiered(checkpoint, tmp_path) as server, client_of(server) as client:
            cached(client)
    with tiered(checkpoint, tmp_path, gate=gate) as server, client_of(server) as client:
        if tier == "host":
            cached(client)
        loading = server.core.scheduler.tiering.loading  # type: ignore[union-attr]
        for _ in range(3 if tier == "host" else 1):
            crowd_out(client)
            gate.shut("promote" if tier == "host" else "load")
            leaving = [server.begin("/v1/completions", {"prompt": PROMPT, "max_tokens": 5}) for _ in range(2)]
            assert gate.reached.wait(PATIENCE_S)
            server.until(lambda: len(loading) > 0, "somebody waits for state")
            for connection in leaving:
                connection.close()
            server.until(lambda: len(loading) == 0, "nobody waits any more")
            assert loading.held(), "the copy still has its slots"
            gate.open.set()
            server.until(lambda: not loading.held(), "the copy has ended")
        assert sum(cached(client).values()) == 32
