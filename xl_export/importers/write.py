"""Writes an imported model as a run, which all commands accept like a run that was trained here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from runtimes.base.files import write_json
from runtimes.base.folders import atomic_folder
from runtimes.base.kinds import IMPORTED
from runtimes.base.machine import package_versions
from runtimes.base.records import to_json
from runtimes.base.sealed import file_facts
from runtimes.contract.vocabulary import save_vocab
from trainer.model.model import LanguageModel
from trainer.run.checkpoint import save_tensors
from trainer.run.history import MODEL, write_config
from xl_export.importers.shared.checkpoint import Checkpoint
from xl_export.importers.shared.vocabularies import IDS

IMPORT = "import.json"


def write_run(checkpoint: Checkpoint, out: Path, *, record: dict[str, Any], force: bool = False) -> None:
    """Writes the folder `out` with configuration, vocabulary and weights, and `record` as `import.json`.

    The folder is whole or absent. `force` replaces an earlier import and nothing else.
    """
    config = checkpoint.train_config()
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in LanguageModel(config.model).state_dict().items()}
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == expected, (
        "a reader left something out"
    )
    sources = list(checkpoint.files.values())
    with atomic_folder(out, IMPORTED, force=force, sources=sources) as folder:
        write_config(folder, config)
        save_vocab(folder, checkpoint.vocab)
        save_tensors(folder / MODEL, {name: tensor.clone() for name, tensor in checkpoint.tensors.items()})
        write_json(folder / IMPORT, record)


def import_record(checkpoint: Checkpoint, *, name: str, project: str) -> dict[str, Any]:
    """Returns the record of an import, as JSON.

    It names the format, the files with their hashes, the settings with their origins, and the notes.
    """
    return {
        "format": name,
        "project": project,
        "files": {
            role: {"name": path.name, **to_json(file_facts(path))}
            for role, path in checkpoint.files.items()
            if path != IDS
        },
        "settings": {
            key: {"value": setting.value, "origin": setting.origin}
            for key, setting in checkpoint.settings.items()
        },
        "rule": to_json(checkpoint.rule),
        "notes": list(checkpoint.notes),
        "producer": package_versions(),
    }
