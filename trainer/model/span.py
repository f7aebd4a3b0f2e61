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

        dtype: of the computation; that of the spans when None.
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

    def window(self) -> int | None:
        """Returns the longest distance in the softmax before the mask; None where it makes no difference.

        It makes a difference where `epsilon` is set.

        The public code drops whole steps of 64 tokens beyond the longest span of a layer's heads and its
        ramp.
        """
        if not self.span.epsilon:
            return None
        return self.window_for(self.share.max().item() * self.span.maximum)

    def window_for(self, longest: float) -> int:
        """The window of a layer whose longest span has this many tokens."""
        S = self.span.maximum
        needed = min(S, math.ceil(longest) + self.span.ramp)
        return S - min(S - 1, S - needed) // WINDOW_STEP * WINDOW_STEP

    def softmax_window(self) -> Tensor | None:
        """`window` as a tensor [], without waiting for the device."""
        if not self.span.epsilon:
            return None
        S = self.span.maximum
        share = self.share.detach().max()
        share = share if share.device.type == "mps" else share.double()  # MPS has no float64
        longest = ((share * S).ceil() + self.span.ramp).clamp(max=S)
        return S - (S - longest).clamp(max=S - 1) // WINDOW_STEP * WINDOW_STEP

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
