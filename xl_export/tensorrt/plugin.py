"""`xl_export::RelativeAttention` as TensorRT plugins: shapes, tactics, and compiled Triton kernels that the
plan carries.

The plugins are of the kind that NVIDIA calls quickly deployable (`tensorrt.plugin`). Such a plugin launches
one kernel, so an attention has two: `PARTS` attends to the keys in parts, and `JOIN` joins the answers of the
parts. Over a ring `RING_PARTS` replaces `PARTS`.
The functions here run while the engine is built. The engine launches the embedded PTX by itself; it needs
neither Python nor a plugin library, and trtexec runs it too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import GenericAlias
from typing import Any

import numpy as np

from runtimes.base.errors import ConfigError, MissingPackageError, needs
from runtimes.contract.engine import Gpu
from runtimes.contract.spec import Spec
from xl_export.tensorrt.kernels.compile import (
    JOINS,
    MAX_HEAD_DIM,
    PTX_VERSIONS,
    Arithmetic,
    Kernel,
    Sizes,
    Tactic,
    Type,
    compile_kernel,
    constants,
    join_constants,
    parts,
    scratch_rows,
    tactics,
)
from xl_export.tensorrt.kernels.timing import Choice
from xl_export.tensorrt.network import release
from xl_export.tensorrt.operator import DOMAIN, JOIN, SIGNATURES, Attributes, Signature

# The first TensorRT that reads the attributes of a plugin with NumPy 2.4, which converts only arrays without
# axes to numbers (`tensorrt/plugin/_lib.py`).
READS_NUMPY_2_4 = (11, 2)
INTEGER_INPUTS = ("first", "slot")
# The kernels of the build that runs, by the sizes of an attention at the usual shape of a profile.
_chosen: dict[tuple[Any, ...], Choice] = {}
JOIN_INPUTS = ("query", "key", "mixed", "level")


def refuse_unfit(spec: Spec, gpu: Gpu, *, version: str) -> None:
    """Raises UserError if the Triton kernels cannot be compiled for this model and this GPU, or TensorRT of
    this version cannot call the plugin.

    Call it before the build, because errors of functions that TensorRT calls do not reach the user.
    """
    if spec.model.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"heads are {spec.model.head_dim} wide and the plugin takes up to {MAX_HEAD_DIM}; give "
            "--attention native."
        )
    if gpu.capability not in PTX_VERSIONS:
        raise ConfigError(
            f"{gpu.name} has compute capability {gpu.compute_capability}, for which the Triton kernels "
            "cannot be compiled; give --attention native."
        )
    if release(version) < READS_NUMPY_2_4 and release(np.__version__) >= (2, 4):
        raise MissingPackageError(
            f"--attention plugin needs NumPy older than 2.4 with TensorRT {version}, and {np.__version__} is "
            "installed; run `pip install 'numpy<2.4'`, or update TensorRT to "
            f"{'.'.join(map(str, READS_NUMPY_2_4))}."
        )
    with needs("tensorrt", "triton"):
        import triton  # noqa: F401


def register_plugins(gpu: Gpu, *, multiprocessors: int) -> None:
    """Registers the plugins with TensorRT for this process; they compile for `gpu`. Later calls must be for
    the same GPU.

    multiprocessors: how many the GPU has; the keys of few queries are divided among them.

    `tensorrt.plugin.op`, the public table of plugins by namespace, shows whether they are registered:
    TensorRT's front package from PyPI and the bindings behind it both have it.
    """
    trt = import_module("tensorrt")
    trtp = import_module("tensorrt.plugin")
    if not hasattr(getattr(trtp.op, DOMAIN, None), JOIN):
        for signature in SIGNATURES:
            _register_parts(trt, trtp, signature, gpu.capability, multiprocessors)
        _register_join(trt, trtp, gpu.capability, multiprocessors)


def use_choices(choices: Iterable[Choice]) -> None:
    """Offers TensorRT only these kernels in the next build, each for its shape; all for other shapes."""
    _chosen.clear()
    for choice in choices:
        shape = choice.shape
        _chosen[shape.batch, shape.tokens, shape.keys, shape.sizes] = choice


def _usual(tensor: Any) -> tuple[int, ...]:
    """The shape for which a plugin is tuned: the usual one of the profile that is being built."""
    return tuple(tensor.shape.opt if tensor.shape.is_dynamic else tensor.shape)


def _choice(tensors: Sequence[Any]) -> Choice | None:
    """The kernels that were chosen for the inputs of an attention, or None."""
    B, _, T, _ = _usual(tensors[0])
    J = _usual(tensors[1])[2]
    return _chosen.get((B, T, J, Sizes.of([tuple(tensor.shape) for tensor in tensors])))


def _join_choice(query: Any) -> Choice | None:
    """The kernels that were chosen for the queries of a join, or None."""
    B, H, T, K = _usual(query)
    for (batch, tokens, _, sizes), choice in _chosen.items():
        if (batch, sizes.heads, tokens, sizes.head_dim) == (B, H, T, K):
            return choice
    return None


def _offered(known: Sequence[Tactic], chosen: Tactic | None) -> list[int]:
    """The numbers of the tactics that TensorRT may use, from 1: the chosen one, or all."""
    return [known.index(chosen) + 1] if chosen in known else list(range(1, len(known) + 1))


def _register_parts(trt: Any, trtp: Any, signature: Signature, capability: int, multiprocessors: int) -> None:
    """Registers the plugin that computes `mixed` and `level` of every part of the keys
    (`kernels/segment.py`).

    It has the operator's inputs and attributes.
    """
    inputs = signature.inputs
    of_gpu: dict[str, Any] = {"multiprocessors": multiprocessors, "by": _expressions(trtp)}

    def tactics_of(query: Any) -> tuple[Tactic, ...]:
        return tactics(query.shape[3], capability, _dtype(trt, query))

    def shapes(*tensors: Any, **attributes: int) -> Any:
        query = tensors[0]
        rows = scratch_rows(*_first_three(query), **of_gpu)
        return tuple(
            trtp.from_shape_expr(shape, trt.DataType.FLOAT)
            for shape in ((rows, query.shape_expr[3]), (rows,))
        )

    def autotune(*tensors: Any) -> Any:
        """The types and tactics that TensorRT may choose: the network's type for all floats, tactics numbered
        from 1.
        """
        kind = _type_name(trt, tensors[0])
        types = [*("INT32" if name in INTEGER_INPUTS else kind for name in inputs), "FP32", "FP32"]
        choice = _choice(tensors[: len(inputs)])
        numbers = _offered(tactics_of(tensors[0]), choice.tactic if choice else None)
        return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", numbers)]

    def kernel(*arguments: Any) -> Any:
        """Name, PTX, launch and integer arguments of one tactic's kernel, whose parameters are inputs, T, J
        and outputs.

        arguments: the inputs' descriptions, the attributes, the outputs' descriptions and the tactic's
        number.
        """
        tensors = arguments[: len(inputs)]
        values = arguments[len(inputs) : -2]
        number = arguments[-1]
        query = tensors[0]
        key = tensors[1]
        sizes = Sizes.of([tuple(tensor.shape) for tensor in tensors])
        tactic = tactics_of(query)[number - 1]
        attributes = dict(zip(signature.attributes, values, strict=True))
        mem_len = attributes.pop("mem_len", None)
        fixed = constants(tactic, sizes, Attributes(**attributes), mem_len)
        triton_kernel = compiled(tactic, tuple(fixed.items()), capability, _dtype(trt, query))
        # Sizes are expressions: TensorRT works them out for the shapes of each step.
        launch = _launch(trtp, triton_kernel)
        launch.grid_x = query.shape_expr[0] * query.shape_expr[1]
        launch.grid_y = trtp.cdiv(query.shape_expr[2], triton_kernel.block_t)
        launch.grid_z = parts(*_first_three(query), key.shape_expr[2], **of_gpu)
        integers = _integers(trtp, query.shape_expr[2], key.shape_expr[2])
        return triton_kernel.name, triton_kernel.ptx, launch, integers

    outputs = GenericAlias(tuple, (trtp.TensorDesc,) * 2)
    _register(trtp, signature.parts, inputs, signature.attributes, outputs, shapes, autotune, kernel)


def _register_join(trt: Any, trtp: Any, capability: int, multiprocessors: int) -> None:
    """Registers the plugin that joins the answers of the parts; query and key give shapes and type."""
    of_gpu: dict[str, Any] = {"multiprocessors": multiprocessors, "by": _expressions(trtp)}

    def shapes(*tensors: Any) -> Any:
        return tensors[0].like()

    def autotune(*tensors: Any) -> Any:
        kind = _type_name(trt, tensors[0])
        choice = _join_choice(tensors[0])
        numbers = _offered(JOINS, choice.join if choice else None)
        return [trtp.AutoTuneCombination(f"{kind}, {kind}, FP32, FP32, {kind}", "LINEAR", numbers)]

    def kernel(query: Any, key: Any, mixed: Any, level: Any, outputs: Any, tactic_number: int) -> Any:
        """Name, PTX, launch and integer arguments of one tactic's kernel, whose parameters are inputs, rows,
        parts and answer.
        """
        B, H, T = _first_three(query)
        tactic = JOINS[tactic_number - 1]
        fixed = join_constants(tactic, query.shape[3])
        triton_kernel = compiled(tactic, tuple(fixed.items()), capability, _dtype(trt, query))
        launch = _launch(trtp, triton_kernel)
        launch.grid_x = trtp.cdiv(B * H * T, triton_kernel.block_t)
        number = parts(B, H, T, key.shape_expr[2], **of_gpu)
        integers = _integers(trtp, B * H * T, number)
        return triton_kernel.name, triton_kernel.ptx, launch, integers

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
    """Registers the three functions of one plugin under the signatures that TensorRT expects of them."""
    tensors = dict.fromkeys(inputs, trtp.TensorDesc)
    integers = dict.fromkeys(attributes, int)
    kernel_result = GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    plugin = f"{DOMAIN}::{name}"
    trtp.register(plugin)(_signed(shapes, {**tensors, **integers}, outputs))
    trtp.autotune(plugin)(_signed(autotune, {**tensors, "outputs": None}))
    of_kernel = {**tensors, **integers, "outputs": None, "tactic": int}
    trtp.aot_impl(plugin)(_signed(kernel, of_kernel, kernel_result))


def _type_name(trt: Any, tensor: Any) -> str:
    return {trt.DataType.HALF: "FP16", trt.DataType.FLOAT: "FP32"}[tensor.dtype]


def _dtype(trt: Any, tensor: Any) -> Type:
    return "float16" if tensor.dtype == trt.DataType.HALF else "float32"


def _expressions(trtp: Any) -> Arithmetic:
    return Arithmetic(number=trtp.ShapeExpr, least=trtp.min, most=trtp.max)


def _first_three(query: Any) -> tuple[Any, Any, Any]:
    """Batch, heads and segment."""
    return query.shape_expr[0], query.shape_expr[1], query.shape_expr[2]


def _launch(trtp: Any, kernel: Kernel) -> Any:
    launch = trtp.KernelLaunchParams()
    launch.block_x = kernel.threads
    launch.shared_mem = kernel.shared_bytes
    return launch


def _integers(trtp: Any, *expressions: Any) -> Any:
    integers = trtp.SymIntExprs(len(expressions))
    for at, expression in enumerate(expressions):
        integers[at] = trtp.SymInt32(expression)
    return integers


@functools.cache
def compiled(
    tactic: Tactic, fixed: tuple[tuple[str, int | None], ...], capability: int, dtype: Type
) -> Kernel:
    """The kernel of a tactic. It is compiled once, although every layer and profile requests it."""
    return compile_kernel(tactic, dict(fixed), compute_capability=capability, dtype=dtype)


def _signed(function: Any, parameters: dict[str, Any], returns: Any = inspect.Signature.empty) -> Any:
    """The function with another signature, from which TensorRT reads names and types; it accepts no default
    values.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, kind, annotation=hint or inspect.Parameter.empty)
            for name, hint in parameters.items()
        ],
        return_annotation=returns,
    )
    return function
