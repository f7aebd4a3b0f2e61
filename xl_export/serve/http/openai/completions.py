"""`/v1/completions`: continues texts, as OpenAI's interface has it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from runtimes.base.errors import UserError
from xl_export.serve.core.admission import Reservation
from xl_export.serve.core.task import Answer, Delivery, Drawing, Drawn, Ended, Fed, Task
from xl_export.serve.http.base.bridge import Inbox
from xl_export.serve.http.base.encoding import json_steps
from xl_export.serve.http.base.endpoint import Endpoints
from xl_export.serve.http.base.errors import RefusedError, refuse_failure
from xl_export.serve.http.base.exchange import Exchange
from xl_export.serve.http.base.models import Model
from xl_export.serve.http.base.workers import Steps, aside, size_of
from xl_export.serve.http.openai.plan import CompletionBody, Plan, plan_of
from xl_export.serve.http.openai.writing import (
    Choice,
    CompletionEvent,
    Completions,
    LogProbs,
    Writer,
    usage,
)

ENDPOINTS = Endpoints()


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
    """A prompt while it is fed."""

    def __init__(self, tokens: np.ndarray, log_probs: LogProbs | None) -> None:
        self.tokens = tokens
        #: Of its tokens, if they are wanted.
        self.log_probs = log_probs
        #: Tokens so far.
        self.fed = 0

    def score(self, fed: Fed) -> Steps[None]:
        """Notes the log-probabilities of a piece that was fed."""
        if self.log_probs is not None and fed.log_probs is not None:
            tokens = self.tokens[self.fed : self.fed + fed.count].tolist()
            likeliest = fed.likeliest
            for at, (token, log_prob) in enumerate(zip(tokens, fed.log_probs.tolist(), strict=True)):
                if likeliest is None:
                    self.log_probs.add(token, log_prob)
                else:
                    self.log_probs.add(token, log_prob, likeliest.ids[at], likeliest.log_probs[at])
                yield


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
        texts = model.texts
        self._scores = plan.echo and plan.log_probs is not None
        # How many of the likeliest tokens the engine returns; with any it returns log-probabilities too.
        ranked = plan.best_of > plan.n
        self._top = 0 if plan.log_probs is None and not ranked else max(1, plan.log_probs or 0)
        self._prompts = [
            _Prompt(
                tokens,
                LogProbs(texts, plan.log_probs or 0, tokens[:0], as_ids=plan.as_ids)
                if self._scores
                else None,
            )
            for tokens in plan.prompts
        ]
        self._writer = Writer(plan, model.name, texts, exchange.id)
        self._feeding: dict[Task, int] = {}  # the prompt of each task that only feeds one
        self._choosing: dict[Task, tuple[Choice, _Prompt]] = {}
        self._choices: list[Choice] = []
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
                for prompt in range(count):
                    self._submit_prompt(inbox, prompt)
                while inbox.running:
                    refusal = await self._take_all(inbox, await inbox.get())
                    # Where nothing was sent yet, a refusal becomes the whole answer, with its own status.
                    if self._ready and (refusal is None or exchange.started):
                        data = bytes(self._ready)
                        self._ready = bytearray()
                        await exchange.events(data)
                    if refusal is not None:
                        raise refusal
                drawn = self._drawn()
                used = usage(plan.prompt_tokens, drawn, self._cached)
                if plan.stream:
                    await exchange.end(self._writer.last_events(used))
                else:
                    document = self._writer.document(self._choices, used)
                    shown = plan.prompt_tokens if plan.echo else 0
                    size = size_of(shown + drawn, plan.log_probs)
                    await exchange.document(await aside(size, self._tenant, json_steps, document))
            finally:
                exchange.note.update(
                    model=self._model.name,
                    prompt_tokens=plan.prompt_tokens,
                    cached_tokens=self._cached,
                    completion_tokens=self._drawn(),
                    reason=",".join(sorted({choice.reason or "unfinished" for choice in self._choices})),
                )

    def _submit_prompt(self, inbox: Inbox, number: int) -> None:
        plan = self._plan
        prompt = self._prompts[number]
        choices = [self._writer.choice(number, number * plan.best_of + at) for at in range(plan.best_of)]
        self._choices += choices
        task = Task(
            tokens=prompt.tokens,
            score=self._scores,
            top=self._top if plan.best_of == 1 or self._scores else 0,
            drawing=self._drawing(choices[0], prompt) if plan.best_of == 1 else None,
            keep=plan.best_of > 1,
            tenant=self._tenant,
        )
        if plan.best_of == 1:
            self._choosing[task] = choices[0], prompt
        else:
            self._feeding[task] = number
        inbox.submit(task, self._reserved)

    async def _submit_choices(self, inbox: Inbox, number: int, ended: Ended) -> None:
        """The choices of a prompt that has been fed."""
        plan = self._plan
        for choice in self._choices[number * plan.best_of : (number + 1) * plan.best_of]:
            if plan.drawing is None:
                await self._end(choice, self._prompts[number], Ended(reason="length"))
                continue
            assert ended.state is not None, "the task that fed a prompt keeps its state"
            task = Task(
                tokens=np.zeros(0, np.int64),
                state=ended.state,
                top=self._top,
                drawing=self._drawing(choice, self._prompts[number]),
                tenant=self._tenant,
            )
            self._choosing[task] = choice, self._prompts[number]
            inbox.submit(task, self._reserved)

    def _drawing(self, choice: Choice, prompt: _Prompt) -> Drawing | None:
        drawing = self._plan.drawing
        return None if drawing is None else replace(drawing, index=choice.index, prompt=prompt.tokens)

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
        if self._feeding and (number := self._feeding.get(task)) is not None:
            for answer in answers:
                if type(answer) is Fed:
                    await self._feed(self._prompts[number], answer)
                elif type(answer) is Ended:
                    refuse_failure(answer)
                    await self._submit_choices(inbox, number, answer)
            return
        choice, prompt = self._choosing[task]
        for answer in answers:
            if type(answer) is Drawn:
                if not choice.begun:
                    await self._begin(choice, prompt)
                    if way := self._writer.straight(choice, self._exchange.write):
                        inbox.pass_on(task, way)
                self._ready += self._writer.drawn(choice, answer)
            elif type(answer) is Fed:
                await self._feed(prompt, answer)
            elif type(answer) is Ended:
                self._ready += self._writer.held(choice, answer)
                refuse_failure(answer)
                await self._end(choice, prompt, answer)

    async def _feed(self, prompt: _Prompt, fed: Fed) -> None:
        if self._scores:
            size = size_of(fed.count, self._plan.log_probs)
            await aside(size, self._tenant, prompt.score, fed)
        prompt.fed += fed.count
        self._cached += fed.cached

    async def _begin(self, choice: Choice, prompt: _Prompt) -> None:
        self._writer.begin(choice)
        if self._plan.echo:
            size = size_of(len(prompt.tokens), self._plan.log_probs)
            self._ready += await aside(size, self._tenant, self._writer.repeated, choice, prompt.log_probs)

    async def _end(self, choice: Choice, prompt: _Prompt, ended: Ended) -> None:
        if not choice.begun:
            await self._begin(choice, prompt)
        self._ready += self._writer.ended(choice, ended)

    def _drawn(self) -> int:
        return sum([choice.tokens for choice in self._choices])
