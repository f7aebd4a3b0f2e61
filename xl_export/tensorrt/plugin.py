"""`xl::RelativeAttention` as TensorRT plugins: shapes, tactics, and compiled kernels that the plan carries.

Two quickly deployable plugins (`tensorrt.plugin`), since each launches one kernel: `PARTS` attends to the keys in parts, `JOIN`
makes their answers one. Their functions run while the engine is built. The engine then launches the embedded PTX by itself, so
it needs neither Python nor a plugin library, not even under trtexec.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from importlib import import_module
from types import GenericAlias
from typing import Any

from runtimes.base.errors import ConfigError, needs
from runtimes.contract.engine import Gpu
from runtimes.contract.spec import Spec
from xl_export.tensorrt.compile import (
    JOINS,
    MAX_HEAD_DIM,
    PTX_VERSIONS,
    Kernel,
    Sizes,
    Tactic,
    Type,
    compile_kernel,
    constants,
    join_constants,
    parts,
    programs,
    scratch_rows,
    tactics,
)
from xl_export.tensorrt.operator import ATTRIBUTES, DOMAIN, INPUTS, JOIN, PARTS, Attributes

INTEGER_INPUTS = ("first",)
JOIN_INPUTS = ("query", "mixed", "level")


def refuse_unfit(spec: Spec, gpu: Gpu) -> None:
    """Raises UserError where the kernel cannot be compiled for this model and GPU: inside TensorRT it is too late to say so."""
    if spec.model.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"heads are {spec.model.head_dim} wide and the plugin takes up to {MAX_HEAD_DIM}; give --attention native."
        )
    if capability_number(gpu) not in PTX_VERSIONS:
        raise ConfigError(
            f"{gpu.name} has compute capability {gpu.compute_capability}, which the kernel compiler does not know; "
            "give --attention native."
        )
    with needs("tensorrt", "triton"):
        import triton  # noqa: F401


def capability_number(gpu: Gpu) -> int:
    """86 for compute capability 8.6."""
    return int(gpu.compute_capability.replace(".", ""))


def register_plugins(gpu: Gpu) -> None:
    """Registers both plugins with TensorRT for this process, compiled for `gpu`. Later calls must be for the same GPU."""
    trt, trtp = import_module("tensorrt"), import_module("tensorrt.plugin")
    if f"{DOMAIN}::{PARTS}" not in trtp._lib.QDP_REGISTRY:
        _register_parts(trt, trtp, capability_number(gpu))
        _register_join(trt, trtp, capability_number(gpu))


def _register_parts(trt: Any, trtp: Any, capability: int) -> None:
    """The operator's inputs and attributes → `mixed` and `level` of every part of the keys: see `kernel.py`."""

    def undivided(query: Any) -> Any:
        return programs(*(query.shape_expr[axis] for axis in range(3)))

    def shapes(*tensors: Any, **attributes: int) -> Any:
        query = tensors[0]
        rows = scratch_rows(undivided(query))
        return tuple(
            trtp.from_shape_expr(shape, trt.DataType.FLOAT)
            for shape in ((rows, query.shape_expr[3]), (rows,))
        )

    def autotune(*tensors: Any) -> Any:
        """One type for all inputs but the integers, that of the network; the kernel's tactics, from 1 on."""
        kind = _type_name(trt, tensors[0])
        types = [*("INT32" if name in INTEGER_INPUTS else kind for name in INPUTS), "FP32", "FP32"]
        numbers = range(1, len(tactics(tensors[0].shape[3])) + 1)
        return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", list(numbers))]

    def kernel(*arguments: Any) -> Any:
        """Name, PTX, launch and integer arguments of one tactic's kernel. Its arguments: inputs, T, J, outputs."""
        tensors, values, number = arguments[: len(INPUTS)], arguments[len(INPUTS) : -2], arguments[-1]
        query, key = tensors[0], tensors[1]
        sizes = Sizes.of([tuple(tensor.shape) for tensor in tensors])
        fixed = constants(
            tactics(sizes.head_dim)[number - 1],
            sizes,
            Attributes(**dict(zip(ATTRIBUTES, values, strict=True))),
        )
        found = compiled(
            tactics(sizes.head_dim)[number - 1], tuple(fixed.items()), capability, _dtype(trt, query)
        )
        launch = _launch(trtp, found)
        launch.grid_x = query.shape_expr[0] * query.shape_expr[1]
        launch.grid_y = trtp.cdiv(query.shape_expr[2], found.block_t)
        launch.grid_z = parts(undivided(query), number=trtp.ShapeExpr)
        return found.name, found.ptx, launch, _integers(trtp, query.shape_expr[2], key.shape_expr[2])

    _register(
        trtp, PARTS, INPUTS, ATTRIBUTES, GenericAlias(tuple, (trtp.TensorDesc,) * 2), shapes, autotune, kernel
    )


