"""What an engine knows of its tasks from their submission to their end: those that wait for a row, and the
rows of the others.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from runtimes.contract.memory import DeviceTensor, Memory
from runtimes.contract.session import Session
from runtimes.contract.vocabulary.growing_text import GrowingText, border_of
from runtimes.tasks.sample import Penalties, numbers
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Reason, Task

PRIMED = 64  # tokens before a text that its decoder is given; what a token adds depends on fewer


class Running:
    """A task on its way. The thread that submits the task makes it, and then the engine's thread has it."""

    def __init__(self, task: Task, session: Session) -> None:
        state = task.state
        self.task = task
        #: When it was submitted, by the monotonic clock.
        self.arrived = time.monotonic()
        #: The iterations in which it came, got its row, and was fed a piece.
        self.order = 0
        self.since = 0
        self.last_piece = 0
        #: Its row; -1 without one.
        self.row = -1
        #: The memory of its stream, if it gave up a row or has not had one yet.
        self.memory: Memory | None = None if state is None else state.memory
        #: Whether its memory is a copy of a row that it gave up.
        self.copied = False
        #: Of its prefixes in the cache; empty if it does not use that.
        self.keys: list[bytes] = []
        #: How many of the task's tokens were fed.
        self.fed = 0
        #: As in `StreamState`, of the pieces; drawn tokens are written without padding.
        self.written = 0 if state is None else state.written
        #: float32 [V] after the last fed token, if they are known and may still be wanted.
        self.logits: np.ndarray | None = None if state is None else state.logits
        #: log p of the next token, if a step has computed it already.
        self.known: float | None = None
        #: The last drawn tokens; all were fed but the very last, `token`, while `pending`.
        self.drawn: deque[int] = deque(maxlen=session.rule.segment + 2)
        #: How many tokens were drawn.
        self.count = 0
        self.token = 0
        self.pending = False
        #: Of its logits, from its first draw on, if there are any.
        self.penalties: Penalties | None = None
        #: Draws the next random number.
        self.uniform: Callable[[], float]
        self.text: GrowingText | None = None
        #: Answers of this iteration.
        self.answers: list[Answer] = []
        #: Of the fed tokens, how many were found in the cache, and how many are in no answer yet.
        self.cached = 0
        self.unreported = 0
        #: Answers that were delivered.
        self.sent = 0
        #: Answers that the client has accepted; another thread writes this.
        self.taken = 0
        #: Whether it waits for its client to accept answers.
        self.paused = False
        #: Why the task ends, once its last token is fed.
        self.closing: Reason | None = None
        #: Whether its `Ended` was emitted.
        self.ended = False
        if task.sampling is not None:
            sampling = task.sampling
            decoder = session.vocab.decoder()
            before = task.tokens if state is None else np.concatenate([state.tail, task.tokens])
            decoder.prime(before[-PRIMED:].tolist())
            border = border_of(session.vocab)
            self.text = GrowingText(decoder, sampling.stop, border, goes_on=task.keep)
            self.uniform = numbers(sampling.seed, sampling.index).__next__

    @property
    def prompt_left(self) -> int:
        """How many of the task's tokens are still to be fed."""
        return len(self.task.tokens) - self.fed

    def tail(self, longest: int) -> np.ndarray:
        """The ids of the last fed tokens of the stream, at most so many, the newest last."""
        drawn = list(self.drawn)[: -1 if self.pending else None]
        fed = [self.task.tokens[: self.fed][-longest:], np.array(drawn, np.int64)]
        if self.task.state is not None:
            fed.insert(0, self.task.state.tail)
        return np.concatenate(fed)[-longest:].astype(np.int64, copy=False)

    def state(self, memory: Memory, *, segment: int) -> StreamState:
        """The stream after all fed tokens, in a memory that the state owns from now on."""
        logits = None if self.logits is None else np.array(self.logits, np.float32)
        written = max(self.written, int(memory.positions[0]))
        return StreamState(memory=memory, logits=logits, tail=self.tail(segment + 1), written=written)


class Queue:
    """The runs that wait for a row. The API keys take turns: the next row goes to the one that has waited for
    its turn the longest.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Running]] = OrderedDict()  # by owner, the next turn first
        #: How many runs wait.
        self.count = 0

    def add(self, run: Running, *, first: bool = False) -> None:
        """Puts a run at the end of its owner's runs, or in front of them."""
        runs = self._waiting.setdefault(run.task.owner, deque())
        (runs.appendleft if first else runs.append)(run)
        self.count += 1

    def remove(self, run: Running) -> None:
        """Takes out a run."""
        runs = self._waiting[run.task.owner]
        runs.remove(run)
        if not runs:
            del self._waiting[run.task.owner]
        self.count -= 1

    def next(self) -> Running:
        """Takes out the run that gets the next row; the queue must not be empty."""
        owner, runs = self._waiting.popitem(last=False)
        run = runs.popleft()
        if runs:
            self._waiting[owner] = runs
        self.count -= 1
        return run


