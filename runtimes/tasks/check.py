"""The self-test of an artefact: it replays its reference, tokens and PyTorch's answers to them.

A session on a GPU computes a step in several ways (`runtimes.contract.session.Paths`). The reference is
replayed until each of them has given answers that were compared; one that no replay reaches fails the check.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.logits import differences
from runtimes.contract.device import Device
from runtimes.contract.precision import PRESETS
from runtimes.contract.reference import (
    Reference,
    load_reference,
    load_step_reference,
    replay,
    step_differences,
)
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec
from runtimes.sessions.open import open_session

WHOLE_SEGMENT = 1 << 30  # a segment as long as a step may have
# What is fed before the streams of a reference begin; see `_replays`.
LEADS: tuple[tuple[int, ...], ...] = ((), (WHOLE_SEGMENT,), (1,), (1, WHOLE_SEGMENT), (1, 1))
MAX_SINGLE_TOKENS = 64  # tokens that are fed one by one, if segments are not accepted


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Whether this device computes what the trained model computes.

    Differences are in log-probability (nats). Of a step that is no language model they are in its outputs:
    see `output_differences` and `Spec.scale_of`.
    """

    passed: bool
    max_difference: float
    tolerance: float
    """The largest `max_difference` that passes."""
    mean_difference: float
    mean_tolerance: float
    """The largest `mean_difference` that passes."""
    tokens: int
    """Number of log-probabilities compared; of tokens, if the step is no language model."""
    seconds: float
    against: str
    """What computed the reference: PyTorch or, for quantized weights, the same weights in fp32."""
    computed_by: str
    """What computed here, as in `Session`."""
    kernel: str | None = None
    """The same for scripts, as in `Session`."""
    outputs: tuple[str, ...] = ()
    """The names of the outputs that were compared; empty for a language model."""
    paths: int = 1
    """Number of ways of computing a step that were compared."""
    missing: tuple[str, ...] = ()
    """The ways that were not compared."""

    @property
    def sentence(self) -> str:
        mean = f", {self.mean_difference:.2e} in the mean (tolerance {self.mean_tolerance:g})"
        compared = f"{', '.join(self.outputs)} of {self.tokens} tokens" if self.outputs else ""
        unit = "" if self.outputs else " nats"
        sentence = (
            f"{compared or f'{self.tokens} log-probabilities'} differ from {self.against} by at most "
            f"{self.max_difference:.2e}{unit} (tolerance "
            f"{self.tolerance:g}){mean if self.mean_tolerance < self.tolerance else ''}"
        )
        total = self.paths + len(self.missing)
        if self.missing:
            names = "; ".join(self.missing)
            return (
                f"{sentence}; {len(self.missing)} of {total} ways to compute a step were not reached: {names}"
            )
        return f"{sentence}; all {total} ways to compute a step were compared" if total > 1 else sentence

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def check(
    artefact: Path | str,
    *,
    threads: int | None = None,
    device: Device | str = "auto",
    expected_identity: str | None = None,
    public_key: Path | str | None = None,
) -> CheckReport:
    """Compares every log-probability on this device with the reference of an artefact or engine.

    The other arguments are those of `open_session`. Raises ArtefactError for a folder that is damaged or has
    no reference, such as a run.
    """
    folder = Path(artefact)
    chosen = Device.parse(device)
    session = open_session(
        folder, threads=threads, device=chosen, expected_identity=expected_identity, public_key=public_key
    )
    if session.spec is None:
        raise ArtefactError(
            f"{folder} is a run, the reference itself; check the artefact that `xl-export export` makes of "
            "it."
        )
    spec = session.spec
    outputs: tuple[str, ...] = ()
    began = time.perf_counter()
    if spec.language_model:
        reference = load_reference(folder, spec)
        tokens = reference.log_probs.size
        replays = list(_replays(session, reference))
        found = np.concatenate([differences(mine, theirs).ravel() for mine, theirs in replays])
    else:
        of_step = load_step_reference(folder, spec)
        tokens = int(of_step.segments.sum()) * of_step.restarts.shape[1]
        found = step_differences(session, of_step, of_step.segments.tolist())
        outputs = spec.compared_outputs
    seconds = time.perf_counter() - began
    # A NaN anywhere makes both differences NaN, and no comparison with a tolerance holds for a NaN.
    worst = float(found.max())
    mean = float(found.mean())
    missing = session.paths.missing if session.paths else ()
    most, most_mean = spec.tolerance, spec.mean_tolerance
    if chosen.tf32:  # it has float16's number of bits
        most = max(most, PRESETS["fp16"].tolerance)
        most_mean = max(most_mean, PRESETS["fp16"].mean_tolerance)
    return CheckReport(
        passed=worst <= most and mean <= most_mean and not missing,
        max_difference=worst,
        tolerance=most,
        mean_difference=mean,
        mean_tolerance=most_mean,
        tokens=tokens,
        outputs=outputs,
        seconds=seconds,
        against=_against(spec),
        computed_by=session.computed_by,
        kernel=session.kernel,
        paths=len(session.paths.possible) - len(missing) if session.paths else 1,
        missing=missing,
    )


