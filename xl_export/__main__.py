"""`python -m xl_export`, the same as the command `xl-export`.

This module imports none of the project's packages before it runs, because any may be shadowed, and no slow
package.
"""

from __future__ import annotations

import os
import signal


def stop_at_interrupt() -> None:
    """Ends this process with the word "stopped" and exit code 130 as soon as Ctrl-C is pressed.

    While a command imports its packages, nothing has been made. The command replaces this as soon as it runs,
    because then something may have to be cleaned up. Ctrl-C stays ignored if it is, as in a background job.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def _stop(number: int, frame: object) -> None:
    # No exception: an interrupted import may turn it into another one, or print it and continue.
    try:
        os.write(2, b"stopped\n")
    finally:
        os._exit(128 + number)


def run() -> None:
    """Runs the command line. Ctrl-C ends it without a traceback from the first import on."""
    stop_at_interrupt()
    # The threads of NumPy's OpenBLAS would wait awake after the import: 0.07 s of every CPU but one.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    from xl_export.cli.main import main

    main(prog_name="xl-export")


if __name__ == "__main__":
    run()
