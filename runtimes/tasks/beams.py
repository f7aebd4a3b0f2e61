"""Searching for a probable continuation: beam search, and the most probable of several samples.

Both compute their continuations as rows of one batch. A stream's memory has a fixed size, so forking one
hypothesis into several is a copy of its rows, however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtimes.base.errors import UserError
from runtimes.base.logits import log_sum_exp
from runtimes.base.machine import refuse_beyond_memory
from runtimes.base.ranges import POSITIVE, Range
from runtimes.contract.memory import Memory
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.contract.vocabulary.growing_text import Reason
from runtimes.tasks.generate import Prompt, encode_prompt, feed, generate
from runtimes.tasks.sample import NOT_FINITE
from runtimes.tasks.score_texts import score_texts
from runtimes.tasks.text_rows import TextToScore

LENGTH_PENALTIES = Range(0, 10)  # with 500, the power of 60 tokens overflows


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A continuation of a prompt, with its probability under the model."""

    text: str
    ids: list[int]
    log_prob: float
    """The sum over its tokens, in nats."""
    score: float
    """What continuations are compared by: `log_prob` divided by a power of the number of tokens."""
    ended: Reason
    """`end` for the vocabulary's end of a document, `stop` for a stop string, `length` for all tokens."""


def beam_search(
    session: Session,
    prompt: Prompt,
    *,
    beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    memory: Memory | None = None,
) -> list[Continuation]:
    """The best `beams` continuations of a prompt that the search has found, best first; fewer if the model
    deems all others impossible.

    At each step every hypothesis is extended by every token, and the `beams` most probable ones that have not
    ended go on. The search is over when `beams` have ended and no other one can become better, or after
    `max_tokens` tokens. It draws no random numbers, and of equals it takes the first.

    length_penalty: the power of the length that log-probabilities are divided by: 0 compares their sums,
    which favours early ends, and 1 their means. memory: one stream to continue, which stays as it is.
    """
    POSITIVE.check("beams", beams)
    POSITIVE.check("max_tokens", max_tokens)
    LENGTH_PENALTIES.check("length_penalty", length_penalty)
    refuse_beyond_memory(
        beams * session.step_bytes(segment=1), what=f"a step of {beams} beams", fix="give fewer beams"
    )
    fed = encode_prompt(session.vocab, prompt, what="the prompt")
    end = session.vocab.special.end_of_document
    memory = session.start(1) if memory is None else memory.copy()
    logits = feed(session, fed[None], memory)
    alive: list[list[int]] = [[]]
    sums = np.zeros(1)  # the log-probability of each hypothesis that is alive
    found: list[Continuation] = []

    def keep(ids: list[int], total: float, ended: Reason) -> None:
        decoder = session.vocab.decoder()
        decoder.prime(fed.tolist())  # so that a word after the prompt begins with a blank
        text = "".join(map(decoder, ids[:-1] if ended == "end" else ids)) + decoder.rest()
        score = total / len(ids) ** length_penalty
        found.append(Continuation(text=text, ids=ids, log_prob=total, score=score, ended=ended))

    for count in range(1, max_tokens + 1):
        logits = logits.astype(np.float64)
        totals = (logits + (sums - log_sum_exp(logits))[:, None]).ravel()
        rows: list[int] = []
        tokens: list[int] = []
        for rank, place in enumerate(_best(totals, 2 * beams)):
            row, token = divmod(int(place), logits.shape[1])
            if token == end and rank < beams:
                keep([*alive[row], token], float(totals[place]), "end")
            elif token != end and len(rows) < beams:
                rows.append(row)
                tokens.append(token)
        if not rows:  # the model deems every further token of every hypothesis impossible
            break
        sums = totals[np.array(rows, np.int64) * logits.shape[1] + tokens]
        alive = [[*alive[row], token] for row, token in zip(rows, tokens, strict=True)]
        if len(found) >= beams:
            enough = sorted((each.score for each in found), reverse=True)[beams - 1]
            if sums.max() / max_tokens**length_penalty <= enough:  # a sum only falls as its text grows
                break
        if count < max_tokens:
            if rows != list(range(memory.batch)):
                memory = memory.select(rows)
            logits, _ = session.predict(np.array(tokens)[:, None], memory)
    else:
        for ids, total in zip(alive, sums.tolist(), strict=True):
            keep(ids, total, "length")
    return _best_first(found)[:beams]


def best_of(
    session: Session,
    prompt: Prompt,
    *,
    count: int,
    max_tokens: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
) -> list[Continuation]:
    """`count` sampled continuations of a prompt, the one with the highest mean log-probability first.

    The samples are the rows that `generate` yields for `count` equal prompts. The log-probability is the
    model's own, whatever the sampler.
    """
    POSITIVE.check("count", count)
    refuse_beyond_memory(
        count * session.step_bytes(segment=1), what=f"a step of {count} samples", fix="give a smaller count"
    )
    fed = encode_prompt(session.vocab, prompt, what="the prompt")
    ids: list[list[int]] = [[] for _ in range(count)]
    texts = [""] * count
    ended: list[Reason] = ["length"] * count
    for piece in generate(
        session, [fed] * count, max_tokens=max_tokens, sampler=sampler, seed=seed, stop=stop
    ):
        ids[piece.row].append(piece.token)
        texts[piece.row] += piece.text
        ended[piece.row] = piece.ended or "length"
    scores = score_texts(session, [TextToScore(text=each, context=fed.tolist()) for each in ids])
    return _best_first(
        [
            Continuation(
                text=text, ids=own, log_prob=score.log_prob, score=score.log_prob / len(own), ended=reason
            )
            for text, own, score, reason in zip(texts, ids, scores, ended, strict=True)
        ]
    )


def _best(totals: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest numbers [N], largest first, and of equals the first; fewer if the
    others are -inf.
    """
    if not np.isfinite(totals.max()):
        raise UserError(NOT_FINITE)
    kept = np.flatnonzero(totals > -np.inf)
    if count < len(kept):
        kept = np.flatnonzero(totals >= np.partition(totals, -count)[-count])
    return kept[np.argsort(-totals[kept], kind="stable")][:count]


def _best_first(found: list[Continuation]) -> list[Continuation]:
    return sorted(found, key=lambda each: -each.score)
