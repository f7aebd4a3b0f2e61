"""Many short texts side by side against one stream of as many tokens in full segments.

The texts are like the hypotheses of a recogniser: 5 to 30 tokens each, distributed like words (Zipf's law
with exponent 1), so that the clusters of an adaptive softmax are used as in a text. All sides predict the
same tokens. Before they are timed, the scores are compared with the scores of the texts one by one, and the
export has compared the artefact with PyTorch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.case import (
    Case,
    CaseRow,
    Claim,
    Column,
    config_option,
    decimal,
    mem_len_option,
    milliseconds,
    operators_option,
    repeats_option,
    whole,
    words,
)
from benchmarks.cases.steps import filled
from benchmarks.checked_sessions import Operators, open_checked
from benchmarks.configs import BenchmarkConfig, checked_repeats, checked_threads
from benchmarks.measure import Timing, take_turns
from benchmarks.models import random_weights, write_artefact
from runtimes import score_texts
from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session

SHORTEST = 5  # tokens of a text
LONGEST = 30
TOLERANCE = 1e-4  # nats, between a text among others and alone
Side = Literal["one stream", "texts", "one by one"]


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
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
    #: Between the texts scored side by side and one by one, at most, in nats.
    difference: float
    operators: Operators = "standard"


def run(
    config: BenchmarkConfig,
    *,
    mem_len: int | None = None,
    threads: int | None = None,
    repeats: int | None = None,
    operators: Operators = "standard",
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """A row for each side. An argument that is None is taken from the configuration."""
    threads = checked_threads(threads)
    repeats = checked_repeats(repeats, config.repeats)
    rule = MemoryRule(mem_len=config.mem_len if mem_len is None else mem_len, segment=config.segment)
    with tempfile.TemporaryDirectory() as folder:
        progress("exporting and comparing with PyTorch")
        artefact = write_artefact(Path(folder), config.model, rule, random_weights(config.model), "ring")
        session = open_checked(artefact, threads=threads, operators=operators)
        texts = draw_texts(config.texts, session.vocab.size)
        progress(f"comparing {config.alone} texts with each alone, then timing {repeats} calls of each side")
        return _measure(session, texts, config.alone, repeats=repeats, operators=operators)


def draw_texts(count: int, vocab_size: int) -> list[np.ndarray]:
    """Texts of SHORTEST to LONGEST token ids; id n is as frequent as 1 / n."""
    draw = np.random.default_rng(0)
    ids = np.arange(1, vocab_size)
    shares = np.cumsum(1 / ids)
    lengths = draw.integers(SHORTEST, LONGEST + 1, count)
    return [ids[np.searchsorted(shares, draw.random(length) * shares[-1])] for length in lengths]


def _measure(
    session: Session, texts: Sequence[np.ndarray], alone: int, *, repeats: int, operators: Operators
) -> list[Row]:
    first = np.zeros(1, np.int64)  # the token before a text, which a vocabulary of bytes does not name
    streams = [np.concatenate([first, text]) for text in texts]
    sample = streams[:alone]
    one = session.start(1)

    def one_by_one() -> list[np.ndarray]:
        return [_alone(session, stream, one) for stream in sample]

    def together() -> list[np.ndarray]:
        return [score.token_log_probs for score in score_texts(session, streams, tokens=True)]

    memory = filled(session, 1)
    whole = np.concatenate([first, *texts])

    def one_stream() -> None:
        for at in range(0, len(whole) - 1, session.rule.segment):
            piece = slice(at, at + session.rule.segment)
            session.score(whole[None, :-1][:, piece], whole[None, 1:][:, piece], memory)

    pairs = zip(one_by_one(), together(), strict=False)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    if not difference <= TOLERANCE:
        raise ArtefactError(
            f"texts scored side by side differ from texts scored one by one by {difference:.3g} nats, more "
            f"than {TOLERANCE:g}; nothing was measured, please report this."
        )
    sides: dict[Side, Callable[[], Any]] = {
        "one stream": one_stream,
        "texts": together,
        "one by one": one_by_one,
    }
    counts = {
        "one stream": len(whole) - 1,
        "texts": len(whole) - 1,
        "one by one": sum(map(len, texts[:alone])),
    }
    timings = take_turns(sides, repeats=repeats, warmup=0)  # each call is long, and each side has run
    times = {side: timing.per(counts[side]) for side, timing in timings.items()}
    return [
        Row(
            side=side,
            mem_len=session.rule.mem_len,
            token=times[side],
            ratio=times[side].median / times["one stream"].median,
            texts={"one stream": 1, "texts": len(texts), "one by one": len(sample)}[side],
            tokens=counts[side],
            difference=difference,
            operators=operators,
        )
        for side in sides
    ]


def _alone(session: Session, stream: np.ndarray, memory: Any) -> np.ndarray:
    """Log-probabilities of a text from empty memory; the memory is used again, as a caller would."""
    memory.positions[:] = 0
    answers = []
    segment = session.rule.segment
    for start in range(0, len(stream) - 1, segment):
        at = slice(start, start + segment)
        log_probs, memory = session.score(stream[None, :-1][:, at], stream[None, 1:][:, at], memory)
        answers.append(log_probs[0])
    return np.concatenate(answers)


CASE = Case(
    name="score",
    summary="many short texts side by side against one stream of as many tokens, and one by one",
    run=run,
    keys=("side", "mem_len", "operators"),
    columns=(
        Column("side", words("side")),
        Column("texts", whole("texts")),
        Column("tokens", whole("tokens")),
        Column("ms per token", milliseconds("token")),
        Column("tokens/s", lambda row, run: f"{1e3 / row['token']['median']:,.0f}"),
        Column("times one stream", decimal("ratio")),
    ),
    claims=(
        Claim(
            limit="score_claim",
            text="a token of many short texts takes at most {limit:g} times as long as one of full segments",
            found="it took {value:.2f} times as long",
            value=lambda lines: next(row["ratio"] for row, _ in lines if row["side"] == "texts"),
        ),
    ),
    options=(config_option, repeats_option, mem_len_option, operators_option),
)
