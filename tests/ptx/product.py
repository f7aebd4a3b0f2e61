"""Products for `cuda` on the CPU: their naive answers, and their kernels on the emulator.

The kernels are those that the package carries (`kernels.hpp`).
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.ptx.driver import EmulatedDriver
from tests.ptx.launch import execute_over
from tests.ptx.machine import KernelError
from xl_export.tensorrt.kernels.compile import Kernel
from xl_export.tensorrt.kernels.driver import Driver
from xl_export.tensorrt.kernels.ready import RING_FILE

Norm = tuple[np.ndarray, np.ndarray]  # weight and bias
# The parameters of the kernels, in order.
POINTERS = {
    "product_of_few_rows": (
        *("x", "matrix", "bias", "residual", "norm_weight", "norm_bias", "residual_weight"),
        *("residual_bias", "y"),
    ),
    "product_end": ("y", "bias", "residual", "norm_weight", "norm_bias", "normed_y"),
}
NUMBERS = {
    "product_of_few_rows": (
        *("rows", "K", "N", "has_bias", "has_residual", "normed", "residual_normed", "relu"),
        "epsilon",
    ),
    "product_end": ("N", "has_bias", "has_residual", "normed", "relu", "epsilon"),
}


@dataclass(frozen=True)
class Shipped:
    """A kernel of the package. rows: the most that it multiplies, or 0. columns: that a program computes."""

    dtype: str
    rows: int
    columns: int
    kernel: Kernel


@functools.cache
def all_shipped() -> list[Shipped]:
    """The kernels of the package, those for few rows first."""
    entries = re.findall(r'^ +\{"(product_\w+)", ((?:\d+, ){5})(".*")\},$', RING_FILE.read_text(), re.M)
    found = []
    for name, numbers, ptx in entries:
        halves, rows, columns, threads, shared_bytes = map(int, re.findall(r"\d+", numbers))
        sizes = {"threads": threads, "shared_bytes": shared_bytes, "block_t": 1}
        kernel = Kernel(name=name, ptx=json.loads(ptx), **sizes)
        found.append(Shipped("float16" if halves else "float32", rows, columns, kernel))
    return found


def shipped(dtype: str, rows: int) -> Shipped:
    """The kernel of the package for at most this many rows; the end's for 0."""
    chosen = [one for one in all_shipped() if one.dtype == dtype and bool(one.rows) == bool(rows)]
    return next(one for one in chosen if one.rows >= rows)


def shipped_as(ptx: str) -> tuple[str, Kernel]:
    """The type of a kernel of the package, and the kernel."""
    return next((one.dtype, one.kernel) for one in all_shipped() if one.kernel.ptx == ptx)


def naive_norm(x: np.ndarray, norm: Norm | None, epsilon: float) -> np.ndarray:
    """The layer norm of the rows of x, in float64; x if there is none."""
    x = x.astype(np.float64)
    if norm is None:
        return x
    away = x - x.mean(axis=-1, keepdims=True)
    weight, bias = norm
    return away / np.sqrt((away**2).mean(axis=-1, keepdims=True) + epsilon) * weight + bias


def naive_product(
    x: np.ndarray,
    matrix: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    norm: Norm | None = None,
    residual_norm: Norm | None = None,
    *,
    relu: bool,
    epsilon: float,
) -> np.ndarray:
    """What the node computes of x [.., K] and a matrix [N, K], in float64; `product.hpp` has the contract."""
    y = naive_norm(x, norm, epsilon) @ matrix.astype(np.float64).T
    if bias is not None:
        y = y + bias
    if relu:
        y = np.maximum(y, 0)
    return y if residual is None else y + naive_norm(residual, residual_norm, epsilon)


