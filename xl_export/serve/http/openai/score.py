"""`/v1/score`: the log-probability of independent texts, as `xl-export score` prints it.

A context is fed once for all texts of a request that share it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from runtimes.base.errors import UserError
from runtimes.contract.vocabulary import Vocab
from runtimes.tasks.text_rows import Context, Reader, Row, TextToScore, tokens_around
from xl_export.serve.core.settings import Limits
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Ended, PromptFed, Task
from xl_export.serve.http.base.context import RequestContext, of_json
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import RefusedError, doc, refuse_failure
from xl_export.serve.http.base.limits import refuse_long_prompt
from xl_export.serve.http.base.server import Model
from xl_export.serve.http.base.token_log import TokenLog
from xl_export.serve.http.base.workers import off_loop, size_of_tokens
from xl_export.serve.http.openai.completions import Usage

MAX_TEXTS_AT_ONCE = 32  # texts of one request that the engine has at once
ENDPOINTS = Endpoints()


class ScoredText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text with what comes before it."""

    text: Annotated[str | list[int], doc("A text, or token ids.")]
    context: Annotated[
        str | list[int], doc("What comes before the text: a text or token ids. It is read and not scored.")
    ] = ""
    id: Annotated[str | int | None, doc("Comes back with the score.")] = None


class ScoreBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request, as the options of `xl-export score`."""

    texts: Annotated[
        list[str | list[int] | ScoredText],
        doc("Texts, lists of token ids, or objects with a context and an id."),
    ]
    model: Annotated[str | None, doc("A name from /v1/models; without it the first model answers.")] = None
    bos: Annotated[
        bool, doc("Whether the first token of a text is predicted from the token that precedes a text.")
    ] = False
    eos: Annotated[bool, doc("Whether the token that ends a text is predicted after it.")] = False
    tokens: Annotated[bool, doc("Whether the log-probability of each token is returned.")] = False


class ScoredToken(msgspec.Struct, kw_only=True):
    """One token of a text that was scored."""

    id: Annotated[int, doc("The id of the token.")]
    text: Annotated[str, doc("The text of the token.")]
    log_prob: Annotated[float, doc("The log-probability of the token in nats.")]


class TextScore(msgspec.Struct, kw_only=True):
    """The score of one text, under the names of `xl-export score --json`."""

    index: Annotated[int, doc("The number of the text in the request.")]
    id: Annotated[int | str, doc("The id from the request, or else the number of the text.")]
    log_prob: Annotated[float, doc("The sum of the log-probabilities of its tokens, in nats.")]
    tokens: Annotated[int, doc("How many tokens were scored.")]
    unknown: Annotated[int, doc("How many symbols of the text the vocabulary does not have.")]
    characters: Annotated[int | None, doc("How many characters the text has; null if it was given as ids.")]
    bytes: Annotated[int | None, doc("How many bytes of UTF-8 the text has; null if it was given as ids.")]
    token_log_probs: Annotated[
        list[ScoredToken] | UnsetType,
        doc("The log-probability of each token in nats, if they were asked for."),
    ] = UNSET


class Scores(msgspec.Struct, kw_only=True):
    """The scores of all texts, in the order of the request."""

    object: Annotated[Literal["list"], doc("The kind of this document.")]
    model: Annotated[str, doc("The name of the model.")]
    data: Annotated[list[TextScore], doc("The scores, in the order of the request.")]
    usage: Annotated[Usage, doc("How many tokens the request has had.")]


@ENDPOINTS.add("POST", "/v1/score", queued=True, answer=Scores, refused=(404, 503))
async def score(request: RequestContext, body: ScoreBody) -> Response:
    """The log-probability of each text."""
    server = request.server
    model = server.model(body.model)
    rows = await request.off_loop(rows_of, body, model.session.vocab, server.limits)
    return await Scoring(rows, body.tokens, model, request).run()


def rows_of(body: ScoreBody, vocab: Vocab, limits: Limits) -> list[Row]:
    """The texts as tokens; raises RefusedError for what cannot be scored."""
    if not 1 <= len(body.texts) <= limits.texts:
        raise RefusedError(f"there are {len(body.texts)} texts; expected 1 to {limits.texts}.", param="texts")
    try:
        before, after = tokens_around(vocab, bos=body.bos, eos=body.eos)
    except UserError as error:
        raise RefusedError(str(error), param=str(error).partition(" ")[0]) from error
    texts = [_text(text, number) for number, text in enumerate(body.texts)]
    rows: list[Row] = []
    contexts: set[Context] = set()
    tokens = 0
    try:
        for row, _ in Reader(vocab, iter(texts), before, after, 1).rows():
            rows.append(row)
            tokens += len(row.stream) + (0 if row.context in contexts else len(row.context.fed))
            contexts.add(row.context)
            refuse_long_prompt(limits, tokens, "texts")
    except UserError as error:
        raise RefusedError(str(error), param="texts") from error
    return rows


@dataclass(eq=False)
class _Text:
    """A text while it is scored."""

    row: Row
    log: TokenLog
    fed: int = 0
    """Number of tokens of its stream that were fed."""

    def note(self, count: int, log_probs: np.ndarray) -> None:
        """Notes the next tokens. The first one is what the text is predicted from, and is not scored."""
        skipped = 0 if self.fed else 1
        self.log.add(self.row.stream[self.fed + skipped : self.fed + count], log_probs[skipped:])
        self.fed += count


class Scoring:
    """One request on its way from its texts to their scores."""

    def __init__(self, rows: list[Row], each: bool, model: Model, request: RequestContext) -> None:
        self._each = each
        self._model = model
        self._request = request
        self._owner = request.owner
        vocab = model.session.vocab
        self._texts = [_Text(row, TokenLog(vocab, row.stream[:0], shown=True, top=0)) for row in rows]
        self._scored: dict[Task, _Text] = {}  # what each task scores
        self._contexts: dict[Task, list[_Text]] = {}  # the texts that follow what a task feeds
        self._tokens = 0

    async def run(self) -> Response:
        """Submits the texts, some at a time; all scores at the end."""
        waiting = list(self._first_tasks())[::-1]
        places = self._model.engine.places
        contexts = len(self._contexts)
        # Texts that follow a context come before the next context. So there are never more states of contexts
        # than tasks at once.
        at_once = min(
            MAX_TEXTS_AT_ONCE,
            len(self._texts),
            places.most,
            places.most_states if contexts else MAX_TEXTS_AT_ONCE,
        )
        with places.take(at_once, min(contexts, at_once)), self._model.mailbox() as mailbox:
            for _ in range(min(at_once, len(waiting))):
                mailbox.submit(waiting.pop())
            async for task, answer in mailbox:
                if isinstance(answer, PromptFed) and answer.log_probs is not None:
                    self._scored[task].note(answer.count, answer.log_probs)
                elif isinstance(answer, Ended):
                    refuse_failure(answer)
                    waiting += self._after(task, answer.state)
                    while waiting and mailbox.running < at_once:
                        mailbox.submit(waiting.pop())
        self._request.note.update(model=self._model.name, texts=len(self._texts), prompt_tokens=self._tokens)
        size = size_of_tokens(len(self._texts) + (self._tokens if self._each else 0))
        return of_json(await off_loop(size, self._document))

    def _first_tasks(self) -> Iterator[Task]:
        """The texts without context, and a task for each context."""
        groups: dict[Context, list[_Text]] = defaultdict(list)
        for text in self._texts:
            if len(text.row.stream) > 1:
                groups[text.row.context].append(text)
        for context, texts in groups.items():
            if len(context.fed):
                task = Task(tokens=context.fed, keep=True, cached=False, owner=self._owner)
                self._contexts[task] = texts
                self._tokens += len(context.fed)
                yield task
            else:
                yield from (self._task(text, None) for text in texts)

    def _after(self, task: Task, state: StreamState | None) -> list[Task]:
        """Notes that a task has ended; the tasks of the texts that follow it, if it has fed a context."""
        texts = self._contexts.pop(task, None)
        if texts is None:
            del self._scored[task]
            return []
        assert state is not None, "the task that fed a context keeps its state"
        return [self._task(text, state) for text in texts]

    def _task(self, text: _Text, state: StreamState | None) -> Task:
        stream = text.row.stream
        self._tokens += len(stream)
        task = Task(tokens=stream, state=state, score=True, owner=self._owner)
        self._scored[task] = text
        return task

    def _document(self) -> bytes:
        """The scores of all texts as JSON."""
        data = [self._score(index, text) for index, text in enumerate(self._texts)]
        usage = Usage.of(self._tokens)
        return msgspec.json.encode(Scores(object="list", model=self._model.name, data=data, usage=usage))

    def _score(self, index: int, text: _Text) -> TextScore:
        row = text.row
        log = text.log
        each: list[ScoredToken] | UnsetType = UNSET
        if self._each:
            tokens = log.take(at_end=True)
            each = [
                ScoredToken(id=token, text=piece, log_prob=log_prob)
                for token, piece, log_prob in zip(tokens.ids, tokens.texts, tokens.log_probs, strict=True)
                if log_prob is not None
            ]
        return TextScore(
            index=index,
            id=row.number if row.source.id is None else row.source.id,
            log_prob=log.total,
            tokens=log.known,
            unknown=row.unknown,
            characters=None if row.size is None else row.size.characters,
            bytes=None if row.size is None else row.size.num_bytes,
            token_log_probs=each,
        )


def _text(text: str | list[int] | ScoredText, number: int) -> TextToScore:
    place = f"text {number}"
    if isinstance(text, ScoredText):
        return TextToScore(text=text.text, context=text.context, id=text.id, place=place)
    return TextToScore(text=text, place=place)
