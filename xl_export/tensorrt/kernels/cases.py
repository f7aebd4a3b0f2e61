"""Cases of `xl_export::RelativeAttention` that kernels are tried on, as data: odd sizes, every mask rule,
rows at different places, persistent vectors, spans, and rings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from xl_export.tensorrt.operator import RING_INPUTS, Attributes


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes by their letters. G and R of both tables and N are at least 1."""

    B: int = 1
    H: int = 2
    T: int
    M: int
    K: int = 16
    G: int = 2
    R: int
    N: int = 1
    first: tuple[int, ...] = (1000,)  # the position of each row's first token
    span: int | None = None  # the distance in tokens from which a soft mask is zero
    slot: tuple[int, ...] = ()  # the slot of each row's first query in a ring; empty without a ring
    spare: int = 0  # number of ring slots beyond M + T, as after a segment was cut
    full_mask: int = 0
    nearest: int = 0
    initial_masked: int = 1
    persistent: int = 0
    scale: int = 1  # scale of queries, u and v; if not 1, they are whole numbers, whose sums are exact
    dtype: Literal["float16", "float32"] = "float16"  # type of everything but the positions and slots

    @property
    def attributes(self) -> Attributes:
        return Attributes(
            full_mask=self.full_mask,
            nearest=self.nearest,
            initial_masked=self.initial_masked,
            persistent=self.persistent,
        )

    @property
    def mem_len(self) -> int | None:
        """The attribute of the operator over a ring; None without a ring."""
        return self.M if self.slot else None

    @property
    def J(self) -> int:  # noqa: N802 (a size by its letter)
        """The number of keys: of memory and segment, or the slots of the ring."""
        return self.M + self.T + self.spare

    def inputs(self) -> dict[str, np.ndarray]:
        """Random arrays by the names of the operator's inputs."""
        B, H, T, K, R, N, J = self.B, self.H, self.T, self.K, self.R, self.N, self.J
        shapes = {
            "query": (B, H, T, K),
            "key": (B, H, J, K),
            "value": (B, H, J, K),
            "u": (H, 1, K),
            "v": (H, 1, K),
            "position_table": (self.G, R, K),
            "bias_table": (self.G, R),
            "persistent_key": (H, N, K),
            "persistent_value": (H, N, K),
        }
        draw = np.random.default_rng(0)
        arrays = {name: draw.normal(size=shape).astype(self.dtype) for name, shape in shapes.items()}
        for name in ("query", "u", "v"):
            if self.scale == 1:
                arrays[name] /= np.dtype(self.dtype).type(K**0.5)
            else:
                arrays[name] = np.rint(self.scale * arrays[name])
        if self.span is not None:
            with np.errstate(divide="ignore"):
                arrays["bias_table"][:] = np.log(np.clip((self.span - np.arange(R)) / 4, 0, 1))
        arrays["first"] = np.array(self.first, np.int32)
        if self.slot:
            arrays["slot"] = np.array(self.slot, np.int32)
        return {name: arrays[name] for name in RING_INPUTS if name in arrays}


CASES = {
    "one-token": Case(T=1, M=50, K=24, R=51),
    "one-token-long": Case(T=1, M=300, K=64, R=301, first=(290,)),
    "one-token-wide": Case(T=1, M=150, K=128, H=1, G=1, R=80),
    "odd-head-width": Case(T=5, M=33, K=41, R=34),
    "three-tiles-of-queries": Case(T=37, M=37, R=38),
    "single-precision": Case(T=19, M=37, K=24, R=57, dtype="float32", persistent=3, N=3),
    "full-mask": Case(T=21, M=30, R=51, full_mask=1),
    "full-mask-clamped": Case(T=21, M=30, R=9, full_mask=1),
    "no-memory": Case(T=20, M=0, R=1),
    "no-memory-single": Case(T=1, M=0, R=1),
    "scores-in-the-thousands": Case(T=19, M=37, R=57, scale=200),
    "one-token-scores-in-the-thousands": Case(T=1, M=70, R=71, scale=200),
    "shared-table": Case(T=7, M=21, K=32, R=22, G=1),
    "restarted-row": Case(B=3, T=9, M=40, R=41, first=(1000, 0, 17)),
    "padded-row": Case(B=2, T=9, M=20, R=21, first=(-4, -60)),
    "zeros-before-the-text": Case(B=2, T=9, M=20, R=21, first=(0, 3), initial_masked=0),
    "not-itself": Case(B=2, T=9, M=20, R=21, first=(0, 50), nearest=1),
    "persistent": Case(B=2, T=9, M=20, R=21, first=(0, 50), nearest=1, persistent=5, N=5),
    "many-persistent": Case(T=3, M=4, R=5, persistent=150, N=150),
    "span": Case(T=18, M=40, K=64, R=41, G=1, span=11),
    "span-shorter-than-a-tile": Case(T=1, M=40, R=41, G=1, span=3, nearest=1, persistent=2, N=2),
    "only-persistent-visible": Case(T=4, M=6, R=11, G=1, span=0, persistent=2, N=2),
    # A memory across the wrap and one that is not, in a ring that is not full yet.
    "ring-one-token": Case(B=2, T=1, M=50, K=24, R=51, slot=(7, 53), spare=3, first=(1000, 5)),
    "ring-segment-cut-at-the-end": Case(B=2, T=9, M=40, R=41, slot=(52, 20), spare=12, first=(1000, 900)),
    "ring-three-tiles-of-queries": Case(B=2, T=37, M=37, R=38, slot=(0, 37), first=(1000, 30)),
    "ring-single-precision": Case(
        T=3, M=20, R=21, G=1, slot=(9,), dtype="float32", persistent=2, N=2, nearest=1
    ),
    "ring-span": Case(T=18, M=40, K=64, R=41, G=1, slot=(3,), spare=5, span=11, initial_masked=0),
    "ring-long": Case(B=2, T=1, M=300, K=64, R=301, slot=(111, 300), first=(1000, 290)),
}
