"""What a token may see of the past: the rule that a trained model, its artefact and every score share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from runtimes.base.errors import ConfigError

MAX_LENGTH = 1 << 24  # positions; a bound that turns absurd sizes into a sentence instead of an allocation


@dataclass(frozen=True, kw_only=True)
class MemoryRule:
    """Memory length, segment length and mask (Dai et al. 2019, section 3.2 and Appendix B).

    mem_len: tokens remembered (M). segment: the most tokens in one step (T).
    mask: `same-length`: every token sees itself and the M before it, so cutting a stream into segments
    never changes a score; `full`: the first token of a segment sees M, the last M + T - 1.
    include_self: whether a token sees itself; Sukhbaatar et al. (2019b) leave it out.
    clamp_len: distances beyond it use its position vector; null for none.
    initial_memory: what lies before the first token: `masked` (nothing to see) or `zeros` (M hidden states
    of zero that are attended to, as in the TensorFlow and Hugging Face implementations).
    """

    mem_len: int
    segment: int
    mask: Literal["same-length", "full"] = "same-length"
    clamp_len: int | None = None
    initial_memory: Literal["masked", "zeros"] = "masked"
    include_self: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.mem_len <= MAX_LENGTH:
            raise ConfigError(f"mem_len is {self.mem_len}; expected 0 to {MAX_LENGTH} tokens.")
        if not 1 <= self.segment <= MAX_LENGTH:
            raise ConfigError(f"segment is {self.segment}; expected 1 to {MAX_LENGTH} tokens.")
        if self.clamp_len is not None and not 1 <= self.clamp_len <= MAX_LENGTH:
            raise ConfigError(f"clamp_len is {self.clamp_len}; expected null or 1 to {MAX_LENGTH}.")

    @property
    def slots(self) -> int:
        """Slots of the ring (S): a whole segment fits beside a whole memory."""
        return self.mem_len + self.segment

    @property
    def nearest(self) -> int:
        """The smallest distance that a token sees."""
        return 0 if self.include_self else 1

    @property
    def longest_distance(self) -> int:
        """The largest distance that any token of any segment may see."""
        return self.mem_len + (self.segment - 1 if self.mask == "full" else 0)

    @property
    def position_rows(self) -> int:
        """Rows of the position table: distances 0, 1, … until the longest or the clamp, whichever is nearer."""
        longest = self.longest_distance
        return 1 + (longest if self.clamp_len is None else min(longest, self.clamp_len))

    def visible(self, distance: Any, position: Any, offset: Any) -> Any:
        """Whether a query sees a key: the mask rule, for NumPy arrays and torch tensors alike.

        distance: query position minus key position. position: stream position of the query (0 is the
        first token of a text; a negative one is padding, which nothing sees). offset: index of the query
        in its segment. The three broadcast.
        """
        window = self.mem_len + offset if self.mask == "full" else self.mem_len
        seen = (distance >= self.nearest) & (distance <= window)
        if self.initial_memory == "masked":
            seen = seen & ((distance <= position) | (distance == 0))
        return seen

    def __str__(self) -> str:
        clamp = f"clamp {self.clamp_len}" if self.clamp_len is not None else "no clamp"
        mask = f"{self.mask} mask" + ("" if self.include_self else " without the token itself")
        return f"memory {self.mem_len}, segment {self.segment}, {mask}, {clamp}, initial memory {self.initial_memory}"
