"""One iteration of an engine: rows for tasks, a step of the decoding rows, chunks of prompts, new tokens."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from runtimes.base.errors import StreamError, UserError, first_line
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session, is_language_model
from runtimes.contract.tensors import row_bytes
from xl_export.serve.core.cache import PrefixCache
from xl_export.serve.core.chunks import Chunk, chosen_chunks, grouped, step_of, take_in
from xl_export.serve.core.rows import rows_of
from xl_export.serve.core.running import Queue, Running
from xl_export.serve.core.sampling import RowSampler
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Delivery, Ended, PromptFed, Reason, Task, TokenOut

LOG = logging.getLogger(__name__)
QUEUED = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)
Result = TypeVar("Result")
# What `Ended.error` says if the model, the memory or the client is at fault.
NOT_FINITE = (
    "the model's logits are not finite, so no next token can be drawn; its weights are damaged or "
    "diverged, or the stream that it continues is damaged."
)
NOT_READ = (
    "the client has not read {unread:,} answers, so the task was ended; read faster, or ask for fewer tokens."
)


class Histogram:
    """How often a value fell between two bounds. One thread adds to it, and any may read it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Notes a value, or several that are equal."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Bound and how many values are at most that."""
        total = 0
        found = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Scheduler:
    """All tasks of an engine. Its methods are called on the engine's thread only."""

    def __init__(self, session: Session, settings: EngineSettings, cache: PrefixCache | None) -> None:
        self._session = session
        self._settings = settings
        self._segment = session.rule.segment
        vocab = session.vocab if is_language_model(session) else None
        self._vocab_size = 1 if vocab is None else vocab.size  # with named inputs nothing is drawn
        self._end_of_document = None if vocab is None else vocab.special.end_of_document
        self.one_at_a_time = False
        """Whether each step has one row, though the session takes more."""
        self.rows = rows_of(session, settings.rows)
        self.queue = Queue()
        self.row_bytes = row_bytes(session.state)
        # Without room for a single state, each would be copied and dropped.
        self.cache = cache if cache is not None and cache.max_bytes > self.row_bytes else None
        self.runs: dict[Task, Running] = {}
        """The tasks that have not ended."""
        self._emitting: list[Running] = []  # runs with answers that are not delivered yet
        self._ready: list[Running] = []  # runs whose tokens were all fed, and who have no token yet
        self._sampler = RowSampler([], self._vocab_size, None)
        self._no_logits = np.empty((0, self._vocab_size), np.float32)
        self.iterations = 0
        self.steps = 0
        """Number of steps of the session."""
        self.fed = 0
        """Number of tasks' tokens fed, without those that were found in the cache."""
        self.cached = 0
        """Number of tasks' tokens found in the cache."""
        self.padded = 0
        """Number of tokens that pad chunks."""
        self.drawn = 0
        """Number of tokens drawn."""
        self.model_seconds = 0.0
        self.queued = Histogram(QUEUED)
        """Seconds from the submission of each task to its row, without tasks that end before they have one.
        """
        self.delivery_seconds = 0.0
        """Seconds of the present step in which answers were delivered."""
        self.ended: Counter[str] = Counter()
        """Number of tasks that have ended, by their reason."""

    @property
    def has_work(self) -> bool:
        """Whether an iteration would do anything."""
        return bool(self.rows.runs or self.queue.count or self._emitting)

    def enter(self, run: Running) -> None:
        """Lets a new run wait for a row."""
        self.runs[run.task] = run
        self.queue.add(run)

    def cancel(self, run: Running, reason: Reason) -> None:
        """Ends a run where it is; with the state of its stream, if that is kept."""
        if run.ended:
            return
        if run.task.keep and run.pending and run.row >= 0:
            run.closing = run.closing or reason  # the client knows its last token: the next step feeds it
        else:
            self._close(run, reason)

    def stop(self) -> Delivery:
        """Ends all runs as `stopped`, and returns the answers that are left."""
        for run in list(self.runs.values()):
            self.cancel(run, "stopped")
        self._decode()
        return self.delivery()

    def fail_all(self, error: BaseException, runs: Sequence[Running]) -> None:
        """Ends all runs after a fault of the engine itself, also those that have not entered yet."""
        LOG.error("the engine failed and ends all of its tasks", exc_info=error)
        for run in runs:
            if run.ended:
                continue
            run.row = -1
            run.ended = True
            self.ended["failed"] += 1
            self._emit(
                run, Ended(reason="failed", error=f"the server failed ({fault_line(error)}); ask again.")
            )
        self.rows.clear()
        self.queue = Queue()
        self.runs.clear()
        self._ready.clear()

    def iterate(self) -> Delivery:
        """Advances every row that may advance, and returns what is new for the clients."""
        self.iterations += 1
        if self.queue.count:
            self._place()
        runs, logits = self._decode()
        if len(self.rows.runs) > self.rows.decoding:
            self._feed()
        self._draw(runs, logits)
        return self.delivery()

    # Which task has a row.

    def _place(self) -> None:
        """Gives free rows to queued runs."""
        while self.queue.count and self.rows.free:
            self._admit(self.queue.next())

    def _admit(self, run: Running) -> None:
        task = run.task
        memory = None if task.state is None else task.state.memory
        if memory is None and self.cache is not None and _may_use_cache(task):
            run.keys = self.cache.keys(task.tokens, task.owner)
            state = self.cache.longest(run.keys)
            if state is not None:
                run.fed = state.position
                run.logits = state.logits
                run.furthest = state.furthest
                memory = state.memory
                self.cached += run.fed
                run.cached = run.unreported = run.fed
        try:
            self.rows.admit(run, memory)
        except (MemoryError, UserError) as error:  # there is no room for its row; the others go on
            self.queue.add(run)
            self._end(run, "failed", error=fault_sentence(error))
            return
        self.queued.observe(time.monotonic() - run.arrived)
        if not run.prompt_left:
            self._report(run)
            self._ready.append(run)

    # Steps.

    def _step(self, runs: Sequence[Running], compute: Callable[[Memory], Result]) -> Result | None:
        """The answer of the session to a step of rows; None if it failed, with its tasks."""
        self.steps += 1
        began = time.perf_counter()
        self.delivery_seconds = 0.0
        try:
            return compute(self.rows.part(runs))
        except Exception as error:
            LOG.error("a step of %d rows failed", len(runs), exc_info=error)
            self.rows.spoil(runs)
            for run in runs:
                self._end(run, "failed", error=fault_sentence(error))
            return None
        finally:
            self.model_seconds += time.perf_counter() - began - self.delivery_seconds

    def _decode(self) -> tuple[list[Running], np.ndarray]:
        """Feeds the last token of each decoding row; the runs that draw another one, and their logits."""
        runs = self.rows.runs[: self.rows.decoding]
        if not runs:
            return [], self._no_logits
        same = runs == self._sampler.runs  # as in the last iteration, which has drawn these tokens
        tokens = self._sampler.tokens if same else np.array([run.token for run in runs], np.int64)[:, None]
        runs, logits = self._predicted(runs, tokens)
        same = same and len(runs) == len(tokens)  # unless a step has failed
        plain = same and not self._sampler.keeps
        closing = [] if plain else [row for row, run in enumerate(runs) if run.closing]
        if not closing:
            return runs, logits
        for row in closing:
            run = runs[row]
            run.pending = False
            run.logits = logits[row]
            self._close(run, run.closing or "length")
        rest = [row for row, run in enumerate(runs) if not run.closing]
        return [runs[row] for row in rest], logits[rest]

    def _predicted(self, runs: list[Running], tokens: np.ndarray) -> tuple[list[Running], np.ndarray]:
        """The logits [N, V] after a token int64 [N, 1] of each run, without runs whose step has failed."""
        most = self._most_rows(1)
        if len(runs) <= most:
            logits = self._step(runs, lambda memory: self._session.predict(tokens, memory)[0])
            return ([], self._no_logits) if logits is None else (runs, logits)
        left: list[Running] = []
        parts = [self._no_logits]
        for at in range(0, len(runs), most):
            some, found = self._predicted(runs[at : at + most], tokens[at : at + most])
            left += some
            parts.append(found)
        return left, np.concatenate(parts)

    def _most_rows(self, width: int) -> int:
        """The most rows of a step of that many tokens."""
        return 1 if self.one_at_a_time else self._session.most_rows(width)

    def _feed(self) -> None:
        """Feeds chunks of prompts within the budget."""
        prompts = [run for run in self.rows.runs[self.rows.decoding :] if run.prompt_left]
        if not prompts:
            return
        # The last group first: the last row takes the place of a run that fails, and must be stepped first.
        chunks = chosen_chunks(self._session, prompts, self._settings.prompt_tokens)
        for group in reversed(grouped(chunks, self._most_rows, neighbours=self.rows.neighbours)):
            runs = [chunk.run for chunk in group]
            answers = self._step(runs, partial(step_of, self._session, group))
            if answers is not None:
                for chunk, answer in zip(group, answers, strict=True):
                    self._take_in(chunk, answer)

    def _take_in(self, chunk: Chunk, answer: Any) -> None:
        run = chunk.run
        task = run.task
        position = self.rows.position(run)
        run.furthest = max(run.furthest, position - chunk.length + chunk.width)
        run.last_chunk = self.iterations
        self.fed += chunk.length
        self.padded += chunk.width - chunk.length
        fed = take_in(chunk, answer)
        if fed is None:
            self._fail(run, NOT_FINITE)
            return
        if task.score or fed.outputs is not None:
            self._emit(run, fed)
        else:
            run.unreported += chunk.length
        if self.cache is not None and run.keys:
            keys = run.keys[: -(-run.fed // self._segment)]
            if self.cache.wants(keys):
                self.cache.put(keys[-1], run.state(self.rows.taken_out(run), segment=self._segment))
        if not run.prompt_left:
            self._report(run)
            self._ready.append(run)

    # Tokens.

    def _draw(self, runs: list[Running], logits: np.ndarray) -> None:
        """Samples a token for each run: for those that have decoded and for those whose prompt is fed."""
        ready = self._ready
        self._ready = []
        for run in ready:
            if run.task.sampling is None:
                self._close(run, "length")
            else:
                assert run.logits is not None
                self.rows.decode(run)
                runs = [*runs, run]
                logits = np.concatenate([logits, run.logits[None]])
                run.pending = True
                run.logits = None
        if not runs:
            return
        if runs != self._sampler.runs:
            self._sampler = RowSampler(runs, self._vocab_size, self._end_of_document)
        sampler = self._sampler
        emitting = self._emitting
        tokens = sampler.sample(logits)
        self.drawn += len(tokens)
        log_probs, likely = sampler.log_probs(logits, tokens) if sampler.scored else ({}, {})
        # The only code that runs once a token: what can be looked up once for all tokens is in `places`.
        drawn = zip(sampler.places, tokens, strict=True)
        for row, ((run, note, text, plain, end, most), token) in enumerate(drawn):
            if token < 0:
                self._fail(run, NOT_FINITE)
                continue
            note(token)
            run.token = token
            run.count = count = run.count + 1
            if plain is not None and count < most and token != end:  # the usual way
                added = plain(token)
            else:
                added = text.finish() if token == end else text.add(token, last=count == most)
            answer = TokenOut(token, added)
            if log_probs:
                answer.log_prob = log_probs.get(row)
                answer.likeliest = likely.get(row)
            if not run.answers:
                emitting.append(run)
            run.answers.append(answer)
            if (ended := text.ended) is not None:
                if run.task.keep:
                    run.closing = ended  # it ends once this token is fed
                else:
                    self._end(run, ended)

    # Ends and answers.

    def _state(self, run: Running) -> StreamState:
        """The stream of a run after all tokens that its client knows: one that was drawn and has not been fed
        is fed here.
        """
        if run.row < 0:
            return run.task.state or StreamState.begin(self._session)
        memory = self.rows.taken_out(run)
        if run.pending:
            self.steps += 1
            logits, _ = self._session.predict(np.array([[run.token]]), memory)
            memory = memory.copy()  # to the host, without what the session has bound to it
            run.pending = False
            run.logits = logits[0]
        state = run.state(memory, segment=self._segment)
        if state.logits is not None and not np.isfinite(state.logits.max()):
            self.rows.spoil([run])
            raise StreamError(NOT_FINITE)  # nothing could be drawn from such a state
        return state

    def _close(self, run: Running, reason: Reason, *, error: str = "") -> None:
        """Ends a run with the state of its stream, if that is kept."""
        state = None
        try:
            if run.task.keep:
                state = self._state(run)
        except Exception as fault:  # no memory for a copy, or a failing step: other tasks are not concerned
            LOG.error("the state of a stream could not be kept", exc_info=fault)
            reason = "failed"
            error = fault_sentence(fault)
        self._end(run, reason, state=state, error=error)

    def _fail(self, run: Running, sentence: str) -> None:
        self.rows.spoil([run])
        self._end(run, "failed", error=sentence)

    def _end(
        self, run: Running, reason: Reason, *, state: StreamState | None = None, error: str = ""
    ) -> None:
        if run.row >= 0:
            self.rows.release(run)
        else:
            self.queue.remove(run)
        run.ended = True
        self._report(run)
        del self.runs[run.task]
        self.ended[reason] += 1
        cut = reason in ("cancelled", "stopped", "failed")
        held = run.text.held if run.text is not None and cut else ""
        self._emit(run, Ended(reason=reason, text=held, state=state, error=error))

    def _report(self, run: Running) -> None:
        """Tells the client how many tokens were fed, if their log-probabilities are not wanted: once for all
        pieces of the prompt, because no client waits for one, and each delivery wakes the event loop.
        """
        if run.unreported:
            self._emit(run, PromptFed(count=run.unreported, cached=run.cached))
            run.unreported = 0

    def _emit(self, run: Running, answer: Answer) -> None:
        """Adds an answer to the answers of this iteration."""
        if not run.answers:
            self._emitting.append(run)
        run.answers.append(answer)

    def delivery(self) -> Delivery:
        """All answers since the last delivery. Tasks whose clients read too slowly end."""
        unread = self._settings.unread
        for run in self._emitting:
            if run.sent + len(run.answers) - run.taken > unread and not run.ended:
                self._close(run, "cancelled", error=NOT_READ.format(unread=unread))
        emitting = self._emitting
        self._emitting = []
        delivery = []
        for run in emitting:
            answers = run.answers
            run.answers = []
            run.sent += len(answers)
            delivery.append((run.task, answers))
        return delivery


def _may_use_cache(task: Task) -> bool:
    return task.cached and not (task.score or task.logits or task.inputs)


def fault_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error):.200}"


def fault_sentence(error: Exception) -> str:
    """The sentence for the client of a task that failed with this error."""
    if isinstance(error, UserError):
        return str(error)
    return (
        f"the model's step failed ({fault_line(error)}); ask again, and report it to the operator if it "
        "fails again."
    )
