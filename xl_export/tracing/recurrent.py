"""`nn.LSTM` and `nn.GRU`, as modules for `trace`; a traced graph has ONNX's operator for each layer.

PyTorch would trace their loop over tokens, for one number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtimes.base.errors import ConfigError
from xl_export.tracing.module import features

CLOSED = 1e4  # of which the sigmoid is exactly 1 in float32, and that of its negative exactly 0


class Recurrent(nn.Module):
    """Reads `input` [B, T, input_size] and returns `output` [B, T, hidden_size], that of the last layer.

    Its memory is h of each layer, in an LSTM followed by c; it starts with zeros. A further input, 1 for
    padding, closes a gate of each layer, so that the state before position 0 is zero.
    """

    def __init__(self, net: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        kind = type(net).__name__
        if net.bidirectional:
            raise ConfigError(
                f"the {kind} is bidirectional, and no stream can be read from its end; give one with "
                "bidirectional=False."
            )
        if net.proj_size:
            raise ConfigError(
                f"the {kind} has proj_size={net.proj_size}, which ONNX's operator lacks; write a module with "
                "nn.LSTMCell, a projection and step_tokens = 1."
            )
        self.inputs = features(net.input_size)
        self.lstm = isinstance(net, nn.LSTM)
        self.width = net.hidden_size
        self.layers = net.num_layers
        with torch.no_grad():
            for layer in range(self.layers):
                for name, x in self._weights(net, layer).items():
                    self.register_parameter(f"{name}_{layer}", nn.Parameter(x, requires_grad=False))

    def _weights(self, net: nn.LSTM | nn.GRU, layer: int) -> dict[str, Tensor]:
        """W, R and B of a layer as ONNX has them: its order of gates, and an axis for directions."""
        from_x, from_h = (getattr(net, f"weight_{side}_l{layer}") for side in ("ih", "hh"))
        gates = len(from_x) // self.width
        closed = torch.zeros(gates, self.width, 1)
        # Nothing enters the c of an LSTM (gate i); a GRU keeps its h (gate z).
        closed[0 if self.lstm else 1] = -CLOSED if self.lstm else CLOSED
        biases = [getattr(net, f"bias_{side}_l{layer}", torch.zeros(len(from_x))) for side in ("ih", "hh")]
        wide = torch.cat([from_x, closed.flatten(0, 1)], dim=1)
        order = _TO_ONNX[self.lstm]
        W, R, *b = (_reordered(x, order)[None] for x in (wide, from_h, *biases))
        return {"W": W, "R": R, "B": torch.cat(b, dim=1)}

    def start(self, batch: int) -> list[Tensor]:
        return [torch.zeros(batch, self.width) for _ in range(self.layers * (1 + self.lstm))]

    def step(self, x: Tensor, positions: Tensor, memory: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        goes_on = positions[:, :1] > 0
        padding = (positions < 0).float().T[..., None]
        x = x.transpose(0, 1)
        after: list[Tensor] = []
        for layer in range(self.layers):
            state = memory[len(after) : len(after) + 1 + self.lstm]
            begun = [torch.where(goes_on, each, 0.0)[None] for each in state]
            operator = torch.ops.xl_export.lstm if self.lstm else torch.ops.xl_export.gru
            weights = (getattr(self, f"{name}_{layer}") for name in "WRB")
            y, *new = operator(torch.cat([x, padding], dim=-1), *weights, *begun)
            x = y[:, 0]
            after += [each[0] for each in new]
        return x.transpose(0, 1), after


# The gates of PyTorch in ONNX's order and the other way round: i f g o and i o f c, r z n and z r h.
_TO_ONNX = {True: [0, 3, 1, 2], False: [1, 0, 2]}
_TO_TORCH = {True: [0, 2, 3, 1], False: [1, 0, 2]}


@torch.library.custom_op("xl_export::lstm", mutates_args=())
def _lstm(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ONNX's LSTM: y [T, 1, B, H], h and c [1, B, H]."""
    y, h, c = torch.lstm(x, [h, c], _as_torch(w, r, b, lstm=True), True, 1, 0.0, False, False, False)
    return y[:, None].clone(), h, c


@torch.library.custom_op("xl_export::gru", mutates_args=())
def _gru(x: Tensor, w: Tensor, r: Tensor, b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """ONNX's GRU: y [T, 1, B, H] and h [1, B, H]."""
    y, after = torch.gru(x, h, _as_torch(w, r, b, lstm=False), True, 1, 0.0, False, False, False)
    return y[:, None].clone(), after


def _as_torch(w: Tensor, r: Tensor, b: Tensor, *, lstm: bool) -> list[Tensor]:
    order = _TO_TORCH[lstm]
    parts = (w[0], r[0], *b[0].chunk(2))
    return [_reordered(x, order) for x in parts]


def _reordered(x: Tensor, gates: Sequence[int]) -> Tensor:
    """A matrix or a bias whose gates are in this order."""
    return torch.cat([x.chunk(len(gates))[gate] for gate in gates])


@_lstm.register_fake
def _(x: Tensor, w: Tensor, r: Tensor, b: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    return _like(x, state)


@_gru.register_fake
def _(x: Tensor, w: Tensor, r: Tensor, b: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
    return _like(x, state)


def _like(x: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape[0], 1, *state[0].shape[1:]), *map(torch.empty_like, state)


def translations() -> dict[Any, Any]:
    """The table with which `torch.onnx` writes these operators; needs onnxscript."""
    from onnxscript.values import Opset

    opset = Opset("", 22)

    def lstm(x: Any, w: Any, r: Any, b: Any, h: Any, c: Any) -> Any:
        return opset.LSTM(x, w, r, b, None, h, c, hidden_size=h.shape[2])

    def gru(x: Any, w: Any, r: Any, b: Any, h: Any) -> Any:
        return opset.GRU(x, w, r, b, None, h, hidden_size=h.shape[2], linear_before_reset=1)

    return {torch.ops.xl_export.lstm.default: lstm, torch.ops.xl_export.gru.default: gru}
