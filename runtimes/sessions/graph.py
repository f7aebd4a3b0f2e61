"""What ONNX Runtime and TensorRT share: the session protocol over a step graph whose tensors the spec
names.
"""

from __future__ import annotations

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from runtimes.base.errors import ArtefactError, StreamError
from runtimes.base.logits import log_probability
from runtimes.contract.checks import (
    as_array,
    checked_inputs,
    checked_lengths,
    checked_targets,
    checked_tokens,
    last_fed,
    new_memory,
    refuse_after_fork,
    tokens_by_name,
    value_range,
)
from runtimes.contract.memory import MAX_BATCH, MAX_POSITION, Held, Memory, refuse_no_memory
from runtimes.contract.promises import refuse_unpromised
from runtimes.contract.rule import MemoryRule
from runtimes.contract.sampling import Sampler
from runtimes.contract.session import Paths
from runtimes.contract.spec import VOCAB, Spec, refuse_no_language_model
from runtimes.contract.tensors import POSITIONS, TensorSpec, row_bytes
from runtimes.contract.vocabulary import Vocab

Positions = Literal["all", "last", "none"]  # positions of a segment whose logits are computed
Arrays = dict[str, np.ndarray]
MAX_KEPT_BYTES = 1 << 18  # bytes of outputs of a step; copying more would cost more than binding them again


