"""Refuses a foreign model by the name of an option that its adapter does not know."""

from __future__ import annotations

from collections.abc import Collection, Sized
from typing import Any

from torch import Tensor, nn

from runtimes.base.errors import ConfigError

OWN = "trace a module of your own (docs/guides/own-model.md)"


def refuse_unknown(model: nn.Module, known: str, *, needed: Collection[str] = (), parts: bool = True) -> None:
    """Raises ConfigError, with its name, for an option of a model that its adapter does not know.

    A model does not say how it was made, but its modules keep what they need of it. Among those of its
    package, every class and every attribute that is set must be known. What is None, False, zero or empty
    changes nothing.

    known: names, with spaces between them, of classes and attributes of models that agreed with their
    authors' own loop. needed: attributes of the model that must be set. parts: whether the modules in the
    model are looked at too; False for an adapter that uses those as a whole.
    """
    for name in needed:
        if _is_off(getattr(model, name, None)):
            raise ConfigError(
                f"{type(model).__name__} is without {name}, with which its adapter computes; make the model "
                f"with it, or {OWN}."
            )
    words = set(known.split())
    package = _package(model)
    for path, module in model.named_modules() if parts else [("", model)]:
        if _package(module) != package:
            continue
        kept = {**vars(module), **module._parameters, **module._buffers, **module._modules}
        names: dict[str, Any] = {type(module).__name__: module} if path else {}
        names |= {name: value for name, value in kept.items() if name[0] != "_" and name != "training"}
        for name, value in names.items():
            if name not in words and not _is_off(value):
                where = f" in {path}" if path else ""
                raise ConfigError(
                    f"{type(model).__name__} has {name} ({_shown(value)}){where}, which its adapter does not "
                    f"know and may compute wrongly; make the model without it, or {OWN}."
                )


def _package(module: nn.Module) -> str:
    return type(module).__module__.partition(".")[0]


def _is_off(value: Any) -> bool:
    if isinstance(value, bool | int | float | None):
        return not value
    if isinstance(value, nn.Identity):
        return True
    return isinstance(value, Sized) and not isinstance(value, Tensor) and not len(value)


def _shown(value: Any) -> str:
    plain = isinstance(value, bool | int | float | str | tuple)
    return f"{value!r:.60}" if plain else type(value).__name__
