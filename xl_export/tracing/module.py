"""What a module of the user needs so that `xl_export.trace` can export it.

A language model has `sizes`, `start` and `step`, and perhaps `logits` and `log_prob`. Any other module has
`inputs` instead of `sizes`.
"""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from runtimes.base.errors import ArtefactError, ConfigError, UserError, first_line
from runtimes.base.ranges import Range
from runtimes.contract.model_facts import MAX_SIZE, ModelFacts
from runtimes.contract.rule import MemoryRule
from runtimes.contract.tensors import (
    FORMS,
    AnyForm,
    Shapes,
    Signature,
    TensorSpec,
    positions_input,
    refuse_signature,
    state_tensors,
)
from xl_export.tracing.refusal import code_of

LOGITS = "logits"  # the output of a language model, before its output layer a hidden state
INPUT = "input"  # the name of an input that a module does not name
OUTPUT = "output"


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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            Range(0, MAX_SIZE, whole=True).check(name, value, ConfigError)


@dataclass(frozen=True)
class Input:
    """One input of a step that is no language model; `ids`, `features` and `constant` make one."""

    sizes: tuple[int, ...] = ()
    """Of the value of one token, or of one row if it is a constant."""
    ids: int | None = None
    """How many ids there are; None for numbers."""
    timed: bool = True
    """Whether it has a value for each token; otherwise it has one for each row, the same in every step."""

    def __post_init__(self) -> None:
        for size in self.sizes:
            Range(1, MAX_SIZE, whole=True).check("a size of an input", size, ConfigError)
        if self.ids is not None:
            Range(1, MAX_SIZE, whole=True).check("the number of ids of an input", self.ids, ConfigError)

    def tensor(self, name: str) -> TensorSpec:
        """The entry in the spec."""
        shape: tuple[int | str, ...] = ("batch", *(["tokens"] if self.timed else []), *self.sizes)
        return TensorSpec(
            name=name, dtype="float32" if self.ids is None else "int64", shape=shape, ids=self.ids
        )


def ids(count: int) -> Input:
    """An input int64 [B, T] of ids from 0 to count - 1."""
    return Input(ids=count)


def features(*sizes: int) -> Input:
    """An input float32 [B, T, *sizes], such as `features(12)` or, for images, `features(3, 64, 64)`."""
    return Input(sizes)


def constant(*sizes: int) -> Input:
    """An input float32 [B, *sizes] with one value for each stream, which the caller repeats in every step."""
    return Input(sizes, timed=False)


class NamedModule(Protocol):
    """A step with memory that is no language model; it is also a `torch.nn.Module`."""

    inputs: Mapping[str, Input] | Input

    def start(self, batch: int) -> Sequence[Tensor]:
        """The memory of `batch` new streams: tensors float32 [batch, …], the same in each row."""
        ...

    def step(
        self, inputs: Mapping[str, Tensor] | Tensor, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Mapping[str, Tensor] | Tensor, Sequence[Tensor]]:
        """The outputs by name, and the memory after the segment in the shapes that `start` returns.

        inputs: by name, or one tensor if `inputs` of the module is one. positions int64 [B, T]: the stream
        position of each token. An output is float32 or int64, [B, T, …] or [B, …]; one tensor is called
        `output`.
        """
        ...


