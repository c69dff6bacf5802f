"""Where octavo keeps on disk what it can make again: the default model, joined parts of GGUF files."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Where octavo keeps what it can make again: `$OCTAVO_CACHE`, or `octavo` in the user's cache directory."""
    named = os.environ.get("OCTAVO_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
