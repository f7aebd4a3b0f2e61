"""Chunks of tasks' own tokens: how they are cut, which are fed next, and what a step answers to them.

A row's numbers are bitwise the same in every batch of the same padded width, and differ by rounding between
widths. So the cut depends only on the task, and its answers are the same under any load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from runtimes.base.logits import clamped
from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from xl_export.serve.core.running import Running
from xl_export.serve.core.sampling import likeliest, log_probs_of
from xl_export.serve.core.task import Likeliest, PromptFed

Verb = Literal["predict", "score", "step"]
UNKNOWN_TOKEN = -1  # the id of a likeliest token at a place whose logits are not known


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The next tokens of one run."""

    run: Running
    length: int
    """Number of tokens."""
    width: int
    """Number of tokens with padding."""
    verb: Verb
    """Method of the session that is called."""
    cuts: tuple[int, ...]
    """Places at which the session cuts it; see `_cuts`."""


def chunk_after(fed: int, count: int, segment: int, *, pads: bool = True) -> tuple[int, int]:
    """How many of a task's `count` tokens come next when `fed` of them were fed, and the width in which they
    are fed.

    Chunks are whole segments; the rest is one chunk. If the session can pad rows on the right, it is padded
    to the next power of two, so that few widths occur. fed: a multiple of the segment that is less than
    `count`.
    """
    length = min(segment, count - fed)
    return length, min(segment, 1 << (length - 1).bit_length()) if pads else length


def chosen_chunks(session: Session, runs: Sequence[Running], budget: int) -> list[Chunk]:
    """The chunks of one iteration, in the order of their rows.

    At least one chunk is chosen, and then more while their widths fit into the budget: first of the run that
    has waited longest.
    """
    if len(runs) > 1:
        runs = sorted(runs, key=lambda run: run.last_chunk)
    pads = session.spec is None or session.spec.lengths_fault is None
    chosen: list[Chunk] = []
    for run in runs:
        named = run.task.inputs is not None  # such a step is one chunk
        length, width = chunk_after(run.fed, run.num_tokens, session.rule.segment, pads=pads and not named)
        if chosen and width > budget:
            break
        budget -= width
        verb = _verb(session, run, length)
        cuts = _cuts(session, run, width)
        chosen.append(Chunk(run=run, length=length, width=width, verb=verb, cuts=cuts))
    return sorted(chosen, key=lambda chunk: chunk.run.row)


def grouped(
    chunks: Sequence[Chunk], most_rows: Callable[[int], int], *, neighbours: bool
) -> list[list[Chunk]]:
    """Groups of chunks of one width that are stepped together. A session cuts all rows of a step at the same
    places, which changes their last bits, so chunks with other cuts are in other groups.

    most_rows: the most rows of a step of some width. neighbours: whether only neighbouring rows can be
    stepped together.
    """
    groups: list[list[Chunk]] = []
    last: dict[tuple[object, ...], list[Chunk]] = {}  # the group that chunks of a kind may join
    for chunk in chunks:
        kind = chunk.width, chunk.verb, chunk.cuts
        group = last.get(kind)
        if (
            group is None
            or len(group) == most_rows(chunk.width)
            or (neighbours and group[-1].run.row + 1 != chunk.run.row)
        ):
            last[kind] = group = []
            groups.append(group)
        group.append(chunk)
    return groups


def _cuts(session: Session, run: Running, width: int) -> tuple[int, ...]:
    """How many tokens of the next chunk come before the end of each ring, 0 for all of them, if the session
    cannot write across that end.
    """
    spec = session.spec
    if spec is None or not spec.linear_ring:
        return ()
    position = run.fed + (0 if run.task.state is None else run.task.state.position)
    left = [size - position % size for size in sorted({tensor.row[1] for tensor in spec.state})]
    return tuple(count if count < width else 0 for count in left)


def _verb(session: Session, run: Running, length: int) -> Verb:
    """The method of the session for a chunk; it depends only on the task, as the cut does.

    Logits of all places are asked for if they are wanted, or if the session computes them anyway.
    """
    task = run.task
    if task.inputs is not None or task.logits:
        return "step"
    if not task.score:
        return "predict"
    selective = session.spec is None or session.spec.model.selective
    wanted = length == run.prompt_left and (task.sampling is not None or task.keep)
    return "step" if task.top or wanted or not selective else "score"


