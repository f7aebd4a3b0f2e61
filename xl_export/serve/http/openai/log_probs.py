"""Log-probabilities as OpenAI's completions return them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xl_export.serve.http.base.token_texts import TokenTexts

CONTEXT = 32  # tokens before a text that decide how its first token reads


class LogProbs:
    """Collects tokens with their log-probabilities, and gives them in OpenAI's form.

    top: how many of the likeliest tokens are returned beside each. before: the tokens before the first one
    that is added. The texts of the tokens make up the whole text; where a token completes no character its
    text is empty. as_ids: whether each token is named `token_id:N` instead of by its text.
    """

    def __init__(
        self, texts: TokenTexts, top: int, before: np.ndarray, offset: int = 0, *, as_ids: bool = False
    ) -> None:
        self._texts, self._top, self._offset, self._as_ids = texts, top, offset, as_ids
        self._decode = texts.vocab.decoder()
        self._decode.prime(before[-CONTEXT:].tolist())
        self._last = int(before[-1]) if len(before) else None
        self._clear()
        self.sum, self.count = 0.0, 0

    def add(
        self, token: int, log_prob: float, ids: np.ndarray | None = None, log_probs: np.ndarray | None = None
    ) -> None:
        """One token. log_prob: NaN where it is not known, as that of the first token of a text is not."""
        text = self._decode(token)
        known = not math.isnan(log_prob)
        self._tokens.append(_id_name(token) if self._as_ids else text)
        self._token_log_probs.append(log_prob if known else None)
        self._offsets.append(self._offset)
        self._offset += len(text)
        self._likeliest.append(self._named(token, text, log_prob, ids, log_probs) if known else None)
        self._last = token
        if known:
            self.sum, self.count = self.sum + log_prob, self.count + 1

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
