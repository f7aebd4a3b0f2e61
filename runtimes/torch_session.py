"""Runs in PyTorch: the reference that every artefact is checked against. Loads torch only when opened."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from runtimes.errors import needs
from runtimes.memory import Memory
from runtimes.rule import MemoryRule
from runtimes.session import FromLogits, checked_tokens, new_memory
from runtimes.spec import TensorFacts, state_tensors
from runtimes.vocab import Vocab

if TYPE_CHECKING:
    from trainer.model import TransformerXL


class TorchSession(FromLogits):
    """The session protocol (see `runtimes.session.Session`) over a PyTorch model, with the paper's hidden-state memory."""

    def __init__(self, model: TransformerXL, vocab: Vocab, rule: MemoryRule, *, identity: str) -> None:
        self.model, self.vocab, self.rule, self.identity = model, vocab, rule, identity
        self.state: tuple[TensorFacts, ...] = tuple(state.tensor() for state in state_tensors(model.facts(), rule, "hidden"))

    @classmethod
    def open(cls, folder: Path, *, threads: int | None = None, rule: MemoryRule | None = None) -> TorchSession:
        """A run's last checkpoint, under the rule that it is evaluated with unless another is given."""
        with needs("train", "torch", "safetensors", "tqdm"):
            import torch

            from trainer.checkpoint import load_run
        if threads is not None:
            torch.set_num_threads(threads)
        run = load_run(folder)
        chosen = rule or run.config.evaluation
        return cls(run.model.eval(), run.vocab, chosen, identity=sha256(f"{run.sha256} {chosen}".encode()).hexdigest())

    def start(self, batch: int) -> Memory:
        return new_memory(self, batch)

    def step(self, tokens: np.ndarray, memory: Memory) -> tuple[np.ndarray, Memory]:
        import torch

        tokens = checked_tokens(self, tokens, memory)
        past = [torch.from_numpy(memory.tensors[tensor.name]) for tensor in self.state]
        with torch.inference_mode():
            logits, after = self.model(torch.from_numpy(tokens), past, torch.from_numpy(memory.positions), self.rule)
        memory.tensors = {tensor.name: array.numpy() for tensor, array in zip(self.state, after, strict=True)}
        memory.positions += tokens.shape[1]
        return logits.numpy(), memory
