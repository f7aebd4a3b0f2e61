"""`/v1/completions`: continues texts, as OpenAI's interface has it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
from starlette.responses import Response

from runtimes.base.errors import UserError
from xl_export.serve.core.task import (
    Answer,
    Delivery,
    Ended,
    Likeliest,
    PromptFed,
    SamplingParams,
    Task,
    TokenOut,
)
from xl_export.serve.http.base.bridge import Inbox
from xl_export.serve.http.base.encoding import CONTEXT, TokenTexts, to_json
from xl_export.serve.http.base.endpoint import Endpoints, doc
from xl_export.serve.http.base.errors import RefusedError, refuse_failure
from xl_export.serve.http.base.exchange import DONE, END, EVENT, Exchange, event, of_json
from xl_export.serve.http.base.server import Model
from xl_export.serve.http.base.workers import off_loop, size_of
from xl_export.serve.http.openai.plan import CompletionBody, Plan, plan_of

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
ENDPOINTS = Endpoints()
encode = msgspec.json.Encoder().encode


class CachedTokens(TypedDict):
    """Of the tokens of prompts, those that were not computed again."""

    cached_tokens: Annotated[
        int, doc("How many tokens of prompts were in the cache and were not computed again.")
    ]


class Usage(TypedDict):
    """How many tokens a request has had; in an event, so far."""

    prompt_tokens: Annotated[
        int, doc("How many tokens all prompts have, or all texts that were scored with their contexts.")
    ]
    completion_tokens: Annotated[int, doc("How many tokens were drawn, for all choices.")]
    total_tokens: Annotated[int, doc("The sum of prompt_tokens and completion_tokens.")]
    prompt_tokens_details: Annotated[CachedTokens, doc("How many of prompt_tokens were not computed again.")]


class TokenLogProbs(TypedDict):
    """Log-probabilities of tokens in OpenAI's form: four lists of the same length."""

    tokens: Annotated[list[str], doc("The text or the name of each token.")]
    token_logprobs: Annotated[
        list[float | None],
        doc("The log-probability of each token in nats; null for a token with nothing before it."),
    ]
    top_logprobs: Annotated[
        list[dict[str, float] | None],
        doc("The likeliest tokens at each place and the token itself, by text, or else token_id:N."),
    ]
    text_offset: Annotated[list[int], doc("Where each token begins in the text.")]


class CompletionChoice(TypedDict):
    """One continuation; in an event, what is new of it."""

    index: Annotated[int, doc("The number of the choice in the answer.")]
    text: Annotated[str, doc("The continuation; in an event, what is new of it.")]
    logprobs: Annotated[
        TokenLogProbs | None, doc("The log-probabilities of the tokens, if they were asked for.")
    ]
    finish_reason: Annotated[
        Literal["stop", "length"] | None, doc("Why the text ended: at `stop`, or by its length.")
    ]


class CompletionFacts(TypedDict):
    """What the answer and each event have."""

    id: Annotated[str, doc("The name of the answer.")]
    object: Annotated[Literal["text_completion"], doc("The kind of this document.")]
    created: Annotated[int, doc("Seconds since 1970.")]
    model: Annotated[str, doc("The name of the model.")]
    seed: Annotated[
        int | None, doc("The seed with which the same tokens are drawn again; null if none are drawn.")
    ]
    choices: Annotated[
        list[CompletionChoice], doc("The continuations; empty in the last event with the usage.")
    ]


class Completions(CompletionFacts):
    """The continuations of all prompts."""

    usage: Annotated[Usage, doc("How many tokens the request has had.")]


class CompletionEvent(CompletionFacts, total=False):
    """One server-sent event of an answer that is streamed. After the last one comes `[DONE]`."""

    usage: Annotated[Usage | None, doc("How many tokens the request has had so far.")]


@ENDPOINTS.add(
    "POST", "/v1/completions", queued=True, answer=Completions, event=CompletionEvent, refused=(404, 503)
)
async def completions(exchange: Exchange, body: CompletionBody) -> Response | None:
    """Continues texts."""
    server = exchange.server
    model = server.model(body.model)
    plan = await exchange.off_loop(plan_of, body, model.session, server.limits)
    return await Completion(plan, model, exchange).run()


@dataclass(eq=False)
class _Prompt:
    """A prompt while it is fed, and its choices."""

    tokens: np.ndarray
    #: What comes before each choice; empty if the prompt is not repeated.
    text: str
    #: Of its tokens, if they are wanted.
    log_probs: LogProbs | None
    choices: list[_Choice] = field(default_factory=list)
    #: Tokens so far.
    fed: int = 0

    def score(self, fed: PromptFed) -> None:
        """Notes the log-probabilities of a piece that was fed."""
        if self.log_probs is not None and fed.log_probs is not None:
            tokens = self.tokens[self.fed : self.fed + fed.count].tolist()
            for at, (token, log_prob) in enumerate(zip(tokens, fed.log_probs.tolist(), strict=True)):
                self.log_probs.add(token, log_prob, fed.likeliest, at)


