"""The page of a report: what passed, what did not, how fast it was, and where to send it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.first_hour.render import Block, Heading, Paragraph, Printed, Table
from benchmarks.first_hour.results import (
    BAD,
    MORE_MILLISECONDS,
    NO_GPU,
    STATUSES,
    TIMES,
    Report,
    Row,
    StepResult,
)

SHOWN = ("GPU", "memory of the GPU", "driver", "CPU", "system")  # facts of the machine in the first lines


def blocks(report: Report) -> list[Block]:
    """The content of the page."""
    machine = report.step("machine")
    facts = {} if machine is None else machine.facts
    made: list[Block] = [
        Heading(f"The first hour on {facts.get('GPU', 'a machine')}", 1),
        Paragraph(_overall(report, facts)),
        Paragraph(
            "**Please send it.** Attach `report.tar.gz`, which lies beside this page, to an issue of the "
            "project with the title “First hour: " + facts.get("GPU", "your machine") + "”. "
            "It holds this page, `report.json` and what each step printed. User names, host names, "
            "folders outside of the system, serial numbers and values of environment variables were taken "
            "out; please look through it before you send it."
        ),
        *_machine(facts),
        Heading("Steps"),
        Paragraph(
            "**passed**: every comparison was within its tolerance. **slower**: the same, and a time is "
            "beyond what is expected. **failed**: a comparison was not, or an error was raised. **missing**: "
            "a package is not installed."
        ),
        Table(
            ("step", "what", "result", "seconds", "finding"),
            [_line(step) for step in report.steps if step.status != "not run"],
        ),
        *_not_run(report),
        *_times(report),
        *_series(report),
        *_failures(report),
        *_facts(report),
    ]
    return made


def counted(report: Report) -> str:
    """How many steps have ended in each way, such as `3 steps: 2 passed, 1 failed`."""
    counts = [(status, sum(step.status == status for step in report.steps)) for status in STATUSES]
    said = ", ".join(f"{count} {status}" for status, count in counts if count)
    steps = "1 step" if len(report.steps) == 1 else f"{len(report.steps)} steps"
    return f"{steps}: {said or 'none has ended'}"


def _overall(report: Report, facts: dict[str, str]) -> str:
    words = [f"{counted(report)}."]
    if not report.finished:
        words.append("The report is not finished; the same command with `--resume` goes on with it.")
    if NO_GPU in facts:
        words.append(
            f"This machine has no NVIDIA GPU that can be used, because {facts[NO_GPU]}; so only the steps "
            "that need none were run."
        )
    if report.quick:
        words.append(
            "It was made with `--quick`: tiny models stood for the published ones, so the times say nothing."
        )
    version = report.versions.get("xl-export", "")
    commit = f", commit {report.commit:.13}" if report.commit else ""
    words.append(f"Begun {report.began}, xl-export {version}{commit}.")
    return " ".join(words)


def _machine(facts: dict[str, str]) -> Iterator[Block]:
    if facts:
        yield Table(("machine", ""), [(name, facts[name]) for name in SHOWN if name in facts])


def _line(step: StepResult) -> tuple[str, ...]:
    return step.name, step.title, step.status or "running", f"{step.seconds:.1f}", step.sentence


def _not_run(report: Report) -> Iterator[Block]:
    """The steps that were not run, together for each reason."""
    reasons: dict[str, list[str]] = {}
    for step in report.steps:
        if step.status == "not run":
            reasons.setdefault(step.sentence.rstrip("."), []).append(f"`{step.name}`")
    for reason, names in reasons.items():
        yield Paragraph(f"**Not run**, because {reason}: {', '.join(names)}.")


def _times(report: Report) -> Iterator[Block]:
    rows = [row for step in report.steps for row in step.rows]
    if not rows:
        return
    yield Heading("Times")
    yield Paragraph(
        "Medians for a whole call, with full memory. The limit is the longer of two times: reading weights, "
        "position tables and memory once at the rate of a large copy on this GPU, and computing all "
        "multiply-adds at its rate for a large product. A time is called slower than expected beyond "
        f"{TIMES:g} times the limit and {MORE_MILLISECONDS:g} ms more, since launches and Python cost time "
        "too. A side is timed only after its answers passed."
    )
    ordered = sorted(rows, key=lambda row: (row.model, row.tokens, row.batch, row.milliseconds))
    head = ("model", "streams", "tokens", "side", "ms", "limit, ms", "by", "times the limit", "tokens/s", "")
    yield Table(head, list(map(_time, ordered)))


def _time(row: Row) -> tuple[str, ...]:
    limit = row.limit_milliseconds
    return (
        row.model,
        str(row.batch),
        str(row.tokens),
        row.side,
        f"{row.milliseconds:.3g}",
        "not measured" if limit is None else f"{limit:.3g}",
        row.limit_by,
        "" if not limit else f"{row.milliseconds / limit:.1f}",
        f"{row.batch * row.tokens / row.milliseconds * 1e3:,.0f}" if row.milliseconds else "",
        "slower" if row.slow else "",
    )


def _series(report: Report) -> Iterator[Block]:
    found = [(step, name, values) for step in report.steps for name, values in step.series.items() if values]
    if found:
        yield Heading("Measured numbers in their order")
        rows = [(step.name, name, _numbers(values)) for step, name, values in found]
        yield Table(("step", "what", "values"), rows)


def _numbers(values: tuple[float, ...]) -> str:
    every = max(1, len(values) // 12)
    shown = [*values[:-1:every], values[-1]]
    return ", ".join(f"{value:.4g}" for value in shown)


def _facts(report: Report) -> Iterator[Block]:
    found = [(step, name, value) for step in report.steps for name, value in step.facts.items()]
    if found:
        yield Heading("Facts")
        yield Table(("step", "what", ""), [(step.name, name, value) for step, name, value in found])


def _failures(report: Report) -> Iterator[Block]:
    failed = [step for step in report.steps if step.status in BAD]
    if failed:
        yield Heading("What did not pass")
    for step in failed:
        checks = [f"{check.name}: {check.sentence}" for check in step.checks if not check.passed]
        lines = [*checks, *([""] if checks else []), *step.last_lines]
        yield Printed(f"{step.name}: {step.status}, {step.ended}", lines)
