"""The records of a report: what every step found, as `report.json` holds it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from runtimes.base.errors import ConfigError, UserError
from runtimes.base.files import read_json
from runtimes.base.records import from_json

SCHEMA = 1
NO_GPU = "no GPU"  # the fact of the first step that says why no GPU can be used
Status = Literal[
    "passed",  # everything is right, and as fast as expected
    "slower",  # everything is right, and a time is beyond what is expected
    "failed",  # an answer is wrong, or an error was raised
    "crashed",  # the process ended by a signal or without a result
    "out of memory",
    "out of time",  # the process was stopped at its limit
    "missing",  # a package is not installed
    "not run",  # this machine lacks something else, or there was no time left
    "interrupted",
]
STATUSES: tuple[Status, ...] = get_args(Status)
# These steps are not repeated when a report is resumed; the others may end differently then.
DONE: tuple[Status, ...] = ("passed", "slower", "failed", "crashed", "out of memory", "out of time")
BAD: tuple[Status, ...] = ("failed", "crashed", "out of memory", "out of time")
# A time is expected to be at most so many times the physical limit, and some milliseconds more: a step
# launches kernels and passes through Python, which the limit does not count.
TIMES, MORE_MILLISECONDS = 3.0, 0.5


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison, or one attempt that could fail."""

    name: str
    passed: bool
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One timed call: `batch` streams of `tokens` tokens each, with full memory.

    limit_milliseconds: what the measured rates of this GPU allow at best, by `limit_by`; None where no rate
    was measured.
    """

    model: str
    side: str
    batch: int
    tokens: int
    milliseconds: float
    fastest: float
    slowest: float
    repeats: int
    limit_milliseconds: float | None = None
    limit_by: str = "unknown"

    @property
    def slow(self) -> bool:
        """Whether the time is beyond what is expected."""
        limit = self.limit_milliseconds
        return limit is not None and self.milliseconds > TIMES * limit + MORE_MILLISECONDS


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step found. sentence: the finding in words. ended: how its process ended.

    series: numbers in the order in which they were measured, such as the device memory in use.
    """

    name: str
    title: str = ""
    status: Status | None = None
    sentence: str = ""
    seconds: float = 0.0
    ended: str = ""
    checks: tuple[Check, ...] = ()
    rows: tuple[Row, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    series: dict[str, tuple[float, ...]] = field(default_factory=dict)
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the first hour found. commit: of this project, where it is a checkout.

    began: the time of its beginning. quick: whether tiny models stood for the published ones, so that no
    time says anything. finished: whether every step that was asked for has a result.
    """

    schema: int = SCHEMA
    kind: Literal["first-hour"] = "first-hour"
    began: str
    commit: str | None = None
    versions: dict[str, str]
    quick: bool = False
    finished: bool = False
    steps: tuple[StepResult, ...] = ()

    def step(self, name: str) -> StepResult | None:
        """The result of the step of that name; None where it has none yet."""
        return next((step for step in self.steps if step.name == name), None)

    def with_step(self, result: StepResult, order: list[str]) -> Report:
        """The report with this result in place of an earlier one of the same step, in the given order."""
        others = [step for step in self.steps if step.name != result.name]
        place = {name: at for at, name in enumerate(order)}
        steps = sorted([*others, result], key=lambda step: place.get(step.name, len(place)))
        return replace(self, steps=tuple(steps))


def load_result(path: Path) -> StepResult | None:
    """The result that a step has written; None where there is none, or the file is none of a result."""
    try:
        return from_json(StepResult, read_json(path), where=path.name)
    except UserError:
        return None


def load_report(path: Path) -> Report:
    """The report in a file; raises ConfigError where it was altered, or is of another version."""
    report = from_json(Report, read_json(path), where=str(path))
    if report.schema != SCHEMA:
        raise ConfigError(
            f"{path} has schema {report.schema}, expected {SCHEMA}; give another --out, or --force to begin "
            "again."
        )
    return report
