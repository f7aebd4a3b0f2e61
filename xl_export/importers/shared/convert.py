"""Converts a Transformer-XL from the names of kimiyoung's PyTorch code to the names of this project.

For layer l and cluster i of width d_i = d_embed // div_val**i they are (with div_val 1 there is one table for
all clusters):

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

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from trainer.model.config import ModelConfig, VocabularyConfig
from xl_export.importers.shared.architecture import Architecture
from xl_export.importers.shared.validated import Tensors, sizes_of

POSITIONS: dict[int, str] = {0: "relative", 1: "shaw", 2: "absolute", 3: "per-layer"}
# The parts of a layer by their names here: the name below `layers.l.`, and the letters of the shape.
ATTENTION = {
    "out.weight": ("dec_attn.o_net.weight", "DW"),
    "attention_norm.weight": ("dec_attn.layer_norm.weight", "D"),
    "attention_norm.bias": ("dec_attn.layer_norm.bias", "D"),
}
FEED_FORWARD = {
    "expand.weight": ("pos_ff.CoreNet.0.weight", "FD"),
    "expand.bias": ("pos_ff.CoreNet.0.bias", "F"),
    "contract.weight": ("pos_ff.CoreNet.3.weight", "DF"),
    "contract.bias": ("pos_ff.CoreNet.3.bias", "D"),
    "feed_forward_norm.weight": ("pos_ff.layer_norm.weight", "D"),
    "feed_forward_norm.bias": ("pos_ff.layer_norm.bias", "D"),
}
QUERY_KEY_VALUE = {"q": "query", "k": "key", "v": "value"}


def model_config(t: Tensors, facts: Architecture) -> ModelConfig:
    """The configuration without its ties.

    The checks of ModelConfig come before every loop over sizes from the checkpoint.
    """
    kind = facts.attention_type
    if kind == 3 and facts.heads * facts.head_dim != facts.d_model:
        raise ArtefactError(
            f"{t.where}: attn_type 3 adds {facts.heads} heads of {facts.head_dim} to inputs of width "
            f"{facts.d_model}; expected the same width."
        )
    learned = t.peek("r_emb", dimensions=4).shape[1] if kind in (1, 3) else 0
    d_ff = facts.d_ff
    if d_ff is None:
        d_ff = t.peek("layers.0.pos_ff.CoreNet.0.weight", dimensions=2).shape[0]
    fields = {
        "layers": facts.layers,
        "d_model": facts.d_model,
        "heads": facts.heads,
        "head_dim": facts.head_dim,
        "d_ff": d_ff,
        "positions": POSITIONS[kind],
        "context": learned,
        "from_segment_end": kind in (2, 3),
        "stored_frequencies": "pos_emb.inv_freq" in t,
        "tie_biases": not facts.biases_in_layers,
        "pre_norm": facts.pre_norm,
        "query_norm": kind in (0, 1) or not facts.pre_norm,
        "norm_epsilon": facts.norm_epsilon,
        "dropout": facts.dropout,
        "attention_dropout": facts.attention_dropout,
        "vocab_size": facts.vocab_size,
    }
    with sizes_of(t.where):
        vocabulary = VocabularyConfig(
            cutoffs=facts.cutoffs,
            d_embed=facts.d_embed,
            div_val=facts.div_val,
            project_same_width=facts.project_same_width,
        )
        return ModelConfig(**{**fields, "vocabulary": vocabulary, **facts.more})


def convert_positions(t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of positions, and of u and v."""
    L, D, H, K, R = config.layers, config.d_model, config.heads, config.head_dim, config.context
    converted = (
        {"positions.frequencies": t.take("pos_emb.inv_freq", D // 2)} if config.stored_frequencies else {}
    )
    if config.positions == "relative":
        converted["positions.u"] = _head_biases(t, "r_w_bias", config)
        converted["positions.v"] = _head_biases(t, "r_r_bias", config)
        for layer in range(L):
            converted[f"positions.project.{layer}.weight"] = t.take(
                f"layers.{layer}.dec_attn.r_net.weight", H * K, D
            )
    elif config.positions == "shaw":  # the last row of their table is the nearest position
        converted["positions.u"] = t.take("r_w_bias", L, H, K)
        converted["positions.table"] = t.take("r_emb", L, R, H, K).flip(1)
        converted["positions.table_bias"] = t.take("r_bias", L, R, H).flip(1)
    elif config.positions == "per-layer":
        converted["positions.table"] = t.take("r_emb", L, R, H, K).flip(1).reshape(L, R, D)
    return converted


def _head_biases(t: Tensors, name: str, config: ModelConfig) -> Tensor:
    """u or v: one for each layer, or one for all layers, which the layers may list again."""
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


def convert_layer(
    t: Tensors, config: ModelConfig, layer: int, projections: tuple[str, ...]
) -> dict[str, Tensor]:
    """The tensors of one layer. projections: the letters of those that are one tensor, such as q and kv."""
    sizes = {"D": config.d_model, "W": config.heads * config.head_dim, "F": config.d_ff}
    source = f"layers.{layer}."
    converted = {}
    for letters in projections:
        whole = t.take(f"{source}dec_attn.{letters}_net.weight", len(letters) * sizes["W"], sizes["D"])
        for letter, part in zip(letters, whole.chunk(len(letters)), strict=True):
            converted[f"{QUERY_KEY_VALUE[letter]}.weight"] = part
    for mine, (name, shape) in (ATTENTION | (FEED_FORWARD if config.d_ff else {})).items():
        converted[mine] = t.take(source + name, *(sizes[letter] for letter in shape))
    return converted


def convert_vocabulary(
    t: Tensors,
    config: ModelConfig,
    *,
    reversed_clusters: bool,
    tie_weights: bool | None = None,
    tie_projections: tuple[bool, ...] | None = None,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration with its ties, and the tensors of embedding and output layer.

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
    """The tables of all clusters; with div_val 1 they are slices of one table."""
    if config.vocabulary.div_val == 1:
        whole = t.take(name.format(0), config.vocab_size, config.clusters[0].width)
        return [whole[c.first : c.last] for c in config.clusters]
    return [t.take(name.format(i), c.last - c.first, c.width) for i, c in enumerate(config.clusters)]


def _biases(t: Tensors, config: ModelConfig) -> list[Tensor]:
    """The output biases of all clusters; with div_val 1 slices of one tensor, except in TensorFlow's code."""
    name = "crit.out_layers.{}.bias"
    if config.vocabulary.div_val == 1 and name.format(1) not in t:
        whole = t.take(name.format(0), config.vocab_size)
        return [whole[c.first : c.last] for c in config.clusters]
    return [t.take(name.format(i), c.last - c.first) for i, c in enumerate(config.clusters)]


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold equal values, as a file that lists tied tensors twice has them."""
    return first is second or (first.shape == second.shape and torch.equal(first, second))
