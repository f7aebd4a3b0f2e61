"""Answers in OpenAI's form: their types, the usage of tokens, and log-probabilities."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypedDict

import numpy as np

from xl_export.serve.core.task import Likeliest
from xl_export.serve.http.base.encoding import CONTEXT, TokenTexts
from xl_export.serve.http.base.endpoint import doc


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
