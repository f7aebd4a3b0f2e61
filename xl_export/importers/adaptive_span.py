"""The importer for checkpoints of facebookresearch/adaptive-span, plain and all-attention.

The vocabulary comes from the project's `corpus.pt`. How these models compute was measured with the project's
code at commit 27b815f:

- A query attends to the `attn_span` tokens before it, and not to itself.
- Before the text there are vectors of zero, and queries attend to them.
- One table of positions serves all layers and heads; its last row is the nearest position.
- A LayerNorm follows each sublayer.
- Embeddings are not scaled, except adaptive ones.
- The head's columns for the tail clusters are stored in reverse order.

The sizes of the model follow from the shapes of its tensors. The ramp of the spans and the block size are not
in the file.

That code divides the masked weights of a head by their sum plus 1e-8. Its softmax ends, in steps of 64
tokens, beyond the longest span of the layer. If the softmax of a head is outside its span, that sum is as
small as 1e-8, so both facts are part of the model (`SpanConfig.epsilon`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MAX_LENGTH, MemoryRule
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.settings import Setting
from xl_export.importers.shared.state_dict import assumed, bare_name, project_of, state_in, unread
from xl_export.importers.shared.transformer_xl import convert_vocabulary, same, table_sizes
from xl_export.importers.shared.validated import Tensors, sizes_of
from xl_export.importers.shared.vocabularies import read_vocabulary

PROJECT = "facebookresearch/adaptive-span"
VOCABULARIES = ("corpus.pt", "corpus_sorted.pt")
SPAN = "adaptive_span._mask"
OF_TRAINING = ("iter_no", "logger", "optimizer", "scheduler_iter")  # next to the weights, and not read
EPSILON = 1e-8  # added to the sum by which the masked weights are divided


def recognises(opened: Source) -> bool:
    return project_of(opened.content) == "adaptive-span"


def read(opened: Source, options: ImportOptions) -> Checkpoint:
    """Returns the model in an opened checkpoint.

    Raises ArtefactError or ConfigError if something is missing, is wrong or cannot be expressed here.
    """
    where = opened.path
    found = state_in(opened.content) or {}
    state = ((renamed(name), name, tensor) for name, tensor in found.items())
    t = Tensors(state, where=where, project=PROJECT, allow_nonfinite=options.allow_nonfinite)
    config = sizes(t)
    settings = options.applied_to(PROJECT, defaults(config))
    if config.span:
        config = replace(config, span=replace(config.span, ramp=settings["ramp"].value))
    config, converted = convert(t, config)
    t.finish()
    vocab_path = companion_file(where, VOCABULARIES, options.vocab)
    vocabulary = read_vocabulary(vocab_path, size=config.vocab_size)
    rule = MemoryRule(
        mem_len=config.context - 1,
        segment=settings["segment"].value,
        include_self=False,
        initial_memory="zeros",
    )
    return Checkpoint(
        config=config,
        tensors=converted,
        rule=rule,
        vocab=vocabulary.vocab,
        settings=settings,
        files={"model": where, "vocabulary": vocab_path},
        notes=(
            *assumed("the activation ReLU and attention scores over sqrt(head_dim)"),
            *unread(opened.content, OF_TRAINING),
            *vocabulary.notes,
            *options.notes_on(t, config, settings),
        ),
    )


def sizes(t: Tensors) -> ModelConfig:
    """Returns the configuration that follows from the shapes of the tensors; its spans have a usual ramp.

    Raises ArtefactError if shapes disagree.
    """
    _, head_dim, span = t.peek("key_pe", dimensions=3).shape
    d_model = t.peek("layers.0.attn.proj_query.weight", dimensions=2).shape[0]
    if not 0 < head_dim <= d_model or d_model % head_dim or not 0 < span < MAX_LENGTH:
        raise ArtefactError(
            f"{t.where}: key_pe is {list(t.peek('key_pe', dimensions=3).shape)}, expected [1, K, span] "
            f"with K a part of the {d_model} of layers.0.attn.proj_query.weight."
        )
    persistent = 0
    if "layers.0.attn.attn.persistent_memory.key" in t:
        persistent = t.peek("layers.0.attn.attn.persistent_memory.key", dimensions=3).shape[2]
    vocab_size, cutoffs, _, div_val = table_sizes(t)
    adaptive = f"layers.0.attn.attn.{SPAN}.current_val" in t
    with sizes_of(t.where):
        return ModelConfig(
            layers=t.count("layers"),
            d_model=d_model,
            heads=d_model // head_dim,
            head_dim=head_dim,
            vocab_size=vocab_size,
            d_ff=0 if persistent else t.peek("layers.0.ff.fc1.weight", dimensions=2).shape[0],
            positions="learned",
            context=span + 1,
            sublayers="all-attention" if persistent else "feed-forward",
            persistent=persistent,
            span=SpanConfig(maximum=span, epsilon=EPSILON) if adaptive else None,
            vocabulary=VocabularyConfig(cutoffs=cutoffs, div_val=div_val, scale=bool(cutoffs)),
        )


def convert(t: Tensors, config: ModelConfig) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns the configuration with its ties, and the tensors under the names of this project.

    Raises ArtefactError for a tensor that is missing or has another shape.
    """
    ties = None if config.vocabulary.cutoffs else False  # only tables of clusters may be shared
    config, converted = convert_vocabulary(t, config, reversed_clusters=True, tie_weights=ties)
    # The nearest position comes first; it has distance 1.
    by_distance = t.take("key_pe", 1, config.head_dim, config.context - 1)[0].T.flip(0)
    converted["positions.table"] = torch.cat([torch.zeros(1, config.head_dim), by_distance])
    for layer in range(config.layers):
        converted |= _block(t, config, layer)
    return config, converted


