"""The PTX that an engine embeds, executed on the CPU by `tests/ptx`: every instruction of every thread.

Triton's interpreter computes what the source says. This is what the compiler made of it: a product and a
difference may have become one fused multiply-add, which does not round in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.ptx.driver import EmulatedDriver
from xl_export.tensorrt.kernels.cases import CASES, Case
from xl_export.tensorrt.kernels.compile import JOINS, PTX_VERSIONS, Tactic, tactics
from xl_export.tensorrt.kernels.driver import TOLERANCES, naive_answer, run_embedded

triton = pytest.importorskip("triton")

# The first tile of keys that a program visits has queries to which nothing in it is visible: the last queries
# of a tile, whose memory begins later, and the first ones of a new text.
MIDDLE = Case(T=64, M=100, H=1, K=16, G=1, R=101, first=(4000,))
BEGINNING = dataclasses.replace(MIDDLE, first=(0,))
RING = dataclasses.replace(MIDDLE, slot=(120,), spare=5)
# Where `sm_80` has the largest tiles for heads of up to 64.
TILES = {f"{t.kernel}-{t.block_t}x{t.block_j}": t for t in tactics(16, 80)}
BY_DEFAULT = ("token_attention-1x64", "segment_attention-64x64")
MULTIPROCESSORS = 1  # few programs, with several tiles of keys each


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def check(
    case: Case,
    tactic: Tactic,
    capability: int,
    join: Tactic = JOINS[0],
    multiprocessors: int = MULTIPROCESSORS,
) -> None:
    driver: Any = EmulatedDriver(capability, multiprocessors=multiprocessors)
    got = run_embedded(driver, case.inputs(), case.attributes, mem_len=case.mem_len, tactic=tactic, join=join)
    assert np.isfinite(got.answer).all()
    assert np.abs(got.answer - naive_answer(case)).max() <= TOLERANCES[case.dtype]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in TILES]
)
def test_embedded_kernels_equal_the_naive_operator(name: str) -> None:
    """In the middle of a stream and at its beginning; the constants of a kernel are the same for both."""
    check(MIDDLE, TILES[name], 80)
    check(BEGINNING, TILES[name], 80, JOINS[1])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90])
def test_products_of_warp_groups_equal_the_naive_operator(capability: int) -> None:
    check(MIDDLE, TILES["segment_attention-64x64"], capability)


@pytest.mark.slow  # minutes: hundreds of kernels are compiled
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", PTX_VERSIONS)
@pytest.mark.parametrize("name", ["middle", "beginning", "ring", *CASES])
def test_every_embedded_kernel_equals_the_naive_operator(name: str, capability: int) -> None:
    case = {"middle": MIDDLE, "beginning": BEGINNING, "ring": RING, **CASES}[name]
    for n, tactic in enumerate(tactics(case.K, capability, case.dtype)):
        check(case, tactic, capability, JOINS[n % 2], multiprocessors=1 + 15 * (n % 2))
