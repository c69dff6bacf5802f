"""A fake engine: octavo's scheduler over a replica that the planner or a calibration describes, paced by its costs.

Owns putting the parts together. No weight is read and nothing is computed; the tokenizer is a real one, so that
prompts have the lengths they would have.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.engine.paced import PacedExecutor, PacedMover, Speech
from octavo.errors import InvariantViolation
from octavo.models.embedded import embedded_checkpoint
from octavo.models.tokenizer import VOCABULARY_FILES, load_tokenizer
from octavo.policy.bundle import Policies
from octavo.simulate.deploy import Lower, Replica
from octavo.simulate.executors import SimExecutor
from octavo.simulate.lengths import Lengths
from octavo.simulate.links import SimMover


def simulated_engine(
    replica: Replica,
    policies: Policies,
    *,
    tokenizer_dir: Path | None,
    lengths: Lengths | None = None,
    eviction: str = "lru",
    depth: int = 0,
    lower: Lower | None = None,
) -> Engine:
    """The engine; its tokenizer is that of the directory, or else the embedded model's."""
    own = tokenizer_dir is not None and any((tokenizer_dir / name).is_file() for name in VOCABULARY_FILES)
    directory = tokenizer_dir if own and tokenizer_dir is not None else embedded_checkpoint(None)
    tokenizer = load_tokenizer(directory)
    vocab = len(tokenizer)
    core = replace(replica, vocab_size=vocab).core(policies, eviction=eviction, depth=depth, lower=lower)
    if not isinstance(core.executor, SimExecutor):
        raise InvariantViolation("executor", f"a replica runs {type(core.executor).__name__}")
    core.executor = PacedExecutor(core.executor, _speech(tokenizer, lengths))
    if isinstance(core.mover, SimMover):
        core.mover = PacedMover(core.mover)
    eos = tokenizer.eos_token_id
    intake = Intake(
        tokenizer, defaults={}, eos_token_ids=() if eos is None else (int(eos),), vocab_size=vocab, seed=0
    )  # fmt: skip
    engine = Engine(core, intake)
    engine.model_name = replica.model
    engine.notes = (
        f"nothing is computed: steps take what they would on {replica.tp} x {replica.device}, answers repeat prompts",
        f"tokenizer of {directory}",
    )
    return engine


def _speech(tokenizer: Any, lengths: Lengths | None) -> Speech:
    otherwise = tokenizer("a", add_special_tokens=False).input_ids
    return Speech(frozenset(map(int, tokenizer.all_special_ids)), int(otherwise[0]) if otherwise else 0, lengths)
