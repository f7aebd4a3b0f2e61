"""The result of a step while it runs, in the step's own process.

It is written after every finding, so that a crash keeps what came before it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.first_hour.rates import Rates
from benchmarks.first_hour.results import Check, Row, Status, StepResult, load_result
from runtimes.base.errors import MissingPackageError, UserError, first_line, of_library
from runtimes.base.files import write_json
from runtimes.base.records import to_json

if TYPE_CHECKING:
    from benchmarks.measure import Timing  # it imports ONNX Runtime, which a machine may not have

FULL = (
    "out of memory",
    "outofmemory",
    "cudaerrormemoryallocation",
    "no room for",
    "bad_alloc",
    "memoryerror",
)


class NotHereError(UserError):
    """This machine lacks something that the step needs, so the step is not run."""


@dataclass(kw_only=True)
class Record:
    """The result of a step while it runs, kept in the file `path`.

    work: the folder for models that several steps use. results: the folder with the results of earlier
    steps. seconds: the limit of the step. quick: whether the step shall only show that it runs, with a tiny
    model and few repetitions.
    """

    path: Path
    work: Path
    results: Path
    seconds: float = 600.0
    quick: bool = False
    result: StepResult = field(default_factory=lambda: StepResult(name="step"))

    def check(self, name: str, passed: bool, sentence: str) -> None:
        """Keeps the outcome of a comparison."""
        print(f"{name}: {'passed' if passed else 'FAILED'}: {sentence}", flush=True)
        self._add(checks=(*self.result.checks, Check(name=name, passed=passed, sentence=sentence)))

    def fact(self, name: str, value: object) -> None:
        """Keeps a fact as text."""
        print(f"{name}: {value}", flush=True)
        self._add(facts={**self.result.facts, name: str(value)})

    def series(self, name: str, values: Sequence[float]) -> None:
        """Keeps a sequence of numbers; those that are not finite are left out."""
        finite = tuple(float(value) for value in values if math.isfinite(value))
        self._add(series={**self.result.series, name: finite})

    def time(
        self,
        timing: Timing,
        *,
        model: str,
        side: str,
        batch: int,
        tokens: int,
        num_bytes: float | None = None,
        multiply_adds: float | None = None,
        halves: bool = True,
    ) -> Row:
        """Keeps a timed row with the limit beside it, and returns it.

        num_bytes, multiply_adds: of the whole call; None where they say nothing. halves: whether products
        are computed in 16 bits.
        """
        limit, by = self.rates.limit(num_bytes, multiply_adds, halves=halves)
        row = Row(
            model=model,
            side=side,
            batch=batch,
            tokens=tokens,
            milliseconds=timing.median,
            fastest=timing.fastest,
            slowest=timing.slowest,
            repeats=timing.repeats,
            limit_milliseconds=limit,
            limit_by=by,
        )
        print(
            f"{model}, {side}, {batch} x {tokens}: {timing.median:.4g} ms, limit {limit} by {by}", flush=True
        )
        self._add(rows=(*self.result.rows, row))
        return row

    def say(self, sentence: str) -> None:
        """Keeps the finding of the step in words."""
        self._add(sentence=sentence)

    @property
    def rates(self) -> Rates:
        """The rates of the GPU that the step `limits` measured."""
        return Rates.of(load_result(self.results / "limits.json"))

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Keeps an error inside of the block as a failed check, so that the step goes on after it.

        A package that is missing ends the whole step.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, NotHereError | MissingPackageError) or not of_library(error):
                raise
            traceback.print_exc()
            self.check(name, False, _sentence(error))

    def finish(self, error: BaseException | None = None) -> None:
        """Gives the result its status: that of `error`, or the worst of the checks and rows."""
        if error is None:
            status, sentence = _status_of(self.result), self.result.sentence or _summary(self.result)
        else:
            sentence = _sentence(error)
            status = _status_of_error(error, sentence)
        self._add(status=status, sentence=sentence)

    def _add(self, **changes: Any) -> None:
        self.result = replace(self.result, **changes)
        write_json(self.path, to_json(self.result))


def is_full(text: str) -> bool:
    """Whether a message says that memory ran out."""
    return any(word in text.lower() for word in FULL)


def _status_of(result: StepResult) -> Status:
    failed = [check for check in result.checks if not check.passed]
    if failed:
        return "out of memory" if all(is_full(check.sentence) for check in failed) else "failed"
    return "slower" if any(row.slow for row in result.rows) else "passed"


def _status_of_error(error: BaseException, sentence: str) -> Status:
    if isinstance(error, MissingPackageError | ModuleNotFoundError):
        return "missing"
    if isinstance(error, NotHereError):
        return "not run"
    return "out of memory" if isinstance(error, MemoryError) or is_full(sentence) else "failed"


def _sentence(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error):.400}"


def _summary(result: StepResult) -> str:
    failed = [check for check in result.checks if not check.passed]
    if failed:
        return f"{failed[0].name}: {failed[0].sentence}"
    counted = [f"{len(result.checks)} checks passed"] if result.checks else []
    if result.rows:
        slow = sum(row.slow for row in result.rows)
        counted.append(f"{len(result.rows)} times measured, {slow} slower than expected")
    return "; ".join(counted) or "done"