def _block(t: Tensors, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    D, H, K, N = config.d_model, config.heads, config.head_dim, config.persistent
    source = f"layers.{layer}."
    target = f"blocks.{layer}."
    block = {
        f"{target}{mine}.weight": t.take(f"{source}attn.proj_{name}.weight", D, D)
        for mine, name in (("query", "query"), ("key", "key"), ("value", "val"), ("out", "out"))
    }
    norms = {"attention_norm": "norm1"} | ({} if N else {"feed_forward_norm": "norm2"})
    for mine, name in norms.items():
        block |= {
            f"{target}{mine}.{kind}": t.take(f"{source}{name}.{kind}", D) for kind in ("weight", "bias")
        }
    if N:
        memory = f"{source}attn.attn.persistent_memory."
        block[f"{target}persistent.key"] = t.take(f"{memory}key", H, K, N).transpose(1, 2)
        block[f"{target}persistent.value"] = t.take(f"{memory}val", H, N, K)
    else:
        block[f"{target}expand.weight"] = t.take(f"{source}ff.fc1.weight", config.d_ff, D)
        block[f"{target}expand.bias"] = t.take(f"{source}ff.fc1.bias", config.d_ff)
        block[f"{target}contract.weight"] = t.take(f"{source}ff.fc2.weight", D, config.d_ff)
        block[f"{target}contract.bias"] = t.take(f"{source}ff.fc2.bias", D)
    if config.span:
        block[f"{target}span.share"] = _share(t, f"{source}attn.attn.{SPAN}.", config)
        alias = f"{source}attn.attn.persistent_memory.{SPAN}."
        if f"{alias}current_val" in t and not same(_share(t, alias, config), block[f"{target}span.share"]):
            raise ArtefactError(
                f"{t.where}: {t.spell(f'{alias}current_val')} is a second copy of the layer's spans, and its "
                "values differ; copy the checkpoint again."
            )
    return block


def _share(t: Tensors, mask: str, config: ModelConfig) -> Tensor:
    """Returns the spans [H] of a layer, each as a share of the longest possible span."""
    span = config.context - 1
    template = t.take(f"{mask}mask_template", span)
    if not torch.allclose(template, torch.arange(1.0 - span, 1.0), rtol=0, atol=0.01):
        raise ArtefactError(
            f"{t.where}: {t.spell(f'{mask}mask_template')} does not hold the numbers {1 - span} to 0, as "
            "its project writes them; copy the checkpoint again."
        )
    share = t.take(f"{mask}current_val", config.heads, 1, 1).flatten()
    if not bool(((share >= 0) & (share <= 1)).all()):
        raise ArtefactError(
            f"{t.where}: {t.spell(f'{mask}current_val')} has values outside 0 to 1, the range of spans in "
            "its project; copy the checkpoint again."
        )
    return share


def defaults(config: ModelConfig) -> dict[str, Setting]:
    """Returns the block size and ramp of the project's scripts; scores depend only on the ramp."""
    segment = (
        Setting(256, "in the project's scripts for wiki103")
        if config.vocabulary.cutoffs
        else Setting(512, "in the project's scripts for enwik8 and text8")
    )
    return {"segment": segment} | (
        {"ramp": Setting(32, "in all scripts of the project")} if config.span else {}
    )


CLUSTERS = {  # from prefixes of this format to the prefixes of kimiyoung's names
    "in_emb.emb_layers.": "word_emb.emb_layers.",
    "in_emb.emb_projs.": "word_emb.emb_projs.",
    "out_emb.out_layers.": "crit.out_layers.",
    "out_emb.out_projs.": "crit.out_projs.",
    "out_emb.cluster_proj.": "crit.cluster_",
}
PLAIN = {
    "in_emb.weight": "word_emb.emb_layers.0.weight",
    "out_emb.weight": "crit.out_layers.0.weight",
    "out_emb.bias": "crit.out_layers.0.bias",
}


def renamed(name: Any) -> Any:
    """Returns the name that `convert_vocabulary` knows, without the `module.` of distributed training."""
    name = bare_name(name)
    if not isinstance(name, str):
        return name
    for theirs, known in (PLAIN | CLUSTERS).items():
        if name.startswith(theirs):
            return known + name.removeprefix(theirs)
    return name
