"""The decoders of x-transformers: `TransformerWrapper` and `ContinuousTransformerWrapper`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from xl_export.tracing.module import Sizes, features


def from_x_transformers(net: Any) -> nn.Module:
    """A module for `trace` around a causal wrapper with `max_mem_len`.

    Ids in and logits out, or numbers in and numbers out if the wrapper is a continuous one. The memory moves
    when `max_seq_len` tokens are complete, as in `XLAutoregressiveWrapper`: a token sees its own segment and
    the `max_mem_len` tokens before the segment. Trace it with `MemoryRule(mem_len=net.max_mem_len,
    segment=…)`, with a segment up to `max_seq_len`.

    With `shift_mem_down`, a step must not pass the end of a segment: trace it `without={"cuts"}`, and with a
    `segment` that divides `max_seq_len`.
    """
    return XTransformers(net)


class XTransformers(nn.Module):
    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.moves_every = net.max_seq_len
        layers = net.attn_layers
        if hasattr(net, "token_emb"):
            vocab_size = net.token_emb.emb.num_embeddings
            self.sizes = Sizes(vocab_size=vocab_size, layers=layers.num_attn_layers, d_model=layers.dim)
        else:
            self.inputs = features(net.project_in.in_features)

    def start(self, batch: int) -> list[Tensor]:
        layers = self.net.attn_layers
        shape = batch, self.net.max_mem_len + self.moves_every - 1, layers.dim
        return [torch.zeros(shape) for _ in range(layers.num_attn_layers)]

    def step(self, x: Tensor, positions: Tensor, memory: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        T = x.shape[1]
        W = memory[0].shape[1]
        place = positions.clamp(min=0) % self.moves_every  # in the segment
        distance = torch.arange(T)[:, None] + W - torch.arange(W + T)
        furthest = torch.minimum(positions.clamp(min=0), place + self.net.max_mem_len)
        visible = (distance >= 0) & (distance <= furthest[:, :, None])
        moved = self.net.pos_emb(x, pos=place) - self.net.pos_emb(x)
        mems = list(memory)
        if by := getattr(self.net, "shift_mem_down", 0):  # a layer reads old segments of the layer above
            own = torch.arange(W, 0, -1) <= place[:, :1]
            mems = [
                torch.where(own[:, :, None], mine, above)
                for mine, above in zip(mems, mems[by:] + mems[:by], strict=True)
            ]
            mems = mems[-by:] + mems[:-by]
        with without_einx("x_transformers.x_transformers"), without_cache(self.net.attn_layers.rel_pos):
            out, kept = self.net(
                x, mems=mems, attn_mask=visible[:, None], sum_embeds=moved, return_intermediates=True
            )
        return out, [torch.cat(pair, 1)[:, T:] for pair in zip(memory, kept.hiddens, strict=True)]


def without_cache(bias: Any) -> Any:
    """While a `with` block runs, ALiBi computes its bias anew, and does not keep it as a buffer."""
    if type(bias).__name__ != "AlibiPositionalBias":
        return nullcontext()

    def forward(i: int, j: int) -> Tensor:
        distance = torch.arange(j - i, j)[:, None] - torch.arange(j)
        return nn.functional.pad(
            -distance.abs() * bias.slopes, (0, 0, 0, 0, 0, bias.total_heads - bias.heads)
        )

    return mock.patch.object(bias, "forward", forward)


def without_einx(module: str) -> Any:
    """While a `with` block runs, a module computes with PyTorch what it computes with einx.

    einx turns sizes into numbers, so the graph would fit only the batch and the segment of the trace.
    """
    operations: dict[str, Any] = {
        "add": torch.add,
        "subtract": torch.sub,
        "multiply": torch.mul,
        "where": torch.where,
    }
    plain = {name: _broadcasting(operation) for name, operation in operations.items()}
    return mock.patch.object(sys.modules[module], "einx", SimpleNamespace(**plain))


def _broadcasting(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(pattern: str, *given: Any) -> Tensor:
        """Such as `call("j, i -> i j", keys, queries)`."""
        sides, axes = (side.strip() for side in pattern.split("->"))
        arrays = []
        for side, x in zip(sides.split(","), given, strict=True):
            names = side.split()
            x = torch.as_tensor(x)
            x = x.permute([names.index(axis) for axis in axes.split() if axis in names])
            arrays.append(x[tuple(slice(None) if axis in names else None for axis in axes.split())])
        return operation(*arrays)

    return call
