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

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MAX_LENGTH, MemoryRule
from trainer.model.config import ModelConfig, SpanConfig, VocabularyConfig
from xl_export.importers.shared.architecture import Architecture, table_sizes
from xl_export.importers.shared.checkpoint import Source
from xl_export.importers.shared.convert import convert_layer, same
from xl_export.importers.shared.settings import Setting
from xl_export.importers.shared.state_dict import assumed, project_of, unread
from xl_export.importers.shared.validated import Tensors
from xl_export.importers.transformer_xl import Project, Reading, Settings

SPAN = "adaptive_span._mask"
OF_TRAINING = ("iter_no", "logger", "optimizer", "scheduler_iter")  # next to the weights, and not read
EPSILON = 1e-8  # added to the sum by which the masked weights are divided


class AdaptiveSpan(Project):
    title = "facebookresearch/adaptive-span"
    vocabularies = ("corpus.pt", "corpus_sorted.pt")
    names: ClassVar[Mapping[str, str]] = {
        "in_emb.weight": "word_emb.emb_layers.0.weight",
        "in_emb.emb_layers.*": "word_emb.emb_layers.*",
        "in_emb.emb_projs.*": "word_emb.emb_projs.*",
        "out_emb.weight": "crit.out_layers.0.weight",
        "out_emb.bias": "crit.out_layers.0.bias",
        "out_emb.out_layers.*": "crit.out_layers.*",
        "out_emb.out_projs.*": "crit.out_projs.*",
        "out_emb.cluster_proj.*": "crit.cluster_*",
        "layers.{}.attn.proj_query.*": "layers.{}.dec_attn.q_net.*",
        "layers.{}.attn.proj_key.*": "layers.{}.dec_attn.k_net.*",
        "layers.{}.attn.proj_val.*": "layers.{}.dec_attn.v_net.*",
        "layers.{}.attn.proj_out.*": "layers.{}.dec_attn.o_net.*",
        "layers.{}.norm1.*": "layers.{}.dec_attn.layer_norm.*",
        "layers.{}.norm2.*": "layers.{}.pos_ff.layer_norm.*",
        "layers.{}.ff.fc1.*": "layers.{}.pos_ff.CoreNet.0.*",
        "layers.{}.ff.fc2.*": "layers.{}.pos_ff.CoreNet.3.*",
    }

    def recognises(self, opened: Source) -> bool:
        return project_of(opened.content) == "adaptive-span"

    def settings(self, opened: Source) -> Settings:
        return {}  # names and shapes of the tensors show all that there is

    def architecture(self, r: Reading) -> Architecture:
        t = r.t
        """Sizes by the shapes of the tensors; spans have a usual ramp."""
        _, head_dim, span = t.peek("key_pe", dimensions=3).shape
        d_model = t.peek("layers.0.dec_attn.q_net.weight", dimensions=2).shape[0]
        if not 0 < head_dim <= d_model or d_model % head_dim or not 0 < span < MAX_LENGTH:
            raise ArtefactError(
                f"{t.where}: key_pe is {list(t.peek('key_pe', dimensions=3).shape)}, expected [1, K, span] "
                f"with K a part of the {d_model} of layers.0.attn.proj_query.weight."
            )
        sizes = table_sizes(t)
        memory = "layers.0.attn.attn.persistent_memory.key"
        persistent = t.peek(memory, dimensions=3).shape[2] if memory in t else 0
        spans = f"layers.0.attn.attn.{SPAN}.current_val" in t
        return Architecture(
            layers=t.count("layers"),
            d_model=d_model,
            heads=d_model // head_dim,
            head_dim=head_dim,
            d_ff=0 if persistent else None,
            tie_weights=None if sizes["cutoffs"] else False,  # only tables of clusters may be shared
            more={
                "positions": "learned",
                "context": span + 1,
                "sublayers": "all-attention" if persistent else "feed-forward",
                "persistent": persistent,
                "span": SpanConfig(maximum=span, epsilon=EPSILON) if spans else None,
                "vocabulary": VocabularyConfig(
                    cutoffs=sizes["cutoffs"], div_val=sizes["div_val"], scale=bool(sizes["cutoffs"])
                ),
            },
            **sizes,
        )

    def defaults(self, r: Reading) -> dict[str, Setting]:
        """The block size and ramp of the project's scripts; scores depend only on the ramp."""
        known = {"segment": Setting(512, "in the project's scripts for enwik8 and text8")}
        if r.facts.cutoffs:
            known = {"segment": Setting(256, "in the project's scripts for wiki103")}
        if r.facts.more["span"]:
            known["ramp"] = Setting(32, "in all scripts of the project")
        return known

    def rule(self, r: Reading) -> MemoryRule:
        if span := r.facts.more["span"]:
            r.add(span=replace(span, ramp=r.chosen["ramp"].value))
        return MemoryRule(
            mem_len=r.facts.more["context"] - 1,
            segment=r.chosen["segment"].value,
            include_self=False,
            initial_memory="zeros",
        )

    def notes(self, r: Reading) -> tuple[str, ...]:
        return (
            *assumed("the activation ReLU and attention scores over sqrt(head_dim)"),
            *unread(r.opened.content, OF_TRAINING),
        )

    def positions(self, r: Reading, config: ModelConfig) -> dict[str, Tensor]:
        # The nearest position comes first; it has distance 1.
        by_distance = r.t.take("key_pe", 1, config.head_dim, config.context - 1)[0].T.flip(0)
        return {"positions.table": torch.cat([torch.zeros(1, config.head_dim), by_distance])}

    def layer(self, r: Reading, config: ModelConfig, layer: int) -> dict[str, Tensor]:
        t = r.t
        H, K, N = config.heads, config.head_dim, config.persistent
        parts = convert_layer(t, config, layer, ("q", "k", "v"))
        source = f"layers.{layer}.attn.attn."
        memory = f"{source}persistent_memory."
        if N:
            parts["persistent.key"] = t.take(f"{memory}key", H, K, N).transpose(1, 2)
            parts["persistent.value"] = t.take(f"{memory}val", H, N, K)
        if config.span:
            parts["span.share"] = _share(t, f"{source}{SPAN}.", config)
            alias = f"{memory}{SPAN}."
            if f"{alias}current_val" in t and not same(_share(t, alias, config), parts["span.share"]):
                raise ArtefactError(
                    f"{t.where}: {t.spell(f'{alias}current_val')} is a second copy of the layer's spans, and "
                    "its values differ; copy the checkpoint again."
                )
        return parts


PROJECT = AdaptiveSpan()


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
