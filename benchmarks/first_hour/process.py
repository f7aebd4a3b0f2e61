"""Runs one step in a process of its own, with a limit; whatever happens to it becomes a result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from benchmarks.first_hour.catalogue import Step
from benchmarks.first_hour.record import is_full
from benchmarks.first_hour.results import StepResult, load_result
from runtimes.base.errors import UserError
from runtimes.base.files import write_json
from runtimes.base.records import to_json

ROOT = Path(__file__).parents[2]
LAST_LINES, HEAD_BYTES, TAIL_BYTES = 12, 20_000, 80_000  # of what a step printed, that are kept


def run_step(step: Step, work: Path, *, seconds: float, quick: bool) -> StepResult:
    """The result of a step that runs for at most so many seconds. It is raised again when Ctrl-C arrives.

    work: the folder for the results of steps, for what they print, and for the models that they share. The
    process and all that it started have ended when this returns.
    """
    results, output = work / "results", work / "output"
    for folder in (results, output, work / "models"):
        folder.mkdir(parents=True, exist_ok=True)
    path, log = _result_file(work, step.name), output / f"{step.name}.txt"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.first_hour.child", step.name, step.target]
    command += [json.dumps(step.options), str(path), str(work / "models"), str(results), str(seconds)]
    began = time.monotonic()
    with log.open("wb") as stream, _started(command + ["--quick"] * quick, stream, cwd=work) as process:
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
    taken = time.monotonic() - began
    result = load_result(path) or StepResult(name=step.name)
    return _judged(result, step, code, limit=seconds, seconds=taken, printed=last_lines(log))


def keep_results(work: Path, results: Iterable[StepResult]) -> None:
    """Writes results where later steps look for them, such as the rates of the GPU. A report that is resumed
    has them, and its folder of work was removed.
    """
    for result in results:
        path = _result_file(work, result.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, to_json(result))


def _result_file(work: Path, name: str) -> Path:
    return work / "results" / f"{name}.json"


@contextlib.contextmanager
def _started(command: list[str], stream: BinaryIO, *, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which leads a group of its own; the whole group is killed when the block ends."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _judged(
    result: StepResult,
    step: Step,
    code: int | None,
    *,
    limit: float,
    seconds: float,
    printed: tuple[str, ...],
) -> StepResult:
    """The result with the status that the end of its process gives it.

    code: the exit code of the process; negative for a signal, None where it was stopped at the limit.
    """
    result = replace(result, name=step.name, title=step.title, seconds=round(seconds, 2), last_lines=printed)
    if code is None:
        sentence = f"it was stopped after {limit / 60:.3g} minutes; what it found until then is kept"
        return replace(result, status="out of time", sentence=sentence, ended="stopped at the limit")
    ended = f"exit code {code}" if code >= 0 else f"killed by {_signal(-code)}"
    result = replace(result, ended=ended)
    if code >= 0 and result.status is not None:
        return result
    last = printed[-1] if printed else "it printed nothing"
    hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    said = any(is_full(line) for line in printed)
    return replace(
        result,
        status="out of memory" if said else "crashed",
        sentence=f"its process ended without a result, {ended}{hint}: {last:.300}",
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_lines(path: Path) -> tuple[str, ...]:
    """The last lines of a text file that are not blank."""
    lines = [line.rstrip() for line in excerpt(path).splitlines()]
    return tuple(line[:500] for line in lines if line)[-LAST_LINES:]


def excerpt(path: Path) -> str:
    """A text file, without its middle where it is long."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
            if size > HEAD_BYTES + TAIL_BYTES:
                stream.seek(size - TAIL_BYTES)
                head += b"\n... the middle is left out ...\n"
            return (head + stream.read()).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} could not be read ({error.strerror}); give another --out.") from error
