"""A run on disk; never a pickle.

`model.safetensors` is what everything downstream reads: the weights of the best validation so far, or the
last ones while there was no validation. The last ones, with all else that resuming needs, are in
`training.safetensors` (`trainer/training/snapshot.py`). Both hold the SHA-256 of their own tensors in their
metadata, so that a file and its hash are always written together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtimes.base.errors import ArtefactError, UserError
from runtimes.base.files import atomic_file, refuse_other_kinds, sha256
from runtimes.base.folders import refuse_dataset, refuse_no_folder
from runtimes.base.records import json_text
from runtimes.contract.spec import SPEC, VOCAB
from runtimes.contract.vocabulary import Vocab, load_vocab
from trainer.model.model import LanguageModel
from trainer.run.config import TrainConfig
from trainer.run.history import CONFIG, MODEL, SHA256, read_config

VALID = "valid.txt"
TEST = "test.txt"
TEST_IDS = "test.npy"  # the test part of a dataset, as token ids for `xl-export eval --text`
# Folders in the run, which these libraries fill.
TENSORBOARD = "tensorboard"
WANDB = "wandb"


@dataclass(frozen=True)
class Run:
    """A trained model with all that belongs to it."""

    config: TrainConfig
    model: LanguageModel
    vocab: Vocab
    sha256: str  # of its weights file


def load_run(folder: Path) -> Run:
    """The best checkpoint of a run; raises ArtefactError or ConfigError that name the file at fault."""
    refuse_no_run(folder, CONFIG)
    config = read_config(folder)
    vocab = matching_vocab(folder, config)
    path = folder / MODEL
    digest = _digest(path)
    with torch.device("meta"):
        model = LanguageModel(config.model)
    tensors, _ = load_tensors(path, expected=model.state_dict())
    model.load_state_dict(tensors, assign=True)
    if _digest(path) != digest:
        raise ArtefactError(f"{path} changed while it was read; if its training is running, try again.")
    return Run(config, model, vocab, digest)


def refuse_no_run(folder: Path, needed: str) -> None:
    """Raises ArtefactError for a folder without this file of a run, and says what to give instead."""
    if (folder / needed).is_file():
        return
    refuse_no_folder(folder, give="a run")
    refuse_dataset(folder, give="a run")
    if (folder / SPEC).is_file():
        raise ArtefactError(
            f"{folder} is an artefact already; check it with `xl-export check {folder}`, or give the run "
            "that it was exported from."
        )
    fault = "was imported or copied in part" if (folder / CONFIG).is_file() else "is not a run"
    raise ArtefactError(f"{folder} {fault}: it has no {needed}; make one with `xl-export train --out RUN`.")


def matching_vocab(folder: Path, config: TrainConfig) -> Vocab:
    """A run's vocabulary; raises ArtefactError if it is not of the size that the configuration says."""
    vocab = load_vocab(folder / VOCAB)
    if config.model.vocab_size != vocab.size:
        raise ArtefactError(
            f"{folder / VOCAB} has {vocab.size} symbols and {CONFIG} says {config.model.vocab_size}; one is "
            "of another run."
        )
    return vocab


def _digest(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise ArtefactError(
            f"{path} is missing or damaged ({error.strerror}); train again, or copy the run again."
        ) from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, whole or not at all, with the SHA-256 of its tensors in its metadata."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(whole, temporary, {**(metadata or {}), SHA256: tensors_sha256(whole)})
            _sort_metadata(temporary)
        except SafetensorError as error:  # safetensors raises it if the disk is full
            raise UserError(f"{path} could not be written: {error}; nothing was changed there.") from error


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata in the header of a safetensors file, so that equal runs have equal files.

    The library writes its keys in any order. The header keeps its length, and blanks fill it at the end.
    """
    with path.open("rb+") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json_text(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, (len(text), length)
        stream.seek(8)
        stream.write(text.ljust(length))


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hexadecimal SHA-256 of the names, types, shapes and bytes of tensors. Their order does not matter."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def load_tensors(
    path: Path, *, expected: Mapping[str, Tensor | None]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns tensors and metadata of a safetensors file.

    It must have exactly the names, shapes and types of `expected`, and the values that were written. None
    accepts any shape and type.
    """
    try:
        refuse_other_kinds(path)
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for fault, wrong in (("lacks", expected.keys() - names), ("has", names - expected.keys())):
                if wrong:
                    raise ArtefactError(
                        f"{path} {fault} the tensor {min(wrong)}; it was written for another model than the "
                        "run's config.json."
                    )
            tensors = {name: file.get_tensor(name) for name in expected}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ArtefactError(
            f"{path} is missing or damaged ({error}); train again, or copy the run again."
        ) from error
    for name, like in expected.items():
        found = tensors[name]
        if like is not None and (found.dtype, found.shape) != (like.dtype, like.shape):
            raise ArtefactError(
                f"{path}: {name} is {found.dtype} {list(found.shape)}, expected {like.dtype} "
                f"{list(like.shape)}."
            )
    stated = metadata.pop(SHA256, None)
    if stated is not None and stated != tensors_sha256(tensors):
        raise ArtefactError(
            f"{path} was altered: the SHA-256 of its tensors is not the one that it records; copy the run "
            "again, or train again."
        )
    return tensors, metadata
