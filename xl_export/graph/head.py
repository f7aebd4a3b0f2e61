"""Writes the embedding and the output layer: all logits for a small vocabulary, and some for a large one.

The graph of a large vocabulary has two more inputs. `logit_rows` names the positions whose whole distribution
is needed: the last one, to generate. `targets` are the tokens whose log-probability is needed, to score. Each
cluster's logits are computed only for the targets inside it, so no [T, V] array ever exists.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from runtimes.contract.model_facts import is_selective
from trainer.model.config import Cluster, ModelConfig
from xl_export.graph.layers import Layers


def embed(layers: Layers, tokens: ir.Value) -> ir.Value:
    """Returns the embeddings [B, T, D] of tokens int64 [B, T]."""
    op = layers.op
    scale = embedding_scale(layers.config)
    x: ir.Value | None = None
    for i, cluster in enumerate(layers.config.clusters):
        at = op.Clip(
            op.Sub(tokens, _int(layers, cluster.first)),
            _int(layers, 0),
            _int(layers, cluster.last - cluster.first - 1),
        )
        rows = op.Gather(
            layers.weight(f"vocabulary.table.{i}"), at if len(layers.config.clusters) > 1 else tokens
        )
        if cluster.projected:
            rows = op.MatMul(rows, layers.weight(f"vocabulary.projection.{i}", transpose=True))
        inside = op.Unsqueeze(
            op.GreaterOrEqual(tokens, _int(layers, cluster.first)), op.constant(np.array([2]))
        )
        x = rows if x is None else op.Where(inside, rows, x)
    assert x is not None, "a vocabulary has at least one cluster"
    return op.Mul(x, op.constant(scale)) if scale != 1 else x


def embedding_scale(config: ModelConfig) -> np.float32:
    """What multiplies the rows of the vocabulary's table."""
    return np.float32(config.d_model**0.5 if config.vocabulary.scale else 1.0)


def all_logits(layers: Layers, hidden: ir.Value) -> ir.Value:
    """Returns logits over the whole vocabulary.

    A plain softmax maps [B, T, D] to logits [B, T, V]. An adaptive softmax maps [N, D] to log-probabilities
    [N, V].
    """
    op = layers.op
    clusters = layers.config.clusters
    if len(clusters) == 1:
        return _logits(layers, 0, hidden)
    head = op.LogSoftmax(_head(layers, hidden), axis=-1)
    shortlist, *tails = op.split(head, [clusters[0].last] + [1] * (len(clusters) - 1), axis=1)
    parts = [shortlist]
    for i, tail in enumerate(tails, start=1):
        parts.append(op.Add(op.LogSoftmax(_logits(layers, i, hidden), axis=-1), tail))
    return op.Concat(*parts, axis=-1)


