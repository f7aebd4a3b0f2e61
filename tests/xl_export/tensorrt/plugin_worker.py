"""Drives the registered plugins as TensorRT's builder does, through the real `tensorrt.plugin`; prints what
it answers as JSON.

Stand-ins: the registry, and the expressions in which TensorRT computes shapes, which are plain numbers here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorrt as trt  # type: ignore[import-not-found]
import tensorrt.plugin as trtp  # type: ignore[import-not-found]

from runtimes.contract.engine import Gpu
from xl_export.tensorrt.kernels.compile import JOINS, Sizes, tactics
from xl_export.tensorrt.kernels.timing import Choice, Shape
from xl_export.tensorrt.operator import DOMAIN, JOIN, SIGNATURES, Attributes, Signature
from xl_export.tensorrt.plugin import register_plugins, use_choices


class Number(trt.IDimensionExpr):  # type: ignore[misc]
    """A known dimension."""

    @classmethod
    def of(cls, value: int) -> Number:
        number: Number = trt.IDimensionExpr.__new__(cls)  # the bindings have no constructor for it
        number.value = value
        return number

    def is_constant(self) -> bool:
        return True

    def get_constant_value(self) -> int:
        return self.value


OPERATIONS = {
    trt.DimensionOperation.PROD: lambda a, b: a * b,
    trt.DimensionOperation.SUM: lambda a, b: a + b,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
    trt.DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    trt.DimensionOperation.SUB: lambda a, b: a - b,
    trt.DimensionOperation.MIN: min,
    trt.DimensionOperation.MAX: max,
}
MULTIPROCESSORS = 4
BUILDER = SimpleNamespace(
    constant=Number.of, operation=lambda kind, a, b: Number.of(OPERATIONS[kind](a.value, b.value))
)


def drive(capability: str, kind: str, sizes: dict[str, int], attributes: Attributes) -> dict[str, Any]:
    """What each of the plugins answers, by its name. `M` of the sizes is the memory length in a ring."""
    creators: dict[str, Any] = {}

    def register(creator: Any, namespace: str) -> None:
        assert (namespace, creator.name) not in creators
        creators[creator.name] = creator
        assert namespace == DOMAIN

    registry = SimpleNamespace(register_creator=register, get_creator=lambda name, *_: creators[name])
    trt.get_plugin_registry = lambda: registry
    trt.DimsExprs = lambda count: [None] * count
    make = trtp.SymInt32.__call__
    trtp.SymInt32.__call__ = lambda symbol: (make(symbol), symbol)
    for _ in range(2):  # the second time they are there already
        register_plugins(Gpu(name="A GPU", compute_capability=capability), multiprocessors=MULTIPROCESSORS)

    B, H, T, J, K, R, N = (sizes[letter] for letter in "BHTJKRN")
    shapes = [
        [B, H, T, K],
        [B, H, J, K],
        [B, H, J, K],
        [B],
        [H, 1, K],
        [H, 1, K],
        [H, R, K],
        [H, R],
        [H, N, K],
        [H, N, K],
        [B],
    ]
    of_type = getattr(trt.DataType, kind)

    def attend(signature: Signature, tried: int) -> dict[str, Any]:
        names = signature.inputs
        types = [trt.DataType.INT32 if name in ("first", "slot") else of_type for name in names]
        every = {**asdict(attributes), "mem_len": sizes["M"]}
        values = {name: every[name] for name in signature.attributes}
        return drive_one(creators[signature.parts], shapes[: len(names)], types, values, tried)

    found = {
        signature.parts: attend(signature, tried) for signature, tried in zip(SIGNATURES, (2, 1), strict=True)
    }
    first = found[SIGNATURES[0].parts]
    outputs = [getattr(trt.DataType, name) for name in first["output_types"]]
    scratch = [*shapes[:2], *first["output_shapes"]]
    of_scratch = [of_type, of_type, *outputs]
    second = drive_one(creators[JOIN], scratch, of_scratch, {}, 2)

    def offered() -> list[list[int]]:
        """The tactics of the ring's plugin and of the join, at the usual shape of a profile."""
        names, every = SIGNATURES[1].inputs, {**asdict(attributes), "mem_len": sizes["M"]}
        types = [trt.DataType.INT32 if name in ("first", "slot") else of_type for name in names]
        ring = drive_one(creators[SIGNATURES[1].parts], shapes, types, every, 0, dynamic=True)
        join = drive_one(creators[JOIN], scratch, of_scratch, {}, 0, dynamic=True)
        return [ring["tactics"], join["tactics"]]

    choice = choice_for(sizes, capability, kind, attributes, shapes)
    longer = dataclasses.replace(choice, shape=dataclasses.replace(choice.shape, tokens=T + 1))
    chosen = {}
    for name, choices in (("at its shape", [choice]), ("at another shape", [longer])):
        use_choices(choices)
        chosen[name] = offered()
    return {**found, JOIN: second, "chosen": chosen}


