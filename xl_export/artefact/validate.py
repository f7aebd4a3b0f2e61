"""Proves, before the export returns, that an exported graph computes what PyTorch computes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from runtimes.base.errors import ArtefactError, DivergedError
from runtimes.base.logits import are_log_probs, differences, log_sum_exp, output_differences
from runtimes.contract.memory import FAR
from runtimes.contract.precision import PRESETS, MeasuredStep, named
from runtimes.contract.reference import Reference, StepReference, replay, replay_step, step_differences
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec
from runtimes.sessions.graph import GraphSession
from runtimes.sessions.onnx_runtime import OrtSession

WRAPS = 3  # how many times the chained streams pass the whole ring
ENOUGH = 4096  # tokens; if WRAPS needs more, the streams pass the ring once and a few segments more
ROWS = 3  # the largest batch of the validation
# Nats; a mean difference of quantised answers beyond this, and beyond half of what log-probabilities vary by,
# is not a rounding: the graph computes something else.
ANOTHER_MODEL = 0.5
ANOTHER_STEP = 0.5  # the same for an output of any scale, as a share of its root mean square
SHORTEST_PERIOD = 13  # tokens after which the inputs of a reference may repeat
LARGEST_INPUTS = 1 << 20  # numbers; more inputs than these repeat


class FailingCheckWarning(UserWarning):
    """An artefact is written, and on this machine its `check` fails."""


def validate(exported: GraphSession, original: Session) -> Reference:
    """Compares an exported graph with its PyTorch model, and returns the answers of PyTorch.

    First it compares single segments of three shapes from empty memory, over the whole vocabulary. Then it
    compares two chained streams, segment by segment, that pass the end of the ring; one of them is restarted
    on the way. Then it compares a stream beyond token `FAR`, whose whole memory is zero and visible. A traced
    graph may depend on positions in any way, so it is also compared far on after a text, after padding and,
    on a ring, in a step whose rows have unequal lengths.

    Raises ArtefactError when any log-probability differs by more than the tolerance of the spec, and
    DivergedError when PyTorch's are not numbers.
    """
    draw = np.random.default_rng(0)
    tolerance = exported.spec.tolerance
    rule = exported.rule
    vocab_size = exported.vocab.size
    for batch, segment in _single_steps(exported):
        tokens = draw.integers(0, vocab_size, (batch, segment))
        logits = [session.step(tokens, session.start(batch))[0] for session in (exported, original)]
        log_probs = [x - log_sum_exp(x)[..., None] for x in logits]
        _compare(*log_probs, tolerance=tolerance, what=f"{batch} rows of {segment} tokens from empty memory")
    segments = chained_segments(rule, whole=_whole(exported), counts=exported.spec.fixed_tokens)
    restarts = _restarts(segments, _rows(exported))
    tokens = draw.integers(0, vocab_size, (restarts.shape[1], int(segments.sum()) + 1))
    lengths = segments.tolist()
    log_probs, last = replay(original, tokens, _shown(lengths, "PyTorch's answers"), restarts)
    answers = replay(exported, tokens, _shown(lengths, "the graph's answers"), restarts)
    for mine, theirs in zip(answers, (log_probs, last), strict=True):
        _compare(
            mine,
            theirs,
            tolerance=tolerance,
            what=f"two streams of {tokens.shape[1] - 1} tokens in {len(segments)} segments",
        )
    count = _rows(exported)
    whole = _whole(exported)
    if any(len(tensor.shape) == 4 for tensor in exported.state):  # hidden states do not depend on positions
        sides = [_far_on(session, count, whole) for session in (exported, original)]
        _compare(*sides, tolerance=tolerance, what=f"a stream beyond token {FAR:,}")
    if exported.spec.exporter == "trace":
        sides = [_moved_on(session, count, whole) for session in (exported, original)]
        _compare(*sides, tolerance=tolerance, what=f"a text that goes on beyond token {FAR:,}")
        if _padding(exported) and count == 2:
            unequal = exported.spec.lengths_fault is None
            sides = [_unusual_rows(session, unequal=unequal) for session in (exported, original)]
            _compare(*sides, tolerance=tolerance, what="rows with padding")
    return Reference(
        tokens=tokens, segments=segments, restarts=restarts, log_probs=log_probs.astype(np.float32), last=last
    )


def validate_step(exported: GraphSession, original: Session) -> StepReference:
    """`validate` for a step that is no language model: the outputs are compared.

    Differences are absolute up to 1 and relative above.
    """
    spec = exported.spec
    rule = spec.rule
    for batch, segment in _single_steps(exported):
        _compare_outputs(exported, original, [segment], [0] * batch)
    segments = chained_segments(rule, whole=_whole(exported), counts=exported.spec.fixed_tokens)
    restarts = _restarts(segments, _rows(exported))
    rows = restarts.shape[1]
    count = int(segments.sum())
    sizes = sum(math.prod(size for size in x.shape if isinstance(size, int)) for x in spec.signature[0])
    period = min(count, max(SHORTEST_PERIOD, LARGEST_INPUTS // (rows * sizes)))
    inputs = drawn_inputs(spec, np.random.default_rng(0), rows, period)
    lengths = segments.tolist()
    theirs = replay_step(original, inputs, _shown(lengths, "PyTorch's outputs"), restarts)
    mine = replay_step(exported, inputs, _shown(lengths, "the graph's outputs"), restarts)
    for name, output in theirs.items():
        what = f"{name} of {rows} streams of {count} tokens in {len(segments)} segments"
        _refuse_other_outputs(mine[name], output, tolerance=spec.tolerance, what=what)
    T = rule.segment
    full = [T] * (rule.slots // T + 2)
    _compare_outputs(exported, original, full, [0] * rows, jump=FAR // T * T)
    if _padding(exported):
        first = [0] * (rows - 1) + [-min(3, T - 1)]
        _compare_outputs(exported, original, [T, T, T], first)
    return StepReference(inputs=inputs, segments=segments, restarts=restarts, outputs=theirs)


def drawn_inputs(spec: Spec, draw: np.random.Generator, batch: int, count: int) -> dict[str, np.ndarray]:
    """Random inputs by name of `count` tokens."""
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


def _compare_outputs(
    exported: GraphSession, original: Session, lengths: list[int], first: list[int], *, jump: int = 0
) -> None:
    """Feeds segments of these lengths to a row for each of the positions `first`; the first row is moved on
    by `jump` before the last segment.
    """
    spec = exported.spec
    draw = np.random.default_rng(1)
    fed = [drawn_inputs(spec, draw, len(first), length) for length in lengths]
    sides = []
    for session in (exported, original):
        memory = session.start(len(first))
        memory.positions[:] = first
        parts = []
        for number, (inputs, length) in enumerate(zip(fed, lengths, strict=True)):
            memory.positions[0] += jump if number == len(lengths) - 1 else 0
            padding = memory.positions[:, None] + np.arange(length) < 0
            outputs, memory = session.step(inputs, memory)
            for tensor in spec.signature[1]:
                output = outputs[tensor.name].copy()
                if "tokens" in tensor.shape:
                    output[padding] = 0
                parts.append(output.ravel())
        sides.append(np.concatenate(parts))
    what = f"{len(first)} rows from positions {first} in segments of {lengths[-1]}"
    _refuse_other_outputs(*sides, tolerance=spec.tolerance, what=what)


def _refuse_other_outputs(mine: np.ndarray, theirs: np.ndarray, *, tolerance: float, what: str) -> None:
    if not np.isfinite(theirs).all():
        raise DivergedError(
            f"PyTorch itself gives outputs that are not finite over {what}, so there is nothing to compare "
            "the graph with; nothing was written: trace a module from before the loss diverged."
        )
    worst = float(output_differences(mine, theirs).max())
    if not worst <= tolerance:
        raise ArtefactError(
            f"the exported graph differs from PyTorch by {worst:.3g} over {what}, more than {tolerance:g}; "
            "nothing was written: report this difference."
        )


def _rows(session: GraphSession) -> int:
    """How many rows a stream of the validation has."""
    return session.spec.fixed_rows or (1 if "rows" in session.spec.without else 2)


def _whole(session: GraphSession) -> bool:
    """Whether steps are whole segments: a cut would change answers, or the graph takes no others."""
    spec = session.spec
    return "cuts" in spec.without or (spec.fixed_rows is not None and not spec.fixed_tokens)


def _padding(session: GraphSession) -> bool:
    """Whether padding in front of a text may be fed."""
    return not {"padding", "cuts"} & set(session.spec.without)


def _single_steps(session: GraphSession) -> list[tuple[int, int]]:
    """Rows and tokens of single steps from empty memory."""
    T = session.rule.segment
    if session.spec.fixed_rows:
        return [(session.spec.fixed_rows, count) for count in session.spec.fixed_tokens or (T,)]
    most = ROWS if _rows(session) > 1 else 1
    return [(min(rows, most), count) for rows, count in ((1, 1), (2, min(5, T)), (ROWS, T))]


def _restarts(segments: np.ndarray, rows: int) -> np.ndarray:
    """The rows that start a new text at a segment, bool [segments, B]: the last one does so on the way."""
    restarts = np.zeros((len(segments), rows), bool)
    restarts[len(segments) * 2 // 3, -1] = True
    return restarts


def check_quantised(lowered: OrtSession, stored: OrtSession, reference: Reference) -> Reference:
    """Returns the answers of a model's quantised weights in fp32, with which every engine is compared.

    stored: a graph in fp32 over the weights that `lowered` stores. reference: PyTorch's answers. The loss of
    quantised weights has no tolerance. Answers of either graph that are not finite, or another model's, are
    refused with ArtefactError. So are answers of int8-stored beyond the tolerances of `check`, because it
    rounds no activations. Other precisions round them as this machine does: beyond the tolerances there is a
    FailingCheckWarning, and another machine may still pass.
    """
    name = lowered.spec.precision
    both = [
        answers_of(session, reference, what)
        for session, what in ((stored, "answers of the stored weights"), (lowered, f"answers in {name}"))
    ]
    for answers in both:
        if not (are_log_probs(answers.log_probs) and are_log_probs(answers.last)):
            raise ArtefactError(
                f"in {name} the graph gives probabilities that are not finite; give a --precision with more "
                "bits."
            )
        difference = float(differences(answers.log_probs, reference.log_probs).mean())
        spread = float(reference.log_probs[np.isfinite(reference.log_probs)].std())
        if difference > max(ANOTHER_MODEL, spread / 2):
            raise ArtefactError(
                f"in {name} the log-probabilities differ from PyTorch's by {difference:.3g} nats on average, "
                "as another model's would; give a --precision with more bits."
            )
    sentence = _beyond_tolerances(
        lowered.spec, both, f"in {name} the answers of this machine differ from the stored weights in fp32"
    )
    if sentence:
        _refuse_or_warn(sentence, lowered.spec)
    return both[0]


def _refuse_or_warn(sentence: str, spec: Spec) -> None:
    """Warns of answers beyond the tolerances in a precision that rounds activations: other machines may pass.

    Raises ArtefactError in any other.
    """
    if not PRESETS[spec.precision].rounds_activations:
        raise ArtefactError(f"{sentence}; nothing was written: export in fp32, or report this difference.")
    warnings.warn(
        f"{sentence}; the artefact is written, and its check fails here: give a --precision with more bits.",
        FailingCheckWarning,
        stacklevel=3,
    )


def check_lowered_step(
    lowered: OrtSession, stored: OrtSession | None, reference: StepReference, measured: MeasuredStep
) -> StepReference:
    """`check_quantised` and `check_again` for a step that is no language model: returns the reference of a
    lower precision.

    stored: of quantised weights. measured: what the precision loses.
    """
    spec = lowered.spec
    name = named(spec.precision, spec.memory_precision)
    worst = max(measured.outputs.values(), key=lambda loss: loss.rms)
    if not worst.rms <= ANOTHER_STEP:
        raise ArtefactError(
            f"in {name} an output differs from fp32 by {worst.rms:.0%} of its size, as another step's would; "
            "give a precision with more bits."
        )
    lengths = reference.segments.tolist()
    if stored is not None:
        outputs = replay_step(
            stored, reference.inputs, _shown(lengths, "answers of the stored weights"), reference.restarts
        )
        reference = dataclasses.replace(reference, outputs=outputs)
    found = step_differences(lowered, reference, _shown(lengths, f"answers in {name}"))
    other = "PyTorch" if stored is None else "the stored weights in fp32"
    if sentence := _beyond(spec, found, f"in {name} the outputs differ from {other}", ""):
        _refuse_or_warn(sentence, spec)
    return reference


def check_again(lowered: OrtSession, reference: Reference) -> None:
    """Compares a graph of a lower precision with PyTorch's answers.

    Raises ArtefactError when answers are not finite, or differ by more than the tolerances of the precision.
    """
    name = named(lowered.spec.precision, lowered.spec.memory_precision)
    answers = answers_of(lowered, reference, f"answers in {name}")
    if sentence := _beyond_tolerances(
        lowered.spec, [answers, reference], f"in {name} the log-probabilities differ from PyTorch's"
    ):
        raise ArtefactError(f"{sentence}; nothing was written: export in fp32, or report this difference.")


def refuse_other_answers(packed: OrtSession, whole: OrtSession, reference: Reference) -> None:
    """Raises ArtefactError if a graph in another file does not reproduce its answers within the tolerances of
    `check`.
    """
    both = [answers_of(x, reference, f"answers of {x.spec.graph_file}") for x in (packed, whole)]
    option = f"--{packed.spec.storage}"
    if sentence := _beyond_tolerances(packed.spec, both, f"with {option} the graph differs from itself"):
        raise ArtefactError(
            f"{sentence}; nothing was written: leave out {option}, or report this difference."
        )


def answers_of(session: Session, reference: Reference, what: str) -> Reference:
    """Returns a session's answers to the tokens of a reference. what: the title of the progress bar."""
    shown = _shown(reference.segments.tolist(), what)
    log_probs, last = replay(session, reference.tokens, shown, reference.restarts)
    return dataclasses.replace(reference, log_probs=log_probs.astype(np.float32), last=last)


