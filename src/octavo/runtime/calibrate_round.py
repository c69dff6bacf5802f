"""One process of a calibration: reads what to measure on its standard input, builds the engine, says what it measured.

Owns the way in and out, a JSON object a line: `{"share", "text"}` as it goes on, in the end `{"measured"}` or
`{"refused"}`. What libraries print goes to the error stream. Which process measures what is `calibrate_rounds`'.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.cost.learn import Sample
from octavo.engine.early import spin_briefly
from octavo.errors import ConfigError, OctavoError

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "own": time.process_time}


def main() -> int:
    # Whatever prints from now on does not come between the lines.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(told: Mapping[str, Any]) -> None:
        answers.write(json.dumps(told) + "\n")
        answers.flush()

    try:
        told = measured(json.loads(sys.stdin.readline()), lambda share, text: say({"share": share, "text": text}))
    except ConfigError as error:
        value = error.value if isinstance(error.value, (int, float, str, type(None))) else str(error.value)
        say({"refused": [error.field, value, error.remedy]})
        return 2
    except OctavoError as error:
        say({"refused": [str(error)]})
        return 2
    except KeyboardInterrupt:
        return 130
    say({"measured": told})
    return 0


def measured(asked: Mapping[str, Any], tell: Callable[[float, str], None]) -> dict[str, Any]:
    """Raises `ConfigError`."""
    spin_briefly()  # as every engine of octavo's: steps between which threads spin for milliseconds are others
    import torch

    from octavo.config import Config
    from octavo.engine.build import engine_for
    from octavo.models.load import load_checkpoint
    from octavo.runtime.calibrate import Measuring, measure_steps
    from octavo.runtime.calibrate_record import described
    from octavo.runtime.calibrate_transfers import measure_transfers
    from octavo.runtime.device import resolve_device
    from octavo.runtime.memory_rate import MemoryRate

    begun = time.monotonic()
    if asked["threads"] is not None:
        torch.set_num_threads(asked["threads"])
    config = Config.from_kwargs(**asked["config"])
    device = resolve_device(config.engine.device)
    model = config.model
    loaded = load_checkpoint(
        model.model, revision=model.revision, dtype=model.dtype, device=device, max_model_len=model.max_model_len,
        tokenizer=model.tokenizer, skip_tokenizer_init=model.skip_tokenizer_init,
        progress=lambda stage, share: tell(0.0, stage),
    )  # fmt: skip
    engine = engine_for(config, loaded, device)
    # What one thread computes depends little on a memory that others use as well.
    looked_at = device.type == "cpu" and asked["clock"] == "wall"
    measuring = Measuring(
        **asked["measuring"], timer=CLOCKS[asked["clock"]], rate=MemoryRate().read if looked_at else None
    )
    loading_s = time.monotonic() - begun
    try:
        samples, spent = measure_steps(engine, measuring, tell, spent=asked["spent"])
        transfers = {}
        if asked["transfers"]:
            tell(1.0, "transfers between tiers")
            disk = None if asked["disk"] is None else Path(asked["disk"])
            transfers = measure_transfers(engine.deployment.layout, str(device), disk)
        return {
            "description": described(engine, loaded.config_json, measuring),
            "samples": [sample_told(sample) for sample in samples],
            "spent": spent,
            "transfers": {route: law.told() for route, law in transfers.items()},
            "loading_s": loading_s,
        }
    finally:
        engine.close()


def sample_told(sample: Sample) -> list[Any]:
    shape = sample.shape
    return [sample.scene, sample.step, shape.starts.tolist(), shape.counts.tolist(), shape.sampled, sample.device_s,
            sample.host_s, sample.rates]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
