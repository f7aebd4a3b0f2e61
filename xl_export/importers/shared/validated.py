"""Tensors and settings of an untrusted checkpoint: each is checked before use, and none is left over."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.rule import MAX_LENGTH
from xl_export.importers.pickle import values
from xl_export.importers.shared.names import back, translated

# The end of a message about a model that no importer reads.
OWN_MODEL = "export a model of your own code with xl_export.trace (docs/guides/own-model.md)."


class Tensors:
    """The tensors of one checkpoint, which are taken one by one; an unused tensor is an error.

    tensors: for each, its name in the project, its name in the file (for messages), and itself. names: from
    names in the project to those by which tensors are taken, see `names.py`; two tensors with one name are
    refused. where: the file. project: the expected origin of the file. allow_nonfinite: whether NaN and
    infinity are allowed.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[Any, Any, Any]],
        *,
        names: Mapping[str, str],
        where: Path,
        project: str,
        allow_nonfinite: bool,
    ) -> None:
        self.names = names
        self.where = where
        self.project = project
        self.allow_nonfinite = allow_nonfinite
        self._left: dict[str, Tensor] = {}
        self._in_file: dict[str, str] = {}
        self.halved: set[str] = set()  # types other than float32 that were found
        self.nonfinite: list[str] = []  # names of tensors that hold NaN or infinity, if these are allowed
        for name, in_file, tensor in tensors:
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ArtefactError(
                    f"{where}: {str(in_file)[:80]!r} is a {type(tensor).__name__}; expected a tensor of "
                    f"{project}."
                )
            name = translated(name, names)
            if name in self._left:
                raise ArtefactError(
                    f"{where} has the tensor {self.spell(name)} under two names; expected one."
                )
            self._left[name] = tensor
            self._in_file[name] = in_file

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def spell(self, name: str) -> str:
        """Returns the name in the file, for messages, or in the project for a tensor that is not there."""
        return values.clean(self._in_file.get(name) or back(name, self.names))

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns a tensor as float32; it must have exactly this shape.

        Raises ArtefactError with the tensor's name if it is missing, has another shape or type, or is not
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
            self.nonfinite.append(self.spell(name))
            if not self.allow_nonfinite:
                raise ArtefactError(
                    f"{self.where}: {self.spell(name)} holds NaN or infinite values; "
                    "import a checkpoint from before its loss diverged, or give --allow-nonfinite."
                )
        return tensor

    def peek(self, name: str, *, dimensions: int) -> Tensor:
        """Returns a tensor without taking it, to read its sizes.

        Raises ArtefactError if it does not fit.
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

    def count(self, prefix: str) -> int:
        """Returns how many numbered groups `prefix.0.…`, `prefix.1.…` there are, up to the first gap."""
        numbers = {
            name[len(prefix) + 1 :].partition(".")[0] for name in self._left if name.startswith(prefix + ".")
        }
        return next(i for i in range(len(numbers) + 1) if str(i) not in numbers)

    def finish(self) -> None:
        """Raises ArtefactError if a tensor was not taken."""
        if self._left:
            name = min(self._left)
            raise ArtefactError(
                f"{self.where} has the unexpected tensor {self.spell(name)} "
                f"{list(self._left[name].shape)}; expected only the tensors of a {self.project} model."
            )


@contextlib.contextmanager
def sizes_of(where: Path) -> Iterator[None]:
    """Raises ArtefactError with the name of the file if its sizes fit no model."""
    try:
        yield
    except ConfigError as error:
        raise ArtefactError(f"{where} does not describe a model that this project knows: {error}") from error


@dataclass(frozen=True)
class Rule:
    """What one setting of a checkpoint may be."""

    accepts: Callable[[Any], bool]
    expected: str
    """The values that `accepts` accepts, for messages."""
    required: bool = False
    """Whether the checkpoint must have the setting."""


# The settings that a checkpoint may have, by name. A setting is read, compared with what is computed here, or
# ignored for a reason; the functions below make the entries. Any other setting is refused.
Table = dict[Any, Rule]


def taken(rule: Rule, *names: str) -> dict[Any, Rule]:
    """Returns entries for settings that the importer reads."""
    return dict.fromkeys(names, rule)


def fixed(value: Any, *names: str) -> dict[Any, Rule]:
    """Returns entries for settings that must have the one value that is computed here; they may be absent."""
    return dict.fromkeys(names, Rule(partial(_equal, value), shown(value)))


def ignored(why: str, *names: str) -> dict[Any, Rule]:
    """Returns entries for settings that do not change what the model computes. why: the reason."""
    assert why
    return dict.fromkeys(names, Rule(lambda value: True, "anything"))


def whole(least: int = 0) -> Rule:
    return Rule(
        lambda value: type(value) is int and least <= value <= MAX_LENGTH,
        f"a whole number from {least} to {MAX_LENGTH}",
        required=True,
    )


def optional(rule: Rule) -> Rule:
    """Returns a rule for a setting that may be absent or None."""
    return Rule(lambda value: value is None or rule.accepts(value), rule.expected)


def one_of(*values: int) -> Rule:
    expected = f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
    return Rule(lambda value: type(value) is int and value in values, expected, required=True)


def truths(count: int) -> Rule:
    return Rule(
        lambda value: (
            isinstance(value, list | tuple) and len(value) == count and all(type(x) is bool for x in value)
        ),
        f"true or false for each of {count} clusters",
        required=True,
    )


TRUTH = Rule(lambda value: type(value) is bool, "true or false", required=True)
# A dropout, or the epsilon of a LayerNorm.
FRACTION = Rule(
    lambda value: type(value) in (int, float) and 0 <= value < 1, "a number from 0 to below 1", required=True
)
ASCENDING = Rule(
    lambda value: (
        isinstance(value, list | tuple)
        and all(type(x) is int and 0 < x <= MAX_LENGTH for x in value)
        and list(value) == sorted(set(value))
    ),
    "whole numbers in ascending order",
    required=True,
)
NOTHING = Rule(lambda value: type(value) is dict and not value, "an empty one")
NOT_SAMPLED = Rule(
    lambda value: type(value) is int and value <= 0, "0 or less, for a softmax over all tokens"
)


def model_settings(config: Any) -> Table:
    """Returns the entries for the settings that all copies of kimiyoung's model have.

    config: the settings, which may be anything; the number of clusters follows from their cutoffs.
    """
    cutoffs = config.get("cutoffs") if isinstance(config, dict) else None
    clusters = 1 + (len(cutoffs) if isinstance(cutoffs, list | tuple) else 0)
    return {
        **taken(whole(1), "n_layer", "n_head", "d_model", "d_head", "div_val"),
        **taken(optional(whole(1)), "d_inner"),
        **taken(ASCENDING, "cutoffs"),
        **taken(truths(clusters), "tie_projs"),
        **taken(TRUTH, "pre_lnorm"),
        **taken(FRACTION, "dropout", "dropatt"),
        **taken(NOT_SAMPLED, "sample_softmax"),
        **fixed(0, "attn_type"),  # the only one in which these projects published models
    }


def checked(facts: Any, table: Table, *, where: Path, inside: str = "") -> dict[str, Any]:
    """Returns the settings of a checkpoint by the names of `table`; one that is absent is None.

    inside: the part of the checkpoint that holds the settings, such as `model_config.`, for messages. Raises
    ArtefactError, which names the setting, if one is unknown, missing, or has a value that is not computed
    here.
    """
    if not isinstance(facts, dict):
        raise ArtefactError(
            f"{where}: {inside.rstrip('.') or 'the configuration'} is a {type(facts).__name__}, expected "
            "settings by name; copy the file again."
        )
    for name in facts:
        if name not in table:
            raise ArtefactError(
                f"{where} has the unknown setting {inside}{values.clean(str(name))}, {shown(facts[name])}, "
                f"which may change what the model computes; {OWN_MODEL}"
            )
    for name in table:
        if name in facts or table[name].required:
            checked_setting(facts, name, table[name], where=where, inside=inside)
    return {name: facts.get(name) for name in table}


def checked_setting(facts: Mapping[Any, Any], name: str, rule: Rule, *, where: Path, inside: str = "") -> Any:
    """Returns one setting; raises ArtefactError if its rule does not accept it."""
    value = facts.get(name)
    if not rule.accepts(value):
        raise ArtefactError(f"{where}: {inside}{name} is {shown(value)}, expected {rule.expected}.")
    return value


def _equal(wanted: Any, value: Any) -> bool:
    """Whether a value of an untrusted file, which may be of any type, is the wanted one."""
    if isinstance(wanted, float):
        return type(value) in (int, float) and abs(value) < MAX_LENGTH and math.isclose(value, wanted)
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(_equal(a, b) for a, b in zip(wanted, value, strict=True))
        )
    return type(value) is type(wanted) and bool(value == wanted)


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