def choice_for(
    sizes: dict[str, int], capability: str, kind: str, attributes: Attributes, shapes: list[list[int]]
) -> Choice:
    """The last tactic of each of the two kernels, for these sizes."""
    dtype = "float16" if kind == "HALF" else "float32"
    shape = Shape(
        profile="segment",
        batch=sizes["B"],
        tokens=sizes["T"],
        keys=sizes["J"],
        mem_len=sizes["M"],
        ring=True,
        sizes=Sizes.of(shapes),
        attributes=attributes,
        dtype=dtype,
    )
    last = tactics(sizes["K"], int(capability.replace(".", "")), dtype)[-1]
    return Choice(shape=shape, tactic=last, join=JOINS[-1], milliseconds=1.0)


def drive_one(
    creator: Any,
    shapes: list[list[int]],
    types: list[Any],
    values: dict[str, int],
    tried: int,
    *,
    dynamic: bool = False,
) -> dict[str, Any]:
    """What a plugin answers. tried: of how many tactics the kernel is compiled. dynamic: whether batch and
    the third size of tensors of four are those that a profile calls usual.
    """
    fields = [
        trt.PluginField(name, np.array([value]), trt.PluginFieldType.INT64) for name, value in values.items()
    ]
    phase, request = trt.TensorRTPhase.BUILD, trt.QuickPluginCreationRequest.STRICT_AOT
    plugin = creator.create_plugin(creator.name, DOMAIN, trt.PluginFieldCollection(fields), phase, request)
    output_types = plugin.get_output_data_types(types, [len(shape) for shape in shapes])
    answered = plugin.get_output_shapes(
        [[Number.of(size) for size in shape] for shape in shapes], [], BUILDER
    )
    output_shapes = [[size.value for size in shape] for shape in answered]
    in_out = []
    for shape, dtype in zip([*shapes, *output_shapes], [*types, *output_types], strict=True):
        described = trt.DynamicPluginTensorDesc()
        described.desc = desc = trt.PluginTensorDesc()
        varies = [-1, shape[1], -1, shape[3]] if dynamic and len(shape) == 4 else shape
        desc.dims, desc.type, desc.format = trt.Dims(varies), dtype, trt.TensorFormat.LINEAR
        described.desc, described.opt = desc, trt.Dims(shape)
        in_out.append(described)
    count = len(shapes)
    combinations = plugin.get_supported_format_combinations(in_out, count)
    plugin.configure_plugin(in_out[:count], in_out[count:])
    launches, valid = [], plugin.get_valid_tactics()
    # Of many the third and the first: compiling takes seconds, and `test_compile.py` tries them all.
    for tactic in (valid if len(valid) < 5 else (valid[2], valid[0]))[:tried]:
        plugin.set_tactic(tactic)
        launch, integers = SimpleNamespace(), Integers()
        plugin.get_launch_params(None, in_out, count, launch, integers, BUILDER)
        name, ptx = plugin.get_kernel(
            [item.desc for item in in_out[:count]], [item.desc for item in in_out[count:]]
        )
        numbers = {key: symbol._expr.value for key, (_, symbol) in vars(launch).items()}
        launches.append(
            {"tactic": tactic, "name": name, "ptx": ptx.decode(), "integers": integers.values, **numbers}
        )
    return {
        "fields": [field.name for field in creator.field_names],
        "output_types": [dtype.name for dtype in output_types],
        "output_shapes": output_shapes,
        "combination": [desc.type.name for desc in combinations],
        "formats": sorted({desc.format.name for desc in combinations}),
        "tactics": list(valid),
        "launches": launches,
    }


class Integers:
    """Takes the kernel's integer arguments as TensorRT does. What the bindings make of them can only be
    written, not read.
    """

    def __init__(self) -> None:
        self.nbSymExprs = 0
        self.values: list[int] = []

    def __setitem__(self, index: int, expression: Any) -> None:
        assert index == len(self.values) < self.nbSymExprs
        made, symbol = expression
        assert isinstance(made, trt.ISymExpr)
        assert isinstance(symbol, trtp.SymInt32)
        self.values.append(symbol._expr.value)


if __name__ == "__main__":
    capability, kind, sizes, attributes = sys.argv[1:]
    print(json.dumps(drive(capability, kind, json.loads(sizes), Attributes(**json.loads(attributes)))))
