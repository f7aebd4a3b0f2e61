"""Why PyTorch cannot trace a step, in one sentence with the line of code that is the reason."""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtimes.base.errors import first_line
from runtimes.contract.spec import Spec

HERE = str(Path(__file__).parent)
RING = str(Path(__file__).with_name("ring.py"))  # functions that a step calls
PYTHON = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class Guard:
    """A condition on the sizes of the inputs, without which PyTorch cannot go on."""

    condition: Any  # of sympy, over symbols for sizes
    code: str
    """What needs it, as in `code_of`."""
    sizes: dict[Any, str]
    """For each symbol, what PyTorch calls the size: `L['tensors'][0].size()[1]`."""


@contextmanager
def noted_guards() -> Iterator[list[Guard]]:
    """The guards that PyTorch adds in this block. Only its log has them, and no exception."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # it takes long to import

    found: list[Guard] = []
    log = getattr(ShapeEnv, "_log_guard", None)
    if log is None:  # it is not public; without it, errors do not name the line
        yield found
        return

    def note(env: Any, prefix: str, condition: Any, *others: Any, **named: Any) -> None:
        if code := code_of(traceback.extract_stack()[:-1]):
            sources = env.var_to_sources
            sizes = {each: sources[each][0].name for each in condition.free_symbols if each in sources}
            found.append(Guard(condition, code, sizes))
        log(env, prefix, condition, *others, **named)

    ShapeEnv._log_guard = note  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        ShapeEnv._log_guard = log  # type: ignore[method-assign]


def code_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a module that is traced, as "`n = len(x)` (FILE:LINE, your code)", or "".

    PyTorch's own lines count only if there is no other: then it is one of a `forward`, as of nn.LSTM.
    """
    inner = [*_inner(frames)]
    others = [(frame, owner) for frame, owner in inner if owner != "torch"]
    forward = [(frame, owner) for frame, owner in inner if frame.name == "forward"]
    for frame, owner in others or forward:
        return f"`{frame.line:.90}` ({frame.filename}:{frame.lineno}, {owner})"
    return ""


def _inner(frames: Sequence[traceback.FrameSummary]) -> Iterator[tuple[traceback.FrameSummary, str]]:
    """The frames of a step, the innermost first, and whose code each is, without Python's own."""
    for frame in reversed(frames):
        path = frame.filename
        if path.startswith(HERE) and path != RING:
            return
        _, installed, inside = path.replace("\\", "/").rpartition("-packages/")
        if path != RING and (installed or not path.startswith((PYTHON, "<"))):
            yield frame, inside.split("/")[0].removesuffix(".py") if installed else "your code"


def _assert_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The assert in which a step failed, as in `code_of`, or ""."""
    for frame, owner in _inner(frames):
        source = "" if owner == "torch" else "".join(linecache.getlines(frame.filename))
        for node in ast.walk(ast.parse(source)):
            lines = range(node.lineno, (node.end_lineno or 0) + 1) if isinstance(node, ast.Assert) else ()
            if frame.lineno in lines:
                return f"`{ast.unparse(node):.90}` ({frame.filename}:{frame.lineno}, {owner})"
    return ""


def why(error: Exception, guards: Sequence[Guard], spec: Spec) -> str:
    """A sentence for what PyTorch raised while it traced a step."""
    text = str(error)
    name = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    code = code_of(frames)
    if "GuardOnDataDependent" in name or "data-dependent" in text:
        if claim := _assert_of(frames):
            return (
                f"PyTorch could not trace the step: {claim} asserts something of the values of tokens or "
                "memory, and a graph has no asserts; remove it, or run python -O."
            )
        return (
            f"PyTorch could not trace the step: {code or first_line(error)} depends on the values of tokens "
            "or memory; write it with torch.where, or compute it before the export."
        )
    if "Constraints violated" in text or "specialized" in text or "ConstraintViolation" in name:
        return (
            f"PyTorch could not trace the step: {_fixed(text, guards, spec)}; take sizes from tensor.shape, "
            "without int() and len(), give a module that loops over its tokens, as nn.LSTM does, "
            "step_tokens = 1, or trace it for fixed sizes (rows=1, and tokens=(1, segment) to generate)."
        )
    at = f" at {code}" if code else ""
    return f"PyTorch could not trace the step ({name}: {first_line(error):.300}){at}: change what that names."


def _fixed(text: str, guards: Sequence[Guard], spec: Spec) -> str:
    """Which line fixes which size of which input to what."""
    # PyTorch proposes a number for a size, or a range: "  tokens = 5".
    numbers = dict(re.findall(r"^  (\w+) = (\d+)$", text, re.MULTILINE))
    for guard in guards:
        elsewhere = [guard.condition.subs(dict.fromkeys(guard.sizes, size)) for size in (2, 1 << 16)]
        if not guard.sizes or all(each == True for each in elsewhere):  # noqa: E712
            continue  # it holds for other sizes, too
        names: dict[Any, str] = {}
        places: dict[str, str] = {}
        for symbol, source in guard.sizes.items():
            index, axis = map(int, re.findall(r"\[(\d+)\]", source))
            name = str(spec.inputs[index].shape[axis])
            names[symbol] = name
            places[name] = f"{name} (size {axis} of {spec.inputs[index].name})"
        fixed = next((name for name in places if name in numbers), next(iter(places)))
        return f"{guard.code} fixes {places[fixed]} to {numbers.get(fixed) or guard.condition.subs(names)}"
    return "it fixes the number of rows or of tokens"
