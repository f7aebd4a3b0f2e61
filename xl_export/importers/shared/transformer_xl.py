"""Converts a Transformer-XL from the names of kimiyoung's PyTorch code to the names of this project.

The importers for NVIDIA, Hugging Face and TensorFlow rename their tensors to these names first. For layer l
and cluster i of width d_i = d_embed // div_val**i they are (with div_val 1 there is one table for all):

    word_emb.emb_layers.i.weight [n_i, d_i]      word_emb.emb_projs.i [D, d_i]       r_w_bias, r_r_bias [H, K]
    crit.out_layers.i.{weight,bias} [n_i, d_i]   crit.out_projs.i [D, d_i]           pos_emb.inv_freq [D / 2]
    crit.cluster_{weight,bias} [tails, d_embed]  layers.l.dec_attn.{qkv_net,r_net,o_net,layer_norm},
    layers.l.pos_ff.…

Attention type 0 is the paper's. Type 1 has learned vectors by distance (`shaw`). Type 2 adds sinusoids
to the input of the model, and type 3 adds learned vectors to the input of every layer. Types 2 and 3 count
positions back from the last token of the segment.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from trainer.model.config import ModelConfig, VocabularyConfig
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions
from xl_export.importers.shared.settings import Setting
from xl_export.importers.shared.validated import Tensors, sizes_of
from xl_export.importers.shared.vocabularies import ReadVocabulary

POSITIONS: dict[int, str] = {0: "relative", 1: "shaw", 2: "absolute", 3: "per-layer"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and options of a checkpoint.

    tie_weights, and tie_projections for each cluster: see `convert_vocabulary`.
    """

    layers: int
    d_model: int
    heads: int
    head_dim: int
    vocab_size: int
    d_embed: int
    div_val: int
    cutoffs: tuple[int, ...]
    # Whether the head's columns for the tail clusters are stored in reverse order.
    reversed_clusters: bool
    d_ff: int | None = None  # the width of the feed-forward network; None if only the tensors show it
    attention_type: int = 0
    pre_norm: bool = False
    biases_in_layers: bool = False  # whether every layer has its own u and v
    project_same_width: bool = True
    tie_weights: bool | None = None
    tie_projections: tuple[bool, ...] | None = None
    norm_epsilon: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    context: int = 0  # the number of sinusoids for type 2


