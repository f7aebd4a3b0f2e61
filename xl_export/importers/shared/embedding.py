"""Converts the embedding and the output layer, which all formats share with kimiyoung's code.

With div_val 1 there is one table for all clusters. The names of the tensors are listed in `transformer_xl`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from trainer.model.config import ModelConfig
from xl_export.importers.shared.validated import Tensors


def convert_vocabulary(
    t: Tensors,
    config: ModelConfig,
    *,
    reversed_clusters: bool,
    tie_weights: bool | None = None,
    tie_projections: tuple[bool, ...] | None = None,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns the configuration with its ties, and the tensors of embedding and output layer.

    config: the configuration so far; its clusters are known. reversed_clusters: whether the head's columns
    for the tail clusters are stored in reverse order. tie_weights: whether input and output share their
    tables. tie_projections: the same for the projection of each cluster. A tied tensor may be absent from the
    file. If one of the two is None, tensors with equal values count as tied.

    Raises ArtefactError if a tensor is missing, has another shape, or is tied and differs.
    """
    clusters = config.clusters
    D = config.d_model
    tables = _tables(t, "word_emb.emb_layers.{}.weight", config)
    converted = {f"vocabulary.table.{i}": table for i, table in enumerate(tables)}
    output = tables
    if "crit.out_layers.0.weight" in t or not tie_weights:
        output = _tables(t, "crit.out_layers.{}.weight", config)
    tied = tie_weights is not False and all(same(*pair) for pair in zip(tables, output, strict=True))
    if tie_weights and not tied:
        raise ArtefactError(
            f"{t.where}: the configuration ties the output tables to the input tables, and their values "
            "differ; copy the checkpoint again."
        )
    if not tied:
        converted |= {f"vocabulary.output_table.{i}": table for i, table in enumerate(output)}
    converted |= {f"vocabulary.output_bias.{i}": bias for i, bias in enumerate(_biases(t, config))}

    ties = []
    for i, cluster in enumerate(clusters):
        if not cluster.projected:
            ties.append(True)
            continue
        # With div_val 1 the input has one projection, and the output has one for each cluster.
        shared = config.vocabulary.div_val == 1 and i > 0
        into = (
            converted["vocabulary.projection.0"]
            if shared
            else t.take(f"word_emb.emb_projs.{i}", D, cluster.width)
        )
        converted[f"vocabulary.projection.{i}"] = into
        wanted = None if tie_projections is None else tie_projections[i]
        name = f"crit.out_projs.{i}"
        out = into if wanted and name not in t else t.take(name, D, cluster.width)
        if wanted and not same(into, out):
            raise ArtefactError(
                f"{t.where}: the configuration ties {t.spell(name)} to the projection of the input, and "
                "their values differ; copy the checkpoint again."
            )
        ties.append(same(into, out) if wanted is None else wanted)
        if not ties[-1]:
            converted[f"vocabulary.output_projection.{i}"] = out

    if tails := len(clusters) - 1:
        weight = t.take("crit.cluster_weight", tails, clusters[0].width)
        bias = t.take("crit.cluster_bias", tails)
        converted["vocabulary.cluster_table"] = weight.flip(0) if reversed_clusters else weight
        converted["vocabulary.cluster_bias"] = bias.flip(0) if reversed_clusters else bias
    vocabulary = dataclasses.replace(config.vocabulary, tie_weights=tied, tie_projections=tuple(ties))
    return dataclasses.replace(config, vocabulary=vocabulary), converted


def _tables(t: Tensors, name: str, config: ModelConfig) -> list[Tensor]:
    """Returns the tables of all clusters; with div_val 1 they are slices of one table."""
    if config.vocabulary.div_val == 1:
        whole = t.take(name.format(0), config.vocab_size, config.clusters[0].width)
        return [whole[c.first : c.last] for c in config.clusters]
    return [t.take(name.format(i), c.last - c.first, c.width) for i, c in enumerate(config.clusters)]


def _biases(t: Tensors, config: ModelConfig) -> list[Tensor]:
    """Returns the output biases of all clusters.

    With div_val 1 they are slices of one tensor, except in TensorFlow's code.
    """
    name = "crit.out_layers.{}.bias"
    if config.vocabulary.div_val == 1 and name.format(1) not in t:
        whole = t.take(name.format(0), config.vocab_size)
        return [whole[c.first : c.last] for c in config.clusters]
    return [t.take(name.format(i), c.last - c.first) for i, c in enumerate(config.clusters)]


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold equal values, as a file that lists tied tensors twice has them."""
    return first is second or (first.shape == second.shape and torch.equal(first, second))
