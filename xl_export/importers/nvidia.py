"""The importer for NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL.

The files `checkpoint_best.pt` and `checkpoint_last.pt` are dictionaries. They hold arguments, the model's
configuration, weights and vocabulary, and the state of the training. How these models compute was measured
with the project's code at commit 729963d. They compute like kimiyoung's, with one difference: with
`same_length`, a query attends to mem_len keys and to its own token. (In the project's TorchScript model the
own token is one of the mem_len keys: set a mem_len that is smaller by one there.)

Of the arguments only `model_config` is read, as in the project's `eval.py`; `args` repeats it, and holds the
options of the training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from runtimes.base.errors import ArtefactError
from xl_export.importers.shared.architecture import Architecture
from xl_export.importers.shared.checkpoint import Source
from xl_export.importers.shared.convert import same
from xl_export.importers.shared.settings import Setting, published
from xl_export.importers.shared.state_dict import project_of, unread
from xl_export.importers.shared.validated import (
    TRUTH,
    Table,
    Tensors,
    checked,
    fixed,
    ignored,
    model_settings,
    optional,
    taken,
    whole,
)
from xl_export.importers.shared.vocabularies import ReadVocabulary, vocabulary
from xl_export.importers.transformer_xl import LENGTHS, Project, Reading, Settings, lengths

OF_TRAINING = frozenset(
    {"args", "model_config", "optimizer_state", "scheduler_state", "rng_states", "memory", "vocab"}
    | {"amp_state", "epoch", "batch", "last_iter", "train_step", "best_val_loss"}
)
MODEL_CONFIG: Table = {  # the arguments of the project's MemTransformerLM, with `model_settings`
    **taken(whole(1), "n_token"),
    **taken(optional(whole(1)), "d_embed"),
    **taken(TRUTH, "tie_weight"),
    **fixed(False, "adapt_inp"),
    **ignored("of the training: eval.py of the project chooses them anew", *LENGTHS),
    **ignored("the type that eval.py computes in; weights become float32 here", "dtype"),
}


class Nvidia(Project):
    title = "NVIDIA DeepLearningExamples Transformer-XL"
    vocabularies = ("cache.pt",)
    names: ClassVar[Mapping[str, str]] = {
        "crit.out_layers_weights.{}": "crit.out_layers.{}.weight",
        "crit.out_layers_biases.{}": "crit.out_layers.{}.bias",
    }
    beyond_self = 0

    def recognises(self, opened: Source) -> bool:
        return _is_whole(opened.content) or project_of(opened.content) == "nvidia"

    def settings(self, opened: Source) -> Settings | None:
        if not _is_whole(opened.content):
            return None
        config = opened.content["model_config"]
        table = model_settings(config) | MODEL_CONFIG
        return checked(config, table, where=opened.path, inside="model_config.")

    def architecture(self, r: Reading) -> Architecture:
        drop_shared_projections(r.t)
        return super().architecture(r)

    def vocabulary(self, r: Reading) -> tuple[Path | None, ReadVocabulary]:
        inside = r.opened.content.get("vocab") if r.stored is not None else None
        if r.options.vocab is None and inside is not None:
            return None, vocabulary(inside, where=r.opened.path, size=r.facts.vocab_size)
        return super().vocabulary(r)

    def defaults(self, r: Reading) -> dict[str, Setting]:
        return published("wt103", r.facts.d_model)

    def notes(self, r: Reading) -> tuple[str, ...]:
        if r.stored is None:
            return super().notes(r)
        trained = f"attn_type {r.facts.attention_type}, trained with {lengths(r.stored)}"
        return (trained, *unread(r.opened.content, OF_TRAINING))


PROJECT = Nvidia()


def _is_whole(content: Any) -> bool:
    return isinstance(content, dict) and {"model_config", "model_state"} <= set(content)


def drop_shared_projections(tensors: Tensors) -> None:
    """Takes `crit.shared_out_projs`, a second copy of the list of input projections.

    The output layer reads it for the clusters that `tie_projs` ties. Raises ArtefactError if an entry
    differs from its original.
    """
    for i in range(tensors.count("crit.shared_out_projs")):
        projection = tensors.peek(f"word_emb.emb_projs.{i}", dimensions=2)
        shared = tensors.take(f"crit.shared_out_projs.{i}", *projection.shape)
        if not same(shared, projection.float()):
            raise ArtefactError(
                f"{tensors.where}: crit.shared_out_projs.{i} and word_emb.emb_projs.{i} are one tensor in "
                f"the code of {PROJECT.title}, and they differ here; copy the checkpoint again."
            )
