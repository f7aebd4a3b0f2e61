"""Compares a module and its artefact with the model's own loop.

A graph is compared with the module that was traced, so both are wrong if the module cuts a cache too early or
forgets a state. The original knows nothing of the module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.base.logits import differences, log_probability, log_sum_exp, output_differences
from runtimes.contract.reference import Reference
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec
from xl_export.artefact.validate import AnyReference, answers_of, asked, chained_segments
from xl_export.tracing.module import INPUT, LOGITS, OUTPUT, Input, ModuleStep

IN_PIECES = 200  # tokens at the end of a text, at most, that the original reads in pieces

# The outputs for the next tokens [1, n] of a stream, as `step` returns them or, for its hidden state, logits,
# and the state after them. The state None begins a stream.
Original = Callable[[Any, Any], tuple[Any, Any]]


class OriginalStreams:
    """Streams with the original's answers: two rows if the module has any number of them, with restarts.

    They are several times as long as the memory, or up_to tokens if the original is equalled only so far. If
    a step takes only whole segments, a text goes on to the end of one, which is not compared.
    """

    def __init__(self, original: Original, step: ModuleStep, spec: Spec, up_to: int | None) -> None:
        self._original = original
        self._step = step
        self._spec = spec
        self._up_to = up_to
        self._timed = {x.name for x in spec.signature[1] if spec.language_model or "tokens" in x.shape}
        """The outputs with a value for each token."""
        streams = self._streams()
        self._places = np.zeros((streams.restarts.shape[1], streams.segments.sum()), np.int64)  # in its text
        with torch.no_grad():
            self._answers = self._answered(streams)

    def difference(self, session: Session) -> float:
        """The largest difference of a session's answers, in nats, or of outputs, relative above 1.

        Raises ArtefactError if it, or the mean difference, is above the tolerance of the spec.
        """
        right = self._answers
        mine = answers_of(session, right, "answers to the original's streams")
        parts: list[tuple[np.ndarray, Any]]  # the differences [B, n, K] of an output, and which n places
        if isinstance(right, Reference):
            assert isinstance(mine, Reference)
            parts = [
                (differences(mine.log_probs, right.log_probs)[..., None], slice(None)),
                (differences(mine.last, right.last)[:, None], slice(-1, None)),
            ]
        else:
            assert not isinstance(mine, Reference)
            ends = np.cumsum(right.segments) - 1
            parts = [
                (output_differences(mine.outputs[name], x), slice(None) if name in self._timed else ends)
                for name, x in right.outputs.items()
            ]
        worst, mean = np.zeros((2, *self._places.shape))
        for part, at in parts:
            apart = part.reshape(*part.shape[:2], -1)
            worst[:, at] = np.maximum(worst[:, at], apart.max(axis=2))
            mean[:, at] = np.maximum(mean[:, at], apart.mean(axis=2))
        if self._up_to is not None:
            worst[self._places >= self._up_to] = mean[self._places >= self._up_to] = 0
        for found, what, apart, limit in (
            (float(worst.max()), "", worst, self._spec.tolerance),
            (float(mean.mean()), " in the mean", mean, self._spec.mean_tolerance),
        ):
            if found <= limit:
                continue
            right_up_to = self._places[~(apart <= limit)].min()
            unit = " nats" if self._spec.language_model else ""
            cut = f", or set equals_up_to={right_up_to} if its memory is cut on purpose"
            raise ArtefactError(
                f"{self._step.name} differs from its original by {found:.3g}{unit}{what} (more than "
                f"{limit:.1g}), from token {right_up_to + 1} of a text on; let `step` do what "
                f"the original does{cut if right_up_to >= max(1, self._spec.rule.mem_len) else ''}."
            )
        return float(worst.max())

    def _streams(self) -> AnyReference:
        spec = self._spec
        rows = spec.fixed_rows or (1 if "rows" in spec.without else 2)
        whole = spec.only_whole_segments
        if self._up_to is None:
            return asked(spec, chained_segments(spec.rule, whole=whole, counts=spec.fixed_tokens), rows)
        T = spec.rule.segment
        rest = self._up_to % T
        lengths = [T] * (self._up_to // T) + [T if whole else rest] * (rest > 0)
        streams = asked(spec, np.array(2 * lengths), rows)
        restarts = np.zeros_like(streams.restarts)
        restarts[len(lengths)] = True
        restarts[len(lengths) // 2, 1:] = True
        return dataclasses.replace(streams, restarts=restarts)

    def _answered(self, streams: AnyReference) -> AnyReference:
        ends = np.cumsum(streams.segments)
        rows = []
        for row, restarts in enumerate(streams.restarts.T):
            parts = []
            for first, after in pairwise(np.unique([0, *np.flatnonzero(restarts), len(ends)])):
                begin = ends[first] - streams.segments[first]
                self._places[row, begin : ends[after - 1]] = np.arange(ends[after - 1] - begin)
                # The original may read most of a text at once, unless an output has a value for each segment.
                half = (first + after) // 2
                at_once = max(first + 1, half, int(np.searchsorted(ends, ends[after - 1] - IN_PIECES)) + 1)
                cuts = [begin, *ends[(at_once if self._spec.language_model else first + 1) - 1 : after]]
                parts.append(self._of_text(streams, row, cuts))
            rows.append({name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]})
        answers = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        if not isinstance(streams, Reference):
            return dataclasses.replace(streams, outputs=answers)
        logits = answers[LOGITS]
        last = logits[:, -1] - log_sum_exp(logits[:, -1])[:, None]
        log_probs = log_probability(logits, streams.tokens[:, 1:])
        return dataclasses.replace(streams, log_probs=log_probs, last=last)

    def _of_text(self, streams: AnyReference, row: int, cuts: list[int]) -> dict[str, np.ndarray]:
        """The original's outputs [1, n, …] to one text, which it reads in pieces that end at `cuts`."""
        state = None
        pieces: dict[str, list[np.ndarray]] = {}
        for begin, end in pairwise(cuts):
            fed = self._inputs(streams, row, np.arange(begin, end))
            outputs, state = self._original(fed, state)
            if isinstance(outputs, Tensor):
                outputs = {LOGITS if self._spec.language_model else OUTPUT: outputs}
            for name, output in outputs.items():
                hidden = self._spec.language_model and output.shape[2] != self._spec.model.vocab_size
                x = self._step.logits(output) if hidden else output
                pieces.setdefault(name, []).append((x if name in self._timed else x[:, None]).numpy())
        return {name: np.concatenate(parts, axis=1) for name, parts in pieces.items()}

    def _inputs(self, streams: AnyReference, row: int, at: np.ndarray) -> Any:
        """What `step` is given of the tokens `at` of one row."""
        if isinstance(streams, Reference):
            return torch.from_numpy(streams.tokens[row, at][None])
        given = self._step.inputs
        fed = {
            name: torch.from_numpy(x[[row]][:, at % x.shape[1]] if given[name].timed else x[[row]])
            for name, x in streams.inputs.items()
        }
        return fed[INPUT] if isinstance(self._step.module.inputs, Input) else fed