class Rows(ABC):
    """The rows of an engine, and the runs that use them, in the order decoding | prompts. Only the thread of
    the engine uses them.
    """

    #: Whether only neighbouring rows can be stepped together.
    neighbours: ClassVar[bool]

    def __init__(self, session: Session, count: int) -> None:
        self._session = session
        self._count = count
        #: The run of each used row, the decoding ones first.
        self.runs: list[Running] = []
        #: How many of them decode.
        self.decoding = 0

    @property
    def free(self) -> int:
        """How many rows are free."""
        return self._count - len(self.runs)

    def admit(self, run: Running, memory: Memory | None) -> None:
        """Gives a run the first free row, with a copy of a memory of one row, or for a new stream."""
        run.row = len(self.runs)
        try:
            self._begin(run, memory)
        except BaseException:  # such as no memory for it
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
            self._exchange(to, source)
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
        """The memory of some rows, which one step advances. It costs nothing for those of the last step."""

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
        """Puts a copy of a memory of one row, or a new stream, into the row of a run."""

    @abstractmethod
    def _exchange(self, one: int, other: int) -> None:
        """Exchanges what two rows hold."""


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
        row = run.row
        if memory is None:
            self.memory.positions[row] = 0
            return
        for name, array in self.memory.tensors.items():
            array[row] = memory.tensors[name][0]
        self.memory.positions[row] = memory.positions[0]
        self.memory.part(row, row + 1).unsure = memory.unsure

    def _exchange(self, one: int, other: int) -> None:
        self.memory.replace([one, other], self.memory.select([other, one]))

    def _move(self, source: int, to: int) -> None:
        if source != to:  # nobody needs the row that is written over
            self.memory.replace([to], self.memory.select([source]))
            self.runs[to] = self.runs[source]
            self.runs[to].row = to


class JoinedRows(Rows):
    """Rows that are joined to one memory for a step: for memory that is no ring, and memory on a device.

    Rows stay joined until other rows are stepped with one of them. So nothing is copied while the same
    streams advance.
    """

    neighbours = False

    def __init__(self, session: Session, count: int) -> None:
        super().__init__(session, count)
        # The memory that has the row of each run, and the place of the row in it.
        self._places: dict[Running, tuple[Memory, int]] = {}

    def trial(self, batch: int) -> Memory:
        return self._session.start(batch)

    def part(self, runs: Sequence[Running]) -> Memory:
        places = [self._places[run] for run in runs]
        memory = places[0][0]
        are_all = len(runs) == memory.batch
        if are_all and all(own is memory and at == place for at, (own, place) in enumerate(places)):
            return memory
        memory = joined(places)
        self._places.update((run, (memory, at)) for at, run in enumerate(runs))
        return memory

    def position(self, run: Running) -> int:
        memory, place = self._places[run]
        return int(memory.positions[place])

    def taken_out(self, run: Running) -> Memory:
        memory, place = self._places[run]
        return memory.select([place])

    def spoil(self, runs: Sequence[Running]) -> None:
        """Nothing: the memory of a run that has ended is not used again."""

    def release(self, run: Running) -> None:
        super().release(run)
        del self._places[run]

    def clear(self) -> None:
        super().clear()
        self._places.clear()

    def _begin(self, run: Running, memory: Memory | None) -> None:
        own = self._session.start(1) if memory is None else memory.copy()
        self._places[run] = own, 0

    def _exchange(self, one: int, other: int) -> None:
        """Nothing: the memory of a run does not depend on its row."""


def joined(places: Sequence[tuple[Memory, int]]) -> Memory:
    """A new memory with these rows of other memories."""
    groups: list[tuple[Memory, list[int]]] = []
    for memory, place in places:
        if groups and groups[-1][0] is memory:
            groups[-1][1].append(place)
        else:
            groups.append((memory, [place]))
    parts = [memory.select(chosen) for memory, chosen in groups]
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    # All at once: joining one after the other would copy the first rows again for each.
    tensors = {name: np.concatenate([part.tensors[name] for part in parts]) for name in first.tensors}
    whole = Memory(np.concatenate([part.positions for part in parts]), tensors, first.owner)
    whole.unsure = any(part.unsure for part in parts)
    return whole


def rows_of(session: Session, count: int) -> Rows:
    """The rows of an engine: in place if the session computes a ring where it is."""
    spec = session.spec
    if spec is None or (spec.circular and spec.lengths_fault is None):
        memory = session.start(1)
        session.predict(np.zeros((1, 1), np.int64), memory)
        if not any(isinstance(array, DeviceTensor) for array in memory.tensors.values()):
            return RowsInPlace(session, count)
    return JoinedRows(session, count)
