"""The kernels of the node for `cuda`, as the package carries them, executed on the CPU by `tests/ptx`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptx import driver
from tests.ptx.ring import NaiveRing, Types, apart, execute_at, shipped, tolerance
from tests.xl_export.tensorrt.kernels.resources import resources
from xl_export.tensorrt.kernels.compile import REGISTERS, Kernel
from xl_export.tensorrt.kernels.ready import RING_TACTICS, RingTactic

RING_IN_HALVES = ("float32", "float16")
HALVES = ("float16", "float16")
FLOATS = ("float32", "float32")
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
KERNELS = ("ring_attention", "ring_segment_attention")
# The same for segments in tiles: of 64 queries and 32 keys in halves, of 32 and 16 in floats.
SEGMENTS: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "two-tiles-of-queries": ({"first": [45, 1000], "M": 44, "BIAS_R": 50, "spare": 70, "K": 24}, [66, 3], 2),
    "beginning-in-parts": ({"first": [-3, 2**31 - 5], "spare": 20, "BIAS_R": 1, "N": 37}, [20, 5], 3),
    "does-not-see-itself": ({"first": [-4, -(2**40), 1], "spare": 10, "nearest": 1, "H": 1}, [9], 1),
    "initial-vectors-full-mask": ({"first": [-3, 2**40], "spare": 20, "full": 1, "initial": True}, [18], 2),
    "initial-vectors": ({"first": [3], "spare": 20, "initial": True, "M": 40, "packed": True}, [18], 1),
    "no-memory": ({"first": [17], "M": 0, "spare": 9}, [9], 1),
}


def launch(
    ring: NaiveRing, kernel: Kernel, segment: tuple[np.ndarray, np.ndarray], parts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The answers and the ring after one launch on copies of the ring."""
    query, context = segment
    B, T, _ = query.shape
    tiles = -(-T // kernel.block_t)
    programs = B * ring.H * tiles * parts
    tensors = {
        "queries": query,
        "context": context,
        "ring_keys": ring.keys.copy(),
        "ring_values": ring.values.copy(),
        "positions": ring.positions(T),
        **ring.constants,
        "answers": np.empty((B, T, ring.H * ring.K), ring.types[0]),
        "mixed_out": np.empty((programs * kernel.block_t, ring.K), np.float32),
        "level": np.empty(programs * kernel.block_t, np.float32),
        "counters": np.zeros(B * ring.H * tiles, np.int32),
    }
    own = ring.attributes
    sizes = (ring.H, ring.K, ring.S, ring.M, ring.R, ring.BIAS_R, ring.N)
    columns = (query.shape[2], own["query_at"], context.shape[2], own["key_at"], own["value_at"])
    numbers = (*sizes, *columns, ring.full, ring.nearest, int(not ring.initial), T)
    arguments = [array.ctypes.data for array in tensors.values()] + list(numbers)
    execute_at(kernel, (B * ring.H, tiles, parts), arguments, types=ring.types)
    assert not tensors["counters"].any()
    return tensors["answers"], tensors["ring_keys"], tensors["ring_values"]


@pytest.mark.parametrize(("sizes", "lengths", "parts"), CASES.values(), ids=CASES)
def test_the_shipped_kernel_equals_the_naive_operator(
    sizes: dict[str, Any], lengths: list[int], parts: int
) -> None:
    ring = NaiveRing(**sizes)
    check(ring, shipped(ring.K, ring.types), lengths, parts)


@pytest.mark.parametrize("types", [HALVES, FLOATS], ids=["halves", "floats"])
@pytest.mark.parametrize(("sizes", "lengths", "parts"), SEGMENTS.values(), ids=SEGMENTS)
def test_the_shipped_kernel_for_segments_equals_the_naive_operator(
    sizes: dict[str, Any], lengths: list[int], parts: int, types: Types
) -> None:
    ring = NaiveRing(**sizes, types=types, gap=8)
    check(ring, shipped(ring.K, ring.types, "ring_segment_attention"), lengths, parts)


def test_wide_heads_in_tiles() -> None:
    ring = NaiveRing(first=[35], K=104, H=1, M=40, types=HALVES, gap=8, spare=9)
    check(ring, shipped(ring.K, ring.types, "ring_segment_attention"), [9], 2)


def check(ring: NaiveRing, kernel: Kernel, lengths: list[int], parts: int) -> None:
    """Compares the answers and the ring after each segment."""
    for length in lengths:
        segment = ring.segment(length)
        answer, *written = launch(ring, kernel, segment, parts)
        assert apart(answer, ring.answer(*segment)) <= tolerance(ring.types, kernel.name)
        for found, right in zip(written, (ring.keys, ring.values), strict=True):
            np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("name", KERNELS)
def test_the_last_program_joins_the_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TOGETHER", 1)  # one program after the other
    ring = NaiveRing(first=[39], M=40)
    check(ring, shipped(ring.K, ring.types, name), [1], 3)


@pytest.mark.parametrize("name", KERNELS)
def test_parts_are_joined_only_when_all_are_stored(name: str) -> None:
    """Without the barrier before the counter, some threads' results may be missing. The emulator runs threads
    together and cannot see that, so the order is read from the code.
    """
    text = shipped(64, FLOATS, name).ptx
    before, _, after = text.partition("atom.global.gpu.acq_rel.add.u32")
    stores = before.rindex("st.global")
    assert "bar.sync" in before[stores:]
    assert "bar.sync" in after[: after.index("ld.global")]
    assert "atom." not in after


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("new", RING_TACTICS, ids=str)
def test_a_new_compilation_is_right_and_fits_a_gpu(new: RingTactic) -> None:
    pytest.importorskip("triton")
    ring = NaiveRing(first=[0, 100], K=new.widest, M=40, types=new.types, N=3, spare=70, gap=8)
    segment = ring.segment(70 if new.tactic.block_t > 1 else 2)
    kernel = new.compiled()
    answer, *_ = launch(ring, kernel, segment, 2)
    assert apart(answer, ring.answer(*segment)) <= tolerance(ring.types, kernel.name)
    found = resources(kernel)
    assert found.registers * kernel.threads * new.programs <= REGISTERS
    assert found.spilled <= (16 if kernel.block_t == 1 else 128)  # bytes of each thread
