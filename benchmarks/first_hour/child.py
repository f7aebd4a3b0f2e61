"""The process of one step: `python -m benchmarks.first_hour.child STEP …`, started by `process.py`."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

from benchmarks.first_hour.record import Record
from benchmarks.first_hour.results import StepResult
from runtimes.base.errors import UserError, of_library

PR_SET_PDEATHSIG = 1
BEFORE_THE_END = 5.0  # seconds before the limit, at which a step that hangs prints where it hangs


def main(arguments: list[str]) -> int:
    """Runs one step and keeps its result; the exit code is 0 unless the step raised an error."""
    parser = argparse.ArgumentParser()
    for name in ("name", "target", "options", "result", "work", "results", "seconds"):
        parser.add_argument(name)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    _end_with_parent()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, float(given.seconds) - BEFORE_THE_END))
    record = Record(
        path=Path(given.result),
        work=Path(given.work),
        results=Path(given.results),
        seconds=float(given.seconds),
        quick=given.quick,
        result=StepResult(name=given.name),
    )
    module, _, function = given.target.partition(":")
    try:
        getattr(import_module(module), function)(record, **json.loads(given.options))
    except BaseException as error:
        if not of_library(error):
            raise
        if not isinstance(error, UserError):
            traceback.print_exc()
        record.finish(error)
        print(record.result.sentence, flush=True)
        return 1
    record.finish()
    return 0


def _end_with_parent() -> None:
    """Asks Linux to kill this process when the command that started it is gone, however that ended."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
