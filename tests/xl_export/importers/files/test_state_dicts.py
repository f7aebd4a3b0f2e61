"""Bare state dicts give the models that the whole checkpoints give, under whatever name they are wrapped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.commands import refused, xl
from tests.nightly import every
from tests.xl_export.importers.oracles import DATA, assert_same_tensors, read
from xl_export.importers.formats import open_source, recognise
from xl_export.importers.pickle.read import read_pickle
from xl_export.importers.shared.pickled_module import module_tensors

LARGE, NVIDIA, SPAN = (
    DATA / "kimiyoung-wt103-large",
    DATA / "nvidia-wt103-base",
    DATA / "adaptive-span-enwik8",
)
HF, VARIANTS = DATA / "hf-wt103" / "pretrained", DATA / "variants"
LENGTHS = {"mem_len": 9, "segment": 8, "mask": "same-length", "clamp_len": 6}
ABSOLUTE = {"mem_len": 0, "segment": 8, "mask": "full"}


def of_module(folder: Path) -> dict[str, Tensor]:
    return dict(module_tensors(read_pickle(folder / "model.pt"), folder))


def of_huggingface(folder: Path) -> dict[str, Tensor]:
    """As `torch.save(model.state_dict())` writes it: tied tensors under all their names."""
    tensors = load_file(folder / "model.safetensors")
    for i in range(4):
        tensors[f"crit.out_layers.{i}.weight"] = tensors[f"transformer.word_emb.emb_layers.{i}.weight"]
        if i:
            tensors[f"crit.out_projs.{i}"] = tensors[f"transformer.word_emb.emb_projs.{i}"]
    return tensors


def prefixed(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


# Where from, its state dict, its vocabulary, options of both imports, settings of the bare one.
CASES: dict[str, tuple[Path, Callable[[Path], dict[str, Tensor]], str, dict[str, Any], dict[str, Any]]] = {
    "kimiyoung": (LARGE, of_module, "cache.pt", LENGTHS, {}),
    "kimiyoung untied": (DATA / "kimiyoung-ptb-full-mask", of_module, "cache.pt", LENGTHS, {}),
    "one table": (
        VARIANTS / "kimiyoung-one-table",
        of_module,
        "vocab.txt",
        LENGTHS,
        {"cutoffs": (10, 25), "n_head": 2},
    ),
    "some projections": (VARIANTS / "kimiyoung-clusters", of_module, "vocab.txt", LENGTHS, {}),
    "pre-norm": (VARIANTS / "kimiyoung-pre-norm", of_module, "vocab.txt", LENGTHS, {"pre_lnorm": True}),
    "shaw": (VARIANTS / "kimiyoung-shaw", of_module, "vocab.txt", LENGTHS, {}),
    "absolute": (VARIANTS / "kimiyoung-absolute", of_module, "vocab.txt", ABSOLUTE, {"n_head": 2}),
    "per layer": (VARIANTS / "kimiyoung-per-layer", of_module, "vocab.txt", ABSOLUTE, {}),
    "nvidia": (
        NVIDIA,
        lambda folder: read_pickle(folder / "checkpoint_last.pt")["model_state"],
        "cache.pt",
        LENGTHS,
        {"cutoffs": (93, 189, 301)},
    ),
    "huggingface": (HF, of_huggingface, "vocab.pkl", LENGTHS, {}),
    "adaptive-span": (
        SPAN,
        lambda folder: read_pickle(folder / "checkpoint.pt")["model"],
        "corpus.pt",
        {"segment": 8},
        {},
    ),
}
WRAPPINGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "alone": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": prefixed("model.")(state)},
    "model": lambda state: {"model": prefixed("module.")(state), "optimizer": {"state": {}}},
    "model_state_dict": lambda state: {"model_state_dict": prefixed("module._orig_mod.module.")(state)},
}


@pytest.mark.parametrize("name", every(2, CASES))
def test_a_state_dict_gives_the_model_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    folder, state_of, vocab, options, settings = CASES[name]
    wrapping = list(WRAPPINGS)[list(CASES).index(name) % len(WRAPPINGS)]
    torch.save(WRAPPINGS[wrapping](state_of(folder)), tmp_path / "state.pt")
    first = read(folder, folder / vocab, **options)
    second = read(tmp_path / "state.pt", folder / vocab, **options | settings)
    # A state dict does not hold dropout; all the rest must be the same.
    known = dataclasses.replace(first.config, dropout=0.0, attention_dropout=0.0)
    if name == "absolute":
        known = dataclasses.replace(known, context=second.config.context)
    assert second.config == known
    assert second.rule == first.rule
    if name != "absolute":
        assert_same_tensors(first, second)


@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_names_need_no_prefix(tied: bool, tmp_path: Path) -> None:
    """As kimiyoung's, the clusters would be reversed and the first memory masked, without a word."""
    state = {name.removeprefix("transformer."): tensor for name, tensor in of_huggingface(HF).items()}
    if tied:  # without untie_r, the code lists one u and v outside of the layers and in each of them
        for name in ("r_w_bias", "r_r_bias"):
            state |= {key: state[f"layers.0.dec_attn.{name}"] for key in state if key.endswith(name)}
            state[name] = state[f"layers.0.dec_attn.{name}"].clone()
    torch.save(state, tmp_path / "state.pt")
    assert recognise(open_source(tmp_path / "state.pt")) == "huggingface"
    assert read(tmp_path / "state.pt", HF / "vocab.pkl", **LENGTHS).rule.initial_memory == "zeros"


@pytest.mark.parametrize(
    ("variant", "settings", "words"),
    [
        ("pre-norm", {"tgt_len": 8}, 'give --mem-len, --mask, --clamp-len, or "mem_len", "same_length"'),
        ("absolute", {}, 'give "n_head", a divisor of 10'),
        ("one-table", {}, '2 tail clusters, and cutoffs are not given; give "cutoffs"'),
        ("one-table", {"cutoffs": [10]}, "cutoffs has 1 numbers"),
        ("one-table", {"cutoffs": [25, 10]}, "ascending order"),
        ("one-table", {"cutoffs": [10, 25], "n_head": 3}, "n_head is 2 by the shapes of the tensors, and 3"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    variant: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = VARIANTS / f"kimiyoung-{variant}"
    torch.save(of_module(folder), tmp_path / "state.pt")
    lengths = {} if variant == "pre-norm" else {"mem_len": 9, "tgt_len": 8, "mask": "full", "clamp_len": 0}
    (tmp_path / "settings.json").write_text(json.dumps(lengths | settings))
    options = ("--vocab", folder / "vocab.txt", "--settings", tmp_path / "settings.json")
    refused(xl("import", tmp_path / "state.pt", "--describe", *options), words)


@pytest.mark.parametrize(
    ("format_", "activation"),
    [("kimiyoung", "activation ReLU, embeddings times"), ("adaptive-span", "ReLU and")],
)
def test_what_weights_do_not_tell_is_noted(format_: str, activation: str, tmp_path: Path) -> None:
    folder, state_of, vocab, options, _ = CASES[format_]
    content = {
        "epoch": 3,
        "optimizer": {},
        "hyper_parameters": {"activation": "gelu"},
        "model": state_of(folder),
    }
    torch.save(content, tmp_path / "state.pt")
    notes = read(tmp_path / "state.pt", folder / vocab, **options).notes
    assert any("assumed, because tensors do not tell it: " in note and activation in note for note in notes)
    (unread,) = (note for note in notes if note.startswith("only the weights were read"))
    assert "hyper_parameters" in unread
    assert "model" not in unread
