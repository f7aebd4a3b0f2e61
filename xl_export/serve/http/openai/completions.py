"""`/v1/completions`: continues texts, as OpenAI's interface has it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from runtimes.base.errors import UserError
from xl_export.serve.core.task import Ended, PromptFed, SamplingParams, Task, TokenOut
from xl_export.serve.http.base.context import RequestContext, event, of_json
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import RefusedError, doc, refuse_failure
from xl_export.serve.http.base.mailbox import Mailbox
from xl_export.serve.http.base.server import Model
from xl_export.serve.http.base.token_log import TokenLog, Tokens, TokenTexts
from xl_export.serve.http.base.workers import off_loop, size_of_tokens
from xl_export.serve.http.openai.plan import CompletionBody, Plan, plan_of

REASONS: dict[str, Literal["stop", "length"]] = {"end": "stop", "stop": "stop", "length": "length"}
ENDPOINTS = Endpoints()


class CachedTokens(msgspec.Struct, kw_only=True):
    """How many tokens of prompts were not computed again."""

    cached_tokens: Annotated[
        int, doc("How many tokens of prompts were in the cache and were not computed again.")
    ]


class Usage(msgspec.Struct, kw_only=True):
    """How many tokens a request has had; in an event, so far."""

    prompt_tokens: Annotated[
        int, doc("How many tokens all prompts have, or all texts that were scored with their contexts.")
    ]
    completion_tokens: Annotated[int, doc("How many tokens were drawn, for all choices.")]
    total_tokens: Annotated[int, doc("The sum of prompt_tokens and completion_tokens.")]
    prompt_tokens_details: Annotated[CachedTokens, doc("How many of prompt_tokens were not computed again.")]

    @classmethod
    def of(cls, prompt: int, drawn: int = 0, cached: int = 0) -> Usage:
        """The usage of a request. cached: tokens of the prompt that were not computed again."""
        return cls(
            prompt_tokens=prompt,
            completion_tokens=drawn,
            total_tokens=prompt + drawn,
            prompt_tokens_details=CachedTokens(cached_tokens=cached),
        )


class TokenLogProbs(msgspec.Struct, kw_only=True):
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

    def followed_by(self, rest: TokenLogProbs) -> TokenLogProbs:
        """These tokens, and then others."""
        return TokenLogProbs(
            tokens=self.tokens + rest.tokens,
            token_logprobs=self.token_logprobs + rest.token_logprobs,
            top_logprobs=self.top_logprobs + rest.top_logprobs,
            text_offset=self.text_offset + rest.text_offset,
        )


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation; in an event, what is new of it."""

    index: Annotated[int, doc("The number of the choice in the answer.")]
    text: Annotated[str, doc("The continuation; in an event, what is new of it.")]
    logprobs: Annotated[
        TokenLogProbs | None, doc("The log-probabilities of the tokens, if they were asked for.")
    ]
    finish_reason: Annotated[
        Literal["stop", "length"] | None, doc("Why the text ended: at `stop`, or by its length.")
    ]


class _Facts(msgspec.Struct, kw_only=True):
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


class Completions(_Facts, kw_only=True):
    """The continuations of all prompts."""

    usage: Annotated[Usage, doc("How many tokens the request has had.")]


class CompletionEvent(_Facts, kw_only=True):
    """One server-sent event of an answer that is streamed. After the last one comes `[DONE]`."""

    usage: Annotated[Usage | UnsetType | None, doc("How many tokens the request has had so far.")] = UNSET


@ENDPOINTS.add(
    "POST", "/v1/completions", queued=True, answer=Completions, event=CompletionEvent, refused=(404, 503)
)
async def completions(request: RequestContext, body: CompletionBody) -> Response | None:
    """Continues texts."""
    model = request.server.model(body.model)
    plan = await request.off_loop(plan_of, body, model.session, request.server.limits)
    completion = Completion(plan, model, id=request.id, owner=request.owner)
    try:
        if not plan.stream:
            return of_json(await completion.answer())
        async with aclosing(completion.events()) as events:
            async for data in events:
                await request.events(data)
        await request.end()
        return None
    finally:
        request.note.update(completion.note())


