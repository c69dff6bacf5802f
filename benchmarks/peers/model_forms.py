"""One model in the forms that engines read, each made once under the cache directory.

    safetensors   what `export_checkpoint.py` writes: octavo, vLLM, Transformers
    openvino      the same, exported by optimum-cli, weights in the checkpoint's own type
    gguf          the same, converted by the script in llama.cpp's tree

Every form is made from the first, so that all engines have the same numbers; with int8 weights each rounds
the bf16 ones by its own rule. Invariant: a form appears
under its name only whole (made beside it, then renamed).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from environments import Environment, Unavailable, make_environment, peer_variables

MODELS = ("smollm2-135m", "random-0.5b")
GGUF_TYPES = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}
OPENVINO_WEIGHTS = {"fp32": (), "bf16": (), "int8": ("--weight-format", "int8")}
HERE = Path(__file__).resolve().parent


def make_checkpoint(
    form: str, model: str, dtype: str, cache: Path, deadline: float, say: Callable[[str], None]
) -> Path | Unavailable:
    """The path that an engine is given, made now unless it is there."""
    name, wide = f"{_short(model)}-{dtype}", "bf16" if dtype == "int8" else dtype
    plain = _made(cache / f"{_short(model)}-{wide}", deadline, say, lambda target: _export(model, wide, target))
    if form == "safetensors" or isinstance(plain, Unavailable):
        return plain
    if form == "openvino":
        target = cache / f"{name}-openvino"
        return _made(target, deadline, say, lambda target: _openvino(plain, dtype, target, cache.parent, deadline, say))
    target = cache / f"{name}.gguf"
    return _made(
        target, deadline, say, lambda target: _gguf(plain, GGUF_TYPES[dtype], target, cache.parent, deadline, say)
    )


def _short(model: str) -> str:
    """A name for files: of a directory its own, and a checksum of where it lies."""
    if model in MODELS:
        return model
    path = Path(model).resolve()
    return f"{path.name}-{zlib.crc32(str(path).encode()):08x}"


def _made(
    target: Path, deadline: float, say: Callable[[str], None], command: Callable[[Path], list[str] | Unavailable]
) -> Path | Unavailable:
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"making-{target.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.unlink(missing_ok=True)
    words = command(beside)
    if isinstance(words, Unavailable):
        return words
    say(f"making the checkpoint {target.name}")
    environment = None if words[0] == sys.executable else peer_variables()
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=max(1, deadline - time.monotonic()),
            env=environment, check=False,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, OSError) as error:
        return Unavailable(f"its checkpoint could not be made: {error}")
    if done.returncode or not beside.exists():
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return Unavailable(f"its checkpoint could not be made: {last[-1] if last else done.returncode}")
    beside.rename(target)
    return target


def _export(model: str, dtype: str, target: Path) -> list[str]:
    return [sys.executable, str(HERE / "export_checkpoint.py"), model, dtype, str(target)]


def _openvino(
    plain: Path, dtype: str, target: Path, cache: Path, deadline: float, say: Callable[[str], None]
) -> list[str] | Unavailable:
    made = make_environment("openvino-export", cache, deadline - time.monotonic(), say)
    if isinstance(made, Unavailable):
        return made
    program = str(made.folder / "bin" / "optimum-cli")
    words = [program, "export", "openvino", "--model", str(plain), "--task", "text-generation-with-past"]
    return [str(made.python), *words, *OPENVINO_WEIGHTS[dtype], str(target)]


def _gguf(
    plain: Path, kind: str, target: Path, cache: Path, deadline: float, say: Callable[[str], None]
) -> list[str] | Unavailable:
    made = make_environment("llamacpp", cache, deadline - time.monotonic(), say)
    if isinstance(made, Unavailable):
        return made
    tree = next(made.folder.glob("source/*/vendor/llama.cpp"))
    words = [str(made.python), str(HERE / "convert_gguf.py"), str(tree), str(plain)]
    return [*words, "--outtype", kind, "--outfile", str(target)]


def tools(environment: Environment | None, cache: Path) -> dict[str, str]:
    """What a player is told of besides its checkpoint."""
    found = {"cache": str(cache / "engines")}
    return found if environment is None else found | {"server": str(environment.server)}
