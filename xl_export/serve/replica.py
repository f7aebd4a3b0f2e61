"""One of several processes that serve the same streams: an engine, and the streams that all share.

A request says at which position its client believes the stream to be. It is answered after the stream was
written to the shared folder. So whoever dies, and whenever: the client asks again, another replica reads the
stream, and either goes on from there or finds that the request was done and gives its answer again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from runtimes.base.errors import UserError
from runtimes.contract.sampling import SETTINGS
from runtimes.contract.session import Session
from runtimes.tasks.generate import encode_prompt
from xl_export.serve.core.admission import Busy, StoppedError
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.settings import EngineSettings
from xl_export.serve.core.task import Answer, Delivery, Drawing, Drawn, Ended, Fed, Task
from xl_export.serve.shared import MovedError, SharedStream, SharedStreams

LOG = logging.getLogger(__name__)
RETRY_WRITING = 10.0  # seconds after which a folder that could not be written may be again
ALL = 1 << 40  # answers that may be unread: they are collected until a request is done
MOST_TOKENS = 1 << 16  # of a request
MOST_INTEGER = (1 << 63) - 1
BODY_BYTES = 1 << 22
STOPS = "the replica stops; ask again."


class ConflictError(Exception):
    """The stream is not at the position that the request says."""


class TooLargeError(UserError):
    """The body of a request is larger than a replica reads."""


class UnavailableError(Exception):
    """The request was not done, and may be asked again in so many seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The body of a request: feed tokens or a text to a stream, and then draw tokens.

    position: how many tokens the stream has had; 0 begins it. score: whether log p of each fed token is
    wanted. max_tokens: to draw; 0 only feeds. A setting of sampling that is missing is the model's own. The
    others are as in `xl_export.serve.core.task.Drawing`.
    """

    position: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    score: bool = False
    max_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int = 0
    stop: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, body: object) -> Ask:
        """The request in parsed JSON; raises UserError for anything else."""
        if not isinstance(body, dict):
            raise UserError("the body is no JSON object; see docs/guides/ray.md.")
        kinds: dict[str, Any] = {one.name: one.type for one in fields(cls)}
        for name, value in body.items():
            if name not in kinds:
                raise UserError(f"the body has {name!r:.60}; expected some of {', '.join(kinds)}.")
            if not _fits(value, kinds[name]):
                raise UserError(f"{name} is {value!r:.60}; expected {kinds[name]}, integers of 64 bits.")
        if "position" not in body:
            raise UserError("the body has no position; give how many tokens the stream has had, at first 0.")
        ask = cls(**body)
        if bool(ask.text) == bool(ask.tokens):
            raise UserError("give either text or tokens, and at least one character or token.")
        if not 0 <= ask.max_tokens <= MOST_TOKENS or len(ask.tokens) > MOST_TOKENS:
            raise _too_many_tokens()
        return ask


def _too_many_tokens() -> UserError:
    return UserError(f"a request has at most {MOST_TOKENS:,} tokens; send several.")


def _fits(value: object, kind: str) -> bool:
    kind = kind.removesuffix(" | None")
    if kind.startswith("list"):
        inner = "str" if "str" in kind else "int"
        return isinstance(value, list) and all(_fits(item, inner) for item in value)
    if type(value) is int:
        return kind in ("int", "float") and -MOST_INTEGER <= value <= MOST_INTEGER
    return type(value).__name__ == kind


async def parsed(parts: AsyncIterable[bytes], declared: str) -> object:
    """The body of a request in parsed JSON. No more of a large one is read than what shows that it is.

    declared: its length as the client says it, or nothing. Raises UserError.
    """
    size = int(declared) if declared.isdecimal() else 0
    content = bytearray()
    if size <= BODY_BYTES:
        async for part in parts:
            content += part
            if len(content) > BODY_BYTES:
                break
    if max(size, len(content)) > BODY_BYTES:
        raise TooLargeError(f"the body has more than {BODY_BYTES:,} bytes; send several requests.")
    try:
        return await asyncio.to_thread(json.loads, content)
    except (ValueError, RecursionError) as error:
        raise UserError("the body is not JSON; send a JSON object.") from error


class Replica:
    """Answers requests for streams. All methods run in one event loop.

    ram_bytes: of streams that are kept beside the folder, so that they need not be read.
    """

    def __init__(
        self, session: Session, streams: SharedStreams, *, settings: EngineSettings, ram_bytes: int
    ) -> None:
        self._session, self._streams, self._ram_bytes = session, streams, ram_bytes
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
        that has begun is done also where its client leaves and this is cancelled: it asks again. Raises
        UserError, ConflictError where the stream is elsewhere, and UnavailableError.
        """
        ask = Ask.parse(body)
        asked = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self._alone(name))
            begun = asyncio.create_task(self._within(stack.pop_all(), name, ask, asked))
        self._begun.add(begun)
        begun.add_done_callback(self._begun.discard)
        return await asyncio.shield(begun)

    async def _within(
        self, alone: contextlib.AsyncExitStack, name: str, ask: Ask, asked: str
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

    async def _answer(self, name: str, ask: Ask, asked: str) -> dict[str, Any]:
        before = await asyncio.to_thread(self._current, name)
        if before is not None and before.asked == asked:
            return before.answer
        position = 0 if before is None else before.state.position
        if ask.position != position:
            raise ConflictError(
                f"the stream {name} has had {position} tokens and the request says {ask.position}; send the "
                "tokens from there, or begin another stream."
            )
        task = Task(
            tokens=await asyncio.to_thread(self._tokens, ask),
            state=None if before is None else before.state,
            score=ask.score,
            drawing=self._drawing(ask),
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
        except (OSError, UserError) as error:  # no fault of the request; the log alone has the path
            LOG.error("the state of %s was not written: %s", name, error)
            raise UnavailableError(
                f"the state of {name} cannot be stored now, so the request was not done; ask again later.",
                retry_after=RETRY_WRITING,
            ) from error
        self._hold(name, after)
        return answer

    async def delete(self, name: str) -> bool:
        """Removes a stream, after the requests that use it; False where there was none."""
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

    def _tokens(self, ask: Ask) -> np.ndarray:
        """The tokens that are fed, int64 [N]; raises UserError for too many, and for unknown ones."""
        what = "text" if ask.text else "tokens"
        tokens = encode_prompt(self._session.vocab, ask.text or ask.tokens, what=what)
        if len(tokens) > MOST_TOKENS:
            raise _too_many_tokens()
        return tokens

    def _drawing(self, ask: Ask) -> Drawing | None:
        if not ask.max_tokens:
            return None
        settings = {name: getattr(ask, name) for name in SETTINGS}
        sampler = self._session.sampler.replaced(**settings)
        return Drawing(max_tokens=ask.max_tokens, sampler=sampler, seed=ask.seed, stop=tuple(ask.stop))

    def _current(self, name: str) -> SharedStream | None:
        """The stream as the folder has it; what is in RAM is taken where its version is the same."""
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
        self._loop = asyncio.get_running_loop()
        collected: list[Answer] = []
        future = self._loop.create_future()
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
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(self._spread, delivery)

    def _spread(self, delivery: Delivery) -> None:
        for task, answers in delivery:
            if task in self._answers:
                collected, future = self._answers[task]
                collected += answers
                if isinstance(answers[-1], Ended) and not future.done():
                    future.set_result(None)
