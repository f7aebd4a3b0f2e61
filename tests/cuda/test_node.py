"""Attention as one node on ONNX Runtime's real CUDA provider: our library launches the kernel through stub
CUDA libraries, and `tests/ptx` executes it. Nothing here runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes.sessions.fused_cpu import build
from runtimes.sessions.ort_gpu.session import ON_OUR_STREAM
from runtimes.sessions.ort_gpu.stream import Stream
from tests.cuda.stubs import Stubs, load_all
from tests.ptx.ring import NaiveRing, execute_at
from xl_export.graph.fused_cpu import DOMAIN
from xl_export.tensorrt.kernels.compile import Kernel

ort = pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "CUDAExecutionProvider" not in ort.get_available_providers(), reason="needs onnxruntime-gpu"
    ),
]
PROVIDER = "CUDAExecutionProvider"
TOLERANCE = 1e-5
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "beginning-then-wrapping": ({"first": [0], "M": 4}, [3, 1, 1, 2, 3, 1]),
    "several-rows": ({"first": [0, 1000], "spare": 9}, [9, 1, 1]),
    "long-memory": ({"first": [399], "M": 400}, [1, 1]),
    "persistent-vectors": ({"first": [0], "N": 5, "nearest": 1}, [1, 2]),
    "initial-vectors": ({"first": [3, -2], "spare": 9, "initial": True}, [4, 1]),
    "ring-of-halves": ({"first": [35], "dtype": "float16", "M": 40}, [3, 1, 1]),
    "wide-heads": ({"first": [35], "K": 128, "H": 1, "M": 40}, [2, 1]),
}


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    yield load_all()
    load_all().execute_nothing()


class Node:
    """A session over a graph of one node, on the stream that its steps are captured from."""

    def __init__(self, ring: NaiveRing, library: Path) -> None:
        self.ring = ring
        self.stream = Stream(0)
        options = ort.SessionOptions()
        options.register_custom_ops_library(str(library))
        chosen = {"user_compute_stream": str(self.stream.address), "enable_cuda_graph": "1"}
        self.session = ort.InferenceSession(_graph(ring), options, providers=[(PROVIDER, chosen)])
        self.past = [_on_device(array) for array in (ring.keys, ring.values)]
        self.options = ort.RunOptions()
        for name, value in ON_OUR_STREAM.items():
            self.options.add_run_config_entry(name, value)

    def bind(self, segment: np.ndarray, present: list[Any]) -> tuple[Any, dict[str, Any]]:
        """The binding of a step, and its arrays on the device. present: where the ring is written."""
        answers = np.zeros((*segment.shape[:2], self.ring.H * self.ring.K), np.float32)
        arrays = {
            "segment": _on_device(segment),
            "positions": _on_device(self.ring.positions(segment.shape[1])),
            "answers": _on_device(answers),
        }
        io = self.session.io_binding()
        io.bind_ortvalue_input("segment", arrays["segment"])
        io.bind_ortvalue_input("positions", arrays["positions"])
        io.bind_ortvalue_output("answers", arrays["answers"])
        for side, past, after in zip(("keys", "values"), self.past, present, strict=True):
            io.bind_ortvalue_input(side, past)
            io.bind_ortvalue_output(f"new_{side}", after)
        return io, arrays

    def run(self, io: Any) -> None:
        self.session.run_with_iobinding(io, self.options)


def _on_device(array: np.ndarray) -> Any:
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), "cuda", 0)


def _graph(ring: NaiveRing) -> bytes:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    constants = {name: array for name, array in ring.constants.items() if array.size}
    kept = TensorProto.FLOAT16 if ring.dtype == "float16" else TensorProto.FLOAT
    order = ("table", "positions", "content_bias", "position_bias", "bias", "own_keys", "own_values")
    inputs = ["segment", "segment", "keys", "values"]
    inputs += [
        name if name in constants or name == "positions" else ""
        for name in (*order, "initial_key", "initial_value")
    ]
    name = "RingRelativeAttentionOnCuda" + ("OverHalves" if ring.dtype == "float16" else "")
    node = helper.make_node(
        name, inputs, ["answers", "new_keys", "new_values"], domain=DOMAIN, **ring.attributes
    )
    shape = ["batch", ring.H, ring.S, ring.K]
    width = ring.H * ring.K

    def tensor(name: str, kind: int, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        [node],
        "node",
        [
            tensor("segment", TensorProto.FLOAT, ["batch", "tokens", 3 * width]),
            tensor("positions", TensorProto.INT64, ["batch", "tokens"]),
            *(tensor(side, kept, shape) for side in ("keys", "values")),
        ],
        [
            tensor("answers", TensorProto.FLOAT, ["batch", "tokens", width]),
            *(tensor(f"new_{side}", kept, shape) for side in ("keys", "values")),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


@pytest.fixture
def emulated(stubs: Stubs) -> Iterator[list[tuple[int, ...]]]:
    """The sizes of each launch (grid, threads, shared bytes); all are executed."""
    launches: list[tuple[int, ...]] = []

    def execute(name: str, ptx: str, sizes: tuple[int, ...], arguments: list[int]) -> None:
        launches.append(sizes)
        *grid, threads, shared_bytes = sizes
        kernel = Kernel(name=name, ptx=ptx, threads=threads, shared_bytes=shared_bytes, block_t=1)
        halves = "st.global.b16" in ptx
        execute_at(kernel, (grid[0], grid[1], grid[2]), arguments, dtype="float16" if halves else "float32")

    stubs.execute_with(execute)
    yield launches
    stubs.raise_errors()


@pytest.mark.parametrize(("sizes", "lengths"), CASES.values(), ids=CASES)
def test_the_node_equals_the_naive_operator(
    sizes: dict[str, Any], lengths: list[int], emulated: list[tuple[int, ...]], stubs: Stubs
) -> None:
    ring = NaiveRing(**sizes)
    node = Node(ring, build())
    for length in lengths:
        segment = ring.segment(length)
        io, arrays = node.bind(segment, node.past)
        stubs.forget()
        node.run(io)
        stubs.raise_errors()
        assert [(event.kind, event.name) for event in stubs.events()] == [("kernel", "ring_attention")]
        assert np.abs(arrays["answers"].numpy() - ring.answer(segment)).max() <= TOLERANCE
        for found, right in zip(node.past, (ring.keys, ring.values), strict=True):
            np.testing.assert_array_equal(found.numpy(), right)
    assert len(emulated) == len(lengths)


def test_keys_are_divided_among_enough_programs(emulated: list[tuple[int, ...]], stubs: Stubs) -> None:
    for sizes, length, parts in (
        ({"first": [399], "M": 400}, 1, 13),  # tiles of 32 keys
        ({"first": [39] * 3, "M": 40, "H": 100, "K": 4}, 2, 1),  # 600 queries, for 108 multiprocessors
    ):
        ring = NaiveRing(**sizes)  # type: ignore[arg-type]
        node = Node(ring, build())
        stubs.execute_with(lambda name, ptx, sizes, arguments: emulated.append(sizes))
        node.run(node.bind(ring.segment(length), node.past)[0])
        assert emulated[-1][:3] == (len(ring.first) * ring.H, length, parts)


def test_a_captured_step_is_right_when_it_is_launched(emulated: list[tuple[int, ...]], stubs: Stubs) -> None:
    ring = NaiveRing(first=[5, 30])
    node = Node(ring, build())
    segment = ring.segment(1)
    io, arrays = node.bind(segment, node.past)
    launch = node.stream.capture(lambda: node.run(io))
    assert emulated == []  # nothing of a step runs while it is captured
    for _ in range(4):
        arrays["segment"].update_inplace(segment)
        arrays["positions"].update_inplace(ring.positions(1))
        launch()
        stubs.raise_errors()
        assert np.abs(arrays["answers"].numpy() - ring.answer(segment)).max() <= TOLERANCE
        segment = ring.segment(1)
    assert len(emulated) == 4


def test_a_ring_that_is_not_bound_in_place_is_copied(emulated: list[tuple[int, ...]], stubs: Stubs) -> None:
    ring = NaiveRing(first=[25])
    node = Node(ring, build())
    segment = ring.segment(2)
    present = [_on_device(np.zeros_like(array)) for array in (ring.keys, ring.values)]
    before = [array.numpy() for array in node.past]
    io, arrays = node.bind(segment, present)
    node.run(io)
    stubs.raise_errors()
    assert np.abs(arrays["answers"].numpy() - ring.answer(segment)).max() <= TOLERANCE
    for found, right in zip(present, (ring.keys, ring.values), strict=True):
        np.testing.assert_array_equal(found.numpy(), right)
    for found, right in zip(node.past, before, strict=True):
        np.testing.assert_array_equal(found.numpy(), right)


def test_tensors_that_do_not_fit_are_refused(emulated: list[tuple[int, ...]]) -> None:
    ring = NaiveRing(first=[0], spare=2)
    node = Node(ring, build())
    io, _ = node.bind(ring.segment(3), node.past)
    with pytest.raises(Exception, match="do not fit together"):
        node.run(io)
    assert emulated == []
