"""One of several processes that serve the same streams: an engine, and the streams that all share.

A request says at which position its client believes the stream to be. It is answered after the stream was
written to the shared folder. So a replica may die at any time: the client asks again, another replica reads
the stream, and either continues from there or finds that the request was done and returns the same answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from runtimes.base.errors import UserError
from runtimes.base.records import json_text
from runtimes.contract.session import Session, is_language_model
from xl_export.serve.core.engine import Engine
from xl_export.serve.core.settings import EngineSettings, Limits
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Answer, Ended, PromptFed, Task, TokenOut
from xl_export.serve.http.base.encoding import encoding, to_json
from xl_export.serve.http.base.errors import RefusedError, doc, refuse_failure
from xl_export.serve.http.base.limits import decoded, misfit, refuse_compressed, refuse_outside, too_large
from xl_export.serve.http.base.mailbox import Mailboxes, RequestMetrics
from xl_export.serve.http.base.steps import StepOutputs, refuse_not_finite, step_task
from xl_export.serve.http.base.workers import background
from xl_export.serve.http.openai.plan import SamplingFields, sampling_params_of
from xl_export.serve.http.streams.documents import ElsewhereError
from xl_export.serve.streams.database import Database, Stream

DATABASE_FILES = 64  # the databases of a folder; the number never changes, however many replicas there are
NAME = re.compile(r"[\w-]{1,128}", re.ASCII)
MOST_TOKENS = 1 << 16  # of a request
BODY_BYTES = 1 << 22
LIMITS = Limits(prompt_tokens=MOST_TOKENS)


class MovedError(Exception):
    """Another replica has written the stream since it was read."""


class SharedStreams:
    """Streams in a folder that several replicas share, as one replica knows them.

    The name of a stream decides which of the databases it is in. Every replica may open each of them, and
    SQLite locks it for the moment of a read or a write. The row of a stream decides: what a replica has in
    RAM counts only while the row has the same version, and a write is refused if it has another one.
    """

    def __init__(self, folder: Path, session: Session, *, ram_bytes: int) -> None:
        """ram_bytes: of streams that are also kept in RAM, so that they need not be read."""
        self._folder = folder
        self._session = session
        self._ram_bytes = ram_bytes
        self._lock = threading.Lock()
        self._databases: dict[int, Database] = {}
        self._busy: set[str] = set()
        self._ram: OrderedDict[str, Stream] = OrderedDict()  # the one used longest ago first

    @contextlib.contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Until the block ends no other request to this replica uses the stream."""
        if not NAME.fullmatch(name):
            raise UserError(
                f"the name of the stream is {name!r:.60}; expected up to 128 letters, digits, - and _, drawn "
                "at random."
            )
        if name in self._busy:
            raise UnavailableError(f"another request is using the stream {name}; ask again.")
        self._busy.add(name)
        try:
            yield
        finally:
            self._busy.remove(name)

    def load(self, name: str) -> Stream:
        """The stream with its state; one that does not exist has been fed nothing. Uses the disk."""
        database = self._database(name)
        stream = database.find("", name)
        if stream is None:
            begun = StreamState.begin(self._session)
            return Stream(name, "", time.time(), time.time(), begun.memory.owner, state=begun)
        known = self._ram.get(name)
        if known is not None and (known.key, known.version) == (stream.key, stream.version):
            return known
        stream.state, _ = database.load(stream, self._session)
        if stream.state.position != stream.position:  # another replica wrote it just now
            raise MovedError
        return stream

    def commit(self, stream: Stream, state: StreamState, note: str) -> None:
        """The stream is now in this state, and the disk has it when this returns. Raises MovedError, and
        writes nothing, if another replica has written the stream since it was loaded.
        """
        database = self._database(stream.id)
        stream.used = time.time()
        if stream.key:
            if not database.replace(stream, state, note=note):
                raise MovedError
        else:
            stream.note = note
            try:
                database.insert(stream, state)
            except sqlite3.IntegrityError:
                raise MovedError from None
        stream.state = state
        with self._lock:
            self._ram[stream.id] = stream
            self._ram.move_to_end(stream.id)
            while sum(each.snapshot_bytes for each in self._ram.values()) > self._ram_bytes:
                self._ram.popitem(last=False)

    def remove(self, name: str) -> bool:
        """Removes a stream; False if there was none. Uses the disk."""
        database = self._database(name)
        stream = database.find("", name)
        if stream is not None:
            database.delete(stream)
        return stream is not None

    def _database(self, name: str) -> Database:
        number = zlib.crc32(name.encode()) % DATABASE_FILES
        with self._lock:
            if number not in self._databases:
                self._databases[number] = Database(self._folder, f"streams-{number:02}.sqlite", shared=True)
            return self._databases[number]


class UnavailableError(RefusedError):
    """The request was not done, and may be sent again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503, retry_after=1.0)


class StreamRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body of a request: feed tokens or a text to a stream, and then draw tokens; or compute a step."""

    position: Annotated[int, doc("How many tokens the stream has had; 0 begins it.")]
    text: Annotated[str | None, doc("A text that is fed next.")] = None
    tokens: Annotated[list[int] | None, doc("Token ids that are fed next.")] = None
    inputs: Annotated[
        dict[str, Any] | None, doc("The inputs of a model with named inputs, as nested lists.")
    ] = None
    score: Annotated[bool, doc("Whether the log-probability of each fed token is returned.")] = False
    max_tokens: Annotated[int, doc("How many tokens are drawn then, and fed.")] = 0
    seed: Annotated[int | None, doc("The same seed draws the same tokens; null is 0.")] = 0

    def __post_init__(self) -> None:
        # A seed chosen by the server would let another replica that does the request draw other tokens.
        self.seed = self.seed or 0


