"""Opening the tiers below the device: all or nothing, within the bytes given, and found again by the next run."""

from __future__ import annotations

import fcntl
import stat

import pytest
import torch
from tests.torch.movers import LAYOUT, block, ended, filled, give, key

from octavo.errors import ConfigError
from octavo.geometry.dtypes import FP32
from octavo.geometry.state import Component
from octavo.memory.groups import StateGroup
from octavo.memory.layout import make_layout
from octavo.runtime import disk_folder, disk_slots
from octavo.runtime import mover as mover_module
from octavo.runtime.arena import Arena
from octavo.runtime.tiers import SNAPSHOT_TOKENS, DiskAsked, open_tiers

torch.set_num_threads(1)

ASKED = 1 << 19


def test_the_host_is_an_arena_of_its_own_with_the_layout_of_the_device():
    device = filled(1)
    tiers = open_tiers(device, 3)
    assert tiers.host.n_slabs == 3
    assert tiers.host.layout is LAYOUT
    assert tiers.host.bytes.data_ptr() != device.bytes.data_ptr()
    assert not tiers.host.bytes.any()
    assert (tiers.disk_slots, tiers.stored) == ((), ())
    tiers.close()


@pytest.mark.parametrize("shared", [False, True])
def test_what_went_down_is_found_by_the_next_run_and_comes_up_as_it_was(tmp_path, shared):
    device = filled(1)
    want = [[block(device, group, slot) for slot in (1, 4)] for group in (0, 1)]
    disk = DiskAsked(tmp_path / "kept" / "here", ASKED, shared)
    tiers = open_tiers(device, 8, fingerprint="a model", disk=disk)
    for group in (0, 1):
        give(tiers.mover, "demote", group, (1, 4), (2, 3))
        ended(tiers.mover)
        give(tiers.mover, "store", group, (2, 3), (5, 0), (key(1), key(2)))
        ended(tiers.mover)
    tiers.close()

    device.bytes.zero_()
    again = open_tiers(device, 8, fingerprint="a model", disk=disk)
    assert [sorted(key for key, _ in stored) for stored in again.stored] == [[key(1), key(2)]] * 2
    for group, stored in enumerate(again.stored):
        slots = dict(stored)
        give(again.mover, "load", group, (slots[key(1)], slots[key(2)]), (6, 7), (key(1), key(2)))
        assert ended(again.mover)[-1].status == "done"
        give(again.mover, "promote", group, (6, 7), (0, 3))
        ended(again.mover)
        assert [block(device, group, slot) for slot in (0, 3)] == want[group]
    again.close()


@pytest.mark.parametrize("shared", [False, True])
def test_another_model_finds_nothing(tmp_path, shared):
    disk = DiskAsked(tmp_path, ASKED, shared)
    tiers = open_tiers(filled(1), 8, fingerprint="a model", disk=disk)
    give(tiers.mover, "store", 0, (2,), (5,), (key(1),))
    assert ended(tiers.mover)[-1].status == "done"
    tiers.close()
    other = open_tiers(filled(1), 8, fingerprint="another model", disk=disk)
    assert other.stored == ((), ())
    other.close()


def test_the_files_are_private_and_together_no_larger_than_was_asked(tmp_path):
    tiers = open_tiers(filled(1), 8, disk=DiskAsked(tmp_path / "kept", ASKED))
    files = sorted((tmp_path / "kept").iterdir())
    assert [file.name for file in files] == ["narrow.blocks", "narrow.uses", "wide.blocks", "wide.uses"]
    assert ASKED // 2 < sum(file.stat().st_size for file in files) <= ASKED
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert min(tiers.disk_slots) > 1
    tiers.close()


def test_groups_share_the_disk_by_what_a_position_of_each_takes(tmp_path):
    kv = (Component("k", (1, 256), FP32), Component("v", (1, 256), FP32))
    state = (Component("recurrent", (1 << 18,), FP32),)
    groups = (StateGroup("full", (0, 1), (kv, kv)), StateGroup("constant", (2,), (state,), per_sequence=True))
    layout = make_layout(groups, 16)
    tokens = [group.block_tokens for group in layout.groups]
    assert tokens == [16, 0]
    tiers = open_tiers(Arena(layout, 4), 4, disk=DiskAsked(tmp_path, 64 << 20))
    full, constant = tiers.disk_slots
    assert full * 16 == pytest.approx((constant - 1) * SNAPSHOT_TOKENS, rel=0.15)
    tiers.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_disk_too_small_for_a_block_of_each_group_is_refused_with_what_it_takes(tmp_path, shared):
    with pytest.raises(ConfigError, match=r"disk_bytes=1000: a block of each of the 2 groups takes \d+; give more"):
        open_tiers(filled(1), 8, disk=DiskAsked(tmp_path / "kept", 1000, shared))
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("asked", [1 << 45, 1 << 62, 10**30])
def test_a_disk_of_more_blocks_than_can_be_known_is_refused_and_leaves_nothing_open(tmp_path, asked, shared):
    with pytest.raises(ConfigError, match=r"blocks of .* give less") as caught:
        open_tiers(filled(1), 8, disk=DiskAsked(tmp_path, asked, shared))
    assert caught.value.field == "disk_bytes"
    open_tiers(filled(1), 8, disk=DiskAsked(tmp_path, ASKED, shared)).close()


@pytest.mark.parametrize("shared", [False, True])
def test_where_there_is_no_memory_to_know_the_blocks_by_the_disk_is_refused(tmp_path, shared, monkeypatch):
    def refuses(*_):
        raise MemoryError

    monkeypatch.setattr(disk_folder if shared else disk_slots, "Known", refuses)
    with pytest.raises(ConfigError, match=r"disk_bytes=.* memory to know them by; give less"):
        open_tiers(filled(1), 8, disk=DiskAsked(tmp_path, ASKED, shared))


@pytest.mark.parametrize("slabs", [0, 1 << 50])
def test_a_host_arena_that_cannot_be_had_is_told_in_the_words_of_the_option(slabs):
    with pytest.raises(ConfigError, match="memory") as caught:
        open_tiers(filled(1), slabs)
    assert caught.value.field == "host_bytes"
    assert caught.value.value == slabs * LAYOUT.slab_bytes


@pytest.mark.parametrize("shared", [False, True])
def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path, shared):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match="name another") as caught:
            open_tiers(filled(1), 8, disk=DiskAsked(path, ASKED, shared))
        assert (caught.value.field, caught.value.value) == ("disk_path", str(path))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_store_in_use_is_refused_and_the_ones_opened_before_it_are_closed(tmp_path):
    disk = DiskAsked(tmp_path, ASKED)
    with (tmp_path / "narrow.blocks").open("wb") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use"):
            open_tiers(filled(1), 8, disk=disk)
    open_tiers(filled(1), 8, disk=disk).close()


def test_stores_are_closed_where_the_host_cannot_be_pinned(tmp_path, monkeypatch):
    def refuses(*_):
        raise ConfigError("host_bytes", 1, "cannot be pinned")

    disk = DiskAsked(tmp_path, ASKED)
    with monkeypatch.context() as broken:
        broken.setattr(mover_module, "BlockCopier", refuses)
        with pytest.raises(ConfigError, match="pinned"):
            open_tiers(filled(1), 8, disk=disk)
    open_tiers(filled(1), 8, disk=disk).close()
