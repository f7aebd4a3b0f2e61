"""What a module of the user needs so that `xl_export.trace` can export it, and the module as a session.

A module has `sizes`, `start` and `step`. It may have `logits` and `log_prob` too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from runtimes.base.errors import ArtefactError, ConfigError, UserError, first_line
from runtimes.contract.model_facts import ModelFacts
from runtimes.contract.precision import Float
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import FORMS, AnyForm, Shapes, state_tensors
from runtimes.contract.vocabulary import Vocab
from trainer.run.session import TorchSession


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a module.

    All but `vocab_size` are for `xl-export info`, and to recognise a form of memory.
    """

    vocab_size: int
    layers: int
    d_model: int
    heads: int = 1
    """Of the keys and values in memory."""
    head_dim: int = 0
    """Of the keys and values in memory; 0 for d_model / heads."""
    d_ff: int = 0


class StepModule(Protocol):
    """A language model whose step can be traced; it is also a `torch.nn.Module`.

    Shape letters: B batch rows, T tokens in this segment, V vocabulary, D the width of the last layer's
    output.
    """

    sizes: Sizes

    def start(self, batch: int) -> Sequence[Tensor]:
        """The memory of `batch` new streams: any number of tensors float32 [batch, …], all zero."""
        ...

    def step(
        self, tokens: Tensor, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The logits [B, T, V] after each token of a segment, and the memory after it.

        The memory has the shapes that `start` gives.

        tokens int64 [B, T]; T may be any number from 1 to the segment of the rule. positions int64 [B, T]:
        the stream position of each token. A row whose position is 0 starts a new text, whatever its memory
        holds; a negative position is padding before a text. Neither the memory from before position 0 nor the
        padding may be visible to a token of the text.

        Where the module has a method `logits(hidden [N, D])`, the first result is the hidden state [B, T, D].
        Large vocabularies profit from it: then logits are computed only for the tokens that need them. A
        method `log_prob(hidden [N, D], targets int64 [N])` gives log-probabilities [N] without a whole
        distribution.
        """
        ...


def refuse_other_modules(module: Any) -> None:
    """Raises ConfigError where a module lacks a part of the interface."""
    for name, kind in (("sizes", "an xl_export.Sizes"), ("start", "a method"), ("step", "a method")):
        part = getattr(module, name, None)
        if not (isinstance(part, Sizes) if name == "sizes" else callable(part)):
            raise ConfigError(
                f"{type(module).__name__} has no `{name}`; trace expects a torch.nn.Module with `sizes` "
                f"({kind} there), `start(batch)` and `step(tokens, positions, memory)`."
            )
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{type(module).__name__} is not a torch.nn.Module; trace exports modules of PyTorch."
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name} of {type(module).__name__} is {kind}; trace computes in float32: call "
                'module.float() first, and give precision="fp16" for an artefact of the same size.'
            )
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{name} of {type(module).__name__} is on the device {tensor.device}; trace computes "
                "on the CPU: call module.cpu() first."
            )


@contextmanager
def in_a_sentence(module: Any, method: str, **fed: Any) -> Iterator[None]:
    """Raises ArtefactError, with what was fed, for any error that a method of the user's module raises."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # it is the user's code, so it may be of any class
        shown = ", ".join(f"{name} {_in_short(value)}" for name, value in fed.items()) or "a hidden state"
        raise ArtefactError(
            f"{type(module).__name__}.{method} raised {type(error).__name__} ({first_line(error):.200}) with "
            f"{shown}; expected it to take this, as the guide to models of your own says."
        ) from error


def _in_short(value: Any) -> str:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim != 2 or not value.numel():
        return str(list(value.shape)) if isinstance(value, Tensor) else str(value)
    return f"{list(value.shape)} from {int(value.min())} to {int(value.max())}"


def facts_of(module: Any) -> ModelFacts:
    """What the spec of an artefact says about a module of the user."""
    sizes: Sizes = module.sizes
    return ModelFacts(
        positions="own",
        sublayers="own",
        layers=sizes.layers,
        heads=sizes.heads,
        head_dim=sizes.head_dim or max(1, sizes.d_model // max(1, sizes.heads)),
        d_model=sizes.d_model,
        d_ff=sizes.d_ff,
        persistent=0,
        vocab_size=sizes.vocab_size,
        cutoffs=(),
        reaches=(),
        pre_norm=False,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


def digest_of(module: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and values of a module's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        array = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {array.dtype} {list(array.shape)}\n".encode())
        # A view as bytes keeps every bit of types that NumPy lacks; a tensor without axes has no such view.
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return digest.hexdigest()


def first_memory(module: Any, batch: int = 1) -> tuple[Tensor, ...]:
    """The memory that a module starts with; raises ConfigError where a session could not start so."""
    with in_a_sentence(module, "start", batch=batch):
        memory = tuple(module.start(batch))
    for number, tensor in enumerate(memory):
        where = f"memory tensor {number} of {type(module).__name__}.start({batch})"
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32 or tensor.ndim < 1:
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise ConfigError(f"{where} is {kind}; expected a tensor float32 [batch, …].")
        if tensor.shape[0] != batch:
            raise ConfigError(f"{where} has the shape {list(tensor.shape)}; expected {batch} rows.")
        if bool(tensor.ne(0).any()):
            raise ConfigError(
                f"{where} is not zero, and every stream starts with zeros; let `step` replace the memory of "
                "rows whose position is 0."
            )
    return memory


def form_of(
    module: Any, facts: ModelFacts, rule: MemoryRule, wanted: AnyForm | None
) -> tuple[AnyForm, Shapes]:
    """The form of a module's memory, and its shapes where the form is `own`.

    wanted: the form that the user names; None takes the form whose tensors have the module's shapes. Raises
    ConfigError where the module's tensors are not those of the wanted form.
    """
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in first_memory(module))
    fitting: list[AnyForm] = [form for form in FORMS if shapes == _shapes(facts, rule, form)]
    form = wanted or (fitting[0] if fitting else "own")
    if form != "own" and form not in fitting:
        expected = [list(shape) for shape in _shapes(facts, rule, form)]
        raise ConfigError(
            f"memory is {form} and the module's tensors are {_listed(shapes)} a row; expected "
            f"{_listed(expected)}, or leave memory out."
        )
    return form, (shapes if form == "own" else ())


def _shapes(facts: ModelFacts, rule: MemoryRule, form: AnyForm) -> Shapes:
    states = state_tensors(facts, rule, form)
    return tuple(tuple(int(size) for size in state.shape[1:]) for state in states)


def _listed(shapes: Sequence[Sequence[int]]) -> str:
    shown = ", ".join(str(list(shape)) for shape in shapes[:3])
    return f"{len(shapes)} of {shown}{', …' if len(shapes) > 3 else ''}" if shapes else "none"


class Output:
    """The output layer of a module: its own methods, or what follows from its logits."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of what `step` gave [..., D]; the module's own method is always given [N, D]."""
        own = getattr(self.module, "logits", None)
        if own is None:
            return hidden
        rows: Tensor = own(hidden.flatten(0, -2))
        return rows.reshape(*hidden.shape[:-1], rows.shape[-1])

    def log_prob(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """log p(target) [N] of rows [N, D] that `step` gave."""
        own = getattr(self.module, "log_prob", None)
        if own is not None:
            result: Tensor = own(hidden, targets)
            return result
        return self.logits(hidden).log_softmax(dim=-1).gather(-1, targets[:, None])[:, 0]


class ModuleSession(TorchSession):
    """A module as a session: the reference of its own artefact."""

    def __init__(self, module: Any, vocab: Vocab, rule: MemoryRule, form: AnyForm, shapes: Shapes) -> None:
        facts = facts_of(module)
        self._facts = facts
        self.vocabulary = Output(module)
        self.module = module
        self.vocab = vocab
        self.rule = rule
        self.model: Any = self  # what the methods of TorchSession ask for: `facts` and `vocabulary`
        self.identity = f"module {digest_of(module)} {rule}"
        self._process = os.getpid()
        dtype: Float = "float32"
        self.state = state_tensors(facts, rule, form, dtype, shapes)

    def facts(self) -> ModelFacts:
        return self._facts

    def _layers(self, tokens: Tensor, past: list[Tensor], positions: Tensor) -> tuple[Tensor, list[Tensor]]:
        stream = positions[:, None] + torch.arange(tokens.shape[1])
        with torch.no_grad(), in_a_sentence(self.module, "step", positions=stream):
            hidden, after = self.module.step(tokens, stream, tuple(past))
            return hidden, list(after)

    def _answer(self, compute: Callable[[], Tensor]) -> np.ndarray:
        with torch.no_grad(), in_a_sentence(self.module, "logits or log_prob"):
            answer: np.ndarray = compute().numpy()
        return answer