def product_node(
    x: np.ndarray,
    matrix: np.ndarray,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    *norms: np.ndarray | None,
    relu: bool,
    epsilon: float,
) -> tuple[np.ndarray, ...]:
    """The outputs of the node in the type of x. Norms that must not be read, or are not written, are NaN."""
    weight, added, result, second_weight, second_added, second_result, *behind = (*norms, *[None] * 8)[:8]
    norm, second = (weight, added), (second_weight, second_added)
    if x.shape[0] * x.shape[1] > 8:
        x, norm = (x if result is None else result), (None, None)
        residual, second = (residual if second_result is None else second_result), (None, None)
    given = [None if one[0] is None else one for one in (norm, second)]
    y = naive_product(x, matrix, bias, residual, *given, relu=relu, epsilon=epsilon).astype(x.dtype)
    if behind[0] is None:
        return (y,)
    many = y.shape[0] * y.shape[1] > 8
    return y, (naive_norm(y, tuple(behind), epsilon) if many else np.full_like(y, np.nan)).astype(x.dtype)


def bits_of(number: float) -> int:
    """A float as the integer that a kernel's argument is."""
    return int(np.float32(number).view(np.uint32))


def execute_at(
    kernel: Kernel,
    grid: tuple[int, int, int],
    arguments: Sequence[int],
    *,
    types: str,
    room: Callable[[int], int] | None = None,
) -> None:
    """Executes a launch over tensors of this process. arguments: addresses and numbers, in order. types: of
    all tensors. room: as in `execute_over`.
    """
    name = kernel.name
    pointers = POINTERS[name]
    addresses = dict(zip(pointers, arguments, strict=False))
    numbers = dict(zip(NUMBERS[name], arguments[len(pointers) :], strict=True))
    N, K, rows = numbers["N"], numbers.get("K", 0), numbers.get("rows", grid[0])
    item = np.dtype(types).itemsize
    width = K if name == "product_of_few_rows" else N
    counts = {
        "x": rows * K,
        "matrix": N * K,
        "bias": N * numbers["has_bias"],
        "residual": rows * N * numbers["has_residual"],
        "norm_weight": width * numbers["normed"],
        "norm_bias": width * numbers["normed"],
        "residual_weight": N * numbers.get("residual_normed", 0),
        "residual_bias": N * numbers.get("residual_normed", 0),
        "y": rows * N,
        "normed_y": rows * N * numbers["normed"],
    }
    few = name == "product_of_few_rows"
    execute_over(
        kernel,
        grid,
        addresses,
        {pointer: item * counts[pointer] for pointer in pointers},
        list(numbers.values()),
        written=("y",) if few else ("y", "normed_y"),
        undefined=("y",) if few else ("normed_y",),
        room=room,
    )


@dataclass(frozen=True)
class Case:
    """A product of random tensors. parts: the arguments of `naive_product` that there are besides."""

    rows: int
    K: int
    N: int
    parts: tuple[str, ...] = ()


ALL = ("bias", "residual", "norm", "residual_norm", "relu")
CASES = {
    "one-row": Case(1, 24, 9, ALL),
    "one-row-in-tiles": Case(1, 1032, 5, ("bias", "residual", "residual_norm")),
    "two-rows": Case(2, 264, 6, ("norm", "bias", "relu")),
    "eight-rows": Case(8, 520, 3, ALL),
    "only-the-product": Case(3, 16, 5),
    "norm-of-the-residual-in-tiles": Case(2, 8, 260, ("residual", "residual_norm")),
    "residual-as-it-is": Case(1, 8, 4, ("residual", "norm")),
}
ENDS = {
    "all": Case(3, 0, 6, ALL),
    "in-tiles": Case(3, 0, 1030, ALL),
    "bias-and-relu": Case(3, 0, 1030, ("bias", "relu")),
    "residual": Case(2, 0, 6, ("residual",)),
}
TOLERANCES = {"float32": 1e-5, "float16": 1e-3}  # of the largest answer
EPSILON = 0.01


def near(found: np.ndarray, right: np.ndarray) -> bool:
    return bool(np.abs(found - right).max() <= TOLERANCES[str(found.dtype)] * np.abs(right).max())


