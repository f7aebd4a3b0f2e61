"""The thread that owns a session and its rows, and the face of it that other threads use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Literal

from runtimes.base.errors import UserError
from runtimes.contract.session import Session
from xl_export.serve.core.facts import EngineFacts
from xl_export.serve.core.pieces import Cache
from xl_export.serve.core.running import Running
from xl_export.serve.core.scheduler import Scheduler
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Delivery, Ended, Task
from xl_export.serve.core.trial import dependence_of_rows, refuse_unserved
from xl_export.serve.core.validate import refuse_impossible
from xl_export.serve.core.waiting import Busy, Door, Held, Places, StoppedError, TooManyError

__all__ = ["Busy", "Cache", "Delivery", "Engine", "Held", "Places", "StoppedError", "TooManyError"]

Command = tuple[Literal["enter", "cancel", "resume"], Running]
LOG = logging.getLogger(__name__)
NO_BYTES = "the streams of the tasks that wait fill the memory that is kept for them"
LOST = "the engine has ended by a fault of its own; see the server's log, and start it again."
LEAST_WAIT, MOST_WAIT = 1.0, 60.0  # seconds that a client is told to wait


class Engine:
    """Advances many streams by one session.

    deliver: called on the engine's thread with the answers of each iteration, once and in order; it must not
    block.
    Raises StreamError for a session whose rows cannot be served so.
    """

    def __init__(
        self,
        session: Session,
        settings: EngineSettings,
        *,
        cache: Cache | None = None,
        deliver: Callable[[Delivery], None],
    ) -> None:
        refuse_unserved(session)
        self._session, self._settings, self._deliver = session, settings, deliver
        self._scheduler, self._door = Scheduler(session, settings, cache), Door(settings)
        self._dependence = dependence_of_rows(session, settings, self._scheduler.rows)
        self._state_bytes = self._scheduler.row_bytes + 4 * session.vocab.size  # a row and its logits
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._entering = 0  # commands that bring a task
        self._submitted: dict[Task, Running] = {}
        self._stopping = self._sleeping = False
        self._other_seconds = 0.0
        self._untold: Delivery = []  # of the last iteration
        self._thread = threading.Thread(target=self._run, name="xl-export engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def reserve(self, count: int, *, tenant: str = "", bulk: bool = False) -> Places:
        """Places for so many tasks of one tenant and class, which `submit` then takes whatever the load; any
        thread. Use it in a `with` block, which gives back what was not used.

        Raises Busy where there are not so many places now, TooManyError where there never are, and
        StoppedError where the engine stops. See `Door`.
        """
        self._refuse_more(count, tenant, bulk, take=True)
        return Places(self._door, count, tenant, bulk)

    def refuse_more(self, count: int = 1, *, tenant: str = "", bulk: bool = False) -> None:
        """Raises what `reserve` would raise now, and reserves nothing; any thread."""
        self._refuse_more(count, tenant, bulk, take=False)

    def _refuse_more(self, count: int, tenant: str, bulk: bool, *, take: bool) -> None:
        if self._stopping:
            raise StoppedError
        paused = [run.task for run in list(self._scheduler.paused)]
        if why := self._door.why_not(count, tenant, bulk, paused=paused, take=take):
            raise Busy(why, self._retry_after(self._waiting))

    def hold(self, states: int) -> Held:
        """Memory for so many states that a request keeps between its tasks; any thread. The tasks that bring
        these states are submitted with `held`.

        Raises Busy where there is not so much now, and UserError where there never is: one state always has
        its time.
        """
        settings, num_bytes = self._settings, states * self._state_bytes
        if states > 1 and num_bytes > settings.state_bytes:
            raise UserError(
                f"{states} prompts with several choices keep {self._state_bytes:,} bytes each, and there are "
                f"{settings.state_bytes:,} bytes for all; send fewer prompts at once."
            )
        if not self._door.hold(num_bytes):
            raise Busy(NO_BYTES, self._retry_after(self._waiting))
        return Held(self._door, num_bytes)

    def submit(self, task: Task, places: Places | None = None, *, held: bool = False) -> None:
        """Lets a task wait for a row; any thread. Its answers are delivered, the last one an Ended.

        places: reserved ones; then it is never Busy for want of a place. held: whether the bytes of the
        task's state were counted by `hold`; then it is never Busy for want of memory. Raises what
        `reserve(1)` raises, and UserError for a task that cannot be done; neither has cost any work.
        """
        refuse_impossible(task, self._session)
        with ExitStack() as undo:
            if places is None:
                own = undo.enter_context(self.reserve(1, tenant=task.tenant, bulk=task.bulk))
                own.use(task)
            else:
                places.use(task)
            undo.callback(self._door.leave, 1, task.tenant, task.bulk)
            run = Running(task, self._session)
            if task.state is not None and not held:
                if not self._door.bring(task.state):
                    raise Busy(NO_BYTES, self._retry_after(self._waiting))
                undo.callback(self._door.drop, task.state)
                run.brings = True
            with self._changed:
                if self._stopping:
                    raise StoppedError
                if task in self._submitted:
                    raise UserError("the task was submitted before; make a new one.")
                self._submitted[task] = run
                self._entering += 1
                self._command("enter", run)
            undo.pop_all()

    def cancel(self, task: Task) -> None:
        """Ends a task as soon as the present step is over; any thread. One that has ended is left alone."""
        with self._changed:
            if run := self._submitted.get(task):
                self._command("cancel", run)

    def taken(self, task: Task, count: int) -> None:
        """Notes that the client has taken so many answers more; one thread for each task."""
        run = self._submitted.get(task)
        if run is None:
            return
        run.taken += count
        if run.paused and self._scheduler.may_resume(run):
            with self._changed:
                self._command("resume", run)

    def stop(self, *, within: float) -> None:
        """Ends all tasks as `stopped`, with their states where they are kept, and takes no more.

        Returns when the engine's thread has ended, but after `within` seconds at the latest: a step cannot be
        interrupted, and what is left to say is said when it is over.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is None:  # never started: nothing runs that could end the tasks
            self._run()
        elif self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(within)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def facts(self) -> EngineFacts:
        """What the engine does now and has done; any thread."""
        scheduler = self._scheduler
        rows, decoding = len(scheduler.rows.runs), scheduler.rows.decoding
        return EngineFacts(
            rows=self._settings.rows,
            decoding=decoding,
            prompts=max(0, rows - decoding),
            waiting=self._waiting,
            paused=len(scheduler.paused),
            tokens_fed=scheduler.fed,
            tokens_cached=scheduler.cached,
            tokens_padded=scheduler.padded,
            tokens_drawn=scheduler.drawn,
            steps=scheduler.steps,
            tasks_ended=dict(scheduler.ended),
            parked=scheduler.parked,
            moved=scheduler.rows.moved,
            model_seconds=scheduler.model_seconds,
            other_seconds=self._other_seconds,
            queued=scheduler.queued,
            dependence=self._dependence,
        )

    @property
    def _waiting(self) -> int:
        """How many tasks have no row."""
        return max(0, self._entering + self._scheduler.outside)

    def _retry_after(self, waiting: int) -> float:
        """In about how many seconds an eighth of the queue is served, if its tasks are as those before."""
        scheduler = self._scheduler
        ended = sum(scheduler.ended.values())
        seconds = (scheduler.model_seconds + self._other_seconds) / max(1, ended)
        return min(MOST_WAIT, max(LEAST_WAIT, seconds * waiting / 8))

    def _command(self, what: Literal["enter", "cancel", "resume"], run: Running) -> None:
        """Tells the engine's thread something; `_changed` is held."""
        self._commands.append((what, run))
        if self._sleeping:
            self._changed.notify()

    def _run(self) -> None:
        """The engine's thread. However it ends, no task is left without its end."""
        self._session.before_run = self._tell_in_a_step
        try:
            while not self._turn():
                pass
        finally:
            self._session.before_run = None
            self._tell()
            with self._changed:
                self._stopping = True
                left = list(self._submitted)
            if left:
                self._send([(task, [Ended(reason="failed", error=LOST)]) for task in left])

    def _turn(self) -> bool:
        """Waits for work and does one iteration; whether it was the last."""
        scheduler = self._scheduler
        commands: list[Command] = []
        stopping = self._stopping
        if self._commands or stopping or not scheduler.has_work:
            self._tell()
            with self._changed:
                while not (self._commands or self._stopping or scheduler.has_work):
                    self._sleeping = True
                    self._changed.wait()
                    self._sleeping = False
                commands, self._commands, stopping = self._commands, [], self._stopping
        began, before = time.perf_counter(), scheduler.model_seconds
        try:
            if commands:
                self._obey(commands)
            delivery = scheduler.stop() if stopping else scheduler.iterate()
        except Exception as error:  # a fault of this project: its tasks end, and the engine goes on
            with self._changed:  # whatever a command has brought, or would bring, ends as well
                runs, self._commands, self._entering = list(self._submitted.values()), [], 0
            scheduler.fail_all(error, runs)
            delivery = scheduler.delivery()
        self._tell()
        # Whoever is woken by a delivery wants Python's lock. So it goes out when the next step, which does
        # not need the lock, is about to begin. It goes out now where much happens before that step: while
        # tasks wait for a row, rows may be moved first; where no row decodes, pieces of prompts are chosen
        # first, or there is no next step. So a server with a queue holds nothing back.
        self._untold = delivery
        if not scheduler.rows.decoding or len(scheduler.waiting):
            self._tell()
        self._other_seconds += time.perf_counter() - began - (scheduler.model_seconds - before)
        return stopping

    def _obey(self, commands: Sequence[Command]) -> None:
        scheduler = self._scheduler
        for what, run in commands:
            if what == "enter":
                with self._changed:
                    scheduler.enter(run)
                    self._entering -= 1
            elif what == "cancel":
                scheduler.cancel(run, "cancelled")
            else:
                scheduler.resume(run)

    def _tell(self) -> None:
        """Delivers what the last iteration has said, once."""
        untold, self._untold = self._untold, []
        if untold:
            self._send(untold)

    def _tell_in_a_step(self) -> None:
        """The same; the time that it takes counts as the engine's own, and not as the model's."""
        began = time.perf_counter()
        self._tell()
        self._scheduler.told_seconds += time.perf_counter() - began

    def _send(self, delivery: Delivery) -> None:
        for task, answers in delivery:
            if answers[-1].__class__ is Ended and (run := self._submitted.pop(task, None)) is not None:
                self._door.leave(1, task.tenant, task.bulk)
                if task.state is not None and run.brings:
                    self._door.drop(task.state)
        try:
            self._deliver(delivery)
        except Exception:  # the clients of this delivery are lost, and the others are not
            LOG.exception("the answers of %d tasks could not be delivered", len(delivery))
