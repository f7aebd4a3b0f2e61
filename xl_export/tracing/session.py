"""The step of a module as its graph has it, and as a session: the reference of its own artefact."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from runtimes.contract.memory import Memory
from runtimes.contract.spec import Spec
from runtimes.contract.tensors import POSITIONS
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.graph import GraphSession
from xl_export.tracing.module import LOGITS, ModuleStep, in_a_sentence

HIDDEN = "hidden"  # the output of a step without the output layer of its language model


class GraphStep(nn.Module):
    """The step with the inputs and outputs of the spec, in their order."""

    def __init__(self, step: ModuleStep, spec: Spec) -> None:
        super().__init__()
        self.module = step.module
        self.spec = spec
        self._step = step

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, outputs = self.spec.signature
        dtype = getattr(torch, self.spec.state_dtype)
        narrow = dtype != torch.float32
        fed = dict(zip((tensor.name for tensor in inputs), tensors, strict=False))
        memory = tensors[len(fed) :]
        # A ring is written in its own type, and everything else computes in float32.
        past = memory if self.spec.circular or not narrow else tuple(tensor.float() for tensor in memory)
        given = {name: fed[name] for name in self._step.inputs}
        results, after = self._step(given, fed[POSITIONS], past)
        present = [tensor.to(dtype) if narrow else tensor for tensor in after]
        if not self.spec.language_model:
            return (*(results[tensor.name] for tensor in outputs), *present)
        hidden = results[LOGITS]
        if outputs[0].name == HIDDEN:
            return (hidden, *present)
        if not self.spec.model.selective:
            return (self._step.logits(hidden), *present)
        return (*self.selected(hidden, fed["targets"], fed["logit_rows"]), *present)

    def selected(self, hidden: Tensor, targets: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [rows, V] of some positions, and log p(target) [B, T], 0 where a target is -1."""
        output = self._step
        flat = hidden.flatten(0, 1)
        wanted = targets.flatten()
        logits = output.logits(flat[logit_rows])
        if self.spec.target == "tensorrt":  # shapes that depend on tokens are not for engines
            whole = output.logits(flat).log_softmax(dim=-1)
            scores = whole.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
            return logits, torch.where(wanted >= 0, scores, 0.0).view_as(targets)
        at = (wanted >= 0).nonzero()[:, 0]
        scores = output.log_prob(flat[at], wanted[at])
        return logits, torch.zeros_like(flat[:, 0]).index_copy(0, at, scores).view_as(targets)


class OutputLayer(GraphStep):
    """What is left of a step after its hidden state [B, T, D]."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.selected(*tensors)


class ModuleSession(GraphSession):
    """A module as a session. spec: in fp32."""

    computed_by = "PyTorch"

    def __init__(self, step: ModuleStep, vocab: Vocab | None, spec: Spec) -> None:
        super().__init__(spec, vocab, f"module {spec.memory_identity.weights} {spec.rule}")
        self._step = GraphStep(step, spec)

    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        self.begins()
        arrays: dict[str, Any] = inputs | memory.tensors
        tensors = {fact.name: torch.from_numpy(arrays[fact.name]) for fact in self.spec.inputs}
        fed = {fact.name: tensors[fact.name] for fact in self.spec.signature[0]}
        with torch.no_grad(), in_a_sentence(self._step.module, "step", self.spec.fixed_rows, **fed):
            answers = self._step(*tensors.values())
        results = {fact.name: each.numpy() for fact, each in zip(self.spec.outputs, answers, strict=True)}
        for name, array in outputs.items():
            array[...] = results[name]
        memory.store({state.name: np.array(results[str(state.present)], order="C") for state in self.state})
