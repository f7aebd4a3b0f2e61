"""What all parts of the case share: the model, rows of results, and streams whose tokens are known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import CaseRow
from benchmarks.cases.serving.server import Served
from benchmarks.configs import BenchmarkConfig
from benchmarks.measure import Timing
from runtimes.base.errors import ArtefactError
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Session
from runtimes.sessions.open import open_session
from runtimes.tasks.evaluate import evaluate
from runtimes.tasks.generate import generate

GREEDY = Sampler(temperature=0)
CLOSE = 1e-4  # nats a token, between `/v1/score` and `evaluate`


@dataclass(frozen=True, kw_only=True)
class Row(CaseRow):
    """One figure."""

    part: str  # of the case
    side: str  # what was measured
    streams: int  # at once
    unit: str
    figure: Timing | None  # median, fastest and slowest of the repeats; None if the side was skipped
    most: float | None = None  # the target that the median must keep, if there is one
    least: float | None = None
    note: str = ""  # what belongs to the figure, or why it is missing
    threads: int | None = None  # CPUs of a step, if the side does not name them


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    #: Of the overhead.
    streams: tuple[int, ...] = (1, 4, 16, 32)
    #: Of the throughput.
    together: int = 8
    #: Tokens of each prompt that arrives.
    prompt: int = 10_000
    #: How many do.
    arriving: int = 3
    #: Streams that are read meanwhile.
    listening: int = 4
    #: Of the mixed load.
    clients: int = 64
    stored: int = 1000
    #: Tokens of each stream before anything is timed.
    warm: int = 20
    #: Tokens by which streams outlast the prompts that arrive.
    spare: int = 500
    #: Kinds of them in the part `stall`.
    attacks: int = 100
    #: Seconds of each.
    attacked: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One run of the case."""

    config: BenchmarkConfig
    folder: Path
    artefact: Path
    #: With which throughput is measured beside one thread.
    threads: int
    #: With which everything else is measured, but the overhead, which has one thread: those that the server
    #: takes by itself, where the user gives none.
    default_threads: int
    #: Turns of each side.
    repeats: int
    #: Of the longest stream.
    tokens: int
    #: Of load.
    minutes: float
    sizes: Sizes
    #: The root of another checkout, which the part `stall` is compared with.
    before: Path | None = None
    progress: Callable[[str], None] = field(default=lambda line: None)

    @property
    def long(self) -> int:
        """Tokens of each stream that is timed."""
        return self.sizes.warm + 4 * self.config.token_repeats

    def session(self, threads: int) -> Session:
        """The model in this process."""
        return open_session(self.artefact, threads=threads, device="cpu")

    def baseline_loop(self, session: Session, streams: int) -> Baseline:
        """Steps as those of streams after a prompt of one segment, between `warm` and `long` tokens."""
        at = self.config.segment + self.sizes.warm
        count = self.long - self.sizes.warm
        return baseline_steps(session, streams, count, at=at)

    def prompts(self, count: int, segments: int = 1, *, seed: int = 0) -> list[list[int]]:
        """Random prompts of whole segments, which a server feeds in the same pieces as `generate`."""
        chance = np.random.default_rng([seed, segments])
        size = (count, segments * self.config.segment)
        found: list[list[int]] = chance.integers(self.config.model.vocab_size, size=size).tolist()
        return found


def body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for a greedy completion as a stream, with its usage at the end."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def greedy(session: Session, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[str]]:
    """The texts of the tokens with which `generate` continues each prompt, without blanks."""
    texts: list[list[str]] = [[] for _ in prompts]
    for piece in generate(
        session, [list(p) for p in prompts], max_tokens=max_tokens, sampler=GREEDY, text=False
    ):
        texts[piece.row].append(str(piece.token))
    return texts


