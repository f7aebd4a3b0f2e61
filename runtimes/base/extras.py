"""The packages that the extras of xl-export need, as its installed metadata lists them."""

from __future__ import annotations

import operator
import platform
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

# The modules of packages whose names differ in more than a hyphen.
MODULES = {"cuda-bindings": "cuda"}
COMPARISONS = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
OF_CPUS = (
    ", with `--extra-index-url https://download.pytorch.org/whl/cpu` on a machine without an NVIDIA GPU, or "
    "pip takes gigabytes of CUDA"
)


def command(extras: str) -> str:
    """The command that installs the missing packages of some extras, such as `cpu,export`; if none is
    missing, one is broken, and it upgrades all.

    xl-export itself is not installed again: that could take a checkout and a compiler.
    """
    try:
        needed = dict.fromkeys(line for extra in extras.split(",") for line in requirements(extra))
    except PackageNotFoundError:  # a checkout on the module path, which no pip has seen
        return f"`pip install '.[{extras}]'` in the checkout of xl-export"
    missing = [line for line in needed if not is_installed(name_of(line))]
    with_pytorch = sys.platform == "linux" and "torch" in map(name_of, missing)
    return f"`pip install {shlex.join(missing or ['-U', *needed])}`" + (OF_CPUS if with_pytorch else "")


def requirements(extra: str) -> Iterator[str]:
    """The requirements of an extra and of extras in it, on this machine, such as `starlette>=0.46`."""
    for line in requires("xl-export") or ():
        requirement, _, marker = line.partition("; ")
        if not _applies(marker, extra):
            continue
        if name_of(requirement) == "xl-export":
            for inner in requirement.partition("[")[2].rstrip("]").split(","):
                yield from requirements(inner)
        else:
            yield requirement


def name_of(requirement: str) -> str:
    """The name in `uvicorn<0.55,>=0.34` or `ray[data]>=2.60`."""
    return next((requirement[:at] for at, c in enumerate(requirement) if c in "<>=!~[ "), requirement)


def is_installed(name: str) -> bool:
    """Whether the module of a package can be found; it is not imported."""
    module = MODULES.get(name, name.replace("-", "_"))
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def _applies(marker: str, extra: str) -> bool:
    """Whether a marker holds here; those in our pyproject.toml are comparisons joined by `and`."""
    facts = {
        "extra": extra,
        "sys_platform": sys.platform,
        "platform_machine": platform.machine(),
        "python_version": "{}.{}".format(*sys.version_info),
    }
    clauses = [part.strip("() ").split(" ") for part in marker.split(" and ")] if marker else []
    return any(name == "extra" for name, *_ in clauses) and all(
        _holds(facts[name], comparison, value.strip("\"'")) for name, comparison, value in clauses
    )


def _holds(fact: str, comparison: str, value: str) -> bool:
    ours, theirs = ([int(x) if x.isdecimal() else x for x in text.split(".")] for text in (fact, value))
    return bool(COMPARISONS[comparison](ours, theirs))