@dataclass(eq=False)
class _Prompt:
    """A prompt while it is fed, and its choices."""

    tokens: np.ndarray
    text: str
    """What comes before each choice; empty if the prompt is not repeated."""
    log: TokenLog | None
    """Tokens of the prompt, if their log-probabilities are wanted."""
    choices: list[_Choice] = field(default_factory=list)
    fed: int = 0
    """Number of its tokens that were fed."""

    def note(self, fed: PromptFed) -> None:
        """Notes a piece that was fed."""
        if self.log is not None and fed.log_probs is not None:
            piece = self.tokens[self.fed : self.fed + fed.count]
            self.log.add(piece, fed.log_probs, fed.likeliest)
        self.fed += fed.count

    @cached_property
    def logged(self) -> Tokens | None:
        """All of its tokens, once they were fed."""
        return None if self.log is None else self.log.take(at_end=True)


@dataclass(eq=False)
class _Choice:
    """One choice while it is drawn."""

    prompt: _Prompt
    index: int
    """Number of the choice in the answer, and of its random numbers."""
    log: TokenLog | None
    """Tokens of the choice, if their log-probabilities are wanted or rank the choices."""
    tokens: int = 0
    parts: list[str] = field(default_factory=list)
    """Text of the choice, if the answer is one document."""
    reason: Literal["stop", "length"] | None = None
    """Why it ended; None before its end, and if the server has cut it short."""

    @property
    def mean_log_prob(self) -> float:
        """What the best choices are chosen by, as OpenAI does."""
        return self.log.total / max(1, self.log.known) if self.log else 0.0


