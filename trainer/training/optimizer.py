"""The optimisers Adam, AdamW, Muon and Adagrad. They clip gradients in two ways.

`adam`, `adamw` and `muon` scale the whole gradient down to the norm `clip`. `adamw` also multiplies matrices
by 1 - lr * weight_decay in each step (Loshchilov and Hutter 2019, Algorithm 2). `muon` changes the matrices
of linear layers by torch.optim.Muon (Jordan et al. 2024), scaled to the size of AdamW's steps (Liu et al.
2025, "Muon is scalable for LLM training", section 2.2), and everything else by `adamw`. `adagrad` is as in
Sukhbaatar et al. (2019, the public code of adaptive-span): the squared gradients are summed unclipped, and
the *step* of a tensor is scaled by clip / norm where the norm of its gradient is larger. That equals
torch.optim.Adagrad with a learning rate of its own for each tensor, as here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtimes.base.errors import MissingPackageError
from trainer.run.config import TrainConfig
from trainer.run.optimizer_config import OptimizerConfig
from trainer.training.shard import clip_whole, norms


def make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of the configuration. Its state is complete from the start: step 0 is saved."""
    named = list(model.named_parameters())
    match config.optimizer.kind:
        case "adagrad":
            return _adagrad(config.optimizer, model)
        case "adam" | "adamw":
            return _adamw(config.optimizer, named)
        case "muon":
            return MuonAdamW(config.optimizer, named)


def _adagrad(settings: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        [{"params": [parameter]} for parameter in model.parameters()],
        lr=settings.lr,
        eps=1e-10 if settings.epsilon is None else settings.epsilon,
    )


def _adamw(settings: OptimizerConfig, named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    kept = [parameter for name, parameter in named if not takes_weight_decay(name, parameter)]
    decayed = [parameter for name, parameter in named if takes_weight_decay(name, parameter)]
    optimizer = torch.optim.AdamW(  # with a decay of 0 it computes what torch.optim.Adam computes
        [
            {"params": parameters, "weight_decay": weight_decay}
            for parameters, weight_decay in ((decayed, settings.weight_decay), (kept, 0.0))
            if parameters
        ],
        lr=settings.lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=1e-8 if settings.epsilon is None else settings.epsilon,
        fused=True,  # all weights in one pass; not run on mps
    )
    for _, parameter in named:
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | {
            moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")
        }
    return optimizer


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of linear layers and AdamW for the rest, which share one state and one rate."""

    def __init__(self, settings: OptimizerConfig, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise MissingPackageError(
                f"optimizer.kind is muon, which needs PyTorch 2.9 or newer, and {torch.__version__} is "
                "installed; run `pip install -U 'torch>=2.9'`, or give kind adamw."
            )
        matrices = [parameter for name, parameter in named if is_linear(name, parameter)]
        self.adamw = _adamw(settings, [pair for pair in named if not is_linear(*pair)])
        self.muon = torch.optim.Muon(
            matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        super().__init__(named, {})
        self.param_groups = [*self.muon.param_groups, *self.adamw.param_groups]
        self.state.update(self.adamw.state)
        self.state.update({matrix: {"momentum_buffer": torch.zeros_like(matrix)} for matrix in matrices})
        self.muon.state = self.adamw.state = self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.muon.step()  # type: ignore[no-untyped-call]
        self.adamw.step()


def is_linear(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is the matrix of a linear layer between the embedding and the softmax."""
    return parameter.ndim == 2 and name.startswith(("blocks.", "positions.project."))


def takes_weight_decay(name: str, parameter: Tensor) -> bool:
    """Whether weight decay concerns a parameter of the model.

    It concerns the matrices of linear layers, the tables of the vocabulary and persistent vectors. It does
    not concern norms, biases (u and v among them), learned positions or spans.
    """
    of_positions = name.startswith("positions.") and not name.endswith(".weight")
    return parameter.ndim > 1 and not of_positions


def set_rate_and_clip(optimizer: torch.optim.Optimizer, rate: float, clip: float) -> Tensor:
    """Prepares `optimizer.step()`; returns the norm of the whole gradient before clipping, on its device."""
    if isinstance(optimizer, torch.optim.Adagrad):
        return _clip_each_step(optimizer, rate, clip)
    for group in optimizer.param_groups:
        group["lr"] = rate
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return clip_whole(parameters, clip)


def _clip_each_step(optimizer: torch.optim.Adagrad, rate: float, clip: float) -> Tensor:
    groups = [group for group in optimizer.param_groups if group["params"][0].grad is not None]
    each = norms([group["params"][0].grad for group in groups])
    for group, norm in zip(groups, each.tolist(), strict=True):
        group["lr"] = rate * min(1.0, clip / (norm + 1e-10))
    whole: Tensor = each.norm()
    return whole


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimiser's state by name (`exp_avg.blocks.0.query.weight`), sharing storage."""
    return {
        f"{kind}.{name}": tensor
        for name, parameter in model.named_parameters()
        for kind, tensor in optimizer.state[parameter].items()
    }
