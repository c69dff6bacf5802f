"""Building a model without memory, and without what torch imports to reason about it: `shapes_alone`.

Transformers builds a model on torch's meta device first. What modules compute from a range of numbers there, such
as the frequencies of rotary embeddings, torch derives in Python, and so it does random numbers that are never made;
for either it imports its symbolic algebra: a third of a second for what nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class shapes_alone(TorchFunctionMode):  # noqa: N801 - a context, and nothing else
    """A range that would have no memory is made on the CPU, with all that follows from it until it meets what has none;
    what has none stays as it is where it would be filled with random numbers."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.arange and given.get("device") is not None and torch.device(given["device"]).type == "meta":
            given["device"] = "cpu"
        elif getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                return tensor
        try:
            return func(*args, **given)
        except RuntimeError:
            forms = _forms((args, given))
            if not {"cpu", "meta"} <= forms:
                raise
            return func(*_without_memory(args), **_without_memory(given))


def _forms(given: Any) -> set[str]:
    """Devices of the tensors inside."""
    if isinstance(given, torch.Tensor):
        return {given.device.type}
    inside = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else ()
    return set[str]().union(*map(_forms, inside))


def _without_memory(given: Any) -> Any:
    """The same, its tensors shapes alone."""
    if isinstance(given, torch.Tensor):
        return given.to("meta")
    if isinstance(given, dict):
        return {name: _without_memory(value) for name, value in given.items()}
    return type(given)(map(_without_memory, given)) if type(given) in (list, tuple) else given
