"""The state of the fp16 loss scale. This is the one place that names a private part of PyTorch.

`GradScaler.state_dict()` is public, but one of its keys starts with an underscore: the number of steps since
the scale changed. A run needs that number in order to resume with the same bits. Checked with PyTorch 2.13.
"""

from __future__ import annotations

import torch

STEPS = "_growth_tracker"


def loss_scale(scaler: torch.amp.GradScaler) -> tuple[float, int]:
    """The scale, and the steps since it changed; 1 and 0 where the loss is not scaled."""
    if not scaler.is_enabled():
        return 1.0, 0
    state = scaler.state_dict()
    assert STEPS in state, f"GradScaler of PyTorch {torch.__version__} has {sorted(state)} and no {STEPS}"
    return state["scale"], state[STEPS]


def set_loss_scale(scaler: torch.amp.GradScaler, scale: float, steps: int) -> None:
    """Puts back what `loss_scale` has returned; does nothing where the loss is not scaled."""
    if scaler.is_enabled():
        scaler.load_state_dict(scaler.state_dict() | {"scale": scale, STEPS: steps})
