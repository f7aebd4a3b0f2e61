"""The ring in PyTorch: its write, which becomes `TensorScatter` in a traced graph, and its distances.

The token of stream position p is in slot p mod S. A runtime binds past and present of a ring to one buffer,
which is right only where the write is the single reader of the past. So the write is an operator of its own
in the trace, and never a composition of others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.model.attention import Terms


@torch.library.custom_op("xl_export::ring_write", mutates_args=())
def _write(ring: Tensor, new: Tensor, first: Tensor) -> Tensor:
    return ring.scatter(2, _slots(ring, new, first), new)


def _slots(ring: Tensor, new: Tensor, first: Tensor) -> Tensor:
    """The slot int64 [B, H, T, K] of each new value."""
    slots = (first[:, None] + torch.arange(new.shape[2], device=new.device)) % ring.shape[2]
    return slots[:, None, :, None].expand_as(new)


@_write.register_fake
def _(ring: Tensor, new: Tensor, first: Tensor) -> Tensor:
    return torch.empty_like(ring)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ring, new, first = inputs
    ctx.save_for_backward(_slots(ring, new, first))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    (slots,) = ctx.saved_tensors
    return gradient.scatter(2, slots, 0.0), gradient.gather(2, slots), None


_write.register_autograd(_backward, setup_context=_keep)  # so that a module can be trained over a ring


def ring_write(ring: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """The ring [B, H, S, K] after keys or values [B, H, T, K] of a segment were written, in the ring's type.

    positions int64 [B, T]: the stream positions of the segment. Nothing else may read `ring` afterwards; read
    the result in its place.
    """
    first = positions[:, 0] % ring.shape[2]
    after: Tensor = torch.ops.xl_export.ring_write(ring, new.to(ring.dtype), first)
    return after


def ring_distances(positions: Tensor, slots: int) -> Tensor:
    """The distance int64 [B, T, S] of every query at stream positions [B, T] from the key in every slot."""
    return (positions[:, :, None] - torch.arange(slots, device=positions.device)) % slots


def translations() -> dict[Any, Any]:
    """The table with which `torch.onnx` writes a ring's update as `TensorScatter`; needs onnxscript."""
    from onnxscript.values import Opset

    opset = Opset("", 24)

    def tensor_scatter(ring: Any, new: Any, first: Any) -> Any:
        return opset.TensorScatter(ring, new, first, axis=2, mode="circular")

    return {torch.ops.xl_export.ring_write.default: tensor_scatter}


class AttentionByDistance:
    """Attention to keys in any order, with the signature of `trainer.model.attention.relative_attention`.

    distance int64 [B, T, J]: of every query from every key; the slots of a ring have no order that
    `relative_attention` knows. The terms have one row for each distance, and longer ones have the last row.
    """

    def __init__(self, distance: Tensor) -> None:
        self.distance = distance

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        visible: Tensor,
        terms: Terms,
        persistent: tuple[Tensor, Tensor] | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        query_BHTK, key_BHJK, value_BHJK = (x.transpose(1, 2) for x in (query, key, value))
        scale = query.shape[-1] ** -0.5
        content = query_BHTK if terms.u is None else query_BHTK + terms.u[:, None]
        if terms.window is not None:
            visible = visible & (self.distance <= terms.window)
        bias = torch.where(visible, 0.0, float("-inf"))[:, None]
        by_distance = _scores(query_BHTK, terms, scale)
        gate = None if terms.gate is None else terms.gate.T[None, :, None]
        fused = persistent is None and not (gate is not None and terms.epsilon)
        if (
            fused and gate is not None
        ):  # to multiply after the softmax and divide by the sum is to add the logarithm
            by_distance = gate.log() if by_distance is None else by_distance + gate.log()
        if by_distance is not None:
            bias = bias + self._by_key(by_distance, query_BHTK)
        if fused:
            answer = torch.nn.functional.scaled_dot_product_attention(
                content, key_BHJK, value_BHJK, attn_mask=bias.expand(-1, query.shape[2], -1, -1), scale=scale
            )
            return answer.transpose(1, 2)
        gate = None if gate is None else self._by_key(gate, query_BHTK)
        return self._in_parts(
            query_BHTK, content, key_BHJK, value_BHJK, bias, gate, persistent, terms.epsilon
        )

    def _in_parts(
        self,
        query: Tensor,
        content: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        gate: Tensor | None,
        persistent: tuple[Tensor, Tensor] | None,
        epsilon: float,
    ) -> Tensor:
        """Attention whose weights are needed by themselves: for persistent vectors, and for an epsilon."""
        J = key.shape[2]
        scale = query.shape[-1] ** -0.5
        scores = content @ key.transpose(-1, -2) * scale + bias
        if persistent is None:  # a row without visible keys has weights of zero
            blind = (bias == float("-inf")).all(dim=-1, keepdim=True)
            context = scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
            rest = None  # an empty slice is not traced as one
        else:
            own = query @ persistent[0].transpose(-1, -2) * scale
            weights = torch.cat([scores, own], dim=-1).softmax(dim=-1)
            context = weights[..., :J]
            rest = weights[..., J:]
        if gate is not None:
            context = context * gate
            total = context.sum(dim=-1, keepdim=True) + epsilon
            if rest is not None:
                total = total + rest.sum(dim=-1, keepdim=True)
            total = torch.where(total > 0, total, 1.0)
            context = context / total
            rest = None if rest is None else rest / total
        answer: Tensor = context @ value
        if persistent is not None and rest is not None:
            answer = answer + rest @ persistent[1]
        return answer.transpose(1, 2)

    def _by_key(self, by_distance: Tensor, query: Tensor) -> Tensor:
        """Values [B, H, T, J] by key, of values [B or 1, H, T or 1, R] by distance."""
        B = query.shape[0]
        H = query.shape[1]
        T = query.shape[2]
        J = self.distance.shape[2]
        row = self.distance.clamp(max=by_distance.shape[3] - 1)[:, None].expand(B, H, T, J)
        return by_distance.expand(B, H, T, -1).gather(3, row)


def _scores(query: Tensor, terms: Terms, scale: float) -> Tensor | None:
    """((q + v)·r(d) + bias(d)) / sqrt(K) [B or 1, H, T or 1, R]; None without terms by distance."""
    bias = None if terms.bias is None else terms.bias.T[None, :, None]
    if terms.position is None:
        return None if bias is None else bias * scale
    shifted = query if terms.v is None else query + terms.v[:, None]
    scores = shifted @ terms.position.permute(1, 2, 0)
    return (scores if bias is None else scores + bias) * scale
