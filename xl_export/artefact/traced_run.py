"""Artefacts of this project's own runs, whose graph PyTorch traces: `--exporter trace`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import Session
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import AnyForm
from runtimes.sessions.onnx_runtime import OrtSession
from trainer.run.checkpoint import Run
from xl_export.artefact.traced import Graphs, write
from xl_export.artefact.write import finite_arrays, reference_of
from xl_export.graph.ops import OPSETS
from xl_export.tracing.module import ModuleStep
from xl_export.tracing.steps import OwnStep, traced_facts


class TracedRun:
    """A run of this project whose step is traced; see `xl_export.artefact.write.Exportable`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.vocab = run.vocab
        self._graphs = Graphs()

    def traced(self, spec: Spec, rows: int | None = None) -> Spec:
        """The spec of the traced artefact: every head has the whole memory, even if it learned a shorter
        span.

        rows: of each step of a graph of fixed sizes.
        """
        spec = dataclasses.replace(
            spec,
            model=traced_facts(self.run.model),
            opset=OPSETS[spec.form],
            exporter="trace",
            fixed_rows=rows,
        )
        return spec.completed()

    def reference(self, rule: MemoryRule) -> Session:
        return reference_of(self.run, rule)

    def write_graphs(self, spec: Spec, folder: Path) -> OrtSession:
        finite_arrays(self.run.model)
        form: AnyForm = spec.form
        assert form != "own", "the memory of a run has one of the three forms"
        step = OwnStep(self.run.model.eval(), spec.rule, form).eval()
        return write(self._graphs.of(ModuleStep(step), spec), spec, self.vocab, folder)
