"""Runs the fused operator in ONNX Runtime on inputs that fit, nearly fit, or do not fit at all.

`python operator_worker.py LIBRARY SEED COUNT` makes COUNT graphs of one node and runs each. It prints the
number of each case before it starts, and at the end how many were computed and how many refused. The library
may be compiled with sanitizers: then any access beyond a tensor ends the process.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from runtimes.base.startup import load_onnxruntime

DOMAIN = "xl_export"
FIRST = ("query", "context", "keys", "values", "table", "positions", "u", "v", "bias")
INITIAL, PERSISTENT = ("initial_key", "initial_value"), ("persistent_keys", "persistent_values")
SCALES = ("table_scales", "key_scales", "value_scales")  # of tensors of bytes
RING_SCALES = ("ring_key_scales", "ring_value_scales")  # of a ring of bytes
NAMES = (*FIRST, *INITIAL, "gate", SCALES[0], *PERSISTENT, *SCALES[1:], *RING_SCALES)
# The operators by the type of their ring.
OVER: dict[type, str] = {np.float32: "", np.float16: "OverHalves", np.int8: "OverBytes"}
OPTIONAL = tuple(name for name in NAMES if name not in ("query", "context", "positions"))
LARGEST = 1 << 24  # that the operator takes, of any dimension
ODD = (-1, 0, 1, 7, LARGEST, LARGEST + 1, (1 << 63) - 1, -(1 << 63))
TYPES: dict[type, int] = {
    np.float32: TensorProto.FLOAT,
    np.float16: TensorProto.FLOAT16,
    np.int64: TensorProto.INT64,
    np.float64: TensorProto.DOUBLE,
    np.int32: TensorProto.INT32,
    np.uint8: TensorProto.UINT8,
    np.int8: TensorProto.INT8,
}
MOST_BYTES = 1 << 28  # of one input; zeros that nobody writes take no memory


class Case:
    """One node of attention, or of a layer around it: its inputs' shapes and types, and its attributes.

    weights: the constants of a layer by the number of their input.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        pick = chance.randint
        batch, heads, width, length = pick(1, 3), pick(1, 3), pick(1, 40), pick(1, 20)
        mem_len, rows, vectors = pick(0, 40), pick(1, 30), pick(1, 150)
        slots, pitch = mem_len + length + pick(0, 1) * pick(0, 9), 3 * heads * width + 3
        self.ring = chance.choice((np.float32, np.float32, np.float16, np.int8))
        self.name = "RingRelativeAttention" + OVER[self.ring]
        self.shapes: dict[str, list[int]] = {
            "query": [batch, length, heads * width + 3],
            "context": [batch, length, pitch],
            "keys": [batch, heads, slots, width],
            "values": [batch, heads, slots, width],
            "table": [heads, width, rows],
            "positions": [batch, length],
            "u": [heads, 1, width],
            "v": [heads, 1, width],
            "bias": [heads, 1, rows],
            "initial_key": [heads, 1, width],
            "initial_value": [heads, 1, width],
            "gate": [heads, 1, rows],
            "table_scales": [heads, 1, rows],
            "persistent_keys": [heads, width, vectors],
            "persistent_values": [heads, vectors, width],
            "key_scales": [heads, 1, vectors],
            "value_scales": [heads, vectors, 1],
        } | {name: [batch, heads, slots, 1] for name in RING_SCALES}
        self.types: dict[str, type] = dict.fromkeys(NAMES, np.float32) | {"positions": np.int64}
        self.types |= {"keys": self.ring, "values": self.ring}
        self.left_out = {name for name in ("u", "v", "bias", "gate") if chance.random() < 0.5}
        self.left_out |= {*INITIAL} if chance.random() < 0.6 else set()
        self.left_out |= {*PERSISTENT} if chance.random() < 0.6 else set()
        self.left_out |= {*RING_SCALES} if self.ring is not np.int8 else set()
        if self.ring is np.float32 and chance.random() < 0.15:
            self.left_out |= {"keys", "values", *INITIAL}
        for name, scales in zip(("table", *PERSISTENT), SCALES, strict=True):
            self.types[name] = chance.choice((np.float32, np.float16, np.int8))
            if name in self.left_out or self.types[name] is not np.int8:
                self.left_out.add(scales)
        self.attributes: dict[str, Any] = {
            "heads": heads,
            "head_dim": width,
            "mem_len": mem_len,
            "nearest": pick(0, 1),
            "full": pick(0, 1),
            "query_at": pick(0, 3),
            "key_at": pick(0, 3),
            "value_at": pick(0, 2) * heads * width,
            "epsilon": chance.choice((1e-8, 0.5)),
        }
        self.weights: dict[int, np.ndarray] = {}
        if chance.random() < 0.4:
            self.make_layer(heads * width, pitch)
        self.outputs = chance.choice((5, 5, 5, 5, 3, 4) if self.ring is np.int8 else (3, 3, 3, 3, 1, 2))
        self.in_place = chance.random() < 0.5
        for _ in range(chance.choice((0, 0, 1, 1, 2, 4))):
            chance.choice(
                (self.odd_size, self.odd_rank, self.odd_attribute, self.odd_type, self.odd_choice)
            )()

    def make_layer(self, answers: int, pitch: int) -> None:
        """Makes the node a whole layer; answers: the width of those of all heads."""
        model, inner = self.chance.randint(1, 70), self.chance.randint(1, 70)
        draw = np.random.default_rng(self.chance.getrandbits(32))
        shapes: dict[int, tuple[int, ...]] = {
            1: (model, pitch),
            21: (answers, model),
            24: (model,),
            25: (model,),
        }
        if self.chance.random() < 0.7:
            shapes |= {26: (model, inner), 29: (inner,), 30: (inner, model), 33: (model,)}
            shapes |= {34: (model,), 35: (model,)}
        self.name = self.name.replace("Attention", "Layer")
        self.weights = {at: draw.normal(size=shape).astype(np.float32) for at, shape in shapes.items()}
        self.shapes["query"][2] = model
        self.left_out.add("context")
        self.attributes |= {"pre_norm": self.chance.randint(0, 1), "norm_epsilon": 1e-5}
        if self.chance.random() < 0.3:
            at = self.chance.choice(list(self.weights))
            odd = self.chance.choice(("size", "rank", "type", "missing"))
            array = self.weights.pop(at)
            if odd != "missing":
                others = {"size": array[1:], "rank": array[None], "type": array.astype(np.float64)}
                self.weights[at] = others[odd]

    def odd_size(self) -> None:
        name = self.chance.choice(NAMES)
        shape = self.shapes[name]
        if shape:
            at = self.chance.randrange(len(shape))
            near = shape[at] + self.chance.choice((-1, 1))
            shape[at] = max(0, self.chance.choice((near, near, 0, 1, 1 << 16, LARGEST, LARGEST + 1)))

    def odd_rank(self) -> None:
        shape = self.shapes[self.chance.choice(NAMES)]
        if self.chance.random() < 0.5:
            shape.insert(self.chance.randint(0, len(shape)), 1)
        else:
            del shape[self.chance.randint(0, max(0, len(shape) - 1)) :]

    def odd_attribute(self) -> None:
        name = self.chance.choice(list(self.attributes))
        what = self.chance.choice(("odd", "near", "missing", "float", "text", "list"))
        if what == "missing":
            del self.attributes[name]
        elif what == "near" and isinstance(self.attributes[name], int):
            self.attributes[name] = max(-(1 << 63), self.attributes[name] + self.chance.randint(-3, 3))
        else:
            others: dict[str, Any] = {"float": 1.5, "text": "1", "list": [1, 2]}
            self.attributes[name] = others.get(what, self.chance.choice(ODD))

    def odd_type(self) -> None:
        self.types[self.chance.choice(NAMES)] = self.chance.choice(list(TYPES))

    def odd_choice(self) -> None:
        self.left_out ^= {self.chance.choice(OPTIONAL)}

    def model(self) -> bytes:
        given = [name for name in NAMES if name not in self.left_out]
        inputs = [name if name in given else "" for name in NAMES] + [""] * 17
        for at in self.weights:
            inputs[at] = f"weights_{at}"
        while not inputs[-1]:
            inputs.pop()
        outputs = ["answers", "new_keys", "new_values", *(f"new_{name}" for name in RING_SCALES)]
        outputs = outputs[: self.outputs]
        graph = helper.make_graph(
            [helper.make_node(self.name, inputs, outputs, domain=DOMAIN, **self.attributes)],
            "case",
            [helper.make_tensor_value_info(name, TYPES[self.types[name]], None) for name in given],
            [
                helper.make_tensor_value_info(
                    name, TYPES[self.ring] if index in (1, 2) else TensorProto.FLOAT, None
                )
                for index, name in enumerate(outputs)
            ],
            [numpy_helper.from_array(array, f"weights_{at}") for at, array in self.weights.items()],
        )
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
        model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        return model

    def arrays(self) -> dict[str, np.ndarray]:
        draw = np.random.default_rng(self.chance.getrandbits(32))
        arrays = {}
        for name in NAMES:
            if name in self.left_out:
                continue
            shape, dtype = self.shapes[name], np.dtype(self.types[name])
            while np.prod(shape, dtype=object) * dtype.itemsize > MOST_BYTES:
                shape[shape.index(max(shape))] //= 2
            array = np.zeros(shape, dtype)
            if 0 < array.size < 1 << 18:
                array[...] = draw.integers(-2, 3, shape) if dtype.kind in "iu" else draw.normal(size=shape)
                if name == "positions" and array.ndim == 2:
                    array[...] = draw.integers(-9, 500, (len(array), 1)) + np.arange(array.shape[1])
                if name == "positions" and self.chance.random() < 0.1:
                    array[...] = draw.choice([-(1 << 62), 1 << 62, (1 << 63) - 5, -(1 << 63)]).astype(dtype)
            arrays[name] = array
        return arrays


def run(case: Case, ort: Any, options: Any) -> None:
    session = ort.InferenceSession(case.model(), options, providers=["CPUExecutionProvider"])
    arrays = case.arrays()
    if not case.in_place:
        session.run(None, arrays)
        return
    io = session.io_binding()  # as a session of this project binds its ring: read and written at one place
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for name, value in values.items():
        io.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        past = output.name.removeprefix("new_")
        if past in values:
            io.bind_ortvalue_output(output.name, values[past])
        else:
            io.bind_output(output.name)
    session.run_with_iobinding(io)


def main(library: str, seed: int, count: int) -> None:
    ort = load_onnxruntime()
    ort.set_default_logger_severity(4)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    options.register_custom_ops_library(library)
    computed = 0
    for number in range(seed, seed + count):
        print(number, flush=True)
        try:
            run(Case(random.Random(number)), ort, options)
            computed += 1
        except (Exception, onnx.checker.ValidationError) as error:  # ONNX Runtime raises bare classes
            print(f"refused: {type(error).__name__} {str(error)[:150]!r}")
    print(f"{computed} computed, {count - computed} refused", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
