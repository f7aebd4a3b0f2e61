"""Many short texts side by side against one stream of as many tokens in full segments.

The texts are like the hypotheses of a recogniser: 5 to 30 tokens each, distributed like words (Zipf's law
with exponent 1), so that the clusters of an adaptive softmax are used as in a text. All sides predict the
same tokens. Before they are timed, the scores are compared with the scores of the texts one by one, and the
export has compared the artefact with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.case import Case, Claim, Column, Job, per_second
from benchmarks.checked_sessions import Operators, agreed, fed, filled, open_checked
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_artefact
from runtimes import score_texts

SHORTEST = 5  # tokens of a text
LONGEST = 30
TOLERANCE = 1e-4  # nats, between a text among others and alone
Side = Literal["one stream", "texts", "one by one"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side."""

    side: Side
    mem_len: int
    #: The time per token.
    token: Timing
    #: This time divided by the stream's.
    ratio: float
    texts: int
    #: How many were predicted in each timed call.
    tokens: int
    operators: Operators = "standard"


def run(job: Job) -> list[Row]:
    """A row for each side."""
    repeats = job.repeats(job.config.repeats)
    alone = job.config.alone
    session = open_checked(random_artefact(job), threads=job.threads, operators=job.operators)
    texts = draw_texts(job.config.texts, session.vocab.size)
    job.progress(f"comparing {alone} texts with each alone, then timing {repeats} calls of each side")
    first = np.zeros(1, np.int64)  # the token before a text, which a vocabulary of bytes does not name
    streams = [np.concatenate([first, text]) for text in texts]
    whole = np.concatenate([first, *texts])
    memory = filled(session)
    one = session.start(1)

    def one_by_one() -> list[np.ndarray]:
        return [fed(session, stream[None], one)[0] for stream in streams[:alone]]

    def together() -> list[np.ndarray]:
        return [score.token_log_probs for score in score_texts(session, streams, tokens=True)]

    def one_stream() -> None:
        for at in range(0, len(whole) - 1, session.rule.segment):
            piece = whole[None, at : at + session.rule.segment + 1]
            session.score(piece[:, :-1], piece[:, 1:], memory)

    pairs = zip(one_by_one(), together(), strict=False)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    agreed(difference, TOLERANCE, "texts scored side by side differ from texts scored one by one")
    sides: dict[Side, Callable[[], Any]] = {
        "one stream": one_stream,
        "texts": together,
        "one by one": one_by_one,
    }
    count = {"one stream": 1, "texts": len(texts), "one by one": len(texts[:alone])}
    all_tokens = sum(map(len, texts))
    tokens = {"one stream": all_tokens, "texts": all_tokens, "one by one": sum(map(len, texts[:alone]))}
    timings = take_turns(sides, repeats=repeats, warmup=0)  # each call is long, and each side has run
    times = {side: timing.per(tokens[side]) for side, timing in timings.items()}
    return [
        Row(
            side=side,
            mem_len=session.rule.mem_len,
            token=times[side],
            ratio=times[side].median / times["one stream"].median,
            texts=count[side],
            tokens=tokens[side],
            operators=job.operators,
        )
        for side in sides
    ]


def draw_texts(count: int, vocab_size: int) -> list[np.ndarray]:
    """Texts of SHORTEST to LONGEST token ids; id n is as frequent as 1 / n."""
    draw = np.random.default_rng(0)
    ids = np.arange(1, vocab_size)
    shares = np.cumsum(1 / ids)
    lengths = draw.integers(SHORTEST, LONGEST + 1, count)
    return [ids[np.searchsorted(shares, draw.random(length) * shares[-1])] for length in lengths]


CASE = Case(
    name="score",
    run=run,
    keys=("side", "mem_len", "operators"),
    columns=(
        Column("side", "side"),
        Column("texts", "texts"),
        Column("tokens", "tokens"),
        Column("ms per token", "token"),
        Column("tokens/s", "token", per_second),
        Column("times one stream", "ratio", ".2f"),
    ),
    claims=(
        Claim(
            config="wt103-base",
            limit=1.25,
            text="a token of many short texts takes at most {limit:g} times as long as one of full segments",
            found="it took {value:.2f} times as long",
            value=lambda lines: next(row["ratio"] for row, _ in lines if row["side"] == "texts"),
        ),
    ),
    options=("config", "repeats", "mem-len", "operators"),
)
