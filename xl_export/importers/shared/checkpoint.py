"""What every importer receives and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.rule import MemoryRule
from runtimes.contract.vocabulary import VOCAB, Vocab
from trainer.model.config import ModelConfig
from trainer.run.choices import VOCAB_KINDS
from trainer.run.config import TrainConfig
from xl_export.importers.shared.settings import Setting, size_notes
from xl_export.importers.shared.validated import Tensors
from xl_export.importers.shared.vocabularies import IDS


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint that was opened and read, but not yet understood."""

    path: Path
    """File, or folder if the format is a folder."""
    content: Any
    """Plain data and tensors of that file."""
    files: dict[str, Path] = field(default_factory=dict)
    """The files that were read, by role, if there is more than one."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options that the user chose for one import."""

    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings that replace the project's, by name."""
    vocab: Path | None = None
    """The file of the vocabulary; None searches the folder of the checkpoint."""
    allow_nonfinite: bool = False
    """Whether weights may be NaN or infinite."""

    def chosen(self, name: str) -> Any:
        """Returns the value that the user chose for a setting; None if it was not chosen."""
        return self.settings[name].value if name in self.settings else None

    def applied_to(self, project: str, defaults: Mapping[str, Setting]) -> dict[str, Setting]:
        """Returns `defaults`, with the values that the user chose in their place.

        Raises ConfigError for a setting that the project does not use.
        """
        for name, setting in self.settings.items():
            if name not in defaults:
                raise ConfigError(
                    f"{name} is set ({setting.origin}), and a {project} checkpoint takes only "
                    f"{', '.join(defaults)}; leave {name} out."
                )
        return {**defaults, **self.settings}

    def notes_on(
        self, tensors: Tensors, config: ModelConfig, settings: Mapping[str, Setting]
    ) -> tuple[str, ...]:
        """Returns the sentences that the user must read about weights, vocabulary and settings."""
        notes = [f"weights were stored as {kind} and are float32 now" for kind in sorted(tensors.halved)]
        if tensors.nonfinite:
            notes.append(
                f"{tensors.nonfinite[0]} holds NaN or infinite values: `xl-export export` refuses this run"
            )
        if self.vocab not in (None, IDS):
            notes.append("the vocabulary is a file that you named: only its size could be checked")
        return (*notes, *size_notes(settings, layers=config.layers, d_model=config.d_model))


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model of another project, expressed as a model of this one."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    """Tensors of `trainer.model.model.LanguageModel` by name."""
    rule: MemoryRule
    vocab: Vocab
    settings: dict[str, Setting]
    """Settings of the evaluation by name."""
    files: dict[str, Path]
    """Files that were read, by role."""
    notes: tuple[str, ...] = ()
    """Sentences on decisions, and on differences from the other project."""
    run: TrainConfig | None = None
    """The training configuration, if the checkpoint is a run of this project."""

    @property
    def finite(self) -> bool:
        """Whether every weight is finite."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values())

    def train_config(self) -> TrainConfig:
        """Returns the configuration of a run with this model.

        A model of another project was not trained here, so its text and recipe keep their defaults.
        """
        if self.run is not None:
            return self.run
        kind = self.vocab.kind if self.vocab.kind in VOCAB_KINDS and self.vocab.kind != "subword" else VOCAB
        return TrainConfig(model=self.config, training=self.rule, evaluation=self.rule, vocab=kind)


def shown_folder(folder: Path) -> str:
    """The path of a folder for messages, because `.` would be unclear."""
    return str(folder.resolve() if folder == Path() else folder)


def companion_file(path: Path, names: tuple[str, ...], wanted: Path | None) -> Path:
    """Returns the file `wanted`, or the first of `names` that the checkpoint's folder contains.

    Raises ArtefactError if there is no such file.
    """
    if wanted is not None:
        return wanted
    folder = path if path.is_dir() else path.parent
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ArtefactError(
        f"{shown_folder(folder)} has no {' or '.join(names)}, which should hold the vocabulary; "
        "name the file with --vocab FILE, or give --vocab ids if the tokens are plain numbers."
    )
