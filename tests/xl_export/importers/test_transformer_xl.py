"""Formats that share kimiyoung's names: the same model told in each of them, and pickled modules that are
not whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import refused, xl
from tests.nightly import every
from tests.xl_export.importers.oracles import DATA, assert_same_tensors, read
from tests.xl_export.importers.tensorflow_variables import variables_of
from xl_export.importers import tensorflow

FOLDER, WORDS = DATA / "hf-wt103" / "pretrained", DATA / "kimiyoung-wt103-large"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder to alter."""
    return Path(shutil.copytree(FOLDER, tmp_path / "pretrained", copy_function=shutil.copyfile))


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


# Hugging Face


def test_the_mask_and_lengths_are_those_of_config_json(folder: Path, tmp_path: Path) -> None:
    configure(folder, same_length=False, mem_len=21, clamp_len=-1)
    result = xl("import", folder, "--out", tmp_path / "run", "--segment", 17)
    assert "memory 21, segment 17, full mask, no clamp, initial memory zeros" in result.output


def test_one_pair_of_biases_may_be_listed_in_every_layer(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    pairs = {kind: tensors[f"transformer.layers.0.dec_attn.{kind}"] for kind in ("r_w_bias", "r_r_bias")}
    for layer in range(3):
        for kind, pair in pairs.items():
            tensors[f"transformer.layers.{layer}.dec_attn.{kind}"] = pair.clone()
    configure(folder, untie_r=False)
    save_file(tensors, folder / "model.safetensors")
    found = read(folder)
    assert found.config.tie_biases
    assert torch.equal(found.tensors["positions.v"][0], pairs["r_r_bias"])
    tensors["transformer.layers.1.dec_attn.r_w_bias"] += 1
    save_file(tensors, folder / "model.safetensors")
    refused(
        xl("import", folder, "--describe"),
        "r_w_bias is shared by all layers in the configuration, and the layers",
    )


def test_a_model_of_another_type_is_refused(folder: Path) -> None:
    configure(folder, model_type="gpt2")
    words = ("with the model_type 'gpt2', and import reads transfo-xl", f"`xl-export export {folder} --out")
    refused(xl("import", folder, "--describe"), *words)


def test_only_the_file_that_is_named_is_read(folder: Path) -> None:
    """Files that the folder's reader would pass over for another are refused."""
    for name in ("other.safetensors", "pytorch_model.bin", "generation_config.json"):
        shutil.copyfile(folder / "model.safetensors", folder / name)
        refused(
            xl("import", folder / name, "--describe"),
            name,
            "config.json and model.safetensors are read; name the folder",
        )
    assert xl("import", folder / "model.safetensors", "--describe").exit_code == 0


SOURCES = {
    "four-tables": DATA / "kimiyoung-wt103-large",
    "one-table-with-clusters": DATA / "nvidia-wt103-base",
    "plain": DATA / "kimiyoung-enwik8",
    "one-projection-and-clusters": DATA / "variants" / "kimiyoung-one-table",
    "biases-in-layers": FOLDER,
}


@pytest.mark.parametrize("kind", every(2, SOURCES))
def test_tensorflow_variables_of_each_vocabulary_become_the_same_model(kind: str, tmp_path: Path) -> None:
    source = SOURCES[kind]
    names = {"one-projection-and-clusters": "vocab.txt", "biases-in-layers": "vocab.pkl"}
    vocab = source / names.get(kind, "cache.pt")
    first = read(source, vocab, segment=8)
    np.savez(tmp_path / "model.npz", **variables_of(first))
    second = read(tmp_path, vocab)
    assert first.config.vocabulary == second.config.vocabulary
    assert first.config.clusters == second.config.clusters
    assert second.config.norm_epsilon == tensorflow.NORM_EPSILON
    assert (second.rule.initial_memory, second.config.tie_biases) == ("zeros", first.config.tie_biases)
    assert_same_tensors(first, second, without={"positions.frequencies"})  # which TensorFlow computes
