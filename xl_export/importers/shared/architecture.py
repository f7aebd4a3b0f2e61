"""Sizes and options of a Transformer-XL, from the settings of a checkpoint or the shapes of its tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtimes.base.errors import ConfigError
from xl_export.importers.shared.checkpoint import ImportOptions
from xl_export.importers.shared.validated import Tensors

# From the words of the projects, whose codes are copies of kimiyoung's, to the fields of `Architecture`.
WORDS = {
    "n_layer": "layers",
    "n_head": "heads",
    "d_head": "head_dim",
    "n_token": "vocab_size",
    "d_inner": "d_ff",
    "attn_type": "attention_type",
    "pre_lnorm": "pre_norm",
    "untie_r": "biases_in_layers",
    "tie_weight": "tie_weights",
    "tie_word_embeddings": "tie_weights",
    "tie_projs": "tie_projections",
    "layer_norm_epsilon": "norm_epsilon",
    "dropatt": "attention_dropout",
}
FRACTIONS = {"norm_epsilon", "dropout", "attention_dropout"}
LISTS = {"cutoffs", "tie_projections"}


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
    d_ff: int | None = None
    """Width of the feed-forward network; None if only the tensors show it."""
    attention_type: int = 0
    pre_norm: bool = False
    biases_in_layers: bool = False
    """Whether every layer has its own u and v."""
    project_same_width: bool = True
    tie_weights: bool | None = None
    tie_projections: tuple[bool, ...] | None = None
    norm_epsilon: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of `ModelConfig`, by name."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Architecture:
        """The architecture in settings that were checked; other settings are ignored."""
        fields = {field.name for field in dataclasses.fields(cls)}
        given = {WORDS.get(word, word): value for word, value in settings.items() if value is not None}
        found = {name: value for name, value in given.items() if name in fields}
        found |= {name: float(found[name]) for name in FRACTIONS & set(found)}
        found |= {name: tuple(found[name]) for name in LISTS & set(found)}
        return cls(**{"d_embed": found["d_model"]} | found)


def table_sizes(t: Tensors) -> dict[str, Any]:
    """The fields of `Architecture` that the input tables show, of which each cluster has one."""
    count = max(t.count("word_emb.emb_layers"), 1)
    shapes = [t.peek(f"word_emb.emb_layers.{i}.weight", dimensions=2).shape for i in range(count)]
    *cutoffs, vocab_size = itertools.accumulate(shape[0] for shape in shapes)
    d_embed = shapes[0][1]
    div_val = max(d_embed // max(shapes[1][1], 1), 1) if cutoffs else 1
    return {"vocab_size": vocab_size, "cutoffs": tuple(cutoffs), "d_embed": d_embed, "div_val": div_val}


def from_tensors(t: Tensors, options: ImportOptions) -> Architecture:
    """The architecture of a bare state dict; `n_head`, `cutoffs` and `pre_lnorm` may not follow from it.

    Raises ConfigError if the user must give one of them.
    """
    kind = _attention_type(t)
    d_model = t.peek("layers.0.dec_attn.o_net.weight", dimensions=2).shape[0]
    untied = kind == 0 and "r_w_bias" not in t
    heads, head_dim = _heads(t, options, kind=kind, untied=untied)
    sizes = table_sizes(t)
    if not sizes["cutoffs"]:
        sizes["cutoffs"] = _cutoffs(t, options)
        # Only a div_val above 1 has a projection between equal widths.
        projected = sizes["d_embed"] == d_model and "word_emb.emb_projs.0" in t
        sizes["div_val"] = 2 if not sizes["cutoffs"] and projected else 1
    return Architecture(
        layers=t.count("layers"),
        d_model=d_model,
        heads=heads,
        head_dim=head_dim,
        attention_type=kind,
        pre_norm=bool(options.chosen("pre_lnorm")),
        biases_in_layers=untied,
        **sizes,
    )


def _attention_type(t: Tensors) -> int:
    if "layers.0.dec_attn.r_net.weight" in t:
        return 0
    if "r_emb" in t:
        return 1 if "layers.0.dec_attn.qkv_net.weight" in t else 3
    return 2 if "layers.0.dec_attn.q_net.weight" in t else 0


def _heads(t: Tensors, options: ImportOptions, *, kind: int, untied: bool) -> tuple[int, int]:
    """The number of heads and their width."""
    if kind == 0:
        pair = t.peek("layers.0.dec_attn.r_w_bias" if untied else "r_w_bias", dimensions=2).shape
        return pair[0], pair[1]
    if kind in (1, 3):
        table = t.peek("r_emb", dimensions=4).shape
        return table[2], table[3]
    width = t.peek("layers.0.dec_attn.q_net.weight", dimensions=2).shape[0]
    heads = options.chosen("n_head")
    if heads is None or width % heads:
        raise ConfigError(
            f"{t.where} is a bare state dict with queries of {width} numbers, and n_head is "
            f'{"not given" if heads is None else heads}; give "n_head", a divisor of {width}, in a file with '
            "--settings."
        )
    return heads, width // heads


def _cutoffs(t: Tensors, options: ImportOptions) -> tuple[int, ...]:
    """The first token of each tail cluster if all clusters share one table."""
    if "crit.cluster_weight" not in t:
        return ()
    tails = t.peek("crit.cluster_weight", dimensions=2).shape[0]
    chosen = options.chosen("cutoffs")
    if chosen is None or len(chosen) != tails:
        raise ConfigError(
            f"{t.where} is a bare state dict with {tails} tail clusters, and cutoffs "
            f"{'are not given' if chosen is None else f'has {len(chosen)} numbers'}; give "
            f'"cutoffs": [{tails} ascending token ids] in a file with --settings.'
        )
    return tuple(chosen)