async def read_body(headers: Mapping[str, str], parts: AsyncIterable[bytes]) -> object:
    """The body of a request as JSON says it; no more of a large one is read than shows that it is too large.
    Raises RefusedError. headers: of the request, with names in lower case.
    """
    refuse_compressed(headers)
    content = bytearray()
    async for part in parts:
        content += part
        if len(content) > BODY_BYTES:
            raise too_large(BODY_BYTES)
    return await asyncio.to_thread(decoded, content, object)


class Replica:
    """Answers requests for streams. All methods run in one event loop."""

    def __init__(self, session: Session, streams: SharedStreams, settings: EngineSettings) -> None:
        self._session = session
        self._streams = streams
        self._mailboxes = Mailboxes()
        self._metrics = RequestMetrics()
        self._engine = Engine(session, settings, deliver=self._mailboxes.deliver)
        self._engine.start()

    async def answer(self, name: str, body: object) -> dict[str, Any]:
        """Does a request and answers it: the position afterwards, the tokens drawn, and what was asked for.

        The answer to a request that was done already, and whose client asks again, is what it was. A request
        that has begun is done even if its client leaves and this is cancelled: it asks again. Raises
        RefusedError or UserError, ElsewhereError if the stream is at another position, and UnavailableError.
        """
        try:
            ask = msgspec.convert(body, StreamRequest)
        except msgspec.ValidationError as error:
            raise misfit(error, StreamRequest, msgspec.json.encode(body)) from None
        if bool(ask.text) + bool(ask.tokens) + (ask.inputs is not None) != 1:
            raise RefusedError(
                "give either text or tokens, and at least one character or token; or the inputs of a step.",
                param="text",
            )
        refuse_outside("max_tokens", ask.max_tokens, 0, MOST_TOKENS)
        return await asyncio.shield(background(self._done(name, ask)))

    async def delete(self, name: str) -> bool:
        """Removes a stream; False if there was none."""
        with self._streams.operation(name):
            return await asyncio.to_thread(self._streams.remove, name)

    def stop(self, *, within: float = 3.0) -> None:
        """Ends all tasks; their clients ask another replica."""
        self._engine.stop(within=within)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._engine.alive

    async def _done(self, name: str, ask: StreamRequest) -> dict[str, Any]:
        """The answer, after it was written with the stream."""
        with self._streams.operation(name), self._engine.places.take(states=1):
            try:
                stream = await asyncio.to_thread(self._streams.load, name)
                return await self._answer(stream, ask)
            except MovedError as error:
                raise UnavailableError(f"another replica has gone on with {name}; ask again.") from error

    async def _answer(self, stream: Stream, ask: StreamRequest) -> dict[str, Any]:
        asked = hashlib.sha256(msgspec.json.encode(ask, order="deterministic")).hexdigest()
        before = stream.state
        assert before is not None, "`load` reads it"
        if stream.note and (last := json.loads(stream.note))["asked"] == asked:
            return dict(last["answer"])
        if ask.position != before.position:
            raise ElsewhereError(before.position, ask.position)
        if ask.inputs is not None:
            if is_language_model(self._session):  # its answers have too many numbers to be kept
                raise RefusedError("the model is a language model; give text or tokens.", param="inputs")
            collected = StepOutputs()
            answers = await self._answers(step_task(self._session, ask.inputs, before))
            for each in answers:
                collected.note(each)
            after = _state(answers)
            await asyncio.to_thread(refuse_not_finite, after)
            outputs = msgspec.json.decode(to_json(collected.take()))  # what JSON can hold
            return await self._kept(stream, asked, after, {"position": after.position, "outputs": outputs})
        what = "text" if ask.text else "tokens"
        prompt = ask.text or ask.tokens or ""
        tokens = await asyncio.to_thread(
            encoding, self._session.vocab, prompt, what=what, param=what, limits=LIMITS
        )
        task = Task(
            tokens=tokens,
            state=before if before.position else None,
            score=ask.score,
            sampling=sampling_params_of(ask, self._session, ask.max_tokens) if ask.max_tokens else None,
            keep=True,
        )
        answers = await self._answers(task)
        after = _state(answers)
        ended = answers[-1]
        assert isinstance(ended, Ended)
        drawn = [answer for answer in answers if isinstance(answer, TokenOut)]
        answer: dict[str, Any] = {
            "position": after.position,
            "tokens": [one.token for one in drawn],
            "text": "".join(one.text for one in drawn) + ended.text,
            "reason": ended.reason,
        }
        if ask.score:
            pieces = [
                one.log_probs for one in answers if isinstance(one, PromptFed) and one.log_probs is not None
            ]
            known = np.concatenate(pieces).tolist()
            answer["log_probs"] = [None if value != value else value for value in known]
        return await self._kept(stream, asked, after, answer)

    async def _kept(
        self, stream: Stream, asked: str, state: StreamState, answer: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer, after it was written with the stream."""
        note = json_text({"asked": asked, "answer": answer})
        await asyncio.to_thread(self._streams.commit, stream, state, note)
        return answer

    async def _answers(self, task: Task) -> list[Answer]:
        """All answers to a task."""
        with self._mailboxes.open(self._engine, self._metrics) as mailbox:
            mailbox.submit(task)
            return [answer async for _, answer in mailbox]


def _state(answers: list[Answer]) -> StreamState:
    """The state after a task that keeps it; raises RefusedError if the task has failed."""
    ended = answers[-1]
    assert isinstance(ended, Ended)
    refuse_failure(ended)
    assert ended.state is not None, "the task keeps its state"
    return ended.state
