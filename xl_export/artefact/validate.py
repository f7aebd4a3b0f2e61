"""Proves, before the export returns, that the exported graphs compute what PyTorch computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError, DivergedError
from runtimes.base.logits import are_log_probs, differences, log_sum_exp, output_differences
from runtimes.base.progress import Progress
from runtimes.contract.memory import FAR
from runtimes.contract.precision import PRESETS, named
from runtimes.contract.reference import Reference, StepReference, replay, replay_step
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.spec import GRAPH, Spec
from runtimes.sessions.graph import GraphSession
from runtimes.sessions.onnx_runtime import OrtSession
from xl_export.artefact.quality import output_loss

RING_PASSES = 3  # how many times the chained streams pass the whole ring
MAX_PASS_TOKENS = (
    4096  # tokens; if RING_PASSES needs more, the streams pass the ring once and a few segments more
)
MAX_ROWS = 3  # the largest batch of the validation
# Nats; a mean difference of quantised answers beyond this, and beyond half of what log-probabilities vary by,
# is not a rounding: the graph computes something else.
ANOTHER_MODEL = 0.5
ANOTHER_STEP = 0.5  # the same for an output of any scale, as a share of its root mean square
PADDING = 3  # tokens
SHORTEST_PERIOD = 13  # tokens after which the inputs of a reference may repeat
LARGEST_INPUTS = 1 << 20  # numbers; more inputs than these repeat
AnyReference = Reference | StepReference
# Sessions over the graphs of one artefact by their file names, `step.onnx` among them.
Graphs = Mapping[str, GraphSession]


class FailingCheckWarning(UserWarning):
    """An artefact is written, and on this machine its `check` fails."""


def validate(graphs: Graphs, original: Session) -> AnyReference:
    """Compares exported graphs with their PyTorch model, and returns the answers of PyTorch, which computes
    them once for all graphs.

    First it compares single segments of three shapes from empty memory, of a language model over the whole
    vocabulary. Then it compares two chained streams, segment by segment, that pass the end of the ring; one
    of them is restarted on the way. Then it compares a language model beyond token `FAR`, with a memory that
    is zero and visible. A traced graph may depend on positions in any way, so it is also compared far on
    after a text, after padding and, if it is a language model on a ring, with rows of unequal lengths.

    Raises ArtefactError when any log-probability, or any output of another step, differs by more than the
    tolerance of the spec, and DivergedError when PyTorch's are not numbers. Differences of outputs are
    absolute up to 1 and relative above.
    """
    spec = graphs[GRAPH].spec
    T = spec.rule.segment
    rows = spec.fixed_rows or (1 if "rows" in spec.without else 2)
    # A cut would change answers, or the graph takes no other segments.
    whole = spec.only_whole_segments

    def compare(what: str, lengths: list[int], first: list[int], **options: Any) -> None:
        theirs = _fed(original, spec, lengths, first, **options)
        for file, session in graphs.items():
            mine = _fed(session, spec, lengths, first, **options)
            _refuse_difference(spec, mine, theirs, file=file, what=what)

    for batch, length in _single_steps(spec, rows):
        compare(f"{batch} rows of {length} tokens from empty memory", [length], [0] * batch, every=True)
    streams = asked(spec, chained_segments(spec.rule, whole=whole, counts=spec.fixed_tokens), rows)
    reference = answers_of(original, streams, "PyTorch's answers")
    what = f"{rows} streams of {streams.segments.sum()} tokens in {len(streams.segments)} segments"
    for file, session in graphs.items():
        mine = answers_of(session, streams, f"answers of {file}")
        _refuse_difference(spec, _answers(mine), _answers(reference), file=file, what=what)
    far = FAR // T * T if whole else FAR
    # Hidden states do not depend on positions.
    if spec.language_model and any(len(tensor.shape) == 4 for tensor in spec.state):
        lengths = [T, T] if whole else [T, 1, min(7, T), T]
        compare(f"a stream beyond token {FAR:,}", lengths, [far] + [0] * (rows - 1))
    if spec.exporter == "trace":
        S = spec.rule.slots
        # The slot that is written next must belong to the position, and a whole segment begins there.
        before = (S // T + 1) * T if whole else S + FAR % S
        jump = FAR // math.lcm(S, T) * math.lcm(S, T) if whole else FAR - before
        lengths = [T] * (before // T) + [before % T] * (before % T > 0)
        compare(f"a text that goes on beyond token {FAR:,}", [*lengths, T], [0] * rows, jump=jump)
        if not {"padding", "cuts"} & set(spec.without):
            first = [0] * (rows - 1) + [-min(PADDING, T - 1)]
            compare("rows with padding", [T, T, T], first, uneven=spec.lengths_fault is None)
    return reference


def _fed(
    session: Session,
    spec: Spec,
    lengths: list[int],
    first: list[int],
    *,
    every: bool = False,
    jump: int = 0,
    uneven: bool = False,
) -> list[np.ndarray]:
    """The answers to random segments of these lengths, without those to padding.

    They are log p of the next tokens, or the outputs of a step that is no language model. first: the position
    of the first token of each row. every: whether a language model answers with log p of every symbol. jump:
    by how much the first row is moved on before the last segment. uneven: whether the first row has only one
    token in the second segment.
    """
    draw = np.random.default_rng(0)
    memory = session.start(len(first))
    memory.positions[:] = first
    answers = []
    for number, length in enumerate(lengths):
        memory.positions[0] += jump if number == len(lengths) - 1 else 0
        text = memory.positions[:, None] + np.arange(length) >= 0
        if not spec.language_model:
            outputs, memory = session.step(drawn_inputs(spec, draw, len(first), length), memory)
            for tensor in spec.signature[1]:
                output = outputs[tensor.name]
                answers.append(output[text] if "tokens" in tensor.shape else output.copy())
            continue
        tokens = draw.integers(0, spec.model.vocab_size, (len(first), length + 1))
        targets = tokens[:, 1:].copy()
        if every:
            logits, memory = session.step(tokens[:, :-1], memory)
            answers.append(logits - log_sum_exp(logits)[..., None])
            continue
        own = None
        if uneven and number == 1:
            own = np.array([1] + [length] * (len(first) - 1))
            text &= np.arange(length) < own[:, None]
            targets[~text] = -1
        log_probs, memory = session.score(tokens[:, :-1], targets, memory, lengths=own)
        answers.append(log_probs[text])
    return answers


def asked(spec: Spec, segments: np.ndarray, rows: int) -> AnyReference:
    """A reference of random inputs without answers. The last row starts a new text on the way."""
    restarts = np.zeros((len(segments), rows), bool)
    restarts[len(segments) * 2 // 3, -1] = True
    draw = np.random.default_rng(0)
    count = int(segments.sum())
    if spec.language_model:
        tokens = draw.integers(0, spec.model.vocab_size, (rows, count + 1))
        nothing = np.empty(0)
        return Reference(tokens=tokens, segments=segments, restarts=restarts, log_probs=nothing, last=nothing)
    sizes = sum(math.prod(size for size in x.shape if isinstance(size, int)) for x in spec.signature[0])
    period = min(count, max(SHORTEST_PERIOD, LARGEST_INPUTS // (rows * sizes)))
    inputs = drawn_inputs(spec, draw, rows, period)
    return StepReference(inputs=inputs, segments=segments, restarts=restarts, outputs={})


def drawn_inputs(spec: Spec, draw: np.random.Generator, batch: int, count: int) -> dict[str, np.ndarray]:
    """Random inputs by name of `count` tokens, of a step that is no language model."""
    inputs = {}
    for tensor in spec.signature[0][:-1]:
        shape = tensor.sizes(batch=batch, tokens=count)
        numbers = (
            draw.standard_normal(shape, np.float32)
            if tensor.ids is None
            else draw.integers(tensor.ids, size=shape)
        )
        inputs[tensor.name] = numbers
    return inputs


def _single_steps(spec: Spec, rows: int) -> list[tuple[int, int]]:
    """Rows and tokens of single steps from empty memory."""
    T = spec.rule.segment
    if spec.fixed_rows:
        return [(spec.fixed_rows, count) for count in spec.fixed_tokens or (T,)]
    most = MAX_ROWS if rows > 1 else 1
    return [(min(batch, most), count) for batch, count in ((1, 1), (2, min(5, T)), (MAX_ROWS, T))]


def check_lowered(
    graphs: Graphs, stored: OrtSession | None, reference: AnyReference
) -> tuple[AnyReference, AnyReference]:
    """Compares graphs of a lower precision with what they should compute: those answers, and the answers of
    `step.onnx`.

    stored: of quantised weights, a graph in fp32 over the weights that `graphs` store; every engine is
    compared with its answers. Others are compared with the reference. The loss of quantised weights has no
    tolerance, but answers that are not finite, or another model's, are refused with ArtefactError. So are
    answers beyond the tolerances of `check`, unless the precision rounds activations: each machine does that
    in its own way, so another one may still pass, and there is a FailingCheckWarning.
    """
    spec = graphs[GRAPH].spec
    name = named(spec.precision, spec.memory_precision)
    right = reference
    other = "PyTorch's"
    if stored is not None:
        right = answers_of(stored, reference, "answers of the stored weights")
        other = "the answers of the stored weights in fp32"
        _refuse_another_model(right, reference, name)
    answers = {}
    for file, session in graphs.items():
        answers[file] = mine = answers_of(session, reference, f"answers of {file} in {name}")
        _refuse_another_model(mine, reference, name)
        sentence = _beyond_tolerances(
            spec, mine, right, f"in {name} the answers of {file} on this machine differ from {other}"
        )
        if sentence and not PRESETS[spec.precision].rounds_activations:
            raise ArtefactError(
                f"{sentence}; nothing was written: export in fp32, or report this difference."
            )
        if sentence:
            warnings.warn(
                f"{sentence}; the artefact is written, and its check with {file} fails here: give a "
                "precision with more bits.",
                FailingCheckWarning,
                stacklevel=2,
            )
    return right, answers[GRAPH]


def _refuse_another_model(answers: AnyReference, exact: AnyReference, name: str) -> None:
    """Raises ArtefactError for answers that are not finite, or that differ by more than a rounding does."""
    if isinstance(answers, StepReference):
        assert isinstance(exact, StepReference)
        losses = [output_loss(x, exact.outputs[output]).rms for output, x in answers.outputs.items()]
        worst = float(np.max(losses))  # NaN if one is
        if not worst <= ANOTHER_STEP:
            raise ArtefactError(
                f"in {name} an output differs from fp32 by {worst:.0%} of its size, as another step's would; "
                "give a precision with more bits."
            )
        return
    assert isinstance(exact, Reference)
    if not (are_log_probs(answers.log_probs) and are_log_probs(answers.last)):
        raise ArtefactError(
            f"in {name} the graph gives probabilities that are not finite; give a precision with more bits."
        )
    difference = float(differences(answers.log_probs, exact.log_probs).mean())
    spread = float(exact.log_probs[np.isfinite(exact.log_probs)].std())
    if difference > max(ANOTHER_MODEL, spread / 2):
        raise ArtefactError(
            f"in {name} the log-probabilities differ from PyTorch's by {difference:.3g} nats on average, "
            "as another model's would; give a precision with more bits."
        )


def refuse_other_answers(
    written: GraphSession, original: GraphSession, reference: AnyReference, *, option: str
) -> None:
    """Raises ArtefactError if a graph that was written again does not reproduce its answers within the
    tolerances of `check`. option: the one for which it was written.
    """
    mine, right = (answers_of(x, reference, f"answers for {option}") for x in (written, original))
    sentence = _beyond_tolerances(written.spec, mine, right, f"with {option} the graph differs from itself")
    if sentence:
        raise ArtefactError(
            f"{sentence}; nothing was written: leave out {option}, or report this difference."
        )


def answers_of(session: Session, reference: AnyReference, what: str) -> AnyReference:
    """The reference with a session's answers to its inputs. what: the title of the progress bar."""
    with Progress(what, len(reference.segments), "segments") as progress:
        lengths = progress.over(reference.segments.tolist())
        if isinstance(reference, StepReference):
            outputs = replay_step(session, reference.inputs, lengths, reference.restarts)
            return dataclasses.replace(reference, outputs=outputs)
        log_probs, last = replay(session, reference.tokens, lengths, reference.restarts)
    return dataclasses.replace(reference, log_probs=log_probs.astype(np.float32), last=last)


