"""Training steps of the papers' public code, with the weights of a model of this project.

The code runs in this process, in turns with this project's own steps, so that both are timed alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.references.training import PROJECTS, ReferenceTraining
from runtimes.base.errors import ConfigError
from trainer.model.model import LanguageModel
from trainer.training.state import Training


def reference_step(
    project: str, folder: Path, training: Training, tokens_BN: np.ndarray
) -> Callable[[], float]:
    """A function that trains one step of the code in `folder` and returns its loss in nats.

    It begins with the weights of `training`, and reads the same lanes [B, N] with the same optimiser.
    """
    config = training.config
    path = list(sys.path)
    try:
        model = PROJECTS[project][1](folder, config.model, config.training)
    finally:
        sys.path[:] = path  # one of the projects has modules that are named as packages of this one
    _copy(model.model, WEIGHTS[project](training.model))
    return ReferenceTraining(model, config, tokens_BN).step


def _of_transformer_xl(ours: LanguageModel) -> dict[str, Tensor]:
    """The weights by the names that the code of Dai et al. 2019 gives them."""
    names = {
        "word_emb.emb_layers.0.weight": ours.vocabulary.table["0"],
        "crit.out_layers.0.weight": ours.vocabulary.table["0"],
        "crit.out_layers.0.bias": ours.vocabulary.output_bias["0"],
        "r_w_bias": ours.get_parameter("positions.u")[0],
        "r_r_bias": ours.get_parameter("positions.v")[0],
    }
    for i in range(ours.config.layers):
        part = f"layers.{i}"
        block = f"blocks.{i}"
        own = {name: tensor for name, tensor in ours.state_dict().items() if name.startswith(f"{block}.")}
        names[f"{part}.dec_attn.qkv_net.weight"] = torch.cat(
            [own[f"{block}.{name}.weight"] for name in ("query", "key", "value")]
        )
        names[f"{part}.dec_attn.r_net.weight"] = ours.get_parameter(f"positions.project.{i}.weight")
        names[f"{part}.dec_attn.o_net.weight"] = own[f"{block}.out.weight"]
        for kind in ("weight", "bias"):
            names[f"{part}.dec_attn.layer_norm.{kind}"] = own[f"{block}.attention_norm.{kind}"]
            names[f"{part}.pos_ff.layer_norm.{kind}"] = own[f"{block}.feed_forward_norm.{kind}"]
            names[f"{part}.pos_ff.CoreNet.0.{kind}"] = own[f"{block}.expand.{kind}"]
            names[f"{part}.pos_ff.CoreNet.3.{kind}"] = own[f"{block}.contract.{kind}"]
    return names


def _of_adaptive_span(ours: LanguageModel) -> dict[str, Tensor]:
    """The weights by the names that the code of Sukhbaatar et al. 2019a gives them."""
    names = {
        "in_emb.weight": ours.vocabulary.table["0"],
        "out_emb.weight": ours.vocabulary.output_table["0"],
        "out_emb.bias": ours.vocabulary.output_bias["0"],
        # Column l is for the distance S - l. A token does not see itself.
        "key_pe": ours.get_parameter("positions.table")[1:].flip(0).T[None],
    }
    parts = {"proj_query": "query", "proj_key": "key", "proj_val": "value", "proj_out": "out"}
    for i in range(ours.config.layers):
        for theirs, name in parts.items():
            names[f"layers.{i}.attn.{theirs}.weight"] = ours.get_parameter(f"blocks.{i}.{name}.weight")
        share = ours.get_parameter(f"blocks.{i}.span.share")
        names[f"layers.{i}.attn.attn.adaptive_span._mask.current_val"] = share[:, None, None]
        pairs = (("norm1", "attention_norm"), ("norm2", "feed_forward_norm"), ("ff.fc1", "expand"))
        for theirs, name in (*pairs, ("ff.fc2", "contract")):
            for kind in ("weight", "bias"):
                names[f"layers.{i}.{theirs}.{kind}"] = ours.get_parameter(f"blocks.{i}.{name}.{kind}")
    return names


WEIGHTS = {"transformer-xl": _of_transformer_xl, "adaptive-span": _of_adaptive_span}


def _copy(reference: nn.Module, values: dict[str, Tensor]) -> None:
    """Gives every parameter of the public code its value; raises ConfigError where it has others."""
    own = dict(reference.named_parameters())
    if missing := sorted(own.keys() - values.keys()):
        raise ConfigError(
            f"the public code has a parameter {missing[0]}, which is not known; give its published version."
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(values[name])
