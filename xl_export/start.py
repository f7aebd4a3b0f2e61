"""Ctrl-C while a command starts: it is still importing its packages, and nothing has been made.

This module imports none of the project's packages, because any may be shadowed, and no slow
package.
"""

from __future__ import annotations

import os
import signal


def stop_at_interrupt() -> None:
    """Ends this process with the word "stopped" and exit code 130 as soon as Ctrl-C is pressed.

    The command replaces this as soon as it runs, because then something may have to be cleaned up. Ctrl-C
    stays ignored where it is, as in a background job.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def _stop(number: int, frame: object) -> None:
    # No exception: an interrupted import may turn it into another one, or print it and continue.
    try:
        os.write(2, b"stopped\n")
    finally:
        os._exit(128 + number)
