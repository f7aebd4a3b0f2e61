"""The kernel of the node for `cuda`, as the package carries it, executed on the CPU by `tests/ptx`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptx import driver
from tests.ptx.ring import NUMBERS, NaiveRing, apart, execute_at, shipped
from tests.xl_export.tensorrt.kernels.resources import resources
from xl_export.tensorrt.kernels.compile import PROGRAMS_EACH, REGISTERS, Kernel, Type
from xl_export.tensorrt.kernels.ready import RING_TYPES, RING_WIDTHS, ring_kernel

RING_IN_HALVES = ("float32", "float16")
HALVES = ("float16", "float16")
# Sizes of the stream, the lengths of its segments, the parts of the keys.
CASES: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "beginning-then-wrapping": ({"first": [0], "M": 4}, [3, 1, 1, 2, 3, 1], 2),
    "several-rows": ({"first": [0, 1000], "spare": 9, "BIAS_R": 1}, [9, 4, 9], 1),
    "beyond-31-bits": ({"first": [2**31 - 2, 2**40], "spare": 4}, [4], 2),
    "rows-in-parts": ({"first": [30, 69], "M": 70}, [1, 2], 5),
    "persistent-vectors": ({"first": [0], "N": 5, "nearest": 1}, [1, 2], 3),
    "more-persistent-vectors-than-lanes": ({"first": [0], "N": 40, "M": 4}, [3, 1], 2),
    "no-memory": ({"first": [17], "M": 0, "spare": 4}, [4, 1], 1),
    "nothing-to-see": ({"first": [0], "nearest": 1}, [1], 2),
    "padded-row": ({"first": [-4, -60], "spare": 9, "full": 1}, [9], 1),
    "initial-vectors": ({"first": [3, -2], "spare": 9, "initial": True}, [2, 4], 2),
    "initial-vectors-and-full-mask": ({"first": [0], "full": 1, "initial": True, "N": 2}, [3], 1),
    "ring-of-halves": ({"first": [35], "types": RING_IN_HALVES, "M": 40, "packed": True}, [3, 1, 1], 3),
    "halves": ({"first": [35], "types": HALVES, "M": 40}, [3, 1, 1], 3),
    "halves-and-persistent-vectors": ({"first": [2, 70], "types": HALVES, "N": 5, "nearest": 1}, [3], 1),
    "halves-and-initial-vectors": ({"first": [3, -2], "types": HALVES, "spare": 9, "initial": True}, [2], 2),
    "wide-heads-of-halves": ({"first": [35], "types": HALVES, "K": 128, "H": 1, "M": 40}, [2], 2),
    "wide-heads": ({"first": [35], "K": 128, "H": 1, "M": 40}, [2, 1], 3),
    "width-of-no-power-of-two": ({"first": [5], "K": 44, "H": 3}, [2], 2),
}
TOLERANCE = 1e-5


def launch(
    ring: NaiveRing, kernel: Kernel, segment: tuple[np.ndarray, np.ndarray], parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The answers and the ring after one launch on copies of the ring."""
    query, context = segment
    B, T, _ = query.shape
    rows = B * ring.H * T
    tensors = {
        "queries": query,
        "context": context,
        "ring_keys": ring.keys.copy(),
        "ring_values": ring.values.copy(),
        "positions": ring.positions(T),
        **ring.constants,
        "answers": np.empty((B, T, ring.H * ring.K), ring.types[0]),
        "mixed_out": np.empty((rows * parts, ring.K), np.float32),
        "level": np.empty(rows * parts, np.float32),
        "counters": np.zeros(rows, np.int32),
    }
    own = ring.attributes
    sizes = (ring.H, ring.K, ring.S, ring.M, ring.R, ring.BIAS_R, ring.N)
    columns = (query.shape[2], own["query_at"], context.shape[2], own["key_at"], own["value_at"])
    numbers = dict(zip(NUMBERS, (*sizes, *columns, ring.full, ring.nearest, not ring.initial), strict=True))
    arguments = [array.ctypes.data for array in tensors.values()] + list(numbers.values())
    execute_at(kernel, (B * ring.H, T, parts), arguments, types=ring.types)
    assert not tensors["counters"].any()
    return tensors["answers"], tensors["ring_keys"], tensors["ring_values"]


@pytest.mark.parametrize(("sizes", "lengths", "parts"), CASES.values(), ids=CASES)
def test_the_shipped_kernel_equals_the_naive_operator(
    sizes: dict[str, Any], lengths: list[int], parts: int
) -> None:
    ring = NaiveRing(**sizes)
    kernel = shipped(ring.K, ring.types)
    for length in lengths:
        segment = ring.segment(length)
        answer, *written = launch(ring, kernel, segment, parts)
        assert apart(answer, ring.answer(*segment)) <= TOLERANCE
        for found, right in zip(written, (ring.keys, ring.values), strict=True):
            np.testing.assert_array_equal(found, right)


def test_the_last_program_joins_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TOGETHER", 1)  # one program after the other
    ring = NaiveRing(first=[39], M=40)
    segment = ring.segment(1)
    answer, *_ = launch(ring, shipped(16, ring.types), segment, 3)
    assert apart(answer, ring.answer(*segment)) <= TOLERANCE


def test_parts_are_joined_only_when_all_are_stored() -> None:
    """Without the barrier before the counter, some threads' results may be missing. The emulator runs threads
    together and cannot see that, so the order is read from the code.
    """
    text = shipped(64, ("float32", "float32")).ptx
    before, _, after = text.partition("atom.global.gpu.acq_rel.add.u32")
    stores = before.rindex("st.global")
    assert "bar.sync" in before[stores:]
    assert "bar.sync" in after[: after.index("ld.global")]
    assert "atom." not in after


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("widest", RING_WIDTHS)
@pytest.mark.parametrize("types", RING_TYPES)
def test_a_new_compilation_is_right_and_fits_a_gpu(widest: int, types: tuple[Type, Type]) -> None:
    pytest.importorskip("triton")
    ring = NaiveRing(first=[0, 100], K=widest, M=40, types=types, N=3)
    segment = ring.segment(2)
    kernel = ring_kernel(widest, *types)
    answer, *_ = launch(ring, kernel, segment, 2)
    assert apart(answer, ring.answer(*segment)) <= TOLERANCE
    found = resources(kernel)
    assert found.registers * kernel.threads * PROGRAMS_EACH <= REGISTERS
    assert found.spilled <= 16  # bytes of each thread
