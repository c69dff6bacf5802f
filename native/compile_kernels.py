"""Compiles the CPU kernels into src/octavo/kernels/: `build`. The package's build calls it; so can a person.

Owns the compiler's flags and what is rebuilt: an object whose sources, flags and compiler are those of
the last time is taken from build/native. Links no OpenMP runtime: native/threads.h says why.

Invariant: where there is no compiler nothing is left behind that would be loaded; `CannotBuild` says
what is missing, and the package works without.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "native"
OBJECTS = ROOT / "build" / "native"
TARGET = ROOT / "src" / "octavo" / "kernels"

COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-DNDEBUG")
QUIET = ("-Wno-psabi",)
SETS = {
    "portable": (),
    "avx2": ("-DOCTAVO_AVX2", "-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-DOCTAVO_AVX512", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"),
        "-mprefer-vector-width=512",
    ),
}
SETS["avx512bf16"] = (*SETS["avx512"], "-mavx512bf16")
TABLES = {"portable": "kPortable", "avx2": "kAvx2", "avx512": "kAvx512", "avx512bf16": "kAvx512Bf16"}
LAYERS_ALONE = ("avx512bf16",)
"""Sets in which nothing but the small operations of layers gains."""
X86 = ("x86_64", "amd64")


class CannotBuild(Exception):
    """Something that compiling needs is not there, or compiling failed."""


@dataclass(frozen=True)
class Piece:
    """One object file."""

    name: str
    source: Path
    flags: tuple[str, ...]


def compiler() -> tuple[str, ...]:
    """The command of a C++ compiler: $CXX, or the first that is found."""
    asked = os.environ.get("CXX")
    for command in (asked,) if asked else ("c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return tuple(words)
    raise CannotBuild(f"CXX={asked}: not found" if asked else "no C++ compiler was found")


def kernel_pieces() -> list[Piece]:
    """The same source once for each instruction set that this kind of processor may have."""
    sets = SETS if platform.machine().lower() in X86 else {"portable": ()}
    return [
        Piece(
            f"{source}_{name}",
            SOURCES / f"{source}.cpp",
            ("-O3", f"-DOCTAVO_ISA={name}", f"-DOCTAVO_TABLE={TABLES[name]}", *flags),
        )
        for source in ("kernels", "linear_kernels", "layer_kernels")
        for name, flags in sets.items()
        if name not in LAYERS_ALONE or source == "layer_kernels"
    ]


def pieces() -> list[Piece]:
    """Everything that is compiled."""
    import nanobind

    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise CannotBuild(f"Python's headers are not installed: no {headers / 'Python.h'}")
    own = Path(nanobind.include_dir())
    includes = (f"-I{own}", f"-I{own.parent / 'ext' / 'robin_map' / 'include'}", f"-I{headers}")
    library = Path(nanobind.source_dir()) / "nb_combined.cpp"
    return [
        Piece("nanobind", library, ("-Os", "-w", "-fno-strict-aliasing", "-DNB_COMPACT_ASSERTIONS", *includes)),
        Piece("module", SOURCES / "module.cpp", ("-Os", *includes)),
        Piece("linear_module", SOURCES / "linear_module.cpp", ("-Os", *includes)),
        Piece("layer_module", SOURCES / "layer_module.cpp", ("-Os", *includes)),
        Piece("copies_module", SOURCES / "copies_module.cpp", ("-Os", *includes)),
        *kernel_pieces(),
        *(Piece(name, SOURCES / f"{name}.cpp", ("-O3",)) for name in ("block_files", "copies", "crew", "digest")),
        Piece("linear", SOURCES / "linear.cpp", ("-O2",)),
        Piece("linear_memory", SOURCES / "linear_memory.cpp", ("-O2",)),
        Piece("layer", SOURCES / "layer.cpp", ("-O2",)),
        Piece("layer_program", SOURCES / "layer_program.cpp", ("-O2",)),
        Piece("kernel_set", SOURCES / "kernel_set.cpp", ("-O2",)),
        Piece("plan", SOURCES / "plan.cpp", ("-O2",)),
        Piece("threads", SOURCES / "threads.cpp", ("-O2",)),
    ]


def build() -> Path:
    """Compile what changed, link, and put the extension in its place. Returns its path."""
    command = compiler()
    OBJECTS.mkdir(parents=True, exist_ok=True)
    version = _run([*command, "--version"])
    texts = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    seed = hashlib.sha256(texts + version.encode())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda piece: _compile(command, piece, seed), pieces()))
    target = TARGET / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    made = OBJECTS / f"linked-{os.getpid()}.so"
    link = ("-bundle", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared", "-s")
    _run([*command, *link, *map(str, objects), "-o", str(made)])
    # A process that has the old one loaded keeps it: the name changes hands, the file is not written to.
    made.replace(target)
    return target


def _compile(command: tuple[str, ...], piece: Piece, seed: hashlib._Hash) -> Path:
    flags = (*COMMON, *QUIET, *piece.flags)
    key = seed.copy()
    key.update(repr((command, flags, piece.source)).encode() + piece.source.read_bytes())
    made = OBJECTS / f"{piece.name}-{key.hexdigest()[:16]}.o"
    if not made.exists():
        for old in OBJECTS.glob(f"{piece.name}-*.o"):
            old.unlink(missing_ok=True)
        unfinished = made.with_suffix(f".{os.getpid()}")
        _run([*command, *flags, "-c", str(piece.source), "-o", str(unfinished)])
        unfinished.replace(made)
    return made


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
