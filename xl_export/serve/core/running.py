"""What an engine knows of a task from its submission to its end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.vocabulary.growing_text import GrowingText, border_of
from runtimes.tasks.sample import Penalties
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Fed, Reason, Task

PRIMED = 64  # tokens before a text that its decoder is given; what a token adds depends on fewer
MOST_UNSAID = 8192  # fed tokens of which no answer has told yet


class Running:
    """A task on its way. It is made on the thread that submits the task, and then the engine's thread has it.

    row: its row, -1 where it has none. fed: how many of the task's tokens were fed. count: how many tokens
    were drawn. drawn: the last of them; all are fed but the very last, `token`, while `pending`. memory: of
    its stream, where it gave up a row or has not had one yet. logits: float32 [V] after the last fed token,
    where they are known and may still be wanted. known: log p of the next token, where a step has said it
    already. written: as in `StreamState`, of the pieces; drawn tokens are written without padding. answers:
    those of this iteration. unsaid: pieces that were fed and that no answer has told of. sent, taken: answers
    that were delivered, and those that the client has taken; the latter is written by another thread.
    closing: why the task ends, once its last token is fed. order, since, last_piece: the iterations in which
    it came, got its row, and was fed a piece. arrived: when it was submitted, by the monotonic clock. copied:
    where its memory is counted, if it is a copy of a row that it gave up. ended: whether its `Ended` was
    said. penalties: of its logits, from its first draw on, if there are any. uniform: draws the next random
    number. brings: whether the engine counts the bytes of the state of its task.
    """

    def __init__(self, task: Task, session: Session) -> None:
        self.task, self.arrived = task, time.monotonic()
        self.row, self.fed, self.order, self.since, self.last_piece = -1, 0, 0, 0, 0
        self.sent = self.taken = 0
        self.drawn: deque[int] = deque(maxlen=session.rule.segment + 2)
        self.count = 0
        self.token, self.pending, self.paused = 0, False, False
        self.copied: Copies | None = None
        self.ended = self.brings = False
        self.answers: list[Answer] = []
        self.unsaid: Fed | None = None
        self.closing: Reason | None = None
        self.account: Account
        state = task.state
        self.memory: Memory | None = None if state is None else state.memory
        self.logits: np.ndarray | None = None if state is None else state.logits
        self.known: float | None = None
        self.written = 0 if state is None else state.written
        self.text: GrowingText | None = None
        self.penalties: Penalties | None = None
        self.uniform: Callable[[], float]
        if task.drawing is not None:
            drawing = task.drawing
            decoder = session.vocab.decoder()
            before = task.tokens if state is None else np.concatenate([state.tail, task.tokens])
            decoder.prime(before[-PRIMED:].tolist())
            border = border_of(session.vocab)
            self.text = GrowingText(decoder, drawing.stop, border, goes_on=task.keep)
            self.uniform = np.random.default_rng([drawing.seed, drawing.index]).random

    @property
    def prompt_left(self) -> int:
        """How many of the task's tokens are still to be fed."""
        return len(self.task.tokens) - self.fed

    def add(self, answer: Answer) -> None:
        """Adds an answer to those of this iteration.

        Pieces of which only the length is known are kept back and added up: nobody waits for them, and each
        delivery wakes the event loop. They are added with the last piece of the prompt, with every
        `MOST_UNSAID` tokens, and before any other answer. So none is left when tokens are drawn.
        """
        unsaid, self.unsaid = self.unsaid, None
        if not isinstance(answer, Fed) or answer.log_probs is not None:
            self.answers += [answer] if unsaid is None else [unsaid, answer]
            return
        if unsaid is not None:
            answer = Fed(count=unsaid.count + answer.count, cached=unsaid.cached + answer.cached)
        if self.prompt_left and answer.count < MOST_UNSAID:
            self.unsaid = answer
        else:
            self.answers.append(answer)

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


@dataclass(eq=False)
class Account:
    """What one tenant has in an engine. served: its tokens, fed and drawn; a tenant that comes (back) begins
    with the smallest number of those that are there. tasks: that have not ended. rows: how many of them have
    one.
    """

    tenant: str
    served: float = 0.0
    tasks: int = 0
    rows: int = 0
    people: deque[Running] = field(default_factory=deque)
    bulk: deque[Running] = field(default_factory=deque)

    def queue(self, bulk: bool) -> deque[Running]:
        """The tasks that wait, the next one first."""
        return self.bulk if bulk else self.people


class Copies:
    """Counts the copies of rows that were given up for one reason, within a budget of bytes.

    One copy is always allowed. shared: whether one tenant with a name may have half of the budget only, so
    that it leaves room to others.
    """

    def __init__(self, row_bytes: int, most_bytes: int, *, shared: bool) -> None:
        self._most, self._shared = max(1, most_bytes // max(1, row_bytes)), shared  # 0 bytes: no memory
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._of.total()

    def has_room(self, tenant: str) -> bool:
        """Whether a copy of a row of this tenant may be kept."""
        most = max(1, self._most // 2) if self._shared and tenant else self._most
        return len(self) < self._most and self._of[tenant] < most

    def add(self, run: Running) -> None:
        """Counts the copy of a run's row, until `remove`."""
        self._of[run.task.tenant] += 1
        run.copied = self

    @staticmethod
    def remove(run: Running) -> None:
        """Notes that a run has no copy any more, if it had one."""
        if run.copied is not None:
            run.copied._of[run.task.tenant] -= 1
            run.copied._of += Counter()  # forgets tenants without a copy
            run.copied = None

    def clear(self) -> None:
        """Forgets all copies."""
        self._of.clear()
