"""Tensors as native code reads them: `settled`.

Native code is given an address. What a collective of tensor parallelism gives back has none, or one where the sum
has yet to arrive: torch waits for it when it is next computed with.
"""

from __future__ import annotations

import torch

from octavo.errors import ConfigError


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or where it is one of another kind its numbers, once they are there. Raises `ConfigError`."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return tensor
    plain = tensor.clone()
    if type(plain) is not torch.Tensor:
        wanted = "native kernels read plain tensors; a shard goes to the module that holds shards"
        raise ConfigError("rows", type(tensor).__name__, wanted)
    return plain
