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
    *,
    attributes: Attributes,
) -> Tensor:
    """The answer [B, H, T, K]; `operator.py` has the contract of the arguments."""
    B, H, T, K = query.shape
    J, N = key.shape[2], attributes.persistent
    i = torch.arange(T, device=query.device)[:, None]
    distance_TJ = J - T + i - torch.arange(J, device=query.device)
    r_GTJK = position_table[:, distance_TJ.clamp(0, position_table.shape[1] - 1)]
    b_GTJ = bias_table[:, distance_TJ.clamp(0, bias_table.shape[1] - 1)]
    scores_BHTJ = torch.einsum("bhtk,bhjk->bhtj", query + u, key)
    scores_BHTJ = scores_BHTJ + torch.einsum("bhtk,htjk->bhtj", query + v, r_GTJK.expand(H, T, J, K)) + b_GTJ

    visible = attributes.rule(mem_len=J - T, segment=T).visible(distance_TJ, first[:, None, None] + i, i)
    scores_BHTJ = scores_BHTJ.masked_fill(~visible.expand(B, T, J)[:, None], float("-inf"))
    persistent_BHTN = torch.einsum("bhtk,hnk->bhtn", query, persistent_key[:, :N])
    # A query to which nothing is visible has a softmax over -inf alone, which is NaN: its answer is zero.
    weights = torch.cat([scores_BHTJ, persistent_BHTN], dim=-1).softmax(dim=-1).nan_to_num(0.0)
    return weights[..., :J] @ value + weights[..., J:] @ persistent_value[:, :N]
