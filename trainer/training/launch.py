"""Starts the processes of one training run on this machine, as `torchrun` does.

The launcher is PyTorch's own (`torch.distributed.run`, standalone). This module adds one message for a
mistake that several processes find, the right exit code for a signal, and a share of the CPU for every
process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from runtimes.base.errors import UserError
from runtimes.base.machine import available_cpus
from runtimes.base.terminal import printable
from trainer.training.parallel import KEPT, SETTLE_SECONDS, LostError

# Environment variable: the folder in which a launched process writes its error sentence.
REPORTS = "XL_EXPORT_REPORTS"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def launch(command: Sequence[str], processes: int) -> None:
    """Runs `command` in `processes` processes on this machine and returns when all have succeeded.

    Each process gets an equal share of the available CPU threads, unless OMP_NUM_THREADS is set already.
    Raises UserError with the sentence of the process that failed, KeyboardInterrupt when SIGINT ended the
    processes, and SystemExit with 128 + the signal's number for another signal.
    """
    # Imported here: the launched processes import this module as well, and they do not need the launcher.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options = ["--standalone", "--nproc-per-node", str(processes), "--no-python"]
    with tempfile.TemporaryDirectory(prefix="xl-export-") as reports, _surroundings_kept():
        os.environ[REPORTS] = reports
        # The launcher would take over signals that are ignored now, as SIGHUP is under `nohup`.
        heard = [number.name for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(heard)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cpus() // processes)))
        try:
            run(parse_args([*options, *command]))  # type: ignore[no-untyped-call]
        except SignalException as error:
            # The launcher has passed the signal on to every process and has waited for them.
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None
        except ChildFailedError as error:
            sentences = [path.read_text("utf-8") for path in sorted(Path(reports).iterdir())]
            if sentences:
                raise UserError(sentences[0]) from None
            # A process that lost another one ends with code 2, so another failure is more likely the cause.
            failure = min(
                error.failures.values(), key=lambda failed: (failed.exitcode == 2, failed.timestamp)
            )
            if failure.exitcode == 2:  # the process has printed why
                raise SystemExit(2) from None
            code = failure.exitcode
            name = signal.Signals(-code).name if code < 0 else f"an error (exit code {code})"
            raise UserError(
                f"process {failure.local_rank + 1} of {processes} was ended by {name}; {KEPT}."
            ) from None


@contextmanager
def reporting() -> Iterator[None]:
    """Passes a UserError of the block to the launcher, which prints it once for all processes.

    A process that `torchrun` started prints it itself. A single process is not affected.
    """
    folder = os.environ.get(REPORTS)
    if folder is not None:
        # The command starts with SIGINT's default action; from here on Ctrl-C raises, and the run cleans up.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except (KeyboardInterrupt, UserError, SystemExit) as error:
        # The first process raises what all have found; in the others it is the cause of a SystemExit.
        found = error if isinstance(error, UserError) else error.__cause__
        if folder is None and not dist.is_initialized():
            raise
        if folder is None and isinstance(error, UserError):
            print(f"Error: {printable(str(error))}", file=sys.stderr)
        elif isinstance(error, LostError):
            time.sleep(SETTLE_SECONDS)  # until the launcher has noticed the lost process, which it names
        elif folder is not None and isinstance(found, UserError):
            name = f"{int(os.environ.get('RANK', '0')):06}"
            Path(folder, name).write_text(str(found), encoding="utf-8")
        code = 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "code", 2)
        if isinstance(code, int) and code:
            _end(code)
        raise


def _end(code: int) -> NoReturn:
    """Ends this process at once.

    While the connection to the other processes is open, its threads abort a process that exits normally, and
    print "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _surroundings_kept() -> Iterator[None]:
    """Restores the environment, the signal handlers and the logging, which the launcher changes."""
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    disabled = logging.root.manager.disable
    if "LOGLEVEL" not in os.environ:  # the launcher would log a failure at length
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
