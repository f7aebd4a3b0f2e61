"""Schedules of live streams: rows arrive, stop, start again, leave, are forked and replaced.

Each row is fed alone to a reference as well, and must get the same answers there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from runtimes import Memory, Session
from runtimes.base.logits import log_sum_exp

MOST_ROWS = 6
Operation = tuple[Any, ...]

# Numbers are taken modulo what there is: rows, tokens of a segment. So every list is a schedule.
numbers = st.integers(0, 999)
steps = st.tuples(
    st.just("step"), st.sampled_from(["step", "predict", "score"]), numbers, st.lists(numbers, min_size=1)
)
operations = st.one_of(
    steps,
    steps,
    steps,
    st.tuples(st.just("restart"), numbers),
    st.tuples(st.just("pad"), numbers, numbers),
    st.tuples(st.just("arrive"), numbers),
    st.tuples(st.just("leave"), numbers),
    st.tuples(st.just("fork"), numbers, numbers),
    st.tuples(st.just("split"), numbers),
)
schedules = st.lists(operations, min_size=6, max_size=14)
# Rows of every length step after step, idle ones among them, beyond the memory of the tests' models; with
# every other operation once. Random schedules of this size often feed too little.
DENSE: list[Operation] = [
    ("pad", 1, 5),
    ("arrive", 1),
    *(
        ("step", verb, 7, [at, 999, 3 * at + 1, 0])
        for at, verb in enumerate(["predict", "step", "score"] * 2)
    ),
    ("fork", 0, 3),
    *(("step", "step", 4 + at, [2, at, 1, 5]) for at in range(4)),
    ("split", 1),
    ("restart", 2),
    *(("step", "step", 7, [1, 2, 7, 0, 8, at]) for at in range(4)),
    ("leave", 0),
    *(("step", verb, 6, [at, 3, 0, 5]) for at, verb in enumerate(["score", "predict", "step"])),
]


def check_schedules(session: Session, reference: Session, examples: int) -> None:
    """Puts a session through the dense schedule and through random ones."""

    @settings(
        max_examples=examples,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],  # to find a smaller schedule takes minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(schedule=schedules, seed=numbers)
    @example(schedule=DENSE, seed=0)
    def check(schedule: list[Operation], seed: int) -> None:
        Live.begin(session, reference, seed).run(schedule)

    check()


@dataclass
class Live:
    """A running batch of one session, and the memory of each row's text in a batch of its own."""

    session: Session
    reference: Session
    memory: Memory
    alone: list[Memory]
    draw: np.random.Generator
    worst: float = 0.0

    @classmethod
    def begin(cls, session: Session, reference: Session, seed: int) -> Live:
        alone = [reference.start(1) for _ in range(2)]
        return cls(session, reference, session.start(2), alone, np.random.default_rng(seed))

    def run(self, schedule: list[Operation], tolerance: float = 1e-4) -> None:
        for operation, *arguments in schedule:
            getattr(self, operation)(*arguments)
            assert self.memory.positions.tolist() == [int(memory.positions[0]) for memory in self.alone]
        assert self.worst < tolerance

    def step(self, verb: str, most: int, given: list[int]) -> None:
        """One verb with a length for each row; what comes out is compared where a row was fed."""
        batch, segment = self.memory.batch, 1 + most % self.session.rule.segment
        tokens = self.draw.integers(0, self.session.vocab.size, (batch, segment))
        lengths = np.array([given[row % len(given)] % (segment + 1) for row in range(batch)])
        begins = np.maximum(-self.memory.positions, 0)  # before it stands padding on the left
        alone = [self.answers(row, tokens[row, :length]) for row, length in enumerate(lengths)]
        if verb == "score":
            targets = np.where(np.arange(segment) < lengths[:, None], np.roll(tokens, 1, axis=1), -1)
            scores, _ = self.session.score(tokens, targets, self.memory, lengths=lengths)
            assert (scores[targets < 0] == 0).all()
            for row, length in enumerate(lengths):
                at = np.arange(begins[row], max(length, begins[row]))
                self.compare(scores[row, at], alone[row][at, targets[row, at]])
            return
        if verb == "predict":
            said, _ = self.session.predict(tokens, self.memory, lengths=lengths)
            assert np.isnan(said[lengths == 0]).all()
            for row in np.flatnonzero(lengths > begins):
                self.compare(_log_probs(said[row]), alone[row][-1])
            return
        said, _ = self.session.step(tokens, self.memory, lengths=lengths)
        for row, length in enumerate(lengths):
            assert np.isnan(said[row, length:]).all()
            self.compare(_log_probs(said[row, begins[row] : length]), alone[row][begins[row] :])

    def answers(self, row: int, tokens: np.ndarray) -> np.ndarray:
        """What the row's text gets alone: log-probabilities [n, V]."""
        if not len(tokens):
            return np.zeros((0, self.session.vocab.size), np.float32)
        logits, _ = self.reference.step(tokens[None], self.alone[row])
        return _log_probs(logits[0])

    def restart(self, row: int) -> None:
        self.pad(row, 0)

    def pad(self, row: int, count: int) -> None:
        """A new text in a row, behind some padding on the left."""
        row %= self.memory.batch
        self.memory.positions[row] = -(count % (2 * self.session.rule.segment))
        self.alone[row] = self.reference.start(1)
        self.alone[row].positions[:] = self.memory.positions[row]

    def arrive(self, count: int) -> None:
        count = min(1 + count % 2, MOST_ROWS - self.memory.batch)
        if count:
            self.memory = self.memory.join(self.session.start(count))
            self.alone += [self.reference.start(1) for _ in range(count)]

    def leave(self, row: int) -> None:
        if self.memory.batch > 1:
            rows = [other for other in range(self.memory.batch) if other != row % self.memory.batch]
            self.memory, self.alone = self.memory.select(rows[::-1]), [self.alone[row] for row in rows[::-1]]

    def fork(self, source: int, target: int) -> None:
        """A row continues twice: in the place of another one, without a new memory."""
        source, target = source % self.memory.batch, target % self.memory.batch
        self.memory.replace([target], self.memory.select([source]))
        self.alone[target] = self.alone[source].copy()

    def split(self, row: int) -> None:
        """A row is taken out and comes back in the last place, twice."""
        row %= self.memory.batch
        if self.memory.batch < MOST_ROWS:
            self.memory = self.memory.join(self.memory.select([row]))
            self.alone.append(self.alone[row].copy())

    def compare(self, said: np.ndarray, alone: np.ndarray) -> None:
        if said.size:
            self.worst = max(self.worst, float(np.nan_to_num(np.abs(said - alone), nan=np.inf).max()))


def _log_probs(logits: np.ndarray) -> np.ndarray:
    result: np.ndarray = logits - log_sum_exp(logits)[..., None] if logits.size else logits
    return result
