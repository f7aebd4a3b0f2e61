"""The session protocol over a step graph whose inputs and outputs the spec names: what ONNX Runtime and TensorRT share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np

from runtimes.base.errors import ArtefactError
from runtimes.contract.memory import Memory
from runtimes.contract.rule import MemoryRule
from runtimes.contract.session import FromLogits, checked_targets, checked_tokens, new_memory
from runtimes.contract.spec import VOCAB, Spec, TensorFacts
from runtimes.contract.vocabulary import Vocab

LogitsOf = Literal["all", "last", "none"]


class GraphSession(FromLogits, ABC):
    """The session protocol (see `runtimes.contract.session.Session`); a runtime says how one step is run."""

    fewest_logits: ClassVar[LogitsOf] = (
        "none"  # positions whose logits a graph with chosen rows computes while scoring
    )

    def __init__(self, spec: Spec, vocab: Vocab, identity: str) -> None:
        self.spec, self.vocab, self.identity = spec, vocab, identity
        self.rule: MemoryRule = spec.rule
        self.state: tuple[TensorFacts, ...] = tuple(state.tensor() for state in spec.state)
        if vocab.size != spec.model.vocab_size:
            raise ArtefactError(
                f"{VOCAB} has {vocab.size} symbols and the model {spec.model.vocab_size}; export it again."
            )

    @abstractmethod
    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], memory: Memory) -> None:
        """Runs the graph once: reads `inputs` and the memory's tensors, fills `outputs`, advances the tensors."""

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
        _, log_probs = self._advance(tokens, memory, logits_of=self.fewest_logits, targets=targets)
        return log_probs, memory

    def _advance(
        self, tokens: np.ndarray, memory: Memory, *, logits_of: LogitsOf, targets: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Logits [rows, V] of some positions, and log p(target) [B, T] where targets are given; advances the memory."""
        tokens = checked_tokens(self, tokens, memory)
        positions = np.arange(tokens.size).reshape(tokens.shape)
        rows = {"all": positions, "last": positions[:, -1:], "none": positions[:, :0]}[logits_of].ravel()
        inputs = {"input_ids": tokens, "position_ids": memory.positions[:, None] + np.arange(tokens.shape[1])}
        outputs = {"logits": np.empty((len(rows), self.spec.model.vocab_size), np.float32)}
        if self.spec.model.selective:
            inputs |= {
                "targets": np.full_like(tokens, -1) if targets is None else targets,
                "logit_rows": rows,
            }
            outputs["log_probs"] = np.empty(tokens.shape, np.float32)
        else:
            outputs["logits"] = outputs["logits"].reshape(*tokens.shape, -1)
        self.run(inputs, outputs, memory)
        memory.positions += tokens.shape[1]
        return outputs["logits"], outputs.get("log_probs", outputs["logits"])
