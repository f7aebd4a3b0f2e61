"""The agents of CleanRL's `ppo_trxl.py` and of its origin, episodic-transformer-memory-ppo."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from xl_export.adapters.known import refuse_unknown
from xl_export.tracing.module import features

# What CleanRL's agent consists of. `answers` calls its parts one by one, and would leave others out. The last
# two are for training.
PARTS = """
obs_shape max_episode_steps encoder transformer hidden_post_trxl actor_branches critic x transposed_cnn
"""


def from_ppo_trxl(agent: Any, memory_length: int) -> nn.Module:
    """A module for `trace` around a trained agent: observations in, logits of each action and the value out.

    agent: CleanRL's `Agent` or the `ActorCriticModel` of episodic-transformer-memory-ppo, whose logits are
    normalised. memory_length: `trxl_memory_length` or `memory_length` of its training. The last place of its
    window is always hidden, so trace it with `MemoryRule(mem_len=memory_length - 1, segment=1)`; it keeps all
    promises. The agent has positions for a longest episode; a longer one goes on with the last position.
    """
    return CleanRL(agent, memory_length) if hasattr(agent, "actor_branches") else Origin(agent, memory_length)


class Episodic(nn.Module):
    """A token attends to a window of the episode before it, not to itself."""

    def __init__(self, agent: Any, shape: Sequence[int], row: tuple[int, int, int], longest: int) -> None:
        super().__init__()
        self.agent = agent
        self.inputs = {"observation": features(*shape)}
        self.row = row  # places of the window, layers, width
        self.longest = longest  # steps of an episode

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, *self.row)]

    def step(
        self, inputs: dict[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        M = self.row[0]
        p = positions.clamp(min=0)
        age = torch.arange(M, 0, -1)  # of each place of the window, in steps
        # Without a memory, the agent attends to all M places, which then have the indices 0 to M - 1.
        indices = torch.where(age <= p, p - age, p - age + M).clamp(max=self.longest - 1)
        mask = age <= p.clamp(max=M - 1)
        with mock.patch.object(Tensor, "squeeze", _squeezed):
            actions, value, new = self.answers(inputs["observation"][:, 0], memory[0], mask, indices)
        outputs = {f"action_{number}": logits[:, None] for number, logits in enumerate(actions)}
        return outputs | {"value": value.reshape(-1, 1)}, [torch.cat([memory[0][:, 1:], new[:, None]], 1)]

    def answers(self, x: Tensor, *window: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Logits of each action, the value, and the new place of the window."""
        raise NotImplementedError


def _squeezed(x: Tensor, axis: int = 1) -> Tensor:
    """Without its axis of time. The agents remove every axis of size 1. From a batch of one row they remove
    too many, and put one back; a graph for any number of rows cannot do so.
    """
    return torch.squeeze(x, axis)


class CleanRL(Episodic):
    def __init__(self, agent: Any, memory_length: int) -> None:
        refuse_unknown(agent, PARTS, parts=False)
        row = memory_length, len(agent.transformer.transformer_layers), agent.critic.in_features
        super().__init__(agent, agent.obs_shape, row, agent.max_episode_steps)

    def answers(self, x: Tensor, *window: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        agent = self.agent
        x = agent.encoder(x.permute(0, 3, 1, 2) / 255.0 if len(agent.obs_shape) > 1 else x)
        x, new = agent.transformer(x, *window)
        x = agent.hidden_post_trxl(x)
        return [branch(x) for branch in agent.actor_branches], agent.critic(x), new


class Origin(Episodic):
    def __init__(self, agent: Any, memory_length: int) -> None:
        row = memory_length, len(agent.transformer.transformer_blocks), agent.memory_layer_size
        super().__init__(agent, agent.observation_space_shape, row, agent.max_episode_length)

    def answers(self, x: Tensor, *window: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        unchecked = partial(Categorical, validate_args=False)  # a graph cannot check values
        with mock.patch.dict(type(self.agent).forward.__globals__, Categorical=unchecked):
            policy, value, new = self.agent(x, *window)
        return [each.logits for each in policy], value, new
