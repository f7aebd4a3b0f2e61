"""The Triton kernels over PyTorch's tensors, launched by Triton: for tests on a GPU or in the interpreter,
and benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xl_export.tensorrt.kernels.compile import (
    JOINS,
    MULTIPROCESSORS,
    Sizes,
    Tactic,
    constants,
    join_constants,
    kernel_function,
    parts,
    programs,
    scratch_rows,
)
from xl_export.tensorrt.operator import Attributes


def launch(
    tactic: Tactic,
    inputs: Sequence[Tensor],
    answer: Tensor,
    *,
    attributes: Attributes,
    mem_len: int | None = None,
    scratch: tuple[Tensor, Tensor],
    divided: int | None = None,
    join: Tactic = JOINS[0],
) -> None:
    """Writes the operator's output into `answer` [B, H, T, K].

    inputs: contiguous tensors in the operator's order, all on one device. mem_len: of the operator over a
    ring, or None. scratch: `mixed` and `level` of `make_scratch`. divided: how many parts the keys are
    divided into; None for as many as an engine has.
    join: the tactic that joins the answers of the parts.
    """
    B, H, T, K = inputs[0].shape
    J = inputs[1].shape[2]
    mixed, level = scratch
    number = (
        parts(programs(B, H, T), multiprocessors=_multiprocessors(answer)) if divided is None else divided
    )
    fixed = constants(tactic, Sizes.of([tensor.shape for tensor in inputs]), attributes, mem_len)
    grid = (B * H, -(-T // tactic.block_t), number)
    kernel_function(tactic.kernel)[grid](
        *inputs, T=T, J=J, mixed_out=mixed, level=level, **fixed, **_options(tactic)
    )
    kernel_function("join_parts")[(-(-(B * H * T) // join.block_t),)](
        inputs[0], mixed, level, B * H * T, number, answer, **join_constants(join, K), **_options(join)
    )


def make_scratch(query: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the answers of the parts, `mixed` and `level`, for queries [B, H, T, K]: as large as an
    engine's.
    """
    rows = scratch_rows(programs(*query.shape[:3]), query.shape[2], multiprocessors=_multiprocessors(query))
    mixed, level = (
        torch.empty(size, dtype=torch.float32, device=query.device)
        for size in ((rows, query.shape[3]), (rows,))
    )
    return mixed, level


def _multiprocessors(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(tensor.device).multi_processor_count)


def _options(tactic: Tactic) -> dict[str, int | bool]:
    return {"num_warps": tactic.warps, "num_stages": tactic.stages, "enable_fp_fusion": True}
