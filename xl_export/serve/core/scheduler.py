"""One iteration of an engine: rows for tasks, a step of the decoding rows, pieces of prompts, new tokens."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from runtimes.base.errors import UserError, first_line
from runtimes.base.logits import clamped, log_sum_exp
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from runtimes.contract.tensors import row_bytes
from runtimes.contract.vocabulary.base import Decoder
from runtimes.contract.vocabulary.growing_text import GrowingText
from runtimes.tasks.sample import Draw, penalties_of
from xl_export.serve.core.admission import EngineSettings
from xl_export.serve.core.cache import PrefixCache
from xl_export.serve.core.running import Queue, Running, rows_of
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Delivery, Ended, Likeliest, PromptFed, Reason, Task, TokenOut

LOG = logging.getLogger(__name__)
QUEUED = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 300.0)
Verb = Literal["predict", "score", "step"]
UNKNOWN = -1  # the id of a likeliest token at a place whose logits are not known
# What `Ended.error` says if the model or the memory is at fault.
NOT_FINITE = (
    "the model's logits are not finite, so no next token can be drawn; its weights are damaged or "
    "diverged, or the stream that it continues is damaged."
)
NO_ROOM = (
    "the client reads no answers, and the memory for streams that wait for their clients is full; read "
    "answers sooner, or give the server more memory."
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
        self._most_rows = session.most_rows(1)
        self._end_of_document = session.vocab.special.end_of_document
        self.rows = rows_of(session, settings.rows)
        self.queue = Queue()
        self.row_bytes = row_bytes(session.state)
        # Without room for a single state, each would be copied and dropped.
        self.cache = cache if cache is not None and cache.max_bytes > self.row_bytes else None
        copies = max(1, settings.state_bytes // max(1, self.row_bytes))  # one is always allowed
        self._most_copies = copies
        #: Rows that were copied because a client reads no answers.
        self.copies = 0
        #: The tasks that have not ended.
        self.runs: dict[Task, Running] = {}
        #: Those that wait for their clients.
        self.paused: set[Running] = set()
        self._emitting: list[Running] = []  # runs with answers that are not delivered yet
        self._ready: list[Running] = []  # runs whose tokens were all fed, and who have no token yet
        self._sampler = RowSampler([], session.vocab.size, None)
        self._no_logits = np.empty((0, session.vocab.size), np.float32)
        self.iterations = 0
        #: Of the session.
        self.steps = 0
        #: Tokens of tasks, without those that were found in the cache.
        self.fed = 0
        self.cached = 0
        #: Of pieces, beyond their tokens.
        self.padded = 0
        self.drawn = 0
        self.model_seconds = 0.0
        #: Seconds from the submission of each task to its first row, without tasks that end before they have
        #: one.
        self.queued = Histogram(QUEUED)
        #: Of the present step, in which answers were handed out.
        self.delivery_seconds = 0.0
        #: How many tasks have ended, by their reason.
        self.ended: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether an iteration would do anything."""
        return bool(self.rows.runs or self.queue.count or self._emitting)

    def enter(self, run: Running) -> None:
        """Lets a new run wait for a row."""
        self.runs[run.task] = run
        run.order = self.iterations
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

    def resume(self, run: Running) -> None:
        """Lets a paused run wait for a row again."""
        if run in self.paused:
            self.paused.remove(run)
            run.paused = False
            self.queue.add(run, first=True)

    def fail_all(self, error: BaseException, runs: Sequence[Running]) -> None:
        """Ends all runs after a fault of the engine itself, also those that have not entered yet."""
        LOG.error("the engine failed and ends all of its tasks", exc_info=error)
        for run in runs:
            if run.ended:
                continue
            self._forget_memory(run)
            run.row = -1
            run.ended = True
            self.ended["failed"] += 1
            self._emit(
                run, Ended(reason="failed", error=f"the server failed ({fault_line(error)}); ask again.")
            )
        self.rows.clear()
        self.queue = Queue()
        for gathered in (self.runs, self.paused, self._ready):
            gathered.clear()

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
        memory = run.memory
        if memory is None and self.cache is not None and task.cached and not task.score:
            run.keys = self.cache.keys(task.tokens, task.owner)
            state = self.cache.longest(run.keys)
            if state is not None:
                run.fed = state.position
                run.logits = state.logits
                run.written = state.written
                memory = state.memory
                self.cached += run.fed
                run.cached = run.unreported = run.fed
        try:
            self.rows.admit(run, memory)
        except (MemoryError, UserError) as error:  # there is no room for its row; the others go on
            self.queue.add(run, first=True)
            self._end(run, "failed", error=fault_sentence(error))
            return
        self._forget_memory(run)
        if not run.since:  # it has a row for the first time
            self.queued.observe(time.monotonic() - run.arrived)
        run.since = self.iterations
        if run.prompt_left:
            return
        self._report(run)
        if run.pending:
            self.rows.decode(run)
        else:
            self._ready.append(run)

    def _forget_memory(self, run: Running) -> None:
        self.copies -= run.copied
        run.copied = False
        run.memory = None

    # Steps.

    def _step(self, runs: Sequence[Running], compute: Callable[[Memory], np.ndarray]) -> np.ndarray | None:
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
        most = self._most_rows
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

    def _feed(self) -> None:
        """Feeds pieces of prompts within the budget."""
        prompts = [run for run in self.rows.runs[self.rows.decoding :] if run.prompt_left]
        if not prompts:
            return
        # The last group first: the last row takes the place of a run that fails, and must be stepped first.
        pieces = chosen_pieces(self._session, prompts, self._settings.prompt_tokens)
        for group in reversed(grouped(pieces, self._session, neighbours=self.rows.neighbours)):
            runs = [piece.run for piece in group]
            answers = self._step(runs, partial(step_of, self._session, group))
            if answers is not None:
                for piece, answer in zip(group, answers, strict=True):
                    self._take_in(piece, answer)

    def _take_in(self, piece: Piece, answer: np.ndarray) -> None:
        run = piece.run
        position = self.rows.position(run)
        run.written = max(run.written, position - piece.length + piece.width)
        run.last_piece = self.iterations
        self.fed += piece.length
        self.padded += piece.width - piece.length
        fed = take_in(piece, answer)
        if fed is None:
            self._fail(run, NOT_FINITE)
            return
        if run.task.score:
            self._emit(run, fed)
        else:
            run.unreported += piece.length
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
            self._sampler = RowSampler(runs, self._session.vocab.size, self._end_of_document)
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
        if run.row >= 0:
            memory = self.rows.taken_out(run)
        elif run.memory is None:
            memory = self._session.start(1)
        elif run.task.state is not None and run.memory is run.task.state.memory:
            return run.task.state
        else:
            memory = run.memory
        if run.pending:
            self.steps += 1
            logits, _ = self._session.predict(np.array([[run.token]]), memory)
            run.pending = False
            run.logits = logits[0]
        return run.state(memory, segment=self._segment)

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
        elif run in self.paused:
            self.paused.remove(run)
        else:
            self.queue.remove(run)
        self._forget_memory(run)
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
        """All answers since the last delivery. Runs whose clients do not take them are paused."""
        emitting = self._emitting
        self._emitting = []
        delivery = []
        slow = []
        unread = self._settings.unread
        for run in emitting:
            answers = run.answers
            run.answers = []
            if answers:
                delivery.append((run.task, answers))
            run.sent = sent = run.sent + len(answers)
            if sent - run.taken > unread and run.row >= 0:
                slow.append(run)
        for run in slow:  # after all answers were gathered: if one of these fails, no answer is lost
            self._pause(run)
        return delivery

    def _pause(self, run: Running) -> None:
        if self.copies >= self._most_copies:
            self._close(run, "cancelled", error=NO_ROOM)
            return
        try:
            run.memory = self.rows.taken_out(run)
        except MemoryError as error:
            self._end(run, "failed", error=fault_sentence(error))
            return
        self.copies += 1
        run.copied = True
        self.rows.release(run)
        self.paused.add(run)
        run.paused = True
        if self.may_resume(run):  # the client has accepted some in the meantime, when it was not paused yet
            self.resume(run)

    def may_resume(self, run: Running) -> bool:
        """Whether the client of a paused run has accepted enough; called on any thread."""
        return run.sent - run.taken <= self._settings.unread // 2


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


