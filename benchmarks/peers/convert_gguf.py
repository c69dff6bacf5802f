"""Runs the conversion script in llama.cpp's tree, for a tokenizer that it need not know.

Which rules split text into words is told by a checksum of the tokenizer, and an unknown one is refused.
Here nothing is ever split: token ids go in and come out. So any known name will do.

    python convert_gguf.py TREE CHECKPOINT --outtype bf16 --outfile FILE
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main(tree: Path, arguments: list[str]) -> None:
    sys.path.insert(0, str(tree))
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "smollm"
    script = tree / "convert_hf_to_gguf.py"
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