def check_few_rows(driver: EmulatedDriver | Driver, case: Case, dtype: str) -> None:
    """Compares one launch with the naive product. The means of rows are not 0, so a lost norm is noticed."""
    rows, K, N, parts = case.rows, case.K, case.N, case.parts
    draw = np.random.default_rng(0)

    def numbers(*shape: int, mean: int = 0) -> np.ndarray:
        return (draw.normal(size=shape) + mean).astype(dtype)

    x, matrix = numbers(rows, K, mean=1), (numbers(N, K) / K**0.5).astype(dtype)
    bias = numbers(N) if "bias" in parts else None
    residual = numbers(rows, N, mean=1) if "residual" in parts else None
    norm, second = (
        (numbers(size), numbers(size)) if name in parts else None
        for name, size in (("norm", K), ("residual_norm", N))
    )
    found = shipped(dtype, rows)
    flags = [int(name in parts) for name in ("bias", "residual", "norm", "residual_norm", "relu")]
    inputs = [x, matrix, bias, residual, *(norm or (None, None)), *(second or (None, None))]
    y = np.empty((rows, N), dtype)
    with driver.freed():
        addresses = [0 if array is None else driver.upload(array) for array in inputs]
        addresses.append(driver.empty(y.nbytes))
        grid = (-(-N // found.columns), 1, 1)
        arguments = [*addresses, rows, K, N, *flags, bits_of(EPSILON)]
        driver.launch(driver.load(found.kernel), grid, found.kernel, arguments)  # type: ignore[arg-type]
        driver.download(y, addresses[-1])
    right = naive_product(*(x, matrix, bias, residual, norm, second), relu="relu" in parts, epsilon=EPSILON)
    assert near(y, right)


def check_end(driver: EmulatedDriver | Driver, case: Case, dtype: str) -> None:
    """Compares one launch behind a product with the naive one."""
    rows, N, parts = case.rows, case.N, case.parts
    draw = np.random.default_rng(0)
    product, residual = ((draw.normal(size=(rows, N)) + mean).astype(dtype) for mean in (0, 1))
    bias, weight, added = (draw.normal(size=N).astype(dtype) for _ in range(3))
    flags = [int(name in parts) for name in ("bias", "residual", "norm", "relu")]
    kernel = shipped(dtype, 0).kernel
    y, normed = product.copy(), np.empty_like(product)
    with driver.freed():
        given = {"bias": [bias], "residual": [residual], "norm": [weight, added]}
        addresses = [driver.upload(y)]
        for name, arrays in given.items():
            addresses += [driver.upload(array) if name in parts else 0 for array in arrays]
        addresses.append(driver.empty(y.nbytes) if "norm" in parts else 0)
        arguments = [*addresses, N, *flags, bits_of(EPSILON)]
        driver.launch(driver.load(kernel), (rows, 1, 1), kernel, arguments)  # type: ignore[arg-type]
        driver.download(y, addresses[0])
        if "norm" in parts:
            driver.download(normed, addresses[-1])
    right = naive_product(
        product,
        np.eye(N),
        bias if "bias" in parts else None,
        residual if "residual" in parts else None,
        relu="relu" in parts,
        epsilon=EPSILON,
    )
    assert near(y, right)
    if "norm" in parts:
        assert near(normed, naive_norm(right, (weight, added), EPSILON))


def multiply_at(
    sizes: tuple[int, int, int], arguments: Sequence[int], *, room: Callable[[int], int] | None = None
) -> None:
    """Computes c = a · b as cuBLAS does, over tensors of this process. sizes: m, n and k. room: as in
    `execute_over`.

    Matrices are in columns. A matrix that is turned has the columns and rows of the other shape.
    """
    m, n, k = sizes
    turn_a, turn_b, alpha, a, kind, a_pitch, b, b_pitch, beta, c, c_pitch = arguments
    assert (alpha, beta) == (1, 0)
    dtype = {0: "float32", 2: "float16"}[kind]

    def matrix(address: int, rows: int, columns: int, pitch: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * (pitch * (columns - 1) + rows)
        assert pitch >= rows
        if room and size > room(address):
            raise KernelError(f"a matrix has {size} bytes and room for {room(address)}")
        found = np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype)
        strides = (found.itemsize, found.itemsize * pitch)
        return np.lib.stride_tricks.as_strided(found, (rows, columns), strides, writeable=True)

    left = matrix(a, k, m, a_pitch).T if turn_a else matrix(a, m, k, a_pitch)
    right = matrix(b, n, k, b_pitch).T if turn_b else matrix(b, k, n, b_pitch)
    matrix(c, m, n, c_pitch)[:] = left.astype(np.float32) @ right.astype(np.float32)
