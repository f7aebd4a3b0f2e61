"""Pieces of tasks' own tokens: how they are cut, which are fed, and what a step returns for them.

A row's numbers are bitwise the same in every batch of the same padded width, and differ by rounding between
widths. So the cut depends only on the task, and its answers are the same under any load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from runtimes.contract.memory import Memory
from runtimes.contract.session import Session
from xl_export.serve.core.running import Running
from xl_export.serve.core.sampling import likeliest, log_probs_of
from xl_export.serve.core.task import Fed, Likeliest

Verb = Literal["predict", "score", "step"]
UNKNOWN = -1  # the id of a likeliest token at a place whose logits are not known


def piece_after(fed: int, count: int, segment: int) -> tuple[int, int]:
    """How many of a task's `count` tokens come next when `fed` of them were fed, and the width in which they
    are fed.

    Pieces are whole segments; the rest is one piece, padded on the right to the next power of two, so that
    few widths occur. fed: a multiple of the segment that is less than `count`.
    """
    length = min(segment, count - fed)
    return length, min(segment, 1 << (length - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The next tokens of one run."""

    run: Running
    #: Of the tokens.
    length: int
    #: In which they are fed.
    width: int
    #: Of the session.
    verb: Verb

    def goes_with(self, other: Piece) -> bool:
        """Whether the other piece is stepped together with this one, which is of the row before."""
        return other.run.row == self.run.row + 1 and (other.width, other.verb) == (self.width, self.verb)


def chosen_pieces(session: Session, runs: Sequence[Running], budget: int) -> list[list[Piece]]:
    """The pieces of one iteration, in groups that are stepped together.

    At least one piece is chosen, and then more while their widths fit into the budget: people before bulk,
    tenants who were served less before others, and of one tenant's runs the one that has waited longest.
    """
    if len(runs) > 1:
        runs = sorted(runs, key=lambda run: (run.task.bulk, run.account.served, run.last_piece, run.order))
    chosen: list[Piece] = []
    for run in runs:
        length, width = piece_after(run.fed, len(run.task.tokens), session.rule.segment)
        if chosen and width > budget:
            break
        budget -= width
        chosen.append(Piece(run=run, length=length, width=width, verb=_verb(session, run, length)))
    chosen.sort(key=lambda piece: piece.run.row)
    groups: list[list[Piece]] = []
    for piece in chosen:
        if groups and groups[-1][-1].goes_with(piece):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _verb(session: Session, run: Running, length: int) -> Verb:
    """What is asked of the session for a piece; it depends only on the task, as the cut does.

    Logits of all places are asked for if they are wanted, or if the session computes them anyway.
    """
    task = run.task
    if not task.score:
        return "predict"
    selective = session.spec is None or session.spec.model.selective
    wanted = length == run.prompt_left and (task.drawing is not None or task.keep)
    return "step" if task.top or wanted or not selective else "score"


def step_of(session: Session, pieces: Sequence[Piece], memory: Memory) -> np.ndarray:
    """The session's answer to a group of pieces: logits [N, V] or [N, T, V], or log-probabilities [N, T]."""
    width = pieces[0].width
    verb = pieces[0].verb
    tokens = np.zeros((len(pieces), width), np.int64)
    targets = np.full((len(pieces), width), -1, np.int64)
    for row, piece in enumerate(pieces):
        own = piece.run.task.tokens
        first = piece.run.fed
        last = piece.run.fed + piece.length
        tokens[row, : piece.length] = own[first:last]
        after = own[first + 1 : last + 1]
        targets[row, : len(after)] = after
    lengths = np.array([piece.length for piece in pieces])
    given = None if (lengths == width).all() else lengths
    if verb == "score":
        return session.score(tokens, targets, memory, lengths=given)[0]
    if verb == "step":
        return session.step(tokens, memory, lengths=given)[0]
    return session.predict(tokens, memory, lengths=given)[0]


def take_in(piece: Piece, answer: np.ndarray) -> Fed | None:
    """Notes the session's answer to a piece in its run; None if the model's answer is not a number."""
    run = piece.run
    task = piece.run.task
    length = piece.length
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
    if piece.verb == "predict":
        last = answer
    elif piece.verb == "step":
        assert log_probs is not None
        log_probs[1:] = log_probs_of(answer[: length - 1], fed[1:])
        last = np.array(answer[length - 1])  # a copy: the others are not kept
    else:
        assert log_probs is not None
        log_probs[1:] = answer[: length - 1]
        run.known = float(answer[length - 1]) if length < run.prompt_left else None
    run.logits = last
    run.fed += length
    spoiled = log_probs is not None and np.isnan(log_probs[1:]).any()
    if spoiled or (last is not None and not np.isfinite(last.max())):
        return None
    return Fed(count=length, log_probs=log_probs, likeliest=likely)


def _likeliest(before: np.ndarray | None, logits: np.ndarray, count: int) -> Likeliest:
    """The likeliest tokens at each place of a piece; the first place is after `before`, if that is
    known.
    """
    count = min(count, logits.shape[-1])
    if before is not None:
        return likeliest(np.concatenate([before[None], logits]), count)
    rest = likeliest(logits, count)
    return Likeliest(
        ids=np.concatenate([np.full((1, count), UNKNOWN), rest.ids]),
        log_probs=np.concatenate([np.full((1, count), np.nan, np.float32), rest.log_probs]),
    )
