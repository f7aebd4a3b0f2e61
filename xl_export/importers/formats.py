"""The formats that `xl-export import` reads; a format is recognised by what is in the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_json
from runtimes.contract.spec import SPEC
from xl_export.importers import adaptive_span, huggingface, kimiyoung, nvidia, own_run, tensorflow
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_npz_tensors
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source
from xl_export.importers.shared.validated import shown

CONFIG = "config.json"
# looked for in a folder, in this order
IN_FOLDERS = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt", "checkpoint.pt", "model.npz")


@dataclass(frozen=True)
class Format:
    """The checkpoints of one project; files: a description of the files for messages."""

    project: str
    files: str
    recognises: Callable[[Source], bool]
    read: Callable[[Source, ImportOptions], Checkpoint]


FORMATS = {
    "kimiyoung": Format(
        kimiyoung.PROJECT, "model.pt, a pickled module", kimiyoung.recognises, kimiyoung.read
    ),
    "nvidia": Format(nvidia.PROJECT, "checkpoint_*.pt", nvidia.recognises, nvidia.read),
    "huggingface": Format(
        huggingface.PROJECT, "a folder with config.json", huggingface.recognises, huggingface.read
    ),
    "adaptive-span": Format(
        adaptive_span.PROJECT, "checkpoint.pt", adaptive_span.recognises, adaptive_span.read
    ),
    "tensorflow": Format(
        tensorflow.PROJECT, "an .npz of its variables", tensorflow.recognises, tensorflow.read
    ),
    "xl-export": Format(own_run.PROJECT, "a run", own_run.recognises, own_run.read),
}


def recognise(opened: Source, wanted: str = "auto") -> str:
    """Returns the name of the format of a checkpoint that was opened.

    wanted: the format that the user named, or `auto`. Raises ArtefactError where the content is of no known
    format, or of another format than the wanted one.
    """
    found = next((name for name, known in FORMATS.items() if known.recognises(opened)), None)
    if found is None:
        content = opened.content
        tensors = (
            isinstance(content, dict)
            and content
            and all(isinstance(value, Tensor) for value in content.values())
        )
        if tensors and opened.path.suffix != ".npz":
            raise ArtefactError(
                f"{opened.path} holds only tensors, and the sizes and options of the model are missing; "
                "give the checkpoint that the project itself wrote."
            )
        known = "; ".join(f"{name}: {about.files}" for name, about in FORMATS.items())
        raise ArtefactError(f"{opened.path} is of no format that is read here ({known}).")
    if wanted not in ("auto", found):
        raise ArtefactError(
            f"{opened.path} is a checkpoint of {FORMATS[found].project}; leave out --from {wanted}."
        )
    return found


def open_source(path: Path) -> Source:
    """Reads a file, or the checkpoint file in a folder.

    Raises UserError where it cannot be read.
    """
    if tensorflow.is_checkpoint(path):
        raise ArtefactError(
            f"{path} is a TensorFlow checkpoint; make an .npz file of it where TensorFlow is installed, with "
            "the lines in `xl-export import --help`, and import that file."
        )
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ArtefactError(f"{path} does not exist; give the file or folder of a checkpoint.")
    if path.is_file() and (path.suffix in (".json", ".safetensors") or path.name in huggingface.WEIGHTS):
        weights = next((name for name in huggingface.WEIGHTS if (path.parent / name).is_file()), CONFIG)
        if path.name not in (CONFIG, weights):
            raise ArtefactError(
                f"{path} is a file of a folder of which {CONFIG} and {weights} are read; name the folder."
            )
        return _open_folder(path.parent)
    if path.suffix == ".npz":
        return Source(path=path, content=read_npz_tensors(path))
    return Source(path=path, content=read_pickle(path))


def _open_folder(folder: Path) -> Source:
    if (folder / SPEC).is_file():
        raise ArtefactError(f"{folder} is an artefact; give the run that it was made of.")
    found = f" and no {CONFIG} of one; name the file"
    if (folder / CONFIG).is_file():
        opened = Source(path=folder, content=read_json(folder / CONFIG))
        if any(known.recognises(opened) for known in FORMATS.values()):
            return opened
        kind = opened.content.get("model_type") if isinstance(opened.content, dict) else None
        found = f"; its {CONFIG} has the model_type {shown(kind)}, expected transfo-xl"
    for name in IN_FOLDERS:
        if (folder / name).is_file():
            return open_source(folder / name)
    weights = next((name for name in huggingface.WEIGHTS if (folder / name).is_file()), None)
    if weights and not (folder / CONFIG).is_file():
        raise ArtefactError(
            f"{folder} has {weights} and no {CONFIG}; copy the whole folder that save_pretrained wrote."
        )
    raise ArtefactError(f"{folder} has no checkpoint by the names {', '.join(IN_FOLDERS)}{found}.")
