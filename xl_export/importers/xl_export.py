"""The importer for runs of this project, so that `import` reads every checkpoint that has weights."""

from __future__ import annotations

import dataclasses
from typing import Any

from runtimes.base.errors import ArtefactError
from runtimes.contract.spec import VOCAB
from trainer.run.checkpoint import load_run
from trainer.run.history import CONFIG, MODEL
from xl_export.importers.shared.checkpoint import Checkpoint, ImportOptions, Source
from xl_export.importers.shared.settings import Setting
from xl_export.importers.shared.validated import Tensors
from xl_export.importers.transformer_xl import Project


class OwnRun(Project):
    title = "xl-export"

    def recognises(self, opened: Source) -> bool:
        return (
            opened.path.is_dir()
            and isinstance(opened.content, dict)
            and {"model", "evaluation"} <= set(opened.content)
        )

    def read(self, opened: Source, options: ImportOptions) -> Checkpoint:
        """A run under its evaluation rule; the user's settings replace the rule's.

        Raises ArtefactError or ConfigError if the run is damaged or the settings do not fit.
        """
        if options.vocab is not None:
            raise ArtefactError(f"{opened.path} is a run and has its own {VOCAB}; leave out --vocab.")
        run = load_run(opened.path)
        rule = run.config.evaluation
        values = {name: getattr(rule, name) for name in ("mem_len", "segment", "mask")}
        values["clamp_len"] = rule.clamp_len or 0
        known = {name: Setting(value, CONFIG) for name, value in values.items()}
        settings = options.applied_to(self.title, known)
        changed: dict[str, Any] = {name: setting.value for name, setting in settings.items()}
        rule = dataclasses.replace(rule, **changed | {"clamp_len": changed["clamp_len"] or None})
        state = run.model.state_dict()
        weights = opened.path / MODEL
        t = Tensors(
            ((name, name, tensor) for name, tensor in state.items()),
            names=self.names,
            where=weights,
            project=self.title,
            allow_nonfinite=options.allow_nonfinite,
        )
        tensors = {name: t.take(name, *tensor.shape) for name, tensor in state.items()}
        return Checkpoint(
            config=run.config.model,
            tensors=tensors,
            notes=options.notes_on(t, run.config.model, settings),
            rule=rule,
            vocab=run.vocab,
            settings=settings,
            run=dataclasses.replace(run.config, evaluation=rule),
            files={"config": opened.path / CONFIG, "model": weights, "vocabulary": opened.path / VOCAB},
        )


PROJECT = OwnRun()
