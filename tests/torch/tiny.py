"""Tiny random models of many architectures, served and as Transformers runs them.

Shared by the tests on CPU and on an accelerator: everything takes the device as an argument.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from families import ARCHITECTURES, COMMON, MOE, NEAR_TIE
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.geometry.dtypes import FP32
from octavo.geometry.from_config import geometry_from_config
from octavo.memory.cache import KVCache
from octavo.memory.groups import served_groups
from octavo.memory.layout import make_layout
from octavo.models.shrink import enliven
from octavo.models.trial import Trial, subjects
from octavo.models.verify import spoiler
from octavo.runtime.executor import TorchExecutor
from octavo.runtime.sampler import Sampler
from octavo.scheduling.core import EngineCore
from octavo.scheduling.events import StepTokens
from octavo.scheduling.limits import Limits
from octavo.scheduling.request import Request, SamplingParams
from octavo.scheduling.scheduler import Scheduler

__all__ = ["ARCHITECTURES", "COMMON", "MOE", "Bench", "tiny_config", "tiny_prompts"]


def tiny_config(name):
    fields = {key: value for key, value in {**COMMON, **ARCHITECTURES[name]}.items() if value is not None}
    return AutoConfig.for_model(fields.pop("model_type", name), **fields)


def tiny_prompts(seed=5):
    """Seven prompts from 1 to 40 tokens."""
    random = np.random.default_rng(seed)
    return [random.integers(3, 120, size=n).tolist() for n in (19, 1, 40, 7, 33, 12, 26)]


class Bench:
    """A model twice: as Transformers runs it, and through `TorchExecutor`."""

    def __init__(self, config, device="cpu", *, dtype=torch.float32, prepare=None) -> None:
        torch.manual_seed(1234)
        make = AutoModelForCausalLM.from_config
        self.config = copy.deepcopy(config).to_dict()
        self.reference = make(copy.deepcopy(config), dtype=dtype, attn_implementation="eager").to(device).eval()
        enliven(self.reference, seed=7)
        self.served = make(copy.deepcopy(config), dtype=dtype).to(device).eval()
        self.served.load_state_dict(self.reference.state_dict())
        if prepare is not None:
            prepare(self.served)
        self.device = device
        self._generated = {}

    @property
    def vocab_size(self):
        return self.reference.config.get_text_config().vocab_size

    def executor(self, *, block_tokens=4, n_slabs=80, rows=8, backend=None):
        geometry = geometry_from_config(self.config, FP32)
        layout = make_layout(served_groups(geometry.layers), block_tokens, "tokens_heads")
        sampler = Sampler(rows, self.vocab_size, self.device)
        return TorchExecutor(self.served, layout, n_slabs, rows=rows, sampler=sampler, backend=backend), layout

    def run(self, prompts, wanted, *, n_slabs, depth=0, budget=24, block_tokens=4, rows=5):
        """Greedy tokens of every prompt through the engine, and the events on the way."""
        executor, layout = self.executor(block_tokens=block_tokens, n_slabs=n_slabs, rows=rows)
        limits = Limits(rows, budget, 128, self.vocab_size)
        core = EngineCore(Scheduler(KVCache(layout, n_slabs, rows), limits), executor, depth=depth)
        params = SamplingParams(temperature=0.0, max_tokens=wanted, seed=0).with_defaults({})
        made = [
            core.submit(Request(request_id=str(i), prompt_token_ids=np.asarray(p, np.int32), params=params), 0.0)
            for i, p in enumerate(prompts)
        ]
        events = []
        for now in range(10_000):
            if not core.has_work:
                break
            events.extend(core.step(float(now)))
        outputs = {sequence: [] for sequence in made}
        for event in events:
            if isinstance(event, StepTokens):
                for sequence, token in zip(event.sequence_ids.tolist(), event.tokens.tolist(), strict=True):
                    outputs[sequence].append(token)
        return [outputs[sequence] for sequence in made], events

    def serve(self, prompts, wanted, *, pause=None, seed=0, longest_chunk=7, block_tokens=4, n_slabs=80, rows=5):
        """Greedy tokens of every prompt through hand-made ragged plans."""
        executor, layout = self.executor(block_tokens=block_tokens, n_slabs=n_slabs, rows=rows)
        made = subjects(prompts, wanted, pause=pause)
        trial = Trial(executor, layout, n_slabs, rows, seed=seed, spoil=spoiler(executor))
        trial.run(made, longest_chunk=longest_chunk)
        return [subject.outputs for subject in made], trial

    def generate(self, prompt, wanted):
        """Greedy tokens of one prompt by Transformers, and each one's lead over the runner-up."""
        key = (*prompt, wanted)
        if key not in self._generated:
            self._generated[key] = self._generate(prompt, wanted)
        return self._generated[key]

    def _generate(self, prompt, wanted):
        out = self.reference.generate(
            torch.tensor([prompt], device=self.device),
            max_new_tokens=wanted,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        tops = [logits[0].float().topk(2).values for logits in out.logits]
        return out.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in tops]

    def compare(self, prompts, served, tolerance=NEAR_TIE):
        """Hold `served` against Transformers: near ties met, and distinct tokens. Fails on a difference."""
        wanted = len(served[0])
        near_ties = 0
        seen = set()
        for prompt, mine in zip(prompts, served, strict=True):
            theirs, leads = self.generate(prompt, wanted)
            seen.update(theirs)
            if mine != theirs:
                at = next(i for i in range(wanted) if mine[i] != theirs[i])
                assert leads[at] < tolerance, f"{len(prompt)} tokens: {mine} is not {theirs}, first at {at}"
                near_ties += 1
        return near_ties, len(seen)
