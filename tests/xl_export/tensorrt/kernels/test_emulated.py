"""The PTX that an engine embeds, executed on the CPU by `tests/ptx`: every instruction of every thread.

The compiler may have made one fused multiply-add of a product and a difference, which does not round in
between. `tests/ptx/machine.py` lists the faults that it finds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.ptx.driver import EmulatedDriver
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import JOINS, PTX_VERSIONS, Tactic, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, naive_answer, run_embedded

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("compiled_once", "short_parts")

# The first tile of keys that a program visits has queries to which nothing in it is visible: the last queries
# of a tile, whose memory begins later, and the first ones of a new text.
MIDDLE = Case(T=70, M=100, H=1, K=16, G=1, R=101, first=(4000,))
BEGINNING = dataclasses.replace(MIDDLE, first=(0,))
RING = dataclasses.replace(MIDDLE, slot=(90,), spare=5)
# Where `sm_80` has the largest tiles for heads of up to 64.
TILES = {f"{t.kernel}-{t.block_t}x{t.block_j}": t for t in tactics(16, 80)}
BY_DEFAULT = ("token_attention-1x64", "segment_attention-128x64")
EMULATED = sorted(PTX_VERSIONS.keys() - {87, 89})  # these two have the code of 8.6
MULTIPROCESSORS = 2  # few programs, with several tiles of keys each


def check(
    case: Case,
    tactic: Tactic,
    capability: int,
    join: Tactic = JOINS[0],
    multiprocessors: int = MULTIPROCESSORS,
    driver: type[EmulatedDriver] = EmulatedDriver,
) -> None:
    made: Any = driver(capability, multiprocessors=multiprocessors)
    got = run_embedded(made, case.inputs(), case.attributes, mem_len=case.mem_len, tactic=tactic, join=join)
    assert np.isfinite(got.answer).all()
    assert np.abs(got.answer - naive_answer(case)).max() <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_tiles_that_no_query_sees_are_not_looked_at(name: str) -> None:
    """They are NaN here, as the memory of an earlier text may be."""
    inputs = BEGINNING.inputs()
    for memory in ("key", "value"):
        inputs[memory][:, :, :64] = np.nan
    driver: Any = EmulatedDriver(80, multiprocessors=MULTIPROCESSORS)
    got = run_embedded(driver, inputs, BEGINNING.attributes, tactic=TILES[name], join=JOINS[0])
    assert np.abs(got.answer - naive_answer(BEGINNING)).max() <= TOLERANCES[BEGINNING.dtype]


def other_shape(seed: int) -> Case:
    """MIDDLE with another batch, segment, memory and positions, for the same compiled kernel."""
    draw = np.random.default_rng(seed)
    B = int(draw.integers(1, 3))
    M = int(draw.integers(0, 150))
    first = draw.choice([0, 1, M, M + 1, 4000], B)
    return dataclasses.replace(MIDDLE, B=B, T=int(draw.integers(1, 140)), M=M, first=tuple(map(int, first)))


def random_case(seed: int) -> Case:
    """A case with every size and attribute drawn."""
    draw = np.random.default_rng(seed)
    size = lambda least, most: int(draw.integers(least, most + 1))  # noqa: E731
    B, T, M, H, N = size(1, 3), size(1, 80), size(0, 150), size(1, 3), size(1, 70)
    first = tuple(size(-3, 2 * M) for _ in range(B))
    ring = bool(size(0, 1))
    spare = size(0, 20) if ring else 0
    return Case(
        B=B,
        H=H,
        T=T,
        M=M,
        K=size(3, 128),
        G=(1, H)[size(0, 1)],
        R=size(1, M + T + 1),
        N=N,
        first=first,
        span=size(0, M) if size(0, 3) == 0 else None,
        slot=tuple(size(0, M + spare) for _ in range(B)) if ring else (),
        spare=spare,
        full_mask=0 if ring else size(0, 1),
        nearest=size(0, 1),
        initial_masked=size(0, 1),
        persistent=size(0, 1) * size(1, N),
        scale=100 if size(0, 3) == 0 else 1,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in TILES],
)
def test_embedded_kernels_equal_the_naive_operator(name: str) -> None:
    """In the middle of a stream, at its beginning and in its padding, with the same constants of a kernel."""
    check(MIDDLE, TILES[name], 80)
    check(dataclasses.replace(MIDDLE, B=2, T=9, first=(-4, -60)), TILES[name], 80)
    check(BEGINNING, TILES[name], 80, JOINS[1])
    check(other_shape(0), TILES[name], 80)


def test_products_of_warp_groups_equal_the_naive_operator() -> None:
    check(other_shape(0), TILES["segment_attention-64x64"], 90)


def test_a_query_that_does_not_see_itself_in_pieces_of_columns() -> None:
    """Rows with padding, and heads whose last piece of columns is not full."""
    case = Case(B=2, T=20, M=30, H=1, K=44, G=1, R=51, first=(-4, -60), nearest=1)
    pieces = next(t for t in tactics(case.K, 100) if (t.block_t, t.block_j) == (32, 32))
    check(case, pieces, 100)
    check(dataclasses.replace(case, first=(-40, 25)), pieces, 100, JOINS[1], multiprocessors=2)


@pytest.mark.slow  # minutes: hundreds of kernels are compiled
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", EMULATED)
@pytest.mark.parametrize("name", ["middle", "beginning", "ring", *CASES])
def test_every_embedded_kernel_equals_the_naive_operator(name: str, capability: int) -> None:
    case = {"middle": MIDDLE, "beginning": BEGINNING, "ring": RING, **CASES}[name]
    for n, tactic in enumerate(tactics(case.K, capability, case.dtype)):
        check(case, tactic, capability, JOINS[n % 2], multiprocessors=1 + 15 * (n % 2))


@pytest.mark.slow
@pytest.mark.parametrize("capability", EMULATED)
@pytest.mark.parametrize("seed", range(8))
def test_kernels_of_random_cases_equal_the_naive_operator(seed: int, capability: int) -> None:
    case = random_case(100 * capability + seed)
    known = tactics(case.K, capability)
    check(
        case, known[seed % len(known)], capability, JOINS[seed // 2 % 2], multiprocessors=1 + 15 * (seed % 2)
    )
