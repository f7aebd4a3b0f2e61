"""Schedules of what a caller may do to streams: every row must get what its text gets alone.

The test matrix runs short schedules over every kind of session, and `make soak` runs long ones.
"""

from __future__ import annotations

import copy
import pickle
import random
import threading
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtimes import Memory, Session, load_memory, save_memory
from runtimes.base.errors import StreamError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.checks import last_fed

MOST_ROWS = 3
VERBS = ("step", "predict", "score")
# Operations by how often they come in a random schedule.
WEIGHTS = {
    "step": 40,
    "repeat": 12,
    "restart": 10,
    "pad": 10,
    "part": 8,
    "copy": 6,
    "fork": 6,
    "permute": 6,
    "arrive": 4,
    "leave": 4,
    "rewind": 4,
    "threads": 3,
    "spoil": 3,
}
# Every operation at least once, with enough tokens between them to fill the memory several times.
DENSE = [
    *("step", "pad", "step", "arrive", "step", "repeat", "fork", "step", "step", "rewind", "step", "copy"),
    *("part", "part", "step", "permute", "step", "repeat", "restart", "step", "part", "step", "copy"),
    *("leave", "repeat", "threads", "step", "spoil", "arrive", "step", "step", "copy", "repeat", "step"),
]


@dataclass
class Schedule:
    """A running batch of streams, and the memory of each row's text alone."""

    sessions: Sequence[Session]
    """Sessions of one identity: a memory may pass from one to another at every step."""
    reference: Session
    """The session to which each row is fed alone."""
    random: random.Random
    folder: Path
    """Where streams are saved."""
    by_row: bool = True
    """Whether the sessions accept a length for each row."""
    pads: bool = False
    """Whether the sessions pad segments themselves. At the end of a ring they feed tokens again, which a copy
    does not know, so it continues to slightly other numbers.
    """
    tolerance: float = 1e-4
    """In nats."""
    memory: Memory = field(init=False)
    alone: list[Memory | None] = field(init=False)
    """The reference's memory of each row; None while the row holds NaN."""
    earlier: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """What the last step was given and said, and copies: no later step may change it."""
    counts: Counter[str] = field(default_factory=Counter)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=30))
    worst: float = 0.0

    def __post_init__(self) -> None:
        session = self.sessions[0]
        self.on_device = session.computed_by.startswith(("TensorRT", "ONNX Runtime, CUDA"))
        self.is_ring = session.spec is not None and session.spec.form == "ring"
        # Under the full mask a text depends on where its segments begin, so it is padded alone too.
        self.pads_alone = self.reference.rule.mask == "full"
        self.memory = session.start(2)
        self.alone = [self.reference.start(1) for _ in range(2)]

    def run(self, operations: Iterable[str]) -> None:
        """An AssertionError names the last operations. Operations that the sessions lack are left out."""
        lacking = {"part"} if self.on_device else set[str]()
        lacking |= set() if self.is_ring else {"rewind"}
        for name in operations:
            if name in lacking:
                continue
            self.counts[name] += 1
            self.last.append(f"{name} at {self.memory.positions.tolist()}")
            try:
                getattr(self, name)()
            except Exception as error:
                session, lines = self.sessions[0], "\n  ".join(self.last)
                raise AssertionError(
                    f"{session.computed_by}, {session.rule}: {type(error).__name__}: {error}\n"
                    f"the last operations:\n  {lines}"
                ) from error

    def choose(self, count: int) -> list[str]:
        """Names of random operations."""
        return self.random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)

    # What a caller may do

    def step(self) -> None:
        tokens = self.tokens()
        self.feed(self.random.choice(VERBS), tokens, self.lengths(tokens), self.session)

    def repeat(self) -> None:
        """Several steps of one kind: runtimes keep buffers, bindings and graphs for them."""
        verb, session = self.random.choice(VERBS), self.session
        tokens = self.tokens(4)
        alone = None
        rule = self.reference.rule
        exact = self.tolerance <= 1e-4  # numbers of few bits are rounded by where a text is cut
        if exact and rule.mask != "full" and rule.segment >= 4:  # all four tokens at once, which is faster
            alone = self.expected(tokens, None, self.memory.positions)
        for at in range(4):
            part = slice(at, at + 1)
            self.feed(verb, tokens[:, part], None, session, None if alone is None else alone[:, part])

    def restart(self) -> None:
        self.begin(0)

    def pad(self) -> None:
        self.begin(-self.random.randint(1, 2 * self.reference.rule.segment + 3))

    def begin(self, position: int) -> None:
        """A new text in a row; before position 0 is padding."""
        row = self.row()
        self.last[-1] += f": row {row} begins at {position}"
        self.memory.positions[row] = position
        self.alone[row] = alone = self.reference.start(1)
        if self.pads_alone:
            alone.positions[:] = position

    def arrive(self) -> None:
        if self.memory.batch < MOST_ROWS:
            self.memory = self.memory.join(self.session.start(1))
            self.alone.append(self.reference.start(1))
        if self.memory.batch < MOST_ROWS:  # a row is saved, and continues in a row of its own too
            row = self.row()
            self.memory = self.memory.join(self.memory.select([row]))
            self.alone.append(_copy(self.alone[row]))

    def leave(self) -> None:
        if self.memory.batch > 1:
            left = self.row()
            rows = [row for row in reversed(range(self.memory.batch)) if row != left]
            self.memory = self.memory.select(rows)
            self.alone = [self.alone[row] for row in rows]

    def fork(self) -> None:
        """A row continues in the place of another one too."""
        source, target, arrays = self.row(), self.row(), dict(self.memory.tensors)
        self.memory.replace([target], self.memory.select([source]))
        self.alone[target] = _copy(self.alone[source])
        assert self.on_device or all(self.memory.tensors[name] is array for name, array in arrays.items())

    def permute(self) -> None:
        """The caller rearranges the arrays: rows change places, vanish, or are there several times."""
        memory, batch = self.memory, self.memory.batch
        order = self.random.choices(range(batch), k=self.random.choice((batch, MOST_ROWS)))
        self.last[-1] += f": rows {order}"
        tensors = {name: np.asarray(array)[order] for name, array in memory.tensors.items()}
        how = self.random.choice(("in place", "exchanged", "a new memory"))
        if how == "in place" and len(order) == batch and not self.on_device:
            memory.positions[:] = memory.positions[order]
            for name, array in tensors.items():
                memory.tensors[name][:] = array
        elif how == "exchanged":
            memory.positions = memory.positions[order]
            memory.tensors.update(tensors)
        else:
            self.memory = Memory(memory.positions[order], tensors, memory.owner)
        self.alone = [_copy(self.alone[row]) for row in order]

    def copy(self) -> None:
        """A copy continues as its original does; the streams go on with it."""
        how = self.random.choice((Memory.copy, copy.deepcopy, _pickled, self.saved))
        self.last[-1] += f": {how.__name__}"
        twin = how(self.memory)
        if twin is None:
            return
        session, tokens = self.session, self.tokens()
        said = self.feed("step", tokens, None, session)
        again, _ = session.step(tokens, twin)
        if self.pads:
            self.compare(again, np.where(np.isfinite(said), said, np.nan))
        else:
            assert np.array_equal(said, again, equal_nan=True), "a copy continues to other bits"
        self.memory = twin

    def saved(self, memory: Memory) -> Memory | None:
        """The memory after it was written to a file; None if it is refused, because a row holds NaN."""
        file, begun = self.folder / "streams", memory.positions > 0
        finite = all(np.isfinite(np.asarray(array)[begun]).all() for array in memory.tensors.values())
        if finite:
            save_memory(memory, file)
            return load_memory(file, self.session)
        with pytest.raises(StreamError, match="not finite"):
            save_memory(memory, file)
        return None

    def rewind(self) -> None:
        """The tokens of one segment are taken back: a ring still holds what they saw."""
        kept = [_copy(alone) for alone in self.alone]
        tokens = self.tokens()
        self.feed("step", tokens, None, self.session)
        self.memory.positions -= tokens.shape[1]
        self.alone = kept

    def part(self) -> None:
        """Some rows are stepped in place; the others keep every bit."""
        first, last = sorted(self.random.sample(range(self.memory.batch + 1), 2))
        whole, alone, arrays = self.memory, self.alone, dict(self.memory.tensors)
        before = _bits(whole)
        self.memory, self.alone = whole.part(first, last), alone[first:last]
        try:
            self.step()
        finally:
            self.memory, self.alone = whole, alone
        after = _bits(whole)
        assert all(before[row] == after[row] for row in range(len(alone)) if not first <= row < last)
        assert all(whole.tensors[name] is array for name, array in arrays.items())

    def spoil(self) -> None:
        """A row's text overflows: the next step reads NaN, until the row starts again."""
        row, wrong = self.row(), self.random.choice((np.nan, np.inf))
        self.last[-1] += f": row {row}"
        if self.memory.positions[row] <= 0:
            return  # the row has just started again, and nothing has overflowed yet
        for name, array in self.memory.tensors.items():
            if array.dtype.kind == "f":  # int8 memory has scales, which are floats
                self.memory.tensors[name] = spoiled = np.array(array)
                spoiled[row] = wrong
        self.alone[row] = None
        tokens = self.tokens()
        lengths = self.lengths(tokens)
        if lengths is not None:
            lengths[row] = max(1, lengths[row])  # a row without tokens would not show it
        self.feed(self.random.choice(VERBS), tokens, lengths, self.session)
        if self.random.random() < 0.7:
            self.memory.positions[row] = 0
            self.alone[row] = self.reference.start(1)
            self.step()

    def threads(self) -> None:
        """Two threads step one memory at the same moment: each is right, or refused."""
        tokens, session, before = self.tokens(), self.session, self.memory.positions.copy()
        answers: list[Any] = []
        barrier = threading.Barrier(2)

        def work() -> None:
            barrier.wait()
            try:
                answers.append(session.step(tokens, self.memory)[0])
            except Exception as error:
                answers.append(error)

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        taken = [answer for answer in answers if isinstance(answer, np.ndarray)]
        refused = [answer for answer in answers if not isinstance(answer, np.ndarray)]
        assert taken, f"both threads were refused: {answers}"
        assert all("another thread" in str(error) for error in refused), refused
        expected = [self.expected(tokens, None, before + at * tokens.shape[1]) for at in range(len(taken))]
        if len(taken) == 2 and _distance(_log_probs(taken[0]), expected[0]) > self.tolerance:
            taken.reverse()
        for said, alone in zip(taken, expected, strict=True):
            self.compare(_log_probs(said), alone)
        assert np.array_equal(self.memory.positions, before + len(taken) * tokens.shape[1])

    # How it is done, and what must come out

    @property
    def session(self) -> Session:
        return self.random.choice(self.sessions)

    def row(self) -> int:
        return self.random.randrange(self.memory.batch)

    def tokens(self, length: int | None = None) -> np.ndarray:
        segment = self.reference.rule.segment
        length = length or self.random.choice((segment, self.random.randint(1, segment)))
        draw = np.random.default_rng(self.random.getrandbits(32))
        return draw.integers(0, self.reference.vocab.size, (self.memory.batch, length))

    def lengths(self, tokens: np.ndarray) -> np.ndarray | None:
        """A length for each row in most of the steps."""
        if not self.by_row or self.random.random() < 0.4:
            return None
        return np.array([self.random.randint(0, tokens.shape[1]) for _ in tokens])

    def feed(
        self,
        verb: str,
        tokens: np.ndarray,
        lengths: np.ndarray | None,
        session: Session,
        alone: np.ndarray | None = None,
    ) -> np.ndarray:
        """One step, compared with each row alone; what the session said. alone: as from `expected`."""
        memory, positions = self.memory, self.memory.positions.copy()
        self.last[-1] += f": {verb} of {tokens.shape[1]} with {session.kernel}"
        self.last[-1] += "" if lengths is None else f", lengths {lengths.tolist()}"
        if alone is None:
            alone = self.expected(tokens, lengths, positions)
        padding = np.arange(tokens.shape[1]) >= (tokens.shape[1] if lengths is None else lengths[:, None])
        padding = np.broadcast_to(padding, tokens.shape)
        targets = np.where(padding, -1, np.roll(tokens, 1, axis=1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # what NumPy says of NaN
            if verb == "score":
                if tokens.shape[1] > 1:
                    targets[:, self.random.randrange(tokens.shape[1])] = -1
                said, after = session.score(tokens, targets, memory, lengths=lengths)
                assert (said[padding] == 0).all()
                chosen = np.take_along_axis(alone, np.maximum(targets, 0)[..., None], axis=-1)[..., 0]
                self.compare(said, np.where((targets < 0) & ~np.isnan(chosen), 0, chosen))
            elif verb == "predict":
                said, after = session.predict(tokens, memory, lengths=lengths)
                assert np.isnan(said[padding.all(axis=1)]).all()
                self.compare(_log_probs(said), alone[np.arange(len(alone)), last_fed(lengths, tokens)])
            else:
                said, after = session.step(tokens, memory, lengths=lengths)
                assert np.isnan(said[padding]).all()
                self.compare(_log_probs(said), alone)
        assert said.dtype == np.float32
        assert after is memory
        fed = tokens.shape[1] if lengths is None else lengths
        assert np.array_equal(memory.positions, positions + fed)
        assert all(np.array_equal(array, before, equal_nan=True) for array, before in self.earlier)
        self.earlier = [(array, array.copy()) for array in (tokens, targets, said)]
        return said

    def expected(self, tokens: np.ndarray, lengths: np.ndarray | None, positions: np.ndarray) -> np.ndarray:
        """Log-probabilities [B, T, V] of each row's tokens after its own text alone; NaN for padding."""
        found = np.full((*tokens.shape, self.reference.vocab.size), np.nan)
        for row, alone in enumerate(self.alone):
            begin = int(np.clip(-positions[row], 0, tokens.shape[1]))
            at = 0 if self.pads_alone else begin
            text = tokens[row, at : None if lengths is None else lengths[row]]
            if alone is None:
                continue
            for piece in self.cut(text):
                logits, _ = self.reference.step(piece[None], alone)
                found[row, at : at + len(piece)] = _log_probs(logits[0])
                at += len(piece)
            found[row, :begin] = np.nan
        return found

    def cut(self, text: np.ndarray) -> list[np.ndarray]:
        """The text in one piece or two, where cutting changes no score."""
        if len(text) < 2 or self.reference.rule.mask == "full" or self.random.random() < 0.8:
            return [text] if len(text) else []
        at = self.random.randrange(1, len(text))
        return [text[:at], text[at:]]

    def compare(self, said: np.ndarray, alone: np.ndarray) -> None:
        wanted = ~np.isnan(alone)
        difference = np.abs(said - alone)
        wrong = wanted & ~(difference <= self.tolerance)
        rows = sorted({int(row) for row in np.argwhere(wrong)[:, 0]})
        assert not rows, f"rows {rows} differ from their text alone by {difference[wrong].max()} nats"
        self.worst = max(self.worst, float(difference[wanted].max(initial=0)))


def _pickled(memory: Memory) -> Memory:
    found: Memory = pickle.loads(pickle.dumps(memory))
    return found


def _copy(memory: Memory | None) -> Memory | None:
    return None if memory is None else memory.copy()


def _bits(memory: Memory) -> list[list[bytes]]:
    """The bits of each row."""
    arrays = [memory.positions, *memory.tensors.values()]
    return [[np.asarray(array)[row].tobytes() for array in arrays] for row in range(memory.batch)]


def _distance(said: np.ndarray, alone: np.ndarray) -> float:
    return float(np.abs(said - alone)[~np.isnan(alone)].max(initial=0))


def _log_probs(logits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        result: np.ndarray = logits - log_sum_exp(logits)[..., None]
    return result
