"""What training and scoring ask of a reference, whatever project its code comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtimes.contract.rule import MemoryRule


class ReferenceModel(nn.Module):
    """A model of public code. A subclass sets `model`, and overrides `empty` and `losses`."""

    model: nn.Module

    def __init__(self, rule: MemoryRule) -> None:
        super().__init__()
        self.rule = rule

    def empty(self, lanes: int) -> list[Tensor]:
        """The memory of new streams, in the project's own form."""
        raise NotImplementedError

    def losses(self, tokens: Tensor, targets: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The loss in nats [B, T] of each target after tokens int64 [B, T], and the memory after them."""
        raise NotImplementedError

    def penalty(self) -> Tensor:
        """What training minimises besides the mean loss."""
        return torch.zeros(())

    def constrain(self) -> None:
        """Puts parameters back into their range after a step."""

    def mean_span(self) -> float | None:
        """The mean learned span in tokens; None where spans are not learned."""
        return None


@dataclass
class ReferenceMemory:
    """The memory of one stream in each row, as `evaluate` carries it."""

    tensors: list[Tensor]


class ReferenceSession:
    """A reference as a session that `evaluate` can score: it is fed as it was trained."""

    def __init__(self, model: ReferenceModel) -> None:
        self.model = model.eval()
        self.rule = model.rule
        self.identity = "reference"

    def start(self, lanes: int) -> Any:
        return ReferenceMemory(self.model.empty(lanes))

    def score(self, tokens: np.ndarray, targets: np.ndarray, memory: Any) -> tuple[np.ndarray, Any]:
        """log p [B, T] of the targets, and the memory after the tokens. A target of -1 is padding."""
        with torch.no_grad():
            nats, after = self.model.losses(
                torch.from_numpy(tokens), torch.from_numpy(targets).clamp(min=0), memory.tensors
            )
        return -nats.numpy(), ReferenceMemory(after)
