"""Checkpoints of fairseq's truncated-BPTT Transformer-XL: Hugging Face's model under fairseq's names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from runtimes import open_session
from tests.commands import refused, xl
from tests.xl_export.importers.oracles import DATA, assert_same_tensors, nll, read
from trainer.run.checkpoint import load_run

FOLDER = DATA / "hf-wt103"
MODEL: dict[str, Any] = {
    "_name": "transformer_xl",
    "cutoffs": [61, 151, 341, 100_000],  # the last one is beyond the vocabulary: fairseq drops it
    "d_model": 64,
    "n_head": 4,
    "d_head": 12,
    "d_inner": 96,
    "div_val": 4,
    "n_layer": 3,
    "mem_len": 48,
    "clamp_len": 32,
    "same_length": True,
    "dropout": 0.1,
    "dropatt": 0.0,
    "checkpoint_activations": False,
}
SETTINGS = ("mem_len", "clamp_len", "same_length")


def write(folder: Path, **parts: Any) -> Path:
    """A checkpoint with the oracle's model and the file of its dictionary; `parts` replaces entries."""
    tensors = load_file(FOLDER / "pretrained" / "model.safetensors")
    for i in range(4):  # fairseq writes tied tensors under all their names
        tensors[f"crit.out_layers.{i}.weight"] = tensors[f"transformer.word_emb.emb_layers.{i}.weight"]
    content = {
        "args": None,
        "cfg": {"model": MODEL, "task": {"_name": "truncated_bptt_lm", "tokens_per_sample": 16}},
        "model": {f"decoder.model.{name}": tensor for name, tensor in tensors.items()},
        "optimizer_history": [{"num_updates": 3}],
        "extra_state": {"metrics": {}},
    }
    torch.save(content | parts, folder / "checkpoint_best.pt")
    words = [f"word{i} {1000 - i}\n" for i in range(495)]
    (folder / "dict.txt").write_text("".join(words) + "madeupword0000 0\n")
    return folder / "checkpoint_best.pt"


def test_a_checkpoint_gives_the_likelihoods_of_hugging_faces_model(tmp_path: Path) -> None:
    with np.load(FOLDER / "expected.npz") as arrays:
        expected = dict(arrays)
    result = xl("import", write(tmp_path), "--out", tmp_path / "run")
    assert "format      fairseq: " in result.output, result.output
    assert "memory 47, segment 16, same-length mask, clamp 32, initial memory zeros" in result.output
    assert np.abs(nll(open_session(tmp_path / "run"), expected) - expected["nll"]).max() < 2e-5
    vocab = load_run(tmp_path / "run").vocab
    assert vocab.encode("word0 strange\n\nword494\n").tolist() == [4, 3, 2, 2, 498, 2]
    decode = vocab.decoder()
    assert "".join(map(decode, (4, 2, 5))) == "word0\nword1"


def test_older_checkpoints_have_their_options_in_args(tmp_path: Path) -> None:
    facts = {"arch": "transformer_xl", "task": "truncated_bptt_lm", "tokens_per_sample": 16, "lr": [0.1]}
    new = read(write(tmp_path))
    old = read(write(tmp_path, cfg=None, args=argparse.Namespace(**MODEL | facts)))
    assert (old.config, old.rule, old.settings) == (new.config, new.rule, new.settings)
    assert_same_tensors(old, new)


def test_what_a_checkpoint_lacks_is_a_default_of_fairseq(tmp_path: Path) -> None:
    """Its defaults differ from Hugging Face's: no memory, no clamp, every key visible, segments of 1,024."""
    lacking = {name: value for name, value in MODEL.items() if name not in SETTINGS}
    result = xl("import", write(tmp_path, cfg={"model": lacking, "task": {}}), "--describe")
    assert "memory 0, segment 1024, full mask, no clamp" in result.output, result.output
    assert result.output.count("(default of the project)") == 4
    lacking = {name: value for name, value in MODEL.items() if name != "n_layer"}
    refused(
        xl("import", write(tmp_path, cfg={"model": lacking, "task": {}}), "--describe"),
        "lacks the tensor layers.",
    )


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("word0\n" * 496, ["dict.txt, line 1, is 'word0'; expected a word, a blank and its count"]),
        ("word0 1\n" * 496, ["dict.txt is not a vocabulary: its symbols repeat"]),
        ("word0 1\n", ["dict.txt has 5 symbols and the model 500"]),
    ],
)
def test_a_dictionary_that_is_none_is_refused(lines: str, words: list[str], tmp_path: Path) -> None:
    source = write(tmp_path)
    (tmp_path / "dict.txt").write_text(lines, errors="surrogateescape")
    refused(xl("import", source, "--describe"), *words)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"cfg": {"model": {"_name": "transformer_lm"}, "task": {}}}, ["is a fairseq model transformer_lm;"]),
        (
            {"cfg": {"model": MODEL | {"activation_fn": "gelu"}, "task": {}}},
            ["unknown setting cfg.model.activation_fn, 'gelu'"],
        ),
        (
            {"cfg": {"model": MODEL, "task": {"_name": "language_modeling"}}},
            ["cfg.task._name is 'language_modeling', expected 'truncated_bptt_lm'"],
        ),
        ({"cfg": [3]}, ["cfg is not the configuration of fairseq"]),
        ({"cfg": {"model": MODEL, "task": {"tokens_per_sample": 0}}}, ["tokens_per_sample is 0"]),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    parts: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    refused(xl("import", write(tmp_path, **parts), "--describe"), *words)
