"""Reads the Transformer-XL of any project.

A `Project` says what sets one apart: its names of tensors, the settings that its files may hold, and how its
models compute. All projects are copies of kimiyoung's code, so their tensors get kimiyoung's names, which
`shared/convert.py` knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from runtimes.base.errors import ArtefactError, ConfigError
from runtimes.contract.rule import InitialMemory, MemoryRule
from trainer.model.config import ModelConfig
from xl_export.importers.shared.architecture import Architecture, from_tensors
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source, companion_file
from xl_export.importers.shared.convert import (
    convert_layer,
    convert_positions,
    convert_vocabulary,
    model_config,
)
from xl_export.importers.shared.settings import Setting, memory_rule
from xl_export.importers.shared.state_dict import bare_name, state_in, state_notes
from xl_export.importers.shared.validated import Tensors, shown
from xl_export.importers.shared.vocabularies import ReadVocabulary, read_vocabulary

# From the settings that a bare state dict lacks to the projects' words for them.
NEEDED = {"mem_len": "mem_len", "segment": "tgt_len", "mask": "same_length", "clamp_len": "clamp_len"}
# Whether an attention type has queries, keys and values in one tensor.
PROJECTIONS = {0: ("qkv",), 1: ("qkv",), 2: ("q", "kv"), 3: ("q", "kv")}
Settings = Mapping[str, Any]
LENGTHS = ("tgt_len", "ext_len", "mem_len", "clamp_len", "same_length")  # of a training


@dataclass
class Reading:
    """A checkpoint that is being read; `Project.read` sets the fields in this order."""

    opened: Source
    options: ImportOptions
    stored: Settings | None
    """The settings that the checkpoint holds, checked, in the project's words; None for bare tensors."""
    t: Tensors
    facts: Architecture = field(init=False)
    dataset: str | None = None
    """Name of the data set, if the vocabulary has one."""
    chosen: dict[str, Setting] = field(default_factory=dict)
    """The settings of the evaluation."""

    def add(self, **fields: Any) -> None:
        """Adds fields of `ModelConfig` to the architecture."""
        self.facts = dataclasses.replace(self.facts, more=self.facts.more | fields)


