"""Who may import what: the pure core stays pure, and torch and asyncio stay in their packages.

Checked twice. By reading: the syntax tree of every file, imports inside functions included. By running:
a fresh interpreter imports every pure module with torch and transformers hidden while `__import__`
records which octavo module asked for what.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "octavo"

PURE = ("geometry", "memory", "policy", "scheduling", "cost", "simulate", "planner")
PURE_FILES = (
    "errors.py",
    "config.py",
    "config_fields.py",
    "config_used.py",
    "deployment.py",
    "deciding.py",
    "text_files.py",
)
"""Top-level modules that the core reads; as pure as the core itself."""

MAY_IMPORT_TORCH = {"runtime", "models", "kernels"}
MAY_IMPORT_ASYNCIO = {"server", "bench", "cluster"}
TORCH = {"torch", "transformers"}

NO_PLACE_IN_CORE = {
    "asyncio", "concurrent", "multiprocessing", "queue", "sched", "secrets", "select", "selectors", "signal", "socket",
    "ssl", "subprocess", "tempfile", "thread", "_thread", "threading", "time", "timeit", "uuid",
}  # fmt: skip
AMBIENT_CALLS = {
    "datetime.now", "datetime.utcnow", "datetime.today", "date.today", "os.urandom", "os.getpid", "os.times",
}  # fmt: skip
SEEDABLE = {"Random", "default_rng", "SeedSequence", "Philox", "PCG64", "PCG64DXSM", "SFC64", "MT19937", "RandomState"}
"""Sources of randomness that are reproducible when given a seed, and only then."""
SEEDED = {"Generator", "BitGenerator"}
"""Types that wrap one of those; harmless by themselves."""


def pure_paths() -> list[Path]:
    packages = [path for name in PURE for path in sorted((PACKAGE / name).rglob("*.py"))]
    return packages + [PACKAGE / name for name in PURE_FILES if (PACKAGE / name).exists()]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def impure_imports(tree: ast.AST) -> list[str]:
    allowed_here = {f"octavo.{name}" for name in PURE} | {f"octavo.{Path(name).stem}" for name in PURE_FILES}
    wrong = []
    for line, name in imported(tree):
        root = name.partition(".")[0]
        if root == "octavo":
            good = ".".join(name.split(".")[:2]) in allowed_here or name == "octavo.__version__"
        else:
            good = root == "numpy" or (root in sys.stdlib_module_names and root not in NO_PLACE_IN_CORE)
        if not good:
            wrong.append(f"line {line} imports {name}")
    return wrong


def unseeded_calls(tree: ast.AST) -> list[str]:
    """Calls whose answer depends on the moment, the process or a global generator."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        last = name.rpartition(".")[2]
        if last in SEEDABLE:
            bad = not node.args and not node.keywords
        elif name.startswith(("random.", "np.random.", "numpy.random.")):
            bad = last not in SEEDED
        else:
            bad = any(name == call or name.endswith(f".{call}") for call in AMBIENT_CALLS)
        if bad:
            wrong.append(f"line {node.lineno} calls {name}() without a seed or an argument that carries it")
    return wrong


def unordered_loops(tree: ast.AST) -> list[str]:
    """Loops straight over a set: their order is not the same in two runs."""
    wrong = []
    for node in ast.walk(tree):
        loops = [node] if isinstance(node, ast.For) else getattr(node, "generators", [])
        for loop in loops:
            over = loop.iter
            is_set = isinstance(over, ast.Set | ast.SetComp)
            is_set = is_set or (isinstance(over, ast.Call) and dotted(over.func) in {"set", "frozenset"})
            if is_set and not isinstance(node, ast.SetComp):
                wrong.append(f"line {over.lineno} loops over a set")
    return wrong