# Pieces of tasks' own tokens: how they are cut, which are fed, and what a step returns for them. A row's
# numbers are bitwise the same in every batch of the same padded width, and differ by rounding between widths.
# So the cut depends only on the task, and its answers are the same under any load.


def piece_after(fed: int, count: int, segment: int, *, pads: bool = True) -> tuple[int, int]:
    """How many of a task's `count` tokens come next when `fed` of them were fed, and the width in which they
    are fed.

    Pieces are whole segments; the rest is one piece. If the session can pad rows on the right, it is padded
    to the next power of two, so that few widths occur. fed: a multiple of the segment that is less than
    `count`.
    """
    length = min(segment, count - fed)
    return length, min(segment, 1 << (length - 1).bit_length()) if pads else length


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The next tokens of one run."""

    run: Running
    #: Of the tokens.
    length: int
    #: In which they are fed.
    width: int
    #: Of the session.
    verb: Verb


def chosen_pieces(session: Session, runs: Sequence[Running], budget: int) -> list[Piece]:
    """The pieces of one iteration, in the order of their rows.

    At least one piece is chosen, and then more while their widths fit into the budget: first of the run that
    has waited longest.
    """
    if len(runs) > 1:
        runs = sorted(runs, key=lambda run: (run.last_piece, run.order))
    pads = session.spec is None or session.spec.lengths_fault is None
    chosen: list[Piece] = []
    for run in runs:
        length, width = piece_after(run.fed, len(run.task.tokens), session.rule.segment, pads=pads)
        if chosen and width > budget:
            break
        budget -= width
        chosen.append(Piece(run=run, length=length, width=width, verb=_verb(session, run, length)))
    return sorted(chosen, key=lambda piece: piece.run.row)


def grouped(pieces: Sequence[Piece], session: Session, *, neighbours: bool) -> list[list[Piece]]:
    """Pieces that are stepped together: as many of one width as a step takes, of any rows or of neighbouring
    ones only.
    """
    groups: list[list[Piece]] = []
    last: dict[tuple[int, Verb], list[Piece]] = {}  # the group that pieces of a kind may join
    for piece in pieces:
        kind = piece.width, piece.verb
        group = last.get(kind)
        if (
            group is None
            or len(group) == session.most_rows(piece.width)
            or (neighbours and group[-1].run.row + 1 != piece.run.row)
        ):
            last[kind] = group = []
            groups.append(group)
        group.append(piece)
    return groups


def _verb(session: Session, run: Running, length: int) -> Verb:
    """What is asked of the session for a piece; it depends only on the task, as the cut does.

    Logits of all places are asked for if they are wanted, or if the session computes them anyway.
    """
    task = run.task
    if not task.score:
        return "predict"
    selective = session.spec is None or session.spec.model.selective
    wanted = length == run.prompt_left and (task.sampling is not None or task.keep)
    return "step" if task.top or wanted or not selective else "score"


def step_of(session: Session, pieces: Sequence[Piece], memory: Memory) -> np.ndarray:
    """The session's answer to a group of pieces: logits [N, V] or [N, T, V], or log-probabilities [N, T]."""
    width = pieces[0].width
    verb = pieces[0].verb
    tokens = np.zeros((len(pieces), width), np.int64)
    targets = np.full((len(pieces), width), -1, np.int64)
    for row, piece in enumerate(pieces):
        own = piece.run.task.tokens
        first = piece.run.fed
        last = piece.run.fed + piece.length
        tokens[row, : piece.length] = own[first:last]
        after = own[first + 1 : last + 1]
        targets[row, : len(after)] = after
    lengths = np.array([piece.length for piece in pieces])
    given = None if (lengths == width).all() else lengths
    if verb == "score":
        return session.score(tokens, targets, memory, lengths=given)[0]
    if verb == "step":
        return session.step(tokens, memory, lengths=given)[0]
    return session.predict(tokens, memory, lengths=given)[0]


