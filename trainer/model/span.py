"""Adaptive attention spans: each head learns how far back it attends.

Source: Sukhbaatar et al. 2019a, section 3.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from runtimes.base.errors import ArtefactError
from trainer.model.config import ModelConfig, SpanConfig

WINDOW_STEP = 64  # tokens by which the public code shortens its softmax


class AdaptiveSpan(nn.Module):
    """The spans of all heads of one layer, as the parameter `share` [H]: z_h / S, from 0 to 1."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.span is not None
        self.span: SpanConfig = config.span
        self.share = nn.Parameter(torch.empty(config.heads))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.share, self.span.initial)

    def mask(self, count: int, dtype: torch.dtype | None = None) -> Tensor:
        """m(d) [count, H] for distances 0 … count - 1: clamp((R + z + 1 - d) / R, 0, 1), and 0 beyond S.

        dtype: of the computation; the spans' own when None.
        """
        distance = torch.arange(count, device=self.share.device, dtype=dtype)[:, None]
        soft = ((1 - distance + self.share * self.span.maximum) / self.span.ramp + 1).clamp(0, 1)
        return soft.masked_fill(distance > self.span.maximum, 0.0)

    def penalty(self) -> Tensor:
        """The layer's part of the loss: the coefficient times the mean span in tokens."""
        return self.span.penalty * self.span.maximum * self.share.mean()

    def constrain(self) -> None:
        """Clamps spans to 0 … S, as after each optimiser step."""
        with torch.no_grad():
            self.share.clamp_(0, 1)

    def softmax_window(self) -> Tensor | None:
        """The longest distance in the softmax before the mask, as a tensor []; None without `epsilon`.

        The public code drops whole steps of 64 tokens beyond the longest span of a layer's heads and its
        ramp. Without `epsilon` this makes no difference. It does not wait for the device.
        """
        if not self.span.epsilon:
            return None
        share = self.share.detach().max()
        share = share if share.device.type == "mps" else share.double()  # MPS has no float64
        return self.window_for(share * self.span.maximum)

    def window_for(self, longest: Tensor) -> Tensor:
        """The window of a layer whose longest span has this many tokens."""
        S = self.span.maximum
        needed = (longest.ceil() + self.span.ramp).clamp(max=S)
        return S - (S - needed).clamp(max=S - 1) // WINDOW_STEP * WINDOW_STEP

    def window(self) -> int | None:
        """`softmax_window` as a number."""
        window = self.softmax_window()
        return None if window is None else int(window)

    def remembered(self) -> tuple[int, ...]:
        """Returns the longest distance that each head must remember.

        That is the window, or the longest distance to which the span gives weight.
        """
        window = self.window()
        return self.longest_distances() if window is None else (window,) * len(self.share)

    def longest_distances(self) -> tuple[int, ...]:
        """The longest distance that each head gives any weight.

        Raises ArtefactError for spans outside 0 to S.
        """
        if not bool(((self.share >= 0) & (self.share <= 1)).all()):
            raise ArtefactError(
                "a learned span is not between 0 and 1 times the maximum, so the run is damaged; "
                "train it again, or copy it again."
            )
        ends = (self.share.detach().cpu().double() * self.span.maximum + self.span.ramp + 1).tolist()
        return tuple(min(math.ceil(end) - 1, self.span.maximum) for end in ends)