@pytest.mark.parametrize("path", pure_paths(), ids=module_name)
def test_a_pure_module_imports_the_standard_library_and_numpy_only(path: Path) -> None:
    assert impure_imports(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("path", pure_paths(), ids=module_name)
def test_a_pure_module_depends_on_nothing_but_its_arguments(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert unseeded_calls(tree) + unordered_loops(tree) == []


def test_only_runtime_models_and_kernels_import_torch() -> None:
    assert importers(TORCH, allowed=MAY_IMPORT_TORCH) == []


def test_only_server_bench_and_cluster_import_asyncio() -> None:
    assert importers({"asyncio"}, allowed=MAY_IMPORT_ASYNCIO) == []


def importers(roots: set[str], allowed: set[str]) -> list[str]:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in allowed:
            continue
        for line, name in imported(ast.parse(path.read_text())):
            if name.partition(".")[0] in roots or name.startswith("safetensors.torch"):
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    return wrong


RECORDER = """
import builtins, importlib, json, sys
forbidden, hidden, modules = (json.loads(text) for text in sys.argv[1:])
seen, original = [], builtins.__import__

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def recording(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if importer.partition(".")[0] == "octavo" and name.partition(".")[0] in forbidden:
        seen.append(f"{importer} imports {name}")
    return original(name, globals, locals, fromlist, level)

sys.meta_path.insert(0, Hidden())
builtins.__import__ = recording
for module in modules:
    importlib.import_module(module)
print(json.dumps([seen, sorted(sys.modules)]))
"""


def run_recorder(modules: list[str]) -> tuple[list[str], set[str]]:
    arguments = [json.dumps(sorted(NO_PLACE_IN_CORE | TORCH)), json.dumps(sorted(TORCH)), json.dumps(modules)]
    process = subprocess.run(
        [sys.executable, "-c", RECORDER, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert process.returncode == 0, process.stderr
    seen, loaded = json.loads(process.stdout)
    return seen, set(loaded)


def test_the_whole_core_imports_where_torch_is_not_installed() -> None:
    seen, loaded = run_recorder([module_name(path) for path in pure_paths()])
    assert seen == []
    assert not loaded & (TORCH | {"asyncio"})


def test_import_octavo_loads_neither_torch_nor_numpy() -> None:
    seen, loaded = run_recorder(["octavo"])
    assert seen == []
    assert not loaded & (TORCH | {"numpy", "asyncio"})


def test_hide_torch_hides_it_from_the_tests_too(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--hide-torch"):
        pytest.skip("run with --hide-torch, as `make test` does")
    for name in sorted(TORCH):
        with pytest.raises(ModuleNotFoundError, match="hidden by --hide-torch"):
            importlib.import_module(name)


def test_the_recorder_sees_an_import_of_a_clock(tmp_path: Path) -> None:
    """The check above can fail: a module named like ours that imports what it must not is reported."""
    fake = "import types, sys; m = types.ModuleType('octavo.fake'); exec('import time', m.__dict__)"
    (tmp_path / "culprit.py").write_text(fake)
    arguments = [json.dumps(["time"]), json.dumps([]), json.dumps(["culprit"])]
    process = subprocess.run(
        [sys.executable, "-c", RECORDER, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert json.loads(process.stdout)[0] == ["octavo.fake imports time"]


@pytest.mark.parametrize(
    "code",
    [
        "import torch",
        "def f():\n    from transformers import AutoConfig",
        "import time",
        "from threading import Lock",
        "from octavo.runtime import executor",
        "import yaml",
    ],
)
def test_reading_finds_an_impure_import(code: str) -> None:
    assert len(impure_imports(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    ["random.random()", "np.random.default_rng()", "np.random.rand(3)", "Random()", "datetime.datetime.now()"],
)
def test_reading_finds_a_call_that_two_runs_answer_differently(code: str) -> None:
    assert len(unseeded_calls(ast.parse(code))) == 1


@pytest.mark.parametrize("code", ["random.Random(3)", "np.random.default_rng(seed)", "rng.random()", "np.array([1])"])
def test_reading_lets_seeded_randomness_pass(code: str) -> None:
    assert unseeded_calls(ast.parse(code)) == []


def test_reading_finds_a_loop_over_a_set_but_not_over_a_sorted_one() -> None:
    assert len(unordered_loops(ast.parse("[x for x in set(y)]\nfor x in {1, 2}: pass"))) == 2
    assert unordered_loops(ast.parse("for x in sorted(set(y)): pass")) == []
