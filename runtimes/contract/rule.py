"""The memory rule: what a token may see of the past.

A trained model, its artefact and every score share one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from runtimes.base.options import Option
from runtimes.base.records import refuse_out_of_range
from runtimes.contract.model_facts import MAX_SIZE, Positive, Size

MAX_LENGTH = MAX_SIZE  # positions
Mask = Literal["same-length", "full"]
InitialMemory = Literal["masked", "zeros"]


@dataclass(frozen=True, kw_only=True)
class MemoryRule:
    """Memory length, segment length and mask (Dai et al. 2019, section 3.2 and Appendix B)."""

    mem_len: Annotated[
        Size, Option("--mem-len", "The number of tokens remembered (M). Default: as in the run.")
    ]
    segment: Annotated[
        Positive, Option("--segment", "The largest number of tokens in one step (T). Default: as in the run.")
    ]
    mask: Annotated[
        Mask,
        Option(
            "--mask",
            "same-length: every token sees itself and the M tokens before it, so cutting a text into "
            "segments never changes a score. full: the first token of a segment sees M tokens and the last "
            "one M + T - 1. Default: as in the run.",
        ),
    ] = "same-length"
    clamp_len: Annotated[
        Positive | None,
        Option(
            "--clamp-len",
            "Longer distances use the position vector of this one; 0 is no clamp, which is null in JSON. "
            "Default: as in the run.",
        ),
    ] = None
    initial_memory: Annotated[
        InitialMemory,
        Option(
            "--initial-memory",
            "What comes before the first token: nothing (masked), or M hidden states of zero that are "
            "attended to, as in the TensorFlow and Hugging Face implementations (zeros). Default: as in "
            "the run.",
        ),
    ] = "masked"
    include_self: bool = True
    """Whether a token sees itself. Sukhbaatar et al. (2019b) leave it out."""

    def __post_init__(self) -> None:
        refuse_out_of_range(self)

    @property
    def slots(self) -> int:
        """The number of slots of the ring (S). A whole segment fits next to a whole memory."""
        return self.mem_len + self.segment

    @property
    def nearest(self) -> int:
        """The smallest distance that a token sees."""
        return 0 if self.include_self else 1

    @property
    def window_grows(self) -> bool:
        """Whether each token of a segment sees one token more of the past than the token before it."""
        return self.mask == "full"

    @property
    def cuts_change_nothing(self) -> bool:
        """Whether a score does not depend on how its stream is cut into segments."""
        return not self.window_grows

    @property
    def longest_distance(self) -> int:
        """The largest distance that any token of any segment may see."""
        return self.mem_len + (self.segment - 1 if self.window_grows else 0)

    @property
    def position_rows(self) -> int:
        """The number of rows of the position table: distances 0, 1, … to the longest one or to the clamp if
        that is smaller.
        """
        longest = self.longest_distance
        return 1 + (longest if self.clamp_len is None else min(longest, self.clamp_len))

    def visible(self, distance: Any, position: Any, offset: Any) -> Any:
        """Whether a query sees a key, as booleans: the mask rule, for NumPy arrays and for torch tensors.

        distance: the query's position minus the key's. position: the stream position of the query.
        0 is the first token of a text; a negative position is padding, which nothing sees. offset: the index
        of the query in its segment. The three broadcast.
        """
        window = self.mem_len + offset if self.window_grows else self.mem_len
        seen = (distance >= self.nearest) & (distance <= window)
        if self.initial_memory == "masked":
            seen = seen & ((distance <= position) | (distance == 0))
        return seen

    def __str__(self) -> str:
        clamp = f"clamp {self.clamp_len}" if self.clamp_len is not None else "no clamp"
        mask = f"{self.mask} mask" + ("" if self.include_self else " without the token itself")
        lengths = f"memory {self.mem_len}, segment {self.segment}"
        return f"{lengths}, {mask}, {clamp}, initial memory {self.initial_memory}"
