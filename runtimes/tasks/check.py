"""The self-test of an artefact: it replays `reference.npz`, tokens and PyTorch's answers to them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtimes.base.errors import ArtefactError
from runtimes.contract.device import Device
from runtimes.contract.precision import QUANTISED, unmeasured
from runtimes.contract.reference import load_reference, replay
from runtimes.contract.spec import REFERENCE
from runtimes.sessions.open import open_session


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Whether this device computes what the trained model computes.

    Differences are in log-probability (nats).

    against: whose answers they were compared with. These are PyTorch's, or with quantised weights those of
    the machine that exported. The mean difference has a tolerance of its own. computed_by, kernel: what
    computed here, as `Session` has it. note: what a passed check does not say.
    """

    passed: bool
    max_difference: float
    tolerance: float
    mean_difference: float
    mean_tolerance: float
    tokens: int
    seconds: float
    against: str
    computed_by: str
    kernel: str | None = None
    note: str | None = None

    @property
    def sentence(self) -> str:
        mean = f", {self.mean_difference:.2e} in the mean (tolerance {self.mean_tolerance:g})"
        return (
            f"{self.tokens} log-probabilities differ from {self.against} by at most "
            f"{self.max_difference:.2e} nats (tolerance "
            f"{self.tolerance:g}){mean if self.mean_tolerance < self.tolerance else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def check(artefact: Path | str, *, threads: int | None = None, device: Device | str = "auto") -> CheckReport:
    """A report of how far every log-probability on this device is from the reference of an artefact or
    engine.

    threads, device: as in `open_session`. Raises ArtefactError for a folder that is damaged, and for one that
    holds no reference, such as a run.
    """
    folder = Path(artefact)
    session = open_session(folder, threads=threads, device=device)
    if session.spec is None:
        raise ArtefactError(
            f"{folder} is a run, the reference itself; check the artefact that `xl-export export` makes of "
            "it."
        )
    spec, quantised = session.spec, session.spec.precision in QUANTISED
    reference = load_reference(folder / REFERENCE, spec)
    began = time.perf_counter()
    log_probs, last = replay(session, reference.tokens, reference.segments.tolist(), reference.restarts)
    seconds = time.perf_counter() - began
    differences = np.concatenate(
        [np.abs(log_probs - reference.log_probs).ravel(), np.abs(last - reference.last).ravel()]
    )
    # A NaN anywhere makes both figures NaN, and no comparison with a tolerance holds for a NaN.
    worst, mean = float(differences.max()), float(differences.mean())
    return CheckReport(
        passed=worst <= spec.tolerance and mean <= spec.mean_tolerance,
        max_difference=worst,
        tolerance=spec.tolerance,
        mean_difference=mean,
        mean_tolerance=spec.mean_tolerance,
        tokens=log_probs.size,
        seconds=seconds,
        against="the exporting machine" if quantised else "PyTorch",
        computed_by=session.computed_by,
        kernel=session.kernel,
        note=unmeasured(spec.precision) if quantised and spec.measured is None else None,
    )
