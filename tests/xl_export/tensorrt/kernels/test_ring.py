"""The kernels of the node for `cuda`, as the package carries them, executed on the CPU by `tests/ptx`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ptx import driver
from tests.ptx.ring import NaiveRing, Types, check, shipped
from tests.xl_export.tensorrt.kernels.resources import resources
from xl_export.tensorrt.kernels.compile import REGISTERS
from xl_export.tensorrt.kernels.ready import RING_TACTICS, RingTactic

EMULATED = driver.EmulatedDriver(80, multiprocessors=1)
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
    "two-tiles-of-queries": ({"first": [3, 1000], "M": 33, "BIAS_R": 50, "spare": 70, "K": 24}, [66, 3], 2),
    "beginning-in-parts": ({"first": [-3, 2**31 - 5], "spare": 20, "BIAS_R": 1, "N": 37}, [20, 5], 3),
    "does-not-see-itself": ({"first": [-4, -(2**40), 1], "spare": 10, "nearest": 1, "H": 1}, [9], 1),
    "initial-vectors-full-mask": ({"first": [-3, 2**40], "spare": 20, "full": 1, "initial": True}, [18], 2),
    "initial-vectors": ({"first": [3], "spare": 20, "initial": True, "M": 40, "packed": True}, [18], 1),
    "no-memory": ({"first": [17], "M": 0, "spare": 9}, [9], 1),
}


@pytest.mark.parametrize(("sizes", "lengths", "parts"), CASES.values(), ids=CASES)
def test_the_shipped_kernel_equals_the_naive_operator(
    sizes: dict[str, Any], lengths: list[int], parts: int
) -> None:
    ring = NaiveRing(**sizes)
    check(EMULATED, ring, shipped(ring.K, ring.types), lengths, parts)


@pytest.mark.parametrize("types", [HALVES, FLOATS], ids=["halves", "floats"])
@pytest.mark.parametrize(("sizes", "lengths", "parts"), SEGMENTS.values(), ids=SEGMENTS)
def test_the_shipped_kernel_for_segments_equals_the_naive_operator(
    sizes: dict[str, Any], lengths: list[int], parts: int, types: Types
) -> None:
    ring = NaiveRing(**sizes, types=types, gap=8)
    check(EMULATED, ring, shipped(ring.K, ring.types, "ring_segment_attention"), lengths, parts)


def test_wide_heads_in_tiles() -> None:
    ring = NaiveRing(first=[35], K=104, H=1, M=40, types=HALVES, gap=8, spare=9)
    check(EMULATED, ring, shipped(ring.K, ring.types, "ring_segment_attention"), [9], 2)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", KERNELS)
def test_programs_may_run_in_any_order(name: str, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one joins the parts, and none reads what another one writes to the ring."""
    monkeypatch.setattr(driver, "TOGETHER", 1)  # one program after the other
    monkeypatch.setattr(driver, "ORDER", order)
    ring = NaiveRing(first=[39], M=40)
    check(EMULATED, ring, shipped(ring.K, ring.types, name), [1], 3)


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
    kernel = new.compiled()
    check(EMULATED, ring, kernel, [70 if new.tactic.block_t > 1 else 2], 2)
    found = resources(kernel)
    assert found.registers * kernel.threads * new.programs <= REGISTERS
    assert found.spilled <= (16 if kernel.block_t == 1 else 128)  # bytes of each thread
