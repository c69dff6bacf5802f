"""The rules of the house that a reader of one file cannot see broken: sizes, names, banned calls, pins.

CONTRIBUTING.md explains the rules. Each test names the places that break one; a place is mended, not
listed as an exception.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "octavo"
FILE_LINES = 450
FUNCTION_LINES = 80
CODE = [path for folder in ("src", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = [path for path in CODE if PACKAGE in path.parents]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TREES = {path: ast.parse(path.read_text()) for path in CODE}

BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BANNED_CALLS = {"eval", "exec", "torch.load", "os.system", "yaml.load"}
BANNED_FLAGS = {"allow_pickle", "shell", "trust_remote_code"}
NO_ASSERT = ("cli", "server", "config.py", "engine")
"""What takes input from people: an `assert` there would be input checked by something `-O` removes."""
CHANGING = ("time.", "uuid.", "secrets.", "os.urandom", "os.getpid", "random.random", "datetime.now", "tempfile.")
UNSEEDED = {"Random", "random.Random", "default_rng", "np.random.default_rng", "numpy.random.default_rng"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
SOMEBODYS_MACHINE = re.compile(r"(^|[^\w.])/(work|root|Users)/")


def named(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        named(path, number)
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and path != Path(__file__)
    ]


def test_files_are_short_enough_to_read_at_once() -> None:
    lengths = {named(path): len(path.read_text().splitlines()) for path in CODE}
    assert {name: length for name, length in lengths.items() if length >= FILE_LINES} == {}


def test_functions_fit_on_a_screen() -> None:
    long = {}
    for path in SOURCES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length >= FUNCTION_LINES:
                    long[f"{named(path, node.lineno)} {node.name}"] = length
    assert long == {}


def test_every_module_says_what_it_owns() -> None:
    assert [named(path) for path in CODE if path.read_text().strip() and not ast.get_docstring(TREES[path])] == []


def test_no_name_that_says_nothing() -> None:
    vague_files = [
        named(path) for path in CODE if path.stem in {"utils", "util", "helpers", "helper", "misc", "common"}
    ]
    vague_classes = [
        named(path, node.lineno)
        for path in CODE
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Handler", "Helper", "Utils"))
    ]
    assert vague_files + vague_classes == []


def test_nothing_is_left_unfinished() -> None:
    assert lines_matching(UNFINISHED, CODE) == []


def test_no_input_can_become_code() -> None:
    wrong = []
    for path in SOURCES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call):
                names = {dotted(node.func)}
                names |= {str(word.arg) for word in node.keywords if not is_false(word.value)} & BANNED_FLAGS
            else:
                continue
            if names & (BANNED_IMPORTS | BANNED_CALLS | BANNED_FLAGS):
                wrong.append(f"{named(path, node.lineno)} {', '.join(sorted(names))}")
    assert wrong == []


def test_input_is_never_checked_by_an_assert() -> None:
    places = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] in NO_ASSERT]
    assert [
        named(path, node.lineno) for path in places for node in ast.walk(TREES[path]) if isinstance(node, ast.Assert)
    ] == []


def test_no_file_speaks_of_somebodys_machine() -> None:
    settings = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / ".ci" / "run"]
    assert lines_matching(SOMEBODYS_MACHINE, [*CODE, *DOCUMENTS, *settings]) == []


def test_what_is_pinned_satisfies_what_is_asked() -> None:
    """Every direct dependency has exactly one pin, so that development and CI install the same everywhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    wanted = {re.split(r"[<>=!~\[; ]", line)[0].lower().replace("_", "-") for line in asked}
    pins = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert sorted(pins) == sorted(set(pins))
    assert wanted - set(pins) == set()


def changing_calls(tree: ast.Module) -> list[ast.Call]:
    """Calls made while `tree` is imported whose value may differ in another process."""
    found, waiting = [], list[ast.AST](tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += node.decorator_list
            continue
        if isinstance(node, ast.Call):
            name, keywords = dotted(node.func), {keyword.arg for keyword in node.keywords}
            if name == "gzip.compress" and "mtime" not in keywords:
                found.append(node)
            if name in UNSEEDED and not node.args and not keywords:
                found.append(node)
            if name.startswith(CHANGING) or (name.endswith("parametrize") and any(map(is_set, node.args[1:2]))):
                found.append(node)
        waiting += ast.iter_child_nodes(node)
    return found


def is_set(node: ast.expr) -> bool:
    made = isinstance(node, ast.Call) and dotted(node.func) in {"set", "frozenset"}
    return made or isinstance(node, ast.Set | ast.SetComp)


def test_every_process_collects_the_same_tests() -> None:
    """Workers compare what they collected: a test named by a clock or by chance fails a run now and then."""
    tests = {path: tree for path, tree in TREES.items() if ROOT / "tests" in path.parents}
    assert [named(path, call.lineno) for path, tree in tests.items() for call in changing_calls(tree)] == []
    broken = "X = gzip.compress(b'')\n@pytest.mark.parametrize('a', {1, 2})\ndef f(): time.time()\nY = [Random()]"
    assert len(changing_calls(ast.parse(broken))) == 3