def _register_join(trt: Any, trtp: Any, capability: int) -> None:
    """The query, which gives the answer's shape and type, and what the parts give → the answer."""

    def shapes(*tensors: Any) -> Any:
        return tensors[0].like()

    def autotune(*tensors: Any) -> Any:
        kind = _type_name(trt, tensors[0])
        return [
            trtp.AutoTuneCombination(f"{kind}, FP32, FP32, {kind}", "LINEAR", list(range(1, len(JOINS) + 1)))
        ]

    def kernel(query: Any, mixed: Any, level: Any, outputs: Any, number: int) -> Any:
        """Name, PTX, launch and integer arguments of one tactic's kernel. Its arguments: inputs, rows, parts, answer."""
        B, H, T = (query.shape_expr[axis] for axis in range(3))
        tactic = JOINS[number - 1]
        fixed = join_constants(tactic, query.shape[3])
        found = compiled(tactic, tuple(fixed.items()), capability, _dtype(trt, query))
        launch = _launch(trtp, found)
        launch.grid_x = trtp.cdiv(B * H * T, found.block_t)
        integers = _integers(trtp, B * H * T, parts(programs(B, H, T), number=trtp.ShapeExpr))
        return found.name, found.ptx, launch, integers

    _register(trtp, JOIN, JOIN_INPUTS, (), trtp.TensorDesc, shapes, autotune, kernel)


def _register(
    trtp: Any,
    name: str,
    inputs: Sequence[str],
    attributes: Sequence[str],
    outputs: Any,
    shapes: Any,
    autotune: Any,
    kernel: Any,
) -> None:
    described, chosen = dict.fromkeys(inputs, trtp.TensorDesc), dict.fromkeys(attributes, int)
    made = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    plugin = f"{DOMAIN}::{name}"
    trtp.register(plugin)(_signed(shapes, {**described, **chosen}, outputs))
    trtp.autotune(plugin)(_signed(autotune, {**described, "outputs": None}))
    trtp.aot_impl(plugin)(_signed(kernel, {**described, **chosen, "outputs": None, "tactic": int}, made))


def _type_name(trt: Any, tensor: Any) -> str:
    return {trt.DataType.HALF: "FP16", trt.DataType.FLOAT: "FP32"}[tensor.dtype]


def _dtype(trt: Any, tensor: Any) -> Type:
    return "float16" if tensor.dtype == trt.DataType.HALF else "float32"


def _launch(trtp: Any, kernel: Kernel) -> Any:
    launch = trtp.KernelLaunchParams()
    launch.block_x, launch.shared_mem = kernel.threads, kernel.shared_bytes
    return launch


def _integers(trtp: Any, *expressions: Any) -> Any:
    made = trtp.SymIntExprs(len(expressions))
    for at, expression in enumerate(expressions):
        made[at] = trtp.SymInt32(expression)
    return made


@functools.cache
def compiled(tactic: Tactic, fixed: tuple[tuple[str, int], ...], capability: int, dtype: Type) -> Kernel:
    """The kernel of a tactic; compiled once however many layers and profiles ask for it."""
    return compile_kernel(tactic, dict(fixed), compute_capability=capability, dtype=dtype)


def _signed(function: Any, parameters: dict[str, Any], returns: Any = inspect.Signature.empty) -> Any:
    """The function with the signature that TensorRT reads names, attributes and types from. It accepts no default values."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, kind, annotation=hint or inspect.Parameter.empty)
            for name, hint in parameters.items()
        ],
        return_annotation=returns,
    )
    return function
