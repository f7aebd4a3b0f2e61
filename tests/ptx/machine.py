"""The state of a launch and how it advances: registers, memory, and which threads are where.

All threads of a launch run together, one instruction at a time, as arrays [blocks, threads]. Threads that a
branch separates wait for each other: the instruction that runs next is the earliest at which any thread is,
and only the threads that are there execute it. So threads of a loop catch up with those that left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.ptx.program import Address, Instruction, Operand, Program

POISON = 0xFF  # of every byte that was never written; four of them are NaN
TYPES: dict[str, Any] = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    **{f"{kind}{bits}": f"u{bits // 8}" for kind in ("b", "u") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
}
TYPES = {name: np.dtype(kind) for name, kind in TYPES.items()}
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class KernelError(AssertionError):
    """What a GPU would answer with an error or with undefined numbers."""


class GlobalMemory:
    """Tensors at addresses, with gaps between them that must not be accessed."""

    BASE, GAP = 0x7000_0000_0000, 4096

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self.allocated = np.empty(0, np.bool_)

    def allocate(self, size: int) -> int:
        """The address of new memory, aligned to 256 bytes."""
        start = len(self.bytes)
        more = -(-(size + self.GAP) // 256) * 256
        self.bytes = np.concatenate([self.bytes, np.full(more, POISON, np.uint8)])
        self.allocated = np.concatenate([self.allocated, np.arange(more) < size])
        return self.BASE + start

    def at(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address, as a view."""
        start = address - self.BASE
        assert self.allocated[start : start + size].all()
        return self.bytes[start : start + size]

    def places(self, addresses: np.ndarray, size: int, blocks: np.ndarray) -> np.ndarray:
        """Where in `bytes` these accesses of `size` bytes are."""
        places = addresses.astype(np.int64) - self.BASE
        if (places < 0).any() or (places + size > len(self.bytes)).any():
            raise KernelError("an access outside of global memory")
        if not (self.allocated[places] & self.allocated[places + size - 1]).all():
            raise KernelError("an access outside of a tensor")
        return places