class Completion:
    """One request on its way from its prompts to its choices.

    A prompt with one choice is one task. A prompt with several is fed once by a task of its own, whose state
    all of its choices continue.
    """

    def __init__(self, plan: Plan, model: Model, *, id: str, owner: str) -> None:
        self._plan = plan
        self._model = model
        self._owner = owner
        self._facts: dict[str, Any] = {
            "id": f"cmpl-{id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "seed": None if plan.sampling is None else plan.sampling.seed,
        }
        # Number of likeliest tokens that the engine returns; with any it returns log-probabilities too.
        ranked = plan.best_of > plan.n
        self._top = max(1, plan.log_probs or 0) if ranked or plan.log_probs is not None else 0
        self._prompts: list[_Prompt] = []
        self._choices: list[_Choice] = []
        for tokens, text in zip(plan.prompts, plan.texts, strict=True):
            scores = plan.echo and plan.log_probs is not None
            prompt = _Prompt(tokens, text, self._log(tokens[:0], 0) if scores else None)
            for _ in range(plan.best_of):
                log = self._log(tokens, len(text)) if self._top else None
                prompt.choices.append(_Choice(prompt, len(self._choices), log))
                self._choices.append(prompt.choices[-1])
            self._prompts.append(prompt)
        self._tasks: dict[Task, tuple[_Prompt, _Choice | None]] = {}
        """What each task feeds, and what it draws, if it does."""
        self._cached = 0  # tokens of prompts
        self._ready = bytearray()  # events that were not sent

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Runs all tasks. Yields server-sent events, all that are ready at once, if the answer is streamed.
        Raises RefusedError or UserError after the events that have arrived with a failure: other choices
        have got theirs.
        """
        plan = self._plan
        # A prompt with several choices is fed by a task of its own, whose state they begin with.
        states = len(self._prompts) if plan.best_of > 1 else 0
        failure: RefusedError | UserError | None = None
        with self._model.engine.places.take(len(self._choices), states), self._model.mailbox() as mailbox:
            for prompt in self._prompts:
                self._submit_prompt(mailbox, prompt)
            async for task, answer in mailbox:
                prompt, choice = self._tasks[task]
                try:
                    if isinstance(answer, TokenOut):
                        assert choice is not None, "a prompt draws no tokens"
                        self._draw(choice, answer)
                    elif isinstance(answer, PromptFed):
                        await self._feed(prompt, answer)
                    elif choice is not None:
                        self._end(choice, answer)
                    else:
                        self._submit_choices(mailbox, prompt, answer)
                except (RefusedError, UserError) as refusal:
                    failure = failure or refusal
                if self._ready and (mailbox.is_empty or plan.log_probs is not None):
                    data = bytes(self._ready)
                    self._ready.clear()
                    yield data
                    if plan.log_probs is not None:  # many choices make many large events
                        await asyncio.sleep(0)
                if failure is not None and mailbox.is_empty:
                    raise failure
        if plan.usage:
            yield event(CompletionEvent(**self._facts, choices=[], usage=self._usage()))

    async def answer(self) -> bytes:
        """The whole answer as JSON."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                raise AssertionError("only a streamed answer has events")
        plan = self._plan
        shown = plan.prompt_tokens if plan.echo else 0
        return await off_loop(size_of_tokens(shown + self._drawn, plan.log_probs), self._document)

    def note(self) -> dict[str, Any]:
        """Facts for the request's line in the log."""
        return {
            "model": self._model.name,
            "prompt_tokens": self._plan.prompt_tokens,
            "cached_tokens": self._cached,
            "completion_tokens": self._drawn,
            "reason": ",".join(sorted({choice.reason or "unfinished" for choice in self._choices})),
        }

    def _submit_prompt(self, mailbox: Mailbox, prompt: _Prompt) -> None:
        choice = prompt.choices[0] if self._plan.best_of == 1 else None
        scores = prompt.log is not None
        task = Task(
            tokens=prompt.tokens,
            score=scores,
            top=self._top if choice is not None or scores else 0,
            sampling=None if choice is None else self._sampling(choice),
            keep=choice is None,
            owner=self._owner,
        )
        self._tasks[task] = prompt, choice
        mailbox.submit(task)

    def _submit_choices(self, mailbox: Mailbox, prompt: _Prompt, ended: Ended) -> None:
        """The choices of a prompt that was fed."""
        refuse_failure(ended)
        for choice in prompt.choices:
            sampling = self._sampling(choice)
            if sampling is None:
                self._end(choice, Ended(reason="length"))
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
            mailbox.submit(task)

    def _sampling(self, choice: _Choice) -> SamplingParams | None:
        sampling = self._plan.sampling
        return (
            None if sampling is None else replace(sampling, index=choice.index, prompt=choice.prompt.tokens)
        )

    # What arrives.

    async def _feed(self, prompt: _Prompt, fed: PromptFed) -> None:
        """Some tokens of a prompt; after the last one an event for each choice that repeats the prompt."""
        prompt.note(fed)
        self._cached += fed.cached
        plan = self._plan
        if plan.echo and plan.stream and prompt.fed == len(prompt.tokens):
            for choice in prompt.choices:
                size = size_of_tokens(prompt.fed, plan.log_probs)
                self._ready += await off_loop(size, self._repeated, choice)

    def _repeated(self, choice: _Choice) -> bytes:
        return self._event(choice, choice.prompt.text, choice.prompt.logged)

    def _draw(self, choice: _Choice, drawn: TokenOut) -> None:
        choice.tokens += 1
        if choice.log is not None:
            choice.log.add_drawn(drawn)
        if not self._plan.stream:
            choice.parts.append(drawn.text)
        elif choice.log is not None:
            self._ready += self._event(choice, drawn.text, choice.log.take())
        elif drawn.text or self._plan.each_usage:
            self._ready += self._event(choice, drawn.text)

    def _end(self, choice: _Choice, ended: Ended) -> None:
        """The end of a choice, with the text that was held back; raises RefusedError for one cut short."""
        choice.reason = REASONS.get(ended.reason)
        if not self._plan.stream:
            choice.parts.append(ended.text)
        elif choice.reason or ended.text:
            self._ready += self._event(choice, ended.text)
        refuse_failure(ended)

    # What is sent.

    def _event(self, choice: _Choice, text: str, tokens: Tokens | None = None) -> bytes:
        one = CompletionChoice(
            index=choice.index, text=text, logprobs=self._log_probs(tokens), finish_reason=choice.reason
        )
        usage: Usage | UnsetType | None = UNSET
        if self._plan.each_usage:
            usage = self._usage()
        elif self._plan.usage:
            usage = None
        return event(CompletionEvent(**self._facts, choices=[one], usage=usage))

    def _document(self) -> bytes:
        """The whole answer: of each prompt the `n` best choices, in order."""
        plan = self._plan
        found: list[CompletionChoice] = []
        for prompt in self._prompts:
            choices = prompt.choices
            if plan.best_of > plan.n:
                choices = sorted(choices, key=lambda choice: -choice.mean_log_prob)[: plan.n]
            for choice in choices:
                log_probs = self._log_probs(choice.log.take(at_end=True) if choice.log else None)
                if (before := self._log_probs(prompt.logged)) and log_probs:
                    log_probs = before.followed_by(log_probs)
                text = prompt.text + "".join(choice.parts)
                found.append(
                    CompletionChoice(
                        index=len(found), text=text, logprobs=log_probs, finish_reason=choice.reason
                    )
                )
        return msgspec.json.encode(Completions(**self._facts, choices=found, usage=self._usage()))

    def _log_probs(self, tokens: Tokens | None) -> TokenLogProbs | None:
        if tokens is None or self._plan.log_probs is None:
            return None
        return log_probs_of(tokens, self._model.texts, as_ids=self._plan.as_ids)

    def _log(self, before: np.ndarray, offset: int) -> TokenLog:
        top = self._plan.log_probs or 0
        return TokenLog(self._model.session.vocab, before, shown=True, top=top, offset=offset)

    def _usage(self) -> Usage:
        return Usage.of(self._plan.prompt_tokens, self._drawn, self._cached)

    @property
    def _drawn(self) -> int:
        """Number of tokens that were drawn, for all choices."""
        return sum([choice.tokens for choice in self._choices])


