"""The group that every command belongs to: what a user can mend is one sentence, and its exit code is 2."""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from runtimes.base.errors import UserError


class Refusal(click.ClickException):
    """One sentence on standard error, exit code 2."""

    exit_code = 2


class Group(click.Group):
    """Prints what a user can mend as one sentence; a traceback is a bug of ours.

    Exit codes: 2 for what cannot be used, 130 when interrupted, 143 when terminated; both clean up what was half made.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        signal.signal(
            signal.SIGTERM, lambda *_: sys.exit(143)
        )  # an exception, so that temporary folders are removed
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # from printing a help text
            print(
                f"Error: standard output cannot be written ({error.strerror}); give another place.",
                file=sys.stderr,
            )
            sys.exit(2)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise Refusal(str(error)) from error
        except MemoryError as error:
            raise Refusal(
                "this machine has too little memory for that; use a smaller batch, segment or model."
            ) from error
        except UnicodeEncodeError as error:
            raise Refusal(
                f"standard output is {error.encoding} and cannot show {error.object[error.start]!r}; set PYTHONIOENCODING=utf-8."
            ) from error
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            raise SystemExit(130) from None
        except BrokenPipeError:  # the reader has had enough, as `head` does
            raise
        except OSError as error:
            what = error.filename or "standard output"
            raise Refusal(
                f"{what} cannot be used ({error.strerror or error}); give another place."
            ) from error
