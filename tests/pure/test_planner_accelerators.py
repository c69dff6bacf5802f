"""The table of accelerators: every row whole, found by name, extended by a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.planner.accelerators import GIB, device_named, devices_named, from_toml, shipped

OWN = """
[[accelerators]]
name = "My Board"
usable_gib = 64
mem_bw_gbs = 1000
dense_tflops = { bf16 = 200, fp8 = 400 }
host_bw_gbs_one_way = 31.5
source = "measured here"
"""


def test_every_row_has_its_facts_and_says_where_they_come_from() -> None:
    rows = shipped()
    assert len(rows) >= 50
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.memory_bytes > GIB
        assert row.bandwidth_bytes_per_s > 1e10
        assert row.flops_per_s["bf16"] > 1e12
        assert row.source


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("h100-sxm", "H100-SXM5-80GB"),
        ("H100 SXM5", "H100-SXM5-80GB"),
        ("h100-sxm5-80gb", "H100-SXM5-80GB"),
        ("mi300x", "MI300X"),
        ("rtx 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("l4", "L4"),
        ("t4", "T4"),
        ("gb10", "DGX Spark GB10"),
    ],
)
def test_a_device_is_found_by_parts_of_its_name(asked: str, name: str) -> None:
    assert device_named(asked).name == name


@pytest.mark.parametrize("row", shipped(), ids=lambda row: row.name)
def test_every_device_is_found_by_its_own_name(row: object) -> None:
    assert device_named(row.name) == row


def test_a_name_that_fits_several_lists_them_and_may_stand_for_all() -> None:
    with pytest.raises(ConfigError, match="a100-sxm4-80gb, a100-pcie-80gb"):
        device_named("a100-80gb")
    assert [row.name for row in devices_named("a100-80gb")] == ["A100-SXM4-80GB", "A100-PCIe-80GB"]


@pytest.mark.parametrize(("asked", "near"), [("h1oo", "h100"), ("mi30x", "mi300x"), ("rtx-4009", "rtx-40")])
def test_an_unknown_name_offers_those_nearest(asked: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_named(asked)
    assert f"did you mean {near}" in caught.value.remedy or near in caught.value.remedy


@pytest.mark.parametrize("asked", ["", "  ", "--"])
def test_a_name_without_letters_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match="name an accelerator"):
        device_named(asked)


def test_arithmetic_is_that_of_the_type_or_of_the_next_wider_one() -> None:
    h100, a100 = device_named("h100-sxm"), device_named("a100-sxm4-80gb")
    assert h100.flops(8) == 1978.9e12
    assert h100.flops(4) == 1978.9e12  # it has no fp4
    assert a100.flops(8) == 624e12  # int8, having no fp8
    assert a100.flops(16) == 312e12


def test_a_user_adds_a_device_and_may_correct_a_shipped_one(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN + OWN.replace("My Board", "h100-sxm5-80gb"))
    rows = from_toml(file)
    assert device_named("my board", rows).memory_bytes == 64 * GIB
    assert device_named("h100-sxm5-80gb", rows).bandwidth_bytes_per_s == 1e12
    assert not rows[0].verified


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not = [toml", "is not TOML"),
        ("x = 1", "no [[accelerators]] table"),
        ("[[accelerators]]\nusable_gib = 1", "needs a name"),
        (OWN.replace("64", "-1"), "usable_gib must be a number above 0"),
        (OWN.replace("bf16 = 200, ", ""), "needs at least bf16"),
    ],
)
def test_a_wrong_file_of_devices_is_refused_by_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_toml(file)
    assert says in caught.value.remedy


def test_a_missing_file_of_devices_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        from_toml("nowhere.toml")
