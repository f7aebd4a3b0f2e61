"""Records an ONNX graph: `op.MatMul(x, w)` adds a node, and `op.constant(array)` adds an initializer."""

from __future__ import annotations

import hashlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from runtimes.base.element_types import ELEMENT_TYPES
from runtimes.contract.spec import GRAPH, WEIGHTS
from runtimes.contract.tensors import AnyForm, TensorSpec

# The standard operator set of a graph by its form of memory: Attention needs 23 and TensorScatter 24. Graphs
# for WebGPU use an older one (`xl_export.graph.web.OPSET`).
OPSETS: dict[AnyForm, int] = {"ring": 24, "shift": 23, "hidden": 23, "own": 23}
IR_VERSION = 10  # the oldest version with external data and these opsets; all current runtimes read it
TYPES = {name: ir.DataType[kind.onnx] for name, kind in ELEMENT_TYPES.items()}


class Ops:
    """Records the nodes and initializers of one graph."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()
        self._constants: dict[object, ir.Value] = {}

    @property
    def nodes(self) -> Sequence[ir.Node]:
        return self._tape.nodes

    @property
    def initializers(self) -> Sequence[ir.Value]:
        return self._tape.initializers

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        """Returns the function that adds a node of the standard operator of this name, with one output."""
        return lambda *inputs, **attributes: self._tape.op(op_type, inputs, attributes or None)

    def split(self, x: ir.Value, sizes: list[int], *, axis: int) -> list[ir.Value]:
        """Returns the pieces of `x`, cut along an axis into the given sizes."""
        inputs = [x, self.constant(np.array(sizes, np.int64))]
        return list(self._tape.op_multi_out("Split", inputs, {"axis": axis}, num_outputs=len(sizes)))

    def custom(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, int | float | str],
        *,
        outputs: int,
    ) -> list[ir.Value]:
        """Returns the outputs of an operator that is not standard."""
        return list(self._tape.op_multi_out(op_type, inputs, attributes, num_outputs=outputs, domain=domain))

    def constant(self, array: Any, name: str | None = None) -> ir.Value:
        """Returns an initializer; equal names, or equal arrays without names, are stored once."""
        array = np.asarray(array, order="C")
        key = name or (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._tape.initializer(
                ir.tensor(array, name=name or f"constant_{len(self._constants)}")
            )
        assert self._constants[key].shape == array.shape, (
            f"two constants of shapes other than {array.shape} are called {name}"
        )
        return self._constants[key]

    def model(
        self,
        inputs: list[ir.Value],
        outputs: list[ir.Value],
        facts: Sequence[TensorSpec],
        *,
        opset: int,
        domains: Mapping[str, int] = MappingProxyType({}),
    ) -> ir.Model:
        """Returns the finished model; `facts` are the names, types and shapes of the outputs."""
        for value, fact in zip(outputs, facts, strict=True):
            value.name = fact.name
            value.dtype = TYPES[fact.dtype]
            value.shape = ir.Shape(fact.shape)
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": opset, **domains},
            name="step",
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="xl-export")


def graph_input(fact: TensorSpec) -> ir.Value:
    """Returns a graph input with its name, type and shape."""
    return ir.val(fact.name, dtype=TYPES[fact.dtype], shape=ir.Shape(fact.shape))


def constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Returns a new initializer of a finished graph."""
    value = ir.val(name, const_value=ir.tensor(np.ascontiguousarray(array), name=name))
    graph.register_initializer(value)
    return value


def save_model(model: ir.Model, folder: Path, *, name: str = GRAPH) -> None:
    """Writes a graph, `step.onnx` by name, and its external `weights.bin` to a folder.

    Large tensors start at page boundaries, so that they can be memory-mapped.
    """
    ir.save(
        model,
        folder / name,
        external_data=WEIGHTS,
        size_threshold_bytes=1024,
        alignment=4096,
        align_threshold=4096,
    )


def save_graph(model: ir.Model, path: Path, *, weights_of: Path) -> None:
    """Writes a second graph that shares weights with a graph that `save_model` wrote.

    weights_of: the first graph. Tensors that are equal to one of its large tensors are read from its file.
    """
    stored = {
        _content(tensor): tensor
        for value in ir.load(weights_of).graph.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None
        if (same := stored.get(_content(value.const_value))) is not None:
            value.const_value = ir.ExternalTensor(
                same.location,
                same.offset,
                same.length,
                same.dtype,
                shape=same.shape,
                name=name,
                base_dir=same.base_dir,
            )
    ir.save(model, path)


def _content(tensor: ir.TensorProtocol) -> tuple[ir.DataType, tuple[int, ...], bytes]:
    """What is the same of tensors with the same values."""
    return tensor.dtype, tuple(tensor.shape.numpy()), hashlib.sha256(tensor.tobytes()).digest()


def remove_unused_nodes(model: ir.Model) -> None:
    """Removes the nodes and constants whose results nothing reads."""
    with quiet():
        RemoveUnusedNodesPass()(model)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences prints, logs and warnings of other packages. Real faults are still raised, or fail the
    validation.
    """
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
