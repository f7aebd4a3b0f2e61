"""Products with weights as nodes of ONNX Runtime: our library launches their kernels through stub CUDA
libraries, and `tests/ptx` executes them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda.node import ON_CUDA, OneNode, Sizes
from tests.cuda.stubs import Stubs
from tests.ptx.product import EPSILON, TOLERANCES, naive_norm, naive_product, near
from xl_export.graph.fused_cpu import DOMAIN

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
OPERATORS = {"float32": "ProductOnCuda", "float16": "ProductOnCudaInHalves"}
# The inputs of the node, in order, with the letters of their sizes.
INPUTS = {
    **{"x": "BTK", "matrix": "NK", "bias": "N", "residual": "BTN"},
    **{"norm.weight": "K", "norm.bias": "K", "norm.result": "BTK"},
    **{"residual_norm.weight": "N", "residual_norm.bias": "N", "residual_norm.result": "BTN"},
    **{"next_norm.weight": "N", "next_norm.bias": "N"},
}
FEW, MANY = "product_of_few_rows", "product_end"


class Product:
    """A node with some of its inputs, and random ones of any batch and length."""

    def __init__(
        self, K: int, N: int, parts: tuple[str, ...], dtype: str, library: Path, **options: bool
    ) -> None:
        self.K, self.N, self.dtype = K, N, dtype
        self.draw = np.random.default_rng(0)
        self.names = [name for name in INPUTS if name.partition(".")[0] in ("x", "matrix", *parts)]
        self.relu = "relu" in parts
        self.session = OneNode(self._graph(), library, **options)

    def _graph(self) -> bytes:
        import onnx
        from onnx import TensorProto, helper

        kind = TensorProto.FLOAT16 if self.dtype == "float16" else TensorProto.FLOAT
        inputs = [name if name in self.names else "" for name in INPUTS]
        outputs = ["y", "normed"] if "next_norm.weight" in self.names else ["y"]
        node = helper.make_node(
            OPERATORS[self.dtype], inputs, outputs, domain=DOMAIN, relu=int(self.relu), epsilon=EPSILON
        )

        def tensor(name: str) -> Any:
            shape = [f"{size} of {name}" for size in INPUTS.get(name, "BTN")]
            return helper.make_tensor_value_info(name, kind, shape)

        graph = helper.make_graph(
            [node], "product", [tensor(name) for name in self.names], [tensor(name) for name in outputs]
        )
        opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
        model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return model.SerializeToString()

    def inputs(self, B: int, T: int) -> dict[str, np.ndarray]:
        """Random, but norms are those of the tensors, or NaN where they must not be read."""
        sizes = {"B": B, "T": T, "K": self.K, "N": self.N}
        found = {}
        for name in self.names:
            shape = [sizes[size] for size in INPUTS[name]]
            found[name] = (self.draw.normal(size=shape) + (name in ("x", "residual"))).astype(self.dtype)
        found["matrix"] = (found["matrix"] / self.K**0.5).astype(self.dtype)
        for name, kind in (("x", "norm"), ("residual", "residual_norm")):
            if f"{kind}.result" in found:
                result = naive_norm(found[name], self.norm(found, kind), EPSILON)
                found[f"{kind}.result"][:] = result if B * T > 8 else np.nan
                if B * T > 8 and name == "x":
                    found[name][:] = np.nan
        return found

    @staticmethod
    def norm(inputs: dict[str, np.ndarray], kind: str) -> Any:
        weight = inputs.get(f"{kind}.weight")
        return None if weight is None else (weight, inputs[f"{kind}.bias"])

    def answer(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """The naive y."""
        x, norm, residual, second = inputs["x"], self.norm(inputs, "norm"), inputs.get("residual"), None
        if norm and np.isnan(x).any():
            x, norm = inputs["norm.result"], None
        if residual is not None:
            second = self.norm(inputs, "residual_norm")
        return naive_product(
            *(x, inputs["matrix"], inputs.get("bias"), residual, norm, second),
            relu=self.relu,
            epsilon=EPSILON,
        )

    def bind(self, inputs: dict[str, np.ndarray], stubs: Stubs) -> tuple[Any, dict[str, np.ndarray]]:
        shape = (*inputs["x"].shape[:2], self.N)
        outputs = {"y": stubs.on_device(np.full(shape, np.nan, self.dtype))}
        if "next_norm.weight" in inputs:
            outputs["normed"] = stubs.on_device(np.full(shape, np.nan, self.dtype))
        given = {name: stubs.on_device(array) for name, array in inputs.items()}
        return self.session.bind(given, outputs), outputs


# K, N, and the parts of a layer's products.
KINDS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "of-attention": (16, 24, ("norm",)),
    "behind-attention": (24, 16, ("residual", "residual_norm", "next_norm")),
    "expand": (16, 9, ("norm", "bias", "relu")),
    "contract": (40, 16, ("bias", "residual", "residual_norm", "next_norm")),
    "residual-as-it-is": (24, 16, ("residual", "next_norm")),
    "alone": (8, 5, ()),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_node_equals_the_naive_product(
    kind: str, dtype: str, library: Path, launches: list[Sizes], stubs: Stubs
) -> None:
    K, N, parts = KINDS[kind]
    node = Product(K, N, parts, dtype, library)
    for B, T in ((1, 1), (2, 1), (2, 4), (3, 3), (1, 20)):
        inputs = node.inputs(B, T)
        io, outputs = node.bind(inputs, stubs)
        stubs.forget()
        node.session.run(io)
        stubs.raise_errors()
        right = node.answer(inputs)
        assert near(outputs["y"], right)
        names = [event.name for event in stubs.events()]
        if B * T <= 8:
            assert names == [FEW]
        else:
            assert names == [dtype, *([MANY] if {*parts} - {"norm"} else [])]
        if "next_norm" in parts and B * T > 8:
            normed = naive_norm(outputs["y"], node.norm(inputs, "next_norm"), EPSILON)
            assert near(outputs["normed"], normed)


@pytest.mark.skipif(not ON_CUDA, reason="needs onnxruntime-gpu, which has the option")
def test_products_round_to_tf32_when_asked(library: Path, launches: list[Sizes], stubs: Stubs) -> None:
    node = Product(*KINDS["alone"], "float32", library, tf32=True)
    io, _ = node.bind(node.inputs(1, 20), stubs)
    stubs.forget()
    node.session.run(io)
    assert [event.name for event in stubs.events()] == ["tf32"]


@pytest.mark.skipif(not ON_CUDA, reason="needs onnxruntime-gpu, which computes on the stream")
@pytest.mark.parametrize("length", [1, 20])
def test_a_captured_step_is_right_when_it_is_launched(
    length: int, library: Path, launches: list[Sizes], stubs: Stubs
) -> None:
    node = Product(*KINDS["contract"], "float32", library)
    inputs = node.inputs(1, length)
    io, outputs = node.bind(inputs, stubs)
    launch = node.session.stream.capture(lambda: node.session.run(io))
    assert launches == []  # nothing of a step runs while it is captured
    launch()
    stubs.raise_errors()
    assert near(outputs["y"], node.answer(inputs))


@pytest.mark.parametrize(
    ("name", "size"),
    [("matrix", (5, 4)), ("bias", (4,)), ("residual", (1, 1, 4)), ("norm.weight", (6,))],
    ids=str,
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, size: tuple[int, ...], library: Path, launches: list[Sizes], stubs: Stubs
) -> None:
    node = Product(8, 5, ("bias", "residual", "norm"), "float32", library)
    inputs = node.inputs(1, 1)
    inputs[name] = np.zeros(size, np.float32)
    io, _ = node.bind(inputs, stubs)
    with pytest.raises(Exception, match="do not fit together"):
        node.session.run(io)
    assert launches == []


@pytest.mark.parametrize(("K", "dtype"), [(6, "float32"), (12, "float16")])
def test_a_row_of_weights_that_does_not_end_at_16_bytes_is_refused(
    K: int, dtype: str, library: Path, launches: list[Sizes], stubs: Stubs
) -> None:
    node = Product(K, 5, (), dtype, library)
    io, _ = node.bind(node.inputs(1, 1), stubs)
    with pytest.raises(Exception, match="do not fit together"):
        node.session.run(io)
    assert launches == []
