"""A random schedule of everything that a caller may do to streams, each row compared with its text alone."""

from __future__ import annotations

import copy
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtimes import Memory, Session, load_memory, save_memory
from runtimes.base.errors import StreamError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.checks import last_fed
from trainer.run.session import TorchSession

MOST_STREAMS, MOST_ROWS = 3, 5
# Saves memories of one repeated number to a file, again and again, until it is killed.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from runtimes.base.tensors_file import read_tensors
from runtimes.contract.memory import Memory, save_memory

arrays, facts = read_tensors(Path(sys.argv[1]))
owner, number = facts["owner"], 0
while True:
    number += 1
    whole = {name: np.full(old.shape, number % 1000, old.dtype) for name, old in arrays.items()}
    save_memory(Memory(whole.pop("positions"), whole, owner), sys.argv[1])
    if number == 1:
        print("writing", flush=True)
"""


@dataclass
class Row:
    """One row of a batch. alone: the same text fed alone to the reference; None while the row holds NaN."""

    alone: Memory | None

    def copy(self) -> Row:
        return Row(None if self.alone is None else self.alone.copy())


@dataclass
class Streams:
    memory: Memory
    rows: list[Row]


@dataclass
class Schedule:
    """Random operations on streams of one artefact.

    sessions: of one identity, so that a memory may go from one to the other at every step. reference: the
    session to which each row is fed alone. tolerance: in nats.
    """

    sessions: Sequence[Session]
    reference: Session
    random: random.Random
    folder: Path
    tolerance: float = 1e-4
    live: list[Streams] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    worst: float = 0.0

    def run(self, operations: int) -> None:
        """That many operations; an AssertionError names the last ones."""
        kinds: dict[Callable[[Streams], None], int] = {
            self.step: 60,
            self.restart: 12,
            self.pad: 10,
            self.permute: 6,
            self.save: 4,
            self.fork: 4,
            self.spoil: 3,
            self.threads: 4,
        }
        self.live = [self.fresh()]
        for _ in range(operations):
            (operation,) = self.random.choices(list(kinds), list(kinds.values()))
            self.perform(operation, self.random.choice(self.live))

    def perform(self, operation: Callable[[Streams], None], streams: Streams) -> None:
        self.counts[operation.__name__] += 1
        self.last.append(f"{operation.__name__} at {streams.memory.positions.tolist()}")
        try:
            operation(streams)
        except Exception as error:
            lines = "\n  ".join(self.last)
            raise AssertionError(
                f"{type(error).__name__}: {error}\nthe last operations:\n  {lines}"
            ) from error

    def fresh(self) -> Streams:
        batch = self.random.randint(1, MOST_ROWS)
        return Streams(self.session.start(batch), [Row(self.reference.start(1)) for _ in range(batch)])

    @property
    def session(self) -> Session:
        return self.random.choice(self.sessions)

    def tokens(self, streams: Streams) -> np.ndarray:
        draw = np.random.default_rng(self.random.getrandbits(32))
        length = self.random.randint(1, self.reference.rule.segment)
        return draw.integers(0, self.reference.vocab.size, (streams.memory.batch, length))

    # What a caller may do

    def step(self, streams: Streams, *, of_lengths: bool = True) -> None:
        tokens, positions = self.tokens(streams), streams.memory.positions.copy()
        what, session = self.random.choice(("step", "predict", "score")), self.session
        lengths = self.lengths(tokens) if of_lengths else None
        self.last[-1] += f": {what} of {tokens.shape[1]} with the operators {session.kernel}"
        self.last[-1] += "" if lengths is None else f", lengths {lengths.tolist()}"
        if what == "score":
            targets = np.roll(tokens, 1, axis=1)
            targets[:, self.random.randrange(tokens.shape[1])] = -1
            if lengths is not None:
                targets[np.arange(tokens.shape[1]) >= lengths[:, None]] = -1
            scores, _ = session.score(tokens, targets, streams.memory, lengths=lengths)
            alone = self.alone(streams, tokens, positions, lengths)
            chosen = np.take_along_axis(alone, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
            self.compare(scores, np.where(targets < 0, np.where(np.isnan(chosen), np.nan, 0), chosen))
        elif what == "predict":
            logits, _ = session.predict(tokens, streams.memory, lengths=lengths)
            alone = self.alone(streams, tokens, positions, lengths)
            self.compare(_log_probs(logits), alone[np.arange(len(alone)), last_fed(lengths, tokens)])
        else:
            logits, _ = session.step(tokens, streams.memory, lengths=lengths)
            self.compare(_log_probs(logits), self.alone(streams, tokens, positions, lengths))

    def lengths(self, tokens: np.ndarray) -> np.ndarray | None:
        """A length for each row in half of the steps, where the artefact takes them."""
        spec = self.session.spec
        assert isinstance(self.reference, TorchSession)
        from_end = self.reference.model.config.from_segment_end
        if spec is None or spec.form != "ring" or from_end or self.random.random() < 0.5:
            return None
        return np.array([self.random.randint(0, tokens.shape[1]) for _ in tokens])

    def restart(self, streams: Streams) -> None:
        self.begin(streams, 0)

    def pad(self, streams: Streams) -> None:
        self.begin(streams, -self.random.randint(1, 2 * self.reference.rule.segment + 3))

    def begin(self, streams: Streams, position: int) -> None:
        row = self.random.randrange(streams.memory.batch)
        self.last[-1] += f": row {row} begins at {position}"
        streams.memory.positions[row] = position
        streams.rows[row] = Row(self.reference.start(1))

    def permute(self, streams: Streams) -> None:
        """Rows change places, vanish, or are there several times, as in a beam search."""
        memory, batch = streams.memory, streams.memory.batch
        size = self.random.choice((batch, self.random.randint(1, MOST_ROWS)))
        order = self.random.choices(range(batch), k=size)
        if self.random.random() < 0.5:
            order = self.random.sample(range(batch), batch)
        self.last[-1] += f": rows {order}"
        positions = memory.positions[order]
        tensors = {name: array[order] for name, array in memory.tensors.items()}
        if len(order) == batch and self.random.random() < 0.5:
            memory.positions[:] = positions
            for name, array in tensors.items():
                memory.tensors[name][:] = array
        else:
            streams.memory = Memory(positions, tensors, memory.owner)
        streams.rows = [streams.rows[row].copy() for row in order]

    def fork(self, streams: Streams) -> None:
        how = self.random.choice(
            (Memory.copy, copy.deepcopy, lambda memory: pickle.loads(pickle.dumps(memory)))
        )
        fork = Streams(how(streams.memory), [row.copy() for row in streams.rows])
        self.live = [
            *self.random.sample(self.live, min(len(self.live), MOST_STREAMS - 2)),
            fork,
            self.fresh(),
        ]

    def save(self, streams: Streams) -> None:
        file = self.folder / "streams"
        begun = streams.memory.positions > 0
        finite = all(np.isfinite(array[begun]).all() for array in streams.memory.tensors.values())
        try:
            save_memory(streams.memory, file)
        except StreamError as error:  # a row that was spoiled, and has not started again
            if finite or "not finite" not in str(error):
                raise
            return
        assert finite, "a row with NaN was saved"
        streams.memory = load_memory(file, self.session)

    def spoil(self, streams: Streams) -> None:
        """A row's text overflows: the next step reads NaN in its memory, until the row starts again."""
        row = self.random.randrange(streams.memory.batch)
        self.last[-1] += f": row {row}"
        if streams.memory.positions[row] <= 0:
            return  # it may just have started again, and nothing has overflowed yet
        for array in streams.memory.tensors.values():
            array[row] = np.nan
        streams.rows[row].alone = None
        self.step(streams, of_lengths=False)  # a row of length 0 would not show it
        if self.random.random() < 0.7:
            streams.memory.positions[row], streams.rows[row] = 0, Row(self.reference.start(1))
            self.step(streams)

    def threads(self, streams: Streams) -> None:
        """Two threads step one memory at the same moment: each is refused, or right."""
        before, memory, session = streams.memory.copy(), streams.memory, self.session
        given = [self.tokens(streams) for _ in range(2)]
        answers: list[Any] = [None, None]
        barrier = threading.Barrier(2)

        def work(number: int) -> None:
            barrier.wait()
            try:
                answers[number] = session.step(given[number], memory)[0]
            except Exception as error:
                answers[number] = error

        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, StreamError):
                raise answer
        taken = [number for number in range(2) if isinstance(answers[number], np.ndarray)]
        self.last[-1] += f": {len(taken)} taken"
        self.counts["refused"] += 2 - len(taken)
        assert taken, f"both threads were refused: {answers}"
        if len(taken) == 2:
            taken = self.order(session, before, given, answers)
        for number in taken:
            alone = self.alone(streams, given[number], before.positions)
            self.compare(_log_probs(answers[number]), alone)
            before.positions += given[number].shape[1]
        assert np.array_equal(memory.positions, before.positions)

    def order(
        self, session: Session, before: Memory, given: list[np.ndarray], answers: list[Any]
    ) -> list[int]:
        """In which order two steps came that were both taken."""
        for order in ([0, 1], [1, 0]):
            memory = before.copy()
            again = [session.step(given[number], memory)[0] for number in order]
            if all(
                np.nanmax(np.abs(one - answers[number]), initial=0) < self.tolerance
                for one, number in zip(again, order, strict=True)
            ):
                return order
        raise AssertionError(
            "two threads were answered, and neither order of their steps gives these answers"
        )

    def kill(self, streams: Streams) -> None:
        """A child that saves streams is killed: the file is whole, and the next save removes the rest."""
        file = self.folder / "killed"
        save_memory(self.fresh().memory, file)
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "writing\n"
            time.sleep(self.random.random() * 0.05)
            child.kill()
            assert child.wait() == -signal.SIGKILL
        memory = load_memory(file, self.session)
        number = memory.positions[0]
        for array in (memory.positions, *memory.tensors.values()):
            assert (array == number).all(), "the file mixes two memories"
        save_memory(self.fresh().memory, file)  # the stream's own memory may hold a spoiled row
        left = [path.name for path in self.folder.iterdir() if path.name.startswith(".")]
        assert not left, f"hidden files are left: {left}"

    # What must come out

    def alone(
        self,
        streams: Streams,
        tokens: np.ndarray,
        positions: np.ndarray,
        lengths: np.ndarray | None = None,
    ) -> np.ndarray:
        """Log-probabilities [B, T, V] of each row's tokens after its own text alone; NaN for padding."""
        said = np.full((*tokens.shape, self.reference.vocab.size), np.nan)
        for index, row in enumerate(streams.rows):
            at = int(np.clip(-positions[index], 0, tokens.shape[1]))
            if row.alone is None:
                continue
            for part in self.cut(tokens[index, at : None if lengths is None else lengths[index]]):
                logits, _ = self.reference.step(part[None], row.alone)
                said[index, at : at + len(part)] = _log_probs(logits)[0]
                at += len(part)
        return said

    def cut(self, text: np.ndarray) -> list[np.ndarray]:
        """The text in one piece or two, where cutting changes no score."""
        if len(text) == 0:
            return []
        if self.reference.rule.mask == "full" or len(text) == 1 or self.random.random() < 0.7:
            return [text]
        at = self.random.randrange(1, len(text))
        return [text[:at], text[at:]]

    def compare(self, said: np.ndarray, alone: np.ndarray) -> None:
        wanted = ~np.isnan(alone)
        if not wanted.any():
            return
        differences = np.abs(said - alone)[wanted]
        self.worst = max(self.worst, float(differences.max()))
        rows = sorted(
            {int(row) for row in np.argwhere(~(np.abs(said - alone) < self.tolerance) & wanted)[:, 0]}
        )
        assert not rows, f"rows {rows} differ from their text alone by {differences.max()} nats"


def _log_probs(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        result: np.ndarray = logits - log_sum_exp(logits)[..., None]
    return result
