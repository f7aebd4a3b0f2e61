"""The memory of B streams, which the caller owns and a session reads and updates, and its file."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.base.machine import refuse_beyond_memory
from runtimes.base.ranges import Range
from runtimes.contract.memory_identity import Owner

MAX_POSITION = 1 << 62
FAR = 1 << 33  # a position that 32 bits cannot hold, at which graphs are compared
MAX_BATCH = 1 << 16  # rows
NUMPY_HUGE = 1 << 22  # bytes from which NumPy asks Linux for huge pages
MOST_PARTS = 256  # of a memory, kept with their bindings


class DeviceTensor(ABC):
    """A memory tensor that lies on a device. `np.asarray` downloads its content too."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @abstractmethod
    def copy(self) -> np.ndarray:
        """The content as a new array on the host."""

    @abstractmethod
    def clear(self, rows: np.ndarray) -> None:
        """Sets some rows to zero in place: what is bound to the array stays valid."""

    @abstractmethod
    def rows(self, chosen: Sequence[int]) -> np.ndarray:
        """The content of some rows as a new array on the host."""

    @abstractmethod
    def write_rows(self, rows: Sequence[int], sources: Sequence[tuple[Any, int]]) -> None:
        """Writes a row of another array into each of these rows, in place. `sources` has the array, on
        the host or on this device, and the row. Rows of this device are copied without the host.
        """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = self.copy()
        return host if dtype is None else host.astype(dtype, copy=False)

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory that is pickled holds plain arrays: another process may have no GPU.
        return np.array, (self.copy(),)


