"""Settings that all tests share.

Owns: `--hide-torch` (the pure core must work where torch is not installed), the `device` marker, one
thread and no network for every test, and the Hypothesis profile. Fixtures belong to the layer that
uses them, not here. Nothing in this file may import torch while the pure tests run.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

DEVICE_TESTS = Path(__file__).parent / "device"
HIDDEN = ("torch", "transformers")

# Before anything imports torch: many small operations are slower with threads, and results must not
# depend on how many cores a machine has.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# No test may fetch anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What is checked when a model is loaded is checked each time.
os.environ.setdefault("OCTAVO_VERDICTS", "off")

settings.register_profile(
    "octavo", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("ci", settings.get_profile("octavo"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "octavo")


class HiddenPackages(importlib.abc.MetaPathFinder):
    """Makes the named packages look as if they were not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {fullname!r} (hidden by --hide-torch)", name=fullname)
        return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--hide-torch", action="store_true", help="make torch and transformers look as if they were not installed"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--hide-torch"):
        return
    loaded = [name for name in HIDDEN if name in sys.modules]
    if loaded:
        raise pytest.UsageError(f"--hide-torch came too late: {', '.join(loaded)} is already imported")
    sys.meta_path.insert(0, HiddenPackages())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything under tests/device needs an accelerator, whether its author marked it or not."""
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)
    marked = []
    for item in items:
        if DEVICE_TESTS in item.path.parents:
            item.add_marker(pytest.mark.device)
        if item.get_closest_marker("device") is not None:
            marked.append(item)
    reason = missing_accelerator() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files with slow tests, then those with many: workers take files in this order, and no long one is left last."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    ordered = sorted(files.values(), key=lambda tests: (not any(map(is_slow, tests)), -len(tests)))
    return [item for tests in ordered for item in tests]


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def missing_accelerator() -> str | None:
    """Why device tests cannot run here, or None when they can."""
    try:
        import torch
    except ImportError:
        return "device test: torch is not installed or hidden"
    if torch.cuda.is_available():
        return None
    return f"device test: torch {torch.__version__} finds no CUDA device"
