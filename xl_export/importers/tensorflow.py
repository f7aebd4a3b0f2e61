"""The importer for TensorFlow checkpoints of the original release (kimiyoung/transformer-xl, `tf/`).

If TensorFlow is installed, the checkpoint is read directly (`tensorflow_checkpoint.py`). An `.npz` file of
the variables by name can be read everywhere. These lines write it with TensorFlow:

    import numpy, tensorflow
    variables = tensorflow.train.load_checkpoint("model.ckpt-0")
    names = [name for name in variables.get_variable_to_shape_map() if "/Adam" not in name]
    numpy.savez("model.npz", **{name: variables.get_tensor(name) for name in names})

How these models compute was read from the project's code at commit 44781ed:

- The memory begins as mem_len vectors of zeros, and queries attend to them.
- With `same_length`, a query attends to mem_len keys and to its own token.
- The head's columns are in the order of the clusters.
- With `untie_r`, every layer has its own u and v.
- Input and output always share their tables. They share a projection if the output has none of its own.
- LayerNorm has an epsilon of 1e-12.

Sizes, cutoffs and options follow from the names and shapes of the variables, and every variable is read or
refused, except the optimiser's. Such a checkpoint has no other settings.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.settings import Setting, memory_rule, published
from xl_export.importers.shared.state_dict import SCALES, assumed
from xl_export.importers.shared.transformer_xl import Architecture, checkpoint, table_sizes
from xl_export.importers.shared.validated import Tensors
from xl_export.importers.shared.vocabularies import read_vocabulary

PROJECT = "TensorFlow Transformer-XL"
VOCABULARIES = ("cache.pkl", "vocab.txt", "vocab.json")
NORM_EPSILON = 1e-12  # of tf.contrib.layers.layer_norm
OTHERS = re.compile(r"global_step|beta[12]_power(_\d+)?|.*/Adam(_\d+)?")  # of the optimiser
# From variables below `transformer/` to kimiyoung's names. Kernels are [in, out] and are transposed.
NAMES = {
    "adaptive_embed/cutoff_{}/lookup_table": "word_emb.emb_layers.{}.weight",
    "adaptive_embed/cutoff_{}/proj_W": "word_emb.emb_projs.{}",
    "adaptive_embed/lookup_table": "word_emb.emb_layers.0.weight",
    "adaptive_embed/proj_W": "word_emb.emb_projs.0",
    "adaptive_softmax/cutoff_{}/b": "crit.out_layers.{}.bias",
    "adaptive_softmax/cutoff_{}/proj": "crit.out_projs.{}",
    "adaptive_softmax/cutoff_0/cluster_W": "crit.cluster_weight",
    "adaptive_softmax/cutoff_0/cluster_b": "crit.cluster_bias",
    "adaptive_softmax/bias": "crit.out_layers.0.bias",
    "layer_{}/rel_attn/qkv/kernel": "layers.{}.dec_attn.qkv_net.weight",
    "layer_{}/rel_attn/r/kernel": "layers.{}.dec_attn.r_net.weight",
    "layer_{}/rel_attn/o/kernel": "layers.{}.dec_attn.o_net.weight",
    "layer_{}/rel_attn/LayerNorm/gamma": "layers.{}.dec_attn.layer_norm.weight",
    "layer_{}/rel_attn/LayerNorm/beta": "layers.{}.dec_attn.layer_norm.bias",
    "layer_{}/ff/layer_1/kernel": "layers.{}.pos_ff.CoreNet.0.weight",
    "layer_{}/ff/layer_1/bias": "layers.{}.pos_ff.CoreNet.0.bias",
    "layer_{}/ff/layer_2/kernel": "layers.{}.pos_ff.CoreNet.3.weight",
    "layer_{}/ff/layer_2/bias": "layers.{}.pos_ff.CoreNet.3.bias",
    "layer_{}/ff/LayerNorm/gamma": "layers.{}.pos_ff.layer_norm.weight",
    "layer_{}/ff/LayerNorm/beta": "layers.{}.pos_ff.layer_norm.bias",
    "r_w_bias": "r_w_bias",
    "r_r_bias": "r_r_bias",
}
TRANSPOSED = ("/kernel", "/proj_W", "/proj")
SCOPE = "transformer/"


def recognises(opened: Source) -> bool:
    return isinstance(opened.content, dict) and any(
        str(name).startswith(SCOPE + "layer_0/") for name in opened.content
    )


def read(opened: Source, options: ImportOptions) -> Checkpoint:
    """Returns the model in an opened file of variables.

    Raises ArtefactError or ConfigError if something is missing, is wrong or cannot be expressed here.
    """
    where = opened.path
    plain = SCOPE + "adaptive_embed/lookup_table" in opened.content
    t = Tensors(
        renamed(opened.content),
        where=where,
        project=PROJECT,
        allow_nonfinite=options.allow_nonfinite,
    )
    facts = sizes(t, plain=plain)
    vocab_path = companion_file(where, VOCABULARIES, options.vocab)
    found = read_vocabulary(vocab_path, size=facts.vocab_size)
    settings = options.applied_to(PROJECT, defaults(facts, found.dataset))
    rule = memory_rule(settings, project=PROJECT, beyond_self=0, initial_memory="zeros")
    return checkpoint(
        t,
        facts,
        options=options,
        rule=rule,
        vocabulary=found,
        settings=settings,
        files=(opened.files or {"model": where}) | {"vocabulary": vocab_path},
        notes=assumed(SCALES),
    )


def renamed(variables: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Returns kimiyoung's name, the name and the tensor of each variable; one without such a name keeps its
    own.
    """
    layers = sum(str(name).endswith("/rel_attn/o/kernel") for name in variables)
    for name, variable in variables.items():
        if OTHERS.fullmatch(str(name)):
            continue
        known = translated(str(name).removeprefix(SCOPE)) if str(name).startswith(SCOPE) else None
        if (
            known in ("r_w_bias", "r_r_bias")
            and isinstance(variable, Tensor)
            and variable.dim() == 3
            and len(variable) == layers
        ):  # untie_r
            for layer, pair in enumerate(variable):
                yield f"layers.{layer}.dec_attn.{known}", name, pair
        elif (
            known is not None
            and str(name).endswith(TRANSPOSED)
            and isinstance(variable, Tensor)
            and variable.dim() == 2
        ):
            yield known, name, variable.T
        else:
            yield known or name, name, variable


