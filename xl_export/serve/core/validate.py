"""Refuses a task that cannot be done, on the thread that submits it."""

from __future__ import annotations

import math

import numpy as np

from runtimes.base.errors import StreamError, TextError, UserError
from runtimes.contract.checks import check_memory
from runtimes.contract.session import Session
from xl_export.serve.core.state import StreamState
from xl_export.serve.core.task import Drawing, Task


def refuse_impossible(task: Task, session: Session) -> None:
    """Raises UserError for a task that this session cannot do."""
    tokens, size = task.tokens, session.vocab.size
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int64 or tokens.ndim != 1:
        raise TextError("the tokens of a task are no int64 array [N]; give token ids.")
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= size):
        raise TextError(f"a token id is outside the vocabulary of this model (0 to {size - 1}); give others.")
    if not len(tokens) and (task.state is None or task.state.logits is None):
        raise TextError("the task has no tokens, and nothing is known of what follows; give at least one.")
    if task.top < 0:
        raise UserError(f"top is {task.top}; expected 0 or more.")
    if task.state is not None:
        _refuse_state(task.state, session)
    if task.drawing is not None:
        _refuse_drawing(task.drawing, size, session.vocab.kind)


def _refuse_state(state: StreamState, session: Session) -> None:
    if state.memory.owner != session.identity:
        raise StreamError(
            f"the stream belongs to artefact {state.memory.owner:.12} and this engine runs "
            f"{session.identity:.12}; start a new stream."
        )
    check_memory(session, state.memory)
    if state.memory.batch != 1:
        raise StreamError(f"the state holds {state.memory.batch} streams; expected one.")
    if state.logits is not None and state.logits.shape != (session.vocab.size,):
        raise StreamError("the logits of the state are not those of this vocabulary; start a new stream.")


def _refuse_drawing(drawing: Drawing, size: int, kind: str) -> None:
    if drawing.max_tokens < 1:
        raise UserError(f"max_tokens is {drawing.max_tokens}; expected at least 1.")
    if drawing.seed < 0 or drawing.index < 0:
        raise UserError(f"seed is {drawing.seed} and index {drawing.index}; expected 0 or more.")
    # In a vocabulary of ids, blanks stand between tokens and are no text of their own.
    meant = [text.strip() if kind == "ids" else text for text in drawing.stop]
    if not all(meant):
        raise UserError("a stop string is empty; give at least one character, or no stop string.")
    for token, bias in drawing.bias.items():
        if not 0 <= token < size or not math.isfinite(bias):
            raise UserError(
                f"the bias of token {token} is {bias}; expected a number for an id from 0 to {size - 1}."
            )