def table_sizes(t: Tensors) -> tuple[int, tuple[int, ...], int, int]:
    """Returns vocab_size, cutoffs, d_embed and div_val by the input tables, of which each cluster has one."""
    count = max(t.count("word_emb.emb_layers"), 1)
    shapes = [t.peek(f"word_emb.emb_layers.{i}.weight", dimensions=2).shape for i in range(count)]
    *cutoffs, vocab_size = itertools.accumulate(shape[0] for shape in shapes)
    d_embed = shapes[0][1]
    div_val = max(d_embed // max(shapes[1][1], 1), 1) if cutoffs else 1
    return vocab_size, tuple(cutoffs), d_embed, div_val


def checkpoint(
    t: Tensors,
    facts: Architecture,
    *,
    options: ImportOptions,
    rule: MemoryRule,
    vocabulary: ReadVocabulary,
    settings: dict[str, Setting],
    files: dict[str, Path],
    notes: tuple[str, ...] = (),
) -> Checkpoint:
    """Returns the model with its memory rule and vocabulary.

    notes: sentences of the format; those on vocabulary, weights and settings follow them. Raises
    ArtefactError for a tensor that is missing, has another shape or has no place in the model.
    """
    config, converted = convert_vocabulary(
        t,
        _config(t, facts),
        reversed_clusters=facts.reversed_clusters,
        tie_weights=facts.tie_weights,
        tie_projections=facts.tie_projections,
    )
    converted |= _positions(t, facts, config)
    for layer in range(config.layers):
        converted |= _block(t, facts, layer, config.d_ff)
    t.finish()
    return Checkpoint(
        config=config,
        tensors=converted,
        rule=rule,
        vocab=vocabulary.vocab,
        settings=settings,
        files=files,
        notes=(*notes, *vocabulary.notes, *options.notes_on(t, config, settings)),
    )


def _config(t: Tensors, facts: Architecture) -> ModelConfig:
    """Returns the configuration without its ties.

    The checks of ModelConfig come before every loop over sizes from the checkpoint.
    """
    kind = facts.attention_type
    if kind == 3 and facts.heads * facts.head_dim != facts.d_model:
        raise ArtefactError(
            f"{t.where}: attn_type 3 adds {facts.heads} heads of {facts.head_dim} to inputs of width "
            f"{facts.d_model}; expected the same width."
        )
    learned = t.peek("r_emb", dimensions=4).shape[1] if kind in (1, 3) else 0
    with sizes_of(t.where):
        return ModelConfig(
            layers=facts.layers,
            d_model=facts.d_model,
            heads=facts.heads,
            head_dim=facts.head_dim,
            d_ff=facts.d_ff or t.peek("layers.0.pos_ff.CoreNet.0.weight", dimensions=2).shape[0],
            positions=POSITIONS[kind],
            context=facts.context if kind == 2 else learned,
            from_segment_end=kind in (2, 3),
            stored_frequencies="pos_emb.inv_freq" in t,
            tie_biases=not facts.biases_in_layers,
            pre_norm=facts.pre_norm,
            query_norm=kind in (0, 1) or not facts.pre_norm,
            norm_epsilon=facts.norm_epsilon,
            dropout=facts.dropout,
            attention_dropout=facts.attention_dropout,
            vocab_size=facts.vocab_size,
            vocabulary=VocabularyConfig(
                cutoffs=facts.cutoffs,
                d_embed=facts.d_embed,
                div_val=facts.div_val,
                project_same_width=facts.project_same_width,
            ),
        )


def _positions(t: Tensors, facts: Architecture, config: ModelConfig) -> dict[str, Tensor]:
    L, D, H, K, R = config.layers, config.d_model, config.heads, config.head_dim, config.context
    converted = (
        {"positions.frequencies": t.take("pos_emb.inv_freq", D // 2)} if config.stored_frequencies else {}
    )
    if facts.attention_type == 0:
        converted["positions.u"], converted["positions.v"] = (
            _head_biases(t, name, config) for name in ("r_w_bias", "r_r_bias")
        )
        for layer in range(L):
            converted[f"positions.project.{layer}.weight"] = t.take(
                f"layers.{layer}.dec_attn.r_net.weight", H * K, D
            )
    elif facts.attention_type == 1:  # the last row of their table is the nearest position
        converted["positions.u"] = t.take("r_w_bias", L, H, K)
        converted["positions.table"] = t.take("r_emb", L, R, H, K).flip(1)
        converted["positions.table_bias"] = t.take("r_bias", L, R, H).flip(1)
    elif facts.attention_type == 3:
        converted["positions.table"] = t.take("r_emb", L, R, H, K).flip(1).reshape(L, R, D)
    return converted


def _head_biases(t: Tensors, name: str, config: ModelConfig) -> Tensor:
    """Returns u or v: one for each layer, or one for all layers, which the layers may list again."""
    size = (config.heads, config.head_dim)
    places = [f"layers.{layer}.dec_attn.{name}" for layer in range(config.layers)]
    if not config.tie_biases:
        return torch.stack([t.take(place, *size) for place in places])
    found = [t.take(place, *size) for place in (name, *places) if place in t] or [t.take(name, *size)]
    if not all(same(found[0], other) for other in found):
        raise ArtefactError(
            f"{t.where}: {name} is shared by all layers in the configuration, and the layers hold different "
            "values; copy the checkpoint again."
        )
    return found[0][None]


def _block(t: Tensors, facts: Architecture, layer: int, d_ff: int) -> dict[str, Tensor]:
    D = facts.d_model
    width = facts.heads * facts.head_dim
    source = f"layers.{layer}."
    target = f"blocks.{layer}."
    if facts.attention_type in (0, 1):
        query, key, value = t.take(f"{source}dec_attn.qkv_net.weight", 3 * width, D).chunk(3)
    else:
        query = t.take(f"{source}dec_attn.q_net.weight", width, D)
        key, value = t.take(f"{source}dec_attn.kv_net.weight", 2 * width, D).chunk(2)
    return {
        f"{target}query.weight": query,
        f"{target}key.weight": key,
        f"{target}value.weight": value,
        f"{target}out.weight": t.take(f"{source}dec_attn.o_net.weight", D, width),
        f"{target}attention_norm.weight": t.take(f"{source}dec_attn.layer_norm.weight", D),
        f"{target}attention_norm.bias": t.take(f"{source}dec_attn.layer_norm.bias", D),
        f"{target}expand.weight": t.take(f"{source}pos_ff.CoreNet.0.weight", d_ff, D),
        f"{target}expand.bias": t.take(f"{source}pos_ff.CoreNet.0.bias", d_ff),
        f"{target}contract.weight": t.take(f"{source}pos_ff.CoreNet.3.weight", D, d_ff),
        f"{target}contract.bias": t.take(f"{source}pos_ff.CoreNet.3.bias", D),
        f"{target}feed_forward_norm.weight": t.take(f"{source}pos_ff.layer_norm.weight", D),
        f"{target}feed_forward_norm.bias": t.take(f"{source}pos_ff.layer_norm.bias", D),
    }


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
    file. If one of the two is None, tensors that are absent or have equal values are tied.

    Raises ArtefactError if a tensor is missing, has another shape, or is tied and differs.
    """
    clusters = config.clusters
    D = config.d_model
    tables = _tables(t, "word_emb.emb_layers.{}.weight", config)
    converted = {f"vocabulary.table.{i}": table for i, table in enumerate(tables)}
    output = tables
    if "crit.out_layers.0.weight" in t or tie_weights is False:
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
        out = into if name not in t and wanted is not False else t.take(name, D, cluster.width)
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
