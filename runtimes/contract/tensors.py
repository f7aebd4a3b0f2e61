"""The tensors of a step graph, and the memory tensors that follow from a model, its rule and a memory
form.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import numpy as np

from runtimes.base.element_types import ELEMENT_TYPES, ElementName
from runtimes.base.errors import ConfigError
from runtimes.base.ranges import Range
from runtimes.base.records import Word
from runtimes.contract.model_facts import MAX_LAYERS, MAX_SIZE, ModelFacts, Positive, Size
from runtimes.contract.precision import MemoryType
from runtimes.contract.rule import MemoryRule

SCALE = "_scale"  # the end of the names of the scales of a memory tensor of bytes
MAX_SCALE = float(np.finfo(np.float32).max) / 128  # with a larger one, the bytes would not be finite numbers
GROUP_STEP = 64  # tokens; heads whose spans differ by less share their memory tensors
MAX_SHAPE = 2 * MAX_SIZE  # the slots of a ring
MAX_ROW_BYTES = 10**12  # of all memory tensors of one row
MAX_VALUE = 10**9  # numbers of one value of a named input or output
MAX_STATES = 4 * MAX_LAYERS  # memory tensors that a module defines itself
MAX_AXES = 8  # of such a tensor, and of a named input or output
# Of an input or output that a module names; names of memory tensors have a dot.
NAME = Word(
    "letters, digits, _ and -",
    string.ascii_letters + "_",
    string.ascii_letters + string.digits + "_-",
)
POSITIONS = "position_ids"  # the input that every step has
Form = Literal["ring", "shift", "hidden"]
FORMS: tuple[Form, ...] = get_args(Form)
AnyForm = Literal[Form, "own"]
Shapes = tuple[tuple[Size, ...], ...]  # of memory tensors, without the axis of the batch


@dataclass(frozen=True, kw_only=True)
class FormFacts:
    """What is particular to a form of memory. Ask for these facts; compare names only to choose a form."""

    holds: Literal["keys", "hidden", "own"]
    """Keys and values of each group of heads, the inputs of each layer, or whatever a traced module defines.
    Only the spec of the last one has shapes; other tensors follow from the model.
    """
    tensors: tuple[tuple[str, str], ...]
    """Each tensor of a group of heads, or of a number in `Spec.memory_shapes`: the names of the input and of
    the output.
    """
    axes: tuple[str, ...] = ()
    """The sizes of such a tensor for one row, by the names in `_sizes`."""
    circular: bool = False
    """Whether a step writes a token to the slot of its position modulo S. Then nothing moves, and every row
    may be anywhere. In other memory a step moves the tokens of all rows by the same number of places.
    """


# The names that onnxruntime-genai expects. {} is the name of the group.
KEYS = (
    ("past_key_values.{}.key", "present.{}.key"),
    ("past_key_values.{}.value", "present.{}.value"),
)
FORM_FACTS: dict[AnyForm, FormFacts] = {
    "ring": FormFacts(holds="keys", tensors=KEYS, axes=("heads", "slots", "head_dim"), circular=True),
    "shift": FormFacts(holds="keys", tensors=KEYS, axes=("heads", "mem_len", "head_dim")),
    "hidden": FormFacts(
        holds="hidden", tensors=(("past_hidden.{}", "present_hidden.{}"),), axes=("mem_len", "d_model")
    ),
    "own": FormFacts(holds="own", tensors=(("past_state.{}", "present_state.{}"),)),
}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One input or output of a step graph, as `spec.json` lists it."""

    name: str
    dtype: ElementName
    shape: tuple[Annotated[int, Range(0, MAX_SHAPE, whole=True)] | str, ...]
    """Sizes of the axes; `batch`, `tokens` or `rows` for the axes that vary."""
    ids: Positive | None = None
    """Number of different ids, for an input of ids in a step that is no language model."""
    present: str | None = None
    """Output of the same type and shape that the next step reads in place of this input, if the input is
    memory.
    """
    when: str | None = field(default=None, compare=False)
    """One sentence on when the tensor is needed, if a step may do without it."""

    @property
    def is_scale(self) -> bool:
        """Whether it holds the scales of a memory tensor of bytes."""
        return self.name.startswith("past_key_values.") and self.name.endswith(SCALE)

    @property
    def row(self) -> tuple[int, ...]:
        """The sizes of a memory tensor for one row."""
        return tuple(map(int, self.shape[1:]))

    def sizes(self, **axes: int) -> tuple[int, ...]:
        """The shape as numbers, with these sizes for its named axes."""
        return tuple([axes[size] if isinstance(size, str) else size for size in self.shape])

    def to_json(self) -> dict[str, Any]:
        """The entry as it is written, without what does not apply."""
        return {name: value for name, value in self.__dict__.items() if value is not None}