def _against(spec: Spec) -> str:
    """Whose answers the reference of an artefact holds, in words."""
    if spec.answers == "stored-weights":
        return "the stored weights in fp32"
    if spec.answers == "memory-in-bytes":
        return f"PyTorch with {spec.memory_precision} memory"
    return "PyTorch"


def _replays(session: Session, reference: Reference) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of the answers of a session and of the reference, until all paths of the session are compared."""
    paths = session.paths
    if paths is None:
        yield from _compared(session, reference)
        return
    assert session.spec is not None, "only artefacts and engines have several paths"
    uses = (False, True) if session.spec.model.selective else (False,)
    nothing = True
    refusal = ""
    for batch, lead, whole, single in itertools.product(paths.batches, LEADS, uses, (False, True)):
        if nothing or paths.missing:
            before = set(paths.taken)
            try:
                yield from _compared(session, reference, batch=batch, lead=lead, whole=whole, single=single)
                nothing = False
            except StreamError as error:  # mostly because no profile takes these rows and segments
                paths.without(before)
                refusal = refusal or str(error).partition(";")[0]
    if nothing:
        raise StreamError(
            f"the engine takes no stream of its reference ({refusal}); build it with --batch 1:2:2."
        )


def _compared(
    session: Session,
    reference: Reference,
    *,
    batch: int | None = None,
    lead: Iterable[int] = (),
    whole: bool = False,
    single: bool = False,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs of answers, the session's and the reference's, of one replay.

    batch: how many rows are fed; the reference's rows are repeated. single: whether the first tokens are
    fed one by one, because no profile takes longer segments of this many rows. lead, whole: see `replay`.
    """
    rows = np.arange(batch or len(reference.tokens)) % len(reference.tokens)
    tokens = reference.tokens[rows]
    lengths = reference.segments
    restarts = reference.restarts[:, rows]
    if single:
        if not session.rule.cuts_change_nothing:
            raise StreamError(f"under the {session.rule.mask} mask the answers depend on the segments.")
        starts = np.zeros((int(lengths.sum()), len(rows)), bool)
        starts[np.cumsum(lengths) - lengths] = restarts
        restarts = starts[:MAX_SINGLE_TOKENS]
        lengths = np.ones(len(restarts), np.int64)
        tokens = tokens[:, : len(lengths) + 1]
    lead = [min(length, session.rule.segment) for length in lead]
    log_probs, last = replay(session, tokens, lengths.tolist(), restarts, lead=lead, whole=whole)
    pairs = [(log_probs, reference.log_probs[rows, : log_probs.shape[1]])]
    if log_probs.shape[1] < reference.log_probs.shape[1]:
        return pairs  # `last` follows another token than the reference's
    return [*pairs, (last, reference.last[rows])]
