"""The thread that owns a session and its rows, and the methods that other threads call."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.base.ranges import counted
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session, is_language_model
from xl_export.serve.core.admission import Places, StoppedError
from xl_export.serve.core.cache import PrefixCache
from xl_export.serve.core.chunks import chunk_after
from xl_export.serve.core.rows import Rows
from xl_export.serve.core.running import Running
from xl_export.serve.core.scheduler import Scheduler
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Arrays, Delivery, Ended, Task

LOG = logging.getLogger(__name__)
LOST = "the engine has ended by a fault of its own; see the server's log, and start it again."
# Seconds between two deliveries if steps are shorter. Each delivery wakes the event loop, which then contends
# for the GIL and writes once to each client: with 2 ms, sixteen streams took a third more CPU time a token.
DELIVERY_GAP_SECONDS = 0.004
# Bounds of Retry-After.
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
# The trial whether rows are independent of each other compares these batches with the largest one.
TRIAL_BATCHES = (1, 2, 3, 5, 8, 16)
TRIAL_STEPS = 3  # what a step writes to the memory shows in the outputs of the steps after it


class Engine:
    """Advances many streams by one session.

    deliver: called on the engine's thread with the answers of one or several iterations, once and in order;
    it must not block.
    Raises StreamError for an artefact of fixed sizes that no server has.
    """

    def __init__(
        self,
        session: Session,
        settings: EngineSettings,
        *,
        cache: PrefixCache | None = None,
        deliver: Callable[[Delivery], None],
    ) -> None:
        refuse_fixed_sizes(session)
        self._session = session
        self._settings = settings
        self._deliver = deliver
        self.scheduler = Scheduler(session, settings, cache)
        """Only the engine's thread uses it; other threads may read its counts."""
        is_language = is_language_model(session)
        num_logits = session.vocab.size if is_language else 0
        self.places = Places(
            settings,
            state_bytes=self.scheduler.row_bytes + 4 * num_logits,
            retry_after=self._retry_after,
        )
        """What requests hold of it; other threads ask it."""
        self.dependence = dependence_of_rows(session, settings, self.scheduler.rows)
        """None if a trial found each row bitwise independent of the rows that are stepped with it, so that
        the same seed gives the same tokens under any load; otherwise what the trial found.
        """
        if self.dependence and not is_language:  # a control loop must not depend on other streams
            self.scheduler.one_at_a_time = True
            self.dependence = None
        self._submitting = threading.Lock()
        """Held while a task is submitted: each one is either refused or gets its end."""
        self._submitted: dict[Task, Running] = {}  # whose end was not delivered yet
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # for the thread
        self.other_seconds = 0.0
        """Seconds of the engine's thread outside of steps of the session, without waiting for work."""
        self._undelivered: Delivery = []
        self._delivered = 0.0  # time of the last delivery
        self._thread = threading.Thread(target=self._run, name="xl-export engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queues a task for a row; any thread. Its answers are delivered, the last one an Ended.

        The caller holds a place for it (`places`), and what the task asks for was checked when its request
        was read. Raises StoppedError.
        """
        run = Running(task, self._session)
        with self._submitting:
            if self.places.closed:
                raise StoppedError
            assert task not in self._submitted, "a task is submitted once"
            self._submitted[task] = run
            self._commands.put(partial(self.scheduler.enter, run))

    def cancel(self, task: Task) -> None:
        """Ends a task as soon as the present step is over, unless it has ended; any thread."""
        if run := self._submitted.get(task):
            self._commands.put(partial(self.scheduler.cancel, run, "cancelled"))

    def taken(self, task: Task, count: int) -> None:
        """Notes that the client has taken `count` more answers; called on one thread for each task."""
        if run := self._submitted.get(task):
            run.taken += count

    def stop(self, *, within: float) -> None:
        """Ends all tasks as `stopped`, with their states if they are kept, and admits no more.

        Returns when the engine's thread has ended, but after `within` seconds at the latest: a step cannot be
        interrupted, and answers that are left are delivered when it is over.
        """
        with self._submitting:
            self.places.closed = True
        self._commands.put(bool)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join(within)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def prompts(self) -> int:
        """Number of rows that are fed tokens of their tasks; the others that are used draw."""
        rows = self.scheduler.rows
        return max(0, len(rows.runs) - rows.decoding)

    @property
    def waiting(self) -> int:
        """Number of tasks without a row."""
        return max(0, len(self._submitted) - len(self.scheduler.rows.runs))

    def metrics(self) -> Iterator[tuple[str, str, float]]:
        """Name, meaning and value of each metric, for `/metrics`; any thread."""
        scheduler = self.scheduler
        rows = self._settings.rows
        decoding = scheduler.rows.decoding
        used = decoding + self.prompts
        yield "num_requests_running", "Tasks that have a row.", used
        yield "num_requests_waiting", "Tasks that wait for a row.", self.waiting
        yield "rows", "Rows, which is how many streams advance at once.", rows
        yield "rows_decoding", "Rows that draw tokens.", decoding
        yield "rows_prompt", "Rows that are fed tokens.", used - decoding
        yield "rows_usage_perc", "The share of the rows that is in use, from 0 to 1.", used / rows
        yield "engine_steps_total", "Steps of the model.", scheduler.steps
        yield "engine_tokens_fed_total", "Tokens that were fed.", scheduler.fed
        yield "engine_tokens_padded_total", "Padding that was fed.", scheduler.padded
        yield "engine_tokens_drawn_total", "Tokens that were drawn.", scheduler.drawn
        yield "prefix_cache_hits_total", "Tokens that the prefix cache had.", scheduler.cached
        asked = scheduler.fed + scheduler.cached
        yield "prefix_cache_queries_total", "Tokens that could have been in the prefix cache.", asked
        if scheduler.cache is not None:
            yield "prefix_cache_states", "States that the prefix cache holds.", scheduler.cache.states
            yield "prefix_cache_bytes", "Bytes of these states.", scheduler.cache.num_bytes
            yield "prefix_cache_evictions_total", "States that were dropped.", scheduler.cache.evicted
        in_steps = "Seconds in steps of the model, with the wait for Python's lock at their end."
        yield "engine_model_seconds_total", in_steps, scheduler.model_seconds
        yield "engine_other_seconds_total", "Seconds of the engine outside of steps.", self.other_seconds

    def _retry_after(self) -> float:
        """In about how many seconds an eighth of the queue is served, if its tasks are as those before."""
        scheduler = self.scheduler
        ended = sum(scheduler.ended.values())
        seconds = (scheduler.model_seconds + self.other_seconds) / max(1, ended)
        return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, seconds * self.waiting / 8))

    def _run(self) -> None:
        """The engine's thread. However it ends, no task is left without its end."""
        self._session.before_run = self._flush_in_a_step
        try:
            while not self._advance():
                pass
        finally:
            self._session.before_run = None
            self._flush()
            with self._submitting:
                self.places.closed = True
                left = list(self._submitted)
            self._undelivered = [(task, [Ended(reason="failed", error=LOST)]) for task in left]
            self._flush()

    def _advance(self) -> bool:
        """Waits for work and does one iteration; whether it was the last."""
        scheduler = self.scheduler
        commands = []
        if not (scheduler.has_work and self._commands.empty()):
            self._flush()
            commands.append(self._commands.get())
            while not self._commands.empty():
                commands.append(self._commands.get())
        stopping = self.places.closed
        began = time.perf_counter()
        before = scheduler.model_seconds
        try:
            for command in commands:
                command()
            delivery = scheduler.stop() if stopping else scheduler.iterate()
        except Exception as error:  # a fault of this project: its tasks end, and the engine continues
            with self._submitting:  # tasks of commands that were not applied end as well
                runs = list(self._submitted.values())
                while not self._commands.empty():
                    self._commands.get()
            scheduler.fail_all(error, runs)
            delivery = scheduler.delivery()
        # The answers go out when a next step, which does not need Python's lock, is about to begin. They go
        # out now if much happens before that step: rows may be moved while tasks wait for one, and if no row
        # decodes, chunks of prompts are chosen, or there is no next step. So a server with a queue holds
        # nothing back.
        self._undelivered += delivery
        if not scheduler.rows.decoding or scheduler.queue.count:
            self._flush()
        self.other_seconds += time.perf_counter() - began - (scheduler.model_seconds - before)
        return stopping

    def _flush(self) -> None:
        """Delivers the answers that were not delivered yet."""
        delivery = self._undelivered
        if not delivery:
            return
        self._undelivered = []
        self._delivered = time.perf_counter()
        for task, answers in delivery:
            if answers[-1].__class__ is Ended:
                self._submitted.pop(task, None)
        try:
            self._deliver(delivery)
        except Exception:  # the clients of this delivery are lost, and the others are not
            LOG.exception("the answers of %d tasks could not be delivered", len(delivery))

    def _flush_in_a_step(self) -> None:
        """The same, if the delivery before is long ago or a task has ended. The time that it takes counts as
        the engine's own, and not as the model's.
        """
        began = time.perf_counter()
        if began - self._delivered >= DELIVERY_GAP_SECONDS or len(self._submitted) > len(self.scheduler.runs):
            self._flush()
        self.scheduler.delivery_seconds += time.perf_counter() - began


def refuse_fixed_sizes(session: Session) -> None:
    """Raises StreamError for an artefact that needs several streams, or several tokens, in each step."""
    spec = session.spec
    if spec is None or spec.fixed_rows is None:
        return
    if spec.language_model and spec.fixed_rows == 1 and spec.rule.segment > 1 and not spec.fixed_tokens:
        raise StreamError(
            f"this artefact was exported for exactly {spec.rule.segment} tokens, and a server draws one at a "
            f"time; export it with tokens=(1, {spec.rule.segment}) too."
        )
    if spec.fixed_rows > 1:
        raise StreamError(
            f"this artefact was exported for exactly {spec.fixed_rows} rows, and a server steps as "
            "many streams as there are; export it with rows=1, or without `rows`."
        )


def dependence_of_rows(session: Session, settings: EngineSettings, rows: Rows) -> str | None:
    """None if a row gets bitwise the same numbers in every batch that an engine of these settings steps;
    otherwise a sentence with what the trial found.

    rows: of the engine, before any stream is in them. The trial steps them as the engine will.
    """
    chance = np.random.default_rng(0)
    segment = session.rule.segment
    spec = session.spec
    only_whole = spec is not None and spec.only_whole_segments
    widths = {1, min(2, segment), chunk_after(0, max(1, segment // 3), segment)[1], segment}
    for width in {segment} if only_whole else sorted(widths):
        decodes = width == 1 and is_language_model(session)
        most = settings.rows if decodes else min(settings.rows, max(1, settings.prompt_tokens // width))
        most = min(most, session.most_rows(width))
        batches = [batch for batch in TRIAL_BATCHES if batch < most]
        if not batches:
            continue
        inputs = [_any_inputs(session, most, width, chance) for _ in range(TRIAL_STEPS)]
        whole = _outputs(session, inputs, rows.trial(most))
        for batch in batches:
            first = [{name: array[:batch] for name, array in each.items()} for each in inputs]
            found = _outputs(session, first, rows.trial(batch))
            if not all(np.array_equal(x, y[:batch]) for x, y in zip(found, whole, strict=True)):
                return (
                    f"rows are not independent of each other with {session.computed_by}: {batch} of "
                    f"{most} rows that were fed {counted(width, 'token')} got other numbers than among all "
                    "of them, so a seed may give other tokens under another load."
                )
    return None


def _any_inputs(session: Session, rows: int, width: int, chance: np.random.Generator) -> Arrays:
    """Random inputs of a step; of a language model its tokens."""
    if is_language_model(session):
        return {"tokens": chance.integers(session.vocab.size, size=(rows, width))}
    assert session.spec is not None, "only artefacts name their inputs"
    inputs: Arrays = {}
    for tensor in session.spec.signature[0][:-1]:  # the session adds the positions
        sizes = tensor.sizes(batch=rows, tokens=width)
        inputs[tensor.name] = (
            chance.standard_normal(sizes, np.float32)
            if tensor.ids is None
            else chance.integers(tensor.ids, size=sizes)
        )
    return inputs


def _outputs(session: Session, inputs: list[Arrays], memory: Memory) -> list[np.ndarray]:
    """All outputs of steps of new streams in a memory; of a language model its logits."""
    if is_language_model(session):
        return [session.predict(each["tokens"], memory)[0] for each in inputs]
    return [array for each in inputs for array in session.step(each, memory)[0].values()]
