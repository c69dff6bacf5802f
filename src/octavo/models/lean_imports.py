"""Keeps Transformers from importing what a command that runs models on one machine never uses: `lean_imports`.

Transformers imports torch's compiler, to mark functions for it, and torch's distributed tensors; the two bring
sympy and half of torch. octavo compiles nothing and runs in one process. While its commands import Transformers,
Transformers is told that torch came without `torch.distributed`, which it supports, and the compiler's marks mark
nothing. Whatever else is asked of the compiler loads it, then and later.

Owns what is left out, and that nothing of it stays in the way of imports afterwards. Only for processes that are
octavo's own: another's program may want to compile or distribute the models that it loads by itself.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
ITEM_TO_INDEX = f"{COMPILER}._trace_wrapped_higher_order_op"
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators that change a function only when it is compiled."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Within it Transformers is imported without torch's compiler and distributed tensors.

    Does nothing where either has been imported already.
    """
    if "transformers" in sys.modules or COMPILER in sys.modules:
        yield
        return
    import torch  # noqa: F401 - what it imports itself comes first, and whole

    absent = _AbsentCompiler()
    sys.meta_path.insert(0, absent)
    try:
        import transformers.utils.import_utils as facts

        _without_distributed(facts)
        with _scanned_once(facts):
            yield
    finally:
        absent.leave()


def _without_distributed(facts: Any) -> None:
    """Transformers' own question, answered before any of its modules has asked it."""

    def no() -> bool:
        return False

    for asked in (facts, sys.modules["transformers.utils"]):
        asked.is_torch_distributed_available = no


@contextmanager
def _scanned_once(facts: Any) -> Iterator[None]:
    """Transformers looks through the sources of all its models twice, and finds the same: the first answer serves."""
    scan = facts.define_import_structure
    models = Path(facts.__file__).parent.parent / "models"

    def scanned(path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(path) != models / "__init__.py":
            return scan(path, prefix)
        found = scan(models, prefix="models")  # which it remembers, and to which it has added modules elsewhere
        return {
            needs: {name.removeprefix("models."): what for name, what in held.items() if name.startswith("models.")}
            for needs, held in found.items()
        }

    facts.define_import_structure = scanned
    try:
        yield
    finally:
        facts.define_import_structure = scan


class _AbsentCompiler(MetaPathFinder, Loader):
    """Stands where the compiler would be imported from, until `leave`."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        del path, target
        known = fullname in (COMPILER, ITEM_TO_INDEX)
        return ModuleSpec(fullname, self, is_package=fullname == COMPILER) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""

    def leave(self) -> None:
        """From here on the compiler is imported as ever."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name in (ITEM_TO_INDEX, COMPILER):
            parent, _, own = name.rpartition(".")
            if isinstance(sys.modules.get(name), _StandIn):
                del sys.modules[name]
            if isinstance(vars(sys.modules.get(parent, self)).get(own), _StandIn):
                delattr(sys.modules[parent], own)


class _StandIn(ModuleType):
    """What the compiler's marks are taken from. Asked for anything else, it gives way to the compiler."""

    def __init__(self, name: str, absent: _AbsentCompiler) -> None:
        super().__init__(name)
        self._absent = absent

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == COMPILER and name in _MARKS:
            return _unmarked
        if self.__name__ == ITEM_TO_INDEX and name == "TransformGetItemToIndex":
            return functools.partial(_item_to_index, self._absent)
        self._absent.leave()
        return getattr(importlib.import_module(self.__name__), name)


def _unmarked(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return (lambda marked: marked) if function is None else function


def _item_to_index(absent: _AbsentCompiler) -> Any:
    """Transformers' modules keep this one; it makes torch's own when it is called."""
    absent.leave()
    return importlib.import_module(ITEM_TO_INDEX).TransformGetItemToIndex()
