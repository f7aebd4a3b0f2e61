"""`/v1/completions`: continues texts, as OpenAI's interface has it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from runtimes.base.errors import UserError
from xl_export.serve.core.admission import Reservation
from xl_export.serve.core.task import Answer, Delivery, Drawing, Drawn, Ended, Fed, Task
from xl_export.serve.http.base.bridge import Inbox, Pass
from xl_export.serve.http.base.encoding import json_steps
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import RefusedError, refuse_failure
from xl_export.serve.http.base.exchange import DONE, END, EVENT, Exchange, event, of_json
from xl_export.serve.http.base.models import Model
from xl_export.serve.http.base.workers import Steps, aside, size_of
from xl_export.serve.http.openai.plan import CompletionBody, Plan, plan_of
from xl_export.serve.http.openai.writing import CompletionEvent, Completions, LogProbs, usage

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
ENDPOINTS = Endpoints()
encode = msgspec.json.Encoder().encode


@ENDPOINTS.add(
    "POST", "/v1/completions", queue="people", answer=Completions, event=CompletionEvent, refused=(404, 503)
)
async def completions(exchange: Exchange, body: CompletionBody) -> None:
    """Continues texts."""
    server = exchange.server
    model = exchange.use(server.model(body.model))
    plan = await exchange.aside(plan_of, body, model.session, server.limits)
    await exchange.while_connected(Completion(plan, model, exchange).run())


class _Prompt:
    """A prompt while it is fed, and its choices."""

    def __init__(self, tokens: np.ndarray, text: str, log_probs: LogProbs | None) -> None:
        self.tokens = tokens
        #: What comes before each choice; empty if the prompt is not repeated.
        self.text = text
        #: Of its tokens, if they are wanted.
        self.log_probs = log_probs
        self.choices: list[_Choice] = []
        #: Tokens so far.
        self.fed = 0

    def score(self, fed: Fed) -> Steps[None]:
        """Notes the log-probabilities of a piece that was fed."""
        if self.log_probs is not None and fed.log_probs is not None:
            tokens = self.tokens[self.fed : self.fed + fed.count].tolist()
            for at, (token, log_prob) in enumerate(zip(tokens, fed.log_probs.tolist(), strict=True)):
                self.log_probs.add(token, log_prob, fed.likeliest, at)
                yield


class _Choice:
    """One choice while it is drawn."""

    def __init__(self, prompt: _Prompt, index: int, head: bytes, log_probs: LogProbs | None) -> None:
        self.prompt = prompt
        #: Of the choice in the answer and in the numbers that it is drawn with.
        self.index = index
        #: An event of it up to the text.
        self.head = head
        #: Of its tokens, if they are wanted or rank the choices.
        self.log_probs = log_probs
        self.tokens = 0
        #: Its text, if the answer is one document.
        self.parts: list[str] = []
        #: Whether a token of it has come.
        self.begun = False
        #: Why it ended; None before its end, and if the server has cut it short.
        self.reason: str | None = None

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
        self._tenant = exchange.tenant.name
        self._facts = {
            "id": f"cmpl-{exchange.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "seed": None if plan.drawing is None else plan.drawing.seed,
        }
        # An event without log-probabilities: what does not change is encoded once a request.
        head = EVENT + encode({**self._facts, "choices": []}).removesuffix(b"]}")
        self._tail = b',"logprobs":null,"finish_reason":null}]'
        self._tail += b',"usage":null}' + END if plan.usage else b"}" + END
        # How many of the likeliest tokens the engine returns; with any it returns log-probabilities too.
        ranked = plan.best_of > plan.n
        self._top = max(1, plan.log_probs or 0) if ranked or plan.log_probs is not None else 0
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
        self._reserved: Reservation | None = None  # of all tasks, if there are several
        self._ready = bytearray()  # events that have not been sent

    async def run(self) -> None:
        """Submits the tasks and sends their answers."""
        exchange = self._exchange
        plan = self._plan
        with self._model.inbox() as inbox:
            try:
                count = len(self._prompts)
                if plan.best_of > 1:  # such a prompt is fed by a task of its own
                    tasks = count * (plan.best_of + 1)
                    self._reserved = inbox.reserve(tasks, self._tenant, states=count)
                elif count > 1:
                    self._reserved = inbox.reserve(count, self._tenant)
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
                used = usage(plan.prompt_tokens, self._drawn, self._cached)
                if plan.stream:
                    last = event({**self._facts, "choices": [], "usage": used}) if plan.usage else b""
                    await exchange.end(last + DONE)
                else:
                    shown = plan.prompt_tokens if plan.echo else 0
                    size = size_of(shown + self._drawn, plan.log_probs)
                    document = {**self._facts, "choices": self._best(), "usage": used}
                    answer = await aside(size, self._tenant, json_steps, document)
                    await exchange.respond(of_json(answer))
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
            drawing=None if choice is None else self._drawing(choice),
            keep=choice is None,
            tenant=self._tenant,
        )
        self._tasks[task] = prompt, choice
        inbox.submit(task, self._reserved)

    async def _submit_choices(self, inbox: Inbox, prompt: _Prompt, ended: Ended) -> None:
        """The choices of a prompt that has been fed."""
        for choice in prompt.choices:
            drawing = self._drawing(choice)
            if drawing is None:
                await self._end(choice, Ended(reason="length"))
                continue
            assert ended.state is not None, "the task that fed a prompt keeps its state"
            task = Task(
                tokens=prompt.tokens[:0],
                state=ended.state,
                top=self._top,
                drawing=drawing,
                tenant=self._tenant,
            )
            self._tasks[task] = prompt, choice
            inbox.submit(task, self._reserved)

    def _drawing(self, choice: _Choice) -> Drawing | None:
        drawing = self._plan.drawing
        return None if drawing is None else replace(drawing, index=choice.index, prompt=choice.prompt.tokens)

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
            if type(answer) is Fed:
                if prompt.log_probs is not None:
                    size = size_of(answer.count, self._plan.log_probs)
                    await aside(size, self._tenant, prompt.score, answer)
                prompt.fed += answer.count
                self._cached += answer.cached
            elif type(answer) is Drawn and choice is not None:
                if not choice.begun:
                    await self._begin(choice)
                    if way := self._way(choice):
                        inbox.pass_on(task, way)
                self._draw(choice, answer)
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
            self._ready += await aside(size, self._tenant, self._repeated, choice)

    def _repeated(self, choice: _Choice) -> Steps[bytes]:
        prompt = choice.prompt
        log_probs = None if prompt.log_probs is None else prompt.log_probs.all()
        document = self._document(choice, prompt.text, log_probs)
        return EVENT + (yield from json_steps(document)) + END

    def _draw(self, choice: _Choice, drawn: Drawn) -> None:
        """One more token: an event, or nothing if its text is not complete yet."""
        choice.tokens += 1
        collected = choice.log_probs
        if collected is not None:
            collected.add(drawn.token, drawn.log_prob, drawn.likeliest)
        if not self._plan.stream:
            choice.parts.append(drawn.text)
        elif collected is None and not self._plan.each_usage:
            if drawn.text:
                self._ready += choice.head + encode(drawn.text) + self._tail
        else:
            log_probs = None if collected is None else collected.take()
            self._ready += event(self._document(choice, drawn.text, log_probs))

    def _way(self, choice: _Choice) -> Pass | None:
        """A function that does what `_draw` does with a token of a begun choice, and writes the event.

        It returns False if the client has to be waited for. None if events are not all alike.
        """
        if choice.log_probs is not None or self._plan.each_usage:
            return None
        write = self._exchange.write
        tail = self._tail

        def kept(drawn: Drawn) -> bool:
            choice.tokens += 1
            choice.parts.append(drawn.text)
            return True

        def passed(drawn: Drawn) -> bool:
            if drawn.text and not write(choice.head + encode(drawn.text) + tail):
                return False
            choice.tokens += 1
            return True

        return passed if self._plan.stream else kept

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
            tokens = self._plan.prompt_tokens
            document["usage"] = {
                "prompt_tokens": tokens,
                "completion_tokens": self._drawn,
                "total_tokens": tokens + self._drawn,
            }
        elif self._plan.usage:
            document["usage"] = None
        return document

    @staticmethod
    def _one(index: int, text: str, log_probs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": reason}

    def _log_probs(self, before: np.ndarray, offset: int) -> LogProbs:
        plan = self._plan
        return LogProbs(self._model.texts, plan.log_probs or 0, before, offset, as_ids=plan.as_ids)

    @property
    def _drawn(self) -> int:
        """How many tokens were drawn, for all choices."""
        return sum([choice.tokens for choice in self._choices])
