"""The optimisers Adam and Adagrad. Each clips gradients in its own way.

`adam` scales the whole gradient down to the norm `clip`. `adagrad` is that of Sukhbaatar et al. (2019, the
public code of adaptive-span): the squared gradients are summed unclipped, and the *step* of a tensor is
scaled by clip / norm where the norm of its gradient is larger. That equals torch.optim.Adagrad with a
learning rate of its own for each tensor, as here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.run.config import TrainConfig


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of the configuration. Its state is complete from the start: step 0 is saved."""
    if config.optimizer == "adagrad":
        return torch.optim.Adagrad(
            [{"params": [parameter]} for parameter in model.parameters()], lr=config.learning_rate
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(0.0)} | {
            moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")
        }
    return optimizer


def set_rate_and_clip(optimizer: torch.optim.Optimizer, rate: float, clip: float) -> float:
    """Prepares `optimizer.step()`; returns the norm of the whole gradient before clipping."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return _clip_each_step(optimizer, rate, clip)
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return float(nn.utils.clip_grad_norm_(parameters, clip))


def _clip_each_step(optimizer: torch.optim.Adagrad, rate: float, clip: float) -> float:
    groups = [group for group in optimizer.param_groups if group["params"][0].grad is not None]
    norms = torch.stack([group["params"][0].grad.norm() for group in groups])
    for group, norm in zip(groups, norms.tolist(), strict=True):
        group["lr"] = rate * min(1.0, clip / (norm + 1e-10))
    return float(norms.norm())


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state by name (`exp_avg.blocks.0.query.weight`), sharing storage."""
    return {
        f"{kind}.{name}": tensor
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state[parameter].items()
    }
