"""The rows of an engine: the memories of the streams that advance now."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from runtimes.contract.memory import DeviceTensor, Memory
from runtimes.contract.session import Session, is_language_model
from xl_export.serve.core.running import Running


class Rows(ABC):
    """The rows of an engine, and the runs that use them, in the order decoding | prompts. Only the thread of
    the engine uses them.
    """

    neighbours: ClassVar[bool]
    """Whether only neighbouring rows can be stepped together."""

    def __init__(self, session: Session, count: int) -> None:
        self._session = session
        self._count = count
        self.runs: list[Running] = []
        """The run of each used row, the decoding ones first."""
        self.decoding = 0
        """Number of decoding rows."""

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self._count - len(self.runs)

    def admit(self, run: Running, memory: Memory | None) -> None:
        """Gives a run the first free row, with the content of a memory of one row, or for a new stream."""
        run.row = len(self.runs)
        try:
            self._begin(run, memory)
        except Exception:  # such as no memory for it
            run.row = -1
            raise
        self.runs.append(run)

    def decode(self, run: Running) -> None:
        """Moves a row from the prompts to the decoding ones."""
        one, other = run.row, self.decoding
        if one != other:
            self._exchange(one, other)
            runs = self.runs
            runs[one], runs[other] = runs[other], runs[one]
            runs[one].row = one
            runs[other].row = other
        self.decoding += 1

    def release(self, run: Running) -> None:
        """Frees a row. The last decoding row moves to its place, and the last prompt to that row's place."""
        row = run.row
        if row < self.decoding:
            self.decoding -= 1
            self._move(self.decoding, row)
            row = self.decoding
        self._move(len(self.runs) - 1, row)
        self.runs.pop()
        run.row = -1

    def _move(self, source: int, to: int) -> None:
        """Moves a row to the place of another one, whose run has left."""
        if source != to:
            self._overwrite(source, to)
            self.runs[to] = self.runs[source]
            self.runs[to].row = to

    def clear(self) -> None:
        """Frees all rows after a fault of the engine."""
        self.runs.clear()
        self.decoding = 0

    @abstractmethod
    def trial(self, batch: int) -> Memory:
        """A memory of `batch` new streams in which a session may be tried, before any run has a row."""

    @abstractmethod
    def part(self, runs: Sequence[Running]) -> Memory:
        """The memory of some rows, which one step advances. It costs nothing if the last step advanced the
        same rows.
        """

    @abstractmethod
    def position(self, run: Running) -> int:
        """The stream position of a run's next token."""

    @abstractmethod
    def taken_out(self, run: Running) -> Memory:
        """A copy of the memory of a run's row."""

    @abstractmethod
    def spoil(self, runs: Sequence[Running]) -> None:
        """Notes that rows may hold anything: they are cleared before a new stream starts in one of them."""

    @abstractmethod
    def _begin(self, run: Running, memory: Memory | None) -> None:
        """Puts the content of a memory of one row, or a new stream, into the row of a run."""

    @abstractmethod
    def _exchange(self, one: int, other: int) -> None:
        """Exchanges what two rows hold."""

    @abstractmethod
    def _overwrite(self, source: int, to: int) -> None:
        """Copies what a row holds to another row, whose content is not needed."""


class RowsInPlace(Rows):
    """Rows of one memory, of which each step advances a slice: for a ring on the CPU.

    Steps read and write the rows where they are.
    """

    neighbours = True

    def __init__(self, session: Session, count: int) -> None:
        super().__init__(session, count)
        self.memory = session.start(count)
        # The last part that was asked for. A session may exchange the arrays of a whole memory, but never
        # of a part. So if there are several rows, only parts are stepped, and all of them keep sharing the
        # same arrays. One row has no other part, and a step of the whole need not copy the memory back.
        self._part = self.memory
        self._ends = (0, 1 if count == 1 else 0)

    def trial(self, batch: int) -> Memory:
        memory = self._slice(0, batch)
        memory.positions[:] = 0
        return memory

    def part(self, runs: Sequence[Running]) -> Memory:
        return self._slice(runs[0].row, runs[-1].row + 1)

    def position(self, run: Running) -> int:
        return int(self.memory.positions[run.row])

    def taken_out(self, run: Running) -> Memory:
        return self.memory.select([run.row])

    def spoil(self, runs: Sequence[Running]) -> None:
        self.memory.part(runs[0].row, runs[-1].row + 1).unsure = True

    def clear(self) -> None:
        super().clear()
        self.memory.unsure = True

    def _slice(self, first: int, last: int) -> Memory:
        if self._ends != (first, last):
            self._part = self.memory.part(first, last)
            self._ends = (first, last)
        return self._part

    def _begin(self, run: Running, memory: Memory | None) -> None:
        if memory is None:
            self.memory.positions[run.row] = 0
        else:
            self.memory.write_rows([run.row], [(memory, 0)])

    def _exchange(self, one: int, other: int) -> None:
        self.memory.replace([one, other], self.memory.select([other, one]))

    def _overwrite(self, source: int, to: int) -> None:
        self.memory.write_rows([to], [(self.memory, source)])