def selected(
    layers: Layers, hidden: ir.Value, targets: ir.Value, logit_rows: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns logits [rows, V] of some positions of hidden [B, T, D], and log p of targets [B, T].

    logit_rows: the positions, as indices into the B·T rows. Targets below 0 are not scored and get 0.
    """
    op = layers.op
    flat = op.Reshape(hidden, op.constant(np.array([-1, layers.config.d_model])))
    logits = all_logits(layers, op.Gather(flat, logit_rows))
    wanted = op.Reshape(targets, op.constant(np.array([-1])))
    at = _where(layers, op.GreaterOrEqual(wanted, _int(layers, 0)))
    scores = _log_probs(layers, op.Gather(flat, at), op.Gather(wanted, at))
    nothing = op.Expand(op.constant(np.float32(0)), op.Shape(wanted))
    return logits, op.Reshape(op.ScatterElements(nothing, at, scores, axis=0), op.Shape(targets))


def selected_densely(
    layers: Layers, hidden: ir.Value, targets: ir.Value, logit_rows: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Returns the results of `selected`, with shapes that do not depend on the targets.

    Engines need such shapes. Each cluster's logits are computed for all targets.
    """
    op = layers.op
    zero = _int(layers, 0)
    clusters = layers.config.clusters
    flat = op.Reshape(hidden, op.constant(np.array([-1, layers.config.d_model])))
    logits = all_logits(layers, op.Gather(flat, logit_rows))
    wanted = op.Reshape(targets, op.constant(np.array([-1])))
    log_probs = _chosen(layers, _head(layers, flat), _head_column(layers, op.Max(wanted, zero)))
    nothing = op.constant(np.float32(0))
    for i, cluster in enumerate(clusters[1:], start=1):
        within = op.Clip(
            op.Sub(wanted, _int(layers, cluster.first)), zero, _int(layers, cluster.last - cluster.first - 1)
        )
        scores = _chosen(layers, _logits(layers, i, flat), within)
        log_probs = op.Add(log_probs, op.Where(_inside(layers, wanted, cluster), scores, nothing))
    scored = op.Where(op.GreaterOrEqual(wanted, zero), log_probs, nothing)
    return logits, op.Reshape(scored, op.Shape(targets))


def _log_probs(layers: Layers, hidden: ir.Value, targets: ir.Value) -> ir.Value:
    """Returns log p(target) [N] of hidden [N, D]; all targets are in the vocabulary."""
    op = layers.op
    clusters = layers.config.clusters
    log_probs = _chosen(layers, _head(layers, hidden), _head_column(layers, targets))
    for i, cluster in enumerate(clusters[1:], start=1):
        at = _where(layers, _inside(layers, targets, cluster))
        within = op.Sub(op.Gather(targets, at), _int(layers, cluster.first))
        scores = _chosen(layers, _logits(layers, i, op.Gather(hidden, at)), within)
        log_probs = op.ScatterElements(log_probs, at, scores, axis=0, reduction="add")
    return log_probs


def _head_column(layers: Layers, targets: ir.Value) -> ir.Value:
    """Returns the column of `_head` that holds a target's first factor.

    It is the target's own column in the shortlist, or the column of its cluster.
    """
    op = layers.op
    clusters = layers.config.clusters
    column = targets
    for i, cluster in enumerate(clusters[1:]):
        tail = op.GreaterOrEqual(targets, _int(layers, cluster.first))
        column = op.Where(tail, _int(layers, clusters[0].last + i), column)
    return column


def _chosen(layers: Layers, logits: ir.Value, column: ir.Value) -> ir.Value:
    """Returns the log softmax of logits [N, C] at one column of each row: [N]."""
    op = layers.op
    last = layers.op.constant(np.array([1]))
    chosen = op.Squeeze(op.GatherElements(logits, op.Unsqueeze(column, last), axis=1), last)
    return op.Sub(chosen, op.ReduceLogSumExp(logits, last, keepdims=0))


def _head(layers: Layers, hidden: ir.Value) -> ir.Value:
    """Returns the logits of the shortlist and of the tail clusters, [N, n_0 + tails]."""
    shortlist = _logits(layers, 0, hidden)
    if len(layers.config.clusters) == 1:
        return shortlist
    table, bias = (layers.weight(f"vocabulary.cluster_{kind}") for kind in ("table", "bias"))
    return layers.op.Concat(
        shortlist, layers.op.Gemm(project(layers, 0, hidden), table, bias, transB=1), axis=-1
    )


def _logits(layers: Layers, i: int, hidden: ir.Value) -> ir.Value:
    """Returns the logits of one cluster's own tokens.

    The table is read in the layout that is stored, so that input and output share it.
    """
    op = layers.op
    table, bias = output_weights(layers, i)
    if is_selective(layers.config.vocabulary.cutoffs, layers.config.vocab_size):
        return op.Gemm(project(layers, i, hidden), table, bias, transB=1)
    return op.Add(op.MatMul(project(layers, i, hidden), op.Transpose(table, perm=[1, 0])), bias)


def output_weights(layers: Layers, i: int) -> tuple[ir.Value, ir.Value]:
    """Returns the output table [n, D] of one cluster and its bias [n]."""
    table = layers.weight(
        f"vocabulary.{'table' if layers.config.vocabulary.tie_weights else 'output_table'}.{i}"
    )
    return table, layers.weight(f"vocabulary.output_bias.{i}")


def project(layers: Layers, i: int, hidden: ir.Value) -> ir.Value:
    """Returns the last layer's output in the width of one cluster's output table."""
    cluster = layers.config.clusters[i]
    if not cluster.projected:
        return hidden
    tied = "projection" if cluster.tied_projection else "output_projection"
    return layers.op.MatMul(hidden, layers.weight(f"vocabulary.{tied}.{i}"))


def _inside(layers: Layers, tokens: ir.Value, cluster: Cluster) -> ir.Value:
    op = layers.op
    return op.And(
        op.GreaterOrEqual(tokens, _int(layers, cluster.first)), op.Less(tokens, _int(layers, cluster.last))
    )


def _where(layers: Layers, condition: ir.Value) -> ir.Value:
    """Returns the indices [n] at which a condition [N] holds."""
    return layers.op.Squeeze(layers.op.NonZero(condition), layers.op.constant(np.array([0])))


def _int(layers: Layers, value: int) -> ir.Value:
    return layers.op.constant(np.array(value))
