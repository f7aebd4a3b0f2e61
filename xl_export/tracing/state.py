"""What a step changes in its module, besides the memory that it returns.

A graph keeps the attributes and buffers of the moment in which it was traced. So a module may fill a table or
note its last attention there, but nothing from which a later step computes.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtimes.base.errors import ArtefactError
from xl_export.tracing.module import ModuleStep, drawn_input, in_a_sentence

TOLERANCE = 1e-4  # of two ways to compute the same in float32
PLAIN = (type(None), bool, int, float, complex, str, bytes)
TABLES = ("_parameters", "_buffers", "_modules")  # of an nn.Module; their keys are names of attributes


class Snapshot:
    """The values in a module at one moment: attributes and buffers, also those of its submodules, and what
    lists, dicts and objects in them hold.

    earlier: a snapshot with which this one may share copies. Weights are too large for copies; a change in
    place is seen by their version.
    """

    def __init__(self, module: nn.Module, earlier: Snapshot | None = None) -> None:
        self.values: dict[str, Any] = {}
        """By name, such as `cell.cache[0]`."""
        self._earlier = earlier
        self._arrays: list[tuple[Any, Any]] = []  # tensors and arrays, and copies
        self._holders: dict[int, tuple[Any, Any]] = {}  # dicts and lists by their id, and their content
        self._add("", module)
        self._earlier = None

    def _add(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            self.values[name] = id(value), 0 if value.is_inference() else value._version
        elif isinstance(value, Tensor | np.ndarray):
            known = self._earlier.values.get(name) if self._earlier else None
            copy = known if _same(value, known) else _copied(value)
            self.values[name] = copy
            self._arrays.append((value, copy))
        elif isinstance(value, dict | list | deque):
            self._add_content(name, value)
        elif isinstance(value, tuple):
            for number, each in enumerate(value):
                self._add(f"{name}[{number}]", each)
        elif isinstance(value, set):
            self.values[name] = frozenset(value)
            self._holders[id(value)] = value, set(value)
        elif _has_attributes(value):
            self._add_content(name, vars(value), of=value)
        else:
            self.values[name] = value

    def _add_content(self, name: str, holder: Any, of: Any = None) -> None:
        """Adds what a dict or a list holds. of: the object whose attributes the dict has."""
        if id(holder) in self._holders:
            return
        self._holders[id(holder)] = holder, (dict if isinstance(holder, dict) else list)(holder)
        for key, each in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(of, nn.Module) and key in TABLES:
                self._add_content(name, each, of=each)
            else:
                dot = "." if name else ""
                self._add(f"{name}{dot}{key}" if of is not None else f"{name}[{key!r}]", each)

    def changed(self, later: Snapshot) -> list[str]:
        """The names of the attributes that have other values in a later snapshot."""
        names = [*self.values, *(name for name in later.values if name not in self.values)]
        missing = object()
        found = [
            name.partition("[")[0]
            for name in names
            if not _same(self.values.get(name, missing), later.values.get(name, missing))
        ]
        return list(dict.fromkeys(found))

    def restore(self) -> None:
        """Gives the module everything that it held, but weights that were changed in place."""
        for holder, content in self._holders.values():
            if _holds(holder, content):
                continue
            if isinstance(holder, dict):  # subclasses may have another `update`
                base = OrderedDict if isinstance(holder, OrderedDict) else dict
                base.clear(holder)
                base.update(holder, content)
            else:
                holder.clear()
                (holder.update if isinstance(holder, set) else holder.extend)(content)
        with torch.no_grad():
            for array, copy in self._arrays:
                if not _same(array, copy):
                    array[...] = copy


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """After the block, a module has the attributes, buffers and modes that it had before."""
    # A deep copy would not do: modules with a tensor that has a history, or with a lock, have none.
    before = Snapshot(module)
    try:
        yield
    finally:
        before.restore()


def _holds(holder: Any, content: Any) -> bool:
    """Whether a container holds the same objects as the copy of its content."""
    if isinstance(holder, set):
        return bool(holder == content)
    if len(holder) != len(content):
        return False
    if isinstance(holder, dict):
        return list(holder) == list(content) and all(each is content[key] for key, each in holder.items())
    return all(each is other for each, other in zip(holder, content, strict=True))


def _has_attributes(value: Any) -> bool:
    """Whether a value is a module or another object with attributes of its own, and none of a library that
    counts what it does.
    """
    if isinstance(value, nn.Module | SimpleNamespace):
        return True
    package = type(value).__module__.partition(".")[0]
    a_class = isinstance(value, type)
    return hasattr(value, "__dict__") and not a_class and package not in {"torch", *sys.stdlib_module_names}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN equals NaN
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    # Anything else, such as the distribution of the last action, cannot be compared.
    comparable = isinstance(one, (*PLAIN, tuple, frozenset))
    return type(one) is type(other) and (not comparable or bool(one == other))


def refuse_state(step: ModuleStep, segment: int) -> None:
    """Raises ArtefactError, with their names, for attributes and buffers in which a step keeps state.

    It feeds two streams in turns. A step keeps state there if it changes them again when it is repeated, as a
    counter does, or if it has other answers after another stream. All other changes are harmless: each step
    makes them anew, as it notes its last attention, or once, as it fills a table.
    """
    names: list[str] = []
    try:
        names = _state_of(step, segment, step.rows or 2)
    except ArtefactError:
        with suppress(ArtefactError):  # an attribute may hold the memory of one row
            names = _state_of(step, segment, 1)
        if not names:
            raise
    if names:
        attributes = "attribute" if len(names) == 1 else "attributes"
        listed = ", ".join(f"`{name}`" for name in names[:3]) + (", …" if len(names) > 3 else "")
        raise ArtefactError(
            f"{step.name} keeps memory in the {attributes} {listed}, and an artefact keeps only what `step` "
            "returns; begin it in `start`, and return it from `step` instead."
        )


def _state_of(step: ModuleStep, segment: int, rows: int) -> list[str]:
    """The names of the attributes in which a step of so many rows keeps state."""
    begin = step.start(rows)

    def fed(text: int, place: int, memory: Sequence[Tensor]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        inputs = {name: drawn_input(each, rows, segment, text) for name, each in step.inputs.items()}
        positions = torch.arange(place * segment, (place + 1) * segment).expand(rows, -1)
        shown = {"tokens" if step.language_model else name: x for name, x in inputs.items()}
        shown["positions"] = positions
        with torch.random.fork_rng(devices=[]), in_a_sentence(step.module, "step", step.rows, **shown):
            torch.manual_seed(0)  # what draws at random is refused later
            outputs, after = step(inputs, positions, tuple(x.clone() for x in memory))
        alike = [x.shape for x in after] == [x.shape for x in begin]
        return outputs, after if alike else begin  # other shapes are refused later

    with torch.no_grad():
        memory = fed(0, 0, begin)[1]
        module = step.module
        before = Snapshot(module)
        first = fed(1, 1, memory)
        fed(3, 1, fed(2, 0, begin)[1])
        later = Snapshot(module, before)
        second = fed(1, 1, memory)
        once = Snapshot(module, later)
        fed(1, 1, memory)
        names = once.changed(Snapshot(module, once))
        if not names and not _agree(first, second):
            names = before.changed(later)
    return names


def _agree(
    one: tuple[Mapping[str, Tensor], Sequence[Tensor]], other: tuple[Mapping[str, Tensor], Sequence[Tensor]]
) -> bool:
    """Whether outputs and memory are the same, but for rounding."""
    pairs = zip([*one[0].values(), *one[1]], [*other[0].values(), *other[1]], strict=True)
    return all(
        x.shape == y.shape and torch.allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        for x, y in pairs
    )
