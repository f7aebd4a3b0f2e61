"""The kernels on PyTorch's tensors, launched by Triton itself: for tests on a GPU or in the interpreter, and for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from xl_export.tensorrt import kernel
from xl_export.tensorrt.compile import Sizes, Tactic, constants
from xl_export.tensorrt.operator import Attributes


def launch(tactic: Tactic, inputs: Sequence[Tensor], answer: Tensor, *, attributes: Attributes) -> None:
    """Writes the answer [B, H, T, K] to contiguous inputs in the operator's order, all on one device."""
    B, H, T, _ = inputs[0].shape
    J = inputs[1].shape[2]
    fixed = constants(tactic, Sizes.of([tensor.shape for tensor in inputs]), attributes)
    grid = (B * H, -(-T // tactic.block_t))
    getattr(kernel, tactic.kernel)[grid](
        *inputs, T, J, answer, **fixed, num_warps=tactic.warps, num_stages=tactic.stages, enable_fp_fusion=True
    )
