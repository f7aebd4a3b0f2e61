"""How these programs end where they cannot use what they were given: one sentence, exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtimes.base.errors import MissingPackageError, UserError


@contextmanager
def refusals() -> Iterator[None]:
    """Prints what a user can fix as one sentence on standard error, and ends with exit code 2."""
    try:
        yield
    except (UserError, MissingPackageError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # a reader that has gone is no fault: the program may end quietly
        raise
    except OSError as error:
        print(
            f"Error: {error.filename or 'standard output'} cannot be used ({error.strerror or error}); "
            "give another place.",
            file=sys.stderr,
        )
        if error.filename is None:  # or Python tries once more at its end, and says that it failed
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise SystemExit(2) from None


def prepared_part(sources: Path, part: str) -> Path:
    """The file of ids of a part that `prepare.py` wrote; raises UserError if there is none."""
    if not (path := sources / f"{part}.jsonl").is_file():
        raise UserError(f"there is no {path}; give --sources the folder that prepare.py kept ids in.")
    return path
