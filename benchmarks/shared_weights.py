"""Models that share one set of weights: engines are compared on the very same tensors.

A model's config says which attention it uses, and every engine sets its own. So each gets a copy of
the modules and the config, over the same parameters and buffers.
"""

from __future__ import annotations

import copy

from transformers import GenerationConfig, PreTrainedModel

PAD = 0


def sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy over the same tensors, greedy, with the attention that Transformers would choose (sdpa)."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation("sdpa")
    twin.generation_config = GenerationConfig(do_sample=False, pad_token_id=PAD)
    return twin.eval()
