"""What an engine knows of a task from its submission to its end, and the queue of those that wait."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np

from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.vocabulary.growing_text import GrowingText, border_of
from runtimes.tasks.sample import Penalties, numbers
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Reason, Task

PRIMING_TOKENS = 64  # tokens before a text that its decoder is given; what a token adds depends on fewer


class Running:
    """A task on its way. The thread that submits the task makes it, and then the engine's thread has it."""

    def __init__(self, task: Task, session: Session) -> None:
        state = task.state
        self.task = task
        self.arrived = time.monotonic()
        """Time of submission, by the monotonic clock."""
        self.last_chunk = 0
        """Iteration that last fed a chunk of it."""
        self.row = -1
        """Number of the run's row; -1 without one."""
        self.keys: list[bytes] = []
        """Keys of its prefixes in the cache; empty if it does not use the cache."""
        self.num_tokens = len(task.tokens) if task.inputs is None else num_tokens_of(session, task)
        """Number of the task's own tokens."""
        self.fed = 0
        """Number of them that were fed."""
        self.furthest = 0 if state is None else state.furthest
        """`StreamState.furthest` after the fed chunks; drawn tokens are written without padding."""
        self.logits: np.ndarray | None = None if state is None else state.logits
        """float32 [V] after the last fed token, if they are known and may still be wanted."""
        self.known: float | None = None
        """log p of the next token, if a step has computed it already."""
        self.drawn: deque[int] = deque(maxlen=session.rule.segment + 2)
        """The last drawn tokens; all were fed but the very last, `token`, while `pending`."""
        self.count = 0
        """Number of drawn tokens."""
        self.token = 0
        self.pending = False
        self.penalties: Penalties | None = None
        """Penalties on its logits, from its first draw on, if there are any."""
        self.uniform: Callable[[], float]
        """Draws the next random number."""
        self.text: GrowingText | None = None
        self.answers: list[Answer] = []
        """Answers of this iteration."""
        self.cached = 0
        """Number of fed tokens that were found in the cache."""
        self.unreported = 0
        """Number of fed tokens that no answer has reported."""
        self.sent = 0
        """Number of delivered answers."""
        self.taken = 0
        """Number of answers that the client has accepted; another thread writes this."""
        self.closing: Reason | None = None
        """Why the task ends, once its last token is fed."""
        self.ended = False
        """Whether its `Ended` was emitted."""
        if task.sampling is not None:
            sampling = task.sampling
            decoder = session.vocab.decoder()
            before = task.tokens if state is None else np.concatenate([state.tail, task.tokens])
            decoder.prime(before[-PRIMING_TOKENS:].tolist())
            border = border_of(session.vocab)
            self.text = GrowingText(decoder, sampling.stop, border, goes_on=task.keep)
            self.uniform = numbers(sampling.seed, sampling.index).__next__

    @property
    def prompt_left(self) -> int:
        """Number of the task's own tokens that are still to be fed."""
        return self.num_tokens - self.fed

    def tail(self, longest: int) -> np.ndarray:
        """The ids of the last fed tokens of the stream, at most `longest`, the newest last."""
        if self.task.inputs is not None:
            return self.task.tokens
        drawn = list(self.drawn)[: -1 if self.pending else None]
        fed = [self.task.tokens[: self.fed][-longest:], np.array(drawn, np.int64)]
        if self.task.state is not None:
            fed.insert(0, self.task.state.tail)
        return np.concatenate(fed)[-longest:].astype(np.int64, copy=False)

    def state(self, memory: Memory, *, segment: int) -> StreamState:
        """The stream after all fed tokens, in a memory that the state owns from now on."""
        logits = None if self.logits is None else np.array(self.logits, np.float32)
        furthest = max(self.furthest, int(memory.positions[0]))
        return StreamState(memory=memory, logits=logits, tail=self.tail(segment + 1), furthest=furthest)


def num_tokens_of(session: Session, task: Task) -> int:
    """The number of tokens for which the named inputs of a task have values."""
    assert session.spec is not None, "only artefacts name their inputs"
    assert task.inputs is not None
    timed = next(tensor for tensor in session.spec.signature[0] if "tokens" in tensor.shape)
    return int(task.inputs[timed.name].shape[1])


class Queue:
    """The runs that wait for a row. The API keys take turns: the next row goes to the one that has waited for
    its turn the longest.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Running]] = OrderedDict()  # by owner, the next turn first
        self.count = 0
        """Number of runs that wait."""

    def add(self, run: Running) -> None:
        """Puts a run at the end of its owner's runs."""
        self._waiting.setdefault(run.task.owner, deque()).append(run)
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
