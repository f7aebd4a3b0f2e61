"""Which sessions an engine serves, and trials: whether their rows are independent, how long a step takes."""

from __future__ import annotations

import time

import numpy as np

from runtimes.base.errors import StreamError
from runtimes.contract.memory import DeviceTensor, Memory
from runtimes.contract.session import Session
from xl_export.serve.core.pieces import piece_after
from xl_export.serve.core.running import Rows
from xl_export.serve.core.settings import EngineSettings

BATCHES = (1, 2, 3, 5, 8, 16)  # that are compared with the largest batch
SHORT = 1e-3  # seconds of a step; see `has_short_steps`
TIMED = 20  # steps
# Bytes of an artefact. A step reads all weights, and one thread reads 32 MB in about a millisecond; so the
# steps of a larger one are not short, and it is not opened a second time for a trial.
SMALL = 32 << 20
STEPS = 3  # what a step writes to the memory shows in the logits of the steps after it


def refuse_unserved(session: Session) -> None:
    """Raises StreamError for a session whose rows cannot advance by themselves, in place on the CPU."""
    spec = session.spec
    if spec is not None:
        if not spec.circular:
            raise StreamError(
                f"the artefact has {spec.form} memory, in which streams cannot advance one by "
                "one; export it with `--memory ring`."
            )
        if fault := spec.lengths_fault:
            raise StreamError(
                f"{fault}, and a server advances each stream by itself; serve another artefact, or the run."
            )
    memory = session.start(2)
    token = np.zeros((2, 1), np.int64)
    session.predict(token, memory)
    if any(isinstance(array, DeviceTensor) for array in memory.tensors.values()):
        raise StreamError(
            "the session keeps its memory on a device, and rows cannot advance one by one there; open the "
            "artefact with --device cpu."
        )


def dependence_of_rows(session: Session, settings: EngineSettings, rows: Rows) -> str | None:
    """None if a row gets bitwise the same numbers in every batch that an engine of these settings steps;
    otherwise a sentence with what the trial found.

    rows: of the engine, before any stream is in them. The trial steps them as the engine will, so it
    needs no memory of its own.
    """
    chance = np.random.default_rng(0)
    segment = session.rule.segment
    for width in sorted({1, 2, piece_after(0, max(1, segment // 3), segment)[1], segment}):
        most = settings.rows if width == 1 else min(settings.rows, max(1, settings.prompt_tokens // width))
        batches = [batch for batch in BATCHES if batch < most]
        if not batches:
            continue
        tokens = chance.integers(session.vocab.size, size=(STEPS, most, width))
        whole = _logits(session, tokens, rows.part(0, most))
        for batch in batches:
            if not np.array_equal(_logits(session, tokens[:, :batch], rows.part(0, batch)), whole[:, :batch]):
                return (
                    f"rows are not independent of each other with {session.computed_by}: {batch} of "
                    f"{most} rows that were fed {width} token(s) got other numbers than among all of "
                    "them, so a seed may give other tokens under another load."
                )
    return None


def has_short_steps(session: Session) -> bool:
    """Whether a step of one stream takes less than a millisecond with the threads of this session.

    Threads of ONNX Runtime wait for their next work without sleeping. If steps are short, they do so most
    of the time, and if they have all CPUs, the event loop waits for one of them for several milliseconds.

    The fastest of some steps over a full memory decides, so that other programs do not.
    """
    memory = session.start(1)
    token = np.zeros((1, 1), np.int64)
    seconds = []
    memory.positions[:] = session.rule.mem_len
    for _ in range(TIMED):
        began = time.perf_counter()
        session.predict(token, memory)
        seconds.append(time.perf_counter() - began)
    return min(seconds) < SHORT


def _logits(session: Session, tokens: np.ndarray, memory: Memory) -> np.ndarray:
    """The logits [S, B, V] of S steps of new streams in a memory, from their tokens [S, B, T]."""
    memory.positions[:] = 0
    return np.stack([session.predict(step, memory)[0] for step in tokens])
