"""Choices as JSON documents and as server-sent events. What does not change is encoded once a request."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from xl_export.serve.core.task import Drawn, Ended
from xl_export.serve.http.base.answering import DONE, END, EVENT, Write, event
from xl_export.serve.http.base.bridge import Pass
from xl_export.serve.http.base.encoding import json_steps
from xl_export.serve.http.base.token_texts import TokenTexts
from xl_export.serve.http.base.workers import Steps
from xl_export.serve.http.openai.documents import Usage
from xl_export.serve.http.openai.log_probs import LogProbs
from xl_export.serve.http.openai.plan import Plan

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
encode = msgspec.json.Encoder().encode


class Choice:
    """One choice while it is drawn.

    index: of the choice in the answer and in the numbers that it is drawn with. head: an event of it up to
    the text. parts: its text, where the answer is one document.
    """

    __slots__ = ("begun", "head", "index", "log_probs", "own", "parts", "prompt", "reason", "tokens")

    def __init__(self, prompt: int, index: int, head: bytes) -> None:
        self.prompt, self.index, self.head = prompt, index, head
        self.tokens, self.begun = 0, False
        self.parts: list[str] = []
        self.reason: str | None = None
        self.log_probs: LogProbs | None = None
        self.own: list[dict[str, Any]] = []  # pieces of log-probabilities of a whole document

    @property
    def mean_log_prob(self) -> float:
        """By which the best choices are chosen, as OpenAI does."""
        return self.log_probs.sum / max(1, self.log_probs.count) if self.log_probs else 0.0


class Writer:
    """Writes the answer to one request."""

    def __init__(self, plan: Plan, model: str, texts: TokenTexts, request_id: str) -> None:
        self._plan, self._texts = plan, texts
        self._facts = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "seed": None if plan.drawing is None else plan.drawing.seed,
        }
        self._tail = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null}' if plan.usage else b"}")
        self._tail += b"\n\n"
        self._drawn = 0

    def choice(self, prompt: int, index: int) -> Choice:
        """A new choice."""
        facts = encode({**self._facts, "choices": []}).removesuffix(b"]}")
        return Choice(prompt, index, b"data: " + facts + b'{"index":%d,"text":' % index)

    def begin(self, choice: Choice, prompt_log_probs: LogProbs | None) -> Steps[bytes]:
        """What comes before the first token of a choice: the prompt, where it is to be repeated."""
        plan, choice.begun = self._plan, True
        text = plan.texts[choice.prompt]
        wanted = plan.log_probs is not None
        if wanted or plan.best_of > plan.n:
            before = plan.prompts[choice.prompt]
            choice.log_probs = LogProbs(
                self._texts, plan.log_probs or 0, before, len(text), as_ids=plan.as_ids
            )
        if not plan.echo:
            return b""
        own = prompt_log_probs.all() if wanted and prompt_log_probs is not None else None
        if not plan.stream:
            choice.parts.append(text)
            if own is not None:
                choice.own.append(own)
            return b""
        yield
        return EVENT + (yield from json_steps(self._document(choice, text, own, None))) + END

    def drawn(self, choice: Choice, drawn: Drawn) -> bytes:
        """One more token: an event, or nothing where there is nothing to tell yet."""
        choice.tokens += 1
        self._drawn += 1
        if (collected := choice.log_probs) is not None and drawn.log_prob is not None:
            likeliest = drawn.likeliest
            if likeliest is None:
                collected.add(drawn.token, drawn.log_prob)
            else:
                collected.add(drawn.token, drawn.log_prob, likeliest.ids[0], likeliest.log_probs[0])
        if not self._plan.stream:
            choice.parts.append(drawn.text)
            return b""
        if collected is None and not self._plan.each_usage:  # the usual way, which every token goes
            return choice.head + encode(drawn.text) + self._tail if drawn.text else b""
        return self._event(choice, drawn.text, None if collected is None else collected.take(), None)

    def straight(self, choice: Choice, write: Write) -> Pass | None:
        """A function that does what `drawn` does with a token of a begun choice, and writes the event.

        It returns False where the client has to be waited for. None where events are not all alike.
        """
        if choice.log_probs is not None or self._plan.each_usage:
            return None
        head, tail = choice.head, self._tail

        def kept(drawn: Drawn) -> bool:
            choice.tokens += 1
            choice.parts.append(drawn.text)
            return True

        def passed(drawn: Drawn) -> bool:
            if (text := drawn.text) and not write(head + encode(text) + tail):
                return False
            choice.tokens += 1
            return True

        return passed if self._plan.stream else kept

    def ended(self, choice: Choice, ended: Ended) -> bytes:
        """The end of a choice: its reason, and the text that was held back."""
        choice.reason = REASONS[ended.reason]
        if not self._plan.stream:
            choice.parts.append(ended.text)
            return b""
        return self._event(choice, ended.text, None, choice.reason)

    def held(self, choice: Choice, ended: Ended) -> bytes:
        """The text that was held back from a choice that the server has cut short; nothing for other ends."""
        if not self._plan.stream or ended.reason in REASONS or not ended.text:
            return b""
        return self._event(choice, ended.text, None, None)

    def last_events(self, usage: Usage) -> bytes:
        """What ends a stream."""
        if not self._plan.usage:
            return DONE
        return event({**self._facts, "choices": [], "usage": usage}) + DONE

    def document(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The whole answer: of each prompt the `n` best choices, in order."""
        plan, found = self._plan, []
        for prompt in range(len(plan.prompts)):
            own = choices[prompt * plan.best_of : (prompt + 1) * plan.best_of]
            if plan.best_of > plan.n:
                own = sorted(own, key=lambda choice: -choice.mean_log_prob)[: plan.n]
            found += [self._choice_document(choice, prompt * plan.n + at) for at, choice in enumerate(own)]
        return {**self._facts, "choices": found, "usage": usage}

    def _choice_document(self, choice: Choice, index: int) -> dict[str, Any]:
        log_probs = None
        if self._plan.log_probs is not None and choice.log_probs is not None:
            pieces = [*choice.own, choice.log_probs.all()]
            log_probs = {name: [x for piece in pieces for x in piece[name]] for name in pieces[0]}
        text = "".join(choice.parts)
        return {"index": index, "text": text, "logprobs": log_probs, "finish_reason": choice.reason}

    def _event(
        self, choice: Choice, text: str, log_probs: dict[str, Any] | None, reason: str | None
    ) -> bytes:
        return event(self._document(choice, text, log_probs, reason))

    def _document(
        self, choice: Choice, text: str, log_probs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        one = {"index": choice.index, "text": text, "logprobs": log_probs, "finish_reason": reason}
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