class GraphSession(ABC):
    """The session protocol (see `runtimes.contract.session.Session`); a runtime adds how the graph runs once.

    A graph with a large vocabulary computes logits only for chosen rows ("selective",
    `ModelFacts.selective`).
    """

    # Positions whose logits a selective graph computes while scoring, which reads none: as few as the
    # runtime allows.
    logits_while_scoring: ClassVar[Positions] = "none"
    before_run: Callable[[], object] | None = None

    def __init__(self, spec: Spec, vocab: Vocab | None, identity: str) -> None:
        self.spec = spec
        self._vocab = vocab  # None unless the step is a language model's
        self.identity = identity
        self.memory_identity = spec.memory_identity
        self.process = os.getpid()
        self.rule: MemoryRule = spec.rule
        self.pads_right = spec.pads_right
        self.sampler = Sampler()
        # Read for each token.
        self._selective = spec.model.selective
        self._in_place = spec.in_place
        self.state: tuple[TensorSpec, ...] = spec.state
        # The numbers of slots of rings that a step may not write across.
        self._ring_sizes = {state.row[1] for state in spec.state} if spec.linear_ring else set[int]()
        # The numbers of tokens of several graphs, the largest first; empty if there is one graph.
        self._token_counts = tuple(spec.token_graphs)
        if vocab is not None and vocab.size != spec.model.vocab_size:
            raise ArtefactError(
                f"{VOCAB} has {vocab.size} symbols and the model {spec.model.vocab_size}; export it again."
            )

    @cached_property
    def vocab(self) -> Vocab:
        if self._vocab is None:
            refuse_no_language_model(self.spec)
            raise AssertionError("the vocabulary of a language model was not loaded")
        return self._vocab

    @property
    def paths(self) -> Paths | None:
        """None: there is one way to compute a step, unless a session overrides this."""
        return None

    @property
    @abstractmethod
    def computed_by(self) -> str:
        """What computes a step, in words for people."""

    @property
    def kernel(self) -> str | None:
        """The implementation that computes a step, if the runtime has several."""
        return None

    @abstractmethod
    def run(self, inputs: Arrays, outputs: Arrays, memory: Memory) -> None:
        """Runs the graph once: reads `inputs` and the memory's tensors, fills `outputs` and advances the
        tensors. It calls `begins` as late as possible before the computation.

        A step that repeats the last one passes the same two dicts of the same arrays, over the same memory.
        """

    def scorer(self, logits: np.ndarray, targets: np.ndarray) -> Callable[[], np.ndarray]:
        """A function that returns log p(target) [B, T] of what these arrays hold when it is called.

        logits: float32 [B, T, V]. targets: int64 [B, T]; a target of -1 gives 0.
        """
        return lambda: log_probability(logits, targets)

    def begins(self) -> None:
        """Called by `run` when only the computation is left."""
        if self.before_run is not None:
            self.before_run()

    def with_rule(self, rule: MemoryRule) -> GraphSession:
        own = self.rule
        if rule == own:
            return self
        if rule.segment > own.segment:
            raise StreamError(
                f"segment is {rule.segment}; this artefact takes at most {own.segment} tokens per step: give "
                "a smaller one, or export with a larger --segment."
            )
        name = "mem_len" if rule.mem_len != own.mem_len else "clamp_len"
        option = f"--{name.replace('_', '-')}"
        wanted = getattr(rule, name)
        fixed = getattr(own, name)
        raise StreamError(
            f"{option} is {'none' if wanted is None else wanted} and this artefact was exported with "
            f"{'none' if fixed is None else fixed}, which is fixed in its graph: export again with {option} "
            f"{wanted or 0}, or give the run that it was made from."
        )

    def step_bytes(self, *, segment: int) -> int:
        state = row_bytes(self.state)
        logits = 4 * segment * self.spec.model.vocab_size
        return 2 * state + 3 * logits  # memory before and after the step; logits, and two arrays made of them

    def most_rows(self, tokens: int) -> int:
        """The most rows of a step of that many tokens."""
        return self.spec.fixed_rows or (1 if "rows" in self.spec.without else MAX_BATCH)

    def start(self, batch: int) -> Memory:
        return new_memory(self, batch)

    def step(self, tokens: Any, memory: Memory, *, lengths: np.ndarray | None = None) -> tuple[Any, Memory]:
        if self._vocab is None or isinstance(tokens, dict):
            return self._step_by_name(tokens, memory, lengths), memory
        return self._advance({"input_ids": tokens}, memory, lengths)["logits"], memory

    def predict(
        self, tokens: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        if self._vocab is None:
            refuse_no_language_model(self.spec)
        return self._advance({"input_ids": tokens}, memory, lengths, logits_of="last")["logits"], memory

    def score(
        self, tokens: np.ndarray, targets: np.ndarray, memory: Memory, *, lengths: np.ndarray | None = None
    ) -> tuple[np.ndarray, Memory]:
        if self._vocab is None:
            refuse_no_language_model(self.spec)
        given = {"input_ids": tokens, "targets": targets}
        logits_of = self.logits_while_scoring if self._selective else "all"
        return self._advance(given, memory, lengths, logits_of=logits_of)["log_probs"], memory

    def _step_by_name(self, inputs: Any, memory: Memory, lengths: np.ndarray | None) -> Any:
        """Outputs by name of inputs by name; of an array the array of the only output."""
        spec = self.spec
        fed, returned = spec.signature
        if not isinstance(inputs, dict):
            if len(fed) != 2 or len(returned) != 1:  # one input and the positions
                names = [tensor.name for tensor in fed[:-1]], [tensor.name for tensor in returned]
                raise StreamError(
                    f"the step reads {names[0]} and returns {names[1]}; give a dict with an array for each "
                    "input, and the outputs are a dict too."
                )
            return self._step_by_name({fed[0].name: inputs}, memory, lengths)[returned[0].name]
        if spec.language_model:
            return self._advance({"input_ids": tokens_by_name(inputs)}, memory, lengths)
        if lengths is not None:
            raise StreamError(
                "lengths were given, and only the step of a language model takes them; feed rows of equal "
                "length, or give each stream a memory of its own."
            )
        return self._advance(inputs, memory)

    def _advance(
        self,
        given: dict[str, Any],
        memory: Memory,
        lengths: np.ndarray | None = None,
        *,
        logits_of: Positions = "all",
    ) -> Arrays:
        """The outputs of a step by name; advances the memory.

        given: inputs by name. The logits of a language model are [B, T, V] of all positions, [B, V] of each
        row's last one, or [0, V].
        """
        refuse_no_memory(memory)
        with memory.in_use():
            step: Step | None = memory.step
            if step is None or lengths is not None or not step.refill(self, given, memory, logits_of):
                step = self._new_step(given, memory, lengths, logits_of)
            self._run_whole(step, memory)
            if step.begin is None:
                memory.positions += step.counts
            else:
                memory.positions.fill(step.begin + step.length)  # in a fraction of the time of the sum
            # The logits show what a ring holds. Other outputs may be ids, or not read the memory.
            if not (self.spec.circular and step.is_finite()):
                memory.unsure = True
            if step is not memory.step or not self._in_place:  # or else its arrays are as before
                memory.step = step if step.kept else None
                step.held = memory.objects()
            return step.answers()

    def _new_step(
        self, given: dict[str, Any], memory: Memory, lengths: np.ndarray | None, logits_of: Positions
    ) -> Step:
        """A step of these inputs; raises StreamError if they or the memory do not fit."""
        targets = None
        if self.spec.language_model:
            tokens = given["input_ids"]
            inputs = {"input_ids": checked_tokens(self, tokens, memory)}
            if "targets" in given:
                targets = checked_targets(self, given["targets"], tokens, lengths)
        else:
            inputs = checked_inputs(self, self.spec, given, memory)
        refuse_after_fork(self.process)
        if lengths is not None:
            if fault := self.spec.lengths_fault:
                raise StreamError(
                    f"lengths were given, and {fault}; leave lengths out, or give each stream its own memory."
                )
            lengths = checked_lengths(lengths, inputs["input_ids"])
        if lengths is not None:
            # Padding after a row's tokens needs no input of its own. A token sees nothing that comes after
            # it. The ring has room for a whole segment next to a whole memory, so the padding uses no slot
            # that is still visible; the row's next tokens overwrite its slots, or see them as the future.
            inputs["input_ids"] = _padded(inputs["input_ids"], lengths)
        memory.clear_restarted_rows()
        kind = Step if lengths is None else PaddedStep
        return kind(self, inputs, memory, targets=targets, lengths=lengths, logits_of=logits_of)

    def _run_whole(self, step: Step, memory: Memory) -> None:
        """Runs the graph over a whole segment, in pieces if its ring cannot be written across its end, or if
        no graph takes that many tokens.
        """
        empty_rows = self.logits_while_scoring == "none"
        if self._token_counts and step.length not in self._token_counts:
            pieces = largest_first(step.length, self._token_counts)
        elif self._ring_sizes and step.length > 1:
            pieces = cut(memory.positions, step.length, self._ring_sizes)
        elif not empty_rows and not all(x.size for x in step.outputs.values()):
            pieces = [slice(0, step.length)]  # no row has a token, so no logits are wanted
        else:
            self.run(step.inputs, step.outputs, memory)
            return
        parts = in_pieces(self.spec, step.inputs, step.outputs, pieces, empty_rows=empty_rows)
        seen = 0  # tokens that the memory has seen
        try:
            for piece, (part, answers) in zip(pieces, parts, strict=True):
                self.run(part, answers, memory)
                seen = piece.stop
        except BaseException:
            if not self.spec.circular:  # of a ring the same slots are written again
                memory.positions += seen
                memory.unsure = True
            raise


class Step:
    """One step: the arrays that its graph reads and writes, and the answers that are made of them.

    A text is generated in thousands of steps of one kind. So a memory keeps its last step, and a step of the
    same kind fills those arrays again (`refill`), which the runtime has bound already.
    """

    def __init__(
        self,
        session: GraphSession,
        given: Arrays,
        memory: Memory,
        *,
        targets: np.ndarray | None,
        lengths: np.ndarray | None,
        logits_of: Positions,
    ) -> None:
        """given: the inputs, without the positions; they and the rest fit together."""
        spec = session.spec
        self._session = session
        self._logits_of = logits_of
        self.length = next(given[x.name].shape[1] for x in spec.signature[0] if "tokens" in x.shape)
        """Tokens of each row, padding included."""
        self.counts = np.full(memory.batch, self.length) if lengths is None else lengths
        """Number of tokens by which each row advances, int64 [B]."""
        self.begin: int | None = None
        """The position at which all rows begin; None if they differ, or were not compared."""
        # The next tokens to score, int64 [B, T]; None if nothing is scored.
        self._targets = None if targets is None else targets.copy()
        self.inputs = {name: array.copy() for name, array in given.items()}
        """What the graph reads."""
        sizes = {"batch": memory.batch, "tokens": self.length}
        if spec.model.selective:
            shape = (memory.batch, self.length)
            self.inputs["targets"] = np.full(shape, -1) if self._targets is None else self._targets
            self.inputs["logit_rows"] = _chosen(shape, lengths, logits_of)
            sizes["rows"] = len(self.inputs["logit_rows"])
        # The positions of single tokens are the memory's own array.
        positions = memory.positions[:, None]
        self.inputs[POSITIONS] = positions if self.length == 1 else positions + np.arange(self.length)
        self.outputs = {x.name: np.empty(x.sizes(**sizes), x.dtype) for x in spec.signature[1]}
        """What the graph writes."""
        # Returns the log-probabilities of the targets, if the graph does not compute them.
        self._score: Callable[[], np.ndarray] | None = None
        if self._targets is not None and "targets" not in self.inputs:
            self._score = session.scorer(self.outputs["logits"], self._targets)
        self.kept = lengths is None and sum(array.nbytes for array in self.outputs.values()) <= MAX_KEPT_BYTES
        """Whether another step may fill the arrays again."""
        self.held: Held
        """What the memory consists of after the step."""
        # What `refill` fills: name, array, and the lowest and highest number of ids.
        self._filled: list[tuple[str, np.ndarray, tuple[int, int] | None]] = []
        if spec.language_model:
            last = spec.model.vocab_size - 1
            self._filled.append(("input_ids", self.inputs["input_ids"], (0, last)))
            if self._targets is not None:
                self._filled.append(("targets", self._targets, (-1, last)))
        else:
            for x in spec.signature[0][:-1]:  # without the positions
                self._filled.append((x.name, self.inputs[x.name], None if x.ids is None else (0, x.ids - 1)))

    def refill(
        self, session: GraphSession, given: dict[str, Any], memory: Memory, logits_of: Positions
    ) -> bool:
        """Fills the arrays with the inputs of another step. Returns False for a step of another kind, and for
        what does not fit, which is refused when a new step is made of it.
        """
        same = (
            session is self._session
            and logits_of == self._logits_of
            and len(given) == len(self._filled)
            and memory.holds(self.held)
            and os.getpid() == session.process
        )
        if not same:
            return False
        for name, array, ids in self._filled:
            values = given.get(name)
            if not isinstance(values, np.ndarray):
                values = as_array(values)
            if values.shape != array.shape or values.dtype.kind not in ("iu" if ids else "fiu"):
                return False
            if ids:
                lowest, highest = value_range(values)
                if lowest < ids[0] or highest > ids[1]:
                    return False
                array[...] = values
            else:
                with np.errstate(over="ignore"):
                    array[...] = values
                if not _is_finite(array):
                    return False
        first, last = value_range(memory.positions)
        if first < -MAX_POSITION or last > MAX_POSITION:
            return False
        self.begin = first if first == last else None
        if session.spec.without:
            refuse_unpromised(session.spec.without, memory.positions, session.rule.segment)
        if self.length > 1:
            np.add(memory.positions[:, None], np.arange(self.length), out=self.inputs[POSITIONS])
        if first <= 0:
            memory.clear_restarted_rows()
        return True

    def answers(self) -> Arrays:
        """The outputs by name, for the caller to keep."""
        if self._score is not None:
            return {"log_probs": self._score()}
        if self.kept:
            return {name: array.copy() for name, array in self._shaped.items()}
        return self._shaped

    def is_finite(self) -> bool:
        """Whether the last logits of every row with tokens were computed and are finite.

        A visible value that is not finite makes every later output of its row NaN, so the last is enough.
        """
        if self._logits_of == "none":
            rows = np.flatnonzero(self.counts)
            last = rows, self.counts[rows] - 1
            wanted = (self.inputs["targets"][last] >= 0).all()
            return bool(wanted) and _is_finite(self.outputs["log_probs"][last])
        shown = self._shown
        for numbers in shown:  # a loop, because it is faster than `all`
            if not _is_finite(numbers):
                return False
        return bool(shown)

    @property
    def _enough(self) -> slice:
        """The logits that are NaN if any is: the first, unless a traced module replaces some by constants."""
        return slice(1 if self._session.spec.exporter == "graph" else None)

    @cached_property
    def _shaped(self) -> Arrays:
        """The outputs in the shapes of the answers, over the same numbers."""
        shaped = dict(self.outputs)
        if self._session.spec.model.selective:
            logits = shaped["logits"]
            rows = {"all": (-1, self.length), "last": (-1,), "none": (0,)}[self._logits_of]
            shaped["logits"] = logits.reshape(*rows, logits.shape[-1])
        elif self._logits_of == "last":
            shaped["logits"] = shaped["logits"][:, -1]
        return shaped

    @cached_property
    def _shown(self) -> list[np.ndarray]:
        """The last logits of each row, over the same numbers."""
        logits = self._shaped["logits"][..., self._enough]
        return [logits[:, -1] if self._logits_of == "all" else logits]


class PaddedStep(Step):
    """A step whose rows have unequal numbers of tokens: each row ends in padding, whose logits are NaN."""

    @cached_property
    def _shaped(self) -> Arrays:
        shaped = dict(self.outputs)
        logits = shaped["logits"]
        fed = np.arange(self.length) < self.counts[:, None]
        if not self._session.spec.model.selective:
            logits[~fed] = np.nan
            if self._logits_of == "last":
                shaped["logits"] = logits[range(len(logits)), last_fed(self.counts, fed)]
        elif self._logits_of != "none":
            places = fed if self._logits_of == "all" else self.counts > 0
            shaped["logits"] = np.full((*places.shape, logits.shape[-1]), np.nan, np.float32)
            shaped["logits"][places] = logits
        return shaped

    @cached_property
    def _shown(self) -> list[np.ndarray]:
        logits = self.outputs["logits"][..., self._enough]
        if self._session.spec.model.selective:
            return [logits[np.flatnonzero(np.diff(self.inputs["logit_rows"] // self.length, append=-1))]]
        # What is not finite in padding counts too: it stays in the memory.
        rows = np.flatnonzero(self.counts)
        return [logits[:, -1], logits[rows, self.counts[rows] - 1]]


def _is_finite(numbers: np.ndarray) -> bool:
    """Whether all numbers are finite. `argmax` finds a NaN first; `isfinite` takes several times as long."""
    if numbers.size <= 1:
        return numbers.size == 0 or math.isfinite(numbers.item())
    return math.isfinite(numbers.item(numbers.argmax())) and math.isfinite(numbers.item(numbers.argmin()))


def _chosen(shape: tuple[int, ...], lengths: np.ndarray | None, which: Positions) -> np.ndarray:
    """The positions b T + t, int64 [N], of some fed tokens of a segment [B, T]."""
    places = np.arange(shape[0] * shape[1]).reshape(shape)
    if which == "none":
        places = places[:, :0]
    elif lengths is None:
        places = places if which == "all" else places[:, -1:]
    else:
        end = lengths[:, None]
        offsets = np.arange(shape[1])
        places = places[offsets < end] if which == "all" else places[offsets == end - 1]
    return places.ravel()


def _padded(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The tokens [B, T] with the last real one of each row as its padding, or 0 if a row has none.

    So nothing depends on what the caller has put there, and a row's results depend only on its own tokens.
    """
    last = np.where(lengths > 0, tokens[np.arange(len(tokens)), last_fed(lengths, tokens)], 0)
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, last[:, None])


def largest_first(length: int, counts: Collection[int]) -> list[slice]:
    """The pieces of a segment of `length` tokens for graphs of these numbers of tokens, the largest first."""
    pieces = []
    at = 0
    for count in counts:
        while at + count <= length:
            pieces.append(slice(at, at + count))
            at += count
    return pieces


def cut(positions: np.ndarray, length: int, slots: Collection[int]) -> list[slice]:
    """The pieces of a segment of `length` tokens, in order, none of which is written across the end of any
    ring in any row (`Spec.linear_ring`). Under the mask `same-length` cutting a segment changes no score.

    positions: int64 [B], of each row's first token. slots: the numbers of slots of the model's rings.
    """
    ends = {length}
    for size in slots:
        turn = size - positions % size  # in how many tokens each row comes to the end of its ring
        for first in np.unique(turn).tolist():
            ends.update(range(first, length, size))
    edges = [0, *sorted(ends)]
    return [slice(start, stop) for start, stop in itertools.pairwise(edges)]


def in_pieces(
    spec: Spec, inputs: Arrays, outputs: Arrays, pieces: list[slice], *, empty_rows: bool
) -> Iterator[tuple[Arrays, Arrays]]:
    """Inputs and outputs of the pieces of a segment [B, T, …] in order, each to be run before the next.

    The pieces' outputs fill the segment's. A piece that fails leaves a ring usable: it has written only slots
    that are not visible from the positions of the memory, and the same tokens are written there again.

    empty_rows: whether a selective graph can compute the logits of no position. If it cannot, it computes the
    logits of each row's last one, which are dropped.
    """
    timed = {x.name for side in spec.signature for x in side if "tokens" in x.shape}
    selective = spec.model.selective
    if selective:
        shape = inputs["input_ids"].shape
        chosen = np.zeros(shape, bool)  # the positions whose logits are wanted
        chosen.ravel()[inputs["logit_rows"]] = True
        number = np.cumsum(chosen).reshape(shape) - 1  # of a chosen position among all of them
    for piece in pieces:
        part = {n: np.ascontiguousarray(x[:, piece]) if n in timed else x for n, x in inputs.items()}
        answers = {n: np.empty_like(x[:, piece]) if n in timed else x for n, x in outputs.items()}
        if selective:
            wanted = chosen[:, piece]
            rows = np.flatnonzero(wanted)
            if not (rows.size or empty_rows):
                rows = np.arange(1, len(wanted) + 1) * wanted.shape[1] - 1
            part["logit_rows"] = rows
            answers["logits"] = np.empty((rows.size, *outputs["logits"].shape[1:]), np.float32)
        yield part, answers
        for name in timed & outputs.keys():
            outputs[name][:, piece] = answers[name]
        if selective and wanted.any():
            outputs["logits"][number[:, piece][wanted]] = answers["logits"]
