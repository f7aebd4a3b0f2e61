"""How far back a training step must compute, for models with adaptive spans.

Keys beyond the longest span of a layer and its ramp have no weight, and their weight has no gradient. So a
step leaves them out, and its loss and gradients are the same. Spans change in every step, but to read them
waits for the device. Here they are read rarely; between two readings, a span is bounded by what the optimiser
can have added to it.
"""

from __future__ import annotations

import math

import torch

from trainer.model.model import LanguageModel
from trainer.model.span import WINDOW_STEP, AdaptiveSpan
from trainer.training.shard import whole

ROOM_TOKENS = 32.0  # tokens that spans may grow by until they are read again
READ_EVERY_STEPS = 200  # steps; spans that have shrunk are noticed then
ROUNDING_TOKENS = 0.01  # tokens; more than the error of a span in fp32


class SpanLengths:
    """The distances beyond which the layers of a model have no weight, kept right from step to step."""

    def __init__(self, model: LanguageModel, optimizer: torch.optim.Optimizer, clip: float) -> None:
        self.spans = model.spans()
        self.optimizer = optimizer
        self.clip = clip
        self.steps = 0  # since the last reading
        self.read: list[float] = []  # the longest span of each layer in tokens, when they were read
        self.squares: list[float] = []  # Adagrad's smallest sum of squared gradients of each layer, then
        self.grown: list[float] = []  # the most that the spans have grown by since then, in tokens
        self.lengths: tuple[int, ...] = ()

    def current(self) -> tuple[int, ...] | None:
        """For each layer a multiple of 64, or the maximum; None for a model without spans."""
        if not self.spans:
            return None
        if not self.read or self.steps >= READ_EVERY_STEPS or not self._long_enough():
            self._read()
        return self.lengths

    def moved(self, rate: float) -> None:
        """Takes note of a step of the optimiser with this learning rate."""
        self.steps += 1
        for layer, span in enumerate(self.spans if self.read else []):
            self.grown[layer] += span.span.maximum * self._largest_step(layer, rate)

    def forget(self) -> None:
        """Must be called when the weights were changed by anything else than a step of the optimiser."""
        self.read = []

    def _long_enough(self) -> bool:
        now = (read + grown for read, grown in zip(self.read, self.grown, strict=True))
        needed = (length_for(span, z) for span, z in zip(self.spans, now, strict=True))
        return all(map(int.__le__, needed, self.lengths))

    def _read(self) -> None:
        longest = [whole(span.share.detach()).max() * span.span.maximum for span in self.spans]
        sums = (self.optimizer.state[span.share].get("sum", span.share) for span in self.spans)
        squares = [whole(tensor.detach()).min() for tensor in sums]
        numbers = torch.stack([*longest, *squares]).tolist()  # one transfer for all layers
        self.read = numbers[: len(longest)]
        self.squares = numbers[len(longest) :]
        self.steps = 0
        self.grown = [0.0] * len(longest)
        self.lengths = tuple(
            length_for(span, z + ROOM_TOKENS) for span, z in zip(self.spans, self.read, strict=True)
        )

    def _largest_step(self, layer: int, rate: float) -> float:
        """The most that one step can add to a share of the maximum.

        Adam's step is rate · m / √v with m = (1 - β₁) Σ β₁ⁱ gᵢ and v = (1 - β₂) Σ β₂ⁱ gᵢ², so by Cauchy and
        Schwarz m / √v ≤ (1 - β₁) / √(1 - β₂) · √(Σ (β₁² / β₂)ⁱ); the corrections of the bias lower it
        (below). Weight decay only shortens spans. Adagrad's step is rate · min(1, clip / |g|) · |g| /
        √(sum + g²), which is largest for |g| = clip, and the sum only grows.
        """
        if isinstance(self.optimizer, torch.optim.Adagrad):
            return rate * self.clip / math.hypot(math.sqrt(self.squares[layer]), self.clip)
        if not isinstance(self.optimizer, torch.optim.Adam):  # AdamW is one too
            return math.inf
        first, second = self.optimizer.param_groups[0]["betas"]
        ratio = first**2 / second
        if ratio >= 1:
            return math.inf
        return float(rate * (1 - first) / math.sqrt((1 - second) * (1 - ratio)))


def length_for(span: AdaptiveSpan, longest: float) -> int:
    """The distance beyond which a layer with this longest span has no weight, rounded up to 64."""
    S = span.span.maximum
    if not math.isfinite(longest):
        return S  # training has diverged, or nothing is known
    # The mask is 0 at z + R + 1 and has a gradient there, so this distance counts.
    needed = math.floor(longest + span.span.ramp + 1 + ROUNDING_TOKENS)
    if span.span.epsilon:
        window = span.window_for(torch.tensor(longest + ROUNDING_TOKENS, dtype=torch.float64))
        needed = max(needed, int(window))
    return min(S, -(-needed // WINDOW_STEP) * WINDOW_STEP)