def step_of(session: Session, chunks: Sequence[Chunk], memory: Memory) -> Any:
    """The session's answer to each of a group of chunks: outputs by name for named inputs; otherwise logits
    [V] or [T, V], or log-probabilities [T].
    """
    tasks = [chunk.run.task for chunk in chunks]
    if tasks[0].inputs is not None:
        inputs = [task.inputs for task in tasks if task.inputs is not None]
        joined = inputs[0]
        if len(inputs) > 1:
            joined = {name: np.concatenate([each[name] for each in inputs]) for name in joined}
        outputs, _ = session.step(joined, memory)
        return [{name: x[row : row + 1] for name, x in outputs.items()} for row in range(len(chunks))]
    width = chunks[0].width
    verb = chunks[0].verb
    tokens = np.zeros((len(chunks), width), np.int64)
    targets = np.full((len(chunks), width), -1, np.int64)
    for row, chunk in enumerate(chunks):
        own = chunk.run.task.tokens
        first = chunk.run.fed
        last = chunk.run.fed + chunk.length
        tokens[row, : chunk.length] = own[first:last]
        after = own[first + 1 : last + 1]
        targets[row, : len(after)] = after
    lengths = np.array([chunk.length for chunk in chunks])
    given = None if (lengths == width).all() else lengths
    if verb == "score":
        return session.score(tokens, targets, memory, lengths=given)[0]
    if verb == "step":
        return session.step(tokens, memory, lengths=given)[0]
    return session.predict(tokens, memory, lengths=given)[0]


def take_in(chunk: Chunk, answer: Any) -> PromptFed | None:
    """Notes the session's answer to a chunk in its run; None if the model's answer is not a number."""
    run = chunk.run
    task = chunk.run.task
    length = chunk.length
    if task.inputs is not None:  # whether all outputs are numbers is the model's affair
        run.fed += length
        return PromptFed(count=length, outputs=answer)
    fed = task.tokens[run.fed : run.fed + length]
    log_probs: np.ndarray | None = None
    likely: Likeliest | None = None
    if task.score:
        log_probs = np.full(length, np.nan, np.float32)
        if run.known is not None:
            log_probs[0] = run.known
        elif run.logits is not None:
            log_probs[0] = log_probs_of(run.logits[None], fed[:1])[0]
        if task.top:
            likely = _likeliest(run.logits, answer[: length - 1], task.top)
    run.known = None
    last = None
    if chunk.verb == "predict":
        last = answer
    elif chunk.verb == "step":
        if log_probs is not None:
            log_probs[1:] = log_probs_of(answer[: length - 1], fed[1:])
        last = np.array(answer[length - 1])  # a copy: the others are not kept
    else:
        assert log_probs is not None
        log_probs[1:] = answer[: length - 1]
        run.known = float(answer[length - 1]) if length < run.prompt_left else None
    run.logits = last
    run.fed += length
    if log_probs is not None:
        if np.isnan(log_probs[1:]).any() or run.known != run.known:  # which only NaN is
            return None
        log_probs = clamped(log_probs)
    if last is not None and not np.isfinite(last.max()):
        return None
    outputs = {"logits": answer[None, :length]} if task.logits else None
    return PromptFed(count=length, log_probs=log_probs, likeliest=likely, outputs=outputs)


def _likeliest(before: np.ndarray | None, logits: np.ndarray, count: int) -> Likeliest:
    """The likeliest tokens at each place of a chunk; the first place is after `before`, if that is
    known.
    """
    count = min(count, logits.shape[-1])
    if before is not None:
        return likeliest(np.concatenate([before[None], logits]), count)
    rest = likeliest(logits, count)
    return Likeliest(
        ids=np.concatenate([np.full((1, count), UNKNOWN_TOKEN), rest.ids]),
        log_probs=np.concatenate([np.full((1, count), np.nan, np.float32), rest.log_probs]),
    )
