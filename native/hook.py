"""The package's build calls this before it makes a wheel: the CPU kernels are compiled if they can be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from compile_kernels import ROOT, CannotBuild, build


class NativeKernels(BuildHookInterface):  # type: ignore[misc, type-arg, unused-ignore]
    """Without a compiler the wheel is pure Python, and octavo says at start that it runs the reference kernels."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        try:
            made = build()
        except (CannotBuild, ImportError) as why:
            self.app.display_warning(f"octavo is installed without its CPU kernels: {why}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(f"/{made.relative_to(ROOT)}")
