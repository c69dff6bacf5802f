"""Every published config is planned, quickly, by every engine's rules; what must hold of all plans holds."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planner.build import plan
from octavo.planner.json_form import as_json
from octavo.planner.page import page
from octavo.planner.report import report
from octavo.planner.values import Plan

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published_configs.json").read_text("utf-8"))

ENGINES = ("octavo", "vllm-0.8", "vllm-0.11", "vllm", "sglang", "trtllm", "llamacpp")


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def test_all_of_them_take_under_five_seconds_of_processor_time() -> None:
    before = processor_s()
    for config in PUBLISHED.values():
        assert list(report(plan(config, device="h100-sxm")))
    assert processor_s() - before < 5


@pytest.mark.parametrize("engine", ENGINES)
def test_what_must_hold_of_every_plan_holds_whoever_charges(engine: str) -> None:
    for name, config in list(PUBLISHED.items())[ENGINES.index(engine) % 3 :: 3]:
        made = plan(
            config, memory="4TiB", weights_bytes="1TiB", runtime_bytes="1GiB", engine=engine, contexts="100,4000"
        )
        assert made.budget is not None, name
        assert made.capacity is not None, name
        assert sum(made.budget.by_label.values()) == 4 * 2**40, name
        for context, count in made.capacity.sequences.items():
            assert count * made.sequence_bytes[context] <= made.capacity.kv_bytes, name
            assert made.sequence_bytes_per_device[context] >= made.sequence_bytes[context], name
        assert made.capacity.sequences[100] >= made.capacity.sequences[4000] > 0, name
        assert made.capacity.fits, name
        charged = [aside for _, _, aside in made.curve]
        assert charged == sorted(charged), name
        assert json.dumps(as_json(made)), name
        assert page(made), name


def planned(config: dict[str, Any], ranks: int) -> Plan | None:
    """None where the sizes of the model do not divide."""
    try:
        return plan(config, tp=ranks)
    except ConfigError as error:
        if error.field != "tp":
            raise
        return None


def test_tensor_ranks_never_keep_more_than_one_device_would() -> None:
    for name, config in list(PUBLISHED.items())[::3]:
        one = plan(config)
        for ranks in (2, 8):
            many = planned(config, ranks)
            if many is None:
                continue
            assert many.sequence_bytes == one.sequence_bytes, name
            kept, whole = many.sequence_bytes_per_device, one.sequence_bytes_per_device
            assert all(kept[context] <= whole[context] for context in whole), name
