"""Measures what a lower precision costs, on a text, against the same model in fp32."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runtimes.base.errors import TextError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.memory import Memory
from runtimes.contract.precision import Measured, MeasuredStep, OutputLoss
from runtimes.contract.reference import StepReference
from runtimes.contract.spec import GRAPH, WEIGHTS, Spec
from runtimes.contract.tokens import read_tokens
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.graph import GraphSession

MAX_TEXT_TOKENS = 4096  # the most tokens of the text that are read
DRAWN_TOKENS = 512  # tokens that the model draws where there is no text
MAX_LOGITS_HELD = 1 << 23  # the most values of whole distributions that are held at a time
TIMED_TOKENS = 40  # how many single tokens are timed on each side
TEST_TEXT_FILES = ("test.npy", "test.txt")  # of a run; the first that exists is read


def held_out(run: Path, vocab: Vocab, text: Path | None = None) -> np.ndarray | None:
    """Returns the first tokens int64 [N] of a text, or of the test text that the run kept.

    Returns None if the run kept no text. Raises UserError if the text cannot be read or has fewer than
    two tokens.
    """
    path = text or next((run / name for name in TEST_TEXT_FILES if (run / name).is_file()), None)
    return None if path is None else first_tokens(path, vocab)


def first_tokens(text: Path, vocab: Vocab) -> np.ndarray:
    """The tokens int64 [N] of a text that are measured on; raises UserError as `held_out` does."""
    tokens = read_tokens(text, vocab)[: MAX_TEXT_TOKENS + 1]
    if len(tokens) < 2:
        raise TextError(f"{text} has fewer than 2 tokens; give a longer text.")
    return np.asarray(tokens, np.int64)


def drawn_tokens(exact: GraphSession) -> np.ndarray | None:
    """A text int64 [N] that the model of a session draws with the probabilities that it gives.

    The mean loss on such a text estimates the divergence from `exact` over everything that the model writes.
    None if the graph takes no single token.
    """
    if exact.spec.only_whole_segments and exact.rule.segment > 1:
        return None
    chance = np.random.default_rng(0)
    rows = exact.spec.fixed_rows or 1  # equal ones
    memory = exact.start(rows)
    tokens = [int(chance.integers(exact.vocab.size))]
    while len(tokens) <= DRAWN_TOKENS:
        logits, memory = exact.predict(np.full((rows, 1), tokens[-1]), memory)
        tokens.append(int((logits[0] + chance.gumbel(size=exact.vocab.size)).argmax()))
    return np.array(tokens)


def measure(
    lowered: GraphSession,
    exact: GraphSession,
    tokens: np.ndarray | None,
    *,
    folders: tuple[Path, Path],
    answers: GraphSession,
) -> Measured | None:
    """Returns what the session `answers` loses against `exact` on tokens [N], with the sizes and times of
    `exact` and of `lowered`, which is the same session unless a GPU computes more of the step in fp16.

    tokens: None measures on those that the model draws. folders: the folders of the two graphs, in the same
    order. Whole distributions are compared segment by segment. Returns None for a graph that takes only whole
    segments, if there is not one.
    """
    drawn = tokens is None
    if tokens is None and (tokens := drawn_tokens(exact)) is None:
        return None
    V = exact.vocab.size
    T = exact.rule.segment
    whole = exact.spec.only_whole_segments
    length = T if whole else max(1, min(T, MAX_LOGITS_HELD // V, len(tokens) - 1))
    # Large vocabularies are measured on fewer tokens: each costs a distribution over the vocabulary.
    most = len(tokens) - 1 if V * len(tokens) <= 64 * MAX_LOGITS_HELD else 64 * MAX_LOGITS_HELD // V
    if whole and not (most := most // T * T):
        return None
    rows = exact.spec.fixed_rows or 1  # equal ones
    streams = [(session, session.start(rows)) for session in (answers, exact)]
    nats = np.zeros(2)
    divergence = 0.0
    agreed = 0
    for at in range(0, most, length):
        inputs = tokens[None, at : min(at + length, most)].repeat(rows, axis=0)
        targets = tokens[at + 1 : min(at + length, most) + 1]
        low, full = (_log_probs(session.step(inputs, memory)[0][0]) for session, memory in streams)
        each = np.arange(len(targets))
        nats -= [low[each, targets].sum(), full[each, targets].sum()]
        possible = full > -np.inf  # the others, as in a padded vocabulary, add nothing
        divergence += float((np.exp(full[possible]) * (full[possible] - low[possible])).sum())
        agreed += int((low.argmax(axis=1) == full.argmax(axis=1)).sum())
    if not np.isfinite(nats[1]):
        raise TextError(
            "the text to measure on has a token that the model gives the probability zero; give a --text "
            "without it."
        )
    streams = [(session, session.start(rows)) for session in (lowered, exact)]
    for _, memory in streams:  # beyond this position the whole memory is visible
        memory.positions[:] = T << 20
    row = np.zeros((rows, T if whole else 1), np.int64)
    seconds = _seconds(streams, lambda session, memory: session.predict(row, memory))
    sizes = _sizes(lowered.spec, folders)
    bits = nats / most / math.log(2)
    return Measured(
        tokens=most,
        bits_per_token=bits[0],
        fp32_bits_per_token=bits[1],
        kl_nats=divergence / most,
        agreement=agreed / most,
        num_bytes=sizes[0],
        fp32_num_bytes=sizes[1],
        seconds_per_token=seconds[0] / row.shape[1],
        fp32_seconds_per_token=seconds[1] / row.shape[1],
        drawn=drawn,
    )


def measure_step(
    lowered: GraphSession,
    exact: GraphSession,
    answers: StepReference,
    reference: StepReference,
    *,
    folders: tuple[Path, Path],
) -> MeasuredStep:
    """What the session `lowered` loses against `exact`, as `measure` does for a language model.

    answers: of `lowered` to the inputs of the reference, which are compared with PyTorch's.
    """
    length = int(reference.segments.min())
    feed = {
        x.name: reference.inputs[x.name][:, np.arange(length) % reference.inputs[x.name].shape[1]]
        if "tokens" in x.shape
        else reference.inputs[x.name]
        for x in exact.spec.signature[0][:-1]
    }
    streams = [(session, session.start(len(reference.restarts[0]))) for session in (lowered, exact)]

    def step(session: GraphSession, memory: Memory) -> None:
        memory.positions[:] = 0
        session.step(feed, memory)

    seconds = _seconds(streams, step)
    sizes = _sizes(lowered.spec, folders)
    return MeasuredStep(
        tokens=int(reference.segments.sum()) * reference.restarts.shape[1],
        outputs={name: output_loss(mine, reference.outputs[name]) for name, mine in answers.outputs.items()},
        num_bytes=sizes[0],
        fp32_num_bytes=sizes[1],
        seconds_per_step=seconds[0],
        fp32_seconds_per_step=seconds[1],
    )


def output_loss(mine: np.ndarray, exact: np.ndarray) -> OutputLoss:
    if exact.dtype.kind == "i":
        return OutputLoss(changed=float((mine != exact).mean()))
    difference = mine.astype(np.float64) - exact
    scale = max(float(np.sqrt(np.square(exact, dtype=np.float64).mean())), np.finfo(np.float32).tiny)
    return OutputLoss(
        largest=float(np.abs(difference).max()) / scale,
        rms=float(np.sqrt(np.square(difference).mean())) / scale,
    )


def _sizes(spec: Spec, folders: tuple[Path, Path]) -> list[int]:
    """The bytes of graphs and weights in each folder."""
    names = {GRAPH, *spec.token_graphs.values(), WEIGHTS}
    return [sum((folder / name).stat().st_size for name in names) for folder in folders]


def _log_probs(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - log_sum_exp(logits)[:, None]


def _seconds(
    streams: list[tuple[GraphSession, Memory]], step: Callable[[GraphSession, Memory], object]
) -> list[float]:
    """Returns the median times of a step of each stream.

    The two sides take turns, so that disturbances affect both.
    """
    taken = np.zeros((len(streams), TIMED_TOKENS))
    for turn in range(TIMED_TOKENS):
        for side, stream in enumerate(streams):
            began = time.perf_counter()
            step(*stream)
            taken[side, turn] = time.perf_counter() - began
    return [float(x) for x in np.median(taken, axis=1)]
