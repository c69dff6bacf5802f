"""octavo: an LLM serving engine whose subject is attention state.

This module owns the public names and the version. The names are lazy (PEP 562): `import octavo` loads
neither torch nor numpy, so that `octavo --version`, the pure core and whoever only catches our errors
start at once. Everything public is listed in docs/README.md, and a test holds the two lists equal.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvariantViolation,
    ModelError,
    OctavoError,
    PolicyError,
    RequestError,
)

if TYPE_CHECKING:
    from octavo.config import Config
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.planner.build import plan
    from octavo.scheduling.core import EngineCore
    from octavo.scheduling.request import SamplingParams, StructuredOutputs
    from octavo.server.async_llm import AsyncLLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CapacityError",
    "CompletionOutput",
    "Config",
    "ConfigError",
    "EngineCore",
    "EngineDeadError",
    "InvariantViolation",
    "ModelError",
    "OctavoError",
    "PolicyError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "plan",
]

_LAZY = {
    "AsyncLLM": "octavo.server.async_llm",
    "CompletionOutput": "octavo.engine.outputs",
    "Config": "octavo.config",
    "EngineCore": "octavo.scheduling.core",
    "LLM": "octavo.engine.llm",
    "RequestOutput": "octavo.engine.outputs",
    "SamplingParams": "octavo.scheduling.request",
    "StructuredOutputs": "octavo.scheduling.request",
    "plan": "octavo.planner.build",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
