"""What a module does that its class and its plain weights do not tell: `more_than_weights`.

Whoever reads a module's weights once and never calls it again loses all else that it does: hooks (an all-reduce of
tensor parallelism is one), a `forward` put on the module itself, shards that are tensors of another kind. That may
change nothing on the day it is tried, in a world of one rank for instance, so it is asked here, not only tried.
"""

from __future__ import annotations

import torch
from torch import nn


def more_than_weights(module: nn.Module) -> str | None:
    """What that is, to follow the module's name in a sentence. None for a plain module; its children are not asked."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "has hooks"
    if _own_forward(module):
        return "has a forward of its own"
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and type(tensor) not in (torch.Tensor, nn.Parameter):
            return f"has a {type(tensor).__name__} as its {name}"
    return None


def more_inside(module: nn.Module, but: nn.Module | None = None) -> str | None:
    """The first of it in a module and all inside it, `but` one and what is inside that, as a sentence."""
    passed = set() if but is None else {id(inner) for inner in but.modules()}
    for name, inner in module.named_modules():
        if id(inner) not in passed and (what := more_than_weights(inner)) is not None:
            return f"{name or 'it'} {what}"
    return None


def _own_forward(module: nn.Module) -> bool:
    """Whether the module itself has one, other than its class's (which Transformers puts there at times)."""
    own = module.__dict__.get("forward")
    bound = getattr(own, "__self__", None) is module and getattr(own, "__func__", None) is type(module).forward
    return own is not None and not bound