def log_probs_of(tokens: Tokens, texts: TokenTexts, *, as_ids: bool) -> TokenLogProbs:
    """Tokens in OpenAI's form. as_ids: whether each is named `token_id:N` instead of by its text.

    Clients look for a token among the likeliest, by its text or its number, to see whether it was the
    likeliest. So the token itself is always among them, with its own text and number. Another token with
    that text, or with the text of a likelier one, is named by its id.
    """
    names = [""] * len(tokens.ids) if as_ids else tokens.texts
    tops: list[dict[str, float] | None] = []
    last = tokens.before
    for token, text, log_prob, likeliest in zip(
        tokens.ids, names, tokens.log_probs, tokens.likeliest, strict=True
    ):
        if log_prob is None:
            tops.append(None)
        else:
            own = _name(token, text)
            named: dict[str, float] = {}
            for other, value in likeliest:
                if other != token:
                    name = _name(other, "" if as_ids else texts.after(last, other))
                    named[_name(other, "") if name == own or name in named else name] = value
            named[own] = log_prob
            tops.append(named)
        last = token
    *offsets, _ = accumulate(map(len, tokens.texts), initial=tokens.offset)
    return TokenLogProbs(
        tokens=[_name(token, "") for token in tokens.ids] if as_ids else tokens.texts,
        token_logprobs=tokens.log_probs,
        top_logprobs=tops,
        text_offset=offsets,
    )


def _name(token: int, text: str) -> str:
    """The text of a token; without one, its id as vLLM writes it."""
    return text or f"token_id:{token}"