class Project:
    """One project. The methods do what suits most projects; the others replace them."""

    title: ClassVar[str]
    """Name for messages and records."""
    vocabularies: ClassVar[tuple[str, ...]]
    """Names of files next to a checkpoint that hold its vocabulary."""
    names: ClassVar[Mapping[str, str]] = {}
    """kimiyoung's names of tensors by the project's; see `shared/names.py`."""
    reversed_clusters: ClassVar[bool] = True
    """Whether the head's columns for the tail clusters are stored in reverse order."""
    initial_memory: ClassVar[InitialMemory] = "masked"
    beyond_self: ClassVar[int] = -1
    """Tokens that the mask `same-length` shows besides the own token, minus mem_len."""

    def recognises(self, opened: Source) -> bool:
        """Whether the content is a checkpoint of the project."""
        raise NotImplementedError

    def read(self, opened: Source, options: ImportOptions) -> Checkpoint:
        """The model in a checkpoint.

        Raises ArtefactError or ConfigError if something is missing, is wrong or cannot be expressed here.
        """
        stored = self.settings(opened)
        files, state = self.weights(opened)
        where = files["model"] if opened.path.is_dir() else opened.path
        t = Tensors(
            state, names=self.names, where=where, project=self.title, allow_nonfinite=options.allow_nonfinite
        )
        r = Reading(opened, options, stored, t)
        r.facts = self.architecture(r)
        vocabulary_file, found = self.vocabulary(r)
        r.dataset = found.dataset
        known = self.defaults(r)
        r.chosen = options.applied_to(self.title, known) if stored is not None else self._needed(r, known)
        rule = self.rule(r)
        config, tensors = self._converted(r)
        return Checkpoint(
            config=config,
            tensors=tensors,
            rule=rule,
            vocab=found.vocab,
            settings=r.chosen,
            files=files | ({} if vocabulary_file is None else {"vocabulary": vocabulary_file}),
            notes=(*self.notes(r), *found.notes, *options.notes_on(t, config, r.chosen)),
        )

    def settings(self, opened: Source) -> Settings | None:
        """`Reading.stored`; raises ArtefactError for a setting that is unknown or is not computed here."""
        return None

    def weights(self, opened: Source) -> tuple[dict[str, Path], Iterable[tuple[Any, Any, Any]]]:
        """The files that were read, by role; and for each tensor its bare name, its name, and itself."""
        state = state_in(opened.content) or {}
        return {"model": opened.path}, ((bare_name(name), name, tensor) for name, tensor in state.items())

    def architecture(self, r: Reading) -> Architecture:
        """Sizes and options of the model."""
        return from_tensors(r.t, r.options) if r.stored is None else Architecture.of(r.stored)

    def vocabulary(self, r: Reading) -> tuple[Path | None, ReadVocabulary]:
        """The file of the vocabulary, None for the checkpoint itself; and the vocabulary."""
        path = companion_file(r.opened.path, self.vocabularies, r.options.vocab)
        return path, read_vocabulary(path, size=r.facts.vocab_size)

    def defaults(self, r: Reading) -> dict[str, Setting]:
        """The evaluation by the file, or by what the project published for these sizes and this data set."""
        raise NotImplementedError

    def rule(self, r: Reading) -> MemoryRule:
        """The memory rule of the settings; some facts of the architecture may depend on it.

        Raises ConfigError if the rule cannot be expressed here.
        """
        return memory_rule(
            r.chosen, project=self.title, beyond_self=self.beyond_self, initial_memory=self.initial_memory
        )

    def notes(self, r: Reading) -> tuple[str, ...]:
        """Sentences on decisions, and on what was not read."""
        return state_notes(r.opened.content, r.facts.attention_type) if r.stored is None else ()

    def layer(self, r: Reading, config: ModelConfig, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer, by their names in a block of the model."""
        return convert_layer(r.t, config, layer, PROJECTIONS[r.facts.attention_type])

    def positions(self, r: Reading, config: ModelConfig) -> dict[str, Tensor]:
        """The tensors that depend on positions."""
        return convert_positions(r.t, config)

    def _converted(self, r: Reading) -> tuple[ModelConfig, dict[str, Tensor]]:
        """The configuration, and the tensors under the names of this project.

        Raises ArtefactError for a tensor that is missing, has another shape or has no place in the model.
        """
        config, tensors = convert_vocabulary(
            r.t,
            model_config(r.t, r.facts),
            reversed_clusters=self.reversed_clusters,
            tie_weights=r.facts.tie_weights,
            tie_projections=r.facts.tie_projections,
        )
        tensors |= self.positions(r, config)
        for layer in range(config.layers):
            parts = self.layer(r, config, layer)
            tensors |= {f"blocks.{layer}.{name}": tensor for name, tensor in parts.items()}
        r.t.finish()
        return config, tensors

    def _needed(self, r: Reading, known: dict[str, Setting]) -> dict[str, Setting]:
        """The settings for bare tensors: of the evaluation, and of the model if tensors do not show them.

        Raises ConfigError, which names the missing keys, if another setting is needed.
        """
        by_shape = {"n_head": r.facts.heads, "cutoffs": r.facts.cutoffs}
        given = {name: value for name, value in by_shape.items() if r.options.chosen(name) is not None}
        assumed = {"pre_lnorm": Setting(False, "assumed: not in a state dict")}
        assumed |= {name: Setting(value, "the tensors") for name, value in given.items()}
        needed = [name for name in NEEDED if name != "clamp_len" or r.facts.attention_type != 3]
        chosen = r.options.applied_to(self.title, dict.fromkeys(needed, Setting(None, "")) | known | assumed)
        if missing := [name for name in needed if chosen[name].value is None]:
            keys = ", ".join(f'"{NEEDED[name]}"' for name in missing)
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(
                f"{r.opened.path} is a bare state dict, which does not say how its model is evaluated; give "
                f"{flags}, or {keys} in a file with --settings."
            )
        for name, value in given.items():
            if chosen[name].value != value:
                raise ArtefactError(
                    f"{r.opened.path}: {name} is {value} by the shapes of the tensors, and "
                    f"{chosen[name].value} is given ({chosen[name].origin}); leave {name} out."
                )
        return chosen


def lengths(stored: Settings) -> str:
    """The lengths of a training, for notes."""
    return ", ".join(f"{name} {shown(stored.get(name))}" for name in LENGTHS)
