"""Print what the formulas of weights say beside what Transformers builds, for every config in a directory.

`python tools/check_weights.py DIRECTORY`: DIRECTORY holds one directory with a config.json for each model.
The models are built without memory. The last line is how many agree to the parameter.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from octavo.errors import ConfigError
from octavo.geometry.from_config import language_model_of
from octavo.geometry.weights import weights_from_config


def built_parameters(config: dict[str, Any]) -> int | None:
    """Parameters of the language model that Transformers builds, or None where it has no such class."""
    raw, model_type, _ = language_model_of(config)
    if model_type not in CONFIG_MAPPING:
        return None
    options = {name: value for name, value in raw.items() if name not in ("quantization_config", "model_type")}
    if isinstance(config.get("tie_word_embeddings"), bool):
        options.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    made = CONFIG_MAPPING[model_type](**options)
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
            extra = 0
        except ValueError:
            model = AutoModel.from_config(made, dtype=torch.bfloat16)
            extra = 0 if made.tie_word_embeddings else made.vocab_size * made.hidden_size
    return extra + sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    logging.disable(logging.WARNING)
    compared = agreed = 0
    for path in sorted(Path(sys.argv[1]).glob("*/config.json")):
        config = json.loads(path.read_text("utf-8"))
        try:
            told = weights_from_config({k: v for k, v in config.items() if k != "quantization_config"})
            built = built_parameters(config)
        except ConfigError as error:
            print(f"{path.parent.name:<60} refused: {error}")
            continue
        except Exception as error:  # noqa: BLE001 - not to be built as the file says
            print(f"{path.parent.name:<60} cannot be built: {type(error).__name__} {str(error)[:60]!r}")
            continue
        if built is None:
            print(f"{path.parent.name:<60} no class   {told.total_parameters:>17,} {told.basis[:20]}")
            continue
        compared += 1
        agreed += built == told.total_parameters
        difference = (told.total_parameters - built) / built
        print(f"{path.parent.name:<60} {difference:+10.6%} {told.total_parameters:>17,} {built:>17,}")
    print(f"{agreed} of {compared} agree to the parameter")


if __name__ == "__main__":
    main()
