"""Hugging Face folders whose weights lie in shards give the model of the single file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.commands import refused, xl
from tests.xl_export.importers.oracles import DATA, assert_same_tensors, read

FOLDER = DATA / "hf-wt103" / "pretrained"


def sharded(folder: Path, kind: str) -> tuple[Path, dict[str, str]]:
    """Replaces the weights of a folder by two shards; returns the index and its `weight_map`."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, suffix = kind.split(".")
    names = [f"{stem}-{number:05}-of-00002.{suffix}" for number in (1, 2)]
    places = {name: names[i % 2] for i, name in enumerate(sorted(tensors))}
    for shard in names:
        save({name: tensors[name] for name in places if places[name] == shard}, folder / shard)
    return write_index(folder / f"{kind}.index.json", places), places


def save(tensors: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def write_index(index: Path, places: Any) -> Path:
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return index


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "pretrained", copy_function=shutil.copyfile))


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_shards_give_the_model_of_the_single_file(kind: str, folder: Path) -> None:
    index, _ = sharded(folder, kind)
    found = read(folder)
    for source in (FOLDER, index):
        assert_same_tensors(read(source), found)
    assert [*found.files] == ["config", "model", "shard 1", "shard 2", "vocabulary"]
    assert len(set(found.files.values())) == 5


def remap(change: Callable[[dict[str, str]], Any]) -> Callable[[Path, Path, dict[str, str]], Any]:
    def changed(_: Path, index: Path, places: dict[str, str]) -> None:
        change(places)
        write_index(index, places)

    return changed


FIRST, SECOND = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder, *_: (folder / SECOND).unlink(), [f"lacks {SECOND}, one of the 2 shards"]),
        (lambda folder, *_: shutil.copyfile(folder / FIRST, folder / SECOND), ["a shard of another model"]),
        (remap(lambda places: places.update(more=FIRST)), ["lacks the tensor more"]),
        (remap(lambda places: places.pop(min(places))), ["holds the tensor", "of another model"]),
        (
            remap(lambda places: places.update(more="../x.safetensors")),
            ["in ../x.safetensors, expected the name"],
        ),
        (lambda _, index, __: write_index(index, []), ['has no "weight_map"']),
        (lambda folder, *_: (folder / "config.json").unlink(), ["no config.json"]),
    ],
)
def test_shards_that_do_not_fit_their_index_are_refused(
    change: Callable[[Path, Path, dict[str, str]], Any], words: list[str], folder: Path, tmp_path: Path
) -> None:
    index, places = sharded(folder, "model.safetensors")
    change(folder, index, places)
    for source in (folder, index):
        refused(xl("import", source, "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


def test_folders_of_the_first_releases_have_no_model_type(folder: Path) -> None:
    """They called the size of the vocabulary n_token, and the tie of the tables tie_weight."""
    config = json.loads((folder / "config.json").read_text())
    old = {"n_token": config.pop("vocab_size"), "tie_weight": True, "adaptive": True}
    for name in ("model_type", "architectures", "layer_norm_epsilon", "tie_word_embeddings"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config | old))
    assert read(folder).config == read(FOLDER).config
    (folder / "config.json").write_text(json.dumps(config | old | {"tie_weight": False}))
    refused(xl("import", folder, "--describe"), "lacks the tensor crit.out_layers.0.weight")
