"""`xl::RelativeAttention` as a TensorRT plugin: shapes, tactics, and a compiled kernel that the plan carries.

A quickly deployable plugin (`tensorrt.plugin`): its functions run while the engine is built. The engine then launches the
embedded PTX by itself, so it needs neither Python nor a plugin library, not even under trtexec.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import fields
from importlib import import_module
from types import GenericAlias
from typing import Any

from runtimes.engine import Gpu
from runtimes.errors import ConfigError, needs
from runtimes.spec import Spec
from xl_export.tensorrt.compile import MAX_HEAD_DIM, PTX_VERSIONS, Kernel, Sizes, compile_kernel, tactics
from xl_export.tensorrt.operator import DOMAIN, INPUTS, NAME, Attributes

ID = f"{DOMAIN}::{NAME}"
ATTRIBUTES = tuple(field.name for field in fields(Attributes))
INTEGER_INPUTS = ("first",)


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


def register_plugin(gpu: Gpu) -> None:
    """Registers the plugin with TensorRT for this process, compiled for `gpu`. Later calls must be for the same GPU."""
    trt, trtp = import_module("tensorrt"), import_module("tensorrt.plugin")
    if ID in trtp._lib.QDP_REGISTRY:
        return

    def shapes(*tensors: Any, **attributes: int) -> Any:
        """The answer has the shape and type of the query."""
        return tensors[0].like()

    def autotune(*tensors: Any) -> Any:
        """One type for all but the integers, that of the network; the kernel's tactics, from 1 on."""
        query = tensors[0]
        kind = {trt.DataType.HALF: "FP16", trt.DataType.FLOAT: "FP32"}[query.dtype]
        types = [*("INT32" if name in INTEGER_INPUTS else kind for name in INPUTS), kind]
        numbers = range(1, len(tactics(query.shape[3])) + 1)
        return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", list(numbers))]

    def kernel(*arguments: Any) -> Any:
        """Name, PTX, launch and integer arguments of one tactic's kernel. Its arguments: inputs, T, J, answer."""
        tensors, values, number = arguments[: len(INPUTS)], arguments[len(INPUTS) : -2], arguments[-1]
        query, key = tensors[0], tensors[1]
        sizes = Sizes.of([tuple(tensor.shape) for tensor in tensors])
        attributes = Attributes(**dict(zip(ATTRIBUTES, values, strict=True)))
        dtype = "float16" if query.dtype == trt.DataType.HALF else "float32"
        found = compiled(capability_number(gpu), dtype, sizes, attributes, number)
        launch = trtp.KernelLaunchParams()
        launch.grid_x = query.shape_expr[0] * query.shape_expr[1]
        launch.grid_y = trtp.cdiv(query.shape_expr[2], found.block_t)
        launch.block_x, launch.shared_mem = found.threads, found.shared_bytes
        integers = trtp.SymIntExprs(2)
        integers[0], integers[1] = trtp.SymInt32(query.shape_expr[2]), trtp.SymInt32(key.shape_expr[2])
        return found.name, found.ptx, launch, integers

    described = dict.fromkeys(INPUTS, trtp.TensorDesc)
    chosen = dict.fromkeys(ATTRIBUTES, int)
    made = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    trtp.register(ID)(_signed(shapes, {**described, **chosen}, trtp.TensorDesc))
    trtp.autotune(ID)(_signed(autotune, {**described, "outputs": None}))
    trtp.aot_impl(ID)(_signed(kernel, {**described, **chosen, "outputs": None, "tactic": int}, made))


@functools.cache
def compiled(capability: int, dtype: Any, sizes: Sizes, attributes: Attributes, number: int) -> Kernel:
    """The kernel of tactic `number`, counted from 1; compiled once however many layers ask for it."""
    tactic = tactics(sizes.head_dim)[number - 1]
    return compile_kernel(tactic, sizes, attributes, compute_capability=capability, dtype=dtype)


def _signed(function: Any, parameters: dict[str, Any], returns: Any = inspect.Signature.empty) -> Any:
    """The function with the signature that TensorRT reads names, attributes and types from. It accepts no default values."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=hint or inspect.Parameter.empty) for name, hint in parameters.items()],
        return_annotation=returns,
    )
    return function
