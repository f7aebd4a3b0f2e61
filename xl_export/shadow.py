"""Finds files of the user that Python imports instead of this project's packages.

The names `runtimes`, `trainer` and `benchmarks` are common. A script, and `python -m`, look for modules in
the folder of the script or in the working folder first. This module imports none of the project's packages,
because any may be shadowed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("runtimes", "trainer", "benchmarks")


def shadowed(packages: Sequence[str] = PACKAGES) -> str | None:
    """Returns a sentence on the first file that shadows one of these packages; None without one."""
    ours = Path(__file__).resolve().parent.parent
    for package in packages:
        try:
            spec = find_spec(package)
        except ValueError:  # a module without a specification, which only a test puts there
            continue
        if spec is None:  # not installed: the import reports it
            continue
        found = Path(next(iter(spec.submodule_search_locations or [str(spec.origin)])))
        if found.resolve() != ours / package:
            return (
                f"{found} has the name of xl-export's package {package} and is imported in its place; "
                "rename it, or run the command xl-export in another folder."
            )
    return None


def refuse_shadowed() -> None:
    """Ends the process with exit code 2 and one sentence if a package of this project is shadowed."""
    if sentence := shadowed():
        print(f"Error: {sentence}", file=sys.stderr)
        sys.exit(2)