@dataclass(eq=False)
class _Choice:
    """One choice while it is drawn."""

    prompt: _Prompt
    #: Of the choice in the answer and in the numbers that it is drawn with.
    index: int
    #: An event of it up to the text.
    head: bytes
    #: Of its tokens, if they are wanted or rank the choices.
    log_probs: LogProbs | None
    tokens: int = 0
    #: Its text, if the answer is one document.
    parts: list[str] = field(default_factory=list)
    #: Whether a token of it has come.
    begun: bool = False
    #: Why it ended; None before its end, and if the server has cut it short.
    reason: str | None = None

    @property
    def mean_log_prob(self) -> float:
        """By which the best choices are chosen, as OpenAI does."""
        return self.log_probs.sum / max(1, self.log_probs.count) if self.log_probs else 0.0


class Completion:
    """One request on its way from its prompts to its choices.

    A prompt with one choice is one task. A prompt with several is fed once by a task of its own, whose state
    all of its choices go on from.
    """

    def __init__(self, plan: Plan, model: Model, exchange: Exchange) -> None:
        self._plan = plan
        self._model = model
        self._exchange = exchange
        # Sends an event at once; False if the client would have to be waited for.
        self._write = exchange.wire.write
        self._owner = exchange.owner
        self._facts = {
            "id": f"cmpl-{exchange.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "seed": None if plan.sampling is None else plan.sampling.seed,
        }
        # An event without log-probabilities: what does not change is encoded once a request.
        head = EVENT + encode({**self._facts, "choices": []}).removesuffix(b"]}")
        self._tail = b',"logprobs":null,"finish_reason":null}]'
        self._tail += b',"usage":null}' + END if plan.usage else b"}" + END
        # How many of the likeliest tokens the engine returns; with any it returns log-probabilities too.
        ranked = plan.best_of > plan.n
        self._top = max(1, plan.log_probs or 0) if ranked or plan.log_probs is not None else 0
        self._alike = not self._top and not plan.each_usage  # all events, but for their texts
        self._prompts: list[_Prompt] = []
        self._choices: list[_Choice] = []
        for tokens, text in zip(plan.prompts, plan.texts, strict=True):
            scores = plan.echo and plan.log_probs is not None
            prompt = _Prompt(tokens, text, self._log_probs(tokens[:0], 0) if scores else None)
            for _ in range(plan.best_of):
                collected = self._log_probs(tokens, len(text)) if self._top else None
                index = len(self._choices)
                own = head + b'{"index":%d,"text":' % index
                prompt.choices.append(_Choice(prompt, index, own, collected))
                self._choices.append(prompt.choices[-1])
            self._prompts.append(prompt)
        #: What each task feeds, and what it draws, if it does.
        self._tasks: dict[Task, tuple[_Prompt, _Choice | None]] = {}
        self._cached = 0  # tokens of prompts
        self._ready = bytearray()  # events that have not been sent

    async def run(self) -> Response | None:
        """Submits the tasks and sends events, or returns the whole answer."""
        exchange = self._exchange
        plan = self._plan
        # A prompt with several choices is fed by a task of its own, whose state they begin with.
        states = len(self._prompts) if plan.best_of > 1 else 0
        with self._model.tasks.places.take(len(self._choices), states), self._model.inbox() as inbox:
            try:
                for prompt in self._prompts:
                    self._submit_prompt(inbox, prompt)
                while inbox.running:
                    refusal = await self._take_all(inbox, await inbox.get())
                    # Where nothing was sent yet, a refusal becomes the whole answer, with its own status.
                    if self._ready and (refusal is None or exchange.status):
                        data = bytes(self._ready)
                        self._ready = bytearray()
                        await exchange.events(data)
                    if refusal is not None:
                        raise refusal
                if plan.stream:
                    last = b""
                    if plan.usage:
                        last = event({**self._facts, "choices": [], "usage": self._usage()})
                    await exchange.end(last + DONE)
                    return None
                shown = plan.prompt_tokens if plan.echo else 0
                size = size_of(shown + self._drawn, plan.log_probs)
                document = {**self._facts, "choices": self._best(), "usage": self._usage()}
                return of_json(await off_loop(size, to_json, document))
            finally:
                exchange.note.update(
                    model=self._model.name,
                    prompt_tokens=plan.prompt_tokens,
                    cached_tokens=self._cached,
                    completion_tokens=self._drawn,
                    reason=",".join(sorted({choice.reason or "unfinished" for choice in self._choices})),
                )

    def _submit_prompt(self, inbox: Inbox, prompt: _Prompt) -> None:
        choice = prompt.choices[0] if self._plan.best_of == 1 else None
        scores = prompt.log_probs is not None
        task = Task(
            tokens=prompt.tokens,
            score=scores,
            top=self._top if choice is not None or scores else 0,
            sampling=None if choice is None else self._sampling(choice),
            keep=choice is None,
            owner=self._owner,
        )
        self._tasks[task] = prompt, choice
        inbox.submit(task)

    async def _submit_choices(self, inbox: Inbox, prompt: _Prompt, ended: Ended) -> None:
        """The choices of a prompt that has been fed."""
        for choice in prompt.choices:
            sampling = self._sampling(choice)
            if sampling is None:
                await self._end(choice, Ended(reason="length"))
                continue
            assert ended.state is not None, "the task that fed a prompt keeps its state"
            task = Task(
                tokens=prompt.tokens[:0],
                state=ended.state,
                top=self._top,
                sampling=sampling,
                owner=self._owner,
            )
            self._tasks[task] = prompt, choice
            inbox.submit(task)

    def _sampling(self, choice: _Choice) -> SamplingParams | None:
        sampling = self._plan.sampling
        return (
            None if sampling is None else replace(sampling, index=choice.index, prompt=choice.prompt.tokens)
        )

    async def _take_all(self, inbox: Inbox, delivery: Delivery) -> RefusedError | UserError | None:
        """Notes all answers, also those after a failure, which belong to other choices; the first failure."""
        first: RefusedError | UserError | None = None
        for task, answers in delivery:
            try:
                await self._take(inbox, task, answers)
            except (RefusedError, UserError) as refusal:
                first = first or refusal
            if self._plan.log_probs is not None:  # many choices make many small events
                await asyncio.sleep(0)
        return first

    async def _take(self, inbox: Inbox, task: Task, answers: list[Answer]) -> None:
        """Notes the answers of one task, and makes events of them."""
        prompt, choice = self._tasks[task]
        for answer in answers:
            if type(answer) is PromptFed:
                if prompt.log_probs is not None:
                    size = size_of(answer.count, self._plan.log_probs)
                    await off_loop(size, prompt.score, answer)
                prompt.fed += answer.count
                self._cached += answer.cached
            elif type(answer) is TokenOut and choice is not None:
                if not choice.begun:
                    await self._begin(choice)
                    if self._alike:
                        inbox.pass_on(task, partial(self._draw, choice, self._write))
                self._draw(choice, self._gather, answer)
            elif type(answer) is Ended and choice is not None:
                await self._end(choice, answer)
            elif type(answer) is Ended:
                refuse_failure(answer)
                await self._submit_choices(inbox, prompt, answer)

    # What is sent.

    async def _begin(self, choice: _Choice) -> None:
        """Called before anything of a choice is sent: sends the prompt if it is repeated."""
        choice.begun = True
        if self._plan.echo and self._plan.stream:
            size = size_of(len(choice.prompt.tokens), self._plan.log_probs)
            self._ready += await off_loop(size, self._repeated, choice)

    def _repeated(self, choice: _Choice) -> bytes:
        prompt = choice.prompt
        log_probs = None if prompt.log_probs is None else prompt.log_probs.all()
        return event(self._document(choice, prompt.text, log_probs))

    def _draw(self, choice: _Choice, write: Callable[[bytes], bool], drawn: TokenOut) -> bool:
        """One more token: an event, or nothing if its text is not complete yet. False, and nothing has
        changed, if `write` returns that.
        """
        streamed = self._plan.stream
        has_event = streamed and self._alike and drawn.text
        if has_event and not write(choice.head + encode(drawn.text) + self._tail):
            return False
        choice.tokens += 1
        collected = choice.log_probs
        if collected is not None:
            collected.add(drawn.token, drawn.log_prob, drawn.likeliest)
        if not streamed:
            choice.parts.append(drawn.text)
        elif not self._alike:
            log_probs = None if collected is None else collected.take()
            write(event(self._document(choice, drawn.text, log_probs)))
        return True

    def _gather(self, data: bytes) -> bool:
        """Keeps an event until those of all choices are sent together."""
        self._ready += data
        return True

    async def _end(self, choice: _Choice, ended: Ended) -> None:
        """The end of a choice, with the text that was held back; raises RefusedError for one cut short."""
        reason = REASONS.get(ended.reason)
        if reason and not choice.begun:
            await self._begin(choice)
        choice.reason = reason
        if not self._plan.stream:
            choice.parts.append(ended.text)
        elif choice.reason or ended.text:
            self._ready += event(self._document(choice, ended.text, None))
        refuse_failure(ended)

    def _best(self) -> list[dict[str, Any]]:
        """Of each prompt the `n` best choices, in order, for a whole answer."""
        plan = self._plan
        found: list[dict[str, Any]] = []
        for prompt in self._prompts:
            choices = prompt.choices
            if plan.best_of > plan.n:
                choices = sorted(choices, key=lambda choice: -choice.mean_log_prob)[: plan.n]
            for choice in choices:
                log_probs = None
                if plan.log_probs is not None:
                    pieces = [each.all() for each in (prompt.log_probs, choice.log_probs) if each is not None]
                    log_probs = {name: [x for piece in pieces for x in piece[name]] for name in pieces[0]}
                text = prompt.text + "".join(choice.parts)
                found.append(self._one(len(found), text, log_probs, choice.reason))
        return found

    def _document(self, choice: _Choice, text: str, log_probs: dict[str, Any] | None) -> dict[str, Any]:
        """An event of a choice."""
        one = self._one(choice.index, text, log_probs, choice.reason)
        document = {**self._facts, "choices": [one]}
        if self._plan.each_usage:
            document["usage"] = self._usage()
        elif self._plan.usage:
            document["usage"] = None
        return document

    @staticmethod
    def _one(index: int, text: str, log_probs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}

    def _log_probs(self, before: np.ndarray, offset: int) -> LogProbs:
        plan = self._plan
        return LogProbs(self._model.texts, plan.log_probs or 0, before, offset, as_ids=plan.as_ids)

    def _usage(self) -> Usage:
        return usage(self._plan.prompt_tokens, self._drawn, self._cached)

    @property
    def _drawn(self) -> int:
        """How many tokens were drawn, for all choices."""
        return sum([choice.tokens for choice in self._choices])


