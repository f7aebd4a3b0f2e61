"""The formats that `xl-export import` reads; a format is recognised by what is in the file."""

from __future__ import annotations

from pathlib import Path

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_json
from runtimes.contract.spec import SPEC
from xl_export.importers import FORMATS, tensorflow_checkpoint
from xl_export.importers.huggingface import CONFIG, INDEX, WEIGHTS, find_weights
from xl_export.importers.pickle import values
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_npz_tensors, read_safetensors
from xl_export.importers.shared.checkpoint import Source, shown_folder
from xl_export.importers.shared.state_dict import state_in, unwrapped
from xl_export.importers.shared.validated import OWN_MODEL, shown


def recognise(opened: Source) -> str:
    """Returns the name of the format of a checkpoint that was opened; raises ArtefactError if it has none."""
    for name, format_ in FORMATS.items():
        if format_.project.recognises(opened):
            return name
    content = opened.content
    known = "; ".join(f"{name}: {format_.files}" for name, format_ in FORMATS.items())
    if (state := state_in(content)) and opened.path.suffix != ".npz":
        raise ArtefactError(
            f"{opened.path} holds the tensors of a model that is not known here, such as "
            f"{values.clean(str(next(iter(state))))}; only models of {', '.join(FORMATS)} can be "
            f"imported, with the names that these projects give to their tensors; {OWN_MODEL}"
        )
    if isinstance(content, values.Foreign):
        raise ArtefactError(
            f"{opened.path} is of no format that is read here: it holds a {values.clean(content.name)} "
            f"({known}); {OWN_MODEL}"
        )
    raise ArtefactError(f"{opened.path} is of no format that is read here ({known}).")


def open_source(path: Path) -> Source:
    """Reads a file, or the checkpoint file in a folder.

    Raises UserError if it cannot be read.
    """
    if prefix := tensorflow_checkpoint.find_prefix(path):
        files = tensorflow_checkpoint.files_of(prefix)
        return Source(path=prefix, content=tensorflow_checkpoint.read_variables(prefix), files=files)
    if path.is_dir():
        return _open_folder(path)
    if path.name == CONFIG or (_is_of_folder(path) and (path.parent / CONFIG).is_file()):
        weights = find_weights(path.parent)
        if weights is not None and path.name not in (CONFIG, weights.name):
            raise ArtefactError(
                f"{path} is a file of a folder of which {CONFIG} and {weights.name} are read; name the "
                "folder."
            )
        return _open_folder(path.parent)
    if path.name.endswith(INDEX):
        raise ArtefactError(f"{path} has no {CONFIG} in its folder; copy the whole folder of the model.")
    if path.suffix == ".npz":
        return Source(path=path, content=read_npz_tensors(path))
    if path.suffix == ".safetensors":
        return Source(path=path, content=read_safetensors(path))
    return Source(path=path, content=unwrapped(read_pickle(path)))


def _is_of_folder(path: Path) -> bool:
    """Whether a file is one that Hugging Face writes next to `config.json`."""
    return path.suffix in (".json", ".safetensors") or path.name in WEIGHTS


def _open_folder(folder: Path) -> Source:
    if (folder / SPEC).is_file():
        raise ArtefactError(f"{folder} is an artefact; give the run that it was made of.")
    kind = None
    if (folder / CONFIG).is_file():
        opened = Source(path=folder, content=read_json(folder / CONFIG))
        if any(format_.project.recognises(opened) for format_ in FORMATS.values()):
            return opened
        kind = opened.content.get("model_type") if isinstance(opened.content, dict) else None
    names = list(dict.fromkeys(name for format_ in FORMATS.values() for name in format_.in_folder))
    for name in names:
        if (folder / name).is_file():
            return open_source(folder / name)
    if kind is not None:
        raise ArtefactError(
            f"{folder} is a Hugging Face folder with the model_type {shown(kind)}, and import reads "
            f"transfo-xl; use `xl-export export {folder} --out ARTEFACT`, which accepts language models with "
            "a bounded state, such as Mamba."
        )
    weights = find_weights(folder)
    if weights and not (folder / CONFIG).is_file():
        raise ArtefactError(
            f"{folder} has {weights.name} and no {CONFIG}; copy the whole folder that save_pretrained wrote."
        )
    raise ArtefactError(
        f"{shown_folder(folder)} has no checkpoint by the names {', '.join(names)}, and no {CONFIG} of one; "
        "name the file."
    )
