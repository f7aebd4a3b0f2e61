"""The importer for NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL.

The files `checkpoint_best.pt` and `checkpoint_last.pt` are dictionaries. They hold arguments, the model's
configuration, weights and vocabulary, and the state of the training. How these models compute was measured
with the project's code at commit 729963d. They compute as those of kimiyoung, with one difference: with
`same_length`, a query attends to mem_len keys and to its own token. (In the project's TorchScript model the
own token is one of the mem_len keys: give a mem_len that is smaller by one there.)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.embedding import same
from xl_export.importers.shared.settings import Setting, memory_rule, published
from xl_export.importers.shared.state_dict import bare_name, project_of, read_state
from xl_export.importers.shared.transformer_xl import Architecture, convert
from xl_export.importers.shared.validated import (
    Tensors,
    ascending,
    boolean,
    booleans,
    fraction,
    integer,
    shown,
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

    Raises ArtefactError or ConfigError where something is missing, is wrong or cannot be expressed here.
    """
    if not _is_whole(opened.content):
        return read_state(
            opened,
            options,
            project=PROJECT,
            vocabularies=VOCABULARIES,
            reversed_clusters=True,
            defaults=lambda facts, _: defaults(facts),
            rule=lambda _, facts, settings: (facts, _rule(settings)),
            renamed=renamed,
            spelled=spelled,
            prepare=drop_shared_projections,
        )
    where, content = opened.path, opened.content
    facts = config_facts(content["model_config"], where)
    files = {"model": where}
    if options.vocab is None and content.get("vocab") is not None:
        found = vocabulary(content["vocab"], where=where, size=facts.vocab_size)
    else:
        files["vocabulary"] = companion_file(where, VOCABULARIES, options.vocab, what="vocabulary")
        found = read_vocabulary(files["vocabulary"], size=facts.vocab_size)
    settings = options.overrides.applied_to(PROJECT, defaults(facts))
    rule = _rule(settings)
    state = content["model_state"]
    if not isinstance(state, dict):
        raise ArtefactError(f"{where}: model_state is a {type(state).__name__}, expected tensors by name.")
    named = ((renamed(bare_name(name)), tensor) for name, tensor in state.items())
    tensors = options.tensors(named, where=where, project=PROJECT, spell=spelled)
    drop_shared_projections(tensors)
    config, converted = convert(tensors, facts)
    names = ("tgt_len", "ext_len", "mem_len", "clamp_len", "same_length")
    lengths = ", ".join(f"{name} {shown(content['model_config'].get(name))}" for name in names)
    notes = options.notes_on(tensors, config, settings)
    return Checkpoint(
        config=config,
        tensors=converted,
        rule=rule,
        vocab=found.vocab,
        settings=settings,
        files=files,
        notes=(f"attn_type {facts.attention_type}, trained with {lengths}", *found.notes, *notes),
    )


def _rule(settings: dict[str, Setting]) -> MemoryRule:
    return memory_rule(settings, project=PROJECT, beyond_self=0, initial_memory="masked")


def drop_shared_projections(tensors: Tensors) -> None:
    """Removes `crit.shared_out_projs`, a second copy of the list of input projections.

    The output layer reads it for the clusters that `tie_projs` ties. Raises ArtefactError where an entry
    differs from its original.
    """
    for i in range(tensors.count("crit.shared_out_projs")):
        shared, projection = (
            tensors.peek(f"{name}.{i}", dimensions=2)
            for name in ("crit.shared_out_projs", "word_emb.emb_projs")
        )
        if not same(shared, projection):
            raise ArtefactError(
                f"{tensors.where}: crit.shared_out_projs.{i} and word_emb.emb_projs.{i} are one tensor in "
                f"the code of {PROJECT}, and they differ here; copy the checkpoint again."
            )
        tensors.drop(f"crit.shared_out_projs.{i}")


def config_facts(config: Any, where: Path) -> Architecture:
    """Returns the sizes and options in `model_config`; raises ArtefactError where one is wrong."""
    if not isinstance(config, dict):
        raise ArtefactError(
            f"{where}: model_config is a {type(config).__name__}, expected the arguments of a model."
        )
    at = f"{where}, model_config"
    names = ("n_token", "n_layer", "n_head", "d_model", "d_head", "div_val")
    n = {name: integer(config, name, where=at, least=1) for name in names}
    kind, cutoffs = integer(config, "attn_type", where=at), ascending(config, "cutoffs", where=at)
    if kind:
        raise ArtefactError(
            f"{at}: attn_type is {kind}; expected 0, the only one of {PROJECT} that can be imported."
        )
    return Architecture(
        layers=n["n_layer"],
        d_model=n["d_model"],
        heads=n["n_head"],
        head_dim=n["d_head"],
        vocab_size=n["n_token"],
        d_embed=n["d_model"]
        if config.get("d_embed") is None
        else integer(config, "d_embed", where=at, least=1),
        div_val=n["div_val"],
        cutoffs=cutoffs,
        reversed_clusters=True,
        tie_weights=boolean(config, "tie_weight", where=at),
        tie_projections=booleans(config, "tie_projs", count=len(cutoffs) + 1, where=at),
        pre_norm=boolean(config, "pre_lnorm", where=at),
        dropout=fraction(config, "dropout", where=at),
        attention_dropout=fraction(config, "dropatt", where=at),
    )


def defaults(facts: Architecture) -> dict[str, Setting]:
    """Returns the evaluation that the project published for a model of this size."""
    if facts.d_model >= 1024:
        return published("wt103 large", segment=128, mem_len=1600, clamp_len=1000)
    return published("wt103 base", segment=64, mem_len=640, clamp_len=400)


def renamed(name: Any) -> Any:
    """Returns the name of a tensor in kimiyoung's code, which keeps its output layers in lists."""
    match = OUTPUT.fullmatch(name) if isinstance(name, str) else None
    return f"crit.out_layers.{match[2]}.{match[1]}" if match else name


def spelled(name: str) -> str:
    """Returns the name in the file for a name of `renamed`."""
    _, _, rest = name.partition("crit.out_layers.")
    number, _, kind = rest.partition(".")
    return f"crit.out_layers_{'weights' if kind == 'weight' else 'biases'}.{number}" if rest else name
