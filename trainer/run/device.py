"""Brings the session of a run to a GPU, and tells whether it computes the same there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from runtimes.base.errors import MissingPackageError, first_line
from runtimes.base.progress import say_once
from runtimes.contract.device import CPU, Device
from runtimes.contract.session import Session

AnySession = TypeVar("AnySession", bound=Session)

TRIED_SEGMENTS = 3
TRIED_TOKENS = 16
TRIED_ROWS = 2
TOLERANCE = 1e-3  # nats between two devices in fp32; wrong answers differ by far more


def on_device(session: AnySession, device: Device, move: Callable[[Device], AnySession]) -> AnySession:
    """The session on a device, or itself for the CPU.

    move: gives a session of the same weights on a device; the first session keeps its own. With `auto` it is
    the first NVIDIA GPU, if PyTorch can use one and it gives the CPU's answers to a few tokens; otherwise the
    session stays as it is. Raises MissingPackageError where PyTorch cannot use the device.
    """
    if device == CPU:
        return session
    if device.kind == "auto":
        return _on_first_gpu(session, move)
    if (fault := _unusable(device)) is None:
        try:
            return move(device)
        except RuntimeError as error:  # PyTorch's: the memory of the GPU is full, or the GPU is not served
            fault = f"{first_line(error):.300}"
    raise MissingPackageError(
        f"device is {device} and PyTorch cannot use it: {fault}; install what is missing, or give "
        "--device cpu."
    )


def _on_first_gpu(session: AnySession, move: Callable[[Device], AnySession]) -> AnySession:
    """The session on the first GPU if its answers are right there; otherwise itself, and a line says why."""
    first = Device("cuda")
    if _unusable(first):
        return session
    try:
        moved = move(first)
        difference = _difference(session, moved)
        fault = f"its answers differ from the CPU's by {difference:.2g} nats"
    except RuntimeError as error:  # as above; a GPU may also be found for which PyTorch has no kernels
        difference = math.nan
        fault = f"{first_line(error):.300}"
    if difference <= TOLERANCE:
        say_once(f"computing with PyTorch on {first}")
        return moved
    say_once(f"computing with PyTorch on the CPU, because {first} is not usable: {fault}")
    return session


def _unusable(device: Device) -> str | None:
    """Why PyTorch cannot use a device; None where it can."""
    import torch

    if device.kind == "mps":
        return None if torch.backends.mps.is_available() else "this is no Mac with Metal"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "it finds no NVIDIA GPU with a driver"
    if device.index >= (count := torch.cuda.device_count()):
        return f"this machine has {count} of them, and they are counted from 0"
    return None


def _difference(one: Session, other: Session) -> float:
    """The largest difference of two sessions' answers to a few tokens; NaN where one is not a number."""
    answers = []
    for session in (one, other):
        memory = session.start(TRIED_ROWS)
        segment = min(TRIED_TOKENS, session.rule.segment)
        pieces = []
        for number in range(TRIED_SEGMENTS):
            tokens = np.arange(TRIED_ROWS * segment).reshape(TRIED_ROWS, segment) + number
            tokens %= session.vocab.size
            log_probs, memory = session.score(tokens, np.roll(tokens, 1, axis=1), memory)
            pieces.append(log_probs)
        answers.append(np.concatenate(pieces, axis=1))
    return float(np.abs(answers[0] - answers[1]).max())
