"""Choices as JSON documents and as server-sent events. What does not change is encoded once a request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np

from xl_export.serve.core.task import Drawn, Ended
from xl_export.serve.http.base.bridge import Pass
from xl_export.serve.http.base.encoding import CONTEXT, TokenTexts, json_steps
from xl_export.serve.http.base.endpoint import doc
from xl_export.serve.http.base.exchange import DONE, END, EVENT, event
from xl_export.serve.http.base.workers import Steps
from xl_export.serve.http.openai.plan import Plan

REASONS = {"end": "stop", "stop": "stop", "length": "length"}
encode = msgspec.json.Encoder().encode


class CachedTokens(TypedDict):
    """Of the tokens of prompts, those that were not computed again."""

    cached_tokens: Annotated[
        int, doc("How many tokens of prompts were in the cache and were not computed again.")
    ]


class TokenCounts(TypedDict):
    """How many tokens a request has had so far."""

    prompt_tokens: Annotated[
        int, doc("How many tokens all prompts have, or all texts that were scored with their contexts.")
    ]
    completion_tokens: Annotated[int, doc("How many tokens were drawn, for all choices.")]
    total_tokens: Annotated[int, doc("The sum of prompt_tokens and completion_tokens.")]


class Usage(TokenCounts):
    """How many tokens a request has had."""

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

    usage: Annotated[TokenCounts | None, doc("How many tokens the request has had so far.")]


def usage(prompt: int, drawn: int, cached: int) -> Usage:
    """The usage of a request in OpenAI's form. cached: tokens of the prompt that were not computed again."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Choice:
    """One choice while it is drawn."""

    __slots__ = ("begun", "head", "index", "log_probs", "own", "parts", "prompt", "reason", "tokens")

    def __init__(self, prompt: int, index: int, head: bytes) -> None:
        self.prompt = prompt
        #: Of the choice in the answer and in the numbers that it is drawn with.
        self.index = index
        #: An event of it up to the text.
        self.head = head
        self.tokens = 0
        self.begun = False
        #: Its text, if the answer is one document.
        self.parts: list[str] = []
        self.reason: str | None = None
        #: Of its tokens, if they are wanted or rank the choices.
        self.log_probs: LogProbs | None = None
        self.own: list[dict[str, Any]] = []  # pieces of log-probabilities of a whole document

    @property
    def mean_log_prob(self) -> float:
        """By which the best choices are chosen, as OpenAI does."""
        return self.log_probs.sum / max(1, self.log_probs.count) if self.log_probs else 0.0


class Writer:
    """Writes the answer to one request."""

    def __init__(self, plan: Plan, model: str, texts: TokenTexts, request_id: str) -> None:
        self._plan = plan
        self._texts = texts
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

    def begin(self, choice: Choice) -> None:
        """Called before anything of a choice is written."""
        plan = self._plan
        choice.begun = True
        if plan.log_probs is not None or plan.best_of > plan.n:
            before = plan.prompts[choice.prompt]
            offset = len(plan.texts[choice.prompt])
            choice.log_probs = LogProbs(self._texts, plan.log_probs or 0, before, offset, as_ids=plan.as_ids)

    def repeated(self, choice: Choice, prompt_log_probs: LogProbs | None) -> Steps[bytes]:
        """The prompt, which comes before the first token of a choice with `echo`."""
        plan = self._plan
        text = plan.texts[choice.prompt]
        own = None if prompt_log_probs is None else prompt_log_probs.all()
        if not plan.stream:
            choice.parts.append(text)
            if own is not None:
                choice.own.append(own)
            return b""
        yield
        return EVENT + (yield from json_steps(self._document(choice, text, own, None))) + END

    def drawn(self, choice: Choice, drawn: Drawn) -> bytes:
        """One more token: an event, or nothing if its text is not complete yet."""
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
        log_probs = None if collected is None else collected.take()
        return event(self._document(choice, drawn.text, log_probs, None))

    def straight(self, choice: Choice, write: Callable[[bytes], bool]) -> Pass | None:
        """A function that does what `drawn` does with a token of a begun choice, and writes the event.

        It returns False if the client has to be waited for. None if events are not all alike.
        """
        if choice.log_probs is not None or self._plan.each_usage:
            return None
        head = choice.head
        tail = self._tail

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
        return event(self._document(choice, ended.text, None, choice.reason))

    def held(self, choice: Choice, ended: Ended) -> bytes:
        """The text that was held back from a choice that the server has cut short; nothing for other ends."""
        if not self._plan.stream or ended.reason in REASONS or not ended.text:
            return b""
        return event(self._document(choice, ended.text, None, None))

    def last_events(self, usage: Usage) -> bytes:
        """What ends a stream."""
        if not self._plan.usage:
            return DONE
        return event({**self._facts, "choices": [], "usage": usage}) + DONE

    def document(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The whole answer: of each prompt the `n` best choices, in order."""
        plan = self._plan
        found = []
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

    def add(
        self, token: int, log_prob: float, ids: np.ndarray | None = None, log_probs: np.ndarray | None = None
    ) -> None:
        """One token. log_prob: NaN if it is not known, as for the first token of a text."""
        text = self._decode(token)
        known = not math.isnan(log_prob)
        self._tokens.append(_id_name(token) if self._as_ids else text)
        self._token_log_probs.append(log_prob if known else None)
        self._offsets.append(self._offset)
        self._offset += len(text)
        self._likeliest.append(self._named(token, text, log_prob, ids, log_probs) if known else None)
        self._last = token
        if known:
            self.sum += log_prob
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
        self,
        token: int,
        text: str,
        log_prob: float,
        ids: np.ndarray | None,
        log_probs: np.ndarray | None,
    ) -> dict[str, float]:
        """The likeliest tokens and the token itself by their texts.

        Clients look for the token among them, by its text or its number, to see whether it was the likeliest.
        So its text is its own here, and has the same number as in the list. Another token with that text, or
        with the text of a likelier one, is named by its id.
        """
        own = self._name(token, text)
        named: dict[str, float] = {}
        if self._top and ids is not None and log_probs is not None:
            pairs = zip(ids[: self._top].tolist(), log_probs[: self._top].tolist(), strict=True)
            for other, value in pairs:
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
