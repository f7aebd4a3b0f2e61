"""Reads the Transformer-XL of any project.

A `Project` says what sets one apart: its names of tensors, the settings that its files may hold, and how its
models compute. All projects are copies of kimiyoung's code, so their tensors get kimiyoung's names, which
`shared/convert.py` knows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
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
from xl_export.importers.shared.validated import Tensors
from xl_export.importers.shared.vocabularies import ReadVocabulary, read_vocabulary

# From the settings that a bare state dict lacks to the projects' words for them.
NEEDED = {"mem_len": "mem_len", "segment": "tgt_len", "mask": "same_length", "clamp_len": "clamp_len"}
# Whether an attention type has queries, keys and values in one tensor.
PROJECTIONS = {0: ("qkv",), 1: ("qkv",), 2: ("q", "kv"), 3: ("q", "kv")}
Settings = Mapping[str, Any]


class Project:
    """One project. The methods do what suits most; each is replaced by the projects that differ."""

    #: Name for messages and records.
    title: ClassVar[str]
    #: Names of files next to a checkpoint that hold its vocabulary.
    vocabularies: ClassVar[tuple[str, ...]]
    #: From the project's names of tensors to kimiyoung's; see `shared/names.py`.
    names: ClassVar[Mapping[str, str]] = {}
    #: Whether the head's columns for the tail clusters are stored in reverse order.
    reversed_clusters: ClassVar[bool] = True
    initial_memory: ClassVar[InitialMemory] = "masked"
    #: Tokens that the mask `same-length` shows besides the own token, minus mem_len.
    beyond_self: ClassVar[int] = -1

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
        facts = self.architecture(t, options, stored)
        vocabulary_file, found = self.vocabulary(opened, options, facts.vocab_size)
        known = self.defaults(facts, found.dataset, stored)
        if stored is None:
            chosen = self._chosen_for_tensors(opened, options, known, facts)
        else:
            chosen = options.applied_to(self.title, known)
        facts, rule = self.under_rule(t, facts, chosen, stored)
        config, tensors = self._converted(t, facts)
        return Checkpoint(
            config=config,
            tensors=tensors,
            rule=rule,
            vocab=found.vocab,
            settings=chosen,
            files=files | ({} if vocabulary_file is None else {"vocabulary": vocabulary_file}),
            notes=(
                *self.notes(opened, facts, stored),
                *found.notes,
                *options.notes_on(t, config, chosen),
            ),
        )

    def settings(self, opened: Source) -> Settings | None:
        """The settings that the checkpoint holds, checked, in the project's words; None for bare tensors."""
        return None

    def weights(self, opened: Source) -> tuple[dict[str, Path], Iterable[tuple[Any, Any, Any]]]:
        """The files that were read, by role; and for each tensor its bare name, its name, and itself."""
        state = state_in(opened.content) or {}
        return {"model": opened.path}, ((bare_name(name), name, tensor) for name, tensor in state.items())

    def architecture(self, t: Tensors, options: ImportOptions, stored: Settings | None) -> Architecture:
        """Sizes and options of the model."""
        return from_tensors(t, options) if stored is None else Architecture.of(stored)

    def vocabulary(
        self, opened: Source, options: ImportOptions, size: int
    ) -> tuple[Path | None, ReadVocabulary]:
        """The file of the vocabulary, None for the checkpoint itself; and the vocabulary."""
        path = companion_file(opened.path, self.vocabularies, options.vocab)
        return path, read_vocabulary(path, size=size)

    def defaults(
        self, facts: Architecture, dataset: str | None, stored: Settings | None
    ) -> dict[str, Setting]:
        """The evaluation that the file, or the project, gives for these sizes and this data set."""
        raise NotImplementedError

    def under_rule(
        self, t: Tensors, facts: Architecture, chosen: dict[str, Setting], stored: Settings | None
    ) -> tuple[Architecture, MemoryRule]:
        """The memory rule of the settings, and the architecture, of which some facts may depend on it.

        Raises ConfigError if the rule cannot be expressed here.
        """
        return facts, memory_rule(
            chosen, project=self.title, beyond_self=self.beyond_self, initial_memory=self.initial_memory
        )

    def notes(self, opened: Source, facts: Architecture, stored: Settings | None) -> tuple[str, ...]:
        """Sentences on decisions, and on what was not read."""
        return state_notes(opened.content, facts.attention_type) if stored is None else ()

    def layer(self, t: Tensors, config: ModelConfig, facts: Architecture, layer: int) -> dict[str, Tensor]:
        """The tensors of a layer, by their names in a block of the model."""
        return convert_layer(t, config, layer, PROJECTIONS[facts.attention_type])

    def positions(self, t: Tensors, config: ModelConfig) -> dict[str, Tensor]:
        """The tensors that depend on positions."""
        return convert_positions(t, config)

    def _converted(self, t: Tensors, facts: Architecture) -> tuple[ModelConfig, dict[str, Tensor]]:
        """The configuration, and the tensors under the names of this project.

        Raises ArtefactError for a tensor that is missing, has another shape or has no place in the model.
        """
        config, tensors = convert_vocabulary(
            t,
            model_config(t, facts),
            reversed_clusters=self.reversed_clusters,
            tie_weights=facts.tie_weights,
            tie_projections=facts.tie_projections,
        )
        tensors |= self.positions(t, config)
        for layer in range(config.layers):
            parts = self.layer(t, config, facts, layer)
            tensors |= {f"blocks.{layer}.{name}": tensor for name, tensor in parts.items()}
        t.finish()
        return config, tensors

    def _chosen_for_tensors(
        self, opened: Source, options: ImportOptions, known: dict[str, Setting], facts: Architecture
    ) -> dict[str, Setting]:
        """The settings of the evaluation, and those of the model that tensors do not show.

        Raises ConfigError, which names the missing keys, if another setting is needed.
        """
        assumed = {"pre_lnorm": Setting(False, "assumed: not in a state dict")}
        by_shape = {"n_head": facts.heads, "cutoffs": facts.cutoffs}
        assumed |= {
            name: Setting(value, "the tensors")
            for name, value in by_shape.items()
            if options.chosen(name) is not None
        }
        needed = [name for name in NEEDED if name != "clamp_len" or facts.attention_type != 3]
        settings = options.applied_to(self.title, dict.fromkeys(needed, Setting(None, "")) | known | assumed)
        if missing := [name for name in needed if settings[name].value is None]:
            keys = ", ".join(f'"{NEEDED[name]}"' for name in missing)
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
            raise ConfigError(
                f"{opened.path} is a bare state dict, which does not say how its model is evaluated; give "
                f"{flags}, or {keys} in a file with --settings."
            )
        for name, value in by_shape.items():
            if name in settings and settings[name].value != value:
                raise ArtefactError(
                    f"{opened.path}: {name} is {value} by the shapes of the tensors, and "
                    f"{settings[name].value} is given ({settings[name].origin}); leave {name} out."
                )
        return settings


def with_more(facts: Architecture, **more: Any) -> Architecture:
    """The architecture with further fields of `ModelConfig`."""
    return dataclasses.replace(facts, more=facts.more | more)
