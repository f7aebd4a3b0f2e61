"""What ONNX Runtime and TensorRT share: the session protocol over a step graph whose tensors the spec
names.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.contract.checks import (
    checked_targets,
    checked_tokens,
    memory_in_use,
    new_memory,
    refuse_after_fork,
)
from runtimes.contract.memory import Memory
from runtimes.contract.restart import clear_restarted_rows, observe
from runtimes.contract.rule import MemoryRule
from runtimes.contract.spec import VOCAB, Spec
from runtimes.contract.tensors import TensorFacts
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.from_logits import FromLogits

Positions = Literal["all", "last", "none"]  # positions of a segment whose logits are computed


class GraphSession(FromLogits, ABC):
    """The session protocol (see `runtimes.contract.session.Session`); a runtime adds how the graph runs once.

    A graph with a large vocabulary computes logits only for chosen rows ("selective",
    `ModelFacts.selective`).
    """

    # Positions whose logits a selective graph computes while scoring, where nobody reads them: as few as the
    # runtime allows.
    logits_while_scoring: ClassVar[Positions] = "none"

    def __init__(self, spec: Spec, vocab: Vocab, identity: str) -> None:
        self.spec, self.vocab, self.identity = spec, vocab, identity
        self._process = os.getpid()
        self.rule: MemoryRule = spec.rule
        self.state: tuple[TensorFacts, ...] = tuple(state.tensor() for state in spec.state)
        if vocab.size != spec.model.vocab_size:
            raise ArtefactError(
                f"{VOCAB} has {vocab.size} symbols and the model {spec.model.vocab_size}; export it again."
            )

    @property
    @abstractmethod
    def computed_by(self) -> str:
        """What computes a step, in words for people."""

    @property
    def kernel(self) -> str | None:
        """The implementation that computes a step, where the runtime has several."""
        return None

    @abstractmethod
    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        """Runs the graph once: reads `inputs` and the memory's tensors, fills `outputs` and advances the
        tensors.
        """

    def with_rule(self, rule: MemoryRule) -> GraphSession:
        own = self.rule
        if rule == own:
            return self
        if rule.segment > own.segment:
            raise StreamError(
                f"segment is {rule.segment}; this artefact takes 1 to {own.segment} tokens a step: give a "
                "smaller one, or export with a larger --segment."
            )
        name = "mem_len" if rule.mem_len != own.mem_len else "clamp_len"
        option, wanted, fixed = f"--{name.replace('_', '-')}", getattr(rule, name), getattr(own, name)
        raise StreamError(
            f"{option} is {'none' if wanted is None else wanted} and this artefact was exported with "
            f"{'none' if fixed is None else fixed}, which is fixed in its graph: export again with {option} "
            f"{wanted or 0}, or give the run that it was made from."
        )

    def step_bytes(self, *, segment: int) -> int:
        state = sum(tensor.num_bytes(batch=1) for tensor in self.state)
        logits = 4 * segment * self.vocab.size
        return 2 * state + 3 * logits  # memory before and after the step; logits, and two arrays made of them

    def start(self, batch: int) -> Memory:
        return new_memory(self, batch)

    def step(self, tokens: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        logits, _ = self._advance(tokens, memory, logits_of="all")
        return logits.reshape(*np.shape(tokens), -1), memory

    def predict(self, tokens: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        if not self.spec.model.selective:
            return super().predict(tokens, memory)
        logits, _ = self._advance(tokens, memory, logits_of="last")
        return logits, memory

    def score(self, tokens: np.ndarray, targets: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        if not self.spec.model.selective:
            return super().score(tokens, targets, memory)
        targets = checked_targets(self, targets, tokens)
        _, log_probs = self._advance(tokens, memory, logits_of=self.logits_while_scoring, targets=targets)
        return log_probs, memory

    def _advance(
        self, tokens: np.ndarray, memory: Memory, *, logits_of: Positions, targets: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits [rows, V] of some positions, and log p(target) [B, T] where targets are given; advances the
        memory.
        """
        with memory_in_use(memory):
            tokens = checked_tokens(self, tokens, memory)
            refuse_after_fork(self._process)
            clear_restarted_rows(memory)
            positions = np.arange(tokens.size).reshape(tokens.shape)
            rows = {"all": positions, "last": positions[:, -1:], "none": positions[:, :0]}[logits_of].ravel()
            stream = memory.positions[:, None] + np.arange(tokens.shape[1])
            inputs = {"input_ids": tokens, "position_ids": stream}
            outputs = {"logits": np.empty((len(rows), self.spec.model.vocab_size), np.float32)}
            if self.spec.model.selective:
                inputs["targets"] = np.full_like(tokens, -1) if targets is None else targets
                inputs["logit_rows"] = rows
                outputs["log_probs"] = np.empty(tokens.shape, np.float32)
            else:
                outputs["logits"] = outputs["logits"].reshape(*tokens.shape, -1)
            self.run(inputs, outputs, memory)
            memory.positions += tokens.shape[1]
            observe(memory, _last_output(outputs, inputs))
        return outputs["logits"], outputs.get("log_probs", outputs["logits"])


def _last_output(outputs: dict[str, np.ndarray], inputs: dict[str, np.ndarray]) -> np.ndarray:
    """A number [B], finite where the last output of a row was computed and is finite."""
    batch = len(inputs["input_ids"])
    logits = outputs["logits"]
    if logits.size:  # of every position, or of chosen ones of which the last of each row is one
        with np.errstate(invalid="ignore", over="ignore"):
            last: np.ndarray = logits.reshape(batch, -1, logits.shape[-1])[:, -1].sum(axis=-1)
        return last
    return np.where(inputs["targets"][:, -1] >= 0, outputs["log_probs"][:, -1], np.nan)
