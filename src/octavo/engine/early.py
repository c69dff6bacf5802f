"""What can be begun before anything large is imported, in threads that hold no interpreter lock: `begin_early`.

Loading torch's libraries takes the system's loader a quarter of a second, and checking that the default model lies
whole in the cache reads half a gigabyte; Python imports its own modules meanwhile. Owns those two. Where the
libraries cannot be loaded so, or belong to an accelerator's build, `import torch` loads them as ever.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.models.embedded import is_cached

SPINS = "20000"
"""Half a millisecond or so: longer than the Python between two calls of a step, far shorter than a slice of a core."""


@dataclass(frozen=True, slots=True)
class Early:
    """What has been begun."""

    libraries: Future[None]
    whole: Future[bool] | None
    """Whether the default model is in the cache; None where another was asked for."""


def begin_early(*, embedded: bool) -> Early:
    """`embedded`: whether the default model will be served."""
    spin_briefly()
    threads = ThreadPoolExecutor(2, "octavo-early")
    early = Early(threads.submit(load_libraries), threads.submit(is_cached) if embedded else None)
    threads.shutdown(wait=False)
    return early


def load_libraries() -> None:
    """torch's libraries into this process, in the order in which `import torch` does it."""
    if "torch" in sys.modules or sys.platform != "linux":
        return
    found = importlib.util.find_spec("torch")
    places = None if found is None else found.submodule_search_locations
    if not places:
        return
    folder = Path(places[0]) / "lib"
    first, large = folder / "libtorch_global_deps.so", folder / "libtorch_cpu.so"
    if first.exists() and large.exists() and not (folder / "libtorch_cuda.so").exists():
        with suppress(OSError):  # which `import torch` will explain
            ctypes.CDLL(str(first), mode=ctypes.RTLD_GLOBAL)
            ctypes.CDLL(str(large))


def spin_briefly() -> None:
    """Let idle threads of GCC's OpenMP runtime sleep soon, where neither the user nor an imported torch has decided.

    By default they spin for milliseconds, on a machine with other work in the time of those who compute.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
