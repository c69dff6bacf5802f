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
    """A range that would have no memory is made on the CPU, with all that follows from it; what has none stays as it
    is where it would be filled with random numbers."""

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
        return func(*args, **given)
