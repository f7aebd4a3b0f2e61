"""What each instruction does: a table from the first part of an opcode to a function over all threads.

The arithmetic is that of the PTX specification, in NumPy. A fused multiply-add rounds once. Tensor cores
multiply exactly and add in float32. 2^x and the logarithm are those of NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.machine import TYPES, UNSIGNED, WARP, WHOLLY_UNDEFINED, KernelError, Machine
from tests.ptx.program import Instruction, Operand

Action = Callable[[Machine, Instruction, np.ndarray], None]
TABLE: dict[str, Action] = {}


def instruction(*names: str) -> Callable[[Action], Action]:
    def add(action: Action) -> Action:
        TABLE.update(dict.fromkeys(names, action))
        return action

    return add


# Arithmetic


def fused(a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    dtype = a.dtype
    if dtype.kind != "f":
        return a * b + c
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # the product is exact
    wide = product + c
    # Rounding twice differs from rounding once only if the first result lies halfway between two numbers of
    # the type. It is then moved towards what was rounded off (of sums that are not subnormal).
    below = 52 - np.finfo(dtype).nmant
    bits = np.asarray(wide).view(np.uint64)
    halfway = bits & np.uint64((1 << below) - 1) == np.uint64(1 << (below - 1))
    if halfway.any():
        part = wide - product
        lost = (product - (wide - part)) + (c - part)
        wide = np.where(halfway & (lost != 0), np.nextafter(wide, np.copysign(np.inf, lost)), wide)
    return wide.astype(dtype)


def divided(a: Any, b: Any) -> Any:
    if a.dtype.kind == "f":
        return a / b
    quotient = np.floor_divide(a, b)  # integers are rounded towards zero
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


def shifted_left(a: Any, by: Any) -> Any:
    width = a.dtype.itemsize * 8
    return np.where(by < width, a << np.minimum(by, width - 1).astype(a.dtype), a.dtype.type(0))


def shifted_right(a: Any, by: Any) -> Any:
    width = a.dtype.itemsize * 8
    shifted = a >> np.minimum(by, width - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(by < width, shifted, a.dtype.type(0))


def bit_field(a: Any, start: Any, length: Any) -> Any:
    width = a.dtype.itemsize * 8
    if ((start + length > width) | (length == 0)).any():
        raise KernelError("a bit field that is not within its number")
    start, length = start.astype(a.dtype), length.astype(a.dtype)
    return (a << (width - length - start).astype(a.dtype)) >> (width - length).astype(a.dtype)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": fused,
    "mad": fused,
    "div": divided,
    "rem": lambda a, b: a - divided(a, b) * b,
    "max": lambda *numbers: functools.reduce(np.fmax, numbers),  # of two or three
    "min": lambda *numbers: functools.reduce(np.fmin, numbers),
    "neg": lambda a: -a,
    "abs": lambda a: np.abs(a),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "shl": shifted_left,
    "shr": shifted_right,
    "bfe": bit_field,
    "ex2": lambda a: np.exp2(a),
    "lg2": lambda a: np.log2(a),
    "rcp": lambda a: 1 / a,
    "sqrt": lambda a: np.sqrt(a),
    "rsqrt": lambda a: 1 / np.sqrt(a),
}
# Modifiers that change nothing here: roundings to nearest, and precisions that may be lower than ours.
PLAIN = {"rn", "approx", "full", "lo", "ftz", "wide"}


@instruction(*ARITHMETIC)
def arithmetic(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    head, *modifiers, kind = ins.opcode
    target, *operands = ins.operands
    undefined = functools.reduce(np.bitwise_or, map(machine.undefined_halves, operands))
    if not kind.endswith("x2"):
        undefined = (undefined != 0) * WHOLLY_UNDEFINED
    kinds = [kind] * len(operands)
    result = kind
    if head in ("shl", "shr", "bfe"):
        kinds[1:] = ["u32"] * len(kinds[1:])
    if modifiers[-1:] == ["f32"]:  # add.f32.f16: a half and a float
        kinds[-1] = result = "f32"
        modifiers.pop()
    if "wide" in modifiers:
        result = f"{kind[0]}{2 * int(kind[1:])}"
        kinds[2:] = [result] * len(kinds[2:])
    if modifiers == ["relu"]:
        least = np.minimum(*(machine.read(operand, kind) for operand in operands))
        assert head == "min"
        machine.write(target, np.maximum(least, np.zeros(1, least.dtype)), active, undefined)
        return
    if modifiers == ["hi"]:
        assert (head, kind) == ("mul", "u32")
        wide = [machine.read(operand, kind).astype(np.uint64) for operand in operands]
        machine.write(target, (wide[0] * wide[1] >> np.uint64(32)).astype(np.uint32), active, undefined)
        return
    if unknown := set(modifiers) - PLAIN:
        raise NotImplementedError(f"the modifiers {unknown}")
    compute = ARITHMETIC[head]
    if kind.endswith("x2"):
        half = kind[:-2]
        values = [_halves(machine.read(operand, _packed(kind)), half) for operand in operands]
        low, high = (compute(*(value[n] for value in values)) for n in (0, 1))
        machine.write(target, _joined(low, high), active, undefined)
        return
    values = [machine.read(operand, of) for operand, of in zip(operands, kinds, strict=True)]
    if result != kind:
        values = [value.astype(TYPES[result]) for value in values]
    if "ftz" in modifiers:
        values = [_flushed(value) for value in values]
    answer = np.asarray(compute(*values))
    machine.write(target, _flushed(answer) if "ftz" in modifiers else answer, active, undefined)


def _flushed(value: np.ndarray) -> np.ndarray:
    """Zero in the place of subnormal numbers."""
    return np.where(
        np.abs(value) < np.finfo(value.dtype).smallest_normal, np.copysign(0, value), value
    ).astype(value.dtype)


def _packed(kind: str) -> str:
    """The type of a register that holds two numbers, such as f16x2."""
    return f"b{2 * 8 * TYPES[kind[:-2]].itemsize}"


def _halves(value: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper half of each number."""
    dtype = UNSIGNED[value.dtype.itemsize // 2]
    high = value >> value.dtype.type(8 * dtype.itemsize)
    return value.astype(dtype).view(TYPES[kind]), high.astype(dtype).view(TYPES[kind])


def _joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The reverse of `_halves`."""
    size = low.dtype.itemsize
    wide = UNSIGNED[2 * size]
    low, high = (half.view(UNSIGNED[size]).astype(wide) for half in (low, high))
    return low | high << wide.type(8 * size)


@instruction("mov")
def move(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    (target, source), kind = ins.operands, ins.opcode[-1]
    half = f"b{TYPES[kind].itemsize * 4}"
    if isinstance(target, tuple):
        values = _halves(machine.read(source, kind), half)
        undefined = machine.undefined_halves(source)
        for n, (register, value) in enumerate(zip(target, values, strict=True)):
            machine.write(register, value, active, (undefined >> n & 1) * WHOLLY_UNDEFINED)
    elif isinstance(source, tuple):
        low, high = ((machine.undefined_halves(one) != 0).astype(np.uint8) for one in source)
        joined = _joined(*(machine.read(one, half) for one in source))
        machine.write(target, joined, active, low | high << 1)
    else:
        machine.write(target, machine.read(source, kind), active, machine.undefined_halves(source))


TF32 = np.uint32(0xFFFF_E000)  # the bits of a float that a tensor core reads as a tf32


@instruction("cvt")
def convert(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    to, kind = ins.opcode[-2:]
    target, *sources = ins.operands
    values = [machine.read(source, kind) for source in sources]
    if ins.opcode[1:] == ("rna", "tf32", "f32"):  # to 11 bits; halfway between two numbers away from zero
        bits = machine.read(sources[0], "b32") + np.uint32(1 << 12)
        machine.write(target, bits & TF32, active, machine.undefined_halves(sources[0]))
        return
    if set(ins.opcode[1:-2]) - {"rn"}:
        raise NotImplementedError("another rounding than to nearest")
    if to == "f16x2":  # the first operand becomes the upper half
        machine.write(target, _joined(*(value.astype(np.float16) for value in values[::-1])), active)
        return
    if values[0].dtype.kind == "f" and TYPES[to].kind != "f":
        raise NotImplementedError("a float that becomes an integer")
    machine.write(target, values[0].astype(TYPES[to]), active)


@instruction("prmt")
def permute_bytes(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    assert ins.opcode == ("prmt", "b32")
    target, low, high, chosen = ins.operands
    bytes_of = _joined(machine.read(low, "b32"), machine.read(high, "b32"))
    chosen = int(chosen.rstrip("U"), 0)  # type: ignore[union-attr]
    result = np.zeros((1, 1), np.uint32)
    for n in range(4):
        at = chosen >> 4 * n & 15
        assert at < 8, "a byte's sign"
        byte = bytes_of >> np.uint64(8 * at) & np.uint64(0xFF)
        result = result | byte.astype(np.uint32) << np.uint32(8 * n)
    machine.write(target, result, active)


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


@instruction("setp")
def compare(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    _, name, *modifiers, kind = ins.opcode
    assert not modifiers
    target, *operands = ins.operands
    a, b = (machine.read(operand, kind) for operand in operands)
    unordered = (np.isnan(a) | np.isnan(b)) if a.dtype.kind == "f" else False
    if name in ("num", "nan"):
        machine.write(target, unordered if name == "nan" else ~unordered, active)
    elif name in COMPARISONS:
        machine.write(target, COMPARISONS[name](a, b) & ~np.asarray(unordered), active)
    else:  # such as ltu, which holds for NaN
        machine.write(target, COMPARISONS[name[:-1]](a, b) | unordered, active)


@instruction("selp")
def select(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    target, a, b, condition = ins.operands
    kind = ins.opcode[-1]
    chosen = np.where(machine.read(condition, "pred"), machine.read(a, kind), machine.read(b, kind))
    machine.write(target, chosen, active)


# Memory


def _several(operand: Operand) -> tuple[str, ...]:
    assert isinstance(operand, str | tuple)
    return operand if isinstance(operand, tuple) else (operand,)


@instruction("ld")
def load(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    space, kind = ins.opcode[1], ins.opcode[-1]
    targets = _several(ins.operands[0])
    if space == "param":
        value = np.array([[machine.arguments[ins.operands[1].base]]], UNSIGNED[TYPES[kind].itemsize])  # type: ignore[union-attr]
        machine.write(targets[0], _widened(value, kind, targets[0]), active)
        return
    lanes = np.flatnonzero(active)
    wide = space == "global"
    addresses = machine.addresses(ins.operands[1], lanes, wide=wide)
    values = machine.load(machine.memory if wide else machine.shared, lanes, addresses, kind, len(targets))
    for n, target in enumerate(targets):
        machine.write_lanes(target, _widened(values[:, n], kind, target), lanes)


def _widened(value: np.ndarray, kind: str, register: str) -> np.ndarray:
    """A value of this type as it is in a register that may have more bits."""
    value = value.view(TYPES[kind])
    if register == "_":  # not kept
        return value
    size = {"%rd": 8, "%r": 4, "%rs": 2}[register.rstrip("0123456789")]
    sign = "i" if kind[0] == "s" else "u"
    return value if value.dtype.itemsize == size else value.astype(f"{sign}{size}")


@instruction("st")
def store(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    kind, wide = ins.opcode[-1], ins.opcode[1] == "global"
    lanes = np.flatnonzero(active)
    addresses = machine.addresses(ins.operands[0], lanes, wide=wide)
    held = "b16" if kind == "b8" else kind  # a register has at least 16 bits
    columns = [machine.full(source, held).reshape(-1)[lanes] for source in _several(ins.operands[1])]
    data = np.stack(columns, axis=1).astype(UNSIGNED[TYPES[kind].itemsize], copy=False)
    machine.store(machine.memory if wide else machine.shared, lanes, addresses, data)


@instruction("atom")
def add_atomically(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    """Threads add in the order of their numbers; each gets what was there before."""
    assert ".".join(ins.opcode) == "atom.global.gpu.acq_rel.add.u32"
    target, at, source = ins.operands
    lanes = np.flatnonzero(active)
    addresses = machine.addresses(at, lanes, wide=True)
    added = machine.full(source, "u32").reshape(-1)[lanes]
    found = np.empty(len(lanes), np.uint32)
    for n in range(len(lanes)):
        found[n] = machine.load(machine.memory, lanes[[n]], addresses[[n]], "u32", 1)[0, 0]
        machine.store(machine.memory, lanes[[n]], addresses[[n]], (found[[n]] + added[[n]])[:, None])
    machine.write_lanes(target, found, lanes)


@instruction("cp")
def copy(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    what = ins.opcode[2]
    if what == "commit_group":
        machine.committed_copies += active.reshape(-1)
    elif what == "wait_group":
        machine.wait_for_copies(active, int(ins.operands[0]))  # type: ignore[arg-type]
    else:
        target, source, size, *filled = ins.operands
        lanes = np.flatnonzero(active)
        machine.copy_later(
            lanes,
            machine.addresses(source, lanes, wide=True),
            machine.addresses(target, lanes, wide=False),
            int(size, 0),  # type: ignore[call-overload]
            machine.full((filled or [size])[0], "u32").reshape(-1)[lanes],
        )


@instruction("bar")
def barrier(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    of_warp = ins.opcode[1] == "warp"
    assert ins.operands == ("-1" if of_warp else "0",), "a barrier for some threads"
    threads = WARP if of_warp else machine.shape[1]
    machine.expect_whole(active, threads)
    machine.order.meet(active, threads)


@instruction("fence")
def fence(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    assert ".".join(ins.opcode) == "fence.proxy.async.shared::cta"
    machine.fenced_memory[active.reshape(-1)] = machine.order.now


# What a warp does together. Lane 4 g + c of a warp holds row g, and columns 2 c and 2 c + 1, of a matrix of 8
# rows and 8 columns.
LANE = np.arange(WARP)
GROUP, IN_GROUP = LANE // 4, LANE % 4


@instruction("shfl")
def shuffle(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    machine.expect_whole(active, WARP)
    target, source, by, clamp, _ = ins.operands
    value, by, clamp = (machine.full(x, "u32").reshape(-1, WARP) for x in (source, by, clamp))
    segment, last = clamp >> 8 & 31, clamp & 31
    by = by & 31
    start = LANE & segment
    end = start | last & ~segment
    sender = {
        "bfly": lambda: LANE ^ by,
        "idx": lambda: start | by & ~segment,
        "up": lambda: LANE - by.astype(np.int64),
        "down": lambda: LANE + by,
    }[ins.opcode[2]]().astype(np.int64)
    sender = np.where(sender >= end if ins.opcode[2] == "up" else sender <= end, sender, LANE)
    machine.write(target, np.take_along_axis(value, sender, axis=1).reshape(machine.shape), active)


@instruction("redux")
def reduce(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    machine.expect_whole(active, WARP)
    *modifiers, kind = ins.opcode[2:]
    assert modifiers == ["max"], "another reduction than the maximum"
    value = machine.full(ins.operands[1], kind).reshape(-1, WARP)
    most = np.fmax.reduce(value, axis=1, keepdims=True)
    machine.write(ins.operands[0], np.broadcast_to(most, value.shape).reshape(machine.shape), active)


def _whole(machine: Machine, active: np.ndarray, threads: int) -> np.ndarray:
    """The numbers of the active warps, or groups of this many threads; KernelError if one is not whole."""
    machine.expect_whole(active, threads)
    return np.flatnonzero(active.reshape(-1, threads).any(axis=1))


def _rows(warps: np.ndarray, count: int) -> np.ndarray:
    """The lanes of these warps that name the rows of `count` matrices of 8 × 8 halves."""
    return (warps[:, None] * WARP + np.arange(8 * count)).reshape(-1)


def _transposed(words: np.ndarray) -> np.ndarray:
    """Matrices of 8 × 8 halves, in rows of four words, turned over."""
    return np.ascontiguousarray(words.view(np.uint16).swapaxes(2, 3)).view(np.uint32)


@instruction("ldmatrix")
def load_matrix(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    assert ins.opcode[3] == "m8n8"
    targets = _several(ins.operands[0])
    warps = _whole(machine, active, WARP)
    lanes = _rows(warps, len(targets))
    addresses = machine.addresses(ins.operands[1], lanes, wide=False)
    words = machine.load(machine.shared, lanes, addresses, "b32", 4).reshape(-1, len(targets), 8, 4)
    if "trans" in ins.opcode:
        words = _transposed(words)
    for n, target in enumerate(targets):
        machine.write_lanes(target, words[:, n].reshape(-1), np.flatnonzero(active))


@instruction("stmatrix")
def store_matrix(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    assert ins.opcode[3] == "m8n8"
    sources = _several(ins.operands[1])
    warps = _whole(machine, active, WARP)
    words = np.stack([machine.full(source, "b32").reshape(-1, 8, 4)[warps] for source in sources], axis=1)
    if "trans" in ins.opcode:
        words = _transposed(words)
    lanes = _rows(warps, len(sources))
    addresses = machine.addresses(ins.operands[0], lanes, wide=False)
    machine.store(machine.shared, lanes, addresses, words.reshape(-1, 4))


def _eight_rows(machine: Machine, register: str) -> np.ndarray:
    """The matrix [warps, 8, 8] of halves in one register of each lane, as floats."""
    words = np.ascontiguousarray(machine.full(register, "b32"))
    return words.view(np.float16).reshape(-1, 8, 8).astype(np.float32)


def _eight_rows_of_tf32(machine: Machine, register: str) -> np.ndarray:
    """The matrix [warps, 8, 4] in one register of each lane."""
    words = np.ascontiguousarray(machine.full(register, "b32") & TF32)
    return words.view(np.float32).reshape(-1, 8, 4)


def _left_matrix(
    machine: Machine,
    registers: tuple[str, ...],
    eight_rows: Callable[[Machine, str], np.ndarray] = _eight_rows,
) -> np.ndarray:
    """The matrix whose quarters are in four registers: upper left, lower left, and right. It has 16 rows, and
    16 columns of halves.
    """
    quarters = [eight_rows(machine, register) for register in registers]
    return np.concatenate(
        [np.concatenate(quarters[:2], axis=1), np.concatenate(quarters[2:], axis=1)], axis=2
    )


def _accumulate(
    machine: Machine,
    targets: tuple[str, ...],
    sources: tuple[str, ...],
    product: np.ndarray,
    active: np.ndarray,
) -> None:
    """Adds a product [warps, 16, columns] to registers of floats, in four for every eight columns."""
    for n, (target, source) in enumerate(zip(targets, sources, strict=True)):
        part = product[:, GROUP + 8 * (n >> 1 & 1), 8 * (n // 4) + 2 * IN_GROUP + (n & 1)]
        machine.write(target, machine.full(source, "f32") + part.reshape(machine.shape), active)


@instruction("mma")
def multiply_matrices(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    eight_rows = {
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": _eight_rows,
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": _eight_rows_of_tf32,
    }[".".join(ins.opcode)]
    machine.expect_whole(active, WARP)
    targets, left, right, sources = map(_several, ins.operands)
    # A column of the right matrix is in the lanes of one group, as a row of the left one is.
    columns = np.concatenate([eight_rows(machine, register) for register in right], axis=2)
    product = _left_matrix(machine, left, eight_rows) @ columns.swapaxes(1, 2)
    _accumulate(machine, targets, sources, product, active)


@instruction("wgmma")
def multiply_by_warp_groups(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    """Products by four warps each, and what orders them. The left matrix [64, 16] is in registers or in
    shared memory, the right one [16, columns] in shared memory.
    """
    match ins.opcode[1]:
        case "fence":
            for threads in machine.unfenced.values():
                threads &= ~active
        case "commit_group":
            machine.committed_products += active.reshape(-1)
        case "wait_group":
            machine.wait_for_products(active, int(ins.operands[0]))  # type: ignore[arg-type]
        case "mma_async":
            _start_product(machine, ins, active)
        case other:
            raise NotImplementedError(other)


def _start_product(machine: Machine, ins: Instruction, active: np.ndarray) -> None:
    assert ins.opcode[5:] == ("f32", "f16", "f16")
    assert ins.operands[4:6] == ("1", "1"), "a factor other than 1"
    targets, left, right, keep, _, _, *transposed = ins.operands
    columns = int(ins.opcode[4].removeprefix("m64n").removesuffix("k16"))
    groups = _whole(machine, active, 4 * WARP)
    everyone = machine.everyone.size // (4 * WARP)
    right_matrix = np.zeros((everyone, 1, columns, 16), np.float32)
    right_matrix[groups, 0], places = _described(machine, right, groups, columns, transposed[-1] == "1")
    if isinstance(left, tuple):
        left_matrix = _left_matrix(machine, left).reshape(everyone, 4, 16, 16)
    else:
        left_matrix = np.zeros((everyone, 4, 16, 16), np.float32)
        numbers, more = _described(machine, left, groups, 64, transposed[0] == "1")
        left_matrix[groups] = numbers.reshape(-1, 4, 16, 16)
        places = np.concatenate([places, more])
    machine.multiply_later(ins, np.flatnonzero(active), places)
    product = left_matrix @ right_matrix.swapaxes(2, 3)
    if machine.read(keep, "pred").any():
        machine.expect_defined(ins.writes, active)
    else:
        zero = np.zeros((1, 1), np.float32)
        for target in _several(targets):
            machine.write(target, zero, active)
    _accumulate(machine, _several(targets), _several(targets), product.reshape(-1, 16, columns), active)


SWIZZLES = {1: 128, 2: 64, 3: 32}  # bytes of a row, by the number in a matrix descriptor


def _described(
    machine: Machine, descriptor: Operand, groups: np.ndarray, count: int, transposed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """A matrix [groups, count, 16] of halves in shared memory, whose last axis is summed, and its places."""
    described = machine.full(descriptor, "u64").reshape(-1, 4 * WARP)[groups, :1]

    def field(start: int) -> np.ndarray:
        """Sixteens of bytes, from this bit on."""
        return (described >> np.uint64(start) & np.uint64(0x3FFF)).astype(np.int64)[:, :, None] * 16

    width = SWIZZLES[int(described[0, 0] >> np.uint64(62))]
    n, k = np.arange(count)[:, None], np.arange(16)[None]
    # Rows are of n, with the k side by side, or the other way round. Eight rows follow each other; `stride`
    # leads to the next eight, and `leading` to more than a row holds.
    row, column = (k, n) if transposed else (n, k)
    leading, stride = field(16), field(32)
    of_row = width // 2
    addresses = field(0) + row // 8 * stride + row % 8 * width
    addresses = addresses + column // of_row * leading + column % of_row * 2
    # A swizzle exchanges sixteens of bytes by the number of the row.
    addresses ^= (addresses >> 7 & (width // 16 - 1)) << 4
    lanes = np.repeat(groups * 4 * WARP, 16 * count)
    halves = machine.load(machine.shared, lanes, addresses.reshape(-1), "b16", 1).view(np.float16)
    places = machine.shared.places(addresses.reshape(-1), 2, machine.block_of[lanes])
    return halves.reshape(-1, count, 16), places
