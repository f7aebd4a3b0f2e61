"""The variables that TensorFlow's code would have for a model."""

from __future__ import annotations

import numpy as np

from xl_export.importers.shared.checkpoint import Checkpoint


def variables_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """A model as the variables of the original release's `tf/model.py`; kernels are [in, out]."""
    model = checkpoint.config
    state = {name: tensor.numpy() for name, tensor in checkpoint.tensors.items()}
    found = {}

    def put(name: str, array: np.ndarray) -> None:
        found[f"transformer/{name}"] = np.ascontiguousarray(array)

    for kind, name in (("r_w_bias", "u"), ("r_r_bias", "v")):
        put(kind, state[f"positions.{name}"][0] if model.tie_biases else state[f"positions.{name}"])
    for layer in range(model.layers):
        block, scope = f"blocks.{layer}.", f"layer_{layer}/"
        qkv = np.concatenate([state[f"{block}{kind}.weight"] for kind in ("query", "key", "value")])
        put(f"{scope}rel_attn/qkv/kernel", qkv.T)
        put(f"{scope}rel_attn/r/kernel", state[f"positions.project.{layer}.weight"].T)
        put(f"{scope}rel_attn/o/kernel", state[f"{block}out.weight"].T)
        for number, name in ((1, "expand"), (2, "contract")):
            put(f"{scope}ff/layer_{number}/kernel", state[f"{block}{name}.weight"].T)
            put(f"{scope}ff/layer_{number}/bias", state[f"{block}{name}.bias"])
        for place, name in (("rel_attn", "attention_norm"), ("ff", "feed_forward_norm")):
            put(f"{scope}{place}/LayerNorm/gamma", state[f"{block}{name}.weight"])
            put(f"{scope}{place}/LayerNorm/beta", state[f"{block}{name}.bias"])
    many, clusters = model.vocabulary.div_val > 1, model.clusters
    for i, cluster in enumerate(clusters):
        tables = [state[f"vocabulary.table.{j}"] for j in range(len(clusters))]
        if many or i == 0:
            scope = f"adaptive_embed/cutoff_{i}/" if many else "adaptive_embed/"
            put(f"{scope}lookup_table", tables[i] if many else np.concatenate(tables))
            if cluster.projected:
                put(f"{scope}proj_W", state[f"vocabulary.projection.{i}"].T)
        bias = f"adaptive_softmax/cutoff_{i}/b" if len(clusters) > 1 else "adaptive_softmax/bias"
        put(bias, state[f"vocabulary.output_bias.{i}"])
        if not cluster.tied_projection:
            put(f"adaptive_softmax/cutoff_{i}/proj", state[f"vocabulary.output_projection.{i}"].T)
    if len(clusters) > 1:
        put("adaptive_softmax/cutoff_0/cluster_W", state["vocabulary.cluster_table"])
        put("adaptive_softmax/cutoff_0/cluster_b", state["vocabulary.cluster_bias"])
    found["global_step"], found["beta1_power"] = np.array(3, np.int64), np.array(0.9, np.float32)
    found["transformer/r_w_bias/Adam_1"] = np.zeros(3, np.float32)
    return found
