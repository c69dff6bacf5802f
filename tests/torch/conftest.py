"""Makes `tiny` importable by the tests beside it, and gives them one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
