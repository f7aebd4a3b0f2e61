"""The node for `cuda` on the CPU: a stream's inputs and naive answers, and its kernel on the emulator.

The kernels are those that the package carries (`kernels.hpp`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.ptx.driver import EmulatedDriver
from tests.ptx.launch import execute_over
from xl_export.tensorrt.kernels.compile import Kernel
from xl_export.tensorrt.kernels.driver import Driver
from xl_export.tensorrt.kernels.ready import RING_FILE
from xl_export.tensorrt.naive import naive_relative_attention
from xl_export.tensorrt.operator import Attributes

# The parameters of both kernels, in order.
POINTERS = (
    *("queries", "context", "ring_keys", "ring_values", "positions", "table", "bias", "content_bias"),
    *("position_bias", "own_keys", "own_values", "initial_key", "initial_value", "answers"),
    *("mixed_out", "level", "counters"),
)
NUMBERS = (
    *("H", "K", "S", "M", "R", "BIAS_R", "N", "query_pitch", "query_at", "context_pitch", "key_at"),
    *("value_at", "full_mask", "nearest", "masked", "T"),
)
WRITTEN = ("ring_keys", "ring_values", "answers", "mixed_out", "level", "counters")


Types = tuple[str, str]  # of a node's tensors, and of its ring and table


@functools.cache
def all_shipped() -> list[tuple[int, Types, Kernel]]:
    """The kernels of the package, each with the width of its widest heads and its types."""
    entries = re.findall(r'^ +\{"(\w+)", ((?:\d+, ){10})(".*")\},$', RING_FILE.read_text(), re.M)
    found = []
    for name, numbers, ptx in entries:
        widest, *halves, _, _, block_t, _, _, threads, shared_bytes = map(int, re.findall(r"\d+", numbers))
        own, ring = ("float16" if half else "float32" for half in halves)
        sizes = {"threads": threads, "shared_bytes": shared_bytes, "block_t": block_t}
        found.append((widest, (own, ring), Kernel(name=name, ptx=json.loads(ptx), **sizes)))
    return found


def shipped(head_dim: int, types: Types, name: str = "ring_attention") -> Kernel:
    """The kernel of this name in the package for heads of this width, and for these types."""
    return next(
        kernel
        for widest, own, kernel in all_shipped()
        if head_dim <= widest and own == types and kernel.name == name
    )


def shipped_as(ptx: str) -> tuple[Types, Kernel]:
    """The types of a kernel of the package, and the kernel."""
    return next((types, kernel) for _, types, kernel in all_shipped() if kernel.ptx == ptx)


@dataclass(kw_only=True)
class NaiveRing:
    """Rows of streams through one node, whose constants and steps are random. Slots of the ring that no token
    has been written to are NaN.

    The table and the biases have different numbers of rows, and queries and context different pitches, so no
    size can be taken for another.
    """

    first: list[int]  # the position of each row's next token
    H: int = 2
    K: int = 16
    M: int = 20
    BIAS_R: int = 3
    spare: int = 3  # slots of the ring besides the memory
    N: int = 0
    full: int = 0
    nearest: int = 0
    gap: int = 4  # columns that belong to nothing, before each part of a tensor
    tails: tuple[int, int] = (0, 0)  # and behind the last part, of queries and context
    packed: bool = False  # whether queries, keys and values are columns of one tensor
    initial: bool = False  # whether every token before a text has a key and a value
    types: Types = ("float32", "float32")
    constants: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(0)
        H, K, N, R = self.H, self.K, self.N, self.R
        self.constants = {
            "table": self.random(H, R, K).astype(self.types[1]),
            "bias": self.random(H, 1, self.BIAS_R),
            "content_bias": self.random(H, 1, K) / 4,
            "position_bias": self.random(H, 1, K) / 4,
            "own_keys": self.random(H, N, K),
            "own_values": self.random(H, N, K),
            "initial_key": self.random(H * self.initial, 1, K),
            "initial_value": self.random(H * self.initial, 1, K),
        }
        shape = len(self.first), H, self.S, K
        self.keys, self.values = (np.full(shape, np.nan, self.types[1]) for _ in range(2))
        for b, first in enumerate(self.first):
            remembered = np.arange(max(0, first - self.M), first) % self.S
            for ring in (self.keys, self.values):
                ring[b, :, remembered] = self.random(len(remembered), H, K)

    @property
    def S(self) -> int:  # noqa: N802 (a size by its letter)
        return self.M + self.spare

    @property
    def R(self) -> int:  # noqa: N802
        return self.M + 1

    def random(self, *shape: int) -> np.ndarray:
        return self.draw.normal(size=shape).astype(self.types[0])

    def segment(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Queries of new tokens, and their context: keys and values. Both are [B, T, ..]."""
        size, width = (len(self.first), length), self.H * self.K
        if self.packed:
            query = context = self.random(*size, 3 * width)
        else:
            query = self.random(*size, width + self.gap + self.tails[0])
            context = self.random(*size, 2 * width + 3 * self.gap + self.tails[1])
        at = self.attributes["query_at"]
        query[:, :, at : at + width] /= self.K**0.5
        return query, context

    def positions(self, length: int) -> np.ndarray:
        """Of the next tokens, int64 [B, T]."""
        return np.array(self.first)[:, None] + np.arange(length)

    @property
    def attributes(self) -> dict[str, int]:
        """Of the node."""
        width = self.H * self.K
        sizes = {"heads": self.H, "head_dim": self.K, "mem_len": self.M}
        rule = {"nearest": self.nearest, "full": self.full}
        query, key, value = self.gap, width + 2 * self.gap, self.gap
        if self.packed:
            query, key, value = 0, width, 2 * width
        return sizes | rule | {"query_at": query, "key_at": key, "value_at": value}

    def answer(self, query: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Writes the next tokens into the ring and returns their answers [B, T, H·K]."""
        length = query.shape[1]
        constants: dict[str, Any] = {name: x if x.size else None for name, x in self.constants.items()}
        answer, self.keys, self.values = naive_node(
            *(query, context, self.keys, self.values),
            **constants,
            positions=self.positions(length),
            **self.attributes,
        )
        self.first = [position + length for position in self.first]
        return answer


def naive_node(
    query: np.ndarray,
    context: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    table: np.ndarray,
    positions: np.ndarray,
    content_bias: np.ndarray,
    position_bias: np.ndarray,
    bias: np.ndarray,
    own_keys: np.ndarray | None = None,
    own_values: np.ndarray | None = None,
    initial_key: np.ndarray | None = None,
    initial_value: np.ndarray | None = None,
    *,
    heads: int,
    head_dim: int,
    mem_len: int,
    nearest: int,
    full: int,
    query_at: int,
    key_at: int,
    value_at: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The outputs of the node, whose contract is in `operator.hpp`: answers in float64, keys and values."""
    B, T, _ = query.shape
    S = keys.shape[2]

    def by_head(packed: np.ndarray, at: int) -> np.ndarray:
        part = packed[:, :, at : at + heads * head_dim]
        return part.reshape(B, T, heads, head_dim).swapaxes(1, 2)

    rings = [keys.copy(), values.copy()]
    for ring, at in zip(rings, (key_at, value_at), strict=True):
        for b in range(B):
            ring[b][:, positions[b] % S] = by_head(context, at)[b]
    seen = [np.nan_to_num(ring) for ring in rings]
    for ring, initial in zip(seen, (initial_key, initial_value), strict=True):
        for b in range(B) if initial is not None else ():
            first, last = positions[b, [0, -1]]
            ring[b][:, np.arange(first - mem_len, min(0, last + 1)) % S] = initial
    nothing = np.zeros((heads, 1, head_dim))
    persistent = 0 if own_keys is None else own_keys.shape[1]
    rule = Attributes(
        full_mask=full, nearest=nearest, initial_masked=int(initial_key is None), persistent=persistent
    )
    answer = naive_relative_attention(
        by_head(query, query_at),
        *seen,
        positions[:, 0],
        content_bias,
        position_bias,
        table,
        bias[:, 0],
        nothing if own_keys is None else own_keys,
        nothing if own_values is None else own_values,
        positions[:, 0] % S,
        attributes=rule,
        mem_len=mem_len,
    )
    return answer.swapaxes(1, 2).reshape(B, T, -1), rings[0], rings[1]


def execute_at(
    kernel: Kernel,
    grid: tuple[int, int, int],
    arguments: Sequence[int],
    *,
    types: Types,
    room: Callable[[int], int] | None = None,
) -> None:
    """Executes a launch over tensors of this process. arguments: addresses and numbers, in order. room: how
    many bytes there are from an address on; every tensor must have its size there.
    """
    addresses = dict(zip(POINTERS, arguments, strict=False))
    numbers = dict(zip(NUMBERS, arguments[len(POINTERS) :], strict=True))
    H, K, N = numbers["H"], numbers["K"], numbers["N"]
    B, T = grid[0] // H, numbers["T"]
    programs = grid[0] * grid[1] * grid[2] if grid[2] > 1 else 0  # that leave an answer of their part
    item, ring_item = (np.dtype(dtype).itemsize for dtype in types)
    ring = B * H * numbers["S"] * K * ring_item
    sizes = {
        "queries": item * B * T * numbers["query_pitch"],
        "context": item * B * T * numbers["context_pitch"],
        "ring_keys": ring,
        "ring_values": ring,
        "positions": 8 * B * T,
        "table": ring_item * H * numbers["R"] * K,
        "bias": item * H * numbers["BIAS_R"],
        "content_bias": item * H * K,
        "position_bias": item * H * K,
        "own_keys": item * H * N * K,
        "own_values": item * H * N * K,
        "initial_key": item * H * K * (1 - numbers["masked"]),
        "initial_value": item * H * K * (1 - numbers["masked"]),
        "answers": item * B * T * H * K,
        "mixed_out": 4 * programs * kernel.block_t * K,
        "level": 4 * programs * kernel.block_t,
        "counters": 4 * programs // grid[2],
    }
    execute_over(
        kernel,
        grid,
        addresses,
        sizes,
        list(numbers.values()),
        written=("ring_keys", "ring_values", "answers", "counters"),
        undefined=("answers", "mixed_out", "level"),
        room=room,
    )


def apart(answer: np.ndarray, right: np.ndarray) -> float:
    """How far answers are from naive ones, beyond the rounding to their type."""
    rounding = np.abs(right) * np.finfo(answer.dtype).eps / 2
    return float((np.abs(answer.astype(np.float64) - right) - rounding).max())


def tolerance(types: Types, kernel: str = "ring_attention") -> float:
    """The most that `apart` may be. Tensor cores multiply queries, and weights of values, in halves."""
    return 3e-3 if kernel == "ring_segment_attention" and types[0] == "float16" else 1e-5


def check(
    driver: EmulatedDriver | Driver, ring: NaiveRing, kernel: Kernel, lengths: Sequence[int], parts: int
) -> None:
    """Compares the answers and the ring after each segment with the naive ones. parts: of the keys."""
    for length in lengths:
        segment = ring.segment(length)
        answer, *written = _launch(driver, ring, kernel, segment, parts)
        assert apart(answer, ring.answer(*segment)) <= tolerance(ring.types, kernel.name)
        for found, right in zip(written, (ring.keys, ring.values), strict=True):
            np.testing.assert_array_equal(found, right)


def _launch(
    driver: EmulatedDriver | Driver,
    ring: NaiveRing,
    kernel: Kernel,
    segment: tuple[np.ndarray, np.ndarray],
    parts: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The answers and the ring after one launch, which leaves all counters at zero."""
    query, context = segment
    B, T, _ = query.shape
    tiles = -(-T // kernel.block_t)
    partial = B * ring.H * tiles * parts * kernel.block_t
    counters = np.zeros(B * ring.H * tiles, np.int32)
    inputs = [query, context, ring.keys, ring.values, ring.positions(T), *ring.constants.values()]
    own = ring.attributes
    sizes = (ring.H, ring.K, ring.S, ring.M, ring.R, ring.BIAS_R, ring.N)
    columns = (query.shape[2], own["query_at"], context.shape[2], own["key_at"], own["value_at"])
    numbers = (*sizes, *columns, ring.full, ring.nearest, int(not ring.initial), T)
    results = np.empty((B, T, ring.H * ring.K), ring.types[0]), ring.keys.copy(), ring.values.copy()
    with driver.freed():
        addresses = [driver.upload(array) if array.size else 0 for array in inputs]
        answers = driver.empty(results[0].nbytes)
        addresses += [answers, driver.empty(4 * partial * ring.K), driver.empty(4 * partial)]
        addresses.append(driver.upload(counters))
        grid = B * ring.H, tiles, parts
        driver.launch(driver.load(kernel), grid, kernel, [*addresses, *numbers])
        for array, address in zip(results, (answers, *addresses[2:4]), strict=True):
            driver.download(array, address)
        driver.download(counters, addresses[-1])
    assert not counters.any()
    return results
