"""What a precision preset costs: the same held-out text through the artefact and through the same model in fp32."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np

from runtimes.base.errors import TextError
from runtimes.base.logits import log_sum_exp
from runtimes.contract.precision import Measured
from runtimes.contract.spec import GRAPH, WEIGHTS
from runtimes.contract.tokens import read_tokens
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.onnx_runtime import OrtSession

TOKENS = 4096  # of the text, at most
LOGITS = 1 << 23  # values of whole distributions held at a time
TIMED = 40  # single tokens of each side
TEXTS = ("test.npy", "test.txt")  # of a run, in this order


def held_out(run: Path, vocab: Vocab, text: Path | None = None) -> np.ndarray | None:
    """The first tokens int64 [N] of a text, or of the one that the run kept aside; None where it kept none.

    Raises UserError where the text cannot be read or has fewer than two tokens.
    """
    path = text or next((run / name for name in TEXTS if (run / name).is_file()), None)
    if path is None:
        return None
    tokens = read_tokens(path, vocab)[: TOKENS + 1]
    if len(tokens) < 2:
        raise TextError(
            f"{path} has {len(tokens)} token(s); measuring needs at least 2, one to see and one to predict."
        )
    return np.asarray(tokens, np.int64)


def measure(
    lowered: OrtSession, exact: OrtSession, tokens: np.ndarray, *, folders: tuple[Path, Path]
) -> Measured:
    """What `lowered` loses against `exact` on tokens [N], and their sizes and times; folders: where their graphs are."""
    V, rule = exact.vocab.size, exact.rule
    length = max(1, min(rule.segment, LOGITS // V, len(tokens) - 1))
    most = len(tokens) - 1 if V * len(tokens) <= 64 * LOGITS else 64 * LOGITS // V
    streams = [(session, session.start(1)) for session in (lowered, exact)]
    nats, divergence, agreed = np.zeros(2), 0.0, 0
    for at in range(0, most, length):
        inputs, targets = (
            tokens[None, at : min(at + length, most)],
            tokens[at + 1 : min(at + length, most) + 1],
        )
        mine, theirs = (_log_probs(session.step(inputs, memory)[0][0]) for session, memory in streams)
        rows = np.arange(len(targets))
        nats -= [mine[rows, targets].sum(), theirs[rows, targets].sum()]
        divergence += float((np.exp(theirs) * (theirs - mine)).sum())
        agreed += int((mine.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    seconds = _seconds_per_token(streams)
    sizes = [sum((folder / name).stat().st_size for name in (GRAPH, WEIGHTS)) for folder in folders]
    bits = nats / most / math.log(2)
    return Measured(
        tokens=most, bits_per_token=bits[0], fp32_bits_per_token=bits[1], kl_nats=divergence / most, agreement=agreed / most,
        num_bytes=sizes[0], fp32_num_bytes=sizes[1], seconds_per_token=seconds[0], fp32_seconds_per_token=seconds[1],
    )  # fmt: skip


def _log_probs(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - log_sum_exp(logits)[:, None]


def _seconds_per_token(streams: list) -> list[float]:
    """Median times of single tokens, both sides in turns, with as much memory as the artefact holds."""
    taken = np.zeros((len(streams), TIMED))
    token = np.zeros((1, 1), np.int64)
    for _, memory in streams:
        memory.positions[:] = max(int(memory.positions[0]), 1 << 20)
    for turn in range(TIMED):
        for side, (session, memory) in enumerate(streams):
            began = time.perf_counter()
            session.predict(token, memory)
            taken[side, turn] = time.perf_counter() - began
    return [float(x) for x in np.median(taken, axis=1)]
