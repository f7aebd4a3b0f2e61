"""The agent of CleanRL's `ppo_trxl.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from xl_export.tracing.module import features


def from_ppo_trxl(agent: Any, memory_length: int) -> nn.Module:
    """A module for `trace` around a trained Agent: observations in, logits of each action and the value out.

    memory_length: `args.trxl_memory_length` of its training. The last place of its window is always hidden,
    so trace it with `MemoryRule(mem_len=memory_length - 1, segment=1)`. The agent has positions for
    `max_episode_steps`; a longer episode goes on with the last one.
    """
    return Trxl(agent, memory_length)


def _squeezed(x: Tensor, axis: int = 1) -> Tensor:
    """Without its axis of time. CleanRL removes every axis of size 1. From a batch of one row it removes too
    many, and puts one back; a graph for any number of rows cannot do so.
    """
    return torch.squeeze(x, axis)


class Trxl(nn.Module):
    def __init__(self, agent: Any, memory_length: int) -> None:
        super().__init__()
        self.agent = agent
        self.memory_length = memory_length
        self.inputs = {"observation": features(*agent.obs_shape)}

    def start(self, batch: int) -> list[Tensor]:
        layers = len(self.agent.transformer.transformer_layers)
        return [torch.zeros(batch, self.memory_length, layers, self.agent.critic.in_features)]

    def step(
        self, inputs: dict[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        M = self.memory_length
        agent = self.agent
        age = torch.arange(M, 0, -1)  # of each slot of the memory, in steps
        window = memory[0]
        found: dict[str, list[Tensor]] = {}
        for t in range(positions.shape[1]):
            p = positions[:, t : t + 1].clamp(min=0)
            x = inputs["observation"][:, t]
            window = torch.where(p[:, :, None, None] > 0, window, 0.0)
            # Without a memory, the agent attends to all M slots, which then have the indices 0 to M - 1.
            indices = torch.where(age <= p, p - age, p - age + M).clamp(max=agent.max_episode_steps - 1)
            mask = age <= p.clamp(max=M - 1)
            x = agent.encoder(x.permute(0, 3, 1, 2) / 255.0 if len(agent.obs_shape) > 1 else x)
            with mock.patch.object(Tensor, "squeeze", _squeezed):
                x, new = agent.transformer(x, window, mask, indices)
            x = agent.hidden_post_trxl(x)
            window = torch.cat([window[:, 1:], new[:, None]], 1)
            for number, branch in enumerate(agent.actor_branches):
                found.setdefault(f"action_{number}", []).append(branch(x))
            found.setdefault("value", []).append(agent.critic(x)[:, 0])
        return {name: torch.stack(each, 1) for name, each in found.items()}, [window]
