"""The reference for `xl_export::RelativeAttention` in PyTorch: its equation over explicit distances. Slow."""

from __future__ import annotations

import torch
from torch import Tensor

from xl_export.tensorrt.operator import Attributes


def naive_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    u: Tensor,
    v: Tensor,
    position_table: Tensor,
    bias_table: Tensor,
    persistent_key: Tensor,
    persistent_value: Tensor,
    slot: Tensor | None = None,
    *,
    attributes: Attributes,
    mem_len: int | None = None,
) -> Tensor:
    """The answer [B, H, T, K]; `operator.py` has the contract of the arguments.

    slot, mem_len: those of the operator over a ring; None where the keys are a memory with the segment
    behind it.
    """
    B, H, T, K = query.shape
    J, N = key.shape[2], attributes.persistent
    i = torch.arange(T, device=query.device)[:, None]
    j = torch.arange(J, device=query.device)
    own = torch.full((B,), J - T, device=query.device) if slot is None else slot.long()
    distance_BTJ = own[:, None, None] + i - j
    if slot is not None:
        distance_BTJ = distance_BTJ.remainder(J)
    r_GBTJK = position_table[:, distance_BTJ.clamp(0, position_table.shape[1] - 1)]
    b_GBTJ = bias_table[:, distance_BTJ.clamp(0, bias_table.shape[1] - 1)]
    scores_BHTJ = torch.einsum("bhtk,bhjk->bhtj", query + u, key) + b_GBTJ.transpose(0, 1)
    scores_BHTJ = scores_BHTJ + torch.einsum("bhtk,hbtjk->bhtj", query + v, r_GBTJK.expand(H, B, T, J, K))

    rule = attributes.rule(mem_len=J - T if mem_len is None else mem_len, segment=T)
    visible = rule.visible(distance_BTJ, first[:, None, None] + i, i)
    scores_BHTJ = scores_BHTJ.masked_fill(~visible.expand(B, T, J)[:, None], float("-inf"))
    persistent_BHTN = torch.einsum("bhtk,hnk->bhtn", query, persistent_key[:, :N])
    # A query to which nothing is visible has a softmax over -inf alone, which is NaN: its answer is zero.
    weights = torch.cat([scores_BHTJ, persistent_BHTN], dim=-1).softmax(dim=-1).nan_to_num(0.0)
    return weights[..., :J] @ value + weights[..., J:] @ persistent_value[:, :N]