def _answers(reference: AnyReference) -> list[np.ndarray]:
    if isinstance(reference, StepReference):
        return list(reference.outputs.values())
    return [reference.log_probs, reference.last]


def _beyond_tolerances(spec: Spec, mine: AnyReference, theirs: AnyReference, what: str) -> str | None:
    """Returns the begin of a sentence if two answers differ by more than `check` allows."""
    if isinstance(theirs, StepReference):
        assert isinstance(mine, StepReference)
        parts = [
            output_differences(mine.outputs[name], right, scale=spec.scale_of(right))
            for name, right in theirs.outputs.items()
            if name in spec.compared_outputs
        ]
        unit = ""
    else:
        parts = [differences(*pair) for pair in zip(_answers(mine), _answers(theirs), strict=True)]
        unit = " nats"
    apart = np.concatenate([part.ravel() for part in parts])
    worst = float(apart.max())
    mean = float(apart.mean())
    if worst <= spec.tolerance and mean <= spec.mean_tolerance:
        return None
    return (
        f"{what} by {worst:.3g}{unit} and {mean:.3g} in the mean, more than {spec.tolerance:g} or "
        f"{spec.mean_tolerance:g}"
    )


def chained_segments(rule: MemoryRule, *, whole: bool = False, counts: Sequence[int] = ()) -> np.ndarray:
    """Returns segment lengths T, 1, 7, T, T, 3, … (int64) whose sum passes the end of the ring.

    `RING_PASSES` and `MAX_PASS_TOKENS` set how far. After the first round, a ring that is longer is filled
    with whole segments until its end is near. No segment ends where the ring ends, so that some are written
    across its end; this is not possible if T is 1 or there is no memory. whole: whether all segments have T
    tokens. counts: of tokens, each of which some segment has.
    """
    T = rule.segment
    S = rule.slots
    if whole:
        return np.full(min(RING_PASSES * S, max(MAX_PASS_TOKENS, S)) // T + 3, T)
    pattern = [min(length, T) for length in (T, 1, 7, T, T, 3, T, *counts)]
    wanted = max(S + sum(pattern), min(RING_PASSES * S, MAX_PASS_TOKENS))
    lengths: list[int] = []
    following = itertools.cycle(pattern)
    total = 0
    while total <= wanted:
        length = T if sum(pattern) <= total < S - T else next(following)
        at_the_end = 1 < T < S and (total + length) % S == 0
        lengths += ([T, length] if length < T else [T - 1, T]) if at_the_end else [length]
        total = sum(lengths)
    return np.array(lengths)


def _refuse_difference(
    spec: Spec, mine: list[np.ndarray], theirs: list[np.ndarray], *, file: str, what: str
) -> None:
    """Raises an error if answers are not numbers, or differ by more than the tolerance of the spec."""
    kind = "log-probabilities" if spec.language_model else "outputs"
    unit = " nats" if spec.language_model else ""
    apart = differences if spec.language_model else output_differences
    for one, other in zip(mine, theirs, strict=True):
        if not (are_log_probs(other) if spec.language_model else np.isfinite(other).all()):
            raise DivergedError(
                f"PyTorch itself gives {kind} that are not numbers over {what}, so there is nothing to "
                "compare the graph with; nothing was written: export a model from before the loss diverged."
            )
        worst = float(apart(one, other).max(initial=0))
        if not worst <= spec.tolerance:
            raise ArtefactError(
                f"{file} differs from PyTorch by {worst:.3g}{unit} over {what}, more than "
                f"{spec.tolerance:g}; nothing was written: check that the weights are finite and come from a "
                "trained model, or report this difference."
            )
