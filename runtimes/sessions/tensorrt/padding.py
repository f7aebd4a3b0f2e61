"""Segments of an engine brought to one length, so that a plugin sees one shape.

TensorRT leaks a CUDA module whenever the shape of a plugin with an embedded kernel changes
(NVIDIA/TensorRT#4849). So a segment shorter than the profile's is run as a longer one, a *window* of W
positions that holds it. What surrounds it in the window depends on the form of memory.

In a ring, padding follows the segment, in slots of tokens that are no longer visible. If the window would go
across the end of a ring, it begins earlier: the tokens before the segment are fed again. They see what they
saw the first time, since S = M + T, and write what is there already.

A window ends at most T positions after the first token of the step. So a step that fails, or that the caller
takes back, has written only slots that this token does not see. What has no such window, as the rest of a
segment behind the end of a ring, is run as single tokens.

In shift memory padding would replace tokens that are still visible, and what was pushed out cannot be fed
again. Only if no row has begun its text, padding may precede the segment, at negative positions.
`docs/decisions/ring-memory.md` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from runtimes.contract.engine import Profile
from runtimes.contract.spec import Spec

Arrays = dict[str, np.ndarray]
NEVER = np.iinfo(np.int64).min  # a position that no token has


class History:
    """What a window needs to know about each row: its last T tokens, and the running step.

    begins, ends: the positions of each row's first token in the step, and of its next one after it. floors:
    the first position that a window may begin at, because the tokens from there are known and the keys that
    they see are still in the ring.
    """

    def __init__(self, batch: int, longest: int) -> None:
        self.longest = longest
        self._rows = np.arange(batch)[:, None]
        self._tokens = np.zeros((batch, longest), np.int64)
        self.begins = np.full(batch, NEVER)
        self.ends = np.full(batch, NEVER)
        self.floors = np.full(batch, NEVER)

    def begin(self, positions: np.ndarray, ends: np.ndarray) -> None:
        """Begins a step of the tokens from `positions` to `ends`, int64 [B]."""
        moved = positions != self.ends  # by the caller: what comes before is unknown
        self.floors = np.where(positions <= 0, NEVER, np.where(moved, positions, self.floors))
        self.begins = positions.copy()
        self.ends = ends

    def note(self, inputs: Arrays, *, widened: bool) -> None:
        """Remembers the tokens of a part of the step, [B, n] with n at most T."""
        positions = inputs["position_ids"]
        real = positions < self.ends[:, None]
        rows = np.broadcast_to(self._rows, real.shape)[real]
        self._tokens[rows, positions[real] % self.longest] = inputs["input_ids"][real]
        if not widened:  # windows leave padding only where the next windows allow it
            behind = positions[:, -1] + 1
            floors = np.maximum(self.floors, behind - self.longest)
            self.floors = np.where(behind > self.ends, floors, self.floors)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The tokens at these positions [B, n]; before position 0 any, since they are padding."""
        tokens: np.ndarray = self._tokens[self._rows, positions % self.longest]
        return tokens


@dataclass(frozen=True, kw_only=True)
class Widened:
    """A segment [B, n] in windows [B, W]: the inputs and outputs of the longer step."""

    inputs: Arrays
    outputs: Arrays
    columns: np.ndarray  # int64 [B, n]: the place in its window of each token of the segment

    def copy_to(self, outputs: Arrays) -> None:
        """Fills the outputs of the segment."""
        rows = np.arange(len(self.columns))[:, None]
        for name, array in self.outputs.items():
            by_row = name == "logits" and "logit_rows" in self.inputs  # [N, V], of chosen positions only
            outputs[name][...] = array if by_row else array[rows, self.columns]


class Padding:
    """What segments of an engine's widest profile are padded to: its usual length, or its longest."""

    def __init__(self, spec: Spec, profile: Profile) -> None:
        self.widths = profile.tokens[1:]
        self.rings = {state.row[1] for state in spec.state} if spec.linear_ring else set[int]()
        # Keys before the text count as zeros under the other rule, and padding would replace them.
        self.before_texts = not spec.circular and spec.rule.initial_memory == "masked"

    def fits(self, length: int) -> bool:
        """Whether a segment has a length that the plugin knows; single tokens have a profile of their own."""
        return length == 1 or length in self.widths

    def widen(self, inputs: Arrays, outputs: Arrays, history: History) -> Widened | None:
        """The segment in windows; None if it fits already, or if it has no windows."""
        batch, length = inputs["input_ids"].shape
        if self.fits(length):
            return None
        width = next(width for width in self.widths if width >= length)
        # A row that has no token in this part of a step writes padding where its next token will be, and no
        # further, or it would replace what that token sees.
        first = np.minimum(inputs["position_ids"][:, 0], history.ends)
        starts = self._starts(first, length, width)
        if starts is None or (starts < history.floors).any():
            return None
        if self.rings and (starts + width > history.begins + history.longest).any():
            return None
        positions = starts[:, None] + np.arange(width)
        offsets = (first - starts)[:, None]
        columns = np.minimum(offsets + np.arange(length), width - 1)
        rows = np.arange(batch)[:, None]
        before = np.arange(width) < offsets
        tokens = np.where(before, history.at(positions), inputs["input_ids"][:, -1:])
        tokens[rows, columns] = inputs["input_ids"]
        wide = {"input_ids": tokens, "position_ids": positions}
        if "logit_rows" in inputs:
            wide["targets"] = np.full((batch, width), -1)
            wide["targets"][rows, columns] = inputs["targets"]
            row, column = np.divmod(inputs["logit_rows"], length)
            wide["logit_rows"] = row * width + columns[row, column]
        answers = {
            name: np.empty(
                array.shape if array.shape[:2] != (batch, length) else (batch, width, *array.shape[2:]),
                array.dtype,
            )
            for name, array in outputs.items()
        }
        return Widened(inputs=wide, outputs=answers, columns=columns)

    def _starts(self, first: np.ndarray, length: int, width: int) -> np.ndarray | None:
        """The first position of each row's window, int64 [B]; None if there is no window.

        A segment never crosses the end of a ring, because it was cut there.
        """
        if not self.rings:
            return first - (width - length) if self.before_texts and (first <= 0).all() else None
        begins = np.max([first - first % size for size in self.rings], axis=0)
        ends = np.min([first - first % size + size for size in self.rings], axis=0)
        starts = np.minimum(first, ends - width)
        return starts if (starts >= begins).all() else None
