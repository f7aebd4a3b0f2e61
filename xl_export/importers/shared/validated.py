"""Tensors and numbers of an untrusted checkpoint; each is checked before it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.rule import MAX_LENGTH
from xl_export.importers.pickle import values


class Tensors:
    """The tensors of one checkpoint, which are taken one by one; a tensor that nobody takes is an error.

    tensors: pairs of a name and a tensor. The names may have been translated before; two tensors with one
    name are refused. where: the file, for messages. project: the project that the file should come from.
    spell: returns the name in the file for a translated name. allow_nonfinite: whether NaN and infinity are
    allowed.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[Any, Any]],
        *,
        where: str,
        project: str,
        spell: Callable[[str], str] = str,
        allow_nonfinite: bool = False,
    ) -> None:
        self.where, self.project, self.spell, self.allow_nonfinite = where, project, spell, allow_nonfinite
        self._left: dict[str, Tensor] = {}
        self.halved: set[str] = set()  # types other than float32 that were found
        self.nonfinite: list[str] = []  # names of tensors that hold NaN or infinity, where these may pass
        for name, tensor in tensors:
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ArtefactError(
                    f"{where}: {str(name)[:80]!r} is a {type(tensor).__name__}; expected a tensor of "
                    f"{project}."
                )
            if name in self._left:
                raise ArtefactError(
                    f"{where} has the tensor {values.shown(spell(name))} under two names; expected one."
                )
            self._left[name] = tensor

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor as float32; it must have exactly this shape.

        Raises ArtefactError with the tensor's name where it is missing, has another shape or type, or is not
        finite.
        """
        tensor = self.peek(name, dimensions=len(shape))
        del self._left[name]
        if tuple(tensor.shape) != shape:
            raise ArtefactError(
                f"{self.where}: {self.spell(name)} is {list(tensor.shape)}, expected {list(shape)} by the "
                f"sizes of the model."
            )
        if not tensor.is_floating_point():
            raise ArtefactError(
                f"{self.where}: {self.spell(name)} is {tensor.dtype}; expected floating-point weights."
            )
        if tensor.dtype != torch.float32:
            self.halved.add(str(tensor.dtype).removeprefix("torch."))
        tensor = tensor.detach().to(torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            self.nonfinite.append(values.shown(self.spell(name)))
            if not self.allow_nonfinite:
                raise ArtefactError(
                    f"{self.where}: {self.spell(name)} holds NaN or infinite values; "
                    "import a checkpoint from before its loss diverged, or give --allow-nonfinite."
                )
        return tensor

    def peek(self, name: str, *, dimensions: int) -> Tensor:
        """Returns a tensor without taking it, to read its sizes.

        Raises ArtefactError where it does not fit.
        """
        if name not in self._left:
            raise ArtefactError(
                f"{self.where} lacks the tensor {self.spell(name)} of a {self.project} model."
            )
        if self._left[name].dim() != dimensions:
            found = list(self._left[name].shape)
            raise ArtefactError(
                f"{self.where}: {self.spell(name)} is {found}, expected {dimensions} dimensions."
            )
        tensor: Tensor = self._left[name]
        return tensor

    def drop(self, *names: str) -> None:
        """Removes tensors that hold nothing more; they may be absent."""
        for name in names:
            self._left.pop(name, None)

    def count(self, prefix: str) -> int:
        """Returns how many numbered groups `prefix.0.…`, `prefix.1.…` there are, up to the first gap."""
        numbers = {
            name[len(prefix) + 1 :].partition(".")[0] for name in self._left if name.startswith(prefix + ".")
        }
        return next(i for i in range(len(numbers) + 1) if str(i) not in numbers)

    def finish(self) -> None:
        """Raises ArtefactError where a tensor was not taken."""
        if self._left:
            name = min(self._left)
            raise ArtefactError(
                f"{self.where} has the unexpected tensor {values.shown(self.spell(name))} "
                f"{list(self._left[name].shape)}; expected only the tensors of a {self.project} model."
            )


@contextlib.contextmanager
def sizes_of(where: str) -> Iterator[None]:
    """Raises ArtefactError with the name of the file where its sizes fit no model."""
    try:
        yield
    except ConfigError as error:
        raise ArtefactError(f"{where} does not describe a model that this project knows: {error}") from error


def integer(facts: Mapping[Any, Any], name: str, *, where: str, least: int = 0) -> int:
    """Returns a whole number that the checkpoint states; raises ArtefactError where it is none."""
    value = facts.get(name)
    if type(value) is not int or not least <= value <= MAX_LENGTH:
        raise ArtefactError(
            f"{where}: {name} is {shown(value)}, expected a whole number from {least} to {MAX_LENGTH}."
        )
    return value


def boolean(facts: Mapping[Any, Any], name: str, *, where: str) -> bool:
    """Returns a truth value that the checkpoint states; raises ArtefactError where it is none."""
    value = facts.get(name)
    if type(value) is not bool:
        raise ArtefactError(f"{where}: {name} is {shown(value)}, expected true or false.")
    return value


def booleans(facts: Mapping[Any, Any], name: str, *, count: int, where: str) -> tuple[bool, ...]:
    """Returns `count` truth values, one for each cluster; raises ArtefactError where they are not."""
    value = facts.get(name)
    if not isinstance(value, list | tuple) or len(value) != count or any(type(x) is not bool for x in value):
        raise ArtefactError(
            f"{where}: {name} is {shown(value)}, expected true or false for each of {count} clusters."
        )
    return tuple(value)


def fraction(facts: Mapping[Any, Any], name: str, *, where: str) -> float:
    """Returns a number from 0 to below 1, such as a dropout; raises ArtefactError where it is none."""
    value = facts.get(name)
    if type(value) not in (int, float) or not 0 <= value < 1:  # type: ignore[operator]
        raise ArtefactError(f"{where}: {name} is {shown(value)}, expected a number from 0 to below 1.")
    return float(value)  # type: ignore[arg-type]


def ascending(facts: Mapping[Any, Any], name: str, *, where: str) -> tuple[int, ...]:
    """Returns whole numbers in ascending order, such as cutoffs; raises ArtefactError where they are not."""
    value = facts.get(name)
    if not isinstance(value, list | tuple) or any(
        type(x) is not int or not 0 < x <= MAX_LENGTH for x in value
    ):
        raise ArtefactError(f"{where}: {name} is {shown(value)}, expected whole numbers.")
    if list(value) != sorted(set(value)):
        raise ArtefactError(f"{where}: {name} is {shown(value)}, expected numbers in ascending order.")
    return tuple(value)


def shown(value: Any) -> str:
    """Returns a value of an untrusted file for a message: on one line and not too long."""
    if isinstance(value, list | tuple):
        items = [
            repr(x)[:20] if isinstance(x, bool | int | float | str | type(None)) else type(x).__name__
            for x in value[:6]
        ]
        return f"[{', '.join(items)}{', …' if len(value) > 6 else ''}]"
    text = (
        repr(value)
        if isinstance(value, bool | int | float | str | type(None))
        else f"of the type {type(value).__name__}"
    )
    return text if len(text) <= 60 else text[:57] + "…"
