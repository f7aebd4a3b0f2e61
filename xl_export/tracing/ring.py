"""The ring in PyTorch: its write, which becomes `TensorScatter` in a traced graph, and its distances.

The token of stream position p is in slot p mod S. A runtime binds past and present of a ring to one buffer,
which is right only where the write is the single reader of the past. So the write is an operator of its own
in the trace, and never a composition of others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
