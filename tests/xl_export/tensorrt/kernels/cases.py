"""Which tactics and divisions the tests try on each of the kernels' cases."""

from __future__ import annotations

from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import Tactic, tactics

# Tiles so small that the cases have many of them.
SMALL = (
    Tactic(kernel="segment_attention", block_t=16, block_j=16, warps=1, stages=1),
    Tactic(kernel="segment_attention", block_t=32, block_j=16, warps=2, stages=1),
    Tactic(kernel="token_attention", block_t=1, block_j=16, warps=4, stages=1),
)
EVERY_TACTIC = ("one-token-long", "three-tiles-of-queries", "span")
# Cases with the product's own tiles for GPUs with tensor memory.
SMALLER_TILES = ("three-tiles-of-queries", "ring-three-tiles-of-queries")


def tactics_of(name: str) -> list[Tactic]:
    """Those to try in the interpreter, which takes seconds for a large tile: the product's own for a few
    cases, and the token kernel where tokens are few.
    """
    case = CASES[name]
    tried = (*SMALL, *tactics(case.K, 80)) if name in EVERY_TACTIC else SMALL
    if name in SMALLER_TILES:
        tried = tuple(dict.fromkeys((*tried, *tactics(case.K, 100))))
    return [tactic for tactic in tried if tactic.block_t > 1 or case.T < 6]


def divisions_of(case: Case, tactic: Tactic) -> tuple[int, ...]:
    """Parts of the keys to try: a few, and for a single token one, and more than there are tiles and than are
    joined at a time. A ring changes no division.
    """
    if tactic not in SMALL:
        return (1,)
    return (1, 3, 40) if case.T == tactic.block_t == 1 and not case.slot else (3,)


def key(name: str, tactic: Tactic, divided: int) -> str:
    return f"{name}/{tactic.kernel}-{tactic.block_t}-{tactic.block_j}-{divided}"


# Columns (from, to) that no query of these may see, in tiles of 16: a kernel that looks at them finds NaN.
UNSEEN = {
    "fresh-token": (Case(T=1, M=64, R=65, first=(0,)), (0, 64)),
    "fresh-segment": (Case(T=16, M=64, R=65, first=(0,)), (0, 64)),
    "second-text": (Case(T=1, M=64, R=65, first=(20,)), (0, 32)),
}
# Tiles (queries, keys) whose relative shift is tried: with 1, 2, 4 and 8 warps.
SKEWS = ((16, 16), (32, 64), (64, 32), (64, 64), (128, 16), (128, 64))
