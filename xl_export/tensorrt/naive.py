"""The truth about `xl::RelativeAttention` in PyTorch: its equation over explicit distances. Slow, for tests and benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from xl_export.tensorrt.operator import Attributes


def naive_relative_attention(
    query: Tensor, key: Tensor, value: Tensor, first: Tensor, u: Tensor, v: Tensor, position_table: Tensor, bias_table: Tensor,
    persistent_key: Tensor, persistent_value: Tensor, *, attributes: Attributes,
) -> Tensor:  # fmt: skip
    """The answer [B, H, T, K]; the contract is that of `operator.py`."""
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
    own_BHTN = torch.einsum("bhtk,hnk->bhtn", query, persistent_key[:, :N])
    weights = (
        torch.cat([scores_BHTJ, own_BHTN], dim=-1).softmax(dim=-1).nan_to_num(0.0)
    )  # zero where nothing is seen
    return weights[..., :J] @ value + weights[..., J:] @ persistent_value[:, :N]
