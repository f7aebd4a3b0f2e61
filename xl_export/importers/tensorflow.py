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
from pathlib import Path
from typing import Any

from torch import Tensor

from xl_export.importers.shared.architecture import Architecture, table_sizes
from xl_export.importers.shared.checkpoint import Source
from xl_export.importers.shared.names import translated
from xl_export.importers.shared.settings import Setting, published
from xl_export.importers.shared.state_dict import SCALES, assumed
from xl_export.importers.transformer_xl import Project, Reading, Settings

NORM_EPSILON = 1e-12  # of tf.contrib.layers.layer_norm
OTHERS = re.compile(r"global_step|beta[12]_power(_\d+)?|.*/Adam(_\d+)?")  # of the optimiser
# From variables to kimiyoung's names. Kernels are [in, out] and are transposed.
NAMES = {
    "transformer/adaptive_embed/cutoff_{}/lookup_table": "word_emb.emb_layers.{}.weight",
    "transformer/adaptive_embed/cutoff_{}/proj_W": "word_emb.emb_projs.{}",
    "transformer/adaptive_embed/lookup_table": "word_emb.emb_layers.0.weight",
    "transformer/adaptive_embed/proj_W": "word_emb.emb_projs.0",
    "transformer/adaptive_softmax/cutoff_{}/b": "crit.out_layers.{}.bias",
    "transformer/adaptive_softmax/cutoff_{}/proj": "crit.out_projs.{}",
    "transformer/adaptive_softmax/cutoff_0/cluster_W": "crit.cluster_weight",
    "transformer/adaptive_softmax/cutoff_0/cluster_b": "crit.cluster_bias",
    "transformer/adaptive_softmax/bias": "crit.out_layers.0.bias",
    "transformer/layer_{}/rel_attn/qkv/kernel": "layers.{}.dec_attn.qkv_net.weight",
    "transformer/layer_{}/rel_attn/r/kernel": "layers.{}.dec_attn.r_net.weight",
    "transformer/layer_{}/rel_attn/o/kernel": "layers.{}.dec_attn.o_net.weight",
    "transformer/layer_{}/rel_attn/LayerNorm/gamma": "layers.{}.dec_attn.layer_norm.weight",
    "transformer/layer_{}/rel_attn/LayerNorm/beta": "layers.{}.dec_attn.layer_norm.bias",
    "transformer/layer_{}/ff/layer_1/kernel": "layers.{}.pos_ff.CoreNet.0.weight",
    "transformer/layer_{}/ff/layer_1/bias": "layers.{}.pos_ff.CoreNet.0.bias",
    "transformer/layer_{}/ff/layer_2/kernel": "layers.{}.pos_ff.CoreNet.3.weight",
    "transformer/layer_{}/ff/layer_2/bias": "layers.{}.pos_ff.CoreNet.3.bias",
    "transformer/layer_{}/ff/LayerNorm/gamma": "layers.{}.pos_ff.layer_norm.weight",
    "transformer/layer_{}/ff/LayerNorm/beta": "layers.{}.pos_ff.layer_norm.bias",
    "transformer/r_w_bias": "r_w_bias",
    "transformer/r_r_bias": "r_r_bias",
}
TRANSPOSED = ("/kernel", "/proj_W", "/proj")


class TensorFlow(Project):
    title = "TensorFlow Transformer-XL"
    vocabularies = ("cache.pkl", "vocab.txt", "vocab.json")
    names = NAMES
    reversed_clusters = False
    initial_memory = "zeros"
    beyond_self = 0

    def recognises(self, opened: Source) -> bool:
        return isinstance(opened.content, dict) and any(
            str(name).startswith("transformer/layer_0/") for name in opened.content
        )

    def settings(self, opened: Source) -> Settings:
        return {}  # names and shapes of the variables show all that there is

    def weights(self, opened: Source) -> tuple[dict[str, Path], Iterator[tuple[Any, Any, Any]]]:
        return opened.files or {"model": opened.path}, turned(opened.content)

    def architecture(self, r: Reading) -> Architecture:
        t = r.t
        untied = "r_w_bias" not in t
        heads, head_dim = t.peek("layers.0.dec_attn.r_w_bias" if untied else "r_w_bias", dimensions=2).shape
        sizes = table_sizes(t)
        # With div_val 1 one table serves all clusters, and the biases of the output have their sizes.
        plain = t.spell("word_emb.emb_layers.0.weight") == "transformer/adaptive_embed/lookup_table"
        if plain:
            biases = [f"crit.out_layers.{i}.bias" for i in range(max(t.count("crit.out_layers"), 1))]
            ends = itertools.accumulate(t.peek(name, dimensions=1).shape[0] for name in biases)
            sizes["cutoffs"] = tuple(ends)[:-1]
        return Architecture(
            layers=t.count("layers"),
            d_model=t.peek("layers.0.dec_attn.o_net.weight", dimensions=2).shape[0],
            heads=heads,
            head_dim=head_dim,
            tie_weights=True,
            biases_in_layers=untied,
            project_same_width=plain or "word_emb.emb_projs.0" in t,
            norm_epsilon=NORM_EPSILON,
            **sizes,
        )

    def defaults(self, r: Reading) -> dict[str, Setting]:
        """The evaluation of the project's scripts for the data set.

        If the data set is unknown, the kind of the vocabulary and the size of the model decide.
        """
        if r.dataset == "lm1b" or r.facts.cutoffs[:1] == (60000,):
            return published("lm1b", r.facts.d_model)
        if r.dataset in ("enwik8", "text8") or (r.dataset is None and not r.facts.cutoffs):
            return published("enwik8 and text8", r.facts.d_model)
        return published("wt103", r.facts.d_model)

    def notes(self, r: Reading) -> tuple[str, ...]:
        return assumed(SCALES)


PROJECT = TensorFlow()


def turned(variables: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """The variables without the optimiser's; kernels are transposed, and u and v are cut into layers."""
    layers = sum(str(name).endswith("/rel_attn/o/kernel") for name in variables)
    for name, variable in variables.items():
        if OTHERS.fullmatch(str(name)):
            continue
        dimensions = variable.dim() if isinstance(variable, Tensor) else 0
        known = translated(str(name), NAMES)
        if known in ("r_w_bias", "r_r_bias") and dimensions == 3 and len(variable) == layers:  # untie_r
            for layer, pair in enumerate(variable):
                yield f"layers.{layer}.dec_attn.{known}", name, pair
        elif known != name and str(name).endswith(TRANSPOSED) and dimensions == 2:
            yield name, name, variable.T
        else:
            yield name, name, variable
