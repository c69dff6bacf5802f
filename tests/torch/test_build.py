"""Building engines: one loaded model serves several, and each is what was decided for it."""

from __future__ import annotations

from pathlib import Path

from checkpoints import tiny_llama

from octavo import LLM, Config, SamplingParams
from octavo.engine.build import engine_for
from octavo.models.load import load_checkpoint
from octavo.runtime.device import resolve_device


def test_a_loaded_model_serves_one_engine_after_another(tmp_path: Path) -> None:
    loaded = load_checkpoint(str(tiny_llama(tmp_path, initializer_range=0.5)))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    device = resolve_device("cpu")
    tokens = set()
    for block_size in (2, 4, 16):
        config = Config.from_kwargs(num_gpu_blocks_override=20, block_size=block_size)
        llm = LLM.from_engine(engine_for(config, loaded, device))
        tokens.add(llm.generate([5, 6, 7], params)[0].outputs[0].token_ids)
        assert llm.deployment is not None
        assert llm.deployment.block_size == block_size
    assert len(tokens) == 1
