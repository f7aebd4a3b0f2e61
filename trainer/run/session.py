"""Runs in PyTorch: the reference that every artefact is checked against. Loads torch only when opened."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtimes.base.errors import MissingPackageError, StreamError, first_line, needs
from runtimes.base.progress import say_once
from runtimes.base.records import to_json
from runtimes.base.sealed import refuse_other_identity
from runtimes.contract.checks import (
    checked_lengths,
    checked_targets,
    checked_tokens,
    last_fed,
    new_memory,
    refuse_after_fork,
    tokens_by_name,
)
from runtimes.contract.device import AUTO, CPU, Device, refuse_for_run
from runtimes.contract.memory import MAX_BATCH, Memory, refuse_no_memory
from runtimes.contract.memory_identity import MemoryIdentity, layout_of
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler
from runtimes.contract.tensors import TensorSpec, row_bytes, state_tensors
from runtimes.contract.vocabulary import Vocab
from runtimes.sessions.description import describe_vocab

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.model.model import LanguageModel


# What two devices are compared by.
TRIED_SEGMENTS = 3
TRIED_TOKENS = 16
TRIED_ROWS = 2
TOLERANCE = 1e-3  # nats between two devices in fp32; wrong answers differ by far more
# The process in which a session first loaded PyTorch, whose threads a forked child does not have.
_torch_process: int | None = None


def _refuse_torch_of_a_parent() -> None:
    """Raises StreamError in a forked child of a process that loaded PyTorch; it would wait for ever."""
    global _torch_process
    if _torch_process is None:
        _torch_process = os.getpid()
    if _torch_process != os.getpid():
        raise StreamError(
            "this process was forked from one that had loaded PyTorch, whose threads do not exist here; "
            'start it with multiprocessing\'s "spawn" instead, or open the run only in the children.'
        )


class TorchSession:
    """The session protocol (see `runtimes.contract.session.Session`) over a PyTorch model.

    The memory is the paper's: the hidden states of the last M tokens in front of each layer. It stays in the
    memory of the host, and goes to the device and back at each step.
    """

    spec: None = None  # no artefact
    kernel: None = None  # PyTorch has one implementation
    paths: None = None  # and one way to compute a step
    device: Device = CPU
    before_run: Callable[[], object] | None = None

    def __init__(
        self,
        model: LanguageModel,
        vocab: Vocab,
        rule: MemoryRule,
        *,
        weights: str,
        device: Device = CPU,
    ) -> None:
        """weights: their hash, or any other name of them if no memory of the session is saved."""
        self.device = device
        self.model = model
        self.vocab = vocab
        self.rule = rule
        self.pads_right = not model.config.from_segment_end
        self.sampler = Sampler()
        self.weights = weights
        self.identity = sha256(f"{weights} {rule}".encode()).hexdigest()
        self._process = os.getpid()
        facts = dataclasses.replace(model.facts(), reaches=())  # every layer keeps the whole memory here
        self.state = state_tensors(facts, rule, "hidden")

    @cached_property
    def memory_identity(self) -> MemoryIdentity:
        """As in an artefact with memory of the form `hidden`, if all heads have the whole memory."""
        layout = layout_of(self.state, self.rule, "hidden", self.vocab)
        return MemoryIdentity(layout=layout, weights=self.weights)

    @property
    def computed_by(self) -> str:
        return "PyTorch" if self.device == CPU else f"PyTorch on {self.device}"

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        threads: int | None = None,
        device: Device = AUTO,
        identity: str | None = None,
        rule: MemoryRule | None = None,
    ) -> TorchSession:
        """A session over the last checkpoint of a run.

        rule: the run's own rule of evaluation when None. threads: PyTorch has one number for the whole
        process. device: `auto` is the first GPU that PyTorch can use, if it gives the CPU's answers.
        """
        refuse_for_run(device, folder)
        _refuse_torch_of_a_parent()
        with needs("train", "torch", "safetensors", "tqdm"):
            import torch

            from trainer.run.checkpoint import load_run
        if threads is not None:
            torch.set_num_threads(threads)
        run = load_run(folder)
        chosen = rule or run.config.evaluation
        session = cls(run.model.eval(), run.vocab, chosen, weights=run.sha256)
        refuse_other_identity(folder, session.identity, identity)
        if device == CPU:
            return session
        return session._on_first_gpu() if device.kind == "auto" else session._on(device)

    def _on(self, device: Device) -> TorchSession:
        """A session of the same weights on a device; raises MissingPackageError if PyTorch cannot use it."""
        if (fault := _unusable(device)) is None:
            try:
                return self._moved(device)
            except RuntimeError as error:  # PyTorch's: the memory of the GPU is full, or it is not served
                fault = f"{first_line(error):.300}"
        raise MissingPackageError(
            f"device is {device} and PyTorch cannot use it: {fault}; install what is missing, or give "
            "--device cpu."
        )

    def _on_first_gpu(self) -> TorchSession:
        """The session on the first GPU if its answers are right there; otherwise itself with a line why."""
        first = Device("cuda")
        if _unusable(first):
            return self
        try:
            moved = self._moved(first)
            difference = _difference(self, moved)
            fault = f"its answers differ from the CPU's by {difference:.2g} nats"
        except RuntimeError as error:  # as above; a GPU may also be found for which PyTorch has no kernels
            difference = math.nan
            fault = f"{first_line(error):.300}"
        if difference <= TOLERANCE:
            say_once(f"computing with PyTorch on {first}")
            return moved
        say_once(f"computing with PyTorch on the CPU, because {first} is not usable: {fault}")
        return self

    def _moved(self, device: Device) -> TorchSession:
        """A session of the same weights on another device; this one keeps its own."""
        moved = copy.copy(self)
        moved.model = copy.deepcopy(self.model).to(str(device))
        moved.device = device
        return moved

    @classmethod
    def describe(cls, folder: Path) -> dict[str, Any]:
        """The facts of the run in a folder, for `info`; the run is opened, so this needs PyTorch.

        training: the last step, the best validation, the data and the recipe; None for an imported run.
        concern: why the run may be of no use, or None.
        """
        session = cls.open(folder, device=CPU)
        from trainer.run.history import history_of, read_config

        history = history_of(folder, read_config(folder))
        return {
            "kind": "run",
            "identity": session.identity,
            "memory_identity": to_json(session.memory_identity),
            "computed_by": session.computed_by,
            "model": to_json(session.model.facts()),
            "rule": to_json(session.rule),
            "vocabulary": describe_vocab(session.vocab),
            "training": history.describe() if history else None,
            "concern": history.concern if history else None,
        }

    def with_rule(self, rule: MemoryRule) -> TorchSession:
        """Returns a session of the same weights under any other rule.

        So a run in training keeps one model through a sweep.
        """
        if rule == self.rule:
            return self
        other = type(self)(self.model, self.vocab, rule, weights=self.weights)
        other.device = self.device
        other.sampler = self.sampler
        other._process = self._process  # the weights and PyTorch's threads belong to that process
        return other

    def step_bytes(self, *, segment: int) -> int:
        state = row_bytes(self.state)
        scores = 4 * self.model.facts().heads * segment * (self.rule.mem_len + segment)
        logits = 4 * segment * self.vocab.size
        # Memory before and after the step; logits, and two arrays made of them; scores of one layer, and four
        # made of them.
        return 2 * state + 3 * logits + 5 * scores

    def most_rows(self, tokens: int) -> int:
        return MAX_BATCH

    def start(self, batch: int) -> Memory:
        return new_memory(self, batch)

    def step(self, tokens: Any, memory: Memory, *, lengths: np.ndarray | None = None) -> tuple[Any, Memory]:
        if isinstance(tokens, dict):
            logits, memory = self.step(tokens_by_name(tokens), memory, lengths=lengths)
            return {"logits": logits}, memory
        hidden, memory = self._advance(tokens, memory, lengths)
        return self._logits(hidden), memory

    def predict(
        self, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        hidden, memory = self._advance(tokens, memory, lengths)
        return self._logits(_rows_at(hidden, last_fed(lengths, tokens))), memory

    def score(
        self, tokens: np.ndarray, targets: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        import torch

        wanted = checked_targets(self, targets, tokens, lengths)
        hidden, memory = self._advance(tokens, memory, lengths)
        log_probs = np.zeros(wanted.shape, np.float32)
        chosen = wanted >= 0
        with torch.inference_mode():
            log_probs[chosen] = (
                self.model.vocabulary.log_prob(
                    hidden[torch.from_numpy(chosen).to(hidden.device)],
                    torch.from_numpy(wanted[chosen]).to(hidden.device),
                )
                .cpu()
                .numpy()
            )
        return log_probs, memory

    def _advance(
        self, tokens: np.ndarray, memory: Memory, lengths: np.ndarray | None
    ) -> tuple[Tensor, Memory]:
        """The last layer's output [B, T, D], NaN for padding, and the memory after the segment."""
        import torch

        refuse_no_memory(memory)
        with memory.in_use():
            tokens = checked_tokens(self, tokens, memory)
            refuse_after_fork(self._process)
            lengths = None if lengths is None else checked_lengths(lengths, tokens)
            memory.clear_restarted_rows()
            place = str(self.device)
            past = [torch.from_numpy(memory.tensors[tensor.name]).to(place) for tensor in self.state]
            layers = self._layers if lengths is None else partial(self._layers_by_length, lengths)
            if self.before_run is not None:
                self.before_run()
            hidden, after = layers(
                torch.from_numpy(tokens).to(place), past, torch.from_numpy(memory.positions).to(place)
            )
            memory.store(
                {
                    tensor.name: array.contiguous().cpu().numpy()
                    for tensor, array in zip(self.state, after, strict=True)
                }
            )
            memory.positions += tokens.shape[1] if lengths is None else lengths
            memory.unsure = True  # the memory is not a ring
        return hidden, memory

    def _layers_by_length(
        self, lengths: np.ndarray, tokens: Tensor, past: list[Tensor], positions: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """`_layers` without padding: the rows of each length are a batch of their own."""
        import torch

        hidden: Tensor | None = None
        after = [array.clone() for array in past]
        for length in np.unique(lengths[lengths > 0]).tolist():
            rows = torch.from_numpy(np.flatnonzero(lengths == length)).to(tokens.device)
            own = [array[rows] for array in past]
            outputs, kept = self._layers(tokens[rows, :length], own, positions[rows])
            if hidden is None:
                hidden = torch.full((*tokens.shape, outputs.shape[-1]), torch.nan, device=tokens.device)
            hidden[rows, :length] = outputs
            for array, now in zip(after, kept, strict=True):
                array[rows] = now
        if hidden is None:  # no row has a token
            hidden = torch.full((*tokens.shape, self.model.config.d_model), torch.nan, device=tokens.device)
        return hidden, after

    def _layers(self, tokens: Tensor, past: list[Tensor], positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        import torch

        with torch.inference_mode():
            outputs, after = self.model.layers(tokens, past, positions, self.rule)
            return self.model.last(outputs), after

    def _logits(self, hidden: Tensor) -> np.ndarray:
        import torch

        with torch.inference_mode():
            logits: np.ndarray = self.model.vocabulary.logits(hidden).cpu().numpy()
        return logits


def _unusable(device: Device) -> str | None:
    """Why PyTorch cannot use a device; None if it can."""
    import torch

    if device.kind == "mps":
        return None if torch.backends.mps.is_available() else "this is no Mac with Metal"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "it finds no NVIDIA GPU with a driver"
    if device.index >= (count := torch.cuda.device_count()):
        return f"this machine has {count} of them, and they are counted from 0"
    return None


def _difference(one: TorchSession, other: TorchSession) -> float:
    """The largest difference of two sessions' answers to a few tokens; NaN where one is not a number."""
    answers = []
    for session in (one, other):
        memory = session.start(TRIED_ROWS)
        segment = min(TRIED_TOKENS, session.rule.segment)
        pieces = []
        for number in range(TRIED_SEGMENTS):
            tokens = np.arange(TRIED_ROWS * segment).reshape(TRIED_ROWS, segment) + number
            tokens %= session.vocab.size
            log_probs, memory = session.score(tokens, np.roll(tokens, 1, axis=1), memory)
            pieces.append(log_probs)
        answers.append(np.concatenate(pieces, axis=1))
    return float(np.abs(answers[0] - answers[1]).max())


def _rows_at(hidden: Tensor, index: np.ndarray) -> Tensor:
    """One position [B, D] of each row of hidden [B, T, D]."""
    import torch

    rows = torch.arange(len(hidden), device=hidden.device)
    return hidden[rows, torch.from_numpy(index).to(hidden.device)]


class ProjectedTorchSession(TorchSession):
    """The same model and answers, with keys and values as its memory.

    A segment does not compute the keys and values of earlier segments again.

    An artefact is compared with it, because hidden states would take too long. It is PyTorch's side in
    benchmarks. write: how the memory takes keys and values up; see `trainer.model.projected.ProjectedModel`.
    """

    def __init__(
        self,
        model: LanguageModel,
        vocab: Vocab,
        rule: MemoryRule,
        *,
        weights: str,
        write: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        from trainer.model.projected import ProjectedModel

        super().__init__(model, vocab, rule, weights=weights)
        self.identity += " projected"
        config = model.config
        self._projected = ProjectedModel(model, rule, write=write)
        shape = ("batch", config.heads, rule.mem_len, config.head_dim)
        names = [f"{kind}.{layer}" for layer in range(config.layers) for kind in ("key", "value")]
        self.state = tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name in names)

    def _layers(self, tokens: Tensor, past: list[Tensor], positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        return self._projected.step(tokens, past, positions)
