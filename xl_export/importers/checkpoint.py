"""What every reader of a foreign checkpoint gives: one of our models, its rule, and what must be said about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from runtimes.errors import ArtefactError
from runtimes.rule import MemoryRule
from runtimes.vocab import Vocab
from trainer.config import TrainConfig
from trainer.model_config import ModelConfig
from xl_export.importers.checked import Tensors
from xl_export.importers.settings import Given, Setting


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A source that was found and read, not yet understood.

    path: the file, or the folder of one of the formats that are folders. content: what the file holds, plain data and tensors.
    """

    path: Path
    content: Any


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user asked for. vocab: the file of the vocabulary; beside the checkpoint when None."""

    given: Given = field(default_factory=Given)
    vocab: Path | None = None
    allow_nonfinite: bool = False

    def tensors(
        self, tensors: Iterable[tuple[Any, Any]], *, where: Path, project: str, spell: Callable[[str], str] = str
    ) -> Tensors:
        return Tensors(tensors, where=str(where), project=project, spell=spell, allow_nonfinite=self.allow_nonfinite)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model of another project in our terms.

    tensors: of `trainer.model.LanguageModel`, by name. settings: chosen ones by name. files: what was read, by role.
    notes: sentences on what differs from its project, or was decided. run: how it was trained, where that is ours.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    rule: MemoryRule
    vocab: Vocab
    settings: dict[str, Setting]
    files: dict[str, Path]
    notes: tuple[str, ...] = ()
    run: TrainConfig | None = None

    def train_config(self) -> TrainConfig:
        """The configuration of a run with this model. It was not trained here: text and recipe are left at their defaults."""
        if self.run is not None:
            return self.run
        kind = cast(Literal["byte", "char", "word"], self.vocab.kind)
        return TrainConfig(model=self.config, training=self.rule, evaluation=self.rule, vocab=kind)


def beside(path: Path, names: tuple[str, ...], wanted: Path | None, *, what: str) -> Path:
    """The file that the user named, or the first of `names` in the checkpoint's folder."""
    if wanted is not None:
        return wanted
    folder = path if path.is_dir() else path.parent
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ArtefactError(
        f"{folder} has no {' or '.join(names)}, in which this project keeps its {what}; give the file with --vocab FILE."
    )


def notes_on(tensors: Tensors) -> tuple[str, ...]:
    """What must be said of the tensors that were taken."""
    return tuple(f"weights were {kind} and are float32 now" for kind in sorted(tensors.halved))