def check_texts(found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> None:
    """Raises ArtefactError where a stream has other tokens than it should, or another number of them."""
    for stream, (texts, right) in enumerate(zip(found, expected, strict=True)):
        if [text.strip() for text in texts] != list(right):
            raise ArtefactError(
                f"stream {stream} has other tokens through the server than from `generate`; please report "
                "this."
            )


def window(
    served: Served,
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[str]] | None,
    **fields: Any,
) -> dict[str, float]:
    """What was measured while all streams were decoded; every stream is compared to its end.

    expected: None for another model, whose tokens are only counted. fields: of each request.
    """
    found = served.load(
        "streams",
        bodies=[body(prompt, bench.long) | fields for prompt in prompts],
        warm=bench.sizes.warm,
        until=bench.long - 2,
    )
    if expected is not None:
        check_texts(found["texts"], expected)
    figures: dict[str, float] = found["window"]
    return figures


def check_scores(served: Served, session: Session, texts: Sequence[Sequence[int]]) -> None:
    """Raises ArtefactError where `/v1/score` differs from `evaluate`."""
    answer = served.asked("POST", "/v1/score", {"texts": [list(text) for text in texts]}).document()
    for text, found in zip(texts, answer["data"], strict=True):
        if abs(found["log_prob"] + evaluate(session, np.array(text)).nats) > CLOSE * len(text):
            raise ArtefactError("a score of the server differs from `evaluate`; please report this.")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Steps of a session in this process: wall and CPU seconds of one."""

    seconds: float
    cpu: float


def baseline_steps(
    session: Session, rows: int, count: int, width: int = 1, *, at: int, warm: int = 5
) -> Baseline:
    """What `predict` alone takes for a step of `rows` rows of `width` tokens, in a loop of `count` steps.

    at: the stream position of the first timed token. A token at a later position attends to more memory, so
    the loop has to be where the streams are that it is compared with.
    """
    warm = min(warm, at // width)
    memory = session.start(rows)
    for array in memory.tensors.values():
        array.fill(0)  # memory that was never written would be read from the cache
    memory.positions[:] = at - warm * width
    tokens = np.random.default_rng(0).integers(session.vocab.size, size=(count + warm, rows, width))
    for step in range(warm):
        session.predict(tokens[step], memory)
    seconds = time.perf_counter()
    cpu = time.process_time()
    for step in range(warm, count + warm):
        session.predict(tokens[step], memory)
    return Baseline(seconds=(time.perf_counter() - seconds) / count, cpu=(time.process_time() - cpu) / count)


def baseline_between(
    session: Session, rows: int, width: int, *, at: int, prompts: int, pieces: int
) -> list[float]:
    """The seconds of each round of a loop that does what a server does while prompts arrive: a step of `rows`
    rows at position `at`, and a piece of `width` tokens of a prompt in the row behind them.

    Prompts have `pieces` pieces each and come one after the other. The first round, which makes the bindings,
    is done twice and timed once.
    """
    memory = session.start(rows + 1)
    for array in memory.tensors.values():
        array.fill(0)
    memory.positions[:] = at
    decoding = memory.part(0, rows)
    prompt = memory.part(rows, rows + 1)
    tokens = np.random.default_rng(0).integers(session.vocab.size, size=(prompts, pieces, rows + width))
    seconds = []
    session.predict(tokens[0, 0, :rows, None], decoding)
    session.predict(tokens[0, 0, None, rows:], prompt)
    for of_prompt in tokens:
        prompt.positions[:] = 0
        for each in of_prompt:
            began = time.perf_counter()
            session.predict(each[:rows, None], decoding)
            session.predict(each[None, rows:], prompt)
            seconds.append(time.perf_counter() - began)
    return seconds


def baseline_prompt(session: Session, prompt: Sequence[int], width: int) -> float:
    """The seconds in which `predict` alone feeds a prompt to a new stream, in pieces of `width` tokens."""
    memory = session.start(1)
    tokens = np.array([prompt])
    for array in memory.tensors.values():
        array.fill(0)  # a server's rows were written before
    began = time.perf_counter()
    for first in range(0, len(prompt), width):
        session.predict(tokens[:, first : first + width], memory)
    return time.perf_counter() - began