def _beyond_tolerances(spec: Spec, sides: list[Reference], what: str) -> str | None:
    """Returns the begin of a sentence if two answers differ by more than `check` allows."""
    mine, theirs = (np.hstack([side.log_probs, side.last]) for side in sides)
    return _beyond(spec, differences(mine, theirs), what, " nats")


def _beyond(spec: Spec, difference: np.ndarray, what: str, unit: str) -> str | None:
    worst = float(difference.max())
    mean = float(difference.mean())
    if worst <= spec.tolerance and mean <= spec.mean_tolerance:
        return None
    return (
        f"{what} by {worst:.3g}{unit} and {mean:.3g} in the mean, more than {spec.tolerance:g} or "
        f"{spec.mean_tolerance:g}"
    )


def chained_segments(rule: MemoryRule, *, whole: bool = False, counts: Sequence[int] = ()) -> np.ndarray:
    """Returns segment lengths T, 1, 7, T, T, 3, … (int64) whose sum passes the end of the ring.

    `WRAPS` and `ENOUGH` set how far. After the first round, a ring that is longer is filled with whole
    segments until its end is near. No segment ends where the ring ends, so that some are written across its
    end; this is not possible if T is 1 or there is no memory. whole: whether all
    segments have T tokens. counts: of tokens, each of which some segment has.
    """
    T = rule.segment
    S = rule.slots
    if whole:
        return np.full(min(WRAPS * S, max(ENOUGH, S)) // T + 3, T)
    pattern = [min(length, T) for length in (T, 1, 7, T, T, 3, T, *counts)]
    wanted = max(S + sum(pattern), min(WRAPS * S, ENOUGH))
    lengths: list[int] = []
    following = itertools.cycle(pattern)
    total = 0
    while total <= wanted:
        length = T if sum(pattern) <= total < S - T else next(following)
        at_the_end = 1 < T < S and (total + length) % S == 0
        lengths += ([T, length] if length < T else [T - 1, T]) if at_the_end else [length]
        total = sum(lengths)
    return np.array(lengths)


def _far_on(session: Session, rows: int, whole: bool) -> np.ndarray:
    """Returns log p of the next tokens [rows, N] of streams, with all memory zero.

    whole: whether steps are whole segments. The first stream is beyond token `FAR`, so that its memory is
    visible.
    """
    rule = session.rule
    memory = session.start(rows)
    segments = []
    memory.positions[0] = FAR // rule.segment * rule.segment if whole else FAR
    odd = [] if whole else [1, min(7, rule.segment)]
    for length in (rule.segment, *odd, rule.segment):
        tokens = np.arange(rows * (length + 1)).reshape(rows, -1) % session.vocab.size
        log_probs, memory = session.score(tokens[:, :-1], tokens[:, 1:], memory)
        segments.append(log_probs)
    return np.concatenate(segments, axis=1)


def _moved_on(session: Session, rows: int, whole: bool) -> np.ndarray:
    """Returns log p [rows, N] of tokens that follow a full memory, in a stream that is moved beyond `FAR`."""
    rule = session.rule
    V = session.vocab.size
    memory = session.start(rows)
    before = rule.slots + FAR % rule.slots  # so that the slot of `FAR` is the one that is written next
    jump = FAR - before
    if whole:
        before = (rule.slots // rule.segment + 1) * rule.segment
        jump = FAR // rule.segment * rule.segment
    for at in range(0, before, rule.segment):
        tokens = np.arange(rows * min(rule.segment, before - at)).reshape(rows, -1) % V
        _, memory = session.step(tokens, memory)
    memory.positions[0] += jump
    tokens = np.arange(rows * (rule.segment + 1)).reshape(rows, -1) % V
    return session.score(tokens[:, :-1], tokens[:, 1:], memory)[0]


def _unusual_rows(session: Session, *, unequal: bool) -> np.ndarray:
    """Returns log p [N] of the tokens of two rows, one of which is padded before its text.

    unequal: whether rows may have unequal lengths; then the first row has one token in the second step.
    """
    T = session.rule.segment
    V = session.vocab.size
    memory = session.start(2)
    answers = []
    memory.positions[1] = -min(3, T - 1)
    for turn in range(3):
        tokens = (np.arange(2 * (T + 1)).reshape(2, -1) + turn) % V
        lengths = np.array([1, T]) if unequal and turn == 1 else None
        targets = tokens[:, 1:].copy()
        if lengths is not None:
            targets[0, 1:] = -1
        text = (memory.positions[:, None] + np.arange(T) >= 0) & (targets >= 0)
        log_probs, memory = session.score(tokens[:, :-1], targets, memory, lengths=lengths)
        answers.append(log_probs[text])
    return np.concatenate(answers)


def _shown(lengths: list[int], what: str) -> tqdm[int]:
    """Returns the segments' lengths with a progress bar, which a terminal shows until they are done."""
    return tqdm(lengths, desc=what, unit="segment", leave=False, disable=None)


def _compare(mine: np.ndarray, theirs: np.ndarray, *, tolerance: float, what: str) -> None:
    if not are_log_probs(theirs):
        raise DivergedError(
            f"PyTorch itself gives log-probabilities that are not numbers over {what}, so there is nothing "
            "to compare the graph with; nothing was written: export a checkpoint from before the loss "
            "diverged."
        )
    worst = float(differences(mine, theirs).max())
    if not worst <= tolerance:
        raise ArtefactError(
            f"the exported graph differs from PyTorch by {worst:.3g} nats over {what}, more than "
            f"{tolerance:g}; nothing was written: check that the weights are finite and come from a trained "
            "model, or report this difference."
        )
