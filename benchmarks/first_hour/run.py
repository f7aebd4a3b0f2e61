"""Runs the steps one after the other and keeps the report whole after each of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.first_hour.catalogue import FIRST, STEPS, Step
from benchmarks.first_hour.private import Scrubber, scrubber
from benchmarks.first_hour.process import ROOT, keep_results, run_step
from benchmarks.first_hour.report import REPORT, WORK, keep_log, pack, remove_report, save_report
from benchmarks.first_hour.results import DONE, NO_GPU, Report, StepResult, load_report
from benchmarks.machine import commit, versions
from runtimes.base.errors import UserError
from runtimes.base.files import writing
from runtimes.base.folders import refuse_existing
from runtimes.base.lock import only_writer

LEAST_SECONDS = 20.0  # a step is not begun with less time than this
Say = Callable[[str], None]


def first_hour(
    out: Path,
    steps: Sequence[Step],
    *,
    limit_minutes: float,
    quick: bool = False,
    resume: bool = False,
    force: bool = False,
    say: Say = lambda line: None,
) -> Report:
    """The report of the steps, which is also written to the folder `out`.

    A step that crashes, hangs or misses a package is recorded, and the next one begins. With `resume` the
    steps are kept that an earlier call has done. When Ctrl-C arrives, the report of the steps until then is
    whole, and KeyboardInterrupt is raised again. Raises UserError where `out` exists and neither `resume` nor
    `force` is given, and where another process writes there.
    """
    report = _begin(out, quick=quick, resume=resume, force=force)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    scrub = scrubber({Path.cwd(): "<here>", ROOT: "<project>", out.resolve(): "<report>"})
    with only_writer(out, doing="a report"):
        if not resume:
            remove_report(out)
        keep_results(out / WORK, (step for step in report.steps if step.status in DONE))
        end = time.monotonic() + limit_minutes * 60
        try:
            report = _run(report, out, steps, end=end, scrub=scrub, say=say)
        finally:
            archive = pack(out)
        shutil.rmtree(out / WORK, ignore_errors=True)
    say(f"{archive} is ready to be sent: look through it, and attach it to an issue of the project")
    return report


def _begin(out: Path, *, quick: bool, resume: bool, force: bool) -> Report:
    """An empty report, or with `resume` the one that lies in the folder; nothing is written or removed."""
    if resume:
        if not (out / REPORT).is_file():
            raise UserError(f"{out} has no {REPORT} to go on with; leave out --resume.")
        report = load_report(out / REPORT)
        if report.quick != quick:
            raise UserError(
                f"{out} was begun {'with' if report.quick else 'without'} --quick; go on with it in the same "
                "way, or give another --out."
            )
        return replace(report, finished=False)
    if (out / REPORT).is_file() and not force:
        raise UserError(
            f"{out} holds a report already; give --resume to go on with it, --force to replace it, or "
            "another --out."
        )
    refuse_existing(out, force=force, marker=REPORT)
    began = datetime.now(timezone.utc).isoformat(timespec="minutes")
    return Report(began=began, commit=commit(), versions=versions(), quick=quick)


def _run(
    report: Report, out: Path, steps: Sequence[Step], *, end: float, scrub: Scrubber, say: Say
) -> Report:
    order = [step.name for step in STEPS]
    save_report(out, report, scrub=scrub)
    for step in steps:
        earlier = report.step(step.name)
        if earlier and earlier.status in DONE and step is not FIRST:
            say(f"{step.name}: {earlier.status}, kept")
            continue
        left = end - time.monotonic()
        if reason := _reason_not_to_run(step, report, left):
            result = StepResult(name=step.name, title=step.title, status="not run", sentence=reason)
        else:
            result = _ran(step, report, out, seconds=min(step.minutes * 60, left), scrub=scrub, say=say)
        report = report.with_step(result, order)
        save_report(out, report, scrub=scrub)
        say(f"{step.name}: {result.status}, {result.seconds:.0f} s: {scrub(result.sentence)}")
        if step is FIRST and NO_GPU in result.facts:
            say(_sentence_without_gpu(steps, scrub(result.facts[NO_GPU])))
        if result.status == "interrupted":
            raise KeyboardInterrupt
    report = replace(report, finished=True)
    save_report(out, report, scrub=scrub)
    return report


def _ran(step: Step, report: Report, out: Path, *, seconds: float, scrub: Scrubber, say: Say) -> StepResult:
    """The result of a step's process; `interrupted` where Ctrl-C has arrived."""
    say(f"{step.name}: {step.title} (at most {seconds / 60:.3g} minutes)")
    try:
        return run_step(step, (out / WORK).resolve(), seconds=seconds, quick=report.quick)
    except KeyboardInterrupt:
        return StepResult(
            name=step.name, title=step.title, status="interrupted", sentence="it was interrupted by Ctrl-C"
        )
    finally:
        keep_log(out, step.name, scrub=scrub)


def _reason_not_to_run(step: Step, report: Report, left: float) -> str | None:
    if step is FIRST:
        return None
    if left < LEAST_SECONDS:
        return "no time was left; give --resume, and a larger --limit-minutes"
    first = report.step(FIRST.name)
    if step.gpu and first is not None and NO_GPU in first.facts:
        return "it needs an NVIDIA GPU, and this machine has none that can be used"
    return None


def _sentence_without_gpu(steps: Sequence[Step], reason: str) -> str:
    without = [step.name for step in steps if not step.gpu]
    others = len(steps) - len(without)
    said = f"This machine has no NVIDIA GPU that can be used, because {reason}; so "
    said += f"{' and '.join(without)} can run here"
    return f"{said}, and the other {others} are recorded as not run." if others else f"{said}."
