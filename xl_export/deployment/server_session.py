"""A session over a graph for Triton Inference Server, to compare it with the artefact's own graph."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from runtimes.base.startup import FATAL
from runtimes.contract.memory import Memory
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import POSITIONS
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.graph import Arrays, GraphSession, Positions
from runtimes.sessions.onnx_runtime import ON_THE_CPU, import_onnxruntime
from xl_export.deployment.server_graph import START, SequenceGraph

EARLIER_POSITION = 7  # the position that an earlier sequence left to one that begins


class SequenceSession(GraphSession):
    """The session protocol over `SequenceGraph`: its states are fed back, and it is told where a text begins.

    file: of the graph.
    """

    logits_while_scoring: ClassVar[Positions] = "last"  # as the server gets them

    def __init__(self, spec: Spec, vocab: Vocab | None, graph: SequenceGraph, file: Path) -> None:
        super().__init__(spec, vocab, spec.identity)
        self._graph = graph
        ort = import_onnxruntime(spec)
        options = ort.SessionOptions()
        options.log_severity_level = FATAL
        self._session = ort.InferenceSession(str(file), options, **ON_THE_CPU)

    @property
    def computed_by(self) -> str:
        return "ONNX Runtime, the graph for Triton Inference Server"

    def run(self, inputs: Arrays, outputs: Arrays, memory: Memory) -> None:
        *states, (read_position, written_position) = self._graph.states
        first = inputs[POSITIONS][:, :1]
        starts = first == 0
        feed = {fact.name: inputs[fact.name] for fact in self._graph.inputs}
        feed |= {
            START: starts.astype(np.int32),
            read_position.name: np.where(starts, EARLIER_POSITION, first),
        }
        for fact, (read, _) in zip(self.spec.state, states, strict=True):
            feed[read.name] = np.asarray(memory.tensors[fact.name])
        names = [value.name for value in self._session.get_outputs()]
        self.begins()
        found = dict(zip(names, self._session.run(names, feed), strict=True))
        assert (found[written_position.name] == inputs[POSITIONS][:, -1:] + 1).all()
        for name, output in outputs.items():
            output[...] = found[name]
        for fact, (_, written) in zip(self.spec.state, states, strict=True):
            memory.tensors[fact.name][...] = found[written.name]
