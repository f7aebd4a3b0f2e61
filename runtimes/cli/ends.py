"""How a command ends when a signal stops it, and the streams that it prints on."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import click

from runtimes.base.terminal import TerminalStream

TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
RAISE_AGAIN_SECONDS = 0.5  # until an exception that a library has swallowed is raised again
_ended_by: list[int] = []  # the terminations that this process has received
_raised: BaseException | None = None  # by the last signal, while the command ends


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. Python remembers a plain KeyboardInterrupt that leaves an `exec` of source text, as imports
    of data classes and named tuples do, and kills the process by SIGINT at its end, whatever became of the
    exception.
    """


def clean_up_when_terminated() -> None:
    """Makes a termination an exception in place of a sudden end, so that temporary folders are removed.

    The exit code is 128 + the signal's number. A signal that is ignored, as SIGHUP is under `nohup`, stays
    ignored.
    """
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        return
    for number in TERMINATIONS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    _ended_by.append(number)
    _insist(SystemExit(128 + number))


def _insist(error: BaseException) -> NoReturn:
    """Raises the exception of a signal, and again later where it is lost.

    Some compiled modules drop any exception that is raised while they are imported: Cython's, while they
    register their classes, as `numpy.random` does. The command would then go on as if there had been no
    signal.
    """
    global _raised
    _raised = error
    signal.signal(signal.SIGALRM, _raise_again)
    signal.setitimer(signal.ITIMER_REAL, RAISE_AGAIN_SECONDS, RAISE_AGAIN_SECONDS)
    raise error


def _raise_again(number: int, frame: FrameType | None) -> None:
    """Raises the exception again, unless it is being handled, as by a clean-up that takes long."""
    handled = sys.exc_info()[1]
    while handled is not None and handled is not _raised:
        handled = handled.__context__
    if handled is None and _raised is not None:
        raise _raised


def stop_insisting() -> None:
    """Ends `_insist`: the exception has arrived where the command ends."""
    global _raised
    if _raised is not None:
        _raised = None
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def stopped_in_a_word() -> Iterator[None]:
    """Ends the process with the word "stopped" and exit code 130 where Ctrl-C interrupts the block.

    A library whose import is interrupted may raise another error in place of KeyboardInterrupt; that ends in
    the same way. An error in place of a termination ends with the exit code of the termination.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        _insist(Interrupted())

    before = signal.getsignal(signal.SIGINT)
    # An action that is no function of Python is a decision of who started this process.
    replaced = threading.current_thread() is threading.main_thread() and callable(before)
    if replaced:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        _stop()
    except Exception:
        if _ended_by:
            raise SystemExit(128 + _ended_by[0]) from None
        if not interrupted:
            raise
        _stop()
    finally:
        stop_insisting()
        if replaced:
            signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def terminals_protected() -> Iterator[None]:
    """Lets no control character through to a terminal; a pipe or a file gets every byte as it is.

    Standard error keeps the carriage return, with which progress bars draw.
    """
    with contextlib.ExitStack() as stack:
        if _is_terminal(sys.stdout):
            stack.enter_context(contextlib.redirect_stdout(TerminalStream(sys.stdout)))
        if _is_terminal(sys.stderr):
            shown = TerminalStream(sys.stderr, allowed="\n\t\r")
            stack.enter_context(contextlib.redirect_stderr(shown))
        yield


def _is_terminal(stream: object) -> bool:
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # a stream that is missing or closed
        return False


def _stop() -> None:
    stop_insisting()
    click.echo("stopped", err=True)
    raise SystemExit(130) from None
