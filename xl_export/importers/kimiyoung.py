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

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtimes.base.errors import ConfigError
from runtimes.contract.rule import MemoryRule
from xl_export.importers.pickle.values import Foreign
from xl_export.importers.shared.checkpoint import Source
from xl_export.importers.shared.pickled_module import TITLE, module_settings, module_tensors
from xl_export.importers.shared.settings import Setting, of_last_run, published
from xl_export.importers.shared.state_dict import project_of
from xl_export.importers.transformer_xl import Project, Reading, Settings, lengths


class Kimiyoung(Project):
    title = TITLE
    vocabularies = ("cache.pt",)

    def recognises(self, opened: Source) -> bool:
        if isinstance(opened.content, Foreign):
            return opened.content.name.endswith(".MemTransformerLM")
        return project_of(opened.content) == "kimiyoung"

    def settings(self, opened: Source) -> Settings | None:
        return module_settings(opened.content, opened.path) if isinstance(opened.content, Foreign) else None

    def weights(self, opened: Source) -> tuple[dict[str, Path], Iterable[tuple[Any, Any, Any]]]:
        if not isinstance(opened.content, Foreign):
            return super().weights(opened)
        tensors = module_tensors(opened.content, opened.path)
        return {"model": opened.path}, ((name, name, tensor) for name, tensor in tensors)

    def defaults(self, r: Reading) -> dict[str, Setting]:
        """The evaluation that the project published; if it published none, the module's last run."""
        if r.facts.attention_type in (2, 3):
            only = "the only value that can be expressed"
            known = {"mem_len": Setting(0, only), "mask": Setting("full", only)}
            if r.facts.attention_type == 2:
                known["clamp_len"] = Setting(0, "none")
            if r.stored is not None:
                known["segment"] = Setting(r.stored["tgt_len"] + r.stored["ext_len"], "the file")
            return known
        if r.dataset in ("enwik8", "text8", "wt103", "lm1b"):
            return published(r.dataset, r.facts.d_model)
        return {} if r.stored is None else of_last_run(r.stored, origin="the file")

    def rule(self, r: Reading) -> MemoryRule:
        kind = r.facts.attention_type
        if kind in (2, 3):
            return _without_memory(r)
        rule = super().rule(r)
        # The clamp keeps the nearest clamp_len vectors, of which the first is for distance 0.
        if kind == 1 and rule.clamp_len is not None:
            if rule.clamp_len == 1:
                raise ConfigError(
                    "clamp_len 1 leaves one vector for all distances of an attn_type 1 model; give "
                    "--clamp-len 2 or more."
                )
            rule = replace(rule, clamp_len=rule.clamp_len - 1)
        return rule

    def notes(self, r: Reading) -> tuple[str, ...]:
        if r.stored is None:
            return super().notes(r)
        return (f"attn_type {r.facts.attention_type}, last run with {lengths(r.stored)}",)


def _without_memory(r: Reading) -> MemoryRule:
    """The rule of attn_types 2 and 3, which depends on the positions that they know."""
    kind = r.facts.attention_type
    segment = r.chosen["segment"].value
    if r.chosen["mem_len"].value or r.chosen["mask"].value != "full":
        raise ConfigError(
            f"attn_type {kind} with memory adds positions to the remembered states, and this project "
            "cannot do that; give --mem-len 0 --mask full, as the project evaluates such models."
        )
    if kind == 2:
        trained = sum(r.stored[name] for name in ("tgt_len", "ext_len", "mem_len")) if r.stored else 0
        clamp_len = r.chosen["clamp_len"].value
        r.add(context=clamp_len + 1 if clamp_len else max(segment, trained))
    elif segment > (rows := r.t.peek("r_emb", dimensions=4).shape[1]):  # the positions that it learned
        raise ConfigError(
            f"segment is {segment} and this model has {rows} positions; give --segment {rows} or less."
        )
    return MemoryRule(mem_len=0, segment=segment, mask="full")


PROJECT = Kimiyoung()