def sizes(t: Tensors, *, plain: bool) -> Architecture:
    """Returns the sizes and options that follow from names and shapes.

    plain: whether div_val is 1. Then one table serves all clusters, and the biases of the output have their
    sizes.
    """
    untied = "r_w_bias" not in t
    heads, head_dim = t.peek("layers.0.dec_attn.r_w_bias" if untied else "r_w_bias", dimensions=2).shape
    vocab_size, cutoffs, d_embed, div_val = table_sizes(t)
    if plain:
        biases = [f"crit.out_layers.{i}.bias" for i in range(max(t.count("crit.out_layers"), 1))]
        ends = itertools.accumulate(t.peek(name, dimensions=1).shape[0] for name in biases)
        cutoffs = tuple(ends)[:-1]
    return Architecture(
        layers=t.count("layers"),
        d_model=t.peek("layers.0.dec_attn.o_net.weight", dimensions=2).shape[0],
        heads=heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        d_embed=d_embed,
        div_val=div_val,
        cutoffs=cutoffs,
        reversed_clusters=False,
        tie_weights=True,
        biases_in_layers=untied,
        project_same_width=plain or "word_emb.emb_projs.0" in t,
        norm_epsilon=NORM_EPSILON,
    )


def defaults(facts: Architecture, dataset: str | None) -> dict[str, Setting]:
    """Returns the evaluation that the project's scripts use for the data set.

    If the data set is unknown, the kind of the vocabulary and the size of the model decide.
    """
    if dataset == "lm1b" or facts.cutoffs[:1] == (60000,):
        return published("lm1b", facts.d_model)
    if dataset in ("enwik8", "text8") or (dataset is None and not facts.cutoffs):
        return published("enwik8 and text8", facts.d_model)
    return published("wt103", facts.d_model)


def translated(name: str) -> str | None:
    """Returns kimiyoung's name of a variable below `transformer/`; None if it has none."""
    for pattern, known in NAMES.items():
        if match := re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d{1,6})"), name):
            return known.format(*match.groups())
    return None
