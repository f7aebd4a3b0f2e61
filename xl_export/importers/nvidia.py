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

import re
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.settings import memory_rule, published
from xl_export.importers.shared.state_dict import (
    architecture,
    project_of,
    state_notes,
    state_settings,
    state_tensors,
    unread,
)
from xl_export.importers.shared.transformer_xl import Architecture, checkpoint, same
from xl_export.importers.shared.validated import (
    ASCENDING,
    FRACTION,
    NOT_SAMPLED,
    TRUTH,
    Table,
    Tensors,
    checked,
    fixed,
    ignored,
    optional,
    shown,
    taken,
    truths,
    whole,
)
from xl_export.importers.shared.vocabularies import read_vocabulary, vocabulary

PROJECT = "NVIDIA DeepLearningExamples Transformer-XL"
VOCABULARIES = ("cache.pt",)
OUTPUT = re.compile(r"crit\.out_layers_(weight|bias)e?s\.(\d+)")


def recognises(opened: Source) -> bool:
    return _is_whole(opened.content) or project_of(opened.content) == "nvidia"


def _is_whole(content: Any) -> bool:
    return isinstance(content, dict) and {"model_config", "model_state"} <= set(content)


def read(opened: Source, options: ImportOptions) -> Checkpoint:
    """Returns the model in an opened checkpoint.

    Raises ArtefactError or ConfigError if something is missing, is wrong or cannot be expressed here.
    """
    content = opened.content
    whole = _is_whole(content)
    t = state_tensors(opened, options, project=PROJECT, renamed=renamed)
    drop_shared_projections(t)
    if whole:
        facts = config_facts(content["model_config"], opened.path)
    else:
        facts = architecture(t, options, reversed_clusters=True)
    files = {"model": opened.path}
    if whole and options.vocab is None and content.get("vocab") is not None:
        found = vocabulary(content["vocab"], where=opened.path, size=facts.vocab_size)
    else:
        files["vocabulary"] = companion_file(opened.path, VOCABULARIES, options.vocab)
        found = read_vocabulary(files["vocabulary"], size=facts.vocab_size)
    if whole:
        settings = options.applied_to(PROJECT, published("wt103", facts.d_model))
        lengths = ", ".join(f"{name} {shown(content['model_config'].get(name))}" for name in LENGTHS)
        notes = (
            f"attn_type {facts.attention_type}, trained with {lengths}",
            *unread(content, OF_TRAINING),
        )
    else:
        settings = state_settings(opened, options, PROJECT, published("wt103", facts.d_model), facts)
        notes = state_notes(opened, facts)
    return checkpoint(
        t,
        facts,
        options=options,
        rule=memory_rule(settings, project=PROJECT, beyond_self=0, initial_memory="masked"),
        vocabulary=found,
        settings=settings,
        files=files,
        notes=notes,
    )


def drop_shared_projections(tensors: Tensors) -> None:
    """Removes `crit.shared_out_projs`, a second copy of the list of input projections.

    The output layer reads it for the clusters that `tie_projs` ties. Raises ArtefactError if an entry
    differs from its original.
    """
    for i in range(tensors.count("crit.shared_out_projs")):
        projection = tensors.peek(f"word_emb.emb_projs.{i}", dimensions=2)
        shared = tensors.take(f"crit.shared_out_projs.{i}", *projection.shape)
        if not same(shared, projection.float()):
            raise ArtefactError(
                f"{tensors.where}: crit.shared_out_projs.{i} and word_emb.emb_projs.{i} are one tensor in "
                f"the code of {PROJECT}, and they differ here; copy the checkpoint again."
            )


LENGTHS = ("tgt_len", "ext_len", "mem_len", "clamp_len", "same_length")
OF_TRAINING = frozenset(
    {"args", "model_config", "optimizer_state", "scheduler_state", "rng_states", "memory", "vocab"}
    | {"amp_state", "epoch", "batch", "last_iter", "train_step", "best_val_loss"}
)


def model_config(clusters: int) -> Table:
    """Returns what `model_config` may hold: the arguments of the project's MemTransformerLM."""
    return {
        **taken(whole(1), "n_token", "n_layer", "n_head", "d_model", "d_head", "div_val"),
        **taken(optional(whole(1)), "d_embed", "d_inner"),
        **taken(ASCENDING, "cutoffs"),
        **taken(TRUTH, "tie_weight", "pre_lnorm"),
        **taken(truths(clusters), "tie_projs"),
        **taken(FRACTION, "dropout", "dropatt"),
        **fixed(0, "attn_type"),
        **taken(NOT_SAMPLED, "sample_softmax"),
        **fixed(False, "adapt_inp"),
        **ignored("of the training: eval.py of the project chooses them anew", *LENGTHS),
        **ignored("the type that eval.py computes in; weights become float32 here", "dtype"),
    }


def config_facts(config: Any, where: Path) -> Architecture:
    """Returns the sizes and options in `model_config`; raises ArtefactError if one is wrong."""
    cutoffs = config.get("cutoffs") if isinstance(config, dict) else None
    clusters = 1 + (len(cutoffs) if isinstance(cutoffs, list | tuple) else 0)
    c = checked(config, model_config(clusters), where=where, inside="model_config.")
    return Architecture(
        layers=c["n_layer"],
        d_model=c["d_model"],
        heads=c["n_head"],
        head_dim=c["d_head"],
        vocab_size=c["n_token"],
        d_embed=c["d_embed"] or c["d_model"],
        div_val=c["div_val"],
        cutoffs=tuple(c["cutoffs"]),
        reversed_clusters=True,
        d_ff=c["d_inner"],
        tie_weights=c["tie_weight"],
        tie_projections=tuple(c["tie_projs"]),
        pre_norm=c["pre_lnorm"],
        dropout=float(c["dropout"]),
        attention_dropout=float(c["dropatt"]),
    )


def renamed(name: Any) -> Any:
    """Returns the name of a tensor in kimiyoung's code, which keeps its output layers in lists."""
    match = OUTPUT.fullmatch(name) if isinstance(name, str) else None
    return f"crit.out_layers.{match[2]}.{match[1]}" if match else name
