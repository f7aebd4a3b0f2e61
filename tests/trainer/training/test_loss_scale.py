"""The one private part of PyTorch that training needs."""

from __future__ import annotations

import torch

from trainer.training.snapshot import loss_scale, set_loss_scale


def test_pytorch_still_keeps_the_loss_scale_there() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scaler.scale(torch.zeros(1))
    assert "_growth_tracker" in scaler.state_dict(), (
        f"PyTorch {torch.__version__} keeps the steps since the last change of the fp16 loss scale "
        f"elsewhere than 2.13 did: {sorted(scaler.state_dict())}; adapt trainer/training/snapshot.py"
    )
    set_loss_scale(scaler, 512.0, 2)
    assert loss_scale(scaler) == (512.0, 2)
    scaler.update(1024.0)
    assert loss_scale(scaler) == (1024.0, 2)
