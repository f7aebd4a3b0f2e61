"""The GTrXL of RLlib (`ray.rllib.models.torch.attention_net.GTrXLNet`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xl_export.adapters.known import refuse_unknown
from xl_export.tracing.module import features

# Classes and attributes of GTrXLNet.
KNOWN = """
GRUGate RelativeMultiHeadAttention RelativePositionEmbedding SkipConnection SlimFC action_space
attention_dim attention_layers framework head_dim inverse_freq layers linear_layer logits
max_seq_len memory_inference memory_training model_config name num_heads num_outputs
num_transformer_units obs_dim obs_space out_dim values_out view_requirements
"""


def from_rllib(model: Any) -> nn.Module:
    """A module for `trace` around a trained GTrXLNet: observations in, action logits and the value out.

    A token is one observation. An episode starts with a memory of zeros, which is attended to, as in RLlib.
    Trace it with `MemoryRule(mem_len=model.memory_inference, segment=1)`, as RLlib acts.
    """
    refuse_unknown(model, KNOWN)
    return GTrXL(model)


class GTrXL(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.inputs = {"observation": features(model.obs_dim)}

    def start(self, batch: int) -> list[Tensor]:
        shape = batch, self.model.memory_inference, self.model.attention_dim
        return [torch.zeros(shape) for _ in range(self.model.num_transformer_units)]

    def step(
        self, inputs: dict[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        action, new = self.model({"obs": inputs["observation"][:, 0]}, list(memory), positions[:, 0])
        outputs = {"action": action[:, None]}
        if self.model.values_out is not None:
            outputs["value"] = self.model.value_function()[:, None]
        pairs = zip(memory, new, strict=True)
        return outputs, [torch.cat([old[:, 1:], x[:, None]], 1) for old, x in pairs]