class SharedMemory:
    """The shared memory of each block, one after the other."""

    def __init__(self, blocks: int, size: int) -> None:
        self.size = -(-max(size, 1) // 16) * 16
        self.limit = size
        self.bytes = np.full(blocks * self.size, POISON, np.uint8)

    def places(self, addresses: np.ndarray, size: int, blocks: np.ndarray) -> np.ndarray:
        places = addresses.astype(np.int64)
        if (places < 0).any() or (places + size > self.limit).any():
            raise KernelError(f"an access outside of the {self.limit} bytes of shared memory")
        return places + blocks * self.size


class Machine:
    """One launch of a kernel. arguments: addresses and integers in the order of its parameters.

    A register holds an array that broadcasts to [blocks, threads]: of unsigned integers, or booleans for a
    predicate.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence[int],
        *,
        blocks: Sequence[tuple[int, int, int]],
        grid: tuple[int, int, int],
        shared_bytes: int,
        memory: GlobalMemory,
    ) -> None:
        self.program, self.memory = program, memory
        self.shape = len(blocks), program.threads
        self.shared = SharedMemory(len(blocks), shared_bytes)
        self.everyone = np.ones(self.shape, np.bool_)
        self.ended = np.zeros(self.shape, np.bool_)
        self.arguments = dict(zip(program.parameters, arguments, strict=True))
        self.block_of = np.repeat(np.arange(len(blocks)), program.threads)
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": np.arange(program.threads, dtype=np.uint32)[None],
            "%laneid": (np.arange(program.threads, dtype=np.uint32) % 32)[None],
            "%ntid.x": np.array([[program.threads]], np.uint32),
            # Addresses of shared memory begin here.
            "global_smem": np.zeros((1, 1), np.uint32),
        }
        for axis, name in enumerate("xyz"):
            of_axis = np.array([block[axis] for block in blocks], np.uint32)[:, None]
            self.registers[f"%ctaid.{name}"] = of_axis
            self.registers[f"%nctaid.{name}"] = np.array([[grid[axis]]], np.uint32)
        # Asynchronous copies that have not been waited for: (lanes, places, data, number of their group). A
        # thread's copies belong to the group that it commits next.
        self.copies: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.committed = np.zeros(self.shape[0] * self.shape[1], np.int64)

    # Operands

    def read(self, operand: Operand, kind: str) -> np.ndarray:
        """The operand's value for every thread, of a type such as f32; it broadcasts to [blocks, threads]."""
        assert isinstance(operand, str)
        dtype = TYPES[kind]
        if operand in self.registers:
            value = self.registers[operand]
            return value if value.dtype == dtype else value.view(dtype)
        if operand[0] == "%":
            # The compiler packs an undefined half with a number, and uses only the number: poison for now.
            if not operand[-1].isdigit():
                raise NotImplementedError(f"the register {operand}")
            return self.held(operand, dtype)
        number = int(operand[2:], 16) if operand.startswith(("0f", "0F", "0d")) else int(operand, 0)
        if dtype == np.bool_:
            return np.array([[number != 0]])
        bits = number & ((1 << 8 * dtype.itemsize) - 1)
        return np.array([[bits]], UNSIGNED[dtype.itemsize]).view(dtype)

    def full(self, operand: Operand, kind: str) -> np.ndarray:
        """The same as `read`, with a number for every thread: [blocks, threads]."""
        return np.broadcast_to(self.read(operand, kind), self.shape)

    def write(self, register: Operand, value: np.ndarray, active: np.ndarray) -> None:
        """Sets a register of the active threads."""
        assert isinstance(register, str)
        if register == "_":
            return
        if value.dtype != np.bool_:
            value = value.view(UNSIGNED[value.dtype.itemsize])
        if active is not self.everyone:
            value = np.where(active, value, self.held(register, value.dtype))
        self.registers[register] = value

    def write_lanes(self, register: Operand, value: np.ndarray, lanes: np.ndarray) -> None:
        """Sets a register of these lanes, which are numbers of threads of all blocks."""
        assert isinstance(register, str)
        if len(lanes) < self.everyone.size:
            whole = np.array(np.broadcast_to(self.held(register, value.dtype), self.shape))
            whole.reshape(-1)[lanes] = value
            value = whole
        if register != "_":
            self.registers[register] = value.reshape(self.shape)

    def held(self, register: str, dtype: np.dtype) -> np.ndarray:
        """What a register holds; poison if that is nothing yet."""
        poison = np.full((1, dtype.itemsize), POISON, np.uint8)
        return self.registers.get(register, poison.astype(dtype) if dtype == np.bool_ else poison.view(dtype))

    # Memory

    def addresses(self, operand: Operand, lanes: np.ndarray, *, wide: bool) -> np.ndarray:
        """The addresses of these lanes."""
        assert isinstance(operand, Address)
        base = self.full(operand.base, "s64" if wide else "u32").reshape(-1)[lanes]
        return base.astype(np.int64) + operand.offset

    def load(
        self,
        where: GlobalMemory | SharedMemory,
        lanes: np.ndarray,
        addresses: np.ndarray,
        kind: str,
        count: int,
    ) -> np.ndarray:
        """`count` numbers at each address, [lanes, count]."""
        dtype = UNSIGNED[TYPES[kind].itemsize]
        places = self._places(where, lanes, addresses, dtype.itemsize * count)
        return where.bytes.view(dtype)[(places // dtype.itemsize)[:, None] + np.arange(count)]

    def store(
        self, where: GlobalMemory | SharedMemory, lanes: np.ndarray, addresses: np.ndarray, data: np.ndarray
    ) -> None:
        """Writes rows of numbers [lanes, count]."""
        size = data.dtype.itemsize
        places = self._places(where, lanes, addresses, size * data.shape[1])
        where.bytes.view(data.dtype)[(places // size)[:, None] + np.arange(data.shape[1])] = data

    def _places(
        self, where: GlobalMemory | SharedMemory, lanes: np.ndarray, addresses: np.ndarray, size: int
    ) -> np.ndarray:
        if (addresses % size).any():
            raise KernelError(f"an access of {size} bytes that is not aligned")
        return where.places(addresses, size, self.block_of[lanes])

    def copy_later(
        self, lanes: np.ndarray, source: np.ndarray, target: np.ndarray, size: int, filled: np.ndarray
    ) -> None:
        """Starts an asynchronous copy to shared memory. filled: how many bytes are read; the rest is zero.

        The target is poison until the copy is waited for.
        """
        data = np.zeros((len(lanes), size), np.uint8)
        if not np.isin(filled, (0, size)).all():
            raise KernelError("an asynchronous copy of a part of its bytes, which is not supported")
        reads = filled == size
        data[reads] = self.load(self.memory, lanes[reads], source[reads], "b64", size // 8).view(np.uint8)
        places = self._places(self.shared, lanes, target, size)
        self.shared.bytes[places[:, None] + np.arange(size)] = POISON
        self.copies.append((lanes, places, data, self.committed[lanes]))

    def wait_for_copies(self, active: np.ndarray, groups_left: int) -> None:
        """Finishes the active threads' copies, except those of the last groups."""
        left = []
        for lanes, places, data, group in self.copies:
            done = active.reshape(-1)[lanes] & (group < self.committed[lanes] - groups_left)
            self.shared.bytes[places[done, None] + np.arange(data.shape[1])] = data[done]
            if not done.all():
                left.append((lanes[~done], places[~done], data[~done], group[~done]))
        self.copies = left

    # Control

    def expect_whole(self, active: np.ndarray, threads: int) -> None:
        """Raises KernelError unless the active threads are whole warps, or whole blocks."""
        groups = (active | self.ended).reshape(-1, threads)
        if not (groups.all(1) | ~active.reshape(-1, threads).any(1)).all():
            raise KernelError(f"only a part of {threads} threads executes what all must execute together")

    def run(self, table: dict[str, Callable[[Machine, Instruction, np.ndarray], None]]) -> None:
        """Executes the kernel. table: a function for the first part of each opcode."""
        fronts = {0: self.everyone}
        instructions = self.program.instructions
        while fronts:
            at = min(fronts)
            active = fronts.pop(at)
            instruction = instructions[at]
            try:
                chosen = self._guarded(instruction, active)
                head = instruction.opcode[0]
                if head == "bra":
                    assert isinstance(instruction.operands[0], str)
                    self._go(fronts, self.program.labels[instruction.operands[0]], chosen)
                    active = active & ~chosen
                elif head == "ret":
                    self.ended |= chosen
                    active = active & ~chosen
                elif chosen is self.everyone or chosen.any():
                    table[head](self, instruction, chosen)
            except KernelError as fault:
                raise KernelError(f"{fault}, in `{instruction.text}`") from None
            except Exception as error:
                raise NotImplementedError(f"`{instruction.text}` cannot be executed: {error!r}") from error
            self._go(fronts, at + 1, active)

    def _guarded(self, instruction: Instruction, active: np.ndarray) -> np.ndarray:
        if instruction.guard is None:
            return active
        holds = self.read(instruction.guard, "pred") ^ instruction.negated
        return active if holds.all() else active & holds

    def _go(self, fronts: dict[int, np.ndarray], to: int, threads: np.ndarray) -> None:
        """Lets threads continue at an instruction, together with those that are there already."""
        if threads is self.everyone:
            fronts[to] = threads
        elif threads.any():
            together = threads | fronts[to] if to in fronts else threads
            fronts[to] = self.everyone if together.all() else together
