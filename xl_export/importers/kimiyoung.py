"""The importer for kimiyoung/transformer-xl, PyTorch: the pickled module `model.pt`, or a bare state dict.

The vocabulary comes from the project's corpus `cache.pt`. How these models compute was measured with the
project's code at commit 44781ed:

- The memory begins empty, and nothing before the text is visible.
- With `same_length`, a query attends to mem_len keys, of which its own token is one.
- Distances are clamped to clamp_len; attn_type 1 keeps its nearest clamp_len vectors.
- The head's columns for the tail clusters are stored in reverse order.
- Memory, segment, clamp and mask are options of `eval.py`. They are not in the file.

attn_types 2 and 3 count positions back from the end of each segment. With memory, the code for type 2 stops
at the first segment, and the code for type 3 adds positions to the same memory again at every segment. No
memory in this project does that, so both types are imported with mem_len 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.rule import MemoryRule
from xl_export.importers.pickle import values
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.settings import Setting, memory_rule, published
from xl_export.importers.shared.state_dict import project_of, read_state
from xl_export.importers.shared.transformer_xl import Architecture, convert
from xl_export.importers.shared.validated import Tensors, ascending, boolean, fraction, integer, shown
from xl_export.importers.shared.vocabularies import read_vocabulary

PROJECT = "kimiyoung/transformer-xl"
MODEL, VOCABULARIES = "model.pt", ("cache.pt",)
MAX_PARTS = 1_000_000


def recognises(opened: Source) -> bool:
    if isinstance(opened.content, Foreign):
        return opened.content.name.endswith(".MemTransformerLM")
    return project_of(opened.content) == "kimiyoung"


def read(opened: Source, options: ImportOptions) -> Checkpoint:
    """Returns the model in an opened checkpoint.

    Raises ArtefactError or ConfigError where something is missing, is wrong or cannot be expressed here.
    """
    if not isinstance(opened.content, Foreign):
        return read_state(
            opened,
            options,
            project=PROJECT,
            vocabularies=VOCABULARIES,
            reversed_clusters=True,
            defaults=state_defaults,
            rule=_state_rule,
        )
    where = opened.path
    facts, state = module_facts(opened.content, where)
    vocab_path = companion_file(where, VOCABULARIES, options.vocab, what="vocabulary")
    found = read_vocabulary(vocab_path, size=facts.vocab_size)
    settings = options.overrides.applied_to(PROJECT, defaults(found.dataset, facts, state, where))
    kind = facts.attention_type
    trained = sum(integer(state, name, where=str(where)) for name in LENGTHS) if kind == 2 else 0
    rows = _rows(state, where) if kind == 3 else 0
    facts, rule = under_rule(facts, settings, rows=rows, trained=trained)
    tensors = options.tensors(module_tensors(opened.content, where), where=where, project=PROJECT)
    config, converted = convert(tensors, facts)
    last = ", ".join(f"{name} {shown(state.get(name))}" for name in (*LENGTHS, "clamp_len", "same_length"))
    notes = options.notes_on(tensors, config, settings)
    return Checkpoint(
        config=config,
        tensors=converted,
        rule=rule,
        vocab=found.vocab,
        settings=settings,
        files={"model": where, "vocabulary": vocab_path},
        notes=(f"attn_type {facts.attention_type}, last run with {last}", *found.notes, *notes),
    )


def module_facts(module: Foreign, where: Path) -> tuple[Architecture, dict[str, Any]]:
    """Returns the sizes and options of the pickled module, and all its attributes."""
    state = _attributes(module, where, "the model")
    embedding = _attributes(_part(module, where, "word_emb"), where, "word_emb")
    layers = integer(state, "n_layer", where=str(where), least=1)
    names = ("n_token", "d_model", "n_head", "d_head", "d_embed")
    numbers = {name: integer(state, name, where=str(where), least=1) for name in names}
    ends = ascending(embedding, "cutoffs", where=str(where))
    if ends[-1:] != (numbers["n_token"],):
        raise ArtefactError(
            f"{where}: word_emb.cutoffs end at {ends[-1:]}, expected n_token, {numbers['n_token']}."
        )
    norms, orders = set(), set()
    for layer in range(layers):
        for name in ("dec_attn", "pos_ff"):
            path = ("layers", str(layer), name)
            orders.add(
                boolean(_attributes(_part(module, where, *path), where, name), "pre_lnorm", where=str(where))
            )
            norms.add(
                fraction(
                    _attributes(_part(module, where, *path, "layer_norm"), where, name),
                    "eps",
                    where=str(where),
                )
            )
    if len(norms) != 1 or len(orders) != 1:
        raise ArtefactError(
            f"{where}: its layers have different LayerNorms; expected one epsilon and one order for all."
        )
    attention = _part(module, where, "layers", "0", "dec_attn", "dropatt")
    return Architecture(
        layers=layers,
        d_model=numbers["d_model"],
        heads=numbers["n_head"],
        head_dim=numbers["d_head"],
        vocab_size=numbers["n_token"],
        d_embed=numbers["d_embed"],
        div_val=integer(embedding, "div_val", where=str(where), least=1),
        cutoffs=ends[:-1],
        reversed_clusters=True,
        attention_type=integer(state, "attn_type", where=str(where)),
        pre_norm=orders.pop(),
        norm_epsilon=norms.pop(),
        dropout=fraction(_attributes(_part(module, where, "drop"), where, "drop"), "p", where=str(where)),
        attention_dropout=fraction(_attributes(attention, where, "dropatt"), "p", where=str(where)),
    ), state


def defaults(
    dataset: str | None, facts: Architecture, state: dict[str, Any], where: Path
) -> dict[str, Setting]:
    """Returns the evaluation that the project published for this data set and size.

    Where it published none, the lengths are those of the module's last run.
    """
    if facts.attention_type in (2, 3):
        segment = integer(state, "tgt_len", where=str(where), least=1) + integer(
            state, "ext_len", where=str(where)
        )
        chosen = {
            "mem_len": Setting(0, "the only value that can be expressed"),
            "segment": Setting(segment, "the file"),
        }
        chosen["mask"] = Setting("full", "the only value that can be expressed")
        return chosen | ({"clamp_len": Setting(0, "none")} if facts.attention_type == 2 else {})
    return published_for(dataset, facts) or {
        "mem_len": Setting(integer(state, "mem_len", where=str(where)), "the file"),
        "segment": Setting(integer(state, "tgt_len", where=str(where), least=1), "the file"),
        "mask": Setting(
            "same-length" if boolean(state, "same_length", where=str(where)) else "full", "the file"
        ),
        "clamp_len": Setting(max(integer(state, "clamp_len", where=str(where), least=-1), 0), "the file"),
    }


def published_for(dataset: str | None, facts: Architecture) -> dict[str, Setting]:
    """Returns the evaluation that was published for this data set and size; nothing for another data set."""
    large = facts.d_model >= 1024
    if dataset in ("enwik8", "text8"):
        if large:
            return published(f"{dataset} large", segment=128, mem_len=3800, clamp_len=1000)
        return published(f"{dataset} base", segment=80, mem_len=2100, clamp_len=820)
    if dataset == "wt103":
        if large:
            return published("wt103 large", segment=128, mem_len=1600, clamp_len=1000)
        return published("wt103 base", segment=64, mem_len=640, clamp_len=400)
    if dataset == "lm1b":
        return published("lm1b", segment=32, mem_len=128, clamp_len=0)
    return {}


def state_defaults(facts: Architecture, dataset: str | None) -> dict[str, Setting]:
    """Returns what is known of the evaluation of a bare state dict."""
    if facts.attention_type not in (2, 3):
        return published_for(dataset, facts)
    only = "the only value that can be expressed"
    known = {"mem_len": Setting(0, only), "mask": Setting("full", only)}
    return known | ({"clamp_len": Setting(0, "none")} if facts.attention_type == 2 else {})


def _state_rule(
    t: Tensors, facts: Architecture, settings: dict[str, Setting]
) -> tuple[Architecture, MemoryRule]:
    rows = t.peek("r_emb", dimensions=4).shape[1] if facts.attention_type == 3 else 0
    return under_rule(facts, settings, rows=rows, trained=0)


def under_rule(
    facts: Architecture, settings: dict[str, Setting], *, rows: int, trained: int
) -> tuple[Architecture, MemoryRule]:
    """Returns the facts that depend on the settings, and the memory rule of the settings.

    rows: the positions that the model learned, for attn_type 3. trained: the positions that it was trained
    with, for attn_type 2, or 0 where they are not known. Raises ConfigError where the rule cannot be
    expressed here.
    """
    kind, clamp_len, segment = (
        facts.attention_type,
        settings.get("clamp_len", Setting(0, "")).value,
        settings["segment"].value,
    )
    if kind in (2, 3):
        if settings["mem_len"].value or settings["mask"].value != "full":
            raise ConfigError(
                f"attn_type {kind} with memory adds positions to the remembered states, and this project "
                "cannot do that; give --mem-len 0 --mask full, as the project evaluates such models."
            )
        if kind == 3 and segment > rows:
            raise ConfigError(
                f"segment is {segment} and this model has {rows} positions; give --segment {rows} or less."
            )
        context = clamp_len + 1 if clamp_len else max(segment, trained)
        return dataclasses.replace(facts, context=context), MemoryRule(
            mem_len=0, segment=segment, mask="full"
        )
    rule = memory_rule(settings, project=PROJECT, beyond_self=-1, initial_memory="masked")
    # The clamp keeps the nearest clamp_len vectors, of which the first is for distance 0.
    if kind == 1 and rule.clamp_len is not None:
        if rule.clamp_len == 1:
            raise ConfigError(
                "clamp_len 1 leaves one vector for all distances of an attn_type 1 model; give --clamp-len 2 "
                "or more."
            )
        rule = dataclasses.replace(rule, clamp_len=rule.clamp_len - 1)
    return facts, rule


LENGTHS = ("tgt_len", "ext_len", "mem_len")


def _rows(state: dict[str, Any], where: Path) -> int:
    parameters = state.get("_parameters")
    table = parameters.get("r_emb") if isinstance(parameters, dict) else None
    if not isinstance(table, Tensor) or table.dim() != 4:
        raise ArtefactError(f"{where} lacks the tensor r_emb, which a {PROJECT} model of attn_type 3 has.")
    return int(table.shape[1])


def module_tensors(module: Foreign, where: Path, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Returns the names and tensors of the state dict of a pickled module."""
    todo, seen = [(prefix, module)], 0
    while todo:
        prefix, module = todo.pop()
        state = _attributes(module, where, what := values.shown(prefix) or "the model")
        for kind in ("_parameters", "_buffers", "_modules"):
            parts = state.get(kind, {})
            seen += len(parts) if isinstance(parts, dict) else MAX_PARTS
            if seen >= MAX_PARTS:
                raise ArtefactError(
                    f"{where}: {what} is not a module that PyTorch pickled; copy the file again."
                )
            for name, part in parts.items():
                if kind == "_modules" and isinstance(part, Foreign):
                    todo.append((f"{prefix}{name}.", part))
                elif part is not None:
                    yield f"{prefix}{name}", part


def _part(module: Foreign, where: Path, *path: str) -> Foreign:
    for i, name in enumerate(path):
        modules = _attributes(module, where, ".".join(path[:i]) or "the model").get("_modules")
        part = modules.get(name) if isinstance(modules, dict) else None
        if not isinstance(part, Foreign):
            raise ArtefactError(f"{where} lacks the module {'.'.join(path[: i + 1])} of a {PROJECT} model.")
        module = part
    return module


def _attributes(module: Foreign, where: Path, what: str) -> dict[str, Any]:
    if not isinstance(module.state, dict):
        raise ArtefactError(f"{where}: {what} is not a module that PyTorch pickled; copy the file again.")
    return module.state
