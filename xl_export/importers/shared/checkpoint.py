"""What every importer returns: a model of this project, its memory rule, and notes for the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import Vocab
from trainer.model.config import ModelConfig
from trainer.run.config import TrainConfig
from xl_export.importers.shared.settings import Overrides, Setting, size_notes
from xl_export.importers.shared.validated import Tensors


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source that was found and read, not yet understood.

    path: the file, or the folder of one of the formats that are folders. content: what the file holds, plain
    data and tensors.
    """

    path: Path
    content: Any


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What the user chose for one import.

    overrides: settings that replace those of the project. vocab: the file of the vocabulary; when None, it is
    looked for in the folder of the checkpoint. allow_nonfinite: whether weights may be NaN or infinite.
    """

    overrides: Overrides = field(default_factory=Overrides)
    vocab: Path | None = None
    allow_nonfinite: bool = False

    def tensors(
        self,
        tensors: Iterable[tuple[Any, Any]],
        *,
        where: Path,
        project: str,
        spell: Callable[[str], str] = str,
    ) -> Tensors:
        return Tensors(
            tensors, where=str(where), project=project, spell=spell, allow_nonfinite=self.allow_nonfinite
        )

    def notes_on(
        self, tensors: Tensors, config: ModelConfig, settings: Mapping[str, Setting]
    ) -> tuple[str, ...]:
        """What must be said of the tensors that were taken, of the vocabulary and of the settings."""
        notes = [f"weights were {kind} and are float32 now" for kind in sorted(tensors.halved)]
        if tensors.nonfinite:
            notes.append(
                f"{tensors.nonfinite[0]} holds NaN or infinite values: `xl-export export` refuses this run"
            )
        if self.vocab is not None:
            notes.append("the vocabulary was given: only its size could be checked")
        return (*notes, *size_notes(settings, layers=config.layers, d_model=config.d_model))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model of another project in our terms.

    tensors: of `trainer.model.model.LanguageModel`, by name. settings: chosen ones by name. files: what was
    read, by role.
    notes: sentences on what differs from its project, or was decided. run: how it was trained, where that is
    ours.
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    rule: MemoryRule
    vocab: Vocab
    settings: dict[str, Setting]
    files: dict[str, Path]
    notes: tuple[str, ...] = ()
    run: TrainConfig | None = None

    @property
    def finite(self) -> bool:
        """Whether every weight is a number."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values())

    def train_config(self) -> TrainConfig:
        """The configuration of a run with this model. It was not trained here: text and recipe are left at
        their defaults."""
        if self.run is not None:
            return self.run
        return TrainConfig(model=self.config, training=self.rule, evaluation=self.rule, vocab=self.vocab.kind)


def companion_file(path: Path, names: tuple[str, ...], wanted: Path | None, *, what: str) -> Path:
    """The file that the user named, or the first of `names` in the checkpoint's folder."""
    if wanted is not None:
        return wanted
    folder = path if path.is_dir() else path.parent
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ArtefactError(
        f"{folder} has no {' or '.join(names)}, in which this project keeps its {what}; give the file "
        f"with --vocab FILE."
    )
