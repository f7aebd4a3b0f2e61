"""One of several processes that serve the same streams: an engine, and the streams that all share.

A request says at which position its client believes the stream to be. It is answered after the stream was
written to the shared folder. So a replica may die at any time: the client asks again, another replica reads
the stream, and either goes on from there or finds that the request was done and returns the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator
from typing import Annotated, Any

import msgspec
import numpy as np

from runtimes.base.errors import UserError
from runtimes.contract.session import Session
from xl_export.serve.core.admission import Busy, StoppedError
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Answer, Delivery, Drawn, Ended, Fed, Task
from xl_export.serve.http.base.body import decoded, decoding_error, too_large
from xl_export.serve.http.base.encoding import encoding
from xl_export.serve.http.base.endpoint import doc
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.limits import Limits
from xl_export.serve.http.base.workers import finished
from xl_export.serve.http.openai.plan import SamplingFields, drawing_of
from xl_export.serve.shared import MovedError, SharedStream, SharedStreams

LOG = logging.getLogger(__name__)
RETRY_WRITING = 10.0  # seconds after which a folder that could not be written may be again
ALL = 1 << 40  # answers that may be unread: they are collected until a request is done
MOST_TOKENS = 1 << 16  # of a request
BODY_BYTES = 1 << 22
LIMITS = Limits(prompt_tokens=MOST_TOKENS)
ANYTHING = msgspec.json.Decoder()
STOPS = "the replica stops; ask again."


class ConflictError(RefusedError):
    """The stream is not at the position that the request says."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=409, param="position", code="other_position")


class UnavailableError(RefusedError):
    """The request was not done, and may be sent again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message, status=503, retry_after=retry_after)


class StreamRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body of a request: feed tokens or a text to a stream, and then draw tokens."""

    position: Annotated[int, doc("How many tokens the stream has had; 0 begins it.")]
    text: Annotated[str | None, doc("A text that is fed next.")] = None
    tokens: Annotated[list[int] | None, doc("Token ids that are fed next.")] = None
    score: Annotated[bool, doc("Whether the log-probability of each fed token is returned.")] = False
    max_tokens: Annotated[int, doc("How many tokens are drawn then, and fed.")] = 0
    seed: Annotated[int | None, doc("The same seed draws the same tokens; null is 0.")] = 0

    def __post_init__(self) -> None:
        # A seed chosen by the server would let another replica that does the request draw other tokens.
        self.seed = self.seed or 0


async def read_body(parts: AsyncIterable[bytes], declared: str) -> object:
    """The body of a request as JSON says it. No more of a large one is read than shows that it is too large.

    declared: its length as the client says it, or nothing. Raises RefusedError.
    """
    size = int(declared) if declared.isdecimal() else 0
    content = bytearray()
    if size <= BODY_BYTES:
        async for part in parts:
            content += part
            if len(content) > BODY_BYTES:
                break
    if max(size, len(content)) > BODY_BYTES:
        raise too_large(BODY_BYTES)
    return await asyncio.to_thread(finished, decoded(content, ANYTHING, LIMITS))


