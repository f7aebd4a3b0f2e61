"""Checkpoints altered in one place: each is refused by the name of what is wrong, or read as it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.commands import refused, xl
from tests.xl_export.importers.oracles import DATA
from trainer.run.checkpoint import load_run
from xl_export.importers import kimiyoung
from xl_export.importers.pickle.read import read_pickle

# Checkpoints that are plain dictionaries, altered in one place.
NVIDIA, SPAN = (
    DATA / "nvidia-wt103-base" / "checkpoint_last.pt",
    DATA / "adaptive-span-persistent" / "checkpoint.pt",
)


def nvidia(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> tuple[dict[str, Any], Path]:
    """An NVIDIA checkpoint whose configuration and weights were altered, and the file of its vocabulary."""
    content = read_pickle(NVIDIA)
    change(content["model_config"], content["model_state"])
    return {name: content[name] for name in ("model_config", "model_state")}, NVIDIA.parent / "cache.pt"


def nan(state: dict[str, Any], name: str) -> None:
    state[name].view(-1)[1] = float("nan")


def refuse(content: dict[str, Any], vocab: Path, folder: Path, words: list[str]) -> None:
    torch.save(content, folder / "checkpoint.pt")
    shutil.copyfile(vocab, folder / vocab.name)
    refused(xl("import", folder / "checkpoint.pt", "--out", folder / "run"), *words)
    assert not (folder / "run").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda c, w: w.pop("layers.1.dec_attn.r_net.weight"),
            ["lacks the tensor layers.1.dec_attn.r_net.weight"],
        ),
        (lambda c, w: w.pop("crit.out_layers_biases.0"), ["lacks the tensor crit.out_layers_biases.0"]),
        (lambda c, w: w.update({"a\n\x1b[31m": torch.zeros(3)}), ["unexpected tensor a??[31m [3]"]),
        (
            lambda c, w: w.update({"crit.out_layers.0.bias": torch.zeros(3)}),
            ["under two names; expected one"],
        ),
        (lambda c, w: w.update(extra="x"), ["'extra' is a str"]),
        (lambda c, w: w.update(r_w_bias=torch.zeros(10, 4)), ["r_w_bias is [10, 4], expected [4, 10]"]),
        (lambda c, w: w.update(r_w_bias=torch.zeros(4, 10).long()), ["r_w_bias is torch.int64"]),
        (lambda c, w: nan(w, "r_r_bias"), ["r_r_bias holds NaN or infinite values", "--allow-nonfinite"]),
        (lambda c, w: c.update(n_layer=10**6), ["does not describe a model", "model.layers is 1000000"]),
        (lambda c, w: c.update(cutoffs=[5, 600], tie_projs=[True] * 3), ["cutoffs is [5, 600]"]),
        (lambda c, w: c.update(tie_projs=[True]), ["tie_projs is [True]", "4 clusters"]),
        (lambda c, w: c.update(tie_weight=False), ["lacks the tensor crit.out_layers_weights.0"]),
        (lambda c, w: c.update(attn_type=1), ["attn_type is 1, expected 0"]),
        (
            lambda c, w: c.update(activation="gelu"),
            ["unknown setting model_config.activation, 'gelu'", "own-model.md"],
        ),
        (lambda c, w: c.update(adapt_inp=True), ["model_config.adapt_inp is True, expected False"]),
        (lambda c, w: c.update(d_inner=81), ["CoreNet.0.weight is [80, 40], expected [81, 40]"]),
        (
            lambda c, w: c.update(div_val=1 << 24),
            ["div_val is 16777216, and the last cluster would have a width of 0"],
        ),
    ],
)
def test_a_contradictory_checkpoint_is_refused_by_name(
    change: Callable[[dict[str, Any], dict[str, Any]], Any], words: list[str], tmp_path: Path
) -> None:
    refuse(*nvidia(change), tmp_path, words)


MASK = "module.layers.0.attn.attn.adaptive_span._mask."
SECOND = "module.layers.1.attn.attn.persistent_memory.adaptive_span._mask."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("module.out_emb.bias"), ["lacks the tensor module.out_emb.bias"]),
        (lambda w: w.update(key_pe=torch.zeros(1, 10, 128)), ["module.key_pe under two names"]),
        (lambda w: w.pop("module.layers.3.norm1.bias"), ["lacks the tensor module.layers.3.norm1.bias"]),
        (lambda w: w.update({"module.key_pe": torch.zeros(1, 7, 128)}), ["key_pe is [1, 7, 128]"]),
        (lambda w: w[f"{MASK}current_val"].fill_(1.5), ["values outside 0 to 1"]),
        (lambda w: w[f"{MASK}mask_template"].fill_(1.0), ["mask_template does not hold the numbers -127"]),
        (
            lambda w: w.update({f"{SECOND}current_val": torch.zeros(4, 1, 1)}),
            ["second copy of the layer's spans"],
        ),
    ],
)
def test_contradictory_spans_are_refused_by_name(
    change: Callable[[dict[str, Any]], Any], words: list[str], tmp_path: Path
) -> None:
    weights = read_pickle(SPAN)["model"]
    change(weights)
    refuse({"model": weights}, SPAN.parent / "corpus.pt", tmp_path, words)


def test_weights_that_are_not_finite_are_imported_on_request(tmp_path: Path) -> None:
    content, vocab = nvidia(lambda c, w: nan(w, "r_r_bias"))
    torch.save(content, tmp_path / "checkpoint.pt")
    result = xl(
        "import", tmp_path / "checkpoint.pt", "--out", tmp_path / "run", "--vocab", vocab, "--allow-nonfinite"
    )
    assert result.exit_code == 0, result.output
    assert "r_r_bias holds NaN or infinite values: `xl-export export` refuses this run" in result.output
    assert "next:" not in result.output
    assert torch.isnan(load_run(tmp_path / "run").model.state_dict()["positions.v"]).sum() == 1


def shared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of kimiyoung's model with four tables, under the names that NVIDIA's code has for them."""
    numbered = {"weight": "crit.out_layers_weights.", "bias": "crit.out_layers_biases."}
    named = {}
    for name, tensor in state.items():
        first, _, last = name.removeprefix("crit.out_layers.").partition(".")
        if not name.startswith("crit.out_layers."):
            named[name] = tensor
        elif last == "bias":
            named[numbered[last] + first] = tensor
    tied = {i: named[f"word_emb.emb_projs.{i}"] for i in range(4)}
    named = {name: x for name, x in named.items() if not re.fullmatch(r"crit\.out_projs\.[123]", name)}
    return named | {f"crit.shared_out_projs.{i}": x.clone() for i, x in tied.items()}


