"""Which attention kernels serve: `choose_attention`. What was asked, the device and what was built decide.

Owns the choice and its reason, which the start table prints. Whoever asks for kernels by name gets
those or an error; only `auto` falls back, and says that it did.
"""

from __future__ import annotations

import torch

from octavo.errors import ConfigError
from octavo.kernels.cpu import NativeAttention, load_native
from octavo.kernels.interface import AttentionBackend
from octavo.kernels.reference import ReferenceAttention


def choose_attention(asked: str, device: torch.device) -> tuple[AttentionBackend, str]:
    """The backend, and why it is that one. Raises `ConfigError` where what was asked for cannot be had."""
    if asked == "reference":
        return ReferenceAttention(), "as asked: plain torch"
    if device.type != "cpu":
        if asked == "cpu":
            raise ConfigError(
                "attention_backend", asked, f"these kernels do not run on {device}; use auto or reference"
            )
        return ReferenceAttention(), f"auto: plain torch on {device}"
    if load_native() is None:
        missing = "the native kernels were not built when octavo was installed; with a C++ compiler, install again"
        if asked == "cpu":
            raise ConfigError("attention_backend", asked, f"{missing}, or use auto or reference")
        return ReferenceAttention(), f"auto: plain torch, since {missing}"
    backend = NativeAttention()
    how = "auto" if asked == "auto" else "as asked"
    return backend, f"{how}: octavo's C++ kernels for {backend.instruction_set}"