class _InUse:
    """The lock of a memory; a class, since a generator would take longer, for each token."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise StreamError(
                "another thread is using this memory; give each thread a memory of its own, from start() or "
                "from copy()."
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Held(NamedTuple):
    """The objects that a memory consisted of; see `Memory.holds`."""

    positions: np.ndarray
    owner: Owner
    unsure: np.ndarray
    tensors: dict[str, np.ndarray]
    items: tuple[tuple[str, np.ndarray], ...]
    whole: Held | None


@dataclass
class Memory:
    """The state of B independent streams.

    One thread at a time may use a memory; a second one gets a StreamError.
    """

    positions: np.ndarray
    """int64 [B], the stream position of each row's next token. Setting one to 0 starts a new text in that
    row. Nothing has to be cleared, and no row sees the past of another. A negative position -n makes the
    next n tokens of the row padding, which is invisible to all tokens after it; so rows of unequal length
    end together.
    """
    tensors: dict[str, np.ndarray]
    """The memory arrays by name. Their values are finite. `Session.step` updates them in place; only
    `copy()`, `select()` and `join()` make new ones.
    """
    owner: Owner
    """The artefact, engine or run that the numbers belong to."""
    binding: Any = field(default=None, init=False, repr=False, compare=False)
    """What a session keeps over these arrays from step to step; it is neither copied nor saved."""
    step: Any = field(default=None, init=False, repr=False, compare=False)
    """The last step (`runtimes.sessions.graph.Step`), whose arrays the next one may use again."""
    # bool [B]: whether a row may hold values that are not finite; see `clear_restarted_rows`.
    _unsure: np.ndarray = field(init=False, repr=False, compare=False)
    _in_use: _InUse = field(default_factory=_InUse, init=False, repr=False, compare=False)
    whole: Memory | None = field(default=None, init=False, repr=False, compare=False)
    """The memory that this one is a part of; None for a memory that is no part."""
    # What `adopted` returns; None if no row was adopted. A part uses the one of its whole.
    _adopted: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)
    # Of a part: the first of its rows, and what it and its whole consisted of. Of a whole memory: its parts
    # by their rows.
    _first: int = field(default=0, init=False, repr=False, compare=False)
    _made_of: Held | None = field(default=None, init=False, repr=False, compare=False)
    _parts: OrderedDict[tuple[int, int], Memory] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self._unsure = np.ones(np.shape(self.positions)[:1], bool)

    @property
    def batch(self) -> int:
        return len(self.positions)

    @property
    def unsure(self) -> bool:
        """Whether a row may hold values that are not finite."""
        return True in self._unsure.tolist()  # several times faster than `any` for a few rows

    @unsure.setter
    def unsure(self, unsure: bool) -> None:
        self._unsure_rows()[:] = unsure

    @property
    def adopted(self) -> np.ndarray:
        """For each row, object [B]: the hashes of the weights that computed its stream before other weights
        continued it, the first ones first, with blanks between them; an empty text for most rows.
        """
        if self.whole is not None:
            return self.whole.adopted[self._first : self._first + self.batch]
        if self._adopted is None or len(self._adopted) != self.batch:
            return np.full(self.batch, "", object)
        return self._adopted

    def note_adopted(self, hashes: Sequence[str], rows: Sequence[int] | None = None) -> None:
        """Sets `adopted` of some rows, or of all rows."""
        chosen = np.arange(self.batch) if rows is None else np.asarray(rows)
        if self.whole is not None:
            self.whole.note_adopted(hashes, self._first + chosen)
        elif self._adopted is not None or any(hashes):
            self._adopted = self.adopted
            self._adopted[chosen] = hashes

    def clear_restarted_rows(self) -> None:
        """Sets the tensors of rows that start a new text to zero if they may hold values that are not finite.

        What a mask hides counts with weight 0 in an attention, and 0 times NaN is NaN: one text that
        overflowed could spoil the next one in its row. Before position 0 a row holds only padding, so nothing
        is lost.

        After a step, sessions note in `unsure` whether it is needed. Every step writes the whole memory of a
        row unless it is a ring, so zeros cost no more than a step does, and such rows are always cleared. To
        clear a ring would take longer than a short text, so it is cleared only if the logits, which depend on
        all of its visible values, were not finite.
        """
        if (self.whole or self)._adopted is not None:  # a new text was not adopted
            restarted = np.flatnonzero(self.positions <= 0)
            self.note_adopted([""] * len(restarted), restarted)
        if not self.unsure:
            return
        rows = np.flatnonzero(self._unsure_rows() & (self.positions <= 0))
        if not rows.size:
            return
        for array in self.tensors.values():
            if isinstance(array, np.ndarray):
                array[rows] = 0
            elif 0 not in array.shape:
                array.clear(rows)
        self._unsure_rows()[rows] = False

    def _unsure_rows(self) -> np.ndarray:
        """Whether each row may hold values that are not finite, bool [B]; a part has a view of them."""
        if len(self._unsure) != self.batch:  # the caller has exchanged the arrays
            self._unsure = np.full(self.batch, self.unsure)
        return self._unsure

    def part(self, first: int, last: int) -> Memory:
        """The memory of the rows first to last - 1 of this one, over the same arrays: nothing is copied.

        A step of the part advances these rows here, and leaves the others as they are. The part is kept with
        what a session binds to it, so asking for it again is cheap; of many parts the MOST_PARTS that were
        used last are kept. A part and its whole are one memory for threads: see `in_use`. After the
        arrays of the whole were replaced, ask for the parts again. Raises StreamError for rows that are not
        there, and for memory on a device; use `select` and `replace` there.
        """
        if self.whole is not None:
            self._refuse_beyond(first, last)
            return self.whole.part(self._first + first, self._first + last)
        part = self._parts.get((first, last))
        if part is not None:
            if part.current:
                self._parts.move_to_end((first, last))
                return part
            self.unsure = self.unsure  # of all rows: the arrays were exchanged, and rows may have moved
        self._refuse_beyond(first, last)
        self._refuse_broken()
        if any(isinstance(array, DeviceTensor) for array in self.tensors.values()):
            raise StreamError(
                "the memory is on a device, and its rows cannot be stepped in parts; use select() and "
                "replace(), or a session on the CPU."
            )
        rows = slice(first, last)
        part = Memory(self.positions[rows], {n: array[rows] for n, array in self.tensors.items()}, self.owner)
        part._unsure = self._unsure_rows()[rows]
        part._in_use = self._in_use
        part.whole = self
        part._first = first
        part._made_of = part.objects()
        self._parts[first, last] = part
        if len(self._parts) > MOST_PARTS:
            self._parts.popitem(last=False)
        return part

    @property
    def current(self) -> bool:
        """Whether a part still shares the arrays of its whole; True for a memory that is no part."""
        return self._made_of is None or self.holds(self._made_of)

    def objects(self) -> Held:
        """All that a caller may exchange, to be compared with `holds`."""
        whole = None if self.whole is None else self.whole.objects()
        return Held(
            self.positions, self.owner, self._unsure, self.tensors, tuple(self.tensors.items()), whole
        )

    def holds(self, held: Held) -> bool:
        """Whether the memory consists of these objects: then what was checked before needs no other check."""
        tensors = self.tensors
        if (
            self.positions is not held.positions
            or self.owner is not held.owner
            or self._unsure is not held.unsure
            or tensors is not held.tensors
            or len(tensors) != len(held.items)
        ):
            return False
        for name, array in held.items:  # a loop, because it is faster than built-in functions after a step
            if tensors.get(name) is not array:
                return False
        return self.whole is None or (held.whole is not None and self.whole.holds(held.whole))

    def store(self, tensors: dict[str, np.ndarray]) -> None:
        """Makes these arrays the memory's tensors; a part copies them into the arrays of its whole."""
        if self.whole is None:
            self.tensors = tensors
            return
        for name, array in self.tensors.items():
            np.copyto(array, tensors[name])

    def _refuse_beyond(self, first: int, last: int) -> None:
        """Raises StreamError unless the rows first to last - 1 are some of this memory."""
        if not 0 <= first < last <= self.batch:
            raise StreamError(
                f"a part with the rows from {first} up to and without {last} was asked for; expected at "
                f"least one of the rows 0 to {self.batch - 1}."
            )

    def in_use(self) -> _InUse:
        """While a `with` block runs, no other thread may step, copy or save this memory; it is refused, and
        does not wait, because two threads that share a stream would mix their texts.
        """
        return self._in_use

    def copy(self) -> Memory:
        """An independent fork of all streams; raises StreamError while another thread steps them."""
        with self.in_use():
            fork = Memory(
                self.positions.copy(),
                {name: array.copy() for name, array in self.tensors.items()},
                self.owner,
            )
            fork._unsure[:] = self._unsure_rows()
            fork.note_adopted(self.adopted)
        return fork

    def select(self, rows: Sequence[int]) -> Memory:
        """An independent copy of some rows, in this order: to save or move one, to fork one, to leave others.

        A row may be asked for more than once, as in a beam search. Raises StreamError for rows that are not
        there, and for more of them than a session or this machine can hold.
        """
        with self.in_use():
            chosen = self._checked(rows)
            self._refuse_too_large(len(chosen))
            tensors = {name: _host_rows(array, chosen) for name, array in self.tensors.items()}
            copy = Memory(self.positions[chosen], tensors, self.owner)
            copy._unsure[:] = self._unsure_rows()[chosen]
            copy.note_adopted(self.adopted[chosen])
        return copy

    def replace(self, rows: Sequence[int], other: Memory) -> None:
        """Writes all rows of `other` into these rows, the first into rows[0] and so on.

        The arrays stay the same, so whatever a session has bound to them stays valid; a memory on a device is
        downloaded, and uploaded again with its next step. Raises StreamError, and changes nothing, if a
        row is named twice or is not there, or if the two memories do not fit together.
        """
        refuse_no_memory(other)
        other = other.copy() if other._in_use is self._in_use else other
        with self.in_use(), other.in_use():
            chosen = self._checked(rows)
            if len(np.unique(chosen)) != len(chosen) or len(chosen) != other.batch:
                raise StreamError(
                    f"rows are {chosen.tolist()} and the other memory has {other.batch}; name one row "
                    "for each of them, no row twice."
                )
            self._refuse_unlike(other)
            for name, array in self.tensors.items():
                if not isinstance(array, np.ndarray):
                    self.tensors[name] = array = np.array(array)
                array[chosen] = np.asarray(other.tensors[name])
            self.positions[chosen] = other.positions
            self._unsure_rows()[chosen] = other._unsure_rows()
            self.note_adopted(other.adopted, chosen)

    def write_rows(self, rows: Sequence[int], sources: Sequence[tuple[Memory, int]]) -> None:
        """Writes a row of another memory of the same session into each of these rows. `sources` has the
        memory and the row; nothing steps it meanwhile.

        The arrays stay the same, so whatever a session has bound to them stays valid. Between memories on a
        device rows are copied there.
        """
        with self.in_use():
            for name, array in self.tensors.items():
                given = [(memory.tensors[name], place) for memory, place in sources]
                if isinstance(array, DeviceTensor):
                    array.write_rows(rows, given)
                    continue
                for row, (source, place) in zip(rows, given, strict=True):
                    array[row] = source[place] if isinstance(source, np.ndarray) else source.rows([place])[0]
            unsure = self._unsure_rows()
            for row, (memory, place) in zip(rows, sources, strict=True):
                self.positions[row] = memory.positions[place]
                unsure[row] = memory._unsure_rows()[place]

    def join(self, other: Memory) -> Memory:
        """A new memory with the rows of this one followed by the rows of `other`; both stay unchanged.

        Raises StreamError if they do not belong to one artefact or run, or have more rows than a session
        or this machine can hold.
        """
        refuse_no_memory(other)
        other = other.copy() if other._in_use is self._in_use else other
        with self.in_use(), other.in_use():
            self._refuse_unlike(other)
            self._refuse_too_large(self.batch + other.batch)
            tensors = {
                name: np.concatenate([np.asarray(array), np.asarray(other.tensors[name])])
                for name, array in self.tensors.items()
            }
            joined = Memory(np.concatenate([self.positions, other.positions]), tensors, self.owner)
            joined._unsure[:] = np.concatenate([self._unsure_rows(), other._unsure_rows()])
            joined.note_adopted(np.concatenate([self.adopted, other.adopted]))
        return joined

    def _checked(self, rows: Sequence[int]) -> np.ndarray:
        """The rows as an array [N], at least one of them, each of this memory."""
        self._refuse_broken()
        try:
            chosen = np.asarray(rows)
        except ValueError:  # nested lists of unequal length
            chosen = np.empty(0)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu" or not len(chosen):
            raise StreamError(f"rows are {rows!r:.60}; expected a list of row numbers, such as [0, 2].")
        if (wrong := chosen[(chosen < 0) | (chosen >= self.batch)]).size:
            raise StreamError(f"row {wrong[0]} is not there; expected 0 to {self.batch - 1}.")
        return chosen.astype(np.int64)

    def _refuse_unlike(self, other: Memory) -> None:
        """Raises StreamError unless the rows of both memories are interchangeable."""
        if self.owner != other.owner:
            raise StreamError(
                f"the memories belong to two artefacts, {self.owner.artefact:.12} and "
                f"{other.owner.artefact:.12}; rows go only between memories of one."
            )
        for memory in (self, other):
            memory._refuse_broken()
        kinds = [{name: (x.shape[1:], x.dtype) for name, x in m.tensors.items()} for m in (self, other)]
        if kinds[0] != kinds[1]:
            raise StreamError(
                "the arrays of the two memories have different names, types or shapes; use memories from "
                "start() or load_memory() of one session."
            )

    def _refuse_too_large(self, batch: int) -> None:
        """Raises StreamError if no memory of `batch` such rows can be made."""
        row = sum(math.prod(array.shape[1:]) * array.dtype.itemsize for array in self.tensors.values())
        refuse_batch(batch, row_bytes=row)

    def _refuse_broken(self) -> None:
        """Raises StreamError if an array was exchanged for something that has no such rows."""
        for name, array in [("positions", self.positions), *self.tensors.items()]:
            own = isinstance(array, DeviceTensor) or (isinstance(array, np.ndarray) and array.flags.writeable)
            if not own or array.shape[:1] != (self.batch,):
                raise StreamError(
                    f"the memory's {name} is read-only, no array, or does not have {self.batch} rows; use "
                    "memory from start() or load_memory()."
                )

    def __deepcopy__(self, _: dict[int, Any]) -> Memory:
        return self.copy()

    def __getstate__(self) -> dict[str, Any]:
        with self.in_use():
            tensors = {name: np.array(array) for name, array in self.tensors.items()}
            positions = np.array(self.positions)
        return {
            "positions": positions,
            "tensors": tensors,
            "owner": self.owner,
            "adopted": self.adopted,
            "unsure": self.unsure,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # What is unpickled lies in the bytes of the pickle; a step wants arrays with bytes of their own.
        tensors = {name: np.array(array) for name, array in state["tensors"].items()}
        Memory.__init__(self, np.array(state["positions"]), tensors, state["owner"])
        self.note_adopted(state["adopted"])
        self.unsure = state["unsure"]


def _host_rows(array: np.ndarray | DeviceTensor, rows: np.ndarray) -> np.ndarray:
    """A copy of some rows of a memory tensor."""
    found: np.ndarray = array[rows] if isinstance(array, np.ndarray) else array.rows(rows.tolist())
    return found


def refuse_no_memory(memory: object) -> None:
    """Raises StreamError if the caller gave something else than a memory."""
    if not isinstance(memory, Memory):
        raise StreamError(
            f"the memory is of type {type(memory).__name__}; use memory from start() or load_memory()."
        )


def refuse_part(memory: Memory) -> None:
    """Raises StreamError for a part of another memory, whose rows would leave their array for a device."""
    if memory.whole is not None:
        raise StreamError(
            "the memory is a part of another one, and this session keeps memory on a device; give it the "
            "whole memory, or a copy from select()."
        )


def refuse_batch(batch: int, *, row_bytes: int) -> None:
    """Raises StreamError if no memory can have `batch` rows of `row_bytes` bytes."""
    Range(1, MAX_BATCH, whole=True).check("batch", batch, StreamError)
    refuse_beyond_memory(batch * row_bytes, what=f"the memory of {batch} streams", fix="use a smaller batch")


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that take memory when they are first written, one small page at a time.

    NumPy asks for huge pages. A token is written into the ring of every head, so the first one would take
    2 MB of each ring, which is the whole memory if the rings are of that size.
    """
    array = np.zeros(shape, dtype)
    if array.nbytes >= NUMPY_HUGE and hasattr(mmap, "MADV_NOHUGEPAGE"):
        address = array.ctypes.data
        first, end = -(-address // mmap.PAGESIZE), (address + array.nbytes) // mmap.PAGESIZE
        part = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((end - first) * mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(*part, mmap.MADV_NOHUGEPAGE)  # a system without huge pages refuses it
    return array