class JoinedRows(Rows):
    """Rows that are joined to one memory for a step: for memory that is no ring, and memory on a device.

    Rows stay joined until other rows are stepped with one of them. So nothing is copied while the same
    streams advance. Rows are copied into memories that earlier steps have used: what the session has bound
    to such a memory stays valid, and on a device the rows are copied there.
    """

    neighbours = False

    def __init__(self, session: Session, count: int) -> None:
        super().__init__(session, count)
        # The memory that has the row of each run, and the place of the row in it.
        self._places: dict[Running, tuple[Memory, int]] = {}
        # Memories for steps, the one that was used last at the end. No other memory is stepped: a state
        # keeps its own, and all new streams begin in one.
        self._steppable: list[Memory] = []
        self._new = session.start(1)

    def trial(self, batch: int) -> Memory:
        return self._session.start(batch)

    def part(self, runs: Sequence[Running]) -> Memory:
        places = [self._places[run] for run in runs]
        memory = places[0][0]
        are_all = len(runs) == memory.batch and any(memory is own for own in self._steppable)
        if are_all and all(own is memory and at == place for at, (own, place) in enumerate(places)):
            return memory
        memory = self._unused(len(runs))
        memory.write_rows(range(len(runs)), places)
        self._places.update((run, (memory, at)) for at, run in enumerate(runs))
        return memory

    def position(self, run: Running) -> int:
        memory, place = self._places[run]
        return int(memory.positions[place])

    def taken_out(self, run: Running) -> Memory:
        memory, place = self._places[run]
        return memory.copy() if memory.batch == 1 else memory.select([place])

    def spoil(self, runs: Sequence[Running]) -> None:
        for run in runs:
            self._drop(self._places[run][0])

    def release(self, run: Running) -> None:
        super().release(run)
        del self._places[run]

    def clear(self) -> None:
        super().clear()
        self._places.clear()
        self._steppable.clear()

    def _unused(self, batch: int) -> Memory:
        """A memory of `batch` rows for a step, in which no run has a row. Unused memories are kept, the most
        recent ones, while they have no more rows than the engine.
        """
        used = {id(memory) for memory, _ in self._places.values()}
        unused = [memory for memory in self._steppable if id(memory) not in used]
        memory = next((each for each in unused if each.batch == batch), None)
        if memory is None:
            memory = self._session.start(batch)
            left = sum(each.batch for each in unused) + batch
            while unused and left > self._count:
                left -= unused[0].batch
                self._drop(unused.pop(0))
        else:
            self._drop(memory)
        self._steppable.append(memory)
        return memory

    def _drop(self, memory: Memory) -> None:
        self._steppable = [each for each in self._steppable if each is not memory]

    def _begin(self, run: Running, memory: Memory | None) -> None:
        self._places[run] = (self._new if memory is None else memory), 0

    def _exchange(self, one: int, other: int) -> None:
        """Nothing: the memory of a run does not depend on its row."""

    def _overwrite(self, source: int, to: int) -> None:
        """Nothing, likewise."""


def rows_of(session: Session, count: int) -> Rows:
    """The rows of an engine: in place if the session computes a ring where it is."""
    spec = session.spec
    if is_language_model(session) and (spec is None or (spec.circular and spec.lengths_fault is None)):
        memory = session.start(1)
        session.predict(np.zeros((1, 1), np.int64), memory)
        if not any(isinstance(array, DeviceTensor) for array in memory.tensors.values()):
            return RowsInPlace(session, count)
    return JoinedRows(session, count)
