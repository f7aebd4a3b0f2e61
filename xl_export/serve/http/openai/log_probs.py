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
    text is empty.
    """

    def __init__(self, texts: TokenTexts, top: int, before: np.ndarray, offset: int = 0) -> None:
        self._texts, self._top, self._offset = texts, top, offset
        self._decode = texts.vocab.decoder()
        self._last: int | None = None
        for token in before[-CONTEXT:].tolist():
            self._decode(token)
            self._last = token
        self._clear()
        self.sum, self.count = 0.0, 0

    def add(
        self, token: int, log_prob: float, ids: np.ndarray | None = None, log_probs: np.ndarray | None = None
    ) -> None:
        """One token. log_prob: NaN where it is not known, as that of the first token of a text is not."""
        text = self._decode(token)
        known = not math.isnan(log_prob)
        self._tokens.append(text)
        self._token_log_probs.append(log_prob if known else None)
        self._offsets.append(self._offset)
        self._offset += len(text)
        self._likeliest.append(self._named(token, text, log_prob, ids, log_probs) if known else None)
        self._last = token
        if known:
            self.sum, self.count = self.sum + log_prob, self.count + 1

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        document = self.all()
        self._clear()
        return document

    def all(self) -> dict[str, Any]:
        """What was added since the last `take`, which stays."""
        return {
            "tokens": self._tokens,
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
        """The likeliest tokens and the token itself by their texts."""
        named: dict[str, float] = {}
        if self._top and ids is not None and log_probs is not None:
            pairs = zip(ids[: self._top].tolist(), log_probs[: self._top].tolist(), strict=True)
            for other, value in pairs:
                if other != token:
                    named.setdefault(self._texts.after(self._last, other) or f"token_id:{other}", value)
        # The same number as in the list: clients compare them to see whether the token was the likeliest.
        named[text or f"token_id:{token}"] = log_prob
        return named
