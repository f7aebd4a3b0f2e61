"""One memory of R rows, kept in the order decoding | prompts | free, so that what is stepped is one slice."""

from __future__ import annotations

import numpy as np

from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from xl_export.serve.core.running import Running


class Rows:
    """The rows of an engine, and the runs that use them. Only the thread of the engine uses it."""

    def __init__(self, session: Session, count: int) -> None:
        self.memory = session.start(count)
        #: The run of each used row, the decoding ones first.
        self.runs: list[Running] = []
        #: How many of them decode.
        self.decoding = 0
        #: How often the memory of a row was copied.
        self.moved = 0
        # The last part that was asked for. A session may exchange the arrays of a whole memory, but never
        # of a part. So if there are several rows, only parts are stepped, and all of them keep sharing the
        # same arrays. One row has no other part, and a step of the whole need not copy the memory back.
        self._part = self.memory
        self._ends = (0, 1 if count == 1 else 0)

    @property
    def free(self) -> int:
        """How many rows are free."""
        return self.memory.batch - len(self.runs)

    def part(self, first: int, last: int) -> Memory:
        """The memory of some rows, as `Memory.part`; it costs nothing for the rows of the previous step."""
        if self._ends != (first, last):
            self._part = self.memory.part(first, last)
            self._ends = (first, last)
        return self._part

    def admit(self, run: Running, memory: Memory | None) -> None:
        """Gives a run the first free row, with a copy of a memory of one row, or for a new stream."""
        row = len(self.runs)
        run.row = row
        self.runs.append(run)
        if memory is None:
            self.memory.positions[row] = 0
            return
        for name, array in self.memory.tensors.items():
            array[row] = memory.tensors[name][0]
        self.memory.positions[row] = memory.positions[0]
        self.memory.part(row, row + 1).unsure = memory.unsure
        self.moved += 1

    def decode(self, run: Running) -> None:
        """Moves a row from the prompts to the decoding ones."""
        self._exchange(run.row, self.decoding)
        self.decoding += 1

    def taken_out(self, run: Running) -> Memory:
        """A copy of the memory of a run's row."""
        self.moved += 1
        return self.memory.select([run.row])

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

    def clear(self) -> None:
        """Frees all rows."""
        self.runs.clear()
        self.decoding = 0
        self.memory.unsure = True

    def spoil(self, first: int, last: int) -> None:
        """Notes that rows may hold anything: they are cleared before a new stream starts in one of them."""
        self.memory.part(first, last).unsure = True

    def _move(self, source: int, to: int) -> None:
        """Copies a row over another one, whose run has left."""
        if source == to:
            return
        memory, self.runs[to] = self.memory, self.runs[source]
        self.runs[to].row = to
        for array in memory.tensors.values():
            array[to] = array[source]
        memory.positions[to] = memory.positions[source]
        memory.part(to, to + 1).unsure = memory.part(source, source + 1).unsure
        self.moved += 1

    def _exchange(self, one: int, other: int) -> None:
        if one == other:
            return
        memory = self.memory
        runs = self.runs
        for array in (memory.positions, *memory.tensors.values()):
            kept = np.array(array[one])
            array[one] = array[other]
            array[other] = kept
        parts = memory.part(one, one + 1), memory.part(other, other + 1)
        parts[0].unsure, parts[1].unsure = parts[1].unsure, parts[0].unsure
        runs[one], runs[other] = runs[other], runs[one]
        runs[one].row = one
        runs[other].row = other
        self.moved += 2
