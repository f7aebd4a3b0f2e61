"""Attention as one node of ONNX Runtime: our library launches the kernel through stub CUDA libraries, and
`tests/ptx` executes it. The provider is CUDA's where it is installed (`make test-cuda`), and else the CPU's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda.node import ON_CUDA, OneNode, Sizes
from tests.cuda.stubs import StubGpu, Stubs
from tests.ptx.ring import NaiveRing, Types, apart, tolerance
from xl_export.graph.fused_cpu import DOMAIN

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
H100 = StubGpu(132, 90, 233472)
RTX_4060 = StubGpu(24, 89, 102400)
T4 = StubGpu(40, 75, 65536)
HALVES: dict[str, Any] = {"types": ("float16", "float16"), "gap": 8}
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "beginning-then-wrapping": ({"first": [0], "M": 4}, [3, 1, 1, 2, 3, 1]),
    "several-rows": ({"first": [0, 1000], "spare": 9}, [9, 1, 1]),
    "long-memory": ({"first": [399], "M": 400}, [1, 1]),
    "persistent-vectors": ({"first": [0], "N": 5, "nearest": 1}, [1, 2]),
    "initial-vectors": ({"first": [3, -2], "spare": 9, "initial": True}, [4, 1]),
    "ring-of-halves": ({"first": [35], "types": ("float32", "float16"), "M": 40}, [3, 1, 1]),
    "halves": ({"first": [35, 2], "types": ("float16", "float16"), "M": 40, "initial": True}, [3, 1, 1]),
    "wide-heads": ({"first": [35], "K": 128, "H": 1, "M": 40}, [2, 1]),
    "segments-in-tiles": ({"first": [3], "spare": 40, "BIAS_R": 50, "initial": True}, [35, 1, 5]),
    "segments-of-halves-in-tiles": (HALVES | {"first": [-3, 90], "M": 44, "spare": 70, "N": 5}, [66, 1, 9]),
    "tiles-at-all-places": ({"first": [1000], "M": 150, "spare": 9}, [9]),
    "tiles-of-halves-at-all-places": (HALVES | {"first": [1000], "M": 150, "spare": 9}, [9]),
    "as-many-programs-as-places": ({"first": [39], "H": 4, "M": 40, "packed": True}, [1]),
}


class Node:
    """A node of attention, whose past is on the device."""

    def __init__(self, ring: NaiveRing, library: Path, stubs: Stubs) -> None:
        self.ring = ring
        self.stubs = stubs
        self.session = OneNode(_graph(ring), library)
        self.past = [stubs.on_device(array) for array in (ring.keys, ring.values)]
        self.constants = {name: stubs.on_device(x) for name, x in ring.constants.items() if x.size}

    def bind(
        self, query: np.ndarray, context: np.ndarray, present: list[np.ndarray]
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """The binding of a step, and its arrays on the device. present: where the ring is written."""
        length = query.shape[1]
        answers = np.zeros((*query.shape[:2], self.ring.H * self.ring.K), query.dtype)
        given = {"queries": query, "context": context, "positions": self.ring.positions(length)}
        arrays = {name: self.stubs.on_device(array) for name, array in (given | {"answers": answers}).items()}
        outputs = {
            "answers": arrays["answers"],
            **dict(zip(("new_keys", "new_values"), present, strict=True)),
        }
        inputs = {name: arrays[name] for name in given} | self.constants
        inputs |= zip(("keys", "values"), self.past, strict=True)
        return self.session.bind(inputs, outputs), arrays

    def run(self, io: Any) -> None:
        self.session.run(io)


OPERATORS = {
    ("float32", "float32"): "RingRelativeAttentionOnCuda",
    ("float32", "float16"): "RingRelativeAttentionOnCudaOverHalves",
    ("float16", "float16"): "RingRelativeAttentionOnCudaInHalves",
}


def _graph(ring: NaiveRing) -> bytes:
    import onnx
    from onnx import TensorProto, helper

    constants = {name: array for name, array in ring.constants.items() if array.size}
    own, kept = (TensorProto.FLOAT16 if dtype == "float16" else TensorProto.FLOAT for dtype in ring.types)
    order = ("table", "positions", "content_bias", "position_bias", "bias", "own_keys", "own_values")
    inputs = ["queries", "context", "keys", "values"]
    inputs += [
        name if name in constants or name == "positions" else ""
        for name in (*order, "initial_key", "initial_value")
    ]
    node = helper.make_node(
        OPERATORS[ring.types], inputs, ["answers", "new_keys", "new_values"], domain=DOMAIN, **ring.attributes
    )
    shape = ["batch", ring.H, ring.S, ring.K]
    width = ring.H * ring.K

    def tensor(name: str, kind: int, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        [node],
        "node",
        [
            *(tensor(name, own, ["batch", "tokens", None]) for name in inputs[:2]),
            tensor("positions", TensorProto.INT64, ["batch", "tokens"]),
            *(tensor(side, kept, shape) for side in ("keys", "values")),
            *(
                tensor(name, kept if name == "table" else own, array.shape)
                for name, array in constants.items()
            ),
        ],
        [
            tensor("answers", own, ["batch", "tokens", width]),
            *(tensor(f"new_{side}", kept, shape) for side in ("keys", "values")),
        ],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


@pytest.mark.parametrize(("sizes", "lengths"), CASES.values(), ids=CASES)
def test_the_node_equals_the_naive_operator(
    sizes: dict[str, Any], lengths: list[int], library: Path, launches: list[Sizes], stubs: Stubs
) -> None:
    ring = NaiveRing(**sizes)
    node = Node(ring, library, stubs)
    for length in lengths:
        segment = ring.segment(length)
        io, arrays = node.bind(*segment, node.past)
        stubs.forget()
        node.run(io)
        stubs.raise_errors()
        (event,) = stubs.events()
        assert apart(arrays["answers"], ring.answer(*segment)) <= tolerance(ring.types, event.name)
        for found, right in zip(node.past, (ring.keys, ring.values), strict=True):
            np.testing.assert_array_equal(found, right)
    assert len(launches) == len(lengths)


def launched(
    ring: NaiveRing, length: int, library: Path, stubs: Stubs, gpu: StubGpu = H100
) -> tuple[str, list[int]]:
    """The kernel and the grid of a step."""
    stubs.set_gpu(gpu)
    node = Node(ring, library, stubs)
    launches: list[tuple[str, list[int]]] = []
    stubs.execute_with(lambda name, ptx, sizes, arguments: launches.append((name, list(sizes[:3]))))
    node.run(node.bind(*ring.segment(length), node.past)[0])
    stubs.execute_nothing()
    (launch,) = launches
    return launch


@pytest.mark.parametrize(
    ("batch", "length", "parts"),
    [
        (1, 1, 51),  # one tile of 32 keys each, for 408 programs
        (2, 1, 26),
        (3, 1, 17),
        (8, 1, 8),  # 512 programs; 9 parts would need a second wave
        (64, 1, 1),
        (1, 2, 26),  # tiles would read two thirds
        (8, 2, 4),
    ],
)
@pytest.mark.parametrize("types", [("float32", "float32"), ("float16", "float16")], ids=str)
def test_keys_of_tokens_are_divided_among_the_programs_that_run_at_once(
    types: Types, batch: int, length: int, parts: int, library: Path, stubs: Stubs
) -> None:
    """An H100 has places for 528 programs. The memory has 1,600 tokens."""
    ring = NaiveRing(first=[0] * batch, M=1600, H=8, K=8, spare=length, types=types, gap=8)
    name, grid = launched(ring, length, library, stubs)
    assert (name, grid) == ("ring_attention", [8 * batch, length, parts])


@pytest.mark.parametrize(
    ("types", "batch", "length", "tiles", "parts", "gpu"),
    [
        # 64 queries and 32 keys in a tile, and places for 264 programs.
        ("float16", 1, 4, 1, 26, H100),
        ("float16", 1, 16, 1, 26, H100),  # two tiles of keys each, for 208 programs
        ("float16", 1, 128, 2, 8, H100),  # seven tiles each, since a part has at least 192 keys
        ("float16", 8, 128, 2, 2, H100),  # 256 programs
        ("float16", 32, 128, 2, 1, H100),
        # 32 queries and 16 keys, and places for 528.
        ("float32", 1, 4, 1, 51, H100),
        ("float32", 1, 16, 1, 26, H100),
        ("float32", 1, 128, 4, 15, H100),  # 480 programs
        ("float32", 8, 128, 4, 2, H100),  # 512 programs
        ("float32", 32, 128, 4, 1, H100),
        ("float32", 64, 2, 1, 1, H100),  # two tokens, of enough streams
        ("float16", 1, 128, 2, 3, RTX_4060),  # 48 programs
        ("float32", 1, 16, 1, 6, RTX_4060),  # 48, since only two fit into shared memory
    ],
)
def test_keys_of_segments_are_divided_among_the_programs_that_run_at_once(
    types: str,
    batch: int,
    length: int,
    tiles: int,
    parts: int,
    gpu: StubGpu,
    library: Path,
    stubs: Stubs,
) -> None:
    sizes: dict[str, Any] = {"M": 1600, "H": 8, "K": 8, "spare": length, "gap": 8}
    ring = NaiveRing(first=[0] * batch, types=(types, types), **sizes)
    name, grid = launched(ring, length, library, stubs, gpu)
    assert (name, grid) == ("ring_segment_attention", [8 * batch, tiles, parts])


@pytest.mark.parametrize(
    ("sizes", "gpu", "in_tiles"),
    [
        ({}, H100, True),
        ({}, T4, False),  # whose tensor cores multiply other shapes
        ({"types": ("float32", "float16")}, H100, False),
        ({"K": 64}, H100, True),
        ({"K": 68}, H100, False),  # tiles of wide heads in floats do not fit into registers
        (HALVES | {"K": 128}, H100, True),
        (HALVES | {"K": 12}, H100, False),  # loads of 16 bytes are not possible
        (HALVES | {"gap": 4}, H100, False),
        (HALVES | {"tails": (4, 0)}, H100, False),
        (HALVES | {"tails": (0, 4)}, H100, False),
        ({"M": 20}, H100, False),  # each of 128 queries has a multiprocessor of its own, which reads one tile
    ],
    ids=str,
)
def test_segments_are_in_tiles_if_a_kernel_fits_and_reads_less(
    sizes: dict[str, Any], gpu: StubGpu, in_tiles: bool, library: Path, stubs: Stubs
) -> None:
    ring = NaiveRing(**{"first": [0], "M": 800, "spare": 64} | sizes)
    name, _ = launched(ring, 64, library, stubs, gpu)
    assert (name == "ring_segment_attention") == in_tiles


@pytest.mark.skipif(not ON_CUDA, reason="needs onnxruntime-gpu, which computes on the stream")
def test_a_captured_step_is_right_when_it_is_launched(
    library: Path, launches: list[Sizes], stubs: Stubs
) -> None:
    ring = NaiveRing(first=[5, 30])
    node = Node(ring, library, stubs)
    query, context = ring.segment(1)
    io, arrays = node.bind(query, context, node.past)
    launch = node.session.stream.capture(lambda: node.run(io))
    assert launches == []  # nothing of a step runs while it is captured
    for _ in range(4):
        new = {"queries": query, "context": context, "positions": ring.positions(1)}
        for name, array in new.items():
            arrays[name][:] = array
        launch()
        stubs.raise_errors()
        assert apart(arrays["answers"], ring.answer(query, context)) <= tolerance(ring.types)
        query, context = ring.segment(1)
    assert len(launches) == 4


@pytest.mark.parametrize("types", OPERATORS)
def test_a_ring_that_is_not_bound_in_place_is_copied(
    types: Types, library: Path, launches: list[Sizes], stubs: Stubs
) -> None:
    ring = NaiveRing(first=[25], types=types)
    node = Node(ring, library, stubs)
    segment = ring.segment(2)
    present = [stubs.on_device(np.zeros_like(array)) for array in (ring.keys, ring.values)]
    before = [array.copy() for array in node.past]
    io, arrays = node.bind(*segment, present)
    node.run(io)
    stubs.raise_errors()
    assert apart(arrays["answers"], ring.answer(*segment)) <= tolerance(ring.types)
    for found, right in zip(present, (ring.keys, ring.values), strict=True):
        np.testing.assert_array_equal(found, right)
    for found, right in zip(node.past, before, strict=True):
        np.testing.assert_array_equal(found, right)


def test_tensors_that_do_not_fit_are_refused(library: Path, launches: list[Sizes], stubs: Stubs) -> None:
    ring = NaiveRing(first=[0], spare=2)
    node = Node(ring, library, stubs)
    io, _ = node.bind(*ring.segment(3), node.past)
    with pytest.raises(Exception, match="do not fit together"):
        node.run(io)
    assert launches == []
