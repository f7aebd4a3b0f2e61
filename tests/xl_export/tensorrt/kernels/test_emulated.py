"""The PTX that an engine embeds, executed on the CPU by `tests/ptx`: every instruction of every thread.

Triton's interpreter computes what the source says. This is what the compiler made of it: a product and a
difference may have become one fused multiply-add, which does not round in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.nightly import every
from tests.ptx.driver import EmulatedDriver
from tests.ptx.instructions import fused
from tests.ptx.machine import KernelError
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


@pytest.mark.parametrize("name", every(2, TILES))
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


def test_the_emulated_fused_multiply_add_rounds_once() -> None:
    log2e = np.float32(1.4426950408889634)
    for a, b, c in (
        (-1e30, log2e, -(np.float32(-1e30) * log2e)),
        (-(2.0**100), log2e, 2.0**100 * log2e),
        (1 + 2**-12, 1 + 2**-12, 2**-60),  # the sum in float64 lies halfway between two floats
        (1 + 2**-12, 1 + 2**-12, -(2**-60)),
    ):
        a, b, c = (np.array([x], np.float32) for x in (a, b, c))
        exact = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0]))
        got = fused(a, b, c)[0]
        error = abs(Fraction(float(got)) - exact)
        for other in np.nextafter(got, np.float32([-np.inf, np.inf])):
            assert error <= abs(Fraction(float(other)) - exact)


def test_reading_outside_of_a_tensor_is_a_fault() -> None:
    class Short(EmulatedDriver):
        def upload(self, array: np.ndarray) -> int:
            return super().upload(array[:, :, :-1] if array.shape[2:3] == (MIDDLE.J,) else array)

    driver: Any = Short(80, multiprocessors=MULTIPROCESSORS)
    with pytest.raises(KernelError, match=r"outside of a tensor, in `.*global"):
        run_embedded(
            driver, MIDDLE.inputs(), MIDDLE.attributes, tactic=TILES["token_attention-1x64"], join=JOINS[0]
        )