def take_in(piece: Piece, answer: np.ndarray) -> PromptFed | None:
    """Notes the session's answer to a piece in its run; None if the model's answer is not a number."""
    run = piece.run
    task = piece.run.task
    length = piece.length
    fed = task.tokens[run.fed : run.fed + length]
    log_probs: np.ndarray | None = None
    likely: Likeliest | None = None
    if task.score:
        log_probs = np.full(length, np.nan, np.float32)
        if run.known is not None:
            log_probs[0] = run.known
        elif run.logits is not None:
            log_probs[0] = log_probs_of(run.logits[None], fed[:1])[0]
        if task.top:
            likely = _likeliest(run.logits, answer[: length - 1], task.top)
    run.known = None
    last = None
    if piece.verb == "predict":
        last = answer
    elif piece.verb == "step":
        assert log_probs is not None
        log_probs[1:] = log_probs_of(answer[: length - 1], fed[1:])
        last = np.array(answer[length - 1])  # a copy: the others are not kept
    else:
        assert log_probs is not None
        log_probs[1:] = answer[: length - 1]
        run.known = float(answer[length - 1]) if length < run.prompt_left else None
    run.logits = last
    run.fed += length
    if log_probs is not None:
        if np.isnan(log_probs[1:]).any() or run.known != run.known:  # which only NaN is
            return None
        log_probs = clamped(log_probs)
    if last is not None and not np.isfinite(last.max()):
        return None
    return PromptFed(count=length, log_probs=log_probs, likeliest=likely)


