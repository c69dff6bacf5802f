"""Reads a text file that a person names, gzip undone, up to a bound.

Owns what can be wrong with any such file: not there, not readable, damaged, no text, or without end, as a device, a
pipe that goes on, or a small archive of terabytes. What the text says is its reader's. As pure as the core.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO

from octavo.errors import ConfigError

MOST_BYTES = 2**30
"""Of text, unpacked. A published trace of five million requests has a quarter of it."""
_PIECE = 2**20


def read_text(path: str | Path, field: str, remedy: str = "") -> str:
    """The text in a file, or in a gzip file of this suffix. Raises `ConfigError` for `field`."""
    packed = str(path).endswith(".gz")
    try:
        with Path(path).open("rb") as plain:
            if not packed:
                data = _read(plain, str(path), field)
            else:
                with gzip.open(plain) as unpacked:
                    data = _read(unpacked, str(path), field)
        return data.decode("utf-8-sig")
    except (EOFError, zlib.error) as error:
        raise ConfigError(field, str(path), f"is a damaged gzip file ({error}){remedy}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(field, str(path), f"is no text ({error}){remedy}") from None
    except (OSError, ValueError) as error:  # of a name that no file has, Python raises the latter
        raise ConfigError(
            field, str(path), f"cannot be read ({getattr(error, 'strerror', None) or error}){remedy}"
        ) from None


def _read(stream: IO[bytes] | gzip.GzipFile, path: str, field: str) -> bytearray:
    data = bytearray()
    while piece := stream.read(_PIECE):
        data += piece
        if len(data) > MOST_BYTES:
            raise ConfigError(field, path, f"holds more than {MOST_BYTES:,} bytes of text; give a part of it")
    return data
