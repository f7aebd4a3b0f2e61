"""Texts to tokens, and documents to JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from runtimes.base.errors import UserError
from runtimes.contract.checks import checked_ids
from runtimes.contract.vocabulary import Vocab
from runtimes.contract.vocabulary.subword import pieces
from runtimes.tasks.generate import encode_prompt
from xl_export.serve.core.settings import Limits
from xl_export.serve.http.base.errors import RefusedError
from xl_export.serve.http.base.limits import refuse_long_prompt

SLICE_ITEMS = 1 << 12  # items of a list that are encoded at once
FINITE = np.finfo(np.float32)


def _nested(array: np.ndarray) -> list[Any]:
    """Nested lists for JSON. It has no infinity, and a client would not know what a null means: the logit of
    what cannot occur becomes the lowest number of float32, which has the probability 0 too. NaN stays.
    """
    numbers: list[Any] = (array.clip(FINITE.min, FINITE.max) if array.dtype.kind == "f" else array).tolist()
    return numbers


to_json = msgspec.json.Encoder(enc_hook=_nested).encode  # a NaN is null


def encoding(
    vocab: Vocab,
    prompt: str | Sequence[int],
    *,
    what: str,
    param: str,
    limits: Limits | None = None,
    before: int = 0,
    first: int | None = None,
) -> np.ndarray:
    """The token ids int64 [N] of a text or of a list of ids.

    what, param: the prompt and the field in messages. before: how many tokens the request has already. first:
    a token that is put before them. Raises RefusedError for a prompt without tokens or with tokens of another
    vocabulary, and if the request has more tokens than the limits allow, as soon as that is known.
    """
    found = [np.array([] if first is None else [first], np.int64)]
    count = before + len(found[0])
    try:
        for part in _parts(vocab, prompt):
            if isinstance(part, str):
                found.append(vocab.encode(part))
            else:
                found.append(checked_ids(part, vocab.size, what=what))
            count += len(found[-1])
            if limits is not None:
                refuse_long_prompt(limits, count, param)
        return np.concatenate(found) if count > before else encode_prompt(vocab, prompt, what=what)
    except UserError as error:
        raise RefusedError(str(error), param=param) from error


def _parts(vocab: Vocab, prompt: str | Sequence[int]) -> Iterable[str | Sequence[int]]:
    """What is encoded at once: the pieces in which a vocabulary of subwords encodes a text anyway."""
    if isinstance(prompt, str):
        return pieces(prompt) if vocab.kind == "subword" else [prompt]
    return (prompt[at : at + SLICE_ITEMS] for at in range(0, len(prompt), SLICE_ITEMS))