def _likeliest(before: np.ndarray | None, logits: np.ndarray, count: int) -> Likeliest:
    """The likeliest tokens at each place of a piece; the first place is after `before`, if that is
    known.
    """
    count = min(count, logits.shape[-1])
    if before is not None:
        return likeliest(np.concatenate([before[None], logits]), count)
    rest = likeliest(logits, count)
    return Likeliest(
        ids=np.concatenate([np.full((1, count), UNKNOWN), rest.ids]),
        log_probs=np.concatenate([np.full((1, count), np.nan, np.float32), rest.log_probs]),
    )


# The next token of each row.


class RowSampler:
    """Samples a token for each of some runs. It is made once for as long as the runs stay the same.

    runs: in the order of the rows. size: of the vocabulary. end: the token that ends a document.
    """

    def __init__(self, runs: list[Running], size: int, end: int | None) -> None:
        self.runs = runs
        #: What a token needs of its run: the run, how it notes a drawn token, its text, `GrowingText.plain`
        #: of that, the token that ends it (-1 if none does), and the most tokens.
        self.places: list[tuple[Running, Callable[[int], None], GrowingText, Decoder | None, int, int]] = []
        #: Whether a stream of them is kept.
        self.keeps = False
        #: int64 [N, 1], those that were drawn last.
        self.tokens = np.empty((len(runs), 1), np.int64)
        #: The rows whose log-probabilities are wanted.
        self.scored: list[int] = []
        #: The rows whose likeliest tokens are wanted, with their number.
        self.tops: list[tuple[int, int]] = []
        samplers = []
        penalties = []
        self._uniform = []
        for row, run in enumerate(runs):
            task = run.task
            sampling = task.sampling
            text = run.text
            assert sampling is not None, "every run draws"
            assert text is not None
            ends_at = end if sampling.ends and end is not None else -1
            self.places.append((run, run.drawn.append, text, text.plain, ends_at, sampling.max_tokens))
            self.keeps |= task.keep
            if task.score or task.top:
                self.scored.append(row)
            if task.top:
                self.tops.append((row, task.top))
            if run.penalties is None:  # a run that was drawn from before keeps its counts
                prompt = task.tokens if sampling.prompt is None else sampling.prompt
                run.penalties = penalties_of(sampling.sampler, size, prompt, sampling.bias)
            samplers.append(sampling.sampler)
            penalties.append(run.penalties)
            self._uniform.append(run.uniform)
        self._draw = Draw(samplers, size, penalties)

    def sample(self, logits: np.ndarray) -> list[int]:
        """The token of each row of logits float32 [N, V]; -1 if a row has no finite maximum."""
        uniform = () if self._draw.greedy else [next_number() for next_number in self._uniform]
        tokens = self._draw.tokens(logits, uniform)
        self.tokens[:, 0] = tokens
        return tokens

    def log_probs(
        self, logits: np.ndarray, tokens: Sequence[int]
    ) -> tuple[dict[int, float], dict[int, Likeliest]]:
        """log p of the drawn tokens, and the likeliest ones, by the rows that want them."""
        wanted = self.scored
        if not wanted:
            return {}, {}
        found = log_probs_of(logits[wanted], np.array([tokens[row] for row in wanted])).tolist()
        likely = {row: likeliest(logits[row][None], top) for row, top in self.tops}
        return dict(zip(wanted, found, strict=True)), likely


def log_probs_of(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """log p float32 [N] of tokens int64 [N] from logits [N, V]."""
    chosen = np.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    found: np.ndarray = (chosen - log_sum_exp(logits)).astype(np.float32)
    return found


def likeliest(logits: np.ndarray, count: int) -> Likeliest:
    """The `count` likeliest tokens at N places, from logits [N, V]; of equals the smaller id first."""
    ids = _largest(logits, min(count, logits.shape[1]))
    log_probs = np.take_along_axis(logits, ids, axis=1) - log_sum_exp(logits)[:, None]
    return Likeliest(ids=ids, log_probs=clamped(log_probs).astype(np.float32))


def _largest(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids int64 [N, count] of the largest logits, in descending order."""
    size = logits.shape[1]
    if 4 * count < size:
        edge = np.partition(logits, size - count, axis=1)[:, size - count, None]
        rows, ids = (logits >= edge).nonzero()
        if len(ids) == count * len(logits) and (np.bincount(rows, minlength=len(logits)) == count).all():
            ids = ids.reshape(-1, count)
            order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
            return np.take_along_axis(ids, order, axis=1)
    return np.argsort(-logits, axis=1, kind="stable")[:, :count]
