"""Silences Transformers' progress bars and loading reports while octavo loads, and restores them after.

octavo reports both itself: progress through its callback, and every unloaded weight as an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers.modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    bar, gguf_reader.tqdm = gguf_reader.tqdm, _no_bar  # this one asks nobody whether it may draw
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _no_bar(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items