@pytest.mark.parametrize("damage", [False, True])
def test_shared_output_projections_are_those_of_the_input(damage: bool, tmp_path: Path) -> None:
    """NVIDIA's large model lists its input projections a second time, as `crit.shared_out_projs`."""
    source = DATA / "kimiyoung-wt103-large"
    model = json.loads((source / "config.json").read_text())["model"]
    state = shared(dict(kimiyoung.module_tensors(read_pickle(source / "model.pt"), source)))
    if damage:
        state["crit.shared_out_projs.2"] += 1
    names = [
        "n_token",
        "n_layer",
        "n_head",
        "d_model",
        "d_head",
        "d_embed",
        "div_val",
        "attn_type",
        "tie_projs",
    ]
    config = {name: model[name] for name in [*names, "tie_projs"]}
    config |= {
        "cutoffs": model["cutoffs"],
        "tie_weight": True,
        "pre_lnorm": False,
        "dropout": 0.1,
        "dropatt": 0.0,
    }
    torch.save({"model_config": config, "model_state": state}, tmp_path / "checkpoint.pt")
    options = ("--mem-len", 48, "--segment", 16, "--clamp-len", 32, "--vocab", source / "cache.pt")
    result = xl("import", tmp_path / "checkpoint.pt", "--out", tmp_path / "run", *options)
    if damage:
        refused(result, "crit.shared_out_projs.2 and word_emb.emb_projs.2 are one tensor", "they differ here")
        return
    assert xl("import", source, "--out", tmp_path / "kin", *options).exit_code == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "kin"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
