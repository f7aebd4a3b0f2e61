"""The importer for Hugging Face TransfoXL folders.

A folder holds `config.json`, the weights (`model.safetensors`, `pytorch_model.bin`, or shards of one of them
with their index) and the vocabulary (`vocab.pkl`, `.bin` or `.txt`). A file that holds a bare state dict is
read, too. How these models compute was measured with transformers 4.37.2, the last release that runs them:

- The memory begins as mem_len vectors of zeros, and queries attend to them.
- With `same_length`, a query attends to mem_len keys, of which its own token is one.
- The head's columns are in the order of the clusters.
- With `untie_r`, every layer has its own u and v.
- Tied tensors are not in the file; `config.json` says which they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtimes.base.errors import ArtefactError
from runtimes.contract.rule import MemoryRule
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.settings import Setting, memory_rule
from xl_export.importers.shared.shards import PYTORCH, SAFETENSORS, find_weights, read_weights
from xl_export.importers.shared.state_dict import bare_name, project_of, read_state
from xl_export.importers.shared.transformer_xl import Architecture, convert
from xl_export.importers.shared.validated import ascending, boolean, booleans, fraction, integer
from xl_export.importers.shared.vocabularies import read_vocabulary

PROJECT = "Hugging Face TransfoXL"
CONFIG = "config.json"
VOCABULARIES = ("vocab.pkl", "vocab.bin", "vocab.txt")
DEFAULTS: dict[str, Any] = {  # those of TransfoXLConfig; an older config.json may lack some keys
    "vocab_size": 267735,
    "cutoffs": [20000, 40000, 200000],
    "d_model": 1024,
    "d_embed": 1024,
    "n_head": 16,
    "d_head": 64,
    "div_val": 4,
    "pre_lnorm": False,
    "n_layer": 18,
    "mem_len": 1600,
    "clamp_len": 1000,
    "same_length": True,
    "attn_type": 0,
    "proj_share_all_but_first": True,
    "untie_r": True,
    "dropout": 0.1,
    "dropatt": 0.0,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


SEGMENT = Setting(128, "published for wt103 large")


def recognises(opened: Source) -> bool:
    if not opened.path.is_dir():
        return project_of(opened.content) == "huggingface"
    return is_config(opened.content)


def is_config(content: Any) -> bool:
    """Whether `config.json` is that of a TransfoXL model; its first releases wrote no model_type."""
    return isinstance(content, dict) and (
        content.get("model_type") == "transfo-xl"
        or ("model_type" not in content and set(content) >= {"cutoffs", "div_val", "d_head", "mem_len"})
    )


def read(opened: Source, options: ImportOptions) -> Checkpoint:
    """Returns the model in an opened folder.

    Raises ArtefactError or ConfigError where something is missing, is wrong or cannot be expressed here.
    """
    if not opened.path.is_dir():
        return read_state(
            opened,
            options,
            project=PROJECT,
            vocabularies=VOCABULARIES,
            reversed_clusters=False,
            defaults=lambda *_: {"segment": SEGMENT},
            rule=lambda _, facts, settings: (facts, memory_rule_of(settings)),
            renamed=renamed,
            spelled=spelled,
        )
    folder, config_file = opened.path, opened.path / CONFIG
    described = (
        DEFAULTS
        | {
            "vocab_size": opened.content.get("n_token", DEFAULTS["vocab_size"]),
            "tie_word_embeddings": opened.content.get("tie_weight", DEFAULTS["tie_word_embeddings"]),
        }
        | opened.content
    )
    facts = config_facts(described, config_file)
    vocab_path = companion_file(folder, VOCABULARIES, options.vocab, what="vocabulary")
    found = read_vocabulary(vocab_path, size=facts.vocab_size)
    settings = options.overrides.applied_to(PROJECT, defaults(described, config_file))
    weights = find_weights(folder)
    if weights is None:
        raise ArtefactError(
            f"{folder} has no {SAFETENSORS} or {PYTORCH}; copy the whole folder that save_pretrained wrote."
        )
    state, shards = read_weights(weights)
    named = ((renamed(bare_name(name)), tensor) for name, tensor in state.items())
    tensors = options.tensors(named, where=weights, project=PROJECT, spell=spelled)
    config, converted = convert(tensors, facts)
    return Checkpoint(
        config=config,
        tensors=converted,
        rule=memory_rule_of(settings),
        vocab=found.vocab,
        settings=settings,
        files={"config": config_file, "model": weights, "vocabulary": vocab_path}
        | {f"shard {number}": path for number, path in enumerate(shards, 1)},
        notes=(*found.notes, *options.notes_on(tensors, config, settings)),
    )


def memory_rule_of(settings: dict[str, Setting], *, project: str = PROJECT) -> MemoryRule:
    """Returns the rule of the memory under which a TransfoXL model of Hugging Face computes."""
    return memory_rule(settings, project=project, beyond_self=-1, initial_memory="zeros")


def config_facts(config: dict[str, Any], path: Path) -> Architecture:
    """Returns the sizes and options in `config.json`; raises ArtefactError where one is wrong."""
    at = str(path)
    names = ("vocab_size", "n_layer", "n_head", "d_model", "d_head", "d_embed", "div_val")
    n = {name: integer(config, name, where=at, least=1) for name in names}
    if kind := integer(config, "attn_type", where=at):
        raise ArtefactError(f"{at}: attn_type is {kind}; expected 0, the only one that transformers runs.")
    cutoffs = ascending(config, "cutoffs", where=at)
    share = boolean(config, "proj_share_all_but_first", where=at)
    ties = config if "tie_projs" in config else {"tie_projs": [False] + [share] * len(cutoffs)}
    return Architecture(
        layers=n["n_layer"],
        d_model=n["d_model"],
        heads=n["n_head"],
        head_dim=n["d_head"],
        vocab_size=n["vocab_size"],
        d_embed=n["d_embed"],
        div_val=n["div_val"],
        cutoffs=cutoffs,
        reversed_clusters=False,
        biases_in_layers=boolean(config, "untie_r", where=at),
        pre_norm=boolean(config, "pre_lnorm", where=at),
        tie_weights=boolean(config, "tie_word_embeddings", where=at),
        tie_projections=booleans(ties, "tie_projs", count=len(cutoffs) + 1, where=at),
        norm_epsilon=fraction(config, "layer_norm_epsilon", where=at),
        dropout=fraction(config, "dropout", where=at),
        attention_dropout=fraction(config, "dropatt", where=at),
    )


def defaults(config: dict[str, Any], path: Path, *, origin: str = CONFIG) -> dict[str, Setting]:
    """Returns the settings in `config.json`, or in another description of the model.

    origin: the name of that description. It does not hold the segment; 128 is what was published with the
    model of WikiText-103.
    """
    at = str(path)
    return {
        "mem_len": Setting(integer(config, "mem_len", where=at), origin),
        "segment": SEGMENT,
        "mask": Setting("same-length" if boolean(config, "same_length", where=at) else "full", origin),
        "clamp_len": Setting(max(integer(config, "clamp_len", where=at, least=-1), 0), origin),
    }


def renamed(name: Any) -> Any:
    """Returns the name of a tensor in kimiyoung's code."""
    return name.removeprefix("transformer.") if isinstance(name, str) else name


def spelled(name: str) -> str:
    """Returns the name in the file for a name of kimiyoung's code."""
    return name if name.startswith("crit.") else f"transformer.{name}"
