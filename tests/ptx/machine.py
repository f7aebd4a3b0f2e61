"""The state of a launch and how it advances: registers, memory, and which threads are where.

All threads of a launch run together, one instruction at a time, as arrays [blocks, threads]. Threads that a
branch separates wait for each other: the instruction that runs next is the earliest at which any thread is,
and only the threads that are there execute it. So threads of a loop catch up with those that left it.

Results that depend on the order in which a GPU runs its threads are faults, although the order is fixed here:

- A byte is read that nothing has written, or whose asynchronous copy was not waited for.
- What depends on a register that nothing has written is stored, compared, exchanged, multiplied by a tensor
  core, or used as an address. The same for the result of a product that was not waited for.
- Two threads access one byte of shared memory, at least one of them writes, and no barrier is between.
- A product of wgmma reads bytes or registers without the fence that must come after their last write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.ptx.program import Address, Instruction, Operand, Program

POISON = 0xFF  # of every byte that was never written; four of them are NaN
WARP = 32
TYPES: dict[str, Any] = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": np.float32,
    **{f"{kind}{bits}": f"u{bits // 8}" for kind in ("b", "u") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
}
TYPES = {name: np.dtype(kind) for name, kind in TYPES.items()}
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# Which halves of a register are undefined, as bits: the lower, the upper.
ALL_DEFINED = np.zeros((1, 1), np.uint8)
WHOLLY_UNDEFINED = np.full((1, 1), 3, np.uint8)


class KernelError(AssertionError):
    """What a GPU would answer with an error or with undefined numbers."""


class GlobalMemory:
    """Tensors at addresses, with gaps between them that must not be accessed."""

    BASE, GAP = 0x7000_0000_0000, 4096

    def __init__(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        self.written = np.empty(0, np.bool_)
        self.allocated = np.empty(0, np.bool_)

    def allocate(self, size: int) -> int:
        """The address of new memory, aligned to 256 bytes."""
        start = len(self.bytes)
        more = -(-(size + self.GAP) // 256) * 256
        self.bytes = np.concatenate([self.bytes, np.full(more, POISON, np.uint8)])
        self.written = np.concatenate([self.written, np.zeros(more, np.bool_)])
        self.allocated = np.concatenate([self.allocated, np.arange(more) < size])
        return self.BASE + start

    def upload(self, address: int, content: np.ndarray) -> None:
        """Writes bytes to an address."""
        part = self._part(address, content.nbytes)
        self.bytes[part] = content
        self.written[part] = True

    def download(self, address: int, size: int) -> np.ndarray:
        """The bytes at an address."""
        part = self._part(address, size)
        if not self.written[part].all():
            raise KernelError("a result that no thread has written")
        return self.bytes[part]

    def _part(self, address: int, size: int) -> slice:
        start = address - self.BASE
        assert self.allocated[start : start + size].all()
        return slice(start, start + size)

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
        self.written = np.zeros(len(self.bytes), np.bool_)

    def places(self, addresses: np.ndarray, size: int, blocks: np.ndarray) -> np.ndarray:
        places = addresses.astype(np.int64)
        if (places < 0).any() or (places + size > self.limit).any():
            raise KernelError(f"an access outside of the {self.limit} bytes of shared memory")
        return places + blocks * self.size


class Order:
    """Which accesses to shared memory a barrier separates: the last write and read of every `grain` bytes,
    the smallest access.

    Threads have numbers across all blocks. A byte that several threads have read since a barrier has the
    reader SEVERAL, or -2 - warp if they are all of one warp.
    """

    SEVERAL = -1

    def __init__(self, blocks: int, threads: int, num_bytes: int, grain: int) -> None:
        self.threads = threads
        self.grain = grain
        self.now = 0  # counts instructions
        self.blocks_met = np.zeros(blocks, np.int64)  # when all threads of each block met last
        self.warps_met = np.zeros(blocks * threads // WARP, np.int64)
        self.writer = np.zeros(num_bytes // grain, np.int64)
        self.reader = np.zeros(num_bytes // grain, np.int64)
        self.written = np.zeros(num_bytes // grain, np.int64)
        self.read = np.zeros(num_bytes // grain, np.int64)

    def meet(self, active: np.ndarray, threads: int) -> None:
        """A barrier for the active threads, of warps or of blocks."""
        met = active.reshape(-1, threads).any(axis=1)
        if threads == self.threads:
            self.blocks_met[met] = self.now
        self.warps_met[np.repeat(met, threads // WARP)] = self.now

    def reads(self, lanes: np.ndarray, places: np.ndarray, size: int) -> None:
        """These threads read `size` bytes each."""
        at = self.grains(places, size)
        lanes = np.broadcast_to(lanes[:, None], at.shape)
        self._expect(
            self._separate(lanes, self.writer[at], self.written[at]), "writes what another one reads"
        )
        earlier = self.reader[at]
        one_warp = _warp(earlier) == lanes // WARP
        several = np.where(one_warp, -2 - lanes // WARP, self.SEVERAL)
        self.reader[at] = np.where(self._separate(lanes, earlier, self.read[at]), lanes, several)
        self.read[at] = self.now
        # Of threads that read the same bytes now, one was noted.
        noted = self.reader[at]
        other = noted != lanes
        same_warp = _warp(noted) == lanes // WARP
        self.reader[at[other & same_warp]] = -2 - (lanes // WARP)[other & same_warp]
        self.reader[at[other & ~same_warp]] = self.SEVERAL

    def writes(self, lanes: np.ndarray, places: np.ndarray, size: int) -> None:
        """These threads write `size` bytes each."""
        at = self.grains(places, size)
        lanes = np.broadcast_to(lanes[:, None], at.shape)
        self._expect(self._separate(lanes, self.reader[at], self.read[at]), "reads what another one writes")
        self._expect(self._separate(lanes, self.writer[at], self.written[at]), "writes the same")
        self.writer[at] = lanes
        self.written[at] = self.now

    def grains(self, places: np.ndarray, size: int) -> np.ndarray:
        """Where `size` bytes from each of these places are in the arrays of this class."""
        return places[:, None] // self.grain + np.arange(size // self.grain)

    def reads_together(self, at: np.ndarray) -> None:
        """Many threads read these grains together."""
        self.reader[at] = self.SEVERAL
        self.read[at] = self.now

    def _separate(self, lanes: np.ndarray, others: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Whether what other threads of the same blocks did at these times is before what lanes do now."""
        met = np.where(
            _warp(others) == lanes // WARP,
            self.warps_met[lanes // WARP],
            self.blocks_met[lanes // self.threads],
        )
        return (others == lanes) | (times <= met)

    def _expect(self, right: np.ndarray, what: str) -> None:
        if not right.all():
            raise KernelError(f"a race in shared memory: one thread {what}, with no barrier between")


def _warp(reader: np.ndarray) -> np.ndarray:
    """The warp of readers or writers; -1 for several warps."""
    return np.where(reader >= 0, reader // WARP, -2 - reader)


@dataclass
class Copies:
    """Asynchronous copies to shared memory that were not waited for. groups: of each lane."""

    lanes: np.ndarray
    groups: np.ndarray
    places: np.ndarray
    data: np.ndarray


@dataclass
class Products:
    """Asynchronous products that were not waited for: they may still read the grains `at` of shared memory
    and the registers `reads`, and write the registers `writes`. started: when.
    """

    lanes: np.ndarray
    groups: np.ndarray
    at: np.ndarray
    reads: frozenset[str]
    writes: frozenset[str]
    started: int


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
        # Of registers that are not defined in full: which halves are not, [blocks, threads].
        self.undefined: dict[str, np.ndarray] = {}
        self.order = Order(*self.shape, len(self.shared.bytes), program.grain)
        lanes = self.shape[0] * self.shape[1]
        # A thread's copies and products belong to the group that it commits next.
        self.copies: list[Copies] = []
        self.committed_copies = np.zeros(lanes, np.int64)
        self.products: list[Products] = []
        self.committed_products = np.zeros(lanes, np.int64)
        self.fenced_memory = np.zeros(
            lanes, np.int64
        )  # when each thread made its view of memory that of wgmma
        # Registers of products that other instructions wrote: by which threads, since their last fence.
        self.unfenced = {name: np.zeros(self.shape, np.bool_) for name in program.of_products}

    # Operands

    def read(self, operand: Operand, kind: str) -> np.ndarray:
        """The operand's value for every thread, of a type such as f32; it broadcasts to [blocks, threads]."""
        assert isinstance(operand, str)
        dtype = TYPES[kind]
        if operand in self.registers:
            value = self.registers[operand]
            return value if value.dtype == dtype else value.view(dtype)
        if operand[0] == "%":
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

    def write(
        self, register: Operand, value: np.ndarray, active: np.ndarray, undefined: np.ndarray = ALL_DEFINED
    ) -> None:
        """Sets a register of the active threads. undefined: which halves of the value are, in each thread."""
        assert isinstance(register, str)
        if register == "_":
            return
        if value.dtype != np.bool_:
            value = value.view(UNSIGNED[value.dtype.itemsize])
        before = self.undefined_halves(register)
        if active is not self.everyone:
            value = np.where(active, value, self.held(register, value.dtype))
            if undefined.any() or before.any():
                undefined = np.where(active, undefined, before)
        self.registers[register] = value
        if undefined.any():
            self.undefined[register] = undefined
        elif before.any():
            self.undefined.pop(register, None)

    def undefined_halves(self, register: Operand) -> np.ndarray:
        """Which halves of a register are undefined; it broadcasts to [blocks, threads]."""
        assert isinstance(register, str)
        if register in self.undefined:
            return self.undefined[register]
        unknown = register[0] == "%" and register not in self.registers
        return WHOLLY_UNDEFINED if unknown else ALL_DEFINED

    def write_lanes(self, register: Operand, value: np.ndarray, lanes: np.ndarray) -> None:
        """Sets a register of these lanes, which are numbers of threads of all blocks."""
        active = self.everyone
        if len(lanes) < active.size:
            active = np.zeros(self.shape, np.bool_)
            active.reshape(-1)[lanes] = True
            whole = np.zeros(active.size, value.dtype)
            whole[lanes] = value
            value = whole
        self.write(register, value.reshape(self.shape), active)

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
        at = (places // dtype.itemsize)[:, None] + np.arange(count)
        if not (where.written.view(dtype)[at] == int.from_bytes(b"\1" * dtype.itemsize, "little")).all():
            raise KernelError("a byte that nothing has written, or an asynchronous copy not yet")
        if where is self.shared:
            self.order.reads(lanes, places, dtype.itemsize * count)
        return where.bytes.view(dtype)[at]

    def store(
        self, where: GlobalMemory | SharedMemory, lanes: np.ndarray, addresses: np.ndarray, data: np.ndarray
    ) -> None:
        """Writes rows of numbers [lanes, count]."""
        size = data.dtype.itemsize
        places = self._places(where, lanes, addresses, size * data.shape[1])
        if where is self.shared:
            self.order.writes(lanes, places, size * data.shape[1])
        at = (places // size)[:, None] + np.arange(data.shape[1])
        where.bytes.view(data.dtype)[at] = data
        if (where.bytes.view(data.dtype)[at] != data).any():
            raise KernelError("several threads write different numbers to one place")
        where.written.view(data.dtype)[at] = int.from_bytes(b"\1" * size, "little")

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
        data[reads] = self.load(self.memory, lanes[reads], source[reads], "b32", size // 4).view(np.uint8)
        places = self._places(self.shared, lanes, target, size)
        self.order.writes(lanes, places, size)
        self.shared.written[places[:, None] + np.arange(size)] = False
        self.copies.append(Copies(lanes, self.committed_copies[lanes], places, data))

    def wait_for_copies(self, active: np.ndarray, groups_left: int) -> None:
        """Finishes the active threads' copies, except those of the last groups."""
        left = []
        for copies in self.copies:
            done = self._done(copies, active, self.committed_copies - groups_left)
            places, data = copies.places[done], copies.data[done]
            self.order.writes(copies.lanes[done], places, data.shape[1])
            at = places[:, None] + np.arange(data.shape[1])
            self.shared.bytes[at] = data
            self.shared.written[at] = True
            if not done.all():
                kept = (part[~done] for part in (copies.lanes, copies.groups, copies.places, copies.data))
                left.append(Copies(*kept))
        self.copies = left

    def multiply_later(self, instruction: Instruction, lanes: np.ndarray, places: np.ndarray) -> None:
        """Notes an asynchronous product by these threads, which reads the halves at these places. Its result
        must not be used before `wait_for_products`.
        """
        at = np.unique(self.order.grains(places, 2))
        if (self.order.written[at] >= self.fenced_memory[lanes].min()).any():
            raise KernelError(
                "a product reads shared memory that was written after the last fence.proxy.async"
            )
        for register in instruction.left_matrix | instruction.writes:
            if self.unfenced[register].reshape(-1)[lanes].any():
                raise KernelError(f"{register} was written after the last wgmma.fence")
        self.order.reads_together(at)
        groups = self.committed_products[lanes]
        self.products.append(
            Products(lanes, groups, at, instruction.left_matrix, instruction.writes, self.order.now)
        )

    def wait_for_products(self, active: np.ndarray, groups_left: int) -> None:
        """The same as `wait_for_copies` for products."""
        left = []
        for products in self.products:
            done = self._done(products, active, self.committed_products - groups_left)
            finished = self.block_of[products.lanes[done]]
            ours = np.isin(products.at * self.order.grain // self.shared.size, finished)
            at = products.at[ours]
            if (self.order.written[at] > products.started).any():
                raise KernelError("shared memory was written while a product was reading it")
            self.order.reads_together(at)
            if not done.all():
                kept = {"lanes": products.lanes[~done], "groups": products.groups[~done]}
                left.append(replace(products, at=products.at[~ours], **kept))
        self.products = left

    def _done(self, pending: Copies | Products, active: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Which of pending threads are active and have a group that is before these."""
        return active.reshape(-1)[pending.lanes] & (pending.groups < before[pending.lanes])

    # Control

    def expect_whole(self, active: np.ndarray, threads: int) -> None:
        """Raises KernelError unless the active threads are whole warps, or whole blocks."""
        groups = (active | self.ended).reshape(-1, threads)
        if not (groups.all(1) | ~active.reshape(-1, threads).any(1)).all():
            raise KernelError(f"only a part of {threads} threads executes what all must execute together")

    def expect_defined(self, registers: Iterable[str], active: np.ndarray) -> None:
        """Raises KernelError if one of these registers is not defined in full for the active threads."""
        for register in registers:
            if (self.undefined_halves(register).astype(np.bool_) & active).any():
                raise KernelError(f"{register} is undefined")

    def expect_ready(self, instruction: Instruction, active: np.ndarray) -> None:
        """Raises KernelError if an operand is undefined, or if a product that was not waited for uses one.

        Arithmetic may compute with undefined numbers: the compiler packs one with a number in a register,
        and later uses only the number.
        """
        if not instruction.carries_undefined:
            self.expect_defined(instruction.reads, active)
        if instruction.opcode[0] == "wgmma":
            return
        for products in self.products:
            written = products.writes & (instruction.reads | instruction.writes)
            read = products.reads & instruction.writes
            if (written or read) and active.reshape(-1)[products.lanes].any():
                used = ", ".join(written | read)
                raise KernelError(f"{used} is used by a product that was not waited for")
        if instruction.opcode[0] != "mov":  # the compiler copies registers between a fence and its product
            for register in instruction.writes & self.unfenced.keys():
                self.unfenced[register] |= active

    def run(self, table: dict[str, Callable[[Machine, Instruction, np.ndarray], None]]) -> None:
        """Executes the kernel. table: a function for the first part of each opcode."""
        fronts = {0: self.everyone}
        instructions = self.program.instructions
        while fronts:
            at = min(fronts)
            active = fronts.pop(at)
            instruction = instructions[at]
            self.order.now += 1
            try:
                chosen = self._guarded(instruction, active)
                head = instruction.opcode[0]
                self.expect_ready(instruction, chosen)
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
        self.expect_defined([instruction.guard], active)
        holds = self.read(instruction.guard, "pred") ^ instruction.negated
        return active if holds.all() else active & holds

    def _go(self, fronts: dict[int, np.ndarray], to: int, threads: np.ndarray) -> None:
        """Lets threads continue at an instruction, together with those that are there already."""
        if threads is self.everyone:
            fronts[to] = threads
        elif threads.any():
            together = threads | fronts[to] if to in fronts else threads
            fronts[to] = self.everyone if together.all() else together