# What may be left out of a step of a graph with a large vocabulary, and when it is needed.
OPTIONAL_WHEN = {
    "targets": "Give the next tokens whose log-probabilities are wanted, and -1 everywhere else.",
    "logit_rows": "Give b * T + t of each token whose whole distribution is wanted; the list may be empty.",
    "logits": "Read it if logit_rows is not empty.",
    "log_probs": "Read it if targets holds a token.",
}

Signature = tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]  # inputs and outputs, in order


def refuse_signature(signature: Signature) -> None:
    """Raises ConfigError for inputs or outputs that no step has (see docs/reference/step.md)."""
    inputs, outputs = signature
    if len(inputs) < 2 or not outputs or inputs[-1] != positions_input():
        raise ConfigError(f"a step has at least one input and one output, and its last input is {POSITIONS}.")
    names = [tensor.name for tensor in (*inputs, *outputs)]
    for tensor in (*inputs[:-1], *outputs):
        sizes = tensor.shape[1:]
        if tensor.name not in NAME or names.count(tensor.name) > 1:
            raise ConfigError(
                f"{tensor.name!r:.60} is not the name of one input or output; expected {NAME.expected}, "
                "and each name once."
            )
        numbers = sizes[1:] if sizes[:1] == ("tokens",) else sizes
        sound = len(tensor.shape) <= MAX_AXES and all(
            isinstance(size, int) and 1 <= size <= MAX_SIZE for size in numbers
        )
        sound = sound and math.prod(map(int, numbers)) <= MAX_VALUE
        if tensor.shape[:1] != ("batch",) or not sound:
            raise ConfigError(
                f"{tensor.name} is {list(tensor.shape)!s:.80}; expected batch, then tokens if it has a value "
                f"for each, then at most {MAX_AXES - 2} sizes from 1 to {MAX_SIZE} and {MAX_VALUE} numbers."
            )
        if tensor.ids is not None and not (1 <= tensor.ids <= MAX_SIZE and tensor.dtype == "int64"):
            raise ConfigError(
                f"{tensor.name} has {tensor.ids} ids of {tensor.dtype}; expected int64 and 1 or more."
            )
    if not all(tensor.dtype == ("float32" if tensor.ids is None else "int64") for tensor in inputs[:-1]):
        raise ConfigError("an input is neither float32 nor ids.")
    if not any("tokens" in tensor.shape for tensor in inputs[:-1]):
        raise ConfigError("no input has a value for each token; give at least one that is no constant.")
    if not all(tensor.dtype in ("float32", "int64") for tensor in outputs):
        raise ConfigError("an output is neither float32 nor int64.")


def positions_input() -> TensorSpec:
    """The stream position of each token, which a session adds to the inputs of every step."""
    return TensorSpec(name=POSITIONS, dtype="int64", shape=("batch", "tokens"))


def language_model_tensors(model: ModelFacts) -> Signature:
    """The inputs and outputs of a language model.

    inputs: tokens and positions; with a large vocabulary (`ModelFacts.selective`) `targets`, the tokens whose
    log-probability is wanted (-1 for none), and `logit_rows`, the positions whose logits are wanted, as
    b T + t for row b and token t. outputs: logits, with a large vocabulary log-probabilities.
    """
    selective = model.selective

    def tensor(name: str, dtype: Literal["int64", "float32"], *shape: int | str) -> TensorSpec:
        return TensorSpec(
            name=name, dtype=dtype, shape=shape, when=OPTIONAL_WHEN.get(name) if selective else None
        )

    each = ("batch", "tokens")
    inputs = [tensor("input_ids", "int64", *each), positions_input()]
    outputs = [tensor("logits", "float32", *(["rows"] if selective else each), model.vocab_size)]
    if selective:
        inputs += [tensor("targets", "int64", *each), tensor("logit_rows", "int64", "rows")]
        outputs.append(tensor("log_probs", "float32", *each))
    return tuple(inputs), tuple(outputs)


@dataclass(frozen=True, kw_only=True)
class HeadGroup:
    """Heads of one layer that share memory tensors."""

    name: str
    """The number of the layer, and of the group if the layer has several; in the names of its tensors."""
    heads: Sequence[int]
    mem_len: int
    """The longest span among the heads."""


