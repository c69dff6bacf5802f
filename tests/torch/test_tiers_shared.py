"""Two engines over one directory, both running: what one stores the other starts from, under the same salt alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from test_reuse import Engine, bench
from tier_engines import PATIENCE_S, TieredEngine

from octavo.runtime.disk_look import Looker


def step_until_found(engine: TieredEngine, blocks: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while engine.tiering.disk.blocks[0] < blocks:
        assert time.monotonic() < until, f"{engine.tiering.disk.blocks} of {blocks} blocks are found"
        engine.step()
        time.sleep(0.005)


def test_two_engines_that_share_a_folder_find_each_others_blocks_while_both_run(tmp_path) -> None:
    made = bench("llama")
    texts = [np.random.default_rng(seed).integers(3, 120, size=17).tolist() for seed in (4, 5)]
    want = Engine(made, reuse=False, slabs=100).run(texts, 3)
    options: dict[str, Any] = {"slabs": 18, "path": tmp_path, "placement": "write_through", "shared": True}
    with TieredEngine(made, **options) as one, TieredEngine(made, **options) as other:
        for teller, listener, i in ((one, other, 0), (other, one, 1)):
            assert teller.run([texts[i]], 3) == want[i : i + 1]
            step_until_found(listener, teller.tiering.disk.blocks[0])
            number = listener.ask(texts[i], 3)
            stranger = listener.ask(texts[i], 3, salt="another")
            listener.finish()
            assert listener.cached(number) == {"disk": 16}
            assert listener.cached(stranger) == {}
            assert listener.run([texts[i]], 3) == want[i : i + 1]
        one.assert_at_rest(counted=False)
        other.assert_at_rest(counted=False)


class Leaves:
    """A store in which something new lies at each look, or which cannot be looked through."""

    def __init__(self, broken: bool = False) -> None:
        self.looks, self.broken = 0, broken

    def appeared(self) -> list[bytes]:
        self.looks += 1
        if self.broken:
            raise OSError("gone")
        return [self.looks.to_bytes(32, "big")]


def test_a_look_tells_each_key_once_and_one_that_fails_is_tried_again() -> None:
    good, broken = Leaves(), Leaves(broken=True)
    looker = Looker([object(), good, broken], look_s=0.005)
    told: list[int] = []
    until = time.monotonic() + PATIENCE_S
    while len(told) < 5:
        assert time.monotonic() < until
        for one in looker.take():
            assert one.group == 1
            told += [int.from_bytes(key, "big") for key in one.keys]
        time.sleep(0.002)
    looker.close()
    assert told == list(range(1, len(told) + 1))
    assert broken.looks >= 4
    looks = good.looks
    time.sleep(0.02)
    assert good.looks == looks, "none begins after it was closed"


def test_where_nobody_shares_the_disk_no_thread_looks() -> None:
    looker = Looker([object()], look_s=0.001)
    assert not looker._thread.is_alive()
    assert looker.take() == []
    looker.close()
