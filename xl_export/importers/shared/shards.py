"""Reads the weights of a Hugging Face folder: one file, or shards that an index lists.

An index is a JSON object whose `weight_map` maps each tensor to its file. A shard must hold exactly the
tensors that the index expects in it, because shards of another model would otherwise be mixed in silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.base.files import read_json
from xl_export.importers.pickle.compressed import Budget, inner_suffix, present
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.pickle.tensors import read_safetensors
from xl_export.importers.pickle.values import shown

SAFETENSORS = "model.safetensors"
PYTORCH = "pytorch_model.bin"
INDEX = ".index.json"
WEIGHTS = (SAFETENSORS, SAFETENSORS + INDEX, PYTORCH, PYTORCH + INDEX)  # in the order of transformers
MAX_SHARDS = 1000


def find_weights(folder: Path) -> Path | None:
    """Returns the file of the weights in a folder, or their index; None if there is neither."""
    for name in WEIGHTS:  # an index may not be compressed
        path = folder / name if name.endswith(INDEX) else present(folder, name)
        if path is not None and path.is_file():
            return path
    return None


def read_weights(path: Path) -> tuple[dict[Any, Any], list[Path]]:
    """Returns the tensors by name, and the shards, which are empty if `path` is not an index.

    Raises UserError if a file is damaged, is missing or does not belong to the index.
    """
    if path.name.endswith(INDEX):
        return _read_shards(path)
    return _read_file(path), []


def _read_file(path: Path, budget: Budget | None = None) -> dict[Any, Any]:
    read = read_safetensors if inner_suffix(path) == ".safetensors" else read_pickle
    state = read(path, budget)
    if not isinstance(state, dict):
        raise ArtefactError(f"{path} is a {type(state).__name__}, expected tensors by name.")
    return state


def _read_shards(index: Path) -> tuple[dict[Any, Any], list[Path]]:
    names = _names_by_shard(index)
    missing = [name for name in names if present(index.parent, name) is None]
    if missing:
        raise ArtefactError(
            f"{index.parent} lacks {missing[0]}, one of the {len(names)} shards that {index.name} lists; "
            "copy the whole folder."
        )
    tensors: dict[str, Tensor] = {}
    paths = [path for name in names if (path := present(index.parent, name)) is not None]
    # The shards are in memory together, so they have one budget.
    budget = Budget(f"{index.parent} with its shards", sum(path.stat().st_size for path in paths))
    for path, expected in zip(paths, names.values(), strict=True):
        shard = _read_file(path, budget)
        strange = sorted({str(name) for name in shard} ^ expected)
        if strange:
            held = "lacks" if strange[0] in expected else "holds"
            raise ArtefactError(
                f"{path} {held} the tensor {shown(strange[0])}, and {index.name} says otherwise: it is a "
                "shard of another model; copy the whole folder again."
            )
        tensors |= shard
    return tensors, paths


def _names_by_shard(index: Path) -> dict[str, set[str]]:
    """Returns the names of the tensors that an index expects in each shard.

    Raises ArtefactError if the index is not one, or names a file outside of its folder.
    """
    content = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise ArtefactError(
            f'{index} has no "weight_map" that gives the file of each tensor; copy the whole folder again.'
        )
    suffix = Path(index.name.removesuffix(INDEX)).suffix
    names = dict[str, set[str]]()
    for tensor, shard in found.items():
        if (
            not isinstance(shard, str)
            or not shard.isprintable()
            or Path(shard).name != shard
            or "\\" in shard
            or Path(shard).suffix != suffix
        ):
            raise ArtefactError(
                f"{index} places the tensor {shown(tensor)} in {shown(str(shard))}, expected the name of a "
                f"{suffix} file in the same folder; copy the whole folder again."
            )
        names.setdefault(shard, set()).add(tensor)
        if len(names) > MAX_SHARDS:
            raise ArtefactError(f"{index} lists more than {MAX_SHARDS} shards; expected those of one model.")
    return dict(sorted(names.items()))