def usage(prompt: int, drawn: int, cached: int) -> Usage:
    """The usage of a request in OpenAI's form. cached: tokens of the prompt that were not computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class LogProbs:
    """Collects tokens with their log-probabilities in OpenAI's form.

    top: how many of the likeliest tokens are returned for each. before: the tokens before the first one
    that is added. The texts of the tokens make up the whole text; if a token completes no character, its
    text is empty. as_ids: whether each token is named `token_id:N` instead of by its text.
    """

    def __init__(
        self, texts: TokenTexts, top: int, before: np.ndarray, offset: int = 0, *, as_ids: bool = False
    ) -> None:
        self._texts = texts
        self._top = top
        self._offset = offset
        self._as_ids = as_ids
        self._decode = texts.vocab.decoder()
        self._decode.prime(before[-CONTEXT:].tolist())
        self._last = int(before[-1]) if len(before) else None
        self._clear()
        self.sum = 0.0
        self.count = 0

    def add(self, token: int, log_prob: float | None, likeliest: Likeliest | None, at: int = 0) -> None:
        """One token. log_prob: None or NaN if it is not known, as for the first token of a text. likeliest,
        at: the likeliest tokens, and the place of this one among theirs.
        """
        text = self._decode(token)
        known = None if log_prob is None or math.isnan(log_prob) else log_prob
        self._tokens.append(_id_name(token) if self._as_ids else text)
        self._token_log_probs.append(known)
        self._offsets.append(self._offset)
        self._offset += len(text)
        self._likeliest.append(None if known is None else self._named(token, text, known, likeliest, at))
        self._last = token
        if known is not None:
            self.sum += known
            self.count += 1

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        document = self._document(self._tokens)
        self._clear()
        return document

    def all(self) -> dict[str, Any]:
        """What was added since the last `take`, as the end of a text: its last token has the rest of it."""
        tokens = self._tokens
        if tokens and not self._as_ids:
            tokens = [*tokens[:-1], tokens[-1] + self._decode.rest()]
        return self._document(tokens)

    def _document(self, tokens: list[str]) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "token_logprobs": self._token_log_probs,
            "top_logprobs": self._likeliest,
            "text_offset": self._offsets,
        }

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._token_log_probs: list[float | None] = []
        self._likeliest: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def _named(
        self, token: int, text: str, log_prob: float, likeliest: Likeliest | None, at: int
    ) -> dict[str, float]:
        """The likeliest tokens and the token itself by their texts.

        Clients look for the token among them, by its text or its number, to see whether it was the likeliest.
        So its text is its own here, and has the same number as in the list. Another token with that text, or
        with the text of a likelier one, is named by its id.
        """
        own = self._name(token, text)
        named: dict[str, float] = {}
        if self._top and likeliest is not None:
            ids = likeliest.ids[at, : self._top].tolist()
            for other, value in zip(ids, likeliest.log_probs[at].tolist(), strict=False):
                if other != token:
                    name = self._name(other, "" if self._as_ids else self._texts.after(self._last, other))
                    named[_id_name(other) if name == own or name in named else name] = value
        named[own] = log_prob
        return named

    def _name(self, token: int, text: str) -> str:
        return _id_name(token) if self._as_ids or not text else text


def _id_name(token: int) -> str:
    """The name of a token by its id, as vLLM has it."""
    return f"token_id:{token}"
