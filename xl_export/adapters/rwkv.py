"""RWKV-7 of the package `rwkv` as a module that `xl_export.trace` exports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from runtimes.base.errors import ConfigError
from xl_export.tracing.module import Sizes


def from_rwkv(model: Any) -> nn.Module:
    """A module for `trace` around a `rwkv.model.RWKV` of RWKV-7 with the strategy "cpu fp32".

    Set PYTORCH_JIT=0 and RWKV_V7_ON=1 in the environment before PyTorch and `rwkv` are imported, because
    compiled code cannot be traced. The vocabulary for `trace` is the model's own `tokenizer.json`, or
    `IdsVocab(65536)` for RWKV's "world" tokens, which no vocabulary here encodes.

    Raises ConfigError for another model or strategy.
    """
    if not hasattr(model, "generate_zero_state"):
        raise ConfigError(
            f"{type(model).__name__} is not RWKV-7; set RWKV_V7_ON=1 in the environment before rwkv is "
            "imported."
        )
    if hasattr(model, "_c"):  # of TorchScript
        raise ConfigError(
            f"{type(model).__name__} is compiled, and only Python code can be traced; set PYTORCH_JIT=0 in "
            "the environment before PyTorch is imported."
        )
    for tensor in model.z.values():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"the model is {kind} on {tensor.device}, expected float32 on the CPU; make it with "
                'strategy="cpu fp32".'
            )
    return RWKV(model)


class RWKV(nn.Module):
    """The package computes one token of one stream, so rows are computed with `torch.vmap`."""

    step_tokens = 1
    mem_len = 64  # tokens; a state has no such number, so it only says how long a comparison goes on

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        args = model.args
        self.sizes = Sizes(
            vocab_size=args.vocab_size,
            layers=args.n_layer,
            d_model=args.n_embd,
            heads=model.n_head,
            head_dim=model.head_size,
        )
        self.names = list(model.z)
        # The package keeps them in a dictionary, where PyTorch finds no parameters.
        self.weights = nn.ParameterList(nn.Parameter(each, requires_grad=False) for each in model.z.values())

    def start(self, batch: int) -> list[Tensor]:
        return [each.expand(batch, *each.shape).clone() for each in self.model.generate_zero_state()]

    def step(
        self, tokens: Tensor, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        begun = positions[:, 0] > 0
        states = [torch.where(begun.view(-1, *[1] * (each.ndim - 1)), each, 0.0) for each in memory]
        weights = dict(zip(self.names, self.weights, strict=True))

        def of_row(embedded: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            # A trace cannot look up a row by a number, so the table has only the row of this token.
            table = {"emb.weight": embedded[None]}
            with mock.patch.object(self.model, "z", weights | table):
                logits, after = self.model.forward_one(0, list(state))
            return logits, after

        with mock.patch.multiple(nn.functional, layer_norm=layer_norm, group_norm=group_norm):
            logits, after = torch.vmap(of_row)(weights["emb.weight"][tokens[:, 0]], states)
        return logits[:, None], after

    def original(self, tokens: Tensor, state: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """The package's own loop, over tokens [1, T] of one stream."""
        before = None if state is None else list(state)  # it is changed in place
        logits, after = self.model.forward(tokens[0].tolist(), before, full_output=True)
        return logits.reshape(1, tokens.shape[1], -1), after


# In `torch.vmap` PyTorch's own fix the number of rows.
def layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> Tensor:
    """`torch.nn.functional.layer_norm` over the last axis."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def group_norm(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """`torch.nn.functional.group_norm` of x [1, C]."""
    grouped = x.view(num_groups, -1)
    weight, bias = weight.view_as(grouped), bias.view_as(grouped)
    return layer_norm(grouped, grouped.shape[1:], weight, bias, eps).view_as(x)