class StepModule(Protocol):
    """A language model whose step can be traced; it is also a `torch.nn.Module`.

    Shape letters: B batch rows, T tokens in this segment, V vocabulary, D the width of the last layer's
    output.
    """

    sizes: Sizes

    def start(self, batch: int) -> Sequence[Tensor]:
        """The memory of `batch` new streams: tensors float32 [batch, …], the same in each row."""
        ...

    def step(
        self, tokens: Tensor, positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The logits [B, T, V] after each token of a segment, and the memory after it.

        The memory has the shapes that `start` gives.

        tokens int64 [B, T]; T may be any number from 1 to the segment of the rule, or to the attribute
        `step_tokens` of the module, such as 1; a longer step is then made of several. positions int64 [B, T]:
        the stream position of each token. A row whose position is 0 starts a new text, whatever its memory
        holds; a negative position is padding before a text. A token of the text must not see the padding.

        Where the module has a method `logits(hidden [N, D])`, the first result is the hidden state [B, T, D].
        Large vocabularies profit from it: then logits are computed only for the tokens that need them. A
        method `log_prob(hidden [N, D], targets int64 [N])` gives log-probabilities [N] without a whole
        distribution.
        """
        ...


def refuse_other_modules(module: Any) -> None:
    """Raises ConfigError where a module lacks a part of the interface."""
    given = getattr(module, "inputs", None)
    listed = list(given.values()) if isinstance(given, Mapping) else [given]
    has = {
        "sizes` or `inputs": isinstance(getattr(module, "sizes", None), Sizes)
        or (bool(listed) and all(isinstance(each, Input) for each in listed)),
        "start": callable(getattr(module, "start", None)),
        "step": callable(getattr(module, "step", None)),
    }
    for name, there in has.items():
        if not there:
            raise ConfigError(
                f"{type(module).__name__} has no `{name}`; trace expects a torch.nn.Module with "
                "`start(batch)` and either `sizes` (an xl_export.Sizes) and `step(tokens, positions, "
                "memory)`, or `inputs` (such as {'observation': xl_export.features(12)}) and "
                "`step(inputs, positions, memory)`."
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
def in_a_sentence(module: Any, method: str, rows: int | None = None, /, **fed: Any) -> Iterator[None]:
    """Raises ArtefactError, with what was fed, for any error that a method of the user's module raises.

    rows: the number of rows for which it is traced; None for any.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # it is the user's code, so it may be of any class
        if rows is not None:  # it is called with so many at a time
            fed = {name: value[:rows] for name, value in fed.items()}
        shown = ", ".join(f"{name} {_in_short(value)}" for name, value in fed.items()) or "a hidden state"
        code = code_of(traceback.extract_tb(error.__traceback__))
        expected = (
            "any number of rows, and of tokens up to the segment; give it step_tokens = 1 if it takes one "
            "token, or trace it for fixed sizes (rows=1, and tokens=(1, segment) to generate)"
        )
        if rows is not None:
            expected = f"{rows} {'row' if rows == 1 else 'rows'} of any number of tokens up to the segment"
        raise ArtefactError(
            f"{type(module).__name__}.{method} raised {type(error).__name__} ({first_line(error):.200}) "
            f"{f'at {code} ' if code else ''}with {shown}; expected it to accept {expected}."
        ) from error


def _in_short(value: Any) -> str:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.ndim != 2 or not value.numel():
        return str(list(value.shape)) if isinstance(value, Tensor) else str(value)
    return f"{list(value.shape)} from {int(value.min())} to {int(value.max())}"


def facts_of(module: Any) -> ModelFacts:
    """What the spec of an artefact says about a module of the user."""
    unknown = Sizes(vocab_size=0, layers=0, d_model=0, heads=0)
    sizes: Sizes = getattr(module, "sizes", unknown)
    return ModelFacts(
        positions="own",
        sublayers="own",
        layers=sizes.layers,
        heads=sizes.heads,
        head_dim=sizes.head_dim or sizes.d_model // max(1, sizes.heads),
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
    """SHA-256 over the names, types, shapes and values of a module's parameters and buffers."""
    digest = hashlib.sha256()
    # Some buffers are no part of the state, such as the frequencies of rotary positions.
    tensors = {**dict(module.named_buffers(remove_duplicate=False)), **module.state_dict()}
    for name, tensor in sorted(tensors.items()):
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
        if bool(tensor.ne(tensor[:1]).any()):
            raise ConfigError(f"{where} differs from row to row; expected the same values in each row.")
    return memory


def form_of(
    step: ModuleStep, facts: ModelFacts, rule: MemoryRule, wanted: AnyForm | None
) -> tuple[AnyForm, Shapes]:
    """The form of a module's memory, and its shapes where the form is `own`.

    wanted: the form that the user names; None takes the form whose tensors have the module's shapes. Raises
    ConfigError where the module's tensors are not those of the wanted form.
    """
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in step.start(1))
    known = FORMS if facts.layers else ()
    fitting: list[AnyForm] = [form for form in known if shapes == _shapes(facts, rule, form)]
    form = wanted or (fitting[0] if fitting else "own")
    if form != "own" and form not in fitting:
        expected = [list(shape) for shape in _shapes(facts, rule, form)] if facts.layers else []
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


class ModuleStep:
    """The step of a module with named inputs and outputs, as a language model has them too.

    inputs: by name, without the positions. language_model: whether the module has `sizes`. Then the only
    input is `input_ids` and the only output is `logits`, or a hidden state for the method `logits`.

    rows: the number of rows for which the graph is traced; None for any. The module computes no other number:
    more rows are computed in turns, and fewer with copies of the last one.
    """

    def __init__(self, module: Any, rows: int | None = None) -> None:
        self.module = module
        self.rows = rows
        self.name = type(module).__name__
        self.language_model = isinstance(getattr(module, "sizes", None), Sizes)
        given = {"input_ids": ids(module.sizes.vocab_size)} if self.language_model else module.inputs
        self._bare = self.language_model or isinstance(given, Input)
        self.inputs: dict[str, Input] = {INPUT: given} if isinstance(given, Input) else dict(given)
        self.moves_every: int | None = getattr(module, "moves_every", None)
        """Number of complete tokens at which the memory moves; None if it moves with every token."""
        self.rounding = self.mean_rounding = 0.0
        """Of its answers, in nats, as `check_module` measures it and `spec.json` states it."""
        self.step_tokens: int | None = getattr(module, "step_tokens", None)
        """The most tokens that the module's own step takes; None for any number."""
        if self.step_tokens is not None:
            Range(1, MAX_SIZE, whole=True).check("step_tokens", self.step_tokens, ConfigError)
        self._initial: tuple[Tensor | float, ...] | None = None

    def start(self, batch: int) -> tuple[Tensor, ...]:
        """The memory that the module starts with."""
        if self.rows is None:
            return first_memory(self.module, batch)
        return tuple(x[:1].repeat(batch, *[1] * (x.ndim - 1)) for x in first_memory(self.module, self.rows))

    def restart_rows(self) -> None:
        """From now on a row whose position is 0 has the memory of `start`, whatever it was given."""
        self._initial = tuple(first if bool(first.any()) else 0.0 for first in self.start(1))

    def __call__(
        self, inputs: Mapping[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """Outputs by name, and the memory after the segment; any error of the module passes."""
        if self.rows is not None and len(positions) != self.rows:
            return self._in_turns(self.rows, inputs, positions, memory)
        if self.step_tokens is not None and positions.shape[1] > self.step_tokens:
            return self._in_pieces(self.step_tokens, inputs, positions, memory)
        if self._initial is not None:
            goes_on = positions[:, 0] > 0
            memory = [
                torch.where(goes_on.reshape(-1, *[1] * (past.ndim - 1)), past, first)
                for past, first in zip(memory, self._initial, strict=True)
            ]
        fed = next(iter(inputs.values())) if self._bare else inputs
        result = self.module.step(fed, positions, tuple(memory))
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor | Mapping):
            raise ArtefactError(
                f"{self.name}.step returns {type(result).__name__}; expected a pair: "
                f"{'logits' if self.language_model else 'outputs'} and memory."
            )
        outputs, after = result
        if isinstance(outputs, Tensor):
            outputs = {LOGITS if self.language_model else OUTPUT: outputs}
        if self.language_model and LOGITS not in outputs:
            raise ConfigError(
                f"the outputs of {self.name} are {sorted(map(str, outputs))!s:.200}; expected {LOGITS}, "
                "or a tensor instead of the dict."
            )
        for name, output in outputs.items():
            if not isinstance(output, Tensor):
                raise ConfigError(
                    f"output {name} of {self.name} is of type {type(output).__name__}; expected a tensor."
                )
        return dict(outputs), tuple(after)

    def _in_turns(
        self, rows: int, inputs: Mapping[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The same, computed `rows` rows at a time."""
        parts = []
        for first in range(0, len(positions), rows):
            row = torch.arange(first, first + rows).clamp(max=len(positions) - 1)
            fed = {name: x[row] for name, x in inputs.items()}
            outputs, after = self(fed, positions[row], tuple(x[row] for x in memory))
            count = min(rows, len(positions) - first)
            parts.append(({n: x[:count] for n, x in outputs.items()}, [x[:count] for x in after]))
        outputs = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
        return outputs, tuple(map(torch.cat, zip(*(after for _, after in parts), strict=True)))

    def _in_pieces(
        self, tokens: int, inputs: Mapping[str, Tensor], positions: Tensor, memory: Sequence[Tensor]
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The same, computed `tokens` tokens at a time."""
        parts: list[dict[str, Tensor]] = []
        for places in torch.split(torch.arange(positions.shape[1]), tokens):
            fed = {name: x[:, places] if self.inputs[name].timed else x for name, x in inputs.items()}
            outputs, memory = self(fed, positions[:, places], memory)
            parts.append({name: x for name, x in outputs.items() if name in self._outputs_with_tokens})
        # An output without a value for each token is the one of the last tokens.
        joined = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
        return {**outputs, **joined}, tuple(memory)

    @cached_property
    def _outputs_with_tokens(self) -> set[str]:
        """The outputs that have a value for each token, as the module's own steps of two lengths show."""
        longer = min(self.step_tokens or 1, 3)
        timed = []
        for count in (longer, max(1, longer - 1)):
            outputs = self._drawn(self.rows or 1, count)
            timed.append({name for name, x in outputs.items() if x.shape[1:2] == (count,)})
        return timed[0] & timed[1]

    def _drawn(self, batch: int, count: int) -> dict[str, Tensor]:
        """The outputs of a first step of random inputs."""
        drawn = {name: drawn_input(each, batch, count) for name, each in self.inputs.items()}
        positions = torch.arange(count).expand(batch, -1)
        with torch.no_grad(), in_a_sentence(self.module, "step", self.rows, **drawn, positions=positions):
            return self(drawn, positions, self.start(batch))[0]

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

    def signature(self, segment: int) -> Signature:
        """The inputs and outputs of a step that is no language model, of up to `segment` tokens.

        Two steps of different sizes show which sizes of an output are the batch and the number of tokens. If
        steps have only one token, a second size of 1 is their number.
        Raises ConfigError for outputs that no step has.
        """
        longer = min(segment, 3)
        shorter = max(1, longer - 1)
        batches = (2, 3) if self.rows is None else (self.rows, self.rows)
        found = [self._drawn(*sizes) for sizes in zip(batches, (longer, shorter), strict=True)]
        inputs = (*(each.tensor(name) for name, each in self.inputs.items()), positions_input())
        varying = [] if segment == 1 else [(longer, shorter)]
        outputs = []
        for name, first in found[0].items():
            other = found[1].get(name)
            kind = str(first.dtype).removeprefix("torch.")
            pairs: list[tuple[int, int]] = []
            if other is not None and other.ndim == first.ndim:
                pairs = list(zip(first.shape, other.shape, strict=True))
            fits = pairs[:1] == [batches] and all(a == b or (a, b) in varying for a, b in pairs[1:])
            if not fits or kind not in ("float32", "int64"):
                raise ConfigError(
                    f"output {name} of {self.name} is {kind} {list(first.shape)} with batch {batches[0]} "
                    f"and {longer} tokens; expected float32 or int64, [batch, tokens, …] or [batch, …], "
                    "whose other sizes are the same in every step."
                )
            shape = ["batch", *("tokens" if pair in varying else pair[0] for pair in pairs[1:])]
            if segment == 1 and shape[1:2] == [1]:
                shape[1] = "tokens"
            dtype: Literal["float32", "int64"] = "int64" if kind == "int64" else "float32"
            outputs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(shape)))
        signature = inputs, tuple(outputs)
        refuse_signature(signature)
        return signature


def drawn_input(given: Input, batch: int, count: int, seed: int = 0) -> Tensor:
    """Random values of an input for `count` tokens."""
    draw = torch.Generator().manual_seed(seed)
    shape = (batch, *([count] if given.timed else []), *given.sizes)
    if given.ids is not None:
        return torch.randint(given.ids, shape, generator=draw)
    return torch.randn(shape, generator=draw)