class Replica:
    """Answers requests for streams. All methods run in one event loop.

    ram_bytes: of streams that are also kept in RAM, so that they need not be read.
    """

    def __init__(
        self, session: Session, streams: SharedStreams, *, settings: EngineSettings, ram_bytes: int
    ) -> None:
        self._session = session
        self._streams = streams
        self._ram_bytes = ram_bytes
        unread = EngineSettings(
            rows=settings.rows,
            queue=settings.queue,
            prompt_tokens=settings.prompt_tokens,
            unread=ALL,
        )
        self._engine = Engine(session, unread, deliver=self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: dict[Task, tuple[list[Answer], asyncio.Future[None]]] = {}
        self._ram: OrderedDict[str, SharedStream] = OrderedDict()
        self._busy: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()  # requests that have or want each of these locks
        self._begun: set[asyncio.Task[dict[str, Any]]] = set()  # the loop itself keeps no task alive
        self._engine.start()

    async def answer(self, name: str, body: object) -> dict[str, Any]:
        """Does a request and answers it: the position afterwards, the tokens drawn, and what was asked for.

        The answer to a request that was done already, and whose client asks again, is what it was. A request
        that has begun is done even if its client leaves and this is cancelled: it asks again. Raises
        RefusedError, ConflictError if the stream is at another position, and UnavailableError.
        """
        self._loop = asyncio.get_running_loop()
        try:
            ask = msgspec.convert(body, StreamRequest)
        except msgspec.ValidationError as error:
            raise RefusedError(decoding_error(error, StreamRequest)) from None
        if bool(ask.text) == bool(ask.tokens):
            raise RefusedError(
                "give either text or tokens, and at least one character or token.", param="text"
            )
        if not 0 <= ask.max_tokens <= MOST_TOKENS:
            raise RefusedError(
                f"max_tokens is {ask.max_tokens}; expected 0 to {MOST_TOKENS}.", param="max_tokens"
            )
        asked = hashlib.sha256(msgspec.json.encode(ask, order="deterministic")).hexdigest()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._alone(name))
            begun = asyncio.create_task(self._within(stack.pop_all(), name, ask, asked))
        self._begun.add(begun)
        begun.add_done_callback(self._begun.discard)
        return await asyncio.shield(begun)

    async def _within(
        self, alone: contextlib.AsyncExitStack, name: str, ask: StreamRequest, asked: str
    ) -> dict[str, Any]:
        """The answer, and then the stream is left to other requests."""
        async with alone:
            return await self._answer(name, ask, asked)

    @contextlib.asynccontextmanager
    async def _alone(self, name: str) -> AsyncIterator[None]:
        """While the block runs, no other request of this replica uses the stream."""
        lock = self._busy.setdefault(name, asyncio.Lock())
        self._users[name] += 1
        try:
            async with lock:
                yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._busy[name]

    async def _answer(self, name: str, ask: StreamRequest, asked: str) -> dict[str, Any]:
        before = await asyncio.to_thread(self._current, name)
        if before is not None and before.asked == asked:
            return before.answer
        position = 0 if before is None else before.state.position
        if ask.position != position:
            raise ConflictError(
                f"the stream {name} has had {position} tokens and the request says {ask.position}; send the "
                "tokens from there, or begin another stream."
            )
        vocab = self._session.vocab
        what = "text" if ask.text else "tokens"
        steps = encoding(vocab, ask.text or ask.tokens or "", what=what, param=what, limits=LIMITS)
        task = Task(
            tokens=await asyncio.to_thread(finished, steps),
            state=None if before is None else before.state,
            score=ask.score,
            drawing=drawing_of(ask, self._session, ask.max_tokens) if ask.max_tokens else None,
            keep=True,
            cached=False,
        )
        answers = await self._done(task)
        ended = answers[-1]
        assert isinstance(ended, Ended)
        if ended.reason in ("cancelled", "stopped", "failed") or ended.state is None:
            raise UnavailableError(ended.error or STOPS)
        drawn = [answer for answer in answers if isinstance(answer, Drawn)]
        answer: dict[str, Any] = {
            "position": ended.state.position,
            "tokens": [one.token for one in drawn],
            "text": "".join(one.text for one in drawn) + ended.text,
            "reason": ended.reason,
        }
        if ask.score:
            pieces = [one.log_probs for one in answers if isinstance(one, Fed) and one.log_probs is not None]
            known = np.concatenate(pieces).tolist()
            answer["log_probs"] = [None if value != value else value for value in known]
        version = None if before is None else before.version
        after = SharedStream(
            version=hashlib.sha256(f"{version or ''}{asked}".encode()).hexdigest(),
            asked=asked,
            answer=answer,
            state=ended.state,
        )
        try:
            await asyncio.to_thread(self._streams.write, name, after, before=version)
        except MovedError as error:
            raise UnavailableError(f"another replica has gone on with {name}; ask again.") from error
        except (OSError, UserError) as error:  # no fault of the request; only the log has the path
            LOG.error("the state of %s was not written: %s", name, error)
            raise UnavailableError(
                f"the state of {name} cannot be stored now, so the request was not done; ask again later.",
                retry_after=RETRY_WRITING,
            ) from error
        self._hold(name, after)
        return answer

    async def delete(self, name: str) -> bool:
        """Removes a stream, after the requests that use it; False if there was none."""
        async with self._alone(name):
            self._ram.pop(name, None)
            return await asyncio.to_thread(self._streams.delete, name)

    def stop(self, *, within: float = 3.0) -> None:
        """Ends all tasks; their clients ask another replica."""
        self._engine.stop(within=within)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._engine.alive

    def _current(self, name: str) -> SharedStream | None:
        """The stream as the folder has it; from RAM if the version there is the same."""
        held = self._ram.get(name)
        if held is not None and self._streams.version(name) == held.version:
            return held
        return self._streams.read(name)

    def _hold(self, name: str, stream: SharedStream) -> None:
        self._ram[name] = stream
        self._ram.move_to_end(name)
        while len(self._ram) > max(1, self._ram_bytes // max(1, stream.state.num_bytes)):
            self._ram.popitem(last=False)

    async def _done(self, task: Task) -> list[Answer]:
        """All answers to a task."""
        collected: list[Answer] = []
        future = asyncio.get_running_loop().create_future()
        self._answers[task] = collected, future
        try:
            self._engine.submit(task)
            await future
        except Busy as error:
            raise UnavailableError(
                "the queue of the replica is full; ask again.", error.retry_after
            ) from error
        except StoppedError as error:
            raise UnavailableError(STOPS) from error
        finally:
            self._answers.pop(task, None)
            if not future.done():
                self._engine.cancel(task)
        return collected

    def _deliver(self, delivery: Delivery) -> None:
        """Called on the engine's thread, once a step."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._spread, delivery)

    def _spread(self, delivery: Delivery) -> None:
        for task, answers in delivery:
            if task in self._answers:
                collected, future = self._answers[task]
                collected += answers
                if isinstance(answers[-1], Ended) and not future.done():
                    future.set_result(None)