def head_groups(model: ModelFacts, rule: MemoryRule, form: AnyForm) -> tuple[tuple[HeadGroup, ...], ...]:
    """The context heads of each layer in groups of similar span, the group with the longest span first.

    Without learned spans a layer has one group, which has the whole memory. A group ends before a head that
    needs less than half of its memory and at least `GROUP_STEP` tokens less. Hidden states are not split into
    heads, so they have one group.
    """
    if not model.reaches:
        everything = range(model.context_heads)
        return tuple(
            (HeadGroup(name=f"{layer}", heads=everything, mem_len=rule.mem_len),)
            for layer in range(model.layers)
        )
    splits = FORM_FACTS[form].holds == "keys"
    layers = []
    for layer, reaches in enumerate(model.reaches):
        spans = [min(reach, rule.mem_len) for reach in reaches]
        groups: list[list[int]] = []
        for head in sorted(range(model.context_heads), key=lambda head: -reaches[head]):
            longest = spans[groups[-1][0] if groups else head]
            if not groups or (splits and 2 * spans[head] < longest and longest - spans[head] >= GROUP_STEP):
                groups.append([])
            groups[-1].append(head)
        layers.append(
            tuple(
                HeadGroup(
                    name=f"{layer}" if len(groups) == 1 else f"{layer}.{number}",
                    heads=heads,
                    mem_len=spans[heads[0]],
                )
                for number, heads in enumerate(groups)
            )
        )
    return tuple(layers)


def state_tensors(
    model: ModelFacts, rule: MemoryRule, form: AnyForm, dtype: MemoryType = "float32", shapes: Shapes = ()
) -> tuple[TensorSpec, ...]:
    """The memory tensors of a form, layer by layer.

    shapes: tensors of the form `own`, in order. They must be empty with every other form, whose tensors
    follow from the model. Raises ConfigError if they are not, and for sizes that no memory has.

    dtype: the type of keys and values. A type with scales, such as int8, is for rings; each tensor of it is
    followed by its scales, float32 [B, H, S, 1].

    ring: keys and values [B, H, S, K]. shift: keys and values [B, H, M, K]. hidden: layer inputs [B, M, D]. M
    and S follow from the longest span of the head group. If a layer has several head groups, the names have
    the number of the group.
    """
    facts = FORM_FACTS[form]
    scaled = ELEMENT_TYPES[dtype].scaled
    if scaled and not facts.circular:
        raise ConfigError(
            f"only ring memory can be {dtype}, and this memory is {form}; give memory in fp16, or ring "
            "memory."
        )
    own = facts.holds == "own"
    if shapes and not own:
        raise ConfigError(f"memory_shapes is given with {form} memory, whose tensors follow from its model.")
    if len(shapes) > MAX_STATES or any(len(shape) > MAX_AXES for shape in shapes):
        raise ConfigError(
            f"memory_shapes has {len(shapes)} tensors, the largest of {max(map(len, shapes))} axes; expected "
            f"at most {MAX_STATES} of {MAX_AXES}."
        )
    rows = [(f"{number}", shape) for number, shape in enumerate(shapes)]
    if not own:
        groups = itertools.chain(*head_groups(model, rule, form))
        rows = [(group.name, _sizes(model, rule, group, facts.axes)) for group in groups]
    states = []
    for group_name, row in rows:
        for past, present in facts.tensors:
            past, present = past.format(group_name), present.format(group_name)
            states.append(TensorSpec(name=past, present=present, dtype=dtype, shape=("batch", *row)))
            if scaled:
                shape: tuple[int | str, ...] = ("batch", *row[:-1], 1)
                states.append(
                    TensorSpec(name=past + SCALE, present=present + SCALE, dtype="float32", shape=shape)
                )
    if row_bytes(states) > MAX_ROW_BYTES:
        raise ConfigError(f"the memory of one row has {row_bytes(states):,} bytes; expected at most 10^12.")
    return tuple(states)


def _sizes(model: ModelFacts, rule: MemoryRule, group: HeadGroup, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of these axes of a memory tensor."""
    sizes = {
        "heads": len(group.heads),
        "mem_len": group.mem_len,
        "slots": group.mem_len + rule.segment,
        "head_dim": model.head_dim,
        "d_model": model.d_model,
    }
    return tuple(sizes[axis] for axis in axes)


def bytes_saved(model: ModelFacts, rule: MemoryRule, form: AnyForm) -> int:
    """The bytes of float32 memory that learned spans save each row, against heads that all remember
    `mem_len` tokens.
    """
    whole = state_tensors(dataclasses.replace(model, reaches=()), rule, form)
    return row_bytes(whole) - row_bytes(state_tensors(model, rule, form))


def row_bytes(states: Iterable[TensorSpec]) -> int:
    """The bytes that memory tensors take for one row."""
    return sum(math.prod(state.row) * np.dtype(state.dtype).itemsize for state in states)
