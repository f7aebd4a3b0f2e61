"""The memory of some lanes while a model trains. A step copies only the part of it that it reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LaneMemory:
    """The last M inputs of each layer, in the pieces in which they came: what was there first, and segments.

    A step adds one piece and drops tokens of the oldest ones. Pieces are joined only where a reader asks for
    them. A model with short spans reads a few tokens of a long memory, and the rest of it stays where it is.
    """

    def __init__(self, memory: Sequence[Tensor]) -> None:
        """memory: the last M inputs [B, M, D] of each layer, in fp32."""
        self._pieces = [[tensor] for tensor in memory]

    def whole(self) -> list[Tensor]:
        """The memory [B, M, D] of each layer, contiguous. It keeps no more alive than itself."""
        for pieces in self._pieces:
            # A view of one lane or of no token is contiguous too, and keeps its whole segment alive.
            is_view = pieces[0].untyped_storage().nbytes() > pieces[0].nbytes
            if len(pieces) > 1 or is_view or not pieces[0].is_contiguous():
                pieces[:] = [torch.cat(pieces, dim=1)]
        return [pieces[0] for pieces in self._pieces]

    def last(self, lengths: Sequence[int] | None) -> list[Tensor]:
        """The last tokens of the memory of each layer: as many as `lengths` says for each, or all."""
        if lengths is None:
            return self.whole()
        pairs = zip(self._pieces, lengths, strict=True)
        return [torch.cat(_newest(pieces, length), dim=1) for pieces, length in pairs]

    def add(self, inputs: Sequence[Tensor], mem_len: int) -> None:
        """Adds the inputs [B, T, D] of each layer, and keeps the last `mem_len` tokens."""
        for pieces, x in zip(self._pieces, inputs, strict=True):
            pieces[:] = _newest([*pieces, x.float()], mem_len)


def _newest(pieces: Sequence[Tensor], count: int) -> list[Tensor]:
    """Views of the last `count` tokens of pieces [B, n, D]; at least one view, which may be empty."""
    views = [pieces[-1][:, max(0, pieces[-1].shape[1] - count) :]]
    for piece in reversed(pieces[:-1]):
        count -= views[0].shape[1]
        if count <= 0:
            break
        views.insert(0, piece[:, max(0, piece.shape[1] - count) :])
    return views
