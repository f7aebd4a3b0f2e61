"""What an engine knows of its tasks from their submission to their end, and the queue of those without a row.

People come before bulk, and a tenant who was served less comes before one who had more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.vocabulary.growing_text import GrowingText, border_of
from runtimes.tasks.sample import Penalties
from xl_export.serve.core.admission import Quota, Reservation
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Fed, Reason, Task

PRIMED = 64  # tokens before a text that its decoder is given; what a token adds depends on fewer
TURN = 512  # tokens that one tenant may be ahead of another who waits
MOST_UNREPORTED = 8192  # fed tokens that may be in no answer yet


class Running:
    """A task on its way. The thread that submits the task makes it, and then the engine's thread has it."""

    def __init__(self, task: Task, session: Session) -> None:
        state = task.state
        self.task = task
        #: When it was submitted, by the monotonic clock.
        self.arrived = time.monotonic()
        #: Its place in the engine until its end.
        self.place: Reservation
        self.account: Account
        #: The iterations in which it came, got its row, and was fed a piece.
        self.order = 0
        self.since = 0
        self.last_piece = 0
        #: Its row; -1 without one.
        self.row = -1
        #: The memory of its stream, if it gave up a row or has not had one yet.
        self.memory: Memory | None = None if state is None else state.memory
        #: Where its memory is counted, if that is a copy of a row that it gave up.
        self.copied: Quota | None = None
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
        #: Pieces that were fed and are in no answer yet.
        self.unreported: Fed | None = None
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
        """Adds an answer to the answers of this iteration.

        Pieces of which only the length is known are kept back and added up: no client waits for them, and
        each delivery wakes the event loop. They are added with the last piece of the prompt, with every
        `MOST_UNREPORTED` tokens, and before any other answer. So none is left when tokens are drawn.
        """
        unreported = self.unreported
        self.unreported = None
        if not isinstance(answer, Fed) or answer.log_probs is not None:
            self.answers += [answer] if unreported is None else [unreported, answer]
            return
        if unreported is not None:
            answer = Fed(count=unreported.count + answer.count, cached=unreported.cached + answer.cached)
        if self.prompt_left and answer.count < MOST_UNREPORTED:
            self.unreported = answer
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
    """What one tenant has in an engine."""

    tenant: str
    #: Its tokens, fed and drawn; a tenant that comes (back) begins with the smallest number of the others.
    served: float = 0.0
    #: Tasks that have not ended.
    tasks: int = 0
    #: Tasks that have a row.
    rows: int = 0
    people: deque[Running] = field(default_factory=deque)
    bulk: deque[Running] = field(default_factory=deque)

    def queue(self, bulk: bool) -> deque[Running]:
        """The tasks that wait, the next one first."""
        return self.bulk if bulk else self.people


class Queue:
    """The tasks of all tenants that wait for a row."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        #: How many tasks wait.
        self.count = 0
        self._people = 0  # of them, without bulk

    def enter(self, run: Running) -> None:
        """Puts a new run at the end of its tenant's queue."""
        tenant = run.task.tenant
        account = self._accounts.get(tenant)
        if account is None:
            served = min((each.served for each in self._accounts.values()), default=0.0)
            account = self._accounts[tenant] = Account(tenant, served)
        account.tasks += 1
        run.account = account
        self.add(run)

    def leave(self, run: Running) -> None:
        """Notes that a run has ended that does not wait; a tenant without any is forgotten."""
        run.account.tasks -= 1
        if not run.account.tasks:
            del self._accounts[run.account.tenant]

    def add(self, run: Running, *, first: bool = False) -> None:
        """Puts a run at the end of its tenant's queue, or in front of it."""
        queue = run.account.queue(run.task.bulk)
        (queue.appendleft if first else queue.append)(run)
        self._counted(run, 1)

    def remove(self, run: Running) -> None:
        """Takes out a run that will not be served."""
        run.account.queue(run.task.bulk).remove(run)
        self._counted(run, -1)

    def next(self, *, bulk: bool) -> Account | None:
        """The account that is next: first one without a row, then the one that was served least."""
        waits = [account for account in self._accounts.values() if account.queue(bulk)]
        return min(waits, key=lambda a: (a.rows > 0, a.served, a.queue(bulk)[0].order), default=None)

    def pop(self) -> Running:
        """The run that gets the next row; it waits no longer."""
        bulk = not self._people
        account = self.next(bulk=bulk)
        assert account is not None, "the queue is empty"
        run = account.queue(bulk).popleft()
        self._counted(run, -1)
        return run

    def _counted(self, run: Running, change: int) -> None:
        self.count += change
        self._people += 0 if run.task.bulk else change

    def to_preempt(self, holders: Sequence[Running]) -> Running | None:
        """The run to preempt for one that waits, or None. holders: the runs that have rows.

        Bulk gives way to people. A tenant with several rows gives one to a tenant without any, and a tenant
        who is a turn ahead gives one to a tenant with fewer.
        """
        bulk = not self._people
        # A run that is closing leaves its row with the next step anyway.
        holders = [run for run in holders if run.task.bulk >= bulk and run.closing is None]
        if not bulk and (rows := [run for run in holders if run.task.bulk]):
            return max(rows, key=lambda run: (run.account.served, run.order))
        waits = self.next(bulk=bulk)
        others = [run for run in holders if run.account is not waits]
        if waits is None or not others:
            return None
        most = max((run.account for run in others), key=lambda account: (account.rows, account.served))
        ahead = waits.served + TURN <= most.served and most.rows > waits.rows
        if not (ahead or (waits.rows == 0 and most.rows > 1)):
            return None
        return min((run for run in others if run.account is most), key=lambda run: run.since)
