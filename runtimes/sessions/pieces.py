"""A segment in pieces, for a ring whose graph cannot write across its end (`Spec.linear_ring`).

No piece is written across the end of any ring in any row. Under the mask `same-length` cutting a segment
changes no score. A piece that fails leaves the memory as good as it was: it has written only slots that are
not visible from the positions of the memory, and the same tokens are written there again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import numpy as np

Arrays = dict[str, np.ndarray]


def cut(positions: np.ndarray, length: int, slots: Collection[int]) -> list[slice]:
    """The pieces of a segment of `length` tokens, in order.

    positions: int64 [B], of each row's first token. slots: the numbers of slots of the model's rings.
    """
    ends = {length}
    for size in slots:
        turn = size - positions % size  # in how many tokens each row comes to the end of its ring
        for first in np.unique(turn).tolist():
            ends.update(range(first, length, size))
    edges = [0, *sorted(ends)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def run_in_pieces(
    run: Callable[[Arrays, Arrays], None],
    inputs: Arrays,
    outputs: Arrays,
    pieces: list[slice],
    *,
    empty_rows: bool,
) -> None:
    """Fills the outputs of a whole segment [B, T, …] by running its pieces in order.

    run: runs the graph over the inputs and outputs of one piece. empty_rows: whether the graph can compute
    the logits of no position. If it cannot, it computes the logits of each row's last one, which are dropped.
    """
    shape = inputs["input_ids"].shape
    chosen = np.zeros(shape, bool)  # the positions whose logits are wanted, in graphs that compute only those
    if "logit_rows" in inputs:
        chosen.ravel()[inputs["logit_rows"]] = True
    number = np.cumsum(chosen).reshape(shape) - 1  # of a chosen position among all of them, in the same order
    for piece in pieces:
        part = {
            name: np.ascontiguousarray(array[:, piece])
            for name, array in inputs.items()
            if name != "logit_rows"
        }
        answers = {
            name: np.empty(array[:, piece].shape, array.dtype)
            for name, array in outputs.items()
            if name != "logits"
        }
        width = piece.stop - piece.start
        wanted = chosen[:, piece]
        if "logit_rows" in inputs:
            rows = np.flatnonzero(wanted)
            if not (rows.size or empty_rows):
                rows = np.arange(1, shape[0] + 1) * width - 1
            part["logit_rows"] = rows
            where = rows.shape
        else:
            where = (shape[0], width)
        answers["logits"] = np.empty((*where, outputs["logits"].shape[-1]), outputs["logits"].dtype)
        run(part, answers)
        for name, array in answers.items():
            if name != "logits" or "logit_rows" not in inputs:
                outputs[name][:, piece] = array
        if wanted.any():
            outputs["logits"][number[:, piece][wanted]] = answers["logits"]
