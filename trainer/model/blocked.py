"""Attention in blocks of queries, with a backward pass of its own: the form that trains on the CPU.

`attention.py` computes the same equation with operators that PyTorch differentiates. Here a block of queries
meets only the keys that it can see, and a few lanes are computed at a time, so that their scores stay in the
processor's cache. Of all that has one number for each query and key, only the softmax (and the mask of
dropout) is kept for the backward pass.

H comes first in all tensors, so that a piece of the work is a batch of matrices. `by distance` means that
column c of W + 1 holds the distance W - 1 - c of the last query; `by key` means that column j holds key j.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_QUERIES = 128  # queries; a smaller block sees fewer keys in vain, and a larger one makes fewer calls
SHORT_BLOCK_QUERIES = 64
SHORT_DISTANCE = 384  # up to this distance a small block is faster
GROUP_BYTES = 4 << 20  # of the scores that are computed together


class Piece(NamedTuple):
    """Some lanes of one block of queries, which see these keys; the last key belongs to the last query."""

    lanes: slice
    queries: slice
    keys: slice
    C: int  # queries
    W: int  # keys


def block_length(T: int, longest: int | None) -> int:
    """The number of queries in a block of a segment of T tokens; the last block may be shorter.

    longest: the largest distance that any query sees; None for all. A query meets all keys that some query
    of its block sees. Where the distances are short, much of that is in vain, and shorter blocks are faster:
    up to 1.25 times at distances of 64 to 384, and slower from 512 on (measured for segments of 64 to 256).
    """
    size = (
        BLOCK_QUERIES
        if longest is None or longest > SHORT_DISTANCE
        else min(BLOCK_QUERIES, SHORT_BLOCK_QUERIES)
    )
    return -(-T // max(1, round(T / size)))


def pieces(H: int, B: int, T: int, J: int, longest: int | None, itemsize: int) -> list[Piece]:
    """The pieces in which the scores [H, B, T, J] are computed; the first has the most queries.

    longest: the largest distance that any query sees; None for all.
    """
    length = block_length(T, longest)
    found = []
    for first in range(0, T, length):
        end = min(T, first + length)
        low = 0 if longest is None else max(0, J - T + first - longest)
        C = end - first
        W = J - T + end - low
        lanes = max(1, GROUP_BYTES // (H * C * W * itemsize))
        for lane in range(0, B, lanes):
            found.append(
                Piece(slice(lane, min(B, lane + lanes)), slice(first, end), slice(low, low + W), C, W)
            )
    return found


def by_key(by_distance: Tensor, C: int) -> Tensor:
    """Values by key [H, b, C, W], as a view of contiguous values by distance [H, b · C, W + 1].

    The spare column makes every row of the view begin one column earlier than the row before. That is the
    shift of Dai et al. 2019, Appendix B, without a copy. The values of future keys belong to the next row,
    and the mask hides them.
    """
    W = by_distance.shape[-1] - 1
    flat = by_distance.view(len(by_distance), -1, C * (W + 1))
    return flat[:, :, C - 1 : C - 1 + C * W].view(len(flat), -1, C, W)


def flipped(rows: Tensor, W: int) -> Tensor:
    """Rows [H, W + 1, …] by distance, of rows [J, H, …] for the distances 0 … J - 1; the last one is zero."""
    rows = rows[:W].flip(0)
    return torch.cat([rows, torch.zeros_like(rows[:1])]).transpose(0, 1)


def toeplitz(values: Tensor, C: int, W: int) -> Tensor:
    """Values by key [H, C, W] of values [J, H] for each distance; the last of C queries is key W - 1."""
    return by_key(flipped(values, W)[:, None].expand(-1, C, -1).contiguous(), C)[:, 0]


class BlockedAttention(torch.autograd.Function):
    """Answers [H, B, T, K] of the softmax of scores by content, by distance and of persistent vectors.

    content, positional [H, B, T, K]: the queries of the products with keys and with rows, divided by sqrt(K).
    key, value [H, B, J, K]. rows [H, W + 1, K]: position vectors by distance. bias, gate [H, C, W]: by key,
    for the last queries and keys; other blocks use its last rows and columns. own_key, own_value
    [H, N, K]: persistent vectors. hidden [1 or B, T, J]: is added to the scores. blind bool [1 or B, T, 1]:
    queries that see nothing, or None. parts: see `pieces`. epsilon: of a gate. dropout: of weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        content: Tensor,
        positional: Tensor | None,
        key: Tensor,
        value: Tensor,
        rows: Tensor | None,
        bias: Tensor | None,
        gate: Tensor | None,
        own_key: Tensor | None,
        own_value: Tensor | None,
        hidden: Tensor,
        blind: Tensor | None,
        parts: list[Piece],
        epsilon: float,
        dropout: float,
    ) -> Tensor:
        H = len(content)
        answer = torch.empty_like(content)
        kept: list[Tensor] = []
        needed = any(ctx.needs_input_grad)  # a validation keeps nothing
        for piece in parts:
            lanes, queries, keys, C, W = piece
            scores = content[:, lanes, queries] @ _keys(key, own_key, piece).transpose(-1, -2)
            context = scores[..., :W]  # without the persistent vectors
            if positional is not None and rows is not None:
                query = positional[:, lanes, queries].reshape(H, -1, key.shape[-1])
                context.add_(by_key(torch.bmm(query, rows[:, -W - 1 :].transpose(1, 2)), C))
            if bias is not None:
                context.add_(bias[:, None, -C:, -W:])
            context.add_(hidden[lanes if len(hidden) > 1 else slice(None), queries, keys])
            weights = torch.softmax(scores, dim=-1)
            used, total, mask = weights, None, None
            if gate is not None:
                used = weights.clone()
                used[..., :W].mul_(gate[:, None, -C:, -W:])
                total = used.sum(-1, keepdim=True).add_(epsilon)
                total.masked_fill_(total == 0, 1.0)  # the weights of a query that sees nothing stay 0
            if dropout:
                mask = torch.empty_like(weights).bernoulli_(1 - dropout).div_(1 - dropout)
                used = used * mask
            part = used @ _keys(value, own_value, piece)
            answer[:, lanes, queries] = part if total is None else part.div_(total)
            if needed:
                kept += [tensor for tensor in (weights, total, mask) if tensor is not None]
        if blind is not None:
            answer.masked_fill_(blind, 0.0)
        inputs = (content, positional, key, value, rows, bias, gate, own_key, own_value, blind)
        if needed:
            ctx.save_for_backward(*inputs, answer, *kept)
        ctx.options = parts, epsilon, dropout
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activations that are computed again allow no more
        content, positional, key, value, rows, bias, gate, own_key, own_value, blind = saved[:10]
        answer, *kept = saved[10:]
        parts, epsilon, dropout = ctx.options
        H, _, _, K = content.shape
        upstream = upstream.contiguous()
        if blind is not None:
            upstream = upstream.masked_fill(blind, 0.0)
        # The sum over keys of weight times gradient of the weight, for every query: a softmax needs it.
        inner = (upstream * answer).sum(
            -1, keepdim=True, dtype=torch.promote_types(content.dtype, torch.float32)
        )
        inputs = (content, positional, key, value, rows, bias, gate, own_key, own_value)
        # What all pieces add to is summed in fp32 at least: `autograd` rounds the sum.
        sums = torch.promote_types(content.dtype, torch.float32)
        gradients: list[Any] = [
            None if tensor is None else torch.zeros_like(tensor, dtype=sums if at > 1 else tensor.dtype)
            for at, tensor in enumerate(inputs)
        ]
        for piece in parts:
            lanes, queries, _, C, W = piece
            weights = kept.pop(0)
            total: Any = None if gate is None else kept.pop(0)
            mask = kept.pop(0) if dropout else None
            out = upstream[:, lanes, queries]
            # The gradient of the values, which takes the weights as they were used.
            used = weights
            if gate is not None:
                used = weights / total
                used[..., :W].mul_(gate[:, None, -C:, -W:])
            used = used if mask is None else used * mask
            _add_keys(gradients[3], gradients[8], used.transpose(-1, -2) @ out, piece)
            # The gradient of the scores, for weights w that a gate m turns into w m / (Σ w m + epsilon):
            # w (m (g - inner) - inner epsilon) / total, where g is the gradient of the weights as they are
            # used. The second term is 0 without epsilon.
            slope = out @ _keys(value, own_value, piece).transpose(-1, -2)
            if mask is not None:
                slope.mul_(mask)
            slope.sub_(inner[:, lanes, queries])
            spread = slope.new_empty(H, slope.shape[1] * C, W + 1)  # scores by distance
            context = by_key(spread, C)
            spread.view(H, -1, C * (W + 1))[:, :, : C - 1] = 0
            spread.view(H, -1, C * (W + 1))[:, :, -1] = 0
            if gate is None:
                torch.mul(slope[..., :W], weights[..., :W], out=context)
            else:
                slope.mul_(weights).div_(total)
                gradients[6][:, -C:, -W:] += slope[..., :W].sum(1)
                torch.mul(slope[..., :W], gate[:, None, -C:, -W:], out=context)
                if epsilon:
                    context.addcmul_(weights[..., :W], inner[:, lanes, queries] / total, value=-epsilon)
            scores = context
            if own_key is not None:
                own = slope[..., W:]
                if gate is None:
                    own = own * weights[..., W:]
                elif epsilon:
                    own = own.addcmul(weights[..., W:], inner[:, lanes, queries] / total, value=-epsilon)
                scores = torch.cat([context, own], dim=-1)
            gradients[0][:, lanes, queries] = scores @ _keys(key, own_key, piece)
            product = scores.transpose(-1, -2) @ content[:, lanes, queries]
            _add_keys(gradients[2], gradients[7], product, piece)
            if bias is not None:
                gradients[5][:, -C:, -W:] += context.sum(1)
            if positional is not None and rows is not None:
                query = positional[:, lanes, queries].reshape(H, -1, K)
                gradients[1][:, lanes, queries] = torch.bmm(spread, rows[:, -W - 1 :]).view(H, -1, C, K)
                gradients[4][:, -W - 1 :] += torch.bmm(spread.transpose(1, 2), query)
        return (*gradients, None, None, None, None, None)


def _keys(context: Tensor, own: Tensor | None, piece: Piece) -> Tensor:
    """The keys or values [H, b, W + N, K] of a piece: first the context's, then persistent ones."""
    part = context[:, piece.lanes, piece.keys]
    if own is None:
        return part
    return torch.cat([part, own[:, None].expand(-1, part.shape[1], -1, -1)], dim=2)


def _add_keys(context: Tensor, own: Tensor | None, gradient: Tensor, piece: Piece) -> None:
    """Adds the gradient of `_keys` to the gradients of its two arguments."""
    context[:, piece.lanes, piece.keys] += gradient[:, :, : piece.W]
    if own is not None:
        own += gradient[:, :, piece.W :].sum(1)
