"""Shared by the torch tests: tiny models, a greedy sampler, and the reference they are held against."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.geometry.dtypes import FP32
from octavo.memory.layout import make_layout, served_groups
from octavo.models.observe import observed_layers
from octavo.models.trial import Trial, subjects
from octavo.runtime.executor import TorchExecutor

torch.set_num_threads(1)


class GreedySampler:
    """The likeliest token; the lowest id among equals."""

    def __init__(self) -> None:
        self.admitted = []

    def admit(self, admission) -> None:
        self.admitted.append(admission)

    def sample(self, logits, rows, positions):
        return logits.argmax(-1).cpu().numpy().astype(np.int32), {}


class Bench:
    """A model twice: as Transformers runs it, and through `TorchExecutor`."""

    def __init__(self, config, device="cpu", *, dtype=torch.float32, prepare=None) -> None:
        torch.manual_seed(1234)
        self.reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).to(device).eval()
        liven(self.reference)
        self.served = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).to(device).eval()
        self.served.load_state_dict(self.reference.state_dict())
        if prepare is not None:
            prepare(self.served)
        self.device = device

    def executor(self, *, block_tokens=4, n_slabs=80, rows=8, sampler=None, backend=None):
        layout = make_layout(served_groups(observed_layers(self.reference, FP32)), block_tokens, "tokens_heads")
        made = TorchExecutor(
            self.served, layout, n_slabs, rows=rows, sampler=sampler or GreedySampler(), backend=backend
        )
        return made, layout

    def serve(self, prompts, wanted, *, pause=None, seed=0, longest_chunk=7, block_tokens=4, n_slabs=80, rows=5):
        """Greedy tokens of every prompt through hand-made ragged plans."""
        executor, layout = self.executor(block_tokens=block_tokens, n_slabs=n_slabs, rows=rows)
        made = subjects(prompts, wanted, pause=pause)
        trial = Trial(executor, layout, n_slabs, rows, seed=seed)
        trial.run(made, longest_chunk=longest_chunk)
        return [subject.outputs for subject in made], trial

    def generate(self, prompt, wanted):
        """Greedy tokens of one prompt by Transformers, and each one's lead over the runner-up."""
        ids = torch.tensor([prompt], device=self.device)
        out = self.reference.generate(
            ids, max_new_tokens=wanted, min_new_tokens=wanted, do_sample=False,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
        )
        leads = []
        for logits in out.logits:
            top = logits[0].float().topk(2).values
            leads.append(float(top[0] - top[1]))
        return out.sequences[0, len(prompt):].tolist(), leads


def liven(model, seed=7) -> None:
    """Weights large enough that the greedy tokens of a random model vary with its prompt."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (1.0 if "embed" in name or "wte" in name else 1.6 / parameter.shape[-1] ** 0.5))
            elif "norm" in name or "ln" in name:
                parameter.add_(0.1 * noise.to(parameter.device))
            else:
                parameter.copy_(0.3 * noise)


@pytest.fixture(scope="session")
def prompts():
    """Seven prompts from 1 to 40 tokens."""
    random = np.random.default_rng(5)
    return [random.integers(3, 120, size=n).tolist() for n in (19, 1, 40, 7, 33, 12, 26)]


@pytest.fixture
def bench():
    return Bench
